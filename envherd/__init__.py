"""Parallel environments for reinforcement learning; see `envherd.executor`."""
