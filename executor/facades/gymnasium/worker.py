"""Run Gymnasium envs as Gymnasium's own vector envs do, for the Gymnasium facade.

`GymnasiumAdapter` converts an env to the executor's keys. This adapter returns every value of the env unchanged.

Guarantees:
- rewards are float64; observations keep their space's dtype and shape, `()` too; values that have no
  fixed shape (text, graphs, custom spaces) travel as pickles.
- an env gets exactly the caller's action: from shared memory if that holds it without loss, else the object itself
  (`NativeEnv.raw_action`).
- a reset by the caller is `env.reset(seed=..., options=...)`, any other is `env.reset()`.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import batch_space

from envherd.shm.specs import EnvSpec, Key, LeafSpec
from envherd.workers.adapters.base import Adapter, StepValues
from envherd.workers.adapters.common.scalars import as_flag, as_float
from envherd.workers.build import describe, modules_of
from envherd.workers.pickling import dumps

#: Key under which the infos carry the last observation of an episode; no env uses it.
FINAL_OBSERVATION = "\0final observation"

#: Spaces whose values are arrays of one shape and dtype.
FIXED = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)

_NO_ACTION = object()

Space = spaces.Space[Any]


def leaf_spaces(space: Space) -> list[Space]:
    """Return the spaces inside Dict and Tuple spaces, depth first, in their own order."""
    if isinstance(space, spaces.Dict):
        return [leaf for sub in space.spaces.values() for leaf in leaf_spaces(sub)]
    if isinstance(space, spaces.Tuple):
        return [leaf for sub in space.spaces for leaf in leaf_spaces(sub)]
    return [space]


def leaf_specs(space: Space, name: str) -> tuple[LeafSpec, ...]:
    """Return the specs of a space's leaves, `(name, "0")`, `(name, "1")`, ...; any value of the dtype is allowed."""
    specs = []
    for index, leaf in enumerate(leaf_spaces(space)):
        key: Key = (name, str(index))
        if isinstance(leaf, FIXED):
            specs.append(LeafSpec(key, tuple(leaf.shape or ()), np.dtype(leaf.dtype).name))
        else:
            specs.append(LeafSpec(key, dtype="", is_side=True))
    return tuple(specs)


