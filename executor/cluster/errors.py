"""What can be wrong with a cluster rather than with envs."""

from __future__ import annotations

from envherd.workers.errors import EnvherdError


class ClusterError(EnvherdError, RuntimeError):
    """Ray is missing, cannot be reached, has not the resources asked for, or its nodes disagree in versions."""
