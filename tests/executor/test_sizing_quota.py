"""Sizing under a CPU quota, which stops all that computes until its next period, mostly ten times a second."""

from __future__ import annotations

import time

from tests.extras import skip_without

skip_without("cli")

import pytest

from envherd.executor import ParallelEnv
from envherd.executor.machine.cgroups import Cgroup
from envherd.executor.sizing.driving import Driver
from envherd.executor.sizing.overhead import _Runner
from envherd.executor.sizing.turns import Run
from envherd.workers.testing import CountingEnv
from tests.executor.test_sizing import machine_of


@pytest.mark.parametrize(("quota", "is_throttled"), [(None, False), (8.0, False), (16.0, False), (7.5, True)])
def test_a_quota_of_less_than_the_processors_binds(quota, is_throttled):
    assert machine_of(8, cgroup=Cgroup(version=2, cpu_quota=quota)).is_throttled == is_throttled


@pytest.mark.slow
def test_a_batch_that_was_stopped_does_not_count(monkeypatch):
    """What is computed is divided by the quota in the model: the time that is lost must not be in it, too."""
    run, count = Driver.run, 0

    def stopped_now_and_then(driver, *args, **kwargs):
        nonlocal count
        steps, seconds = run(driver, *args, **kwargs)
        count += 1
        return steps, seconds + 10.0 * (count % 5 == 0)

    monkeypatch.setattr(Driver, "run", stopped_now_and_then)
    with ParallelEnv(2, CountingEnv, num_workers=1, seed=0) as env:
        for is_throttled in (False, True):
            runner = _Runner(env, 1, 2, is_throttled=is_throttled)
            runner.take_turn()
            assert (runner.overhead_s < 1.0) == is_throttled


@pytest.mark.slow
@pytest.mark.parametrize("is_throttled", [False, True])
def test_modes_are_compared_over_several_periods(is_throttled):
    with ParallelEnv(2, CountingEnv, num_workers=1, seed=0) as env:
        run = Run(env, is_throttled=is_throttled)
        steps, began = env.statistics().env_steps, time.monotonic()
        spell = run.spell("sync")
        spent_s = time.monotonic() - began
        assert spent_s > (0.5 if is_throttled else 0.15)
        assert spell.rate > 0
        assert env.statistics().env_steps > steps
