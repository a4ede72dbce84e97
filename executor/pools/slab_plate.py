"""The content of a slab's nameplate, by which `envherd top` finds and reads the slab."""

import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from envherd.shm import nameplate
from envherd.shm.interrupts import ignoring_refusals
from envherd.shm.slab import SlabPlan

LABEL = "envherd-slab"
SCHEMA = "envherd.slab/2"
#: Bytes for the text that is known only after the slab was created.
_PATH_BYTES = 512


def describe(
    plan: SlabPlan,
    blocks: Sequence[Sequence[int]],
    family: str,
    gpus: Sequence[str | None],
) -> dict[str, Any]:
    """Return the content of the nameplate of a slab of this process.

    Args:
        plan: of the slab.
        blocks: env ids of each worker.
        family: of the envs.
        gpus: of each worker.
    """
    return {
        "schema": SCHEMA,
        "pid": os.getpid(),
        "namespace": namespace(),
        "made_at": time.time(),
        "env": family,
        "path": " " * _PATH_BYTES,
        "blocks": [list(block) for block in blocks],
        "gpus": list(gpus),
        "words": {
            field.name[0]: [field.offset, field.shape[0]] for field in plan.words
        },
        "nbytes": plan.words.nbytes,
    }


def show_path(buffer: np.ndarray, path: str) -> None:
    """Write which calls are made in C to the nameplate of a slab; a long text is cut."""
    # `"` and `\\` take two.
    nameplate.change(
        buffer,
        path=path.encode("ascii", "replace").decode()[: _PATH_BYTES // 2],
    )


def namespace() -> str:
    """Return the name of this process's pid namespace; empty without /proc."""
    with ignoring_refusals():
        return os.readlink("/proc/self/ns/pid")
    return ""
