"""`envherd size --cluster`: measure every node and plan how `RayParallelEnv` uses them.

Guarantees: shares, workers and places are the defaults of `RayParallelEnv(N, make_env, address=...)`; nothing is left
on the cluster. An env is measured once per machine, even if several nodes run on it.
Does not know: the cost of sending rows between machines, beyond the measured round trip of an empty call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import ray

from envherd.executor.cluster.fleet import Fleet, processors_of, weights_of
from envherd.executor.cluster.orders import Report, Survey
from envherd.executor.cluster.ray_cluster import Place
from envherd.executor.cluster.shares import Resources, bundles_for, divide
from envherd.executor.machine.machine import Machine
from envherd.executor.options import ExecutorOptions
from envherd.executor.sizing.limits import DoesNotFit, Limits
from envherd.executor.sizing.opening import subject_of
from envherd.executor.sizing.probing import ProbeLimits
from envherd.executor.sizing.scaling import Prediction, Scale, plan
from envherd.executor.sizing.settings import WORKERS_ONLY, Goal, Setting

_TRIPS = 20
_SHRINK = 0.9


@dataclass(frozen=True, kw_only=True)
class NodePlan:
    """One node's share.

    Attributes:
        report: of the node's host.
        machine: the resources of the share: processors as Ray counts them, and its part of the memory.
        num_envs, num_workers: of the share.
        prediction: of the share alone, as with a `ParallelEnv` on that machine; scaled from the runs there.
        trip_s: seconds of an empty call of the node.
    """

    report: Report
    machine: Machine
    num_envs: int
    num_workers: int
    prediction: Prediction
    trip_s: float

    def to_plain(self) -> dict[str, Any]:
        """Return it as documented in docs/cluster.md."""
        return {
            "node_id": self.report.node_id,
            "hostname": self.report.hostname,
            "cores": self.machine.cores,
            "memory_available": self.machine.memory_available,
            "num_envs": self.num_envs,
            "num_workers": self.num_workers,
            "trip_s": self.trip_s,
            "predicted": asdict(self.prediction),
        }


@dataclass(frozen=True, kw_only=True)
class ClusterPlan:
    """The plan for a cluster.

    Attributes:
        nodes: one per share, in the order of the envs.
        policy_s: seconds of the policy for each batch of all envs.
    """

    nodes: tuple[NodePlan, ...]
    policy_s: float

    @property
    def num_envs(self) -> int:
        """N."""
        return sum(node.num_envs for node in self.nodes)

    @property
    def batch_s(self) -> float:
        """Seconds of a step of all envs, with the policy in the driver: the slowest node decides."""
        return max(node.prediction.batch_s + node.trip_s for node in self.nodes) + self.policy_s

    @property
    def steps_per_s(self) -> float:
        """Env-steps per second, all nodes stepped as one batch."""
        return self.num_envs / self.batch_s

    @property
    def rollout_steps_per_s(self) -> float:
        """Env-steps per second of remote rollouts: every node at its own speed, with the policy on each node."""
        return sum(node.num_envs / (node.prediction.batch_s + self.policy_s) for node in self.nodes)

    def to_plain(self) -> dict[str, Any]:
        """Return it as documented in docs/cluster.md."""
        return {
            "num_envs": self.num_envs,
            "envs_per_node": [node.num_envs for node in self.nodes],
            "predicted": {
                "steps_per_s": self.steps_per_s,
                "batch_s": self.batch_s,
                "rollout_steps_per_s": self.rollout_steps_per_s,
            },
            "nodes": [node.to_plain() for node in self.nodes],
        }


def plan_cluster(
    make_env: Callable[..., Any], address: str | None, goal: Goal, budget_s: float, probe_bytes: int | None = None
) -> ClusterPlan:
    """Measure an env on the nodes of a cluster and decide how many to run there.

    Args:
        make_env: builds one env.
        address: of the cluster; see `RayParallelEnv`.
        goal: `num_envs` of the whole cluster, `num_workers` of each node, `policy_s` and `headroom`.
        budget_s: seconds of measurement on each machine.
        probe_bytes: memory that measuring may take; None for most of what is available.

    Raises:
        ClusterError: the cluster cannot be reached, or has no room. DoesNotFit: its memory has no room.
        FactoryError, EnvError, ProbeFailed: the env could not be measured.
    """
    subject = subject_of(make_env, None, ExecutorOptions())
    fleet = Fleet(address, 30.0, ExecutorOptions())
    try:
        fleet.reserve(lambda free: bundles_for(free, goal.num_envs or 10**6, None, None), ("STRICT_SPREAD", 60.0, None))
        reports = fleet.start()
        trips = [_trip_s(place) for place in fleet.places]
        first_of = {_machine_of(report): index for index, report in reversed(list(enumerate(reports)))}
        limits = ProbeLimits(budget_s=budget_s, memory_bytes=probe_bytes)
        surveys = dict(zip(first_of, fleet.survey(list(first_of.values()), subject, limits), strict=True))
        bundles = fleet.bundles
    finally:
        fleet.give_back()
    return decide_for_nodes(reports, bundles, surveys, trips, goal)


def _machine_of(report: Report) -> tuple[str, str]:
    return report.hostname, report.boot_id


def _trip_s(place: Place) -> float:
    """Return the median seconds of an empty call."""
    took = []
    for _ in range(_TRIPS):
        began = time.perf_counter()
        ray.get(place.call("ping"))
        took.append(time.perf_counter() - began)
    return float(np.median(took))


def decide_for_nodes(
    reports: Sequence[Report],
    bundles: Sequence[Resources],
    surveys: dict[tuple[str, str], Survey],
    trips: Sequence[float],
    goal: Goal,
) -> ClusterPlan:
    """Return the plan; pure.

    Args:
        reports: of each share's node.
        bundles: what each share has reserved.
        surveys: by machine: host name and boot id.
        trips: seconds of an empty call of each.
        goal: see `plan_cluster`.

    Raises:
        DoesNotFit: one env per node, or the requested number of envs, does not fit the memory.
    """
    names = [_machine_of(report) for report in reports]
    processors = processors_of(reports, bundles)
    limits, scales = list[Limits](), list[Scale]()
    own = replace(WORKERS_ONLY, num_workers=goal.num_workers, headroom=goal.headroom)
    for name, cores in zip(names, processors, strict=True):
        survey = surveys[name]
        machine = part_of(survey.machine, cores, names.count(name))
        limits.append(Limits(survey.measured, machine, own, ExecutorOptions().num_frames))
        scales.append(Scale(survey.measured, survey.runs, survey.machine, limits[-1]))
    weights = weights_of(reports, bundles)
    num_envs = goal.num_envs or sum(
        plan(scale, its_limits, own)[0].num_envs for scale, its_limits in zip(scales, limits, strict=True)
    )
    while True:
        counts = divide(num_envs, weights)
        workers = [min(count, goal.num_workers or cores) for count, cores in zip(counts, processors, strict=True)]
        settings = [Setting(num_envs=n, num_workers=w) for n, w in zip(counts, workers, strict=True)]
        rooms = [each.usable - each.memory_bytes(setting) for each, setting in zip(limits, settings, strict=True)]
        worst = rooms.index(min(rooms))
        if rooms[worst] >= 0:
            break
        if goal.num_envs is not None or num_envs <= len(limits):
            raise _too_little(reports[worst], limits[worst], settings[worst], goal)
        num_envs = max(len(limits), int(num_envs * _SHRINK))
    nodes = tuple(
        NodePlan(
            report=report,
            machine=its_limits.machine,
            num_envs=setting.num_envs,
            num_workers=setting.num_workers,
            prediction=_predicted(scale, setting),
            trip_s=trip_s,
        )
        for report, its_limits, scale, setting, trip_s in zip(reports, limits, scales, settings, trips, strict=True)
    )
    return ClusterPlan(nodes=nodes, policy_s=goal.policy_s)


def part_of(machine: Machine, cores: int, num_parts: int) -> Machine:
    """Return a share's part of a machine that runs several nodes of the cluster."""
    cpus = machine.cpus[:cores]
    room = machine.cgroup.memory_room
    cgroup = replace(machine.cgroup, memory_room=None if room is None else room // num_parts)
    return replace(
        machine,
        cpus=cpus,
        physical_cores=min(machine.physical_cores, len(cpus)),
        memory_free=machine.memory_free // num_parts,
        cgroup=cgroup,
    )


def _predicted(scale: Scale, setting: Setting) -> Prediction:
    made = scale.predict(setting)
    assert made is not None, "a survey has run synchronous batches on workers"
    return made


def _too_little(report: Report, limits: Limits, setting: Setting, goal: Goal) -> DoesNotFit:
    mib = 2**20
    needed, room = limits.memory_bytes(setting), limits.room
    return DoesNotFit(
        f"sizing failed: expected room for {setting.num_envs} envs on {report.place}, got too little memory: they "
        f"would take {needed / mib:,.0f} MiB; {room / mib:,.0f} MiB are available, {goal.headroom:.0%} of it are left "
        f"alone. Ask for fewer envs.",
        needed_bytes=needed,
        room_bytes=room,
    )
