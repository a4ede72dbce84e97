"""Spread the envs of a batch over nodes, and compute the resources to request from each node; no I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from envherd.executor.cluster.errors import ClusterError

Resources = dict[str, float]


def divide(num_envs: int, weights: Sequence[float]) -> list[int]:
    """Return how many envs each node gets: in proportion to its weight, at least one each.

    Raises:
        ValueError: fewer envs than nodes.
    """
    if num_envs < len(weights):
        raise ValueError(
            f"RayParallelEnv failed: expected at least one env per node, got {num_envs} envs for {len(weights)} nodes."
        )
    exact = np.asarray(weights, float) / sum(weights) * num_envs
    counts = np.maximum(1, np.floor(exact).astype(int))
    while counts.sum() < num_envs:
        counts[np.argmax(exact - counts)] += 1
    while counts.sum() > num_envs:  # nodes with a small weight still have one env, so others give up some
        spare = np.where(counts > 1, counts - exact, -np.inf)
        counts[np.argmax(spare)] -= 1
    return counts.tolist()


def bundles_for(
    free: Sequence[Mapping[str, float]],
    num_envs: int,
    num_nodes: int | None,
    per_node: Mapping[str, float] | Sequence[Mapping[str, float]] | None,
) -> list[Resources]:
    """Return the resources to request from each node.

    Args:
        free: resources of each living node.
        num_envs: there are no more bundles than envs.
        num_nodes: number of nodes; None for every node with a processor (or with the resources of `per_node`).
        per_node: for each node, or one for all; None for all whole processors of a node.

    Raises:
        ClusterError: no node has the requested resources. ValueError: the number of bundles differs from that of nodes.
    """
    if per_node is not None and not isinstance(per_node, Mapping):
        if num_nodes not in (None, len(per_node)):
            raise ValueError(
                f"RayParallelEnv failed: expected resources_per_node for {num_nodes} nodes, got {len(per_node)}."
            )
        return [dict(one) for one in per_node]
    if per_node is not None:
        fitting = sum(has_room(node, per_node) for node in free)
        if num_nodes is None and not fitting:
            raise no_room([per_node], free)
        return [dict(per_node) for _ in range(min(num_nodes or fitting, num_envs))]
    cpus = sorted((int(node.get("CPU", 0)) for node in free if node.get("CPU", 0) >= 1), reverse=True)
    wanted = min(num_nodes or len(cpus), num_envs)
    if not cpus or wanted > len(cpus):
        raise no_room([{"CPU": 1.0}] * max(1, wanted), free)
    return [{"CPU": float(count)} for count in cpus[:wanted]]


def has_room(node: Mapping[str, float], bundle: Mapping[str, float]) -> bool:
    """Return whether a node, if nothing else used it, has the resources of a bundle."""
    return all(node.get(name, 0) >= amount for name, amount in bundle.items())


def no_room(
    asked: Sequence[Mapping[str, float]], free: Sequence[Mapping[str, float]], waited_s: float | None = None
) -> ClusterError:
    """Return the error for bundles that cannot be placed, or were not placed in time."""
    waited = "" if waited_s is None else f" within {waited_s:g} s"
    nodes = "; ".join(_say(node) for node in free) or "none"
    return ClusterError(
        f"RayParallelEnv failed: expected room for {len(asked)} shares of {_say(asked[0])}, got none{waited}: "
        f"{len(free)} living nodes have {nodes} in all (others may be using it). Request less (num_nodes, "
        f"resources_per_node), or free or add nodes."
    )


def _say(resources: Mapping[str, float]) -> str:
    named = {name: n for name, n in sorted(resources.items()) if not name.startswith(("node:", "memory", "object_"))}
    return ", ".join(f"{amount:g} {name}" for name, amount in named.items()) or "nothing"
