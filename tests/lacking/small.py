"""A small program for any system: equal data, a loss, and nothing left."""

import os

import psutil
import torch

from envherd import Collector, ExecutorOptions, ParallelEnv, SerialEnv
from envherd.shm.segment import NAMES
from envherd.workers.testing import CountingEnv


class EndingEnv(CountingEnv):
    """Ends its process in a step."""

    def __init__(self, at=0):
        """Keep the step."""
        super().__init__(1_000)
        self._at = at

    def step(self, action):
        """Count one step, or end the process."""
        values = super().step(action)
        if self.num_steps == self._at:
            os._exit(3)
        return values


def rollouts_of(env):
    """Return two rollouts, a step and what was sent."""
    torch.manual_seed(1)
    with env:
        if isinstance(env, ParallelEnv):
            assert env._pool.crew.workers[0].stack()  # and does not end it
        data = [env.rollout(5, break_when_any_done=False) for _ in range(2)]
        _, root = env.step_and_maybe_reset(env.rand_action(env.reset()))
        env.send(env.rand_action(root))
        data += [
            env.recv(4).exclude("env_ids"),
            next(iter(Collector(env, None, frames_per_batch=8, total_frames=8))),
        ]
        assert env.call("close") is not None or True
        env.statistics()
        return data


def main():
    """Run it."""
    mine = rollouts_of(ParallelEnv(4, CountingEnv, num_workers=2, seed=1))
    its = rollouts_of(SerialEnv(4, CountingEnv, seed=1))
    assert all((a == b).all() for a, b in zip(mine, its, strict=True)), (
        "the data differ"
    )
    options = ExecutorOptions(on_worker_loss="restart", step_timeout_s=30.0)
    faults = [{}, {"at": 2}]
    with ParallelEnv(
        2, EndingEnv, num_workers=2, env_kwargs=faults, options=options
    ) as env:
        root, interrupted = env.reset(), []
        for _ in range(3):
            batch, root = env.step_and_maybe_reset(env.rand_action(root))
            interrupted.append(batch["next", "interrupted"].flatten().tolist())
        assert [row[1] for row in interrupted] == [False, True, False], interrupted
        path = env.statistics().path
    left = [
        name
        for name in os.listdir("/dev/shm")
        if name.startswith(f"{NAMES}{os.getpid()}-")
    ]
    assert not left, left
    workers = [
        p
        for p in psutil.Process().children(recursive=True)
        if "resource_tracker" not in " ".join(p.cmdline())
    ]
    assert all("envherd helper" in " ".join(p.cmdline()) for p in workers), workers
    return path


if __name__ == "__main__":
    print(main())
