"""Workers that die or hang are reported by name in bounded time, and nothing is left of them."""

import functools
import os
import signal
import time
from pathlib import Path

import psutil
import pytest
import torch

from envherd.executor import ExecutorOptions, FactoryError, ParallelEnv, WorkerLost, WorkerTimeout
from envherd.workers.testing import CountingEnv, FaultyEnv, ParentEnv
from envherd.workers.testing.faults import DEATHS, HANGS

pytestmark = [pytest.mark.slow, pytest.mark.broken_pool, pytest.mark.usefixtures("own_helper")]

NUM_ENVS = 4


def factories(victim, **fault):
    make = [functools.partial(CountingEnv, length=1_000_000)] * NUM_ENVS
    make[victim] = functools.partial(FaultyEnv, **fault)
    return make


def step(env, td):
    td["action"] = torch.ones(NUM_ENVS, dtype=torch.int64)
    return env.step_and_maybe_reset(td)[1]


@pytest.mark.parametrize("start_method", ["zygote", "spawn"])
@pytest.mark.parametrize("death", DEATHS)
def test_a_death_in_a_step_is_named(death, start_method):
    options = ExecutorOptions(start_method=start_method)
    with ParallelEnv(NUM_ENVS, factories(3, fault=death), num_workers=2, options=options) as env:
        root = step(env, env.reset())
        began = time.monotonic()
        with pytest.raises(WorkerLost) as caught:
            step(env, root)
        assert time.monotonic() - began < 5
        error = caught.value
        assert DEATHS[death][1] in str(error)
        assert error.env_ids == (2, 3)
        assert (error.context["worker_id"], error.context["env_id"], error.context["phase"]) == (1, 3, "step")
        assert error.partial["observation"][:, 1].tolist() == [2, 2, 1, 1]
        with pytest.raises(WorkerLost):
            env.reset()


def test_a_crash_comes_with_its_stack():
    with ParallelEnv(NUM_ENVS, factories(0, fault="segfault"), num_workers=2) as env:
        root = step(env, env.reset())
        with pytest.raises(WorkerLost, match=r"faults\.py") as caught:
            step(env, root)
        assert "Segmentation fault" in str(caught.value)


@pytest.mark.parametrize("death", ["exit", "segfault", "kill"])
@pytest.mark.parametrize("at", ["construct", "reset"])
def test_a_death_elsewhere_is_named_too(death, at):
    with (
        pytest.raises((WorkerLost, FactoryError), match=r"worker 1 ended with") as caught,
        ParallelEnv(NUM_ENVS, factories(2, fault=death, at=at), num_workers=2) as env,
    ):
        env.reset()
    assert DEATHS[death][1] in str(caught.value)


@pytest.mark.parametrize("hang", HANGS)
@pytest.mark.parametrize("at", ["reset", "step"])
def test_a_hang_ends_at_the_deadline_with_the_stack(hang, at):
    options = ExecutorOptions(step_timeout_s=1, reset_timeout_s=1)
    with ParallelEnv(NUM_ENVS, factories(1, fault=hang, at=at), num_workers=2, options=options) as env:
        with pytest.raises(WorkerTimeout, match=rf"{at} failed: worker 0 gave no answer within 1 s") as caught:
            step(env, step(env, env.reset()))
        assert "faults.py" in str(caught.value.__cause__)
        assert caught.value.env_ids == (0, 1)


def test_a_hanging_constructor_ends_at_the_deadline():
    options = ExecutorOptions(build_timeout_s=1.0)
    with pytest.raises(WorkerTimeout, match="build failed: worker 0") as caught:
        ParallelEnv(NUM_ENVS, factories(0, fault="gil", at="construct"), num_workers=2, options=options)
    assert "faults.py" in str(caught.value.__cause__)


@pytest.mark.parametrize("hang", HANGS)
def test_close_is_bounded_when_envs_hang(hang):
    options = ExecutorOptions(close_timeout_s=0.5)
    env = ParallelEnv(NUM_ENVS, [functools.partial(FaultyEnv, hang, at="close")] * NUM_ENVS, options=options)
    env.reset()
    began = time.monotonic()
    env.close()
    assert time.monotonic() - began < 3


def test_a_worker_killed_while_idle_is_noticed_at_the_next_step():
    with ParallelEnv(NUM_ENVS, functools.partial(CountingEnv, length=99), num_workers=2) as env:
        root = step(env, env.reset())
        os.kill(env.statistics().workers[0].pid, signal.SIGKILL)
        with pytest.raises(WorkerLost, match=r"SIGKILL\(-9\).*envs 0-1"):
            step(env, root)


@pytest.mark.parametrize("ending", ["close", "kill"])
def test_processes_that_envs_started_go_too(ending):
    env = ParallelEnv(2, ParentEnv, num_workers=2)
    env.reset()
    children = env.get("child")
    assert all(psutil.pid_exists(pid) for pid in children)
    if ending == "kill":
        for worker in env.statistics().workers:
            os.kill(worker.pid, signal.SIGKILL)
    env.close()
    assert not any(_runs(pid) for pid in children)


def _runs(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_many_pools_leave_no_descriptor():
    before = len(os.listdir("/proc/self/fd"))
    kept = []
    for _ in range(10):
        env = ParallelEnv(2, CountingEnv, num_workers=2)
        kept.append((env, env.rollout(3)))
        env.close()
    assert len(os.listdir("/proc/self/fd")) == before
    assert all(data["next", "observation"].any() for _, data in kept)


def test_dev_shm_is_never_used():
    before = set(os.listdir("/dev/shm"))
    with ParallelEnv(2, CountingEnv, num_workers=2) as env:
        env.rollout(3)
        assert set(os.listdir("/dev/shm")) == before
        maps = Path(f"/proc/{env.statistics().workers[0].pid}/maps").read_text()
        assert "/dev/shm" not in maps
        assert "envherd-slab" in maps
