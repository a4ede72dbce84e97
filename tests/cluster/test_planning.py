"""The plan for a cluster, and the model of a large one: arithmetic; no cluster, no process."""

import pytest

from tests.extras import skip_without

skip_without("ray", "cli")

from envherd.executor.cluster.orders import Report, Survey
from envherd.executor.cluster.planning import decide_for_nodes
from envherd.executor.cluster.shares import divide
from envherd.executor.sizing.limits import DoesNotFit
from envherd.executor.sizing.settings import Goal
from tests.executor.sizing_figures import GIB, MIB, machine_of, measured_of, run_of

TRIP_S = 0.002


def plan(cores, memory=64 * GIB, names=None, step_s=1e-3, **goal):
    """Plan for nodes with given numbers of processors, each on a separate machine unless `names` are given."""
    names = names or [f"host{index}" for index in range(len(cores))]
    reports = [
        Report(node_id=str(i), hostname=name, pid=1, cores=count, memory_bytes=0, versions={}, boot_id=name)
        for i, (name, count) in enumerate(zip(names, cores, strict=True))
    ]
    memories = memory if isinstance(memory, list) else [memory] * len(cores)
    surveys = {
        (name, name): Survey(
            machine=machine_of(count, memory=room),
            measured=measured_of(step_s=step_s),
            runs=(run_of(count, count / step_s, num_envs=4 * count, busy=0.9),),
        )
        for name, count, room in zip(names, cores, memories, strict=True)
    }
    return decide_for_nodes(reports, [{"CPU": float(n)} for n in cores], surveys, [TRIP_S] * len(cores), Goal(**goal))


def test_unlike_nodes_get_unlike_shares_as_an_executor_gives_them():
    made = plan([16, 8, 4], num_envs=56)
    assert [node.num_envs for node in made.nodes] == [32, 16, 8] == divide(56, [16, 8, 4])
    assert [node.num_workers for node in made.nodes] == [16, 8, 4]
    assert made.batch_s == max(node.prediction.batch_s for node in made.nodes) + TRIP_S
    assert made.steps_per_s < made.rollout_steps_per_s
    assert made.rollout_steps_per_s == pytest.approx(sum(node.prediction.steps_per_s for node in made.nodes))
    assert plan([16, 8, 4], num_envs=56, num_workers=2).nodes[0].num_workers == 2


def test_as_many_are_chosen_as_the_nodes_would_choose_and_as_fit_the_smallest_memory():
    counts = [node.num_envs for node in plan([8, 4]).nodes]
    assert counts == divide(sum(counts), [8, 4])
    assert counts[1] >= 4
    tight = plan([8, 8], memory=[64 * GIB, 400 * MIB], step_s=1e-5)
    assert tight.nodes[0].num_envs == tight.nodes[1].num_envs
    assert tight.nodes[1].prediction.memory_bytes <= 320 * MIB
    assert tight.num_envs < plan([8, 8], step_s=1e-5).num_envs


def test_what_does_not_fit_names_the_node():
    with pytest.raises(DoesNotFit, match=r"room for 100 envs on node host1/1, got too little memory.*Ask for fewer"):
        plan([8, 8], memory=[64 * GIB, 1 * GIB], num_envs=200)
    with pytest.raises(DoesNotFit):
        plan([8, 8], memory=[64 * GIB, 10 * MIB])


def test_nodes_of_one_machine_share_its_memory():
    apart = plan([4, 4], num_envs=8)
    together = plan([4, 4], num_envs=8, names=["one", "one"])
    assert [node.machine.memory_available for node in together.nodes] == [32 * GIB] * 2
    assert [node.machine.memory_available for node in apart.nodes] == [64 * GIB] * 2
