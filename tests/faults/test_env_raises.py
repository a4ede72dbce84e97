"""An exception of an env names that env in the caller; its worker and all other envs continue. See also `matrix`."""

import dataclasses
import functools
import os
import signal
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from envherd.executor import (
    AsyncCollector,
    Collector,
    EnvError,
    ExecutorOptions,
    FactoryError,
    ParallelEnv,
    ResetNeeded,
    SerialEnv,
)
from envherd.executor.rollouts.rollout import RolloutRunner, StepwiseRun
from envherd.workers.protocol import Op
from envherd.workers.testing import CountingEnv
from tests.envs.breaking_envs import BAD_OBSERVATIONS, EXCEPTIONS, FaultyEnv
from tests.envs.faulty_envs import Faulty
from tests.executor.calls import ENDLESS, act, both, counters, only


def reset_and_step(env, env_id):
    env.reset(only(env, env_id))
    env.send(act(env)[:1], [env_id])
    env.recv()


@pytest.mark.slow
@pytest.mark.parametrize("at", ["reset", "step"])
def test_exception_names_its_env_alone_and_workers_continue(at):
    faults = [*EXCEPTIONS, *BAD_OBSERVATIONS]
    make = [
        functools.partial(FaultyEnv, fault, at=at, episode=1, step=1)
        for fault in faults
    ]
    with ParallelEnv(len(faults), make, num_workers=2) as env:
        env.reset()
        env.step(act(env))
        pids = [worker.pid for worker in env.statistics().workers]
        for env_id, fault in enumerate(faults):
            is_bad = fault in BAD_OBSERVATIONS
            text = (
                r"writing observation failed: expected int64 \(3,\), got "
                if is_bad
                else f"{at} failed: "
            )
            with pytest.raises(EnvError, match=text) as caught:
                reset_and_step(env, env_id)
            assert caught.value.context["phase"] == at
            assert caught.value.env_ids == (env_id,)
        assert [worker.pid for worker in env.statistics().workers] == pids
        assert env.statistics().env_errors == len(faults)


class DiesRebuilt(Faulty):
    """Its reset kills its worker if its folder has a file `fatal` and no file `wrecked`, at which resets raise."""

    def reset(self, **kwargs):
        fatal = Path(self._folder, "fatal")
        if fatal.exists() and not Path(self._folder, "wrecked").exists():
            fatal.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().reset(**kwargs)


@pytest.mark.slow
@pytest.mark.broken_pool
def test_a_worker_that_dies_as_an_env_is_rebuilt_leaves_no_lost_env(tmp_path):
    """The other env of the worker had answered its reset: it is reset again."""
    folders = [tmp_path, tmp_path / "missing"]
    make = [functools.partial(DiesRebuilt, str(folder)) for folder in folders]
    options = ExecutorOptions(on_worker_loss="restart", on_env_error="interrupt")
    with ParallelEnv(2, make, num_workers=1, options=options) as env:
        env.reset()
        for name in ("wrecked", "fatal"):
            (tmp_path / name).touch()
        assert not env.reset()["done"].any()
        assert env.statistics().worker_losses == 1
        _, root = env.step_and_maybe_reset(
            TensorDict({"action": torch.zeros(2, dtype=torch.int64)}, [2])
        )
        assert env.statistics().interrupted == 0
        assert root["observation"].tolist() == [[1], [1]]


@pytest.mark.slow
@pytest.mark.parametrize("fault", EXCEPTIONS)
def test_a_factory_that_raises_leaves_no_process(fault):
    make = [
        CountingEnv,
        CountingEnv,
        functools.partial(FaultyEnv, fault, at="construct"),
    ]
    with pytest.raises(
        FactoryError, match=r"env 2, worker 1, pid \d+, phase build"
    ) as caught:
        ParallelEnv(3, make, num_workers=2)
    assert "breaking_envs.py" in str(caught.value.__cause__)


