"""Envs of the API before Gymnasium, as a `gymnasium.Env`: gym up to 0.26, and envs that were written like it.

What differs, and how it is handled:
- `step` returns `(observation, reward, done, info)`: an end with `info["TimeLimit.truncated"]` is
  `truncated`, any other `terminated`. If an env cuts its episodes without reporting it, `horizon` tells a cut from a
  real end. Five values (gym 0.26) are passed through unchanged.
- `reset` returns an observation, with or without an info.
- seeds go to `reset(seed=)` where the innermost env's `reset` names that argument, else to `seed(seed)`;
  an env with neither keeps its own random state (global generators are seeded when it is built).
- spaces of the package `gym` become Gymnasium's of the same name.
- pictures come from `render()` of an env made with `render_mode="rgb_array"`, or from `render(mode="rgb_array")`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from envherd.workers.adapters.common.scalars import as_flag
from envherd.workers.errors import SpecError

_TIME_LIMIT = "TimeLimit.truncated"
_OWN = frozenset(
    ("env", "observation_space", "action_space", "metadata", "render_mode", "spec", "_horizon", "_num_steps", "_takes")
)


class OldGymEnv(gymnasium.Env[Any, Any]):
    """An old env behind Gymnasium's API; see the module.

    Attributes that this class lacks are read from and set on the old env.

    Args:
        env: the old env, wrapped or not.
        horizon: an end in the step of this number is `truncated`; None relies on the env's infos.

    Raises:
        SpecError: a space is missing, or of no known kind.
    """

    def __init__(self, env: Any, *, horizon: int | None = None) -> None:
        self.env = env
        self._horizon = horizon
        self._num_steps = 0
        self.observation_space = as_gymnasium(getattr(env, "observation_space", None), "observation_space")
        self.action_space = as_gymnasium(getattr(env, "action_space", None), "action_space")
        self.metadata = dict(getattr(env, "metadata", None) or {})
        self.metadata.setdefault("render_fps", self.metadata.get("video.frames_per_second"))
        modes = self.metadata.get("render.modes") or ()
        self.render_mode = getattr(env, "render_mode", None) or ("rgb_array" if "rgb_array" in modes else None)
        self.spec = getattr(env, "spec", None)
        self._takes = _reset_arguments(env)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Start a new episode."""
        self._num_steps = 0
        arguments: dict[str, Any] = {}
        if seed is not None:
            if "seed" in self._takes:
                arguments["seed"] = seed
            elif callable(getattr(self.env, "seed", None)):
                self.env.seed(seed)
        if options is not None:
            if "options" not in self._takes:
                raise TypeError("reset failed: expected no options, because this env's reset accepts none.")
            arguments["options"] = options
        result = self.env.reset(**arguments)
        if self._is_with_info(result):
            return result[0], dict(result[1])
        return result, {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Make one transition."""
        result = self.env.step(action)
        self._num_steps += 1
        count = len(result) if isinstance(result, (tuple, list)) else 0
        if count == 5:
            observation, reward, terminated, truncated, info = result
            return observation, reward, as_flag(terminated, "terminated"), as_flag(truncated, "truncated"), info
        if count != 4:
            got = f"{count} values" if count else type(result).__name__
            raise SpecError(f"step failed: expected (observation, reward, done, info), got {got}. Fix the env.")
        observation, reward, done, info = result
        has_ended = as_flag(done, "done")
        truncated = has_ended and self._is_cut(info)
        return observation, reward, has_ended and not truncated, truncated, info

    def render(self) -> Any:
        """Draw the env now."""
        if "mode" in inspect.signature(self.env.render).parameters or getattr(self.env, "render_mode", None) is None:
            return self.env.render(mode="rgb_array")
        return self.env.render()

    def close(self) -> None:
        """Close the old env, if it can be closed."""
        close = getattr(self.env, "close", None)
        if callable(close):
            close()

    def _is_cut(self, info: Any) -> bool:
        if isinstance(info, Mapping) and _TIME_LIMIT in info:
            return bool(info[_TIME_LIMIT])
        return self._num_steps == self._horizon

    def _is_with_info(self, result: Any) -> bool:
        """Return whether a reset's result is `(observation, info)` rather than an observation that is such a tuple."""
        is_pair = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)
        return is_pair and not (isinstance(self.observation_space, spaces.Tuple) and result in self.observation_space)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the old env."""
        if name in _OWN:
            raise AttributeError(name)
        return getattr(self.env, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set one of this object's few own attributes here, any other on the old env."""
        if name in _OWN or hasattr(type(self), name):
            object.__setattr__(self, name, value)
        else:
            setattr(self.env, name, value)


def as_gymnasium(space: Any, where: str) -> spaces.Space[Any]:
    """Return a space as Gymnasium's of the same name.

    Raises:
        SpecError: an unknown kind of space.
    """
    if isinstance(space, spaces.Space):
        return space
    for cls in type(space).__mro__:
        convert = _CONVERTERS.get(cls.__name__)
        if convert is not None:
            return convert(space, where)
    raise SpecError(
        f"reading {where} failed: expected a space of gym or gymnasium ({', '.join(_CONVERTERS)}), got "
        f"{type(space).__module__}.{type(space).__qualname__}. Set env.{where} in the factory."
    )


_CONVERTERS: dict[str, Callable[[Any, str], spaces.Space[Any]]] = {
    "Box": lambda space, _: spaces.Box(space.low, space.high, space.shape, np.dtype(space.dtype).type),
    "Discrete": lambda space, _: spaces.Discrete(int(space.n), start=int(getattr(space, "start", 0))),
    "MultiDiscrete": lambda space, _: spaces.MultiDiscrete(np.asarray(space.nvec)),
    "MultiBinary": lambda space, _: spaces.MultiBinary(space.n),
    "Dict": lambda space, where: spaces.Dict([(k, as_gymnasium(s, where)) for k, s in space.spaces.items()]),
    "Tuple": lambda space, where: spaces.Tuple(tuple(as_gymnasium(s, where) for s in space.spaces)),
}


def _reset_arguments(env: Any) -> frozenset[str]:
    """Return which of `seed` and `options` the innermost env's `reset` names and all wrappers let through."""
    innermost = getattr(env, "unwrapped", env)
    taken = set(inspect.signature(innermost.reset).parameters) & {"seed", "options"}
    outer = inspect.signature(env.reset).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in outer.values()):
        taken &= outer.keys()
    return frozenset(taken)
