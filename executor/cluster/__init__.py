"""Rollouts on the nodes of a Ray cluster. Needs `envherd[ray]`."""

from typing import TYPE_CHECKING, Any

from envherd.executor.cluster.errors import ClusterError

if TYPE_CHECKING:
    from envherd.executor.cluster.rollouts import RayRollouts

__all__ = ["ClusterError", "RayRollouts"]


def __getattr__(name: str) -> Any:
    """Import the class when it is first used: the commands need the error alone, and Ray takes seconds."""
    if name != "RayRollouts":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from envherd.executor.cluster.rollouts import RayRollouts

    return RayRollouts
