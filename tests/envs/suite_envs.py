"""Tasks of a suite, for tests of `evaluate`; imported by workers."""

import os
import signal
import time

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete

from envherd.workers.seeding import episode_seed


class Task(gymnasium.Env):
    """An episode of 3 to 7 steps, drawn from the seed; observations of the generator, rewards of generator and action.

    Reports success in every step, whether its latest action was 1.

    Args:
        size: of the observation: tasks of other sizes have other specs.
        log: path of a file that gets a line for each build, reset and close.
        faults: number of an episode of root seed 0 -> "raise", "kill" or "hang" in its second step, or "reset".
        step_s: seconds of a step.
        build_s: seconds of the build.
        space: of observations; None for that of `size`.
    """

    action_space = Discrete(2)

    def __init__(
        self, size=2, log=None, faults=(), step_s=0.0, build_s=0.0, space=None
    ):
        self.observation_space = space or Box(-9.0, 9.0, (size,), np.float32)
        self.faults = {
            episode_seed(0, number, 0): fault for number, fault in dict(faults).items()
        }
        self.log, self.step_s = log, step_s
        time.sleep(build_s)
        self.note("build")

    def note(self, *words):
        if self.log is not None:
            with open(self.log, "a") as file:
                file.write(" ".join(map(str, words)) + "\n")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.note("reset", seed)
        self.fault, self.length, self.num_steps = self.faults.get(seed), 3 + seed % 5, 0
        if self.fault == "reset":
            raise RuntimeError("no reset today")
        return self.see(), {}

    def step(self, action):
        time.sleep(self.step_s)
        self.num_steps += 1
        if self.num_steps == 2 and self.fault == "raise":
            raise RuntimeError("broken arm")
        if self.num_steps == 2 and self.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.num_steps == 2 and self.fault == "hang":
            time.sleep(60)
        reward = float(self.np_random.normal()) + int(action)
        return (
            self.see(),
            reward,
            self.num_steps >= self.length,
            False,
            {"success": bool(action)},
        )

    def see(self):
        return (
            self.np_random.normal(size=self.observation_space.shape)
            .clip(-9, 9)
            .astype(np.float32)
        )

    def close(self):
        self.note("close")


class Clinging(Task):
    """Closes in 60 seconds."""

    def close(self):
        time.sleep(60)


def broken():
    """Fail to build."""
    raise RuntimeError("no assets")
