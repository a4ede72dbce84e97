"""Errors of the Gymnasium facade: their types are Gymnasium's and ours, and the env is usable afterwards."""

import functools
import multiprocessing
import pickle
from contextlib import closing

import gymnasium
import numpy as np
import pytest
from gymnasium.error import (
    AlreadyPendingCallError,
    ClosedEnvironmentError,
    NoAsyncCallError,
)

from envherd.executor import (
    Busy,
    EnvError,
    ExecutorOptions,
    ResetNeeded,
    WorkerLost,
    WorkerTimeout,
)
from envherd.gymnasium import AsyncVectorEnv
from tests.envs.gymnasium_envs import ERRORS, Failing, Odd, Precise, Slow
from tests.executor.calls import kill
from tests.gates import alarm

ACTIONS = np.zeros(3, np.int64)
TWO_WORKERS = functools.partial(AsyncVectorEnv, num_workers=2)
TYPES = {"value": ValueError, "key": KeyError, "odd": Odd, "os": OSError}


@pytest.fixture
def make():
    made = []

    def build(env=Failing, **kwargs):
        made.append(TWO_WORKERS([env] * 3, **kwargs))
        return made[-1]

    yield build
    for envs in made:
        envs.close()


@pytest.mark.parametrize("name", ERRORS)
def test_exception_of_an_env_has_its_type_and_ours(make, name):
    envs = make()
    envs.reset()
    envs.set_attr("fails", ["", name, ""])
    with pytest.raises(TYPES[name]) as caught:
        envs.step(ACTIONS)
    error = caught.value
    assert isinstance(error, EnvError)
    assert error.env_ids == (1,)
    assert str(ERRORS[name]) in str(error)
    assert "in step" in error.remote_traceback
    assert "in the process" in str(error.__cause__)
    assert envs.executor.statistics().env_errors == 1
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert (str(again), again.context) == (str(error), error.context)


def test_an_env_that_raised_can_be_reset_while_the_others_go_on(make):
    envs = make(autoreset_mode="NextStep")
    envs.reset()
    envs.step(ACTIONS)
    envs.step(ACTIONS)
    envs.set_attr("fails", ["", "value", ""])
    with pytest.raises(ValueError, match="no"):
        envs.step(ACTIONS)  # the third step of the others, their last
    with pytest.raises(ResetNeeded, match=r"envs \[1\]"):
        envs.step(ACTIONS)
    envs.set_attr("fails", "")
    observations, _ = envs.reset(options={"reset_mask": np.array([False, True, False])})
    assert observations[:, 0].tolist() == [3, 0, 3]
    observations, rewards, terminations, _, _ = envs.step(ACTIONS)
    assert observations[:, 0].tolist() == [0, 1, 0]
    assert rewards.tolist() == [0, 1, 0]
    assert not terminations.any()


def test_an_ended_env_is_not_stepped_in_disabled_mode(make):
    envs = make(autoreset_mode="Disabled")
    envs.reset()
    for _ in range(3):
        terminations = envs.step(ACTIONS)[2]
    assert terminations.all()
    for kind in (AssertionError, ResetNeeded):
        with pytest.raises(kind):
            envs.step(ACTIONS)


def test_exceptions_of_envs_are_reported_once():
    with closing(AsyncVectorEnv([Failing] * 3, num_workers=2)) as envs:
        envs.reset()
        envs.set_attr("fails", ["", "odd", "odd"])
        with pytest.raises(
            Odd, match=r"100% odd.*\(env 1, .*Envs \[2\] raised too.*other envs go on"
        ):
            envs.step(ACTIONS)  # a warning would be an error
        with pytest.raises(
            ResetNeeded,
            match=r"Call reset\(\), or reset\(options={'reset_mask': mask}\) for these",
        ) as caught:
            envs.step(ACTIONS)
        assert "step_and_maybe_reset" not in str(caught.value)
        with pytest.raises(PermissionError, match=r"^call refuse failed: .*not today"):
            envs.call("refuse")
        with pytest.raises(AttributeError, match=r"^call nowhere failed"):
            envs.get_attr("nowhere")
        assert envs.get_attr("count") == (1, 0, 0)


class Flagging(Precise):
    """Returns its action's flag as `terminated`, and as `truncated` the first one."""

    action_space = gymnasium.spaces.Discrete(8)
    flags = (0, 1, np.int8(1), 0.0, np.array(1), np.array([1]), 2, None)

    def step(self, action):
        return np.zeros(1, np.float32), 0.0, self.flags[action], self.flags[0], {}


