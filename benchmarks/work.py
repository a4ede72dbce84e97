"""Work of a fixed number of instructions, and envs made of it.

An env that spins for a given time makes progress while it is preempted; one that counts instructions does not.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import time
from dataclasses import dataclass
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete

#: Distribution of step times: constant; lognormal with sigma 1; 1 % of them 100 times the others.
Law = Literal["even", "lognormal", "spikes"]
_NUM_DRAWN = 4096
_CALIBRATION_ITERATIONS = 50_000


def compute(iterations: int) -> int:
    """Run a fixed number of instructions; the result depends on all of them."""
    x = 1
    for _ in range(iterations):
        x = (x * 1103515245 + 12345) & 0x7FFFFFFF
    return x


def import_melting_pot() -> None:
    """Import Melting Pot's own code so that LuaJIT finds room for its machine code, as in a user's script.

    LuaJIT places machine code within 1 GiB of its library, at random addresses. TensorFlow, which Melting Pot imports
    after that library, would be placed next to it, and in a process with the libraries of this harness no room would be
    left: LuaJIT then interprets, and a step takes up to ten times as long.
    """
    with contextlib.suppress(ImportError):
        importlib.import_module("tensorflow")
    importlib.import_module("meltingpot.substrate")


def iterations_per_us() -> float:
    """Return the iterations of `compute` per microsecond of this machine's processor now, the best of some tries."""
    best = float("inf")
    for _ in range(9):
        began = time.thread_time_ns()
        compute(_CALIBRATION_ITERATIONS)
        best = min(best, time.thread_time_ns() - began)
    return _CALIBRATION_ITERATIONS / best * 1e3


def drawn_iterations(law: Law, mean: float) -> np.ndarray:
    """Return int64 `[4096]` step lengths with a law and a mean; always the same ones."""
    rng = np.random.default_rng(0)
    if law == "even":
        raw = np.ones(_NUM_DRAWN)
    elif law == "lognormal":
        raw = rng.lognormal(0.0, 1.0, _NUM_DRAWN)
    else:
        raw = np.ones(_NUM_DRAWN)
        raw[rng.choice(_NUM_DRAWN, round(_NUM_DRAWN / 100), replace=False)] = 100.0
    return np.round(raw * (mean / raw.mean())).astype(np.int64)


class Steady(gymnasium.Env[np.ndarray, Any]):
    """Steps cost according to a law, observations are constant, and no episode ends.

    Args:
        shape, dtype: of the observation.
        mean: iterations of `compute` per step; 0 for none.
        law: see `Law`. Each env begins at a different place in the drawn lengths.
        sleep_s: seconds to sleep in each step, like an env that waits.
    """

    action_space = Discrete(2)

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: str,
        mean: float = 0.0,
        law: Law = "even",
        sleep_s: float = 0.0,
    ) -> None:
        is_float = np.issubdtype(np.dtype(dtype), np.floating)
        self.observation_space = Box(
            -1.0 if is_float else 0,
            1.0 if is_float else 255,
            shape,
            np.dtype(dtype).type,
        )
        self._observation = np.zeros(shape, dtype)
        self._lengths = drawn_iterations(law, mean).tolist() if mean else []
        self._next = int.from_bytes(os.urandom(2), "little") % _NUM_DRAWN
        self._sleep_s = sleep_s

    def reset(
        self, *, seed: int | None = None, options: Any = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Return the observation."""
        super().reset(seed=seed, options=options)
        return self._observation, {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:  # noqa: ARG002  # not used
        """Work, and return the observation."""
        if self._lengths:
            compute(self._lengths[self._next])
            self._next = (self._next + 1) % _NUM_DRAWN
        if self._sleep_s:
            time.sleep(self._sleep_s)
        return self._observation, 0.0, False, False, {}


@dataclass(frozen=True)
class SteadyFactory:
    """Builds a `Steady`; its fields are that class's arguments."""

    shape: tuple[int, ...] = (4,)
    dtype: str = "float32"
    mean: float = 0.0
    law: Law = "even"
    sleep_s: float = 0.0

    def __call__(self) -> Steady:
        """Build it."""
        return Steady(self.shape, self.dtype, self.mean, self.law, self.sleep_s)


@dataclass(frozen=True)
class NamedFactory:
    """Builds an env of Gymnasium by its name, inside a wrapper: "statistics", "monitor" (SB3's), "atari", or none."""

    name: str
    wrapper: str = ""

    def __call__(self) -> Any:
        """Build it."""
        if self.wrapper == "atari":
            screen = gymnasium.wrappers.AtariPreprocessing(
                gymnasium.make(self.name, frameskip=1)
            )
            return gymnasium.wrappers.FrameStackObservation(screen, 4)
        env = gymnasium.make(self.name)
        if self.wrapper == "monitor":
            return importlib.import_module("stable_baselines3.common.monitor").Monitor(
                env
            )
        return gymnasium.wrappers.RecordEpisodeStatistics(env) if self.wrapper else env
