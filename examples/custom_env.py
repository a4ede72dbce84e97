"""A custom env over a C library, in parallel workers.

What it shows:
- An env that holds C pointers cannot be pickled, and need not be: its factory is called in the worker.
  Anything else (an env built here, or a factory that captured one) is refused with a message that names the fix.
- An adapter of thirty lines supports an env with any interface: it declares the env's spec and makes one transition per
  call. The executor adds partial resets, seeding, shared memory and errors.
- `env_kwargs` passes different arguments to each env.

Run: python examples/custom_env.py
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from tensordict import TensorDictBase

from envherd import FactoryError, ParallelEnv
from envherd.shm.specs import Discrete, EnvSpec, LeafSpec
from envherd.workers.adapters import Adapter, register
from envherd.workers.adapters.base import StepValues

WINDS = (0.02, 0.04, 0.08, 0.16)


class Marble:
    """A marble on a track from -1 to 1 in gusty wind; the task is to keep it on the track.

    Represents any binding to a simulator: it holds a function of a loaded library and a pointer to the library's
    memory, so it cannot be pickled.
    """

    def __init__(self, wind: float) -> None:
        self.wind = wind
        self._uniform = ctypes.CDLL(None).erand48
        self._uniform.restype = ctypes.c_double
        self._generator = ctypes.pointer((ctypes.c_ushort * 3)())
        self.position = self.speed = 0.0

    def start(self, seed: int | None) -> None:
        """Put the marble into the middle; with a seed, also restart the library's generator."""
        self.position = self.speed = 0.0
        if seed is not None:
            self._generator.contents[:] = [0x330E, seed & 0xFFFF, seed >> 16]

    def push(self, force: float) -> bool:
        """Push for one moment; return whether the marble is still on the track."""
        gust = self.wind * (2 * self._uniform(self._generator) - 1)
        self.speed += 0.02 * force + gust
        self.position += self.speed
        return abs(self.position) <= 1.0


class MarbleAdapter(Adapter):
    """Adapter for `Marble`: position and speed as observation, three pushes, reward 1 for every moment on the track."""

    family: ClassVar[str] = "marble"
    env: Marble

    def __init__(self, env: Marble) -> None:
        self.env = env
        self.num_pushes = 0
        self.spec = EnvSpec(
            observation=(LeafSpec(("observation",), (2,), "float32"),),
            action=(LeafSpec(("action",), (), "int64", Discrete(3)),),
            family=self.family,
        )

    def reset(
        self,
        seed: int | None,
        options: Mapping[str, Any] | None = None,  # a marble's reset has no options
        mask: np.ndarray | None = None,  # never set: the env is no batch of envs
    ) -> list[Any]:
        """Start an episode and return its first observation."""
        self.num_pushes = 0
        self.env.start(seed)
        return [self._look()]

    def step(self, action: list[Any]) -> StepValues:
        """Push left, not at all, or right; the episode is terminated by a fall, and truncated after 500 pushes."""
        self.num_pushes += 1
        has_fallen = not self.env.push(action[0] - 1)
        return (
            [self._look()],
            [0.0 if has_fallen else 1.0],
            has_fallen,
            self.num_pushes == 500,
        )

    def _look(self) -> np.ndarray:
        return np.array([self.env.position, self.env.speed], np.float32)


def make_marble(wind: float) -> Marble:
    """Build one env inside a worker and register the adapter there: registration is per process."""
    register(Marble, MarbleAdapter)
    return Marble(wind)


def push_back(root: TensorDictBase) -> TensorDictBase:
    """Push against the marble's predicted position: one action per env."""
    position, speed = root["observation"].unbind(-1)
    ahead = position + 8 * speed
    return root.set("action", 1 - ahead.sign().long())


def show_refusals() -> None:
    """Print the errors for an env that was built in the wrong process."""
    built_here = Marble(0.05)
    for wrong in (built_here, lambda: built_here):
        try:
            ParallelEnv(2, wrong)  # type: ignore[arg-type]  # the first is refused for that
        except FactoryError as error:
            print("refused:", error)


def main() -> None:
    """Compare random pushes with `push_back`, in four winds at the same time."""
    show_refusals()
    with ParallelEnv(
        len(WINDS), make_marble, env_kwargs=[{"wind": wind} for wind in WINDS], seed=0
    ) as env:
        for name, policy in (("random pushes", None), ("pushing back", push_back)):
            data = env.rollout(1000, policy, break_when_any_done=False)
            falls = data["next", "terminated"].sum((1, 2)).tolist()
            cuts = data["next", "truncated"].sum((1, 2)).tolist()
            for wind, num_falls, num_cuts in zip(WINDS, falls, cuts, strict=True):
                print(
                    f"{name:13}  wind {wind:.2f}  falls {num_falls:3d}  cut off {num_cuts:3d}"
                )


if __name__ == "__main__":
    main()
