"""Beyond one machine: the same batch over the nodes of a Ray cluster. Needs `envherd[ray]`."""

from envherd.executor.cluster.env import RayParallelEnv
from envherd.executor.cluster.errors import ClusterError

__all__ = ["ClusterError", "RayParallelEnv"]
