"""Run Gymnasium envs as Gymnasium's own vector envs do, for the Gymnasium facade.

`GymnasiumAdapter` converts an env's values to a batch's. This adapter hands out every value of the env unchanged.

Guarantees:
- rewards are float64; observations keep their space's dtype and shape, `()` too; values that have no
  fixed shape (text, graphs, custom spaces) travel as pickles.
- an env gets exactly the caller's action: from shared memory if that holds it without loss, else the object itself
  (`NativeEnv.raw_action`).
- a reset by the caller is `env.reset(seed=..., options=...)`, any other is `env.reset()`.
"""

import copy
import pickle
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import batch_space

from envherd.workers.adapters.base import EnvCall, Mask, Options, StepValues
from envherd.workers.adapters.gymnasium.adapter import GymnasiumAdapter
from envherd.workers.adapters.gymnasium.spaces import Space, native_tree
from envherd.workers.build import describe, interpreter_of, modules_of
from envherd.workers.sending.pickling import dumps

#: Key under which the infos carry the last observation of an episode; no env uses it.
FINAL_OBSERVATION = "\0final observation"

# None may be an action.
_NO_ACTION = object()


class Description(NamedTuple):
    """One env's description of itself."""

    observation_space: Space
    action_space: Space
    metadata: dict[str, Any]
    render_mode: str | None


class NativeEnv:
    """An env and the requests that its vector env may make.

    Attributes:
        env: as the factory returned it.
        keeps_final: add an episode's last observation to its infos, unless its row holds all of it.
        raw_action: the action of the next step, if it is not in shared memory.
    """

    def __init__(
        self,
        env: gymnasium.Env[Any, Any],
        *,
        keeps_final: bool = False,
    ) -> None:
        self.env = env
        self.keeps_final = keeps_final
        self.raw_action: Any = _NO_ACTION

    def spaces(self) -> tuple[Space, Space]:
        """Return the observation space and the action space."""
        return self.env.observation_space, self.env.action_space

    def describe(self) -> bytes:
        """Return the env's `Description`, pickled."""
        metadata = dict(getattr(self.env, "metadata", None) or {})
        render_mode = getattr(self.env, "render_mode", None)
        return dumps(Description(*self.spaces(), metadata, render_mode))

    def ask(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
        """Return an attribute of the env or of its wrappers, pickled; if it is a method, its result."""
        value = self.env.get_wrapper_attr(name)
        return dumps(value(*args, **kwargs) if callable(value) else value)

    def assign(self, attributes: Mapping[str, Any]) -> None:
        """Set attributes of the env or of its wrappers, values by name."""
        for name, value in attributes.items():
            self.env.set_wrapper_attr(name, value)

    def give(self, action: Any) -> None:
        """Keep an action for the next step, which passes it to the env unchanged."""
        self.raw_action = action

    def step(self, action: Any) -> Any:
        """Step the env, with the raw action in place of `action` if there is one."""
        return self.env.step(self.next_action(lambda value: value, action))

    def next_action(self, build: Callable[[list[Any]], Any], values: list[Any]) -> Any:
        """Return the raw action and forget it; without one, what `build` makes of the values in shared memory."""
        action = self.raw_action
        self.raw_action = _NO_ACTION
        return build(values) if action is _NO_ACTION else action

    def begin_reset(self, options: Mapping[str, Any] | None) -> Any:
        """Forget the raw action; return a copy of the options that the env gets, None for none.

        Args:
            options: None, or `{"options": what the caller passes}`.
        """
        self.raw_action = _NO_ACTION
        # Copied, because the envs of a worker get the same object.
        return copy.deepcopy(options["options"]) if options else None

    def close(self) -> None:
        """Close the env."""
        self.env.close()


class NativeFactory:
    """A picklable factory of `NativeAdapter`s over a user's factory of envs.

    Attributes:
        preload: modules that the user's factory refers to.
        interpreter: in which it must be called.
    """

    def __init__(self, env_fn: Callable[[], Any], *, keeps_final: bool = False) -> None:
        self.env_fn = env_fn
        self.keeps_final = keeps_final
        self.preload = tuple(modules_of(env_fn))
        self.interpreter = interpreter_of(env_fn)
        self.__qualname__ = describe(env_fn)  # for messages

    def __call__(self) -> Any:
        """Return the env, behind its adapter; anything else as it is, to be refused."""
        env = self.env_fn()
        if isinstance(env, gymnasium.vector.VectorEnv):
            raise TypeError(
                f"expected single envs, got {env}, a batch of rows. Return one env from each factory, "
                f"or use envherd.ParallelEnv."
            )
        # A class of envs has `step` as well.
        if isinstance(env, type) or not hasattr(env, "step"):
            return env
        return NativeAdapter(NativeEnv(env, keeps_final=self.keeps_final))


class NativeAdapter(GymnasiumAdapter):
    """One `NativeEnv`; see the module.

    Attributes:
        hosted: the env. In a subclass for another host, requests (`env`) may reach something else.
    """

    _where = None
    _fix_rewards = "Fix the env."

    def __init__(self, env: NativeEnv) -> None:
        self.hosted = env
        space, action_space = env.spaces()
        action = native_tree(action_space, "action", batch_space(action_space, 1))
        is_array = isinstance(space, spaces.Box) and space.shape != ()
        self._row_dtype = space.dtype if is_array else None
        self._describe(env, native_tree(space, "observation"), action, "float64", {})
        if any(leaf.is_side for leaf in self.spec.action):
            self.spec = replace(self.spec, action=())  # all actions are given
            self._build = lambda _: None

    def reset(
        self,
        seed: int | None,
        options: Options = None,
        mask: Mask = None,  # noqa: ARG002
    ) -> list[Any]:
        """Start a new episode; see `Adapter.reset`. `options` are nothing, or `{"options": what the env gets}`."""
        # In any case: it also forgets an action that was given for a step.
        own = self.hosted.begin_reset(options)
        arguments: dict[str, Any] = {"options": own} if options else {}
        if arguments or seed is not None:
            arguments["seed"] = seed
        observation, self.info = self.hosted.env.reset(**arguments)
        return self._flatten(observation)

    def env_call(self) -> EnvCall | None:
        """See `Adapter.env_call`. An observation that C stores is an array that its row holds completely."""
        if self.hosted.keeps_final and self._row_dtype is None:
            return None
        return super().env_call()

    def _accept(self, result: Any) -> StepValues:
        """Check what `env.step` returned; keep a last observation that its row does not hold completely."""
        values = super()._accept(result)
        if (
            self.hosted.keeps_final
            and (values[2] or values[3])
            and not self._is_row(result[0])
        ):
            self.info = {**self.info, FINAL_OBSERVATION: result[0]}
        return values

    def _is_row(self, observation: Any) -> bool:
        """Return whether an observation is an array that its row in shared memory holds completely."""
        return (
            self._row_dtype is not None
            and observation.__class__ is np.ndarray
            and observation.dtype == self._row_dtype
        )


#: Returns the value that `dumps` of `sending.pickling` pickled.
loads = pickle.loads
