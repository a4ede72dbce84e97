"""`preloaded`: one helper for every executor of a `with` block, so that modules are imported once for all.

An executor has its own helper process, which imports what its envs need and forks its workers (see
`workers.process.zygote`). Where executors come and go (tests, notebooks, sweeps over settings) and imports take
seconds (torch, torchrl, dm_control), those seconds are most of every start.
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
    """A helper that executors share, and what its workers inherit from it."""

    zygote: Zygote
    surroundings: tuple[object, ...]


@contextlib.contextmanager
def preloaded(*modules: str, options: ExecutorOptions | None = None) -> Iterator[None]:
    """Have the executors made in this block start their workers from one helper that has imported `modules`.

        with preloaded("torchrl.envs", "gymnasium"):
            for setting in settings:
                with ParallelEnv(8, make_env) as env:    # in milliseconds, not seconds, from the first on
                    ...

    What executors would have preloaded by themselves is imported by their workers, unless it is among `modules`.
    A module is imported once: a worker of this block sees it as it was then, whatever has become of its file.
    An executor has its own helper, as ever, where its workers would inherit something else: another start
    method, `options.env_vars`, `worker_threads` or `worker_output` than `options` here. Environment variables, the
    current folder and the import path are those at the time when a worker is started; what `modules` have read of
    them, they have read at the begin of the block. Not for other processes forked from this one.

    The helper ends with the block, or with the last executor made in it. Closing an executor ends all its workers
    and what their envs have started, as ever.

    Args:
        *modules: full names.
        options: of the executors to come: start method, `env_vars`, `worker_threads` and `worker_output` are used.

    Raises:
        ImportError: a module cannot be imported; with the reason.
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
    """Begin to import modules in a helper, for the executors of this block; the first of them waits for it.

    Workers import what could not be imported. Otherwise as `preloaded`.
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
    """Return the helper of the innermost `preloaded` block that an executor can use, counted as used by it."""
    if not _innermost or options.start_method != "zygote":
        return None
    surroundings = _surroundings(options)
    for warm in reversed(_innermost):
        if warm.surroundings == surroundings and warm.zygote.join():
            return warm.zygote
    return None


def _surroundings(options: ExecutorOptions) -> tuple[object, ...]:
    """Return what workers cannot be sent when they are started, and inherit from a helper."""
    return (os.getpid(), dict(options.env_vars), options.worker_threads, options.worker_output)
