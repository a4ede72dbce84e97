"""Sizing on real executors: the choice for envs with known costs, and failing envs."""

import contextlib
import os

import pytest

from envherd.executor import ParallelEnv
from envherd.executor.sizing import confirming, probe
from envherd.executor.sizing.probe import Driver, Subject
from envherd.executor.sizing.recommending import recommend
from envherd.executor.sizing.rule import Goal
from envherd.workers.errors import EnvherdError
from envherd.workers.testing import CountingEnv
from tests.envs import sized_envs
from tests.extras import needs
from tests.faults.children import files_left

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _measures_quickly(request, monkeypatch):
    """Let turns be short and the probe have two envs: no test here asks for precise figures.

    Searches have the helper of many tests, which has imported torch for the workers of serial settings; except with
    `own_helper`.
    """
    if "own_helper" not in request.fixturenames:
        monkeypatch.setattr(Subject, "helper", contextlib.nullcontext)
    monkeypatch.setattr(confirming, "_SPAN_S", 0.02)
    monkeypatch.setattr(probe, "_SHORT_ENVS", 2)


def sized(make_env, budget_s=30.0, progress=lambda _text, _share: None, **goal):
    return recommend(make_env, goal=Goal(**goal), budget_s=budget_s, progress=progress)


def test_a_budget_is_kept():
    shares = []
    done = sized(
        CountingEnv,
        budget_s=0.05,
        num_envs=4,
        progress=lambda _text, share: shares.append(share),
    )
    assert all(0 <= share <= 1 for share in shares)
    # The probe uses up all of the budget: the rule's choice runs once, in both modes if some steps took long.
    ran = [one for one in done.runs if one.rounds]
    assert {one.rounds for one in ran} == {1}
    assert len({one.setting.num_workers for one in ran}) == 1
    refusals = [one.refusal for one in done.runs if one.refusal is not None]
    assert all("a longer --budget allows for it" in text for text in refusals)


@pytest.mark.broken_pool
def test_a_setting_that_fails_is_struck_out_with_its_reason():
    done = sized(sized_envs.LonelyEnv, budget_s=300.0, num_envs=2)
    failed = {
        one.setting.num_workers: one.refusal
        for one in done.runs
        if one.refusal is not None
    }
    # Serial envs and workers of one helper may meet.
    assert {2} <= set(failed) <= {0, 2}
    assert all("Address already in use" in refusal for refusal in failed.values())


def test_an_alarm_of_the_program_ends_the_search(monkeypatch):
    def interrupted(*_):
        raise TimeoutError("alarm")

    def progress(text, _share):
        if text == "round 1":
            monkeypatch.setattr(Driver, "step", interrupted)

    with pytest.raises(TimeoutError, match=r"^alarm$"):
        sized(sized_envs.SleepingEnv, num_envs=2, progress=progress)


@pytest.mark.quiet
@pytest.mark.broken_pool
@pytest.mark.parametrize(
    ("make_env", "expected_text"),
    [
        (sized_envs.CrowdedEnv, "exit code 7"),
        # 5 s and a call's usual time.
        pytest.param(
            sized_envs.CrowdedHangingEnv,
            "gave no answer within ",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_worker_that_dies_or_hangs_strikes_out_its_setting_alone(
    make_env, expected_text, monkeypatch
):
    monkeypatch.setattr(confirming, "PATIENCE_S", 5.0)
    # A serial setting imports: with the usual factor its patience would be 100 s longer.
    monkeypatch.setattr(confirming, "_PATIENCE_FACTOR", 1.0)
    done = sized(make_env, budget_s=300.0, num_envs=4)
    failed = {
        one.setting.num_workers: one.refusal
        for one in done.runs
        if one.refusal is not None
    }
    assert set(failed) == {0, 1}
    assert all(expected_text in refusal for refusal in failed.values()), failed
    assert done.chosen.setting.num_workers >= 2


@pytest.mark.usefixtures("own_helper")
@pytest.mark.long
def test_a_setting_without_descriptors_is_the_first_reason():
    lowest = os.dup(0)
    os.close(lowest)
    # Those in use above it count for a limit, which is on their numbers.
    num_above = sum(int(name) > lowest for name in os.listdir("/proc/self/fd"))
    with files_left(21 + num_above):
        done = sized(CountingEnv, budget_s=10.0)
    assert not done.chosen.setting.num_workers
    assert done.binding == "open files"
    assert "open files" in done.why[0]


@pytest.mark.broken_pool
def test_if_every_setting_fails_the_command_fails_with_the_last_error():
    with pytest.raises(EnvherdError, match="exit code 7"):
        sized(sized_envs.CrowdedEnv, num_envs=4, num_workers=1)


def test_a_driver_goes_on_in_another_mode_from_where_the_envs_are():
    with ParallelEnv(4, CountingEnv, num_workers=2, seed=0) as env:
        driver = Driver(env, 0.01)
        turns = [driver.turn(mode) for mode in ("sync", "first-k", "first-k", "sync")]
        made = env.statistics().env_steps
    assert all(turn.steps >= 4 for turn in turns)
    assert made > sum(turn.steps for turn in turns)
    # Warm-up, and what was under way at the end.
    assert made - sum(turn.steps for turn in turns) <= 4 * (2 * 4 + 4)
    assert all(0 < turn.busy_share <= 1 for turn in turns)


@needs("torchrl")
@pytest.mark.parametrize(
    "name", ["torchrl:torchrl.envs:PendulumEnv", "gymnasium_vec:CartPole-v1:3"]
)
def test_sizing_steps_envs_with_state_inputs_and_batch_envs(name):
    with ParallelEnv(2, name, num_workers=1, seed=0) as env:
        driver = Driver(env, 0.01)
        assert all(driver.turn(mode).steps >= 2 for mode in ("sync", "first-k"))
