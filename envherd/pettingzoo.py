"""Batches of PettingZoo envs on the executor: `from envherd.pettingzoo import ParallelVectorEnv`."""

from envherd.executor.facades import needing

with needing("envherd[pettingzoo]", "gymnasium", "pettingzoo"):
    from envherd.executor.facades.pettingzoo.stacked import parallel_env
    from envherd.executor.facades.pettingzoo.vector_env import (
        AgentRowsEnv,
        ParallelVectorEnv,
        concat_vec_envs_v1,
    )

__all__ = ["AgentRowsEnv", "ParallelVectorEnv", "concat_vec_envs_v1", "parallel_env"]
