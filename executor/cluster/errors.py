"""Errors of a cluster rather than of envs."""

from __future__ import annotations

from envherd.workers.errors import EnvherdError


class ClusterError(EnvherdError, RuntimeError):
    """Ray is missing, cannot be reached, lacks the requested resources, or its nodes have different versions."""
