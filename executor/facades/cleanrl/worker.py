"""Gymnasium with the names and arguments of version 0.29 that later versions have changed.

A script with `gym = Gym()` in place of `import gymnasium as gym` builds its envs with the installed version. Workers
unpickle `gym` as a `Gym` of this module, which imports no vector env. Wrappers around vector envs are not translated.
"""

import contextlib
import importlib
from collections.abc import Callable
from typing import Any

import gymnasium
from gymnasium.wrappers.utils import RunningMeanStd


class Gym:
    """Stands in for the module `gymnasium` of 0.29; other attributes are those of the installed version.

    Attributes:
        wrappers: Gymnasium's, with the names of 0.29 (`FrameStack`, `GrayScaleObservation`) too.
    """

    def __init__(self) -> None:
        self.wrappers = Wrappers()

    def __getattr__(self, name: str) -> Any:
        """Return Gymnasium's own."""
        return getattr(gymnasium, name)

    def make(self, id: Any, **kwargs: Any) -> Any:  # noqa: A002  # Gymnasium's name
        """Make an env; ids of ALE are registered if ale_py is installed, as they were when Gymnasium was imported."""
        try:
            return gymnasium.make(id, **kwargs)
        except (gymnasium.error.NameNotFound, gymnasium.error.NamespaceNotFound):
            with contextlib.suppress(ImportError):
                gymnasium.register_envs(importlib.import_module("ale_py"))
            return gymnasium.make(id, **kwargs)

    def __reduce__(self) -> Any:
        """Pickle as a `Gym` of this module: workers build envs and no vector envs."""
        return Gym, ()


class Wrappers:
    """`gymnasium.wrappers` of 0.29; everything else is Gymnasium's own."""

    def __getattr__(self, name: str) -> Any:
        """Return Gymnasium's own."""
        return getattr(gymnasium.wrappers, name)

    def FrameStack(self, env: Any, num_stack: int, lz4_compress: bool = False) -> Any:  # noqa: ARG002, FBT001, FBT002, N802
        """Stack the last observations, as arrays: none is compressed."""
        return gymnasium.wrappers.FrameStackObservation(env, num_stack)

    def GrayScaleObservation(self, env: Any, keep_dim: bool = False) -> Any:  # noqa: FBT001, FBT002, N802
        """Make pictures grey."""
        return gymnasium.wrappers.GrayscaleObservation(env, keep_dim)

    def NormalizeObservation(self, env: Any, epsilon: float = 1e-8) -> Any:  # noqa: N802
        """Normalize observations; their statistics are float64, as in 0.29."""
        wrapped = gymnasium.wrappers.NormalizeObservation(env, epsilon)
        wrapped.obs_rms = RunningMeanStd(shape=wrapped.observation_space.shape)  # type: ignore[no-untyped-call]
        return wrapped

    def ResizeObservation(self, env: Any, shape: int | tuple[int, int]) -> Any:  # noqa: N802
        """Resize pictures; one number is both sides."""
        return gymnasium.wrappers.ResizeObservation(
            env,
            (shape, shape) if isinstance(shape, int) else shape,
        )

    def TransformObservation(self, env: Any, f: Callable[[Any], Any]) -> Any:  # noqa: N802
        """Change observations, not their space."""
        return gymnasium.wrappers.TransformObservation(env, f, env.observation_space)
