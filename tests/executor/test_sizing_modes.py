"""First-K and two groups beside synchronous batches: what is measured with the env itself, and what follows from it."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import time
from dataclasses import replace

from tests.extras import skip_without

skip_without("cli")

import numpy as np
import pytest
from psutil import Process

from envherd.executor import ParallelEnv
from envherd.executor.sizing.comparing import compare_modes, further_env_bytes, with_crowding, with_factors
from envherd.executor.sizing.deciding import decide
from envherd.executor.sizing.driving import Driver
from envherd.executor.sizing.limits import Goal
from envherd.executor.sizing.model import Model, Setting
from envherd.executor.sizing.modes import MODES
from envherd.executor.sizing.others import OthersShare
from envherd.executor.sizing.overhead import BusyTime, typical_log
from envherd.executor.sizing.probing import ProbeLimits
from envherd.executor.sizing.turns import Spell, Turn, quiet_spell
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


@pytest.mark.parametrize(("factor", "on_one"), [(1.8, 1.0), (0.7, 0.7)])
def test_what_several_workers_gain_by_a_mode_one_does_not(factor, on_one):
    plain, after = (model_of(replace(OVERHEAD, mode_factors=factors)) for factors in ({}, {"first-k": factor}))
    on_one_worker = replace(ONE, mode="first-k")
    assert speed_of(after, FIRST_K) == pytest.approx(factor * speed_of(plain, FIRST_K))
    assert speed_of(after, on_one_worker) == pytest.approx(on_one * speed_of(plain, on_one_worker))
    seen = model_of(replace(OVERHEAD, mode_factors={"first-k": factor}, one_mode_factors={"first-k": 0.4}))
    assert speed_of(seen, on_one_worker) == pytest.approx(0.4 * speed_of(plain, on_one_worker))


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


def disturbed(turns, shares):
    return [replace(turn, others_share=share) for turn, share in zip(turns, shares, strict=True)]


def test_turns_that_others_disturbed_are_left_out():
    model = model_of(end_share=0.0)
    turns = disturbed(turns_of(first_k=[1.5, 0.8, 1.6, 0.8, 0.8, 1.5], two_groups=1.0), [0.4, 0.0, 0.3, 0.1, 0.05, 0.2])
    overhead = with_factors(turns, WIDE, None, model)
    assert overhead.mode_factors["first-k"] == pytest.approx(0.8 / beside_sync(model, FIRST_K), rel=0.05)
    assert overhead.others_share == 0.05


def test_what_was_measured_beside_others_counts_less_and_that_is_said():
    model = model_of(end_share=0.0)
    turns = turns_of(first_k=[1.5] * 6, two_groups=1.0)
    alone, beside = (with_factors(disturbed(turns, [share] * 6), WIDE, None, model) for share in (0.0, 0.4))
    assert 1.05 < beside.mode_factors["first-k"] < 0.85 * alone.mode_factors["first-k"]
    assert beside.sync_factor == alone.sync_factor
    said = [
        any("took 40% of the processors" in line for line in decide(measured_of(), one, machine_of(), Goal()).why)
        for one in (alone, beside)
    ]
    assert said == [False, True]


def test_a_few_values_that_agree_are_not_sure():
    (_, few), (_, many), (_, apart) = (
        typical_log(values) for values in ([1.0, 1.001], [1.0] * 12, [0.5, 1.0, 2.0] * 4)
    )
    assert many < 0.02
    assert 0.05 < few < apart
    assert typical_log([2.0])[1] == np.inf
    assert typical_log([0.5, 2.0, 8.0])[0] == pytest.approx(np.log(2.0))


def crowded(values, overhead):
    turns = [
        replace(turn, crowding=value)
        for turn, value in zip(turns_of(first_k=[1.0] * len(values), two_groups=1.0), values, strict=True)
    ]
    return with_crowding(turns, WIDE, overhead).crowding


def test_the_envs_own_crowding_counts_as_it_is_sure():
    overhead = replace(OVERHEAD, crowd=2, crowding=1.6, crowding_error=0.2)
    assert crowded([1.1] * 5, overhead) == pytest.approx(1.1, rel=0.02)
    assert 1.15 < crowded([0.8, 1.1, 1.6, 0.9, 1.3, None], overhead) < 1.5
    assert crowded([0.8] * 5, overhead) == 1.0
    assert crowded([None] * 5, overhead) == 1.6
    assert crowded([1.1] * 5, replace(overhead, crowd=4)) == 1.6


def test_a_slower_crowd_makes_resets_slower_and_steps_as_measured():
    plain = {"end_share": 0.01, "reset_samples": [1.0] * 5, "reset_cpu_s": 1.0}
    model = model_of(**plain)
    rate = speed_of(model_of(end_share=0.0), WIDE)
    predicted = []
    for crowding in (1.0, 1.5):
        turns = turns_of(first_k=[1.0] * 8, two_groups=1.0, sync=rate)
        overhead = with_factors([replace(turn, crowding=crowding) for turn in turns], WIDE, None, model)
        after = model_of(overhead, **plain), model_of(overhead, end_share=0.0)
        predicted.append([1 / speed_of(each, WIDE) for each in after])
    (less, steps), (more, still) = predicted
    assert still == pytest.approx(steps, rel=0.15)  # what the drift leaves of it
    assert more - still == pytest.approx(1.5 * (less - steps), rel=0.05)


def test_a_spell_with_a_reset_here_or_there_is_run_again():
    def run(resets, until):
        left, restarts = iter([Spell(rate=1.0, resets=count, step_s=1.0) for count in resets]), []
        return quiet_spell(lambda: next(left), lambda: restarts.append(1), 8, until).resets, len(restarts)

    later = time.monotonic() + 1000
    assert run([1, 8, 0], later) == (0, 2)
    assert run([9], later) == (9, 0)  # they are part of every spell
    assert run([1], time.monotonic()) == (1, 0)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_all_envs_begin_anew_together(mode):
    with ParallelEnv(4, functools.partial(CountingEnv, 50), num_workers=2, seed=0) as env:
        driver, resets = Driver(env, mode), env.engine.pool.slab.words["resets"]
        driver.run(0.0, least=33)
        driver.restart()
        before = resets.copy()
        driver.run(0.0, least=20)
        assert (resets == before).all()
        driver.run(0.0, least=120)
        assert (resets > before).all()
        driver.finish()


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


def opener(asked):
    """Return a function that starts executors, and notes what it was asked for."""

    def open_env(num_envs, num_workers):
        asked.append((num_envs, num_workers))
        return ParallelEnv(num_envs, CountingEnv, num_workers=num_workers, seed=0)

    return open_env


@pytest.mark.slow
def test_modes_are_compared_with_the_env_itself():
    asked = []
    shares = []
    model = Model(measured_of(50e-6, first_reset_s=1e-4, reset_samples=[1e-4] * 5), OVERHEAD, machine_of(2))
    measured, overhead = compare_modes(opener(asked), model, ProbeLimits(budget_s=4.0), shares.append)
    assert asked == [(8, 2), (4, 1)]
    assert overhead.modes_note == ""
    assert set(overhead.mode_factors) == {"first-k", "two-groups"}
    factors = (overhead.one_factor, overhead.sync_factor, *overhead.mode_factors.values())
    assert all(0.02 < factor < 50 and factor != 1 for factor in factors)
    assert measured.further_env_bytes != model.measured.further_env_bytes
    assert len(shares) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("rival", [0.0, 1e9])
def test_a_single_worker_that_is_nearly_as_fast_is_run_in_all_modes(monkeypatch, rival):
    monkeypatch.setattr("envherd.executor.sizing.comparing._RIVAL", rival)
    model = Model(measured_of(50e-6, first_reset_s=1e-4, reset_samples=[1e-4] * 5), OVERHEAD, machine_of(2))
    overhead = compare_modes(opener([]), model, ProbeLimits(budget_s=2.0), lambda _share: None)[1]
    assert set(overhead.one_mode_factors) == (set() if rival else {"first-k", "two-groups"})
    assert set(overhead.mode_factors) == {"first-k", "two-groups"}
    assert overhead.one_mode_factors != overhead.mode_factors


@pytest.mark.slow
def test_a_second_executor_is_not_started_where_memory_is_for_one():
    asked = []
    model = Model(measured_of(50e-6), OVERHEAD, machine_of(2))
    limits = ProbeLimits(budget_s=4.0, memory_bytes=model.memory_bytes(8, 2) + MIB)
    assert compare_modes(opener(asked), model, limits, lambda _share: None)[1].one_factor == 1
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


@pytest.mark.slow
def test_envs_of_one_worker_are_stepped_while_the_other_rests():
    with ParallelEnv(4, CountingEnv, num_workers=2, seed=0) as env:
        driver, busy = Driver(env, "sync"), BusyTime(env.engine.pool)
        driver.run(0.0, least=3)
        before = [worker.env_steps for worker in env.statistics().workers]
        busy.begin()
        assert driver.run_some(np.array([2, 3]), 0.0, least=5)[0] == 10
        first, second = busy.end()
        assert (first, second > 0) == (0, True)
        after = [worker.env_steps for worker in env.statistics().workers]
        assert np.subtract(after, before).tolist() == [0, 10]
        driver.run(0.0, least=3)


@pytest.mark.slow
def test_what_others_use_of_our_processors_is_seen_and_what_ours_use_is_not():
    cpu = min(os.sched_getaffinity(0))
    command = [sys.executable, "-S", "-c", f"import os; os.sched_setaffinity(0, [{cpu}])\nwhile True: pass"]
    with subprocess.Popen(command) as process:
        try:
            time.sleep(0.3)
            used = Process(process.pid).cpu_times
            as_other, as_own, before = OthersShare([]), OthersShare([process.pid]), used().user
            time.sleep(1.0)
            own, other, used_s = as_own.end(), as_other.end(), used().user - before
        finally:
            process.kill()
    # A busy machine gives the loop little, and a rounded count of it.
    assert used_s > 0
    assert other - own == pytest.approx(used_s / len(os.sched_getaffinity(0)), rel=0.3, abs=0.02)
