"""Where features that the kernel does not know are joined to it.

The kernel gives commands and waits for rows (`pools`, `processes`, `start`, `protocol`, `batches`, `rollouts`, and in a
worker `block` and `process`). It imports no module of `guests`, and works without them. This module, `batched`,
`parallel` and `serial` import a guest when an option or a call asks for it.
"""

import os
from typing import Any

from envherd.executor.options import ExecutorOptions
from envherd.executor.pools.worker_pool import WorkerPool
from envherd.executor.protocol.engine import Engine
from envherd.executor.sending.blueprint import Blueprint
from envherd.shm import platforms


def is_portable(options: ExecutorOptions) -> bool:
    """Return whether the portable pool runs the workers on this system."""
    return options.start_method == "portable" or bool(platforms.missing())


def make_pool(blueprint: Blueprint, options: ExecutorOptions) -> WorkerPool:
    """Return the pool for a start method on this system.

    Raises:
        FactoryError: an interpreter cannot run workers.
        ValueError: the options need what the portable pool does not have.
    """
    if any(blueprint.interpreters):
        from envherd.executor.guests.interpreters import in_interpreters

        blueprint = in_interpreters(blueprint)
    kind = WorkerPool
    if is_portable(options):
        from envherd.executor.guests.portable import PortablePool

        kind = PortablePool
    return kind(blueprint, options)


def close_in_owner(opened: Any, owner: int) -> None:
    """Close a pool, or what else was opened, unless this process is a fork of the one that did so."""
    if os.getpid() == owner:
        opened.close()


def recycle(engine: Engine) -> None:
    """Let an engine replace workers between episodes, if the options ask for it and the pool can."""
    if engine.options.recycles and engine.pool.is_recyclable:
        from envherd.executor.guests.recycling import Recycler

        engine.flights.renewal = Recycler(engine)
