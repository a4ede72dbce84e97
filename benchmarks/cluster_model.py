"""A model of many nodes: pure arithmetic over the measurements of `cluster.py` on one machine.

Two ways to use a cluster (docs/cluster.md). Stepped as one batch, every step waits for the slowest node, a round trip,
and the driver's sequential work for every node. With remote rollouts the nodes run at their own speed; the driver's
processor and its network, also for sending weights, are the limited resources. The model computes the remaining share
of the nodes' speed and the first saturated resource. It does not include the learner's work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The measured costs in seconds.

    Attributes:
        trip_s: of a batch on one node beyond the same batch without Ray.
        step_fixed_s: of the driver's processor for a batch, whatever the number of nodes.
        step_node_s: the same for each node.
        large_s: the same for each node whose rows are too large for Ray to send them with the answer itself.
        rollout_s: of the driver's processor for a remote rollout of one node.
        byte_s: of the driver's processor per byte of rows or rollouts.
    """

    trip_s: float
    step_fixed_s: float
    step_node_s: float
    large_s: float
    rollout_s: float
    byte_s: float


#: Size of an answer in bytes above which it goes through Ray's object store.
INLINE_BYTES = 100 * 1024


@dataclass(frozen=True, kw_only=True)
class Work:
    """The nodes' work; assumed, not measured.

    Attributes:
        name: of the kind of envs.
        step_s: of one env.
        row_bytes: of one env's observation; sent once, and both root and `next` of a rollout.
        weights_bytes: of the policy.
    """

    name: str
    step_s: float
    row_bytes: int
    weights_bytes: int


@dataclass(frozen=True, kw_only=True)
class Site:
    """The nodes; assumed, not measured.

    Attributes:
        workers: processes of a node.
        envs_per_worker: of each.
        network_bytes_s: of the driver's machine, in each direction.
        rollout_steps: T of a remote rollout; every rollout gets new weights.
    """

    workers: int = 32
    envs_per_worker: int = 4
    network_bytes_s: float = 1.25e9
    rollout_steps: int = 256

    @property
    def envs(self) -> int:
        """Of a node."""
        return self.workers * self.envs_per_worker


PROCESSOR, NETWORK_IN, NETWORK_OUT = (
    "the driver's processor",
    "the driver's network (rows)",
    "the driver's network (weights)",
)

WORKS = (
    Work(name="cheap (20 us, 64 bytes)", step_s=20e-6, row_bytes=64, weights_bytes=40_000),
    Work(name="pixels (0.5 ms, 28 KB)", step_s=0.5e-3, row_bytes=28_300, weights_bytes=7_000_000),
    Work(name="heavy (10 ms, 200 KB)", step_s=10e-3, row_bytes=200_000, weights_bytes=7_000_000),
)


def batch_s(costs: Costs, work: Work, site: Site, num_nodes: int) -> float:
    """Return the seconds of a step of all envs of `num_nodes` nodes as one batch."""
    processor = costs.step_fixed_s + num_nodes * _node_s(costs, work, site)
    network = num_nodes * site.envs * work.row_bytes / site.network_bytes_s
    return site.envs_per_worker * work.step_s + costs.trip_s + max(processor, network)


def _node_s(costs: Costs, work: Work, site: Site) -> float:
    num_bytes = site.envs * work.row_bytes
    return costs.step_node_s + (costs.large_s if num_bytes > INLINE_BYTES else 0.0) + num_bytes * costs.byte_s


def step_efficiency(costs: Costs, work: Work, site: Site, num_nodes: int) -> float:
    """Return the remaining share of the nodes' own speed when they are stepped as one batch, 0..1."""
    return site.envs_per_worker * work.step_s / batch_s(costs, work, site, num_nodes)


def step_limit(costs: Costs, work: Work, site: Site) -> str:
    """Return the bottleneck of many nodes when they are stepped as one batch."""
    is_network = site.envs * work.row_bytes / site.network_bytes_s > _node_s(costs, work, site)
    return NETWORK_IN if is_network else PROCESSOR


def rollout_loads(costs: Costs, work: Work, site: Site) -> Mapping[str, float]:
    """Return the share of each of the driver's resources that one node's remote rollouts take."""
    rollouts_per_s = 1 / (site.rollout_steps * site.envs_per_worker * work.step_s)
    num_bytes = site.envs * site.rollout_steps * work.row_bytes  # each observation is sent once, and written twice
    return {
        PROCESSOR: rollouts_per_s * (costs.rollout_s + 2 * num_bytes * costs.byte_s),
        NETWORK_IN: rollouts_per_s * num_bytes / site.network_bytes_s,
        NETWORK_OUT: rollouts_per_s * work.weights_bytes / site.network_bytes_s,
    }


def rollout_limit(costs: Costs, work: Work, site: Site) -> tuple[str, float]:
    """Return the driver's first saturated resource with remote rollouts, and the number of nodes that saturates it."""
    loads = rollout_loads(costs, work, site)
    name = max(loads, key=lambda one: loads[one])
    return name, 1 / loads[name]


def rollout_efficiency(costs: Costs, work: Work, site: Site, num_nodes: int) -> float:
    """Return the remaining share of the nodes' own speed with remote rollouts, 0..1."""
    return min(1.0, rollout_limit(costs, work, site)[1] / num_nodes)


def steps_per_s(work: Work, site: Site, num_nodes: int, efficiency: float) -> float:
    """Return env-steps per second."""
    return num_nodes * site.workers / work.step_s * efficiency


def half_nodes(costs: Costs, work: Work, site: Site) -> int:
    """Return the number of nodes at which stepping as one batch has lost half of their speed; 0 if one node has."""
    low, high = 0, 1
    while step_efficiency(costs, work, site, high) > 0.5 and high < 10**6:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if step_efficiency(costs, work, site, middle) > 0.5 else (low, middle)
    return low
