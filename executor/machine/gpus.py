"""GPUs that this process may use, and their memory; finding them opens no CUDA context if `nvidia-smi` answers."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Collection
from dataclasses import dataclass

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
    listed: list[tuple[str, str, Gpu]] = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 5 and fields[3].isdigit():
            free = int(fields[4]) * _MIB if fields[4].isdigit() else None
            listed.append(
                (fields[0], fields[1], Gpu(fields[2], int(fields[3]) * _MIB, free))
            )
    if visible is None:
        return tuple(gpu for _, _, gpu in listed)
    found = []
    for wanted in visible.split(","):
        match = next(
            (
                g
                for index, uuid, g in listed
                if wanted and (wanted == index or uuid.startswith(wanted))
            ),
            None,
        )
        if match is None:
            break  # CUDA also stops at the first missing one
        found.append(match)
    return tuple(found)


def memory_used_by(pids: Collection[int]) -> int:
    """Return bytes of GPU memory that processes use together; 0 if it is unknown."""
    return parse_apps(_ask("--query-compute-apps=pid,used_memory"), pids)


def parse_apps(text: str, pids: Collection[int]) -> int:
    """Return the bytes of some processes in `nvidia-smi`'s CSV of GPU processes: pid, MiB."""
    total = 0
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        pid = fields[0]
        used = fields[-1]
        if len(fields) > 1 and pid.isdigit() and used.isdigit() and int(pid) in pids:
            total += int(used) * _MIB
    return total


def _ask(query: str) -> str:
    """Return what `nvidia-smi` prints; empty if there is none, or if it fails."""
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    with contextlib.suppress(subprocess.TimeoutExpired), ignoring_refusals():
        done = subprocess.run(
            command,
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