@pytest.mark.parametrize(
    ("call", "ended"), [("step", (0, 1, 3)), ("step_and_maybe_reset", (0, 3))]
)
@both
def test_a_step_that_raises_ends_the_episodes_of_these_envs_alone(make, call, ended):
    """The error names them; the others have stepped, and go on, or must be reset because they have ended."""
    raises = functools.partial(FaultyEnv, "value_error")
    with make(
        5, [raises, functools.partial(CountingEnv, 2), ENDLESS, raises, ENDLESS], seed=0
    ) as env:
        env.reset()
        env.step_and_maybe_reset(act(env))
        with pytest.raises(
            EnvError, match=r"step failed: the env raised ValueError: .*\(env 0, "
        ) as caught:
            getattr(env, call)(act(env))
        assert "Traceback" in str(caught.value.__cause__)
        assert caught.value.env_ids == (0, 3)
        assert counters(caught.value.partial) == [1, 2, 2, 1, 2]
        with pytest.raises(ResetNeeded) as refused:
            getattr(env, call)(act(env))
        assert refused.value.env_ids == ended
        assert counters(env.reset(only(env, *ended))) == [0, 0, 2, 0, 2]
        assert counters(env.step_and_maybe_reset(act(env))[1]) == [1, 1, 3, 1, 3]
        assert env.statistics().env_errors == 2


@both
def test_a_failed_reset_leaves_the_others_reset(make):
    with make(
        2, [ENDLESS, functools.partial(FaultyEnv, "value_error", at="reset", episode=1)]
    ) as env:
        env.reset()
        env.step(act(env))
        with pytest.raises(EnvError, match="reset failed"):
            env.reset()
        assert counters(env.current())[0] == 0
        # The mask of the next reset.
        assert env.current()["done"].flatten().tolist() == [False, True]
        with pytest.raises(ResetNeeded) as caught:
            env.step(act(env))
        assert caught.value.env_ids == (1,)
        assert env.statistics().env_errors == 1


def test_auto_reset_envs_take_the_step_columns_though_another_fails():
    """Their next steps must not overwrite its rows."""
    with SerialEnv(
        3, [ENDLESS, functools.partial(FaultyEnv, "value_error"), ENDLESS]
    ) as env:
        env.reset()
        env.step(act(env))
        engine = env.engine
        with pytest.raises(EnvError):
            engine.flights.begin(
                Op.STEP,
                resets=np.array([0]),
                write_inputs=functools.partial(engine.write_inputs, act(env)),
            ).land()
        assert len({*engine.positions.step_columns.tolist()}) == 1


INTERRUPT = ExecutorOptions(on_env_error="interrupt")
#: Every third step raises.
STEPS = functools.partial(FaultyEnv, "value_error", step=3)
#: Every reset of an instance but its first one raises.
RESETS = functools.partial(FaultyEnv, "value_error", at="reset", episode=1, length=4)


class Fragile(FaultyEnv):
    """Raises in its third step of each episode, and in each reset but the first of an instance."""

    def __init__(self):
        super().__init__("value_error", step=3)

    def reset(self, seed, options=None):
        observation = super().reset(seed, options)
        if self.episode > 0:
            raise KeyError("it must be built again")
        return observation


def collected(make, factory, collector, **changed):
    options = dataclasses.replace(INTERRUPT, **changed)
    with make(3, factory, seed=0, options=options) as env:
        data = [
            *collector(
                env, act_randomly, frames_per_batch=30, total_frames=90, close_env=False
            )
        ]
        statistics = env.statistics()
    assert sum(batch.numel() for batch in data) == 90
    return torch.cat(data, 1 if collector is Collector else 0), statistics


def act_randomly(td):
    """Return actions that depend on the observations alone."""
    return td.set("action", td["observation"].sum(-1) % 3)


