"""Modules that were at another place, or that are part of another now: an old name is the new module.

The names of modules are no interface, `envherd.NAME` is. This table goes with the next minor version. Modules of
packages that are one module now (`executor.guests.monitor`) cannot have their old names.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from typing import Any

#: Old name -> new name, below `envherd`.
MOVED = {
    "executor.async_collector": "executor.guests.collectors.async_collector",
    "executor.batches.grad_mode": "executor.batches.fast_tensordict",
    "executor.batches.plain_actions": "executor.batches.actions",
    "executor.batches.random_actions": "executor.batches.actions",
    "executor.batches.step_data": "executor.batches.hand_out",
    "executor.cli.doctor": "executor.cli.app",
    "executor.cli.exit_codes": "executor.cli.options",
    "executor.cli.init": "executor.cli.app",
    "executor.cli.listing": "executor.cli.app",
    "executor.cli.option_values": "executor.cli.options",
    "executor.cli.returns": "executor.cli.media",
    "executor.cli.storing": "executor.cli.commands",
    "executor.collector": "executor.guests.collectors.collector",
    "executor.facades.columns": "executor.facades.rows",
    "executor.facades.fitting": "executor.facades.spaces",
    "executor.facades.gymnasium.base": "executor.facades.gymnasium.vector_env",
    "executor.facades.gymnasium.infos": "executor.facades.gymnasium.rows",
    "executor.facades.gymnasium.spaces": "executor.facades.gymnasium.rows",
    "executor.facades.leaf_spaces": "executor.facades.spaces",
    "executor.facades.pettingzoo.agent_rows": "executor.facades.pettingzoo.vector_env",
    "executor.facades.sb3.spaces": "executor.facades.sb3.rows",
    "executor.facades.torchrl.batched": "executor.facades.torchrl.data",
    "executor.guests.simulator.actions": "executor.guests.simulator.rows",
    "executor.guests.simulator.rollout": "executor.guests.simulator.engine",
    "executor.machine.cgroups": "executor.machine.machine",
    "executor.machine.renderers": "executor.machine.gpus",
    "executor.machine.room": "executor.machine.machine",
    "executor.monitor": "executor.guests.monitor",
    "executor.policy": "executor.guests.collectors.policy",
    "executor.pools.blueprint": "executor.sending.blueprint",
    "executor.pools.command_words": "executor.pools.commands",
    "executor.pools.crew": "executor.processes.crew",
    "executor.pools.error_messages": "executor.processes.error_messages",
    "executor.pools.fast_commands": "executor.pools.commands",
    "executor.pools.interpreters": "executor.guests.interpreters",
    "executor.pools.portable": "executor.guests.portable",
    "executor.pools.preloading": "executor.start.zygote",
    "executor.pools.process_log": "executor.start.zygote",
    "executor.pools.replies": "executor.pools.commands",
    "executor.pools.restarts": "executor.processes.supervisor",
    "executor.pools.slab_plate": "executor.pools.worker_pool",
    "executor.pools.supervisor": "executor.processes.supervisor",
    "executor.pools.variables": "executor.sending.variables",
    "executor.pools.waiting": "executor.start.waiting",
    "executor.pools.worker_process": "executor.processes.worker_process",
    "executor.pools.zygote": "executor.start.zygote",
    "executor.processes.equipment": "executor.processes.mail",
    "executor.processes.restarts": "executor.processes.supervisor",
    "executor.protocol.calls": "executor.protocol.engine",
    "executor.protocol.fast_exchange": "executor.protocol.fast",
    "executor.protocol.fast_step": "executor.protocol.fast",
    "executor.protocol.recycling": "executor.guests.recycling",
    "executor.protocol.saving": "executor.guests.saving",
    "executor.protocol.side_data": "executor.protocol.info_reader",
    "executor.protocol.stale_roots": "executor.protocol.call_guard",
    "executor.rollouts.added_rows": "executor.rollouts.policy_state",
    "executor.rollouts.contiguous_rows": "executor.rollouts.storage",
    "executor.rollouts.run": "executor.rollouts.policy_state",
    "executor.rollouts.stepwise": "executor.rollouts.rollout",
    "executor.show.episode_logger": "executor.show.loggers",
    "executor.show.exporting": "executor.show.loggers",
    "executor.show.recorder": "executor.show.camera",
    "executor.show.records": "executor.show.results",
    "executor.simulator": "executor.guests.simulator",
    "executor.simulator.actions": "executor.guests.simulator.rows",
    "executor.simulator.engine": "executor.guests.simulator.engine",
    "executor.simulator.rollout": "executor.guests.simulator.engine",
    "executor.simulator.rows": "executor.guests.simulator.rows",
    "executor.sizing.driving": "executor.sizing.probe",
    "executor.sizing.reasons": "executor.sizing.rule",
    "executor.sizing.settings": "executor.sizing.rule",
    "executor.start.preloading": "executor.start.zygote",
    "executor.start.process_log": "executor.start.zygote",
    "executor.testing.batch": "executor.testing.traces",
    "executor.testing.compare": "executor.testing.traces",
    "executor.testing.suite": "executor.testing.contract",
    "shm.layout": "shm.slab",
    "shm.nameplate": "shm.segment",
    "shm.private_view": "shm.segment",
    "shm.socket_bells": "workers.guests.portable.entry",
    "shm.tally": "shm.sync",
    "workers.adapters.common.generators": "workers.adapters.common.values",
    "workers.adapters.common.reset_options": "workers.adapters.common.values",
    "workers.adapters.common.scalars": "workers.adapters.common.values",
    "workers.adapters.common.side_values": "workers.adapters.common.values",
    "workers.adapters.dm_env.specs": "workers.adapters.dm_env.adapter",
    "workers.adapters.gymnasium.rows": "workers.adapters.gymnasium.spaces",
    "workers.adapters.meltingpot.episodes": "workers.adapters.meltingpot.adapter",
    "workers.adapters.meltingpot.fast_step": "workers.adapters.meltingpot.adapter",
    "workers.adapters.pettingzoo.groups": "workers.adapters.pettingzoo.adapter",
    "workers.adapters.simulators.native_resets": "workers.adapters.simulators.native",
    "workers.adapters.torchrl.direct": "executor.facades.torchrl.ways.direct",
    "workers.adapters.torchrl.gym": "executor.facades.torchrl.ways.gym",
    "workers.adapters.torchrl.meltingpot": "executor.facades.torchrl.ways.meltingpot",
    "workers.adapters.torchrl.pettingzoo": "executor.facades.torchrl.ways.pettingzoo",
    "workers.adapters.torchrl.reading": "workers.adapters.torchrl.specs",
    "workers.adapters.torchrl.transformed": "executor.facades.torchrl.ways.transformed",
    "workers.block.compiling": "workers.block.slot",
    "workers.block.episode_leaves": "workers.wrappers.leaves",
    "workers.block.info_leaves": "workers.wrappers.leaves",
    "workers.block.pictures": "workers.wrappers.pictures",
    "workers.block.slot_states": "workers.block.slot",
    "workers.block.wrapping": "workers.wrappers.leaves",
    "workers.env_graph": "workers.guests.saving.env_graph",
    "workers.env_values": "workers.guests.saving.env_values",
    "workers.guests.portable.socket_bells": "workers.guests.portable.entry",
    "workers.importing": "workers.sending.importing",
    "workers.info_keys": "workers.infos",
    "workers.interpreters": "workers.guests.interpreters",
    "workers.pickling": "workers.sending.pickling",
    "workers.process.branching": "workers.guests.branching",
    "workers.process.env_threads": "workers.guests.env_threads",
    "workers.process.native_loop": "workers.process.loop",
    "workers.process.portable": "workers.guests.portable.entry",
    "workers.registries": "workers.sending.registries",
    "workers.sharing": "workers.sending.sharing",
    "workers.snapshot": "workers.guests.saving.snapshot",
    "workers.state_tables": "workers.protocol",
    "workers.surroundings": "workers.sending.surroundings",
    "workers.wrappers.episode_leaves": "workers.wrappers.leaves",
    "workers.wrappers.info_leaves": "workers.wrappers.leaves",
    "workers.wrappers.wrapping": "workers.wrappers.leaves",
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


def refuser(module: str, gone: dict[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a module that lacks names of earlier versions.

    Args:
        module: its name.
        gone: name -> what to use instead.
    """

    def refuse(name: str) -> Any:
        if name in gone:
            raise ImportError(
                f"importing {name} failed: {module} has it no more. Instead: {gone[name]}."
            )
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return refuse


def install() -> None:
    """Let the old names be imported."""
    sys.meta_path.insert(0, _Finder())
