"""Run Gymnasium envs as Stable-Baselines3's vec envs do.

Guarantees:
- The env is called as SB3 calls it: `reset()` gets a seed or options only where the user has set some.
- Observations are cast to the dtype of their space, and extra entries of a dict are dropped. A flag may be any object
  with a truth value, and a reward any scalar, also as an array of one.
Does not broadcast an observation to a shape that it does not have; SB3's `DummyVecEnv` would.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
import numpy as np

from envherd.workers.adapters.base import Mask, Options, StepValues
from envherd.workers.adapters.common.scalars import as_float
from envherd.workers.adapters.common.tree import Leaf
from envherd.workers.adapters.gymnasium import spaces as gymnasium_spaces
from envherd.workers.adapters.gymnasium.adapter import GymnasiumAdapter


class Sb3Adapter(GymnasiumAdapter):
    """One `gymnasium.Env`; its observation is `("observation",)` or nested below it, in the order of its space.

    Attributes:
        step_info: the info of the last step (VIEW); a reset does not change it. `info` is that of the last command.
        error: the env's latest exception, or None.
    """

    _where = None

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        self.step_info: Mapping[str, Any] = {}
        self.error: BaseException | None = None
        observation = gymnasium_spaces.nested_observation_tree(env.observation_space, ("observation",), _cast_leaf)
        action = gymnasium_spaces.action_tree(env.action_space)
        self._describe(env, observation, action, "float32", {"render_mode": env.render_mode})

    def reset(self, seed: int | None, options: Options = None, mask: Mask = None) -> list[Any]:  # noqa: ARG002
        arguments = dict(options or {}) if seed is None else {"seed": seed, **(options or {})}
        try:
            observation, self.info = self.env.reset(**arguments)
            return self._flatten(observation)
        except BaseException as error:
            self.error = error
            raise

    def step(self, action: list[Any]) -> StepValues:
        return self._step(self._build(action))

    def _step(self, action: Any) -> StepValues:
        try:
            observation, reward, terminated, truncated, self.info = self.env.step(action)
            self.step_info = self.info
            reward = reward if reward.__class__ is float else as_float(reward, "reward")
            return self._flatten(observation), [reward], bool(terminated), bool(truncated)
        except BaseException as error:
            self.error = error
            raise


class Sb3DirectAdapter(Sb3Adapter):
    """The same in the caller's process: the env gets the very action object that the caller passed.

    Attributes:
        next_action: for the next step; the action in the slab is ignored.
    """

    next_action: Any = None

    def step(self, action: list[Any]) -> StepValues:  # noqa: ARG002  # see the class
        """Make one transition with `next_action`."""
        return self._step(self.next_action)


def _cast_leaf(space: gymnasium_spaces.Space, key: tuple[str, ...]) -> Leaf:
    """Describe an observation that gets the dtype of its space."""
    leaf = gymnasium_spaces.observation_leaf(space, key)
    return Leaf(leaf.spec, take=None if leaf.spec.is_side else _caster(np.dtype(leaf.spec.dtype), leaf.take))


def _caster(dtype: np.dtype, take: Callable[[Any], Any] | None) -> Callable[[Any], Any]:
    def cast(value: Any) -> Any:
        if not (value.__class__ is np.ndarray and value.dtype == dtype):
            value = np.asarray(value).astype(dtype)
        return value if take is None else take(value)

    return cast