def test_flags_may_be_numbers(make):
    envs = make(Flagging)
    with closing(gymnasium.vector.SyncVectorEnv([Flagging] * 3)) as theirs:
        for actions in (np.arange(3), np.arange(3, 6)):
            envs.reset()
            theirs.reset()
            ours, expected = envs.step(actions), theirs.step(actions)
            assert ours[2].tolist() == expected[2].tolist()
            assert ours[3].tolist() == expected[3].tolist()
    for wrong in (6, 7):
        envs.reset()
        with pytest.raises(EnvError, match="expected a bool as `terminated`"):
            envs.step(np.full(3, wrong))


def test_calls_out_of_order():
    envs = AsyncVectorEnv([Failing] * 3, num_workers=2)
    for name in ("reset", "step", "call"):
        with pytest.raises(
            NoAsyncCallError,
            match=f"Calling `{name}_wait` without any prior call to `{name}_async`.",
        ):
            getattr(envs, f"{name}_wait")()
    envs.reset_async()
    begin = {
        "step_async": lambda: envs.step_async(ACTIONS),
        "reset_async": envs.reset_async,
        "call_async": lambda: envs.call_async("count"),
        "set_attr": lambda: envs.set_attr("count", 1),
    }
    for name, call in begin.items():
        with pytest.raises(
            AlreadyPendingCallError,
            match=f"`{name}` while waiting for a pending call to `reset`",
        ):
            call()
    envs.reset_wait()
    envs.call_async("count")
    for call in (
        lambda: envs.executor.rebuild([1]),
        lambda: envs.executor.rebuild([]),
        lambda: envs.executor.get("count"),
    ):
        with pytest.raises(Busy, match="Call `call_wait` first"):
            call()
    assert len(envs.call_wait(timeout=60)) == 3
    envs.executor.rebuild([1])
    envs.executor.rebuild([])
    with pytest.raises(ValueError, match="use `reset` directly"):
        envs.call("reset")
    envs.step_async(ACTIONS)
    with pytest.warns(
        UserWarning, match="Calling `close` while waiting for a pending call to `step`"
    ):
        envs.close()
    with pytest.raises(ClosedEnvironmentError):
        envs.render()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["step", "reset"])
def test_an_alarm_of_the_program_is_not_the_timeout_of_a_wait(name):
    with closing(AsyncVectorEnv([Slow] * 2, num_workers=2)) as envs:
        envs.reset()
        envs.set_attr("pause", 1.0)
        envs.step_async(ACTIONS[:2]) if name == "step" else envs.reset_async()
        with pytest.raises(TimeoutError, match=r"^alarm$") as caught, alarm(0.2):
            getattr(envs, f"{name}_wait")(timeout=30)
        assert type(caught.value) is TimeoutError


@pytest.mark.slow
def test_a_wait_that_runs_out_of_time_can_be_got_over():
    envs = AsyncVectorEnv([Slow] * 3, num_workers=2)
    envs.reset()
    for name, begin in (
        ("step", lambda: envs.step_async(ACTIONS)),
        ("reset", envs.reset_async),
        ("call", lambda: envs.call_async("nap")),
    ):
        envs.set_attr("pause", 0.7)
        begin()
        with pytest.raises(
            multiprocessing.TimeoutError, match=r"has timed out after 0\.05 second"
        ):
            getattr(envs, f"{name}_wait")(timeout=0.05)
        envs.set_attr("pause", 0.0)
        assert envs.call("nap") == ("rested",) * 3
        if name != "call":
            with pytest.raises(ResetNeeded):
                envs.step(ACTIONS)
        envs.reset()
        assert envs.step(ACTIONS)[0].tolist() == [[1.0]] * 3
    envs.set_attr("pause", 5.0)
    envs.step_async(ACTIONS)
    with pytest.warns(UserWarning, match="Calling `close`"):
        envs.close(terminate=True)


@pytest.mark.broken_pool
@pytest.mark.slow
def test_the_rows_of_a_lost_worker_are_a_truncation():
    for mode, after in (("NextStep", [[1.0]] * 3), ("SameStep", [[0.0]] * 3)):
        with closing(
            AsyncVectorEnv(
                [Failing] * 3,
                num_workers=1,
                autoreset_mode=mode,
                options=ExecutorOptions(on_worker_loss="restart"),
            )
        ) as envs:
            envs.reset()
            envs.step(ACTIONS)
            kill(envs.executor, 0)
            observations, rewards, terminations, truncations, infos = envs.step(ACTIONS)
            assert observations.tolist() == after
            assert rewards.tolist() == [0.0] * 3
            assert truncations.all()
            assert not terminations.any()
            if mode == "SameStep":
                assert [last.tolist() for last in infos["final_obs"]] == [[1.0]] * 3
            assert infos["interrupted"].all()
            observations = envs.step(ACTIONS)[0]
            assert observations.tolist() == (
                [[0.0]] * 3 if mode == "NextStep" else [[1.0]] * 3
            )
            assert "interrupted" not in envs.step(ACTIONS)[4]


