"""Envs with known costs."""

import hashlib
import mmap
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from envherd.workers.testing import CountingEnv

MIB = 2**20


class SleepingEnv(CountingEnv):
    """Waits in a step, and computes nothing.

    Args:
        step_s: seconds of a step.
        length: steps of an episode.
    """

    def __init__(self, step_s=0.003, length=None):
        super().__init__(length)
        self.step_s = step_s

    def step(self, action):
        time.sleep(self.step_s)
        return super().step(action)


class ThreadedEnv(CountingEnv):
    """Computes in a thread, and waits for it."""

    def __init__(self):
        super().__init__()
        self.thread = ThreadPoolExecutor(1)
        self.text = bytes(2 * MIB)

    def step(self, action):
        self.thread.submit(hashlib.sha256, self.text).result()  # without the GIL
        return super().step(action)


class HeavyMemoryEnv(CountingEnv):
    """Holds 48 MiB of private memory."""

    def __init__(self):
        super().__init__()
        self.own = np.ones(48 * MIB, np.uint8)


class BreathingEnv(CountingEnv):
    """Has 40 MiB in every other episode, and 8 MiB in those between; so have every other env of a process at a time."""

    num_built = 0

    def __init__(self):
        super().__init__()
        self.num_resets = BreathingEnv.num_built
        BreathingEnv.num_built += 1

    def reset(self, seed, options=None):
        self.num_resets += 1
        # Mapped: what is allocated and freed may stay in the process.
        self.own = mmap.mmap(-1, (40 if self.num_resets % 2 else 8) * MIB)
        np.frombuffer(self.own, np.uint8)[:] = 1
        return super().reset(seed, options)


class LeakingEnv(CountingEnv):
    """Takes 8 KiB more in each step."""

    def __init__(self):
        super().__init__()
        self.kept = []

    def step(self, action):
        self.kept.append(np.ones(8192, np.uint8))
        return super().step(action)


class CrowdedEnv(CountingEnv):
    """Ends its process in its 20th step if the process holds more than two such envs; sleeps instead if `hangs`."""

    num_built = 0
    hangs = False

    def __init__(self):
        super().__init__()
        type(self).num_built += 1
        self.num_calls = 0

    def step(self, action):
        self.num_calls += 1
        # In the turns of five rounds, however few batches these have.
        if self.num_built > 2 and self.num_calls == 20:
            if self.hangs:
                time.sleep(1000)
            os._exit(7)
        return super().step(action)


class CrowdedHangingEnv(CrowdedEnv):
    """Sleeps instead."""

    hangs = True


class LonelyEnv(CountingEnv):
    """Cannot be built in two processes of one helper at the same time."""

    own = None

    def __init__(self):
        super().__init__()
        if LonelyEnv.own is None:
            LonelyEnv.own = socket.socket(socket.AF_UNIX)
            LonelyEnv.own.bind(f"\0envherd-lonely-{os.getppid()}")


class SingleEnv(CountingEnv):
    """Cannot be built a second time in a process."""

    num_built = 0

    def __init__(self):
        super().__init__()
        SingleEnv.num_built += 1
        if SingleEnv.num_built > 1:
            raise RuntimeError("there is one already")
