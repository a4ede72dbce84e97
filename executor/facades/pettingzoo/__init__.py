"""Batches of PettingZoo parallel envs on the executor: dicts by agent, or one row for each agent."""

from envherd.executor.facades.pettingzoo.agent_rows import AgentRowsEnv, concat_vec_envs_v1
from envherd.executor.facades.pettingzoo.vector_env import ParallelVectorEnv
from envherd.workers.adapters.hosts.pettingzoo_stacked import parallel_env

__all__ = ["AgentRowsEnv", "ParallelVectorEnv", "concat_vec_envs_v1", "parallel_env"]
