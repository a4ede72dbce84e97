"""The examples for clusters, on the cluster that all tests here share."""

import re

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.full
def test_ray_step_is_as_on_one_machine(cluster, run_example):
    printed = run_example("ray_step", "--address", cluster.address)
    assert "(3, 3) envs on 2 nodes" in printed
    assert re.search(r"\(6, 50\) transitions, \d+ episodes; as on one machine: True", printed)


@pytest.mark.full
def test_ray_async_does_not_wait_for_the_slow_node(cluster, run_example):
    printed = run_example("ray_async", "--address", cluster.address)
    seen = [int(word) for word in re.search(r"each env: \[(.*)\]", printed)[1].split(", ")]
    assert sum(seen) == 120
    assert sum(seen[:3]) > sum(seen[3:])


@pytest.mark.full
def test_ray_rollouts_come_with_versions(cluster, run_example):
    printed = run_example("ray_rollouts", "--address", cluster.address)
    versions = [int(word) for word in re.findall(r"\(4, 64\) of version (\d+), \d+ behind", printed)]
    assert len(versions) == 12
    assert versions[-1] > versions[0] == 0
    assert "(8, 64) of version 12, from all nodes at once" in printed
