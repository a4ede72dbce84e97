"""GPUs that this process may use, and their memory; finding them opens no CUDA context if `nvidia-smi` answers."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from envherd.shm.interrupts import ignoring_refusals

_QUERY = "index,uuid,name,memory.total,memory.free"
_MIB = 2**20
_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    Attributes:
        name: from its driver.
        memory_bytes: all of it.
        free_bytes: unused memory; None if only torch is available to report it.
    """

    name: str
    memory_bytes: int
    free_bytes: int | None


class _Listed(NamedTuple):
    """A GPU as `nvidia-smi` lists it, with what `CUDA_VISIBLE_DEVICES` may call it."""

    number: str
    uuid: str
    gpu: Gpu


def read_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that `nvidia-smi` lists and `CUDA_VISIBLE_DEVICES` allows, or torch's if it is imported."""
    text = _ask(f"--query-gpu={_QUERY}")
    if not text:
        return _torch_gpus()
    return parse_smi(text, os.environ.get("CUDA_VISIBLE_DEVICES"))


def parse_smi(text: str, visible: str | None) -> tuple[Gpu, ...]:
    """Return the GPUs in the CSV that `nvidia-smi` prints.

    Args:
        text: one line for each: index, uuid, name, MiB, MiB free.
        visible: `CUDA_VISIBLE_DEVICES`: indices or the beginnings of uuids; None for all, empty for none.
    """
    listed: list[_Listed] = []
    for line in text.splitlines():
        match [field.strip() for field in line.split(",")]:
            case [number, uuid, name, total, free] if total.isdigit():
                free_bytes = int(free) * _MIB if free.isdigit() else None
                listed.append(
                    _Listed(number, uuid, Gpu(name, int(total) * _MIB, free_bytes))
                )
    if visible is None:
        return tuple(one.gpu for one in listed)
    found = []
    for wanted in visible.split(","):
        fitting = (
            one.gpu
            for one in listed
            if wanted and (wanted == one.number or one.uuid.startswith(wanted))
        )
        gpu = next(fitting, None)
        if gpu is None:
            break  # CUDA also stops at the first missing one
        found.append(gpu)
    return tuple(found)


def memory_used_by(pids: Collection[int]) -> int:
    """Return bytes of GPU memory that processes use together; 0 if it is unknown."""
    return parse_apps(_ask("--query-compute-apps=pid,used_memory"), pids)


def parse_apps(text: str, pids: Collection[int]) -> int:
    """Return the bytes of some processes in `nvidia-smi`'s CSV of GPU processes: pid, MiB."""
    total = 0
    for line in text.splitlines():
        match [field.strip() for field in line.split(",")]:
            case [pid, *_, used] if (
                pid.isdigit() and used.isdigit() and int(pid) in pids
            ):
                total += int(used) * _MIB
    return total


def _ask(query: str) -> str:
    """Return what `nvidia-smi` prints; empty if there is none, or if it fails."""
    with contextlib.suppress(subprocess.TimeoutExpired), ignoring_refusals():
        done = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        return done.stdout if done.returncode == 0 else ""
    return ""


def _torch_gpus() -> tuple[Gpu, ...]:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return ()
    properties = [
        torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())
    ]
    return tuple(Gpu(one.name, int(one.total_memory), None) for one in properties)
