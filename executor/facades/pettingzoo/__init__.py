"""Batches of PettingZoo parallel envs on the executor: dicts by agent, or one row for each agent."""

from envherd.executor.facades import older_path

__getattr__ = older_path(__name__)
