"""What many nodes would do: pure arithmetic over what `cluster.py` measures on one machine.

Two ways to use a cluster (docs/cluster.md). Stepped as one batch, every step waits for the slowest node, a round trip,
and the driver's own work for every node, one after the other. With remote rollouts the nodes run at their own speed;
the driver takes what comes, and its processor, its network and the weights that go out are resources that fill up. The
model says how much of the nodes' speed is left, and which resource is full first. The learner's own work is not in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What was measured. Seconds.

    Attributes:
        trip_s: of a batch on one node beyond the same batch without Ray.
        step_fixed_s: of the driver's processor for a batch, whatever the number of nodes.
        step_node_s: the same for each node.
        large_s: the same for each node whose rows are too large for Ray to send them with the answer itself.
        rollout_s: of the driver's processor for a remote rollout of one node.
        byte_s: of the driver's processor for each byte of rows or rollouts.
    """

    trip_s: float
    step_fixed_s: float
    step_node_s: float
    large_s: float
    rollout_s: float
    byte_s: float


#: Bytes of an answer beyond which it goes through Ray's object store.
INLINE_BYTES = 100 * 1024


@dataclass(frozen=True, kw_only=True)
class Work:
    """What the nodes do; assumed, not measured.

    Attributes:
        name: of the kind of envs.
        step_s: of one env.
        row_bytes: of what one env observes; it crosses once, and is root and `next` of a rollout.
        weights_bytes: of the policy.
    """

    name: str
    step_s: float
    row_bytes: int
    weights_bytes: int


@dataclass(frozen=True, kw_only=True)
class Site:
    """Where they do it; assumed, not measured.

    Attributes:
        workers: processes of a node.
        envs_per_worker: of each.
        network_bytes_s: of the driver's machine, in each direction.
        rollout_steps: T of a remote rollout; every rollout is made with weights of its own.
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
    """Return the seconds of a step of all envs of so many nodes as one batch."""
    processor = costs.step_fixed_s + num_nodes * _node_s(costs, work, site)
    network = num_nodes * site.envs * work.row_bytes / site.network_bytes_s
    return site.envs_per_worker * work.step_s + costs.trip_s + max(processor, network)


def _node_s(costs: Costs, work: Work, site: Site) -> float:
    num_bytes = site.envs * work.row_bytes
    return costs.step_node_s + (costs.large_s if num_bytes > INLINE_BYTES else 0.0) + num_bytes * costs.byte_s


def step_efficiency(costs: Costs, work: Work, site: Site, num_nodes: int) -> float:
    """Return the share of the nodes' own speed that is left when they are stepped as one batch, 0..1."""
    return site.envs_per_worker * work.step_s / batch_s(costs, work, site, num_nodes)


def step_limit(costs: Costs, work: Work, site: Site) -> str:
    """Return what grows first with the nodes when they are stepped as one batch."""
    is_network = site.envs * work.row_bytes / site.network_bytes_s > _node_s(costs, work, site)
    return NETWORK_IN if is_network else PROCESSOR


def rollout_loads(costs: Costs, work: Work, site: Site) -> Mapping[str, float]:
    """Return the share of each of the driver's resources that one node's remote rollouts take."""
    rollouts_per_s = 1 / (site.rollout_steps * site.envs_per_worker * work.step_s)
    num_bytes = site.envs * site.rollout_steps * work.row_bytes  # each observation crosses once, and is written twice
    return {
        PROCESSOR: rollouts_per_s * (costs.rollout_s + 2 * num_bytes * costs.byte_s),
        NETWORK_IN: rollouts_per_s * num_bytes / site.network_bytes_s,
        NETWORK_OUT: rollouts_per_s * work.weights_bytes / site.network_bytes_s,
    }


def rollout_limit(costs: Costs, work: Work, site: Site) -> tuple[str, float]:
    """Return which resource of the driver remote rollouts fill first, and with how many nodes."""
    loads = rollout_loads(costs, work, site)
    name = max(loads, key=lambda one: loads[one])
    return name, 1 / loads[name]


def rollout_efficiency(costs: Costs, work: Work, site: Site, num_nodes: int) -> float:
    """Return the share of the nodes' own speed that is left with remote rollouts, 0..1."""
    return min(1.0, rollout_limit(costs, work, site)[1] / num_nodes)


def steps_per_s(work: Work, site: Site, num_nodes: int, efficiency: float) -> float:
    """Return env-steps per second."""
    return num_nodes * site.workers / work.step_s * efficiency


def half_nodes(costs: Costs, work: Work, site: Site) -> int:
    """Return with how many nodes stepping as one batch has lost half of their speed; 0 if one has."""
    low, high = 0, 1
    while step_efficiency(costs, work, site, high) > 0.5 and high < 10**6:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if step_efficiency(costs, work, site, middle) > 0.5 else (low, middle)
    return low
