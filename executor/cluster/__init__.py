"""Beyond one machine: the same batch over the nodes of a Ray cluster. Needs `envherd[ray]`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from envherd.executor.cluster.env import RayParallelEnv
    from envherd.executor.cluster.errors import ClusterError

__all__ = ["ClusterError", "RayParallelEnv"]

_HOMES = {
    "ClusterError": "envherd.executor.cluster.errors",
    "RayParallelEnv": "envherd.executor.cluster.env",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: hosts have no need of them."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
