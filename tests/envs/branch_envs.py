"""Envs for tests of branches: one that draws from every generator, and some that cannot be forked."""

import ctypes
import os
import random
import socket
import subprocess
import sys
import threading
from typing import Any

import gymnasium
import numpy as np

import envherd


class Walk(gymnasium.Env):
    """Walks at random; each step draws from the env's generator and from the global ones.

    Args:
        length: steps of an episode.
        scale: of the steps.
    """

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float64)
    action_space = gymnasium.spaces.Discrete(3)

    def __init__(self, length: int = 10_000, scale: float = 1.0) -> None:
        self.length, self.scale = length, scale

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.place, self.num_steps, self.first_seed = np.zeros(3), 0, seed
        return self.place.copy(), {}

    def step(self, action: int) -> Any:
        self.num_steps += 1
        self.place += (
            self.scale
            * np.array([self.np_random.random(), random.random(), np.random.random()])
            + action
        )
        sys.stdout.write(f"step {self.num_steps}\n")
        return (
            self.place.copy(),
            float(self.place[0]),
            self.num_steps >= self.length,
            False,
            {"t": self.num_steps},
        )

    def who(self) -> list[int]:
        """Return its worker, env, generation, process, process group, and number of descriptors."""
        info = envherd.worker()
        assert info is not None
        assert info.env_id is not None
        return [
            info.worker_id,
            info.env_id,
            info.generation,
            os.getpid(),
            os.getpgid(0),
            len(os.listdir("/proc/self/fd")),
        ]

    def num_threads(self) -> int:
        return threading.active_count()

    def end(self) -> None:
        os._exit(3)


class Unforkable(Walk):
    """Walks, and holds something that does not survive a fork."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        if kind == "thread":
            threading.Thread(
                target=threading.Event().wait, name="renderer", daemon=True
            ).start()
        elif kind == "socket":
            self.held: Any = socket.socketpair()
        elif kind == "native":
            thread = ctypes.c_ulong()
            libc = ctypes.CDLL(None)
            libc.pthread_create(ctypes.byref(thread), None, libc.pause, None)
        elif kind == "blas":
            np.ones((512, 512)) @ np.ones((512, 512))
        elif kind == "process":
            self.held = subprocess.Popen(["sleep", "1000"])
