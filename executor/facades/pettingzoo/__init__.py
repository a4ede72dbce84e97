"""Batches of PettingZoo parallel envs on the executor: dicts by agent, or one row for each agent."""

from typing import TYPE_CHECKING

from envherd.executor.facades import lazy_names

if TYPE_CHECKING:
    from envherd.executor.facades.pettingzoo.agent_rows import (
        AgentRowsEnv,
        concat_vec_envs_v1,
    )
    from envherd.executor.facades.pettingzoo.stacked import parallel_env
    from envherd.executor.facades.pettingzoo.vector_env import ParallelVectorEnv

__all__ = ["AgentRowsEnv", "ParallelVectorEnv", "concat_vec_envs_v1", "parallel_env"]

_HOMES = {
    "AgentRowsEnv": "agent_rows",
    "concat_vec_envs_v1": "agent_rows",
    "parallel_env": "stacked",
    "ParallelVectorEnv": "vector_env",
}
__getattr__ = lazy_names(
    __name__, _HOMES, "envherd[pettingzoo]", "gymnasium", "pettingzoo"
)
