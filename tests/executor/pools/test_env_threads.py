"""Envs that wait, many in one worker, each on its own thread; `test_property.py` compares their data."""

import functools
import time

import pytest
import torch
from tensordict import TensorDict

from envherd import EnvError, ExecutorOptions, ParallelEnv, WorkerTimeout
from envherd.workers.testing import CountingEnv
from tests.envs.breaking_envs import FaultyEnv
from tests.envs.waiting_envs import MeetingEnv, OneThreadEnv, StuckEnv
from tests.gates import wait_for

pytestmark = pytest.mark.slow

N = 6
OPTIONS = ExecutorOptions(env_threads=True)


def act(root: TensorDict) -> TensorDict:
    return root.set("action", root["observation"][:, 1] % 4)


def test_envs_of_a_worker_are_in_a_step_or_a_close_at_the_same_time(caplog):
    make = functools.partial(MeetingEnv, N)
    with ParallelEnv(N, make, num_workers=1, options=OPTIONS) as env:
        root = env.reset()
        _, root = env.step_and_maybe_reset(act(root))
        assert env.rollout(
            4, act, auto_reset=False, break_when_any_done=False
        ).shape == (N, 4)
        env.send(act(env.reset()))
        assert len(env.recv()) == N
    assert "closing" not in caplog.text


def test_an_env_is_built_and_called_and_closed_on_one_thread(tmp_path):
    closed = tmp_path / "closed"
    make = functools.partial(OneThreadEnv, 3, str(closed))
    with ParallelEnv(N, make, num_workers=2, options=OPTIONS) as env:
        env.rollout(8, act, break_when_any_done=False)
        threads = env.call("thread")
        assert env.get("home") == threads
        assert len(set(threads[: N // 2])) == len(set(threads[N // 2 :])) == N // 2
    assert closed.read_text().splitlines() == ["True"] * N


def test_an_env_that_raises_is_alone_in_that():
    make = [
        functools.partial(FaultyEnv, "value_error", step=2),
        *[CountingEnv] * (N - 1),
    ]
    with ParallelEnv(N, make, num_workers=1, options=OPTIONS) as env:
        root = env.reset()
        _, root = env.step_and_maybe_reset(act(root))
        with pytest.raises(
            EnvError, match=r"ValueError: the env broke on purpose.*env 0"
        ) as caught:
            env.step(act(root))
        assert caught.value.env_ids == (0,)
        env.reset(TensorDict({"_reset": torch.arange(N) == 0}, [N]))
        assert env.call("echo", 1) == [[[1], {}]] * N


@pytest.mark.broken_pool
def test_the_env_that_is_late_is_named():
    kwargs = [{"is_stuck": i == 2} for i in range(N)]
    options = ExecutorOptions(env_threads=True, step_timeout_s=4.0)
    with ParallelEnv(
        N, StuckEnv, env_kwargs=kwargs, num_workers=1, options=options
    ) as env:
        root = env.reset()
        for _ in range(2):
            _, root = env.step_and_maybe_reset(act(root))
        with pytest.raises(WorkerTimeout, match="env 2") as caught:
            env.step(act(root))
        assert "waiting_envs.py" in str(caught.value)


@pytest.mark.broken_pool
def test_a_step_that_hangs_behind_a_reset_without_a_limit_is_noticed():
    kwargs = [{"is_stuck": i == 1, "is_stuck_in_reset": i == 0} for i in range(2)]
    options = ExecutorOptions(env_threads=True, step_timeout_s=4.0)
    with ParallelEnv(
        2, StuckEnv, env_kwargs=kwargs, num_workers=1, options=options
    ) as env:
        root = env.reset()
        for _ in range(2):
            _, root = env.step_and_maybe_reset(act(root))
        for env_id in (0, 1):
            env.send(act(root[env_id : env_id + 1]), [env_id])
            time.sleep(0.2)  # env 0 is in its reset
        with pytest.raises(WorkerTimeout, match="step of env 1"):
            env.recv(1)


def test_steps_in_threads_are_counted():
    with ParallelEnv(N, CountingEnv, num_workers=1, options=OPTIONS) as env:
        data = env.rollout(20, act, break_when_any_done=False)
        env.send(act(env.reset()))
        env.recv()
        # Soon after the last answer.
        wait_for(lambda: env.statistics().workers[0].phase == "idle")
        (worker,) = env.statistics().workers
        answered = env.engine.pool.slab.words["answered_ns"]
    assert worker.env_steps == 21 * N
    assert worker.resets >= N + int(data["next", "done"][:, :-1].sum())
    assert worker.busy_s > 0
    assert 0 <= worker.reset_share <= 1
    assert (answered > 0).all()
