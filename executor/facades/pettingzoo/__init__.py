"""Batches of PettingZoo parallel envs on the executor: dicts by agent, or one row for each agent."""
