"""Rollouts: T steps of all envs, and the memory that they are written to."""
