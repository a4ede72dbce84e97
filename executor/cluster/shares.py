"""Spread the envs of a batch over nodes, and compute the resources to request from each node; no I/O and no Ray."""

from collections.abc import Mapping, Sequence

import numpy as np

from envherd.workers.errors import EnvherdError


class ClusterError(EnvherdError, RuntimeError):
    """Ray is missing, cannot be reached, lacks the requested resources, or its nodes have different versions."""


def spread(num_envs: int, weights: Sequence[float]) -> list[list[int]]:
    """Return contiguous env ids for each node, of which there are no more than envs: by weight, at least one each."""
    exact = np.asarray(weights, float) / sum(weights) * num_envs
    counts = np.ones(len(weights), int)
    for _ in range(num_envs - len(weights)):
        counts[np.argmax(exact - counts)] += 1
    return [
        ids.tolist() for ids in np.split(np.arange(num_envs), np.cumsum(counts)[:-1])
    ]


def bundles_for(
    free: Sequence[Mapping[str, float]],
    num_envs: int,
    num_nodes: int | None,
    per_node: Mapping[str, float] | None,
) -> list[dict[str, float]]:
    """Return the resources to request from each node.

    Args:
        free: resources of each living node.
        num_envs: there are no more bundles than envs.
        num_nodes: number of nodes; None for every node with a processor (or with the resources of `per_node`).
        per_node: for each node; None for all whole processors of a node.

    Raises:
        ClusterError: no node has the requested resources.
    """
    asked = {"CPU": 1.0} if per_node is None else per_node
    fitting = sorted(
        (
            node
            for node in free
            if all(node.get(name, 0) >= amount for name, amount in asked.items())
        ),
        key=lambda node: node.get("CPU", 0),
        reverse=True,
    )
    count = min(num_nodes or len(fitting), num_envs)
    if not fitting or (per_node is None and count > len(fitting)):
        raise no_room([asked] * max(1, count), free)
    if per_node is not None:
        return [dict(per_node) for _ in range(count)]
    return [{"CPU": float(int(node["CPU"]))} for node in fitting[:count]]


def no_room(
    asked: Sequence[Mapping[str, float]],
    free: Sequence[Mapping[str, float]],
    waited_s: float = 0.0,
) -> ClusterError:
    """Return the error for bundles that cannot be placed, or were not placed in time."""
    return ClusterError(
        f"RayRollouts failed: expected room for {len(asked)} shares of {_in_words(asked[0])}, got none within "
        f"{waited_s:g} s: {len(free)} living nodes have {'; '.join(map(_in_words, free))} in all (others may be using "
        f"it). Request less (num_nodes, resources_per_node), or free or add nodes."
    )


def _in_words(resources: Mapping[str, float]) -> str:
    named = [
        f"{amount:g} {name}"
        for name, amount in sorted(resources.items())
        if not name.startswith(("node:", "memory", "object_"))
    ]
    return ", ".join(named) or "nothing"
