"""Workers of envs that leak are replaced between episodes: no row is interrupted, and the data are the same."""

import functools
import subprocess
import sys
from typing import Any

import pytest

from envherd.executor import ExecutorOptions, ParallelEnv, ResetNeeded, SerialEnv
from envherd.workers.testing import CountingEnv
from tests.envs.disturbing_envs import LeakyEnv
from tests.executor.drives import DRIVES, act

pytestmark = pytest.mark.slow

MB = 1 << 20
RECYCLING = ExecutorOptions(recycle_after=2)


def test_the_data_are_those_of_a_run_without_it():
    with (
        SerialEnv(2, CountingEnv) as serial,
        ParallelEnv(2, CountingEnv, num_workers=2, options=RECYCLING) as env,
    ):
        for drive in DRIVES:
            before = env.statistics().recycled
            rows = []
            for one in (serial, env):
                one.set_seed(5)
                rows.append(drive(one, 18))
            assert env.statistics().recycled - before >= 2
            assert len(rows[0]) == len(rows[1])
            assert all((one == other).all() for one, other in zip(*rows, strict=True))
        counted = env.statistics()
    assert sum(worker.generation for worker in counted.workers) == counted.recycled
    assert (counted.worker_losses, counted.interrupted, counted.env_errors) == (0, 0, 0)


def test_a_worker_of_several_envs_waits_until_all_are_between_episodes():
    make = [functools.partial(CountingEnv, 2), functools.partial(CountingEnv, 4)]
    with ParallelEnv(
        2, make, num_workers=1, seed=5, options=ExecutorOptions(recycle_after=1)
    ) as env:
        root, generations = env.reset(), []
        for _ in range(8):
            root = env.step_and_maybe_reset(act(root))[1]
            generations.append(env.statistics().workers[0].generation)
        assert generations == [0, 0, 0, 1, 1, 1, 1, 2]
        env.reset()  # the caller's resets end episodes too
        assert env.statistics().workers[0].generation == 3


def test_memory_is_bounded_and_its_growth_is_seen():
    make = functools.partial(LeakyEnv, 8 * MB)
    with ParallelEnv(1, make, num_workers=1, seed=0) as env:
        env.reset()
        env.statistics()
        for _ in range(4):
            env.reset()
        (worker,) = env.statistics().workers
        assert worker.growth_per_reset == pytest.approx(8 * MB, rel=0.2)
    options = ExecutorOptions(max_worker_memory=worker.uss_bytes)
    with ParallelEnv(1, make, num_workers=1, seed=0, options=options) as env:
        data = env.rollout(60, act, break_when_any_done=False)
        counted = env.statistics()
        assert counted.workers[0].uss_bytes < worker.uss_bytes + 16 * MB
    assert counted.recycled >= 2
    assert counted.interrupted == 0
    assert data["next", "observation"][0, :, 1].tolist() == [1, 2, 3] * 20


class Helped(CountingEnv):
    """Starts a process that holds memory."""

    def __init__(self) -> None:
        super().__init__()
        code = f"held = b'x' * {64 * MB}; print(flush=True); input()"
        self.helper = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self.helper.stdout is not None
        self.helper.stdout.readline()


def test_memory_of_what_an_env_has_started_counts():
    with ParallelEnv(
        1, Helped, seed=0, options=ExecutorOptions(max_worker_memory=64 * MB)
    ) as env:
        assert env.statistics().workers[0].uss_bytes > 64 * MB
        env.rollout(12, act, break_when_any_done=False)
        assert env.statistics().recycled >= 1


def test_an_env_that_does_not_leak_does_not_grow():
    with ParallelEnv(1, CountingEnv, num_workers=1, seed=0) as env:
        assert env.statistics().workers[0].growth_per_reset is None
        for _ in range(50):
            env.reset()
        assert abs(env.statistics().workers[0].growth_per_reset) < MB


@pytest.mark.parametrize("way", ["after a step", "before a reset"])
@pytest.mark.parametrize("name", ["dismiss", "collect_specs"])
def test_an_interrupt_while_a_worker_is_replaced(name, way, monkeypatch):
    """`flight` 9, `supervisor` 4."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    make = functools.partial(CountingEnv, 2)
    with ParallelEnv(
        2, make, num_workers=2, seed=5, options=ExecutorOptions(recycle_after=1)
    ) as env:
        root = env.step_and_maybe_reset(act(env.reset()))[1]
        with monkeypatch.context() as patched:
            patched.setattr(env._pool.crew, name, interrupt)
            with pytest.raises(KeyboardInterrupt):
                env.step_and_maybe_reset(
                    act(root)
                ) if way == "after a step" else env.reset()
        with pytest.raises(ResetNeeded):
            env.step_and_maybe_reset(act(root))
        root = env.reset()
        assert root["observation"][:, 1].tolist() == [0, 0]
        assert env.step(act(root))["next", "observation"][:, 1].tolist() == [1, 1]
        assert env.statistics().worker_losses == 0
