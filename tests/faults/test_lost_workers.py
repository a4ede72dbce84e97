"""Nothing is left of workers that die or hang; `matrix` has what the caller sees."""

import os
import signal
from pathlib import Path

import psutil
import pytest

from envherd.executor import ParallelEnv
from envherd.workers.testing import CountingEnv, ParentEnv

pytestmark = [pytest.mark.slow, pytest.mark.broken_pool, pytest.mark.usefixtures("own_helper")]


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
