"""Modules that were at another place before the kernel and its guests were taken apart: an old name is the new module.

The names of modules are no interface, `envherd.NAME` is. This table goes with the next minor version.
"""

from __future__ import annotations

import importlib
import sys
import types
from importlib.machinery import ModuleSpec
from typing import Any

#: Old name -> new name, below `envherd`.
MOVED = {
    "executor.async_collector": "executor.guests.collectors.async_collector",
    "executor.collector": "executor.guests.collectors.collector",
    "executor.monitor": "executor.guests.monitor",
    "executor.monitor.statistics": "executor.guests.monitor.statistics",
    "executor.monitor.watching": "executor.guests.monitor.watching",
    "executor.policy": "executor.guests.collectors.policy",
    "executor.pools.blueprint": "executor.sending.blueprint",
    "executor.pools.capsule_file": "executor.guests.capsules.file",
    "executor.pools.capsules": "executor.guests.capsules.writer",
    "executor.pools.crew": "executor.processes.crew",
    "executor.pools.error_messages": "executor.processes.error_messages",
    "executor.pools.interpreters": "executor.guests.interpreters",
    "executor.pools.portable": "executor.guests.portable",
    "executor.pools.preloading": "executor.start.preloading",
    "executor.pools.process_log": "executor.start.process_log",
    "executor.pools.restarts": "executor.processes.restarts",
    "executor.pools.supervisor": "executor.processes.supervisor",
    "executor.pools.variables": "executor.sending.variables",
    "executor.pools.waiting": "executor.start.waiting",
    "executor.pools.worker_process": "executor.processes.worker_process",
    "executor.pools.zygote": "executor.start.zygote",
    "executor.protocol.recycling": "executor.guests.recycling",
    "executor.protocol.saving": "executor.guests.saving",
    "executor.simulator": "executor.guests.simulator",
    "executor.simulator.actions": "executor.guests.simulator.actions",
    "executor.simulator.engine": "executor.guests.simulator.engine",
    "executor.simulator.rollout": "executor.guests.simulator.rollout",
    "executor.simulator.rows": "executor.guests.simulator.rows",
    "shm.socket_bells": "workers.guests.portable.socket_bells",
    "workers.block.episode_leaves": "workers.wrappers.episode_leaves",
    "workers.block.info_leaves": "workers.wrappers.info_leaves",
    "workers.block.pictures": "workers.wrappers.pictures",
    "workers.block.wrapping": "workers.wrappers.wrapping",
    "workers.env_graph": "workers.guests.saving.env_graph",
    "workers.env_values": "workers.guests.saving.env_values",
    "workers.importing": "workers.sending.importing",
    "workers.interpreters": "workers.guests.interpreters",
    "workers.pickling": "workers.sending.pickling",
    "workers.process.branching": "workers.guests.branching",
    "workers.process.env_threads": "workers.guests.env_threads",
    "workers.process.portable": "workers.guests.portable.entry",
    "workers.registries": "workers.sending.registries",
    "workers.sharing": "workers.sending.sharing",
    "workers.snapshot": "workers.guests.saving.snapshot",
    "workers.surroundings": "workers.sending.surroundings",
}


class _Finder:
    """Finds the old names, and loads them."""

    def find_spec(
        self,
        name: str,
        path: Any = None,  # noqa: ARG002
        target: Any = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        """Return a spec of an old name, None of any other."""
        is_old = name.startswith("envherd.") and name.removeprefix("envherd.") in MOVED
        return ModuleSpec(name, self) if is_old else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        """Return the module that has the new name."""
        module = importlib.import_module(
            "envherd." + MOVED[spec.name.removeprefix("envherd.")]
        )
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Give it back its spec, which importing the old name has replaced."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


def install() -> None:
    """Let the old names be imported."""
    sys.meta_path.insert(0, _Finder())
