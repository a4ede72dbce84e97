"""Envs whose resets wait for the test, or fail. They need only numpy: see `tests.faults.envs`."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from envherd.workers.seeding import episode_seed
from envherd.workers.testing import CountingEnv
from tests.gates import Gate

ROOT_SEED = 5


class GatedEnv(CountingEnv):
    """Its reset for one episode waits at a gate.

    Args:
        folder: of its `Gate`.
        length: steps of an episode.
        episode: of env 0, under `ROOT_SEED`.
    """

    def __init__(self, folder: str, length: int = 3, episode: int = 1) -> None:
        super().__init__(length)
        self._gate = Gate(folder)
        self._seed = episode_seed(ROOT_SEED, 0, episode)

    def reset(self, seed: int | None, options: Mapping[str, Any] | None = None) -> list[Any]:
        """Wait at the gate if necessary, and begin the next episode."""
        if seed == self._seed:
            self._gate.pass_through()
        return super().reset(seed, options)


class BreakingEnv(CountingEnv):
    """Its resets for some episodes of env 0 raise, or kill its process, the first time each is tried.

    Args:
        folder: records the tries; if empty, they break every time.
        episodes: in which they break.
        is_fatal: whether to kill.
    """

    def __init__(self, folder: str, episodes: tuple[int, ...], *, is_fatal: bool = False, length: int = 3) -> None:
        super().__init__(length)
        self._folder = folder
        self._seeds = [episode_seed(ROOT_SEED, 0, episode) for episode in episodes]
        self._is_fatal = is_fatal

    def reset(self, seed: int | None, options: Mapping[str, Any] | None = None) -> list[Any]:
        """Break, or begin the next episode."""
        if seed in self._seeds and not (self._folder and Path(self._folder, str(seed)).exists()):
            if self._folder:
                Path(self._folder, str(seed)).touch()
            if self._is_fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError(f"no episode begins with {seed}")
        return super().reset(seed, options)


class LevelEnv(CountingEnv):
    """Observes its level in place of its last action after a reset; `set` and `call` change the level."""

    level = 0

    def raise_level(self) -> int:
        """Add one to the level, and return it."""
        self.level += 1
        return self.level

    def reset(self, seed: int | None, options: Mapping[str, Any] | None = None) -> list[Any]:
        """Begin the next episode."""
        super().reset(seed, options)
        return self._observe(self.level + (options or {}).get("bonus", 0))

    def state_dict(self) -> dict[str, int]:
        """Return the counters and the level."""
        return {**super().state_dict(), "level": self.level}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore them."""
        super().load_state_dict(state)
        self.level = state["level"]


def telling() -> Any:
    """Return a Gymnasium env that ends every third step; every info but the second step's is non-empty."""
    import gymnasium

    class Telling(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(0, 100, (1,), np.float32)
        action_space = gymnasium.spaces.Discrete(2)

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            super().reset(seed=seed)
            self.count = 0
            return np.zeros(1, np.float32), {"fresh": seed, "options": options}

        def step(self, action: Any) -> Any:
            self.count += 1
            info = {} if self.count == 2 else {"count": self.count}
            return np.full(1, self.count, np.float32), 0.0, self.count == 3, False, info

    return Telling()
