"""Batches of PettingZoo envs on the executor: `from envherd.pettingzoo import ParallelVectorEnv`."""

from envherd.executor.facades.pettingzoo import (
    AgentRowsEnv,
    ParallelVectorEnv,
    concat_vec_envs_v1,
    parallel_env,
)

__all__ = ["AgentRowsEnv", "ParallelVectorEnv", "concat_vec_envs_v1", "parallel_env"]
