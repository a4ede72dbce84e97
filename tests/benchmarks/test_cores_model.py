"""The model of many processors: known results, and its own invariants."""

from __future__ import annotations

import json

import pytest

from benchmarks import cores
from benchmarks.cores_model import MODES, Costs, Setting, Work, simulate

NOTHING = Costs(
    batch_s=0.0, env_s=0.0, byte_s=0.0, ring_s=0.0, part_s=0.0, part_env_s=0.0, worker_env_s=0.0, wake_s=0.0
)
EVEN, SPIKES = Work(name="even", step_s=1e-3), Work(name="spikes", step_s=1e-3, law="spikes")


def setting(mode, num_workers=4, envs_per_worker=4, cores=8):
    return Setting(mode=mode, num_workers=num_workers, envs_per_worker=envs_per_worker, cores=cores)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_workers", [1, 4])
def test_nothing_is_lost_where_nothing_costs(mode, num_workers):
    found = simulate(NOTHING, EVEN, setting(mode, num_workers))
    assert found.of_ideal == pytest.approx(1.0, rel=0.02)
    assert found.caller_share == 0


def test_a_synchronous_batch_is_the_sum_of_what_happens_in_turn():
    costs = Costs(
        batch_s=50e-6, env_s=1e-6, byte_s=1e-9, ring_s=2e-6, part_s=0, part_env_s=0, worker_env_s=3e-6, wake_s=10e-6
    )
    work = Work(name="one", step_s=1e-3, row_bytes=100, policy_s=2e-3)
    found = simulate(costs, work, setting("sync", 1, 4))
    batch_s = 50e-6 + 4 * (1e-6 + 0.1e-6) + 2e-3 + 2e-6 + 10e-6 + 4 * (1e-3 + 3e-6) + 10e-6
    assert found.steps_per_s == pytest.approx(4 / batch_s, rel=1e-3)
    assert found.caller_share == pytest.approx((50e-6 + 4 * 1.1e-6 + 2e-6) / batch_s, rel=1e-2)


def test_what_waits_for_the_slowest_loses_where_steps_vary_and_first_k_does_not():
    shares = {mode: simulate(NOTHING, SPIKES, setting(mode), 60_000).of_ideal for mode in MODES}
    assert shares["sync"] < 0.6
    assert shares["sync"] < shares["two groups"] + 0.05 < shares["first-K"]
    assert shares["first-K"] > 0.9


def test_a_caller_that_is_always_busy_is_the_limit():
    slow = Costs(batch_s=0, env_s=0, byte_s=0, ring_s=0, part_s=16e-3, part_env_s=0, worker_env_s=0, wake_s=0)
    found = simulate(slow, EVEN, setting("first-K"))
    assert found.caller_share == pytest.approx(1.0)
    assert found.steps_per_s == pytest.approx(8 / 16e-3, rel=0.02)


def test_what_the_caller_does_is_taken_from_a_worker_where_processors_are_short():
    costs = Costs(batch_s=0, env_s=0, byte_s=0, ring_s=0, part_s=0.5e-3, part_env_s=0, worker_env_s=0, wake_s=0)
    alone, shared = (simulate(costs, EVEN, setting("first-K", 2, 4, cores=count)).of_ideal for count in (3, 2))
    assert alone == pytest.approx(1.0, rel=0.02)
    assert 0.85 < shared < 0.92  # half a millisecond of every four and a half of the two processors'


def test_the_published_results_give_costs_and_a_page():
    results = json.loads(cores.RESULTS.read_text())
    if "growth" not in results:
        pytest.skip("the growth laws were not measured")
    text = "\n".join(cores.lines(results))
    assert text.count("| first-K |") >= len(cores.WORKS)
    assert all(value >= 0 for value in vars(cores.costs_of(results)).values())
