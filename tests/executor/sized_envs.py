"""Envs whose cost is known."""

from __future__ import annotations

import mmap
import time

import numpy as np

from envherd.workers.testing import CountingEnv

MIB = 2**20


class SleepingEnv(CountingEnv):
    """Waits 3 ms in a step, and computes nothing."""

    def step(self, action):
        time.sleep(0.003)
        return super().step(action)


class HeavyMemoryEnv(CountingEnv):
    """Has 48 MiB of its own."""

    def __init__(self):
        super().__init__()
        self.own = np.ones(48 * MIB, np.uint8)


class BreathingEnv(CountingEnv):
    """Has 40 MiB in every other episode, and 8 MiB in those between."""

    def __init__(self):
        super().__init__()
        self.num_resets = 0

    def reset(self, seed, options=None):
        self.num_resets += 1
        # Mapped: what is allocated and freed may stay in the process.
        self.own = mmap.mmap(-1, (40 if self.num_resets % 2 else 8) * MIB)
        np.frombuffer(self.own, np.uint8)[:] = 1
        return super().reset(seed, options)


class JealousEnv(CountingEnv):
    """Computes 1 ms in a step, and 2 ms if another of its kind was stepped in between."""

    latest = None

    def step(self, action):
        end = time.thread_time() + (0.001 if JealousEnv.latest is self else 0.002)
        JealousEnv.latest = self
        while time.thread_time() < end:
            pass
        return super().step(action)


class LeakingEnv(CountingEnv):
    """Takes 8 KiB more in each step."""

    def __init__(self):
        super().__init__()
        self.kept = []

    def step(self, action):
        self.kept.append(np.ones(8192, np.uint8))
        return super().step(action)


class BottomlessEnv(CountingEnv):
    """Takes memory in its first reset for as long as there is any."""

    def reset(self, seed, options=None):
        taken = []
        while True:
            taken.append(np.ones(16 * MIB, np.uint8))
            time.sleep(0.002)


class DyingEnv(CountingEnv):
    """Ends its process in a step."""

    def step(self, action):
        import os

        os._exit(7)


class FailingEnv(CountingEnv):
    """Raises in a step."""

    def step(self, action):
        raise ValueError("no such key")


def make_failing():
    raise RuntimeError("no licence")
