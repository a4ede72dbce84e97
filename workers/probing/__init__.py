"""Measuring one env, and envs that only take the time of others."""
