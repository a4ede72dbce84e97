"""First-K and two groups beside synchronous batches: what is measured with the env itself, and what follows from it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from envherd.executor import ParallelEnv
from envherd.executor.sizing.comparing import Turn, compare_modes, further_env_bytes, with_factors
from envherd.executor.sizing.deciding import decide
from envherd.executor.sizing.driving import Driver
from envherd.executor.sizing.limits import Goal
from envherd.executor.sizing.model import Model, Setting
from envherd.executor.sizing.probing import ProbeLimits
from envherd.workers.testing import CountingEnv
from tests.executor import sized_envs
from tests.executor.test_sizing import MIB, OVERHEAD, advice_of, machine_of, measured_of

WIDE, ONE = Setting(num_envs=8, num_workers=2), Setting(num_envs=4, num_workers=1)
FIRST_K, TWO_GROUPS = replace(WIDE, mode="first-k"), replace(WIDE, mode="two-groups")


def model_of(overhead=OVERHEAD, **changes):
    return Model(measured_of(**changes), replace(overhead, crowd=2), machine_of(2))


def speed_of(model, setting):
    return model.predict(setting).steps_per_s


def beside_sync(model, setting):
    return speed_of(model, setting) / speed_of(model, WIDE)


def turns_of(*, first_k, two_groups, sync=1000.0, one=500.0, resets=()):
    """Return turns with these speeds beside "sync"; in some of them so many envs were reset."""
    turns = []
    for ratio, count in zip(first_k, [*resets] or [0] * len(first_k), strict=True):
        rates = {WIDE: sync, FIRST_K: sync * ratio, TWO_GROUPS: sync * two_groups, ONE: one}
        turns.append(Turn(rates=rates, resets=dict.fromkeys(rates, count)))
    return turns


def test_what_was_measured_is_predicted():
    model = model_of(end_share=0.0)
    turns = turns_of(
        sync=0.7 * speed_of(model, WIDE), one=1.2 * speed_of(model, ONE), first_k=[0.8] * 8, two_groups=1.4
    )
    after = model_of(with_factors(turns, WIDE, ONE, model), end_share=0.0)
    assert beside_sync(after, FIRST_K) == pytest.approx(0.8, rel=0.02)
    assert beside_sync(after, TWO_GROUPS) == pytest.approx(1.4, rel=0.02)
    # The machine may have changed since the env was probed: that is believed to four fifths.
    assert 0.7 < speed_of(after, WIDE) / speed_of(model, WIDE) < 0.8
    assert 1.1 < speed_of(after, ONE) / speed_of(model, ONE) < 1.2


def test_without_a_single_worker_its_speed_is_the_models():
    model = model_of(end_share=0.0)
    turns = turns_of(sync=0.7 * speed_of(model, WIDE), first_k=[0.8] * 8, two_groups=1.0)
    after = model_of(with_factors(turns, WIDE, None, model), end_share=0.0)
    assert speed_of(after, ONE) == speed_of(model, ONE)
    assert speed_of(after, WIDE) < speed_of(model, WIDE)


def test_more_workers_are_taken_to_be_like_those_that_ran():
    overhead = replace(OVERHEAD, one_factor=1.0, sync_factor=0.5, crowd=5)
    model, plain = (Model(measured_of(), one, machine_of(16)) for one in (overhead, replace(OVERHEAD, crowd=5)))
    settings = [Setting(num_envs=16, num_workers=count) for count in (1, 3, 5, 16)]
    ratios = [speed_of(model, setting) / speed_of(plain, setting) for setting in settings]
    assert ratios == pytest.approx([1.0, 0.5**0.5, 0.5, 0.5], rel=0.01)


@pytest.mark.parametrize("setting", [WIDE, FIRST_K, TWO_GROUPS])
def test_steps_that_are_slower_than_modelled_do_not_make_resets_slower(setting):
    slower = replace(OVERHEAD, sync_factor=0.5, are_of_steps=True)
    resets = {"end_share": 0.01, "reset_samples": [1.0] * 5, "reset_cpu_s": 1.0}
    with_resets, without = (1 / speed_of(model_of(slower, **one), setting) for one in (resets, {"end_share": 0.0}))
    plain, plain_without = (1 / speed_of(model_of(**one), setting) for one in (resets, {"end_share": 0.0}))
    assert without == pytest.approx(2 * plain_without)
    assert with_resets - without == pytest.approx(plain - plain_without)
    all_slower = speed_of(model_of(replace(slower, are_of_steps=False), **resets), setting)
    assert 1 / all_slower == pytest.approx(2 * plain)


def test_what_is_uncertain_counts_less():
    model = model_of(end_share=0.0)
    overhead = with_factors(turns_of(first_k=[0.3, 1.0, 0.5, 0.7, 0.4], two_groups=1.0), WIDE, None, model)
    assert 0.5 / beside_sync(model, FIRST_K) < overhead.mode_factors["first-k"] < 0.8


def test_turns_with_resets_are_left_out_where_few_have_any():
    model, without = model_of(end_share=0.01, reset_samples=[0.1] * 5), model_of(end_share=0.0)
    turns = turns_of(first_k=[0.7, 0.2, 0.7, 0.7], two_groups=0.9, resets=[0, 1, 0, 0])
    few = with_factors(turns, WIDE, None, model)
    assert few.mode_factors["first-k"] == pytest.approx(0.7 / beside_sync(without, FIRST_K), rel=0.05)
    assert few.are_of_steps


def test_many_resets_are_compared_too():
    model = model_of(end_share=0.01, reset_samples=[0.1] * 5)
    many = with_factors(turns_of(first_k=[0.7] * 4, two_groups=0.9, resets=[0, 9, 9, 9]), WIDE, None, model)
    assert many.mode_factors["first-k"] == pytest.approx(0.7 / beside_sync(model, FIRST_K), rel=0.05)
    assert not many.are_of_steps


def test_a_few_resets_in_most_turns_say_nothing():
    model = model_of(end_share=0.005, reset_samples=[1.0] * 5)
    turns = turns_of(first_k=[0.7] * 5, two_groups=0.9, sync=5 * speed_of(model, WIDE), resets=[1, 0, 0, 8, 2])
    overhead = with_factors(turns, WIDE, None, model)
    assert overhead == replace(model.overhead, modes_note="resets took most of the time when they were run")


def test_a_policys_time_is_not_made_longer():
    slower = replace(OVERHEAD, sync_factor=0.5, mode_factors={"first-k": 0.5, "two-groups": 0.5})
    waiting = [Model(measured_of(), overhead, machine_of(2), policy_s=10.0) for overhead in (OVERHEAD, slower)]
    for setting in (WIDE, FIRST_K, TWO_GROUPS):
        plain, slowed = (speed_of(model, setting) for model in waiting)
        assert slowed == pytest.approx(plain, rel=0.01)


def test_memory_is_the_mean_of_both():
    model = model_of()
    more = model.memory_bytes(8, 2) + 6 * 4 * MIB
    assert further_env_bytes(more, WIDE, model) == model.measured.further_env_bytes + 2 * MIB
    assert further_env_bytes(0, WIDE, model) == 0


@pytest.mark.parametrize(
    ("changes", "budget_s", "memory_bytes", "said"),
    [
        ({"build_s": 3.0, "build_further_s": 3.0}, 2.0, None, "starting 4 envs takes 6.0 s"),
        ({"step_s": 1.0}, 5.0, None, "a batch takes 2.0 s"),
        ({}, 2.0, 30 * MIB, "4 envs on 2 workers do not fit"),
    ],
)
def test_why_modes_are_not_compared(changes, budget_s, memory_bytes, said):
    model = model_of(**changes)
    limits = ProbeLimits(budget_s=budget_s, memory_bytes=memory_bytes)
    measured, overhead = compare_modes(refuse, model, limits, lambda _share: None)
    assert measured == model.measured
    assert said in overhead.modes_note
    assert overhead.mode_factors == {}


def refuse(num_envs, num_workers):
    raise AssertionError("nothing is to be started")


def test_it_is_said_if_modes_were_not_compared():
    assert not any("only modelled" in line for line in advice_of().why)
    untried = replace(OVERHEAD, modes_note="a batch takes 2.0 s")
    why = decide(measured_of(), untried, machine_of(), Goal()).why
    assert "first-K and two groups are only modelled: a batch takes 2.0 s." in why


@pytest.mark.slow
def test_modes_are_compared_with_the_env_itself():
    asked = []

    def open_env(num_envs, num_workers):
        asked.append((num_envs, num_workers))
        return ParallelEnv(num_envs, CountingEnv, num_workers=num_workers, seed=0)

    shares = []
    model = Model(measured_of(50e-6, first_reset_s=1e-4, reset_samples=[1e-4] * 5), OVERHEAD, machine_of(2))
    measured, overhead = compare_modes(open_env, model, ProbeLimits(budget_s=4.0), shares.append)
    assert asked == [(8, 2), (4, 1)]
    assert overhead.modes_note == ""
    assert set(overhead.mode_factors) == {"first-k", "two-groups"}
    factors = (overhead.one_factor, overhead.sync_factor, *overhead.mode_factors.values())
    assert all(0.02 < factor < 50 and factor != 1 for factor in factors)
    assert measured.further_env_bytes != model.measured.further_env_bytes
    assert len(shares) >= 3


@pytest.mark.slow
def test_a_second_executor_is_not_started_where_memory_is_for_one():
    asked = []

    def open_env(num_envs, num_workers):
        asked.append((num_envs, num_workers))
        return ParallelEnv(num_envs, CountingEnv, num_workers=num_workers, seed=0)

    model = Model(measured_of(50e-6), OVERHEAD, machine_of(2))
    limits = ProbeLimits(budget_s=4.0, memory_bytes=model.memory_bytes(8, 2) + MIB)
    assert compare_modes(open_env, model, limits, lambda _share: None)[1].one_factor == 1
    assert asked == [(8, 2)]


@pytest.mark.slow
@pytest.mark.broken_pool
def test_envs_that_fail_together_are_said_to():
    def open_env(num_envs, num_workers):
        return ParallelEnv(num_envs, sized_envs.FailingEnv, num_workers=num_workers, seed=0)

    model = Model(measured_of(50e-6), OVERHEAD, machine_of(2))
    measured, overhead = compare_modes(open_env, model, ProbeLimits(budget_s=4.0), lambda _share: None)
    assert measured == model.measured
    assert "8 envs on 2 workers failed: " in overhead.modes_note
    assert "ValueError: no such key" in overhead.modes_note


@pytest.mark.slow
def test_a_driver_goes_on_in_another_mode_from_where_the_envs_are():
    with ParallelEnv(4, CountingEnv, num_workers=2, seed=0) as env:
        driver, made = Driver(env, "sync"), 0
        for mode in ("first-k", "two-groups", "sync", "two-groups", "first-k", "sync"):
            driver.switch(mode)
            made += driver.run(0.0, least=5)[0]
        driver.finish()
        steps = sum(worker.env_steps for worker in env.statistics().workers)
        # Four envs were out whenever a mode that exchanges ended; sync leaves none.
        assert steps == made + 4 * 4
