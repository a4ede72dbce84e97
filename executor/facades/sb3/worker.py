"""Run Gymnasium envs as Stable-Baselines3's vec envs do.

Guarantees:
- The env is called as SB3 calls it: `reset()` gets neither seed nor options where the user has set none.
- Observations are cast to the dtype of their space, and extra entries of a dict are dropped. A flag may be any object
  with a truth value, and a reward any scalar, also as an array of one.
Does not broadcast an observation to a shape that it does not have; SB3's `DummyVecEnv` would.
"""

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np

from envherd.executor.facades.gymnasium.worker import NativeAdapter, NativeEnv
from envherd.workers.adapters.common.tree import Leaf
from envherd.workers.adapters.gymnasium.spaces import (
    Space,
    observation_leaf,
    tree_below,
)


class Sb3Adapter(NativeAdapter):
    """One `gymnasium.Env`; its observation is `("observation",)` or nested below it, in the order of its space."""

    _as_flag = staticmethod(lambda value, name: bool(value))  # noqa: ARG005

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        self.hosted = NativeEnv(env)
        self._describe(
            env,
            tree_below(
                env.observation_space,
                "observation",
                make_leaf=_cast_leaf,
            ),
            tree_below(env.action_space, "action"),
            "float32",
            {"render_mode": env.render_mode},
        )


def _cast_leaf(space: Space, key: tuple[str, ...]) -> Leaf:
    """Describe an observation that gets the dtype of its space."""
    leaf = observation_leaf(space, key)
    return Leaf(
        leaf.spec,
        take=None
        if leaf.spec.is_side
        else _caster(np.dtype(leaf.spec.dtype), leaf.take),
    )


def _caster(dtype: np.dtype, take: Callable[[Any], Any] | None) -> Callable[[Any], Any]:
    def cast(value: Any) -> Any:
        # Most values have the dtype already.
        if not (value.__class__ is np.ndarray and value.dtype == dtype):
            value = np.asarray(value).astype(dtype)
        return value if take is None else take(value)

    return cast
