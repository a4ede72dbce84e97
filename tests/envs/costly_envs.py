"""Envs whose module imports little, so that workers start soon."""

import multiprocessing
import time

from envherd.workers.testing import CountingEnv


class ParentEnv(CountingEnv):
    """Starts a process of `multiprocessing` when it is built."""

    def __init__(self):
        super().__init__()
        child = multiprocessing.get_context("spawn").Process(
            target=time.sleep, args=(600,)
        )
        child.start()
        self.child = child.pid