@pytest.mark.broken_pool
@pytest.mark.slow
def test_other_workers_complete_the_step_in_which_one_died():
    with closing(AsyncVectorEnv([Failing] * 3, num_workers=3)) as envs:
        envs.reset()
        kill(envs.executor, 1)
        with pytest.raises(WorkerLost):
            envs.step(ACTIONS)
        others = envs.executor.current([0, 2])
        assert others["observation", "0"].tolist() == [[1.0]] * 2
        assert not others["done"].any()
        observations, _ = envs.reset(
            options={"reset_mask": np.array([True, False, False])}
        )
        assert observations[[0, 2]].tolist() == [[0.0], [1.0]]


@pytest.mark.broken_pool
@pytest.mark.slow
def test_wait_for_other_workers_than_the_lost_one_times_out():
    with closing(
        AsyncVectorEnv(
            [Slow] * 3, num_workers=3, options=ExecutorOptions(on_worker_loss="restart")
        )
    ) as envs:
        envs.reset()
        envs.set_attr("pause", [0.0, 1.5, 1.5])
        envs.step_async(ACTIONS)
        kill(envs.executor, 1)
        with pytest.raises(multiprocessing.TimeoutError):
            envs.step_wait(timeout=0.2)
        envs.reset()
        envs.set_attr("pause", 0.0)
        assert envs.step(ACTIONS)[0].tolist() == [[1.0]] * 3


@pytest.mark.broken_pool
@pytest.mark.slow
@pytest.mark.parametrize("lost", [[1], [0, 1]])
def test_a_loss_that_a_list_of_actions_meets_is_an_interrupted_row(lost):
    """Lists reach the envs as messages, ahead of the step."""
    with closing(
        AsyncVectorEnv(
            [Failing] * 3,
            num_workers=3,
            autoreset_mode="SameStep",
            options=ExecutorOptions(on_worker_loss="restart"),
        )
    ) as envs:
        envs.reset()
        for env_id in lost:
            kill(envs.executor, env_id)
        observations, _, _, truncated, infos = envs.step([0, 0, 0])
        is_lost = [env_id in lost for env_id in range(3)]
        assert infos["interrupted"].tolist() == truncated.tolist() == is_lost
        assert observations.flatten().tolist() == [float(not one) for one in is_lost]
        assert "interrupted" not in envs.step([0, 0, 0])[4]


@pytest.mark.broken_pool
@pytest.mark.slow
@pytest.mark.parametrize("limit", ["step_timeout_s", "reset_timeout_s"])
def test_steps_and_resets_have_limits_of_their_own(limit):
    with closing(
        AsyncVectorEnv([Slow], options=ExecutorOptions(**{limit: 0.3}))
    ) as envs:
        calls = {
            "step_timeout_s": lambda: envs.step(ACTIONS[:1]),
            "reset_timeout_s": envs.reset,
        }
        envs.reset()
        envs.set_attr("pause", 1.0)
        late = calls.pop(limit)
        for in_time in calls.values():
            in_time()
        with pytest.raises(WorkerTimeout):
            late()


def test_arguments_that_cannot_be():
    for kwargs, expected_text in (
        ({"worker": print}, "expected no `worker`"),
        ({"max_concurrency": 0}, "must be a positive"),
        ({"max_concurrency": 1.5}, "must be an integer"),
        (
            {"max_concurrency": 2, "num_workers": "auto"},
            "together with max_concurrency",
        ),
        (
            {"max_concurrency": 2, "options": ExecutorOptions(env_threads=True)},
            "together with max_concurrency",
        ),
        (
            {"max_concurrency": 2, "options": ExecutorOptions(alone=True)},
            "together with max_concurrency",
        ),
        ({"autoreset_mode": "Never"}, "Never"),
        ({"num_workers": 0}, "num_workers failed"),
    ):
        with pytest.raises(ValueError, match=expected_text):
            AsyncVectorEnv([Failing], **kwargs)


def test_envs_that_are_batches_are_refused_at_once():
    with pytest.raises(TypeError, match="expected single envs, got SyncVectorEnv"):
        AsyncVectorEnv(
            [
                functools.partial(
                    gymnasium.make_vec, "CartPole-v1", 2, vectorization_mode="sync"
                )
            ]
        )
