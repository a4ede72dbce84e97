"""Batches of PettingZoo parallel envs on the executor: dicts by agent, or one row for each agent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from envherd.executor.facades import needing

if TYPE_CHECKING:
    from envherd.workers.adapters.hosts.pettingzoo_stacked import parallel_env

with needing("envherd[pettingzoo]", "gymnasium"):
    from envherd.executor.facades.pettingzoo.agent_rows import AgentRowsEnv, concat_vec_envs_v1
    from envherd.executor.facades.pettingzoo.vector_env import ParallelVectorEnv

__all__ = ["AgentRowsEnv", "ParallelVectorEnv", "concat_vec_envs_v1", "parallel_env"]


def __getattr__(name: str) -> Any:
    """Import `parallel_env` when it is first used: RLlib's facade uses this package without PettingZoo."""
    if name != "parallel_env":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with needing("envherd[pettingzoo]", "pettingzoo"):
        from envherd.workers.adapters.hosts.pettingzoo_stacked import parallel_env
    globals()[name] = parallel_env
    return parallel_env
