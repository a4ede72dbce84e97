"""Refuse numbers of envs and of processes that this machine cannot hold, before anything starts.

Guarantees: only what cannot be is refused. The bounds are those of the smallest env and of a worker that has nothing
but it, so an executor that passes may still be too large: its slab is admitted against the memory when envs have been
built (`shm.segment.admit`), and `envherd size` measures how many fit.
"""

import errno

from envherd.executor.machine.cgroups import read_cgroup
from envherd.executor.machine.machine import files_left, processes_left
from envherd.shm.segment import available_bytes
from envherd.workers.errors import EnvherdError

#: Descriptors of the owner for each worker: socket, log, pidfd.
FILES_PER_WORKER = 3
#: Descriptors of the owner once for an executor: the helper's socket, lifeline and log; the slab; temporary ones while
#: a process is started.
FILES_FIXED = 12
#: Descriptors of the owner for each executor of one worker that starts while others do, by whether they share a helper:
#: those of a worker, the slab, and the temporary ones of its start; without, also those of its helper.
FILES_PER_EXECUTOR = {True: 7, False: 11}
#: Bytes of the smallest env in all processes together, below what `CountingEnv` takes (27 KiB in `SerialEnv`, 55 in
#: workers; 2026-11-28).
_ENV_BYTES = 24 * 2**10
#: Bytes of the smallest worker, below what one with a `CountingEnv` takes (6.4 MiB; 2026-11-28).
_WORKER_BYTES = 2 * 2**20
#: No more than this many are always tried: reading the limits on processes takes milliseconds.
_FEW = 16


class TooMany(EnvherdError, ValueError):
    """More envs or worker processes than the machine can hold, whatever the envs are. Nothing was started."""


def require_room(
    num_envs: int = 1,
    num_workers: int = 0,
    files_per_worker: int = FILES_PER_WORKER,
) -> None:
    """Refuse numbers that the machine cannot hold.

    Args:
        num_envs: N.
        num_workers: processes to start; 0 for envs in this process.
        files_per_worker: descriptors of this process for each.

    Raises:
        TooMany: the memory, or the limits on processes; with the largest number that may fit.
        OSError: EMFILE: the limit on open files.
    """
    available = available_bytes()
    for name, count, each in (
        ("num_envs", num_envs, _ENV_BYTES),
        ("num_workers", num_workers, _WORKER_BYTES),
    ):
        if available is not None and count > _FEW and count * each > available:
            raise TooMany(
                f"{name} failed: expected at most {available // each:,}, because {available / 2**20:,.0f} MiB of "
                f"memory are available and each takes at least {each / 2**10:,.0f} KiB, got {_shown(count)}. Use "
                f"fewer; `envherd size` measures how many fit."
            )
    left = processes_left(read_cgroup()) if num_workers > _FEW else None
    if left is not None and num_workers > left:
        raise TooMany(
            f"num_workers failed: expected at most {left:,}, the number of processes and threads that the limits here "
            f"leave, got {_shown(num_workers)}. Use fewer workers, or raise the limit (ulimit -u, docker --pids-limit, "
            f"TasksMax=, kernel.pid_max)."
        )
    num_files = num_workers * files_per_worker + FILES_FIXED
    files = files_left()
    if num_workers and files is not None and num_files > files:
        raise OSError(
            errno.EMFILE,
            f"starting workers failed: expected room for {num_files} more open files ({num_workers} workers), got a "
            f"limit that leaves {files}. Raise it (ulimit -n), or use fewer workers",
        )


def _shown(count: int) -> str:
    """Return a number for a message; of a huge one only the size, because Python does not print those."""
    return str(count) if count < 2**64 else f"a number of {count.bit_length()} bits"
