"""Gymnasium envs, one or a vector of them, and gym envs older than Gymnasium."""