class NativeEnv:
    """An env and the requests that its vector env may make.

    Attributes:
        env: as the factory returned it.
        keeps_final: add an episode's last observation to its infos, unless its row holds all of it.
        raw_action: the action of the next step, if it is not in shared memory.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], *, keeps_final: bool) -> None:
        self.env = env
        self.keeps_final = keeps_final
        self.raw_action: Any = _NO_ACTION

    def spaces(self) -> tuple[Space, Space]:
        """Return the observation space and the action space."""
        return self.env.observation_space, self.env.action_space

    def describe(self) -> bytes:
        """Return `(observation space, action space, metadata, render mode)`, pickled."""
        return dumps((*self.spaces(), dict(self.env.metadata), self.env.render_mode))

    def ask(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
        """Return an attribute of the env or of its wrappers, pickled; if it is a method, its result."""
        value = self.env.get_wrapper_attr(name)
        return dumps(value(*args, **kwargs) if callable(value) else value)

    def assign(self, name_and_value: tuple[str, Any]) -> None:
        """Set an attribute of the env or of its wrappers."""
        self.env.set_wrapper_attr(*name_and_value)

    def give(self, action: Any) -> None:
        """Keep an action for the next step, which passes it to the env unchanged."""
        self.raw_action = action

    @property
    def has_raw_action(self) -> bool:
        """Whether the next step has an action that is not in shared memory."""
        return self.raw_action is not _NO_ACTION

    def take_raw_action(self) -> Any:
        """Return the raw action and forget it."""
        action, self.raw_action = self.raw_action, _NO_ACTION
        return action

    def begin_reset(self, options: Mapping[str, Any] | None) -> Any:
        """Forget the raw action; return a copy of the options that the env gets, None for none.

        Args:
            options: None, or `{"options": what the caller passes}`.
        """
        self.raw_action = _NO_ACTION
        return copy.deepcopy(options["options"]) if options else None

    def close(self) -> None:
        """Close the env."""
        self.env.close()


class NativeFactory:
    """A picklable factory of `NativeAdapter`s over a user's factory of envs.

    Attributes:
        preload: modules that the user's factory refers to.
    """

    def __init__(self, env_fn: Callable[[], Any], *, keeps_final: bool = False) -> None:
        self.env_fn = env_fn
        self.keeps_final = keeps_final
        self.preload = tuple(modules_of(env_fn))
        self.__qualname__ = describe(env_fn)  # for messages

    def __call__(self) -> Any:
        """Return the env, behind its adapter; anything else as it is, to be refused."""
        env = self.env_fn()
        if isinstance(env, type) or not hasattr(env, "step"):
            return env
        return NativeAdapter(NativeEnv(env, keeps_final=self.keeps_final))


class NativeAdapter(Adapter):
    """One `NativeEnv`; see the module."""

    family: ClassVar[str] = "gymnasium"

    env: NativeEnv

    def __init__(self, env: NativeEnv) -> None:
        self.env = env
        self.info: Mapping[str, Any] = {}
        observation_space, action_space = env.spaces()
        self._is_bare = isinstance(observation_space, FIXED)
        is_array = isinstance(observation_space, spaces.Box) and observation_space.shape != ()
        self._row_dtype = observation_space.dtype if is_array else None
        self._flatten = flattener(observation_space)
        actions = leaf_specs(action_space, "action")
        self._has_rows = not any(leaf.is_side for leaf in actions)
        self._build = builder(action_space, batch_space(action_space, 1)) if self._has_rows else next
        self._is_bare_action = isinstance(action_space, FIXED)
        self.spec = EnvSpec(
            observation=leaf_specs(observation_space, "observation"),
            action=actions if self._has_rows else (),
            reward=(LeafSpec(("reward",), (1,), "float64"),),
            family=self.family,
        )

    def reset(
        self,
        seed: int | None,
        options: Mapping[str, Any] | None = None,
        mask: np.ndarray | None = None,  # noqa: ARG002  # never set: the env is no batch
    ) -> list[Any]:
        """Start a new episode; see `Adapter.reset`. `options` is None, or `{"options": what the env gets}`."""
        own = self.env.begin_reset(options)
        if options is None and seed is None:
            observation, self.info = self.env.env.reset()
        else:
            observation, self.info = self.env.env.reset(seed=seed, options=own)
        return self._flattened(observation)

    def step(self, action: list[Any]) -> StepValues:
        env = self.env
        if env.raw_action is not _NO_ACTION:
            given = env.take_raw_action()
        else:
            given = action[0] if self._is_bare_action else self._build(iter(action))
        result: tuple[Any, Any, Any, Any, Any] = env.env.step(given)
        observation, reward, terminated, truncated, self.info = result
        if reward.__class__ is not float:
            reward = as_float(reward, "reward")
        if terminated.__class__ is not bool:
            terminated = as_flag(terminated, "terminated")
        if truncated.__class__ is not bool:
            truncated = as_flag(truncated, "truncated")
        if env.keeps_final and (terminated or truncated) and not self._is_row(observation):
            self.info = {**self.info, FINAL_OBSERVATION: observation}
        return self._flattened(observation), [reward], terminated, truncated

    def _is_row(self, observation: Any) -> bool:
        """Return whether an observation is an array that its row in shared memory holds completely."""
        return (
            self._row_dtype is not None and observation.__class__ is np.ndarray and observation.dtype == self._row_dtype
        )

    def _flattened(self, observation: Any) -> list[Any]:
        if self._is_bare:
            return [observation]
        values: list[Any] = []
        self._flatten(observation, values)
        return values


def flattener(space: Space) -> Callable[[Any, list[Any]], None]:
    """Return the function that appends the leaves of a value to a list; entries that no space names are left out."""
    parts: list[tuple[Any, Callable[[Any, list[Any]], None]]]
    if isinstance(space, spaces.Dict):
        parts = [(key, flattener(sub)) for key, sub in space.spaces.items()]
    elif isinstance(space, spaces.Tuple):
        parts = [(index, flattener(sub)) for index, sub in enumerate(space.spaces)]
    elif isinstance(space, FIXED):
        return lambda value, values: values.append(value)
    else:
        return lambda value, values: values.append(dumps(value))

    def flatten(value: Any, values: list[Any]) -> None:
        for key, part in parts:
            part(value[key], values)

    return flatten


def builder(space: Space, batched: Space | None = None) -> Callable[[Any], Any]:
    """Return the function that makes an action from an iterator over its leaves.

    Args:
        space: of the action; the leaves are in its order.
        batched: of a batch of actions: Gymnasium passes the env dicts whose keys are in its order. None for `space`.
    """
    if isinstance(space, spaces.Dict):
        order = space.spaces if batched is None else batched.spaces  # type: ignore[attr-defined]  # a Dict too
        named = {key: builder(sub, None if batched is None else order[key]) for key, sub in space.spaces.items()}
        if list(order) == list(named):
            return lambda values: {key: part(values) for key, part in named.items()}
        keys = list(order)

        def build(values: Any) -> dict[Any, Any]:
            made = {key: part(values) for key, part in named.items()}
            return {key: made[key] for key in keys}

        return build
    if isinstance(space, spaces.Tuple):
        batches = [None] * len(space.spaces) if batched is None else batched.spaces  # type: ignore[attr-defined]
        parts = [builder(sub, own) for sub, own in zip(space.spaces, batches, strict=True)]
        return lambda values: tuple(part(values) for part in parts)
    return next


def loads(data: bytes) -> Any:
    """Return the value that `dumps` pickled."""
    return pickle.loads(data)
