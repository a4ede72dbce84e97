"""Sizing's search on real executors: the choice for envs with known costs, and failing envs."""

from __future__ import annotations

import itertools
import os

import pytest

from envherd.executor import ParallelEnv
from envherd.executor.sizing import search
from envherd.executor.sizing.driving import Driver
from envherd.executor.sizing.recommending import recommend
from envherd.executor.sizing.settings import MODES, Goal
from envherd.workers.errors import EnvherdError
from envherd.workers.testing import CountingEnv
from tests.executor import sized_envs

pytestmark = pytest.mark.slow
CORES = len(os.sched_getaffinity(0))


def sized(make_env, budget_s=30.0, progress=lambda _text, _share: None, **goal):
    return recommend(make_env, goal=Goal(**goal), budget_s=budget_s, progress=progress)


def test_envs_that_wait_get_more_workers_than_cores():
    done = sized(sized_envs.SleepingEnv, budget_s=12.0, num_envs=8 * CORES, modes=("sync",))
    assert done.advice.setting.num_workers > CORES


def test_heavy_tailed_envs_get_first_k():
    done = sized(sized_envs.TailedEnv, budget_s=12.0, num_envs=8, num_workers=8)
    assert done.advice.setting.mode == "first-k"
    assert any("recv(min_envs=num_envs // 2)" in line for line in done.advice.why)


def test_costly_resets_get_reset_ahead():
    done = sized(sized_envs.SlowResetEnv, budget_s=16.0, num_envs=2)
    ahead = [one for one in done.runs if one.setting.reset_ahead]
    assert ahead
    if all(one.rounds == 0 or one.relative < 0.9 for one in done.runs if not one.setting.reset_ahead):
        assert done.advice.setting.reset_ahead
    if done.advice.setting.reset_ahead:  # on a busy machine another setting may be as fast
        assert done.advice.to_plain()["reset_ahead"] is True
        assert any("ExecutorOptions(reset_ahead=True), which takes 4 workers" in line for line in done.advice.why)


def test_long_resets_are_seen_over_whole_episodes():
    """One turn of whole episodes replaces rounds of short turns."""
    done = sized(sized_envs.LongEpisodesEnv, num_envs=CORES, num_workers=CORES, modes=MODES, has_reset_ahead=False)
    ran = {one.setting.mode: one for one in done.runs if one.refusal is None}
    assert set(ran) == set(MODES)
    for one in ran.values():
        assert one.rounds == 1
        assert one.resets >= 1


def test_cheap_envs_are_compared_with_serial():
    done = sized(CountingEnv, budget_s=60.0, num_envs=8)
    assert done.serial.steps_per_s > 0
    parallel = next(one for one in done.runs if one.setting == done.advice.parallel)
    if done.serial.steps_per_s > 1.3 * parallel.steps_per_s:
        assert done.advice.setting.num_workers == 0
    assert any("SerialEnv" in line for line in done.advice.why) or parallel.relative > done.serial.relative


@pytest.mark.parametrize("num_envs", [None, 4])
def test_a_budget_is_kept(num_envs):
    shares = []
    done = sized(CountingEnv, budget_s=0.05, num_envs=num_envs, progress=lambda _text, share: shares.append(share))
    assert all(0 <= share <= 1 for share in shares)
    # The probe uses up all of the budget: mandatory settings run twice, on a very busy machine once.
    assert {one.rounds for one in done.runs} <= {0, 1, 2}
    assert [one.refusal.kind for one in done.runs if not one.rounds].count("start") >= 1
    assert "a longer --budget allows for it" in next(one.refusal.text for one in done.runs if not one.rounds)


def test_an_interrupt_leaves_nothing_behind():
    def press(text, _share):
        if text.startswith("round 2"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sized(CountingEnv, budget_s=10.0, num_envs=4, has_serial=False, progress=press)


@pytest.mark.broken_pool
def test_a_setting_that_fails_is_struck_out_with_its_reason():
    done = sized(sized_envs.LonelyEnv, num_envs=2, has_serial=False)
    failed = [one for one in done.runs if one.refusal is not None]
    assert {one.setting.num_workers for one in done.runs if one.refusal is None} == {1}
    assert failed
    assert all("Address already in use" in one.refusal.text for one in failed)


def test_an_alarm_of_the_program_ends_the_search(monkeypatch):
    turn, calls = Driver.turn, itertools.count()

    def interrupted(*args):
        if next(calls) == 1:
            raise TimeoutError("alarm")
        return turn(*args)

    monkeypatch.setattr(Driver, "turn", interrupted)
    with pytest.raises(TimeoutError, match=r"^alarm$"):
        sized(sized_envs.SleepingEnv, num_envs=2, has_serial=False)


@pytest.mark.full
@pytest.mark.broken_pool
def test_serial_that_hangs_is_struck_out_and_workers_are_compared(monkeypatch):
    """One that dies is in `test_sizing.py`, with a forked process."""
    monkeypatch.setattr(search, "_PATIENCE_S", 4.0)
    done = sized(sized_envs.HangingInSerialEnv, budget_s=30.0, num_envs=2)
    serial = next(one for one in done.runs if not one.setting.num_workers)
    assert serial.refusal.kind == "failure"
    assert "hung: a call took longer than " in serial.refusal.text
    assert done.serial is None
    assert done.advice.setting.num_workers >= 1


@pytest.mark.broken_pool
@pytest.mark.parametrize(
    ("make_env", "said"),
    [
        (sized_envs.CrowdedEnv, "exit code 7"),
        (sized_envs.CrowdedHangingEnv, "hung: a call took longer than "),  # 2 s and ten times a call's usual time
    ],
)
def test_a_worker_that_dies_or_hangs_strikes_out_its_setting_alone(make_env, said, monkeypatch):
    monkeypatch.setattr(search, "_PATIENCE_S", 2.0)
    done = sized(make_env, budget_s=60.0, num_envs=4, has_serial=False)
    failed = {one.setting.num_workers: one.refusal for one in done.runs if one.refusal is not None}
    assert set(failed) == {1}
    assert (failed[1].kind, said in failed[1].text) == ("failure", True), failed[1].text
    assert done.advice.setting.num_workers >= 2


@pytest.mark.broken_pool
def test_if_every_setting_fails_the_command_fails_with_the_last_error():
    with pytest.raises(EnvherdError, match="exit code 7"):
        sized(sized_envs.CrowdedEnv, num_envs=4, num_workers=1)


def test_a_driver_goes_on_in_another_mode_from_where_the_envs_are():
    with ParallelEnv(4, CountingEnv, num_workers=2, seed=0) as env:
        driver = Driver(lambda: env, 0.01)
        turns = [driver.turn(mode) for mode in (*MODES, *reversed(MODES))]
        made = env.statistics().env_steps
    assert all(turn.steps >= 4 for turn in turns)
    assert made > sum(turn.steps for turn in turns)
    assert made - sum(turn.steps for turn in turns) <= 4 * (2 * 4 + 4)  # warm-up, and what was under way at the end
    assert all(0 < turn.busy_s < 2 * turn.seconds for turn in turns)
