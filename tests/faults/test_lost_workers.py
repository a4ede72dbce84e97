"""Nothing is left of workers that die or hang; `matrix` has what the caller sees."""

import functools
import os
import signal
from pathlib import Path

import psutil
import pytest

from envherd.executor import ExecutorOptions, ParallelEnv, WorkerTimeout
from envherd.workers.testing import CountingEnv, FaultyEnv, ParentEnv

pytestmark = [pytest.mark.slow, pytest.mark.broken_pool, pytest.mark.usefixtures("own_helper")]


def test_a_hanging_constructor_ends_at_the_deadline():
    make = [functools.partial(FaultyEnv, "gil", at="construct"), CountingEnv]
    with pytest.raises(WorkerTimeout, match="build failed: worker 0") as caught:
        ParallelEnv(2, make, num_workers=2, options=ExecutorOptions(build_timeout_s=1.0))
    assert "faults.py" in str(caught.value.__cause__)


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
