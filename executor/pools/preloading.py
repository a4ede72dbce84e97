"""`preloaded`: one helper for every executor of a `with` block, so that modules are imported once for all.

An executor has its own helper process, which imports what its envs need and forks its workers (see
`workers.process.zygote`). In programs with many short-lived executors (tests, notebooks, sweeps) and slow imports
(torch, torchrl, dm_control), the imports take most of every start.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

from envherd.executor.options import ExecutorOptions
from envherd.executor.pools.zygote import Zygote

_innermost: list[_Warm] = []


@dataclass(frozen=True)
class _Warm:
    """A helper that executors share, and the settings that its workers inherit."""

    zygote: Zygote
    surroundings: tuple[object, ...]


@contextlib.contextmanager
def preloaded(*modules: str, options: ExecutorOptions | None = None) -> Iterator[None]:
    """Make executors created in this block start their workers from one helper that has imported `modules`.

        with preloaded("torchrl.envs", "gymnasium"):
            for setting in settings:
                with ParallelEnv(8, make_env) as env:    # starts in milliseconds instead of seconds
                    ...

    Modules that executors would preload by themselves are imported by their workers, unless they are among `modules`.
    Each module is imported once, so workers of this block do not see later changes of its file. An executor still uses
    its own helper if its start method, `env_vars`, `worker_threads` or `worker_output` differ from those of `options`
    here. A worker has the environment variables, current folder and import path of the time when it is started, but
    `modules` are imported with those at the beginning of the block. The block has no effect in processes forked from
    this one.

    The helper ends with the block, or with the last executor created in it. As usual, closing an executor ends all its
    workers and the processes of their envs.

    Args:
        *modules: full names.
        options: of the executors; only start method, `env_vars`, `worker_threads` and `worker_output` are used.

    Raises:
        ImportError: a module cannot be imported.
        ValueError: there are no modules, or the start method is not "zygote".
    """
    options = options or ExecutorOptions()
    if not modules or options.start_method != "zygote":
        raise ValueError(
            "preloaded failed: expected names of modules and the start method 'zygote', got "
            f"{modules!r} and {options.start_method!r}."
        )
    with preloading(*modules, options=options) as zygote:
        zygote.wait_ready()
        if zygote.failed_preloads:
            name, why = next(iter(zygote.failed_preloads.items()))
            raise ImportError(f"preloaded failed: expected modules that can be imported, got {name!r} ({why}).")
        yield


@contextlib.contextmanager
def preloading(*modules: str, options: ExecutorOptions) -> Iterator[Zygote]:
    """Begin to import modules in a helper, for the executors of this block; the first executor waits for it.

    Modules that cannot be imported are left to the workers. Otherwise as `preloaded`.
    """
    surroundings = _surroundings(options)
    zygote = Zygote(options, list(modules), is_shared=True)
    try:
        zygote.begin()
        warm = _Warm(zygote, surroundings)
        _innermost.append(warm)
        try:
            yield zygote
        finally:
            _innermost.remove(warm)
    finally:
        zygote.close()


def find_helper(options: ExecutorOptions) -> Zygote | None:
    """Return the helper of the innermost `preloaded` block that an executor can use, with the executor as a user."""
    if not _innermost or options.start_method != "zygote":
        return None
    surroundings = _surroundings(options)
    for warm in reversed(_innermost):
        if warm.surroundings == surroundings and warm.zygote.join():
            return warm.zygote
    return None


def _surroundings(options: ExecutorOptions) -> tuple[object, ...]:
    """Return the settings that workers inherit from a helper and cannot get at their start."""
    return (os.getpid(), dict(options.env_vars), options.worker_threads, options.worker_output)
