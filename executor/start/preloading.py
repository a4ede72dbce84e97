"""Helpers that executors share, so that modules are imported once for all of them.

A helper process (`workers.process.zygote`) imports what envs need and forks the workers. Where imports are slow
(torch, torchrl, dm_control), they take most of a start. Executors of one program share a helper if a new one would be
equal: same modules, arguments, import path and environment variables, and everything else that a process inherits. So
its imports have seen what those of a new one would see, and each worker gets the folder that its executor was made in.
`preloaded` makes executors share one whose modules differ from theirs.
"""

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from envherd.executor.options import ExecutorOptions
from envherd.executor.sending.variables import common_variables
from envherd.executor.start.zygote import Helper, shared
from envherd.shm.platforms import require
from envherd.workers.process.zygote import flags
from envherd.workers.sending.surroundings import TABLE, import_path

#: Fields of /proc/PID/status that a process inherits: all that concern users, processors, signals and privileges.
_INHERITED = (
    "Umask",
    "Uid",
    "Gid",
    "Groups",
    "SigBlk",
    "SigIgn",
    "Cap",
    "NoNewPrivs",
    "Seccomp",
    "Cpus",
    "Mems",
)

#: The helpers of open blocks, the innermost last, each with the settings that its workers inherit.
_open: dict[Helper, tuple[object, ...]] = {}


@contextlib.contextmanager
def preloaded(*modules: str, options: ExecutorOptions | None = None) -> Iterator[None]:
    """Make executors created in this block start their workers from one helper that imports `modules`.

        with preloaded("torchrl.envs", "gymnasium"):
            from my_training import settings, make_env   # imports TorchRL, while the helper does too
            for setting in settings:
                with ParallelEnv(8, make_env) as env:    # starts in milliseconds instead of seconds
                    ...

    The helper begins at once, and the first executor waits until it has imported all modules.
    Modules that executors would preload by themselves are imported by their workers, unless they are among `modules`.
    Each module is imported once, so workers of this block do not see later changes of its file. An executor still uses
    another helper if its start method, `env_vars`, `worker_threads` or `worker_output` differ from those of `options`
    here. A worker has the environment variables, current folder and import path of the time when its executor was
    made, but `modules` are imported with those at the beginning of the block. The block has no effect in processes
    forked from this one.

    The helper ends with the block, or with the last executor created in it. As usual, closing an executor ends all its
    workers and the processes of their envs.

    Args:
        *modules: full names.
        options: of the executors; only start method, `env_vars`, `worker_threads` and `worker_output` are used.

    Raises:
        ImportError: an executor was made, and a module cannot be imported.
        ValueError: there are no modules, or the start method is not "zygote".
    """
    require("preloaded")
    options = options or ExecutorOptions()
    if not modules or options.start_method != "zygote":
        raise ValueError(
            "preloaded failed: expected names of modules and the start method 'zygote', got "
            f"{modules!r} and {options.start_method!r}."
        )
    with preloading(*modules, options=options, must_import=True):
        yield


@contextlib.contextmanager
def preloading(
    *modules: str,
    options: ExecutorOptions,
    must_import: bool = False,
) -> Iterator[Helper]:
    """As `preloaded`; unless `must_import`, modules that cannot be imported are left to the workers."""
    surroundings = _surroundings(options)
    zygote = Helper(options, list(modules), must_import=must_import)
    try:
        zygote.begin()
        _open[zygote] = surroundings
        try:
            yield zygote
        finally:
            del _open[zygote]
    finally:
        zygote.close()


def helper_for(
    user: object,
    options: ExecutorOptions,
    modules: Sequence[str],
) -> Helper:
    """Return a helper for an executor, its `user`: that of the innermost block which fits, a kept one, or a new one."""
    if options.start_method == "zygote":
        wanted = _surroundings(options)
        # A copy: another thread may open or leave a block meanwhile.
        for zygote, surroundings in reversed(list(_open.items())):
            if surroundings == wanted and zygote.join(user):
                return zygote
    if options.start_method != "zygote" or options.worker_output != "capture":
        return Helper(options, list(modules), user=user)
    key = (
        *_surroundings(options),
        options.build_timeout_s,
        tuple(modules),
        sys.executable,
        tuple(import_path()),
        tuple(flags()),
        tuple(TABLE["argv"].read()),
        # What a new process would inherit.
        *(one for one in _read("status").splitlines() if one.startswith(_INHERITED)),
        *(_read(name) for name in ("limits", "cgroup", "oom_score_adj")),
        os.getpriority(os.PRIO_PROCESS, 0),
        os.getsid(0),
    )
    return shared(user, key, options, list(modules))


def _surroundings(options: ExecutorOptions) -> tuple[object, ...]:
    """Return the settings that workers inherit from a helper and cannot get at their start."""
    return (
        os.getpid(),
        common_variables(options),
        options.worker_threads,
        options.worker_output,
    )


def _read(name: str) -> str:
    """Return a file of this thread in /proc, "" where the kernel has none."""
    with contextlib.suppress(OSError):
        return Path("/proc/thread-self", name).read_text()
    return ""