def check(data):
    """Require that each row follows from the row before it, or is interrupted and repeats its root."""
    before, after, is_cut = (
        data["observation"],
        data["next", "observation"],
        data["next", "interrupted"],
    )
    stepped = torch.stack([before[..., 0], before[..., 1] + 1, data["action"]], -1)
    assert torch.equal(after, torch.where(is_cut, before, stepped))
    assert not data["next", "reward"][is_cut].any()
    assert not data["next", "terminated"][is_cut].any()
    assert data["next", "truncated"][is_cut].all()
    has_ended = data["next", "done"][:, :-1, 0]
    following, latest = data["observation"][:, 1:], after[:, :-1]
    assert torch.equal(following[~has_ended], latest[~has_ended])
    assert not following[has_ended][:, 1].any()  # an episode begins
    return is_cut


@pytest.mark.slow
@pytest.mark.parametrize(
    ("factory", "per_env"),
    [(STEPS, 10), (RESETS, 7), (Fragile, 19)],
    ids=["steps", "resets", "both"],
)
def test_an_env_that_raises_often_starves_no_collector(factory, per_env):
    """Each has 30 frames of it; the data are the same for any number of workers."""
    makes = [
        SerialEnv,
        *(functools.partial(ParallelEnv, num_workers=count) for count in (1, 2, 3)),
    ]
    found = [collected(make, factory, Collector) for make in makes]
    first = found[0][0]
    assert check(first).sum() == (0 if factory is RESETS else 30)
    for data, statistics in found:
        assert (data == first).all()
        assert statistics.errors_per_env == (per_env,) * 3
        assert statistics.env_errors == 3 * per_env
        assert statistics.worker_losses == 0
        assert statistics.interrupted == (0 if factory is RESETS else 30)
    for make in (SerialEnv, makes[2]):
        check(collected(make, factory, AsyncCollector)[0])
    threads, _ = collected(makes[2], factory, Collector, env_threads=True)
    assert (threads == first).all()


@both
def test_a_rollout_in_steps_has_the_same_rows(make):
    """As for envs on a device."""
    data = []
    for run in (None, StepwiseRun):
        with make(3, Fragile, seed=0, options=INTERRUPT) as env:
            env._rollouts = RolloutRunner(env.engine, run)
            data.append(env.rollout(20, act_randomly, break_when_any_done=False))
    check(data[0])
    assert (data[0] == data[1]).all()


def step_on(env):
    env.reset()
    for _ in range(9):
        env.step_and_maybe_reset(act(env))


@pytest.mark.parametrize("at", ["step", "reset"])
@both
def test_an_env_that_always_raises_is_an_error_at_last(make, at, caplog):
    """After as many exceptions without a step as a worker may have restarts."""
    broken = functools.partial(FaultyEnv, "value_error", at=at, step=1)
    with make(2, [broken, STEPS], seed=0, options=INTERRUPT) as env:
        for times in (1, 2):  # also at once, if it has made no step since
            with pytest.raises(
                EnvError, match=f"{at} failed: the env raised ValueError"
            ) as caught:
                step_on(env)
            assert caught.value.env_ids == (0,)
            assert "breaking_envs.py" in caught.value.remote_traceback
            others = int(at == "step")
            assert env.statistics().errors_per_env == (
                INTERRUPT.max_restarts + times,
                others,
            )
        assert (
            len(
                [
                    line
                    for line in caplog.messages
                    if "rows count as interrupted" in line
                ]
            )
            == 1
        )


@both
def test_exceptions_of_render_and_get_are_raised(make):
    with make(
        2, functools.partial(FaultyEnv, "value_error", at="render"), options=INTERRUPT
    ) as env:
        env.reset()
        with pytest.raises(EnvError, match="render failed"):
            env.render()
        with pytest.raises(EnvError, match="get lack failed"):
            env.get("lack")
        assert env.statistics().env_errors == 0


@both
def test_interrupt_on_error_is_refused_for_batch_envs(make):
    with pytest.raises(
        ValueError,
        match=r"batches of rows \(\(2,\)\) failed: expected on_env_error='raise'",
    ):
        make(
            2,
            functools.partial(
                gymnasium.make_vec, "CartPole-v1", 2, vectorization_mode="sync"
            ),
            options=INTERRUPT,
        )
