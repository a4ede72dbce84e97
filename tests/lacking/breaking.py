"""An env that breaks; workers import it, as they cannot get a class by value where parts of `os` are taken away."""

import os
import time

from envherd.workers.testing import CountingEnv


class FaultyEnv(CountingEnv):
    """Ends its process, or hangs, in a step."""

    def __init__(self, fault=None, step=0):
        """Keep what happens, and when."""
        super().__init__(1_000)
        self._fault, self._at = fault, step

    def step(self, action):
        """Count one step, or break."""
        values = super().step(action)
        if self.num_steps == self._at and self._fault == "exit":
            os._exit(3)
        if self.num_steps == self._at and self._fault == "sleep":
            time.sleep(3600)
        return values
