"""Gymnasium: a single `gymnasium.Env`, with any space. `spaces.py` has its keys and values.

Guarantees:
- `step` is exactly one `env.step` and `reset` one `env.reset`; the adapter adds no wrapper, no passive checker and no
  other reset. An env inside `gymnasium.wrappers.Autoreset` behaves as without it, because the executor always resets it
  first.
- `terminated` and `truncated` are the env's own two flags; both may be True.
- Observations are passed on as the env returned them (VIEW); only side-channel values are copied.
Does not check whether values are inside their space (the writers check shape and dtype).
"""

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import gymnasium

from envherd.shm.specs import EnvSpec, LeafSpec
from envherd.workers.adapters.base import Adapter, EnvCall, Mask, Options, StepValues
from envherd.workers.adapters.common.tree import (
    Leaf,
    Node,
    builder,
    flattener,
    is_bare,
    leaf_specs,
)
from envherd.workers.adapters.common.values import (
    as_flag,
    as_float,
    outline,
    own_options,
)
from envherd.workers.adapters.gymnasium import spaces as gymnasium_spaces
from envherd.workers.errors import SpecError

_OLD_API = (
    "This is the API of gym before 0.26. Wrap the env in the factory: shimmy.GymV21CompatibilityV0(env=env). "
    "Or return {new}."
)

_LACKS_ARGUMENT = re.compile(
    r"reset\(\) got an unexpected keyword argument '(seed|options)'"
)

_SEVERAL_REWARDS = (
    "Fix the env; or, if it gives several (for objectives, or agents), say how many where it is built: "
    "env.unwrapped.reward_space = gymnasium.spaces.Box(-numpy.inf, numpy.inf, (COUNT,))."
)


class GymnasiumAdapter(Adapter):
    """One `gymnasium.Env` (of any wrappers).

    The reward is float32 of shape (1,), or of the shape of `env.reward_space` where a multi-objective
    env has one. `options` of `reset` may hold the single keyword `options`, which Gymnasium hands to
    the env.

    Args:
        env: what the factory returned; it is neither reset nor stepped here.

    Attributes:
        info: the last `info` dict that the env returned (VIEW); empty before the first reset.

    Raises:
        SpecError: a space is missing, or an observation has a name that a batch uses itself.
    """

    family: ClassVar[str] = "gymnasium"
    is_its_attributes = True
    #: What messages call an observation that does not match its space; None ignores entries that were never declared.
    _where: ClassVar[str | None] = "observation"
    #: What to do about several rewards, for messages.
    _fix_rewards: ClassVar[str] = _SEVERAL_REWARDS
    _as_flag = staticmethod(as_flag)
    _has_one_reward = True

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        observation, renamed = gymnasium_spaces.observation_tree(
            getattr(env, "observation_space", None)
        )
        action = gymnasium_spaces.tree_below(
            getattr(env, "action_space", None),
            "action",
        )
        reward = gymnasium_spaces.reward_leaf(_wrapper_attr(env, "reward_space"))
        self._has_one_reward = reward is None
        self._describe(
            env,
            observation,
            action,
            "float32",
            gymnasium_spaces.metadata(env, renamed),
        )
        if reward is not None:
            self.spec = replace(self.spec, reward=(reward.spec,))

    def _describe(
        self,
        env: Any,
        observation: Node,
        action: Node,
        reward_dtype: str,
        metadata: Mapping[str, Any],
    ) -> None:
        """Take an env whose values are handed out as two trees say; subclasses for other hosts have other trees."""
        self.env = env
        self.info: Mapping[str, Any] = {}
        self._is_bare = is_bare(observation)
        self._flatten = flattener(observation, self._where)
        self._build = builder(action)
        self._takes_bare = isinstance(action, Leaf)
        self._give = action.give if isinstance(action, Leaf) else None
        self.spec = EnvSpec(
            observation=leaf_specs(observation),
            action=leaf_specs(action),
            reward=(LeafSpec(("reward",), (1,), reward_dtype),),
            family=self.family,
            metadata=metadata,
        )

    def reset(
        self,
        seed: int | None,
        options: Options = None,
        mask: Mask = None,  # noqa: ARG002
    ) -> list[Any]:
        """Start a new episode; `options` are `{"options": {...}}`, of which the env gets a copy, or nothing.

        Raises:
            TypeError: a keyword other than `options`.
            SpecError: the env returned anything but `(observation, info)`.
        """
        own = own_options(options, "gymnasium env")
        try:
            result = self.env.reset(seed=seed, options=own)
        except TypeError as error:
            if not _LACKS_ARGUMENT.search(str(error)):
                raise
            raise SpecError(
                f"reset failed: expected reset(seed=..., options=...), got {error}. "
                + _OLD_API.format(
                    new="(observation, info) from reset(seed=None, options=None)"
                )
            ) from error
        if not (
            isinstance(result, tuple)
            and len(result) == 2
            and isinstance(result[1], Mapping)
        ):
            raise SpecError(
                f"reset failed: expected (observation, info dict), got {outline(result)}. "
                + _OLD_API.format(new="(observation, info)")
            )
        observation, self.info = result
        return self._flatten(observation)

    def step(self, action: list[Any]) -> StepValues:
        """Make one transition.

        Raises:
            SpecError: the env returned no five values, no number as reward, or no bool as a flag.
        """
        give = self._give
        return self._accept(
            self.env.step(self._build(action) if give is None else give(action[0]))
        )

    def env_call(self) -> EnvCall | None:
        """Return what `step` does around `env.step`; None where a subclass or the env's object has another `step`."""
        if (
            type(self).step is not GymnasiumAdapter.step
            or {"step", "_accept"} & vars(self).keys()
        ):
            return None
        return EnvCall(
            self._accept,
            give=self._give,
            build=None if self._takes_bare else self._build,
            flatten=None if self._is_bare else self._flatten,
            ready=gymnasium_spaces.ready_values(self._give),
            reads_number=self._has_one_reward,
        )

    def _accept(self, result: Any) -> StepValues:
        """Check what `env.step` returned."""
        try:
            observation, reward, terminated, truncated, self.info = result
        except (TypeError, ValueError):
            raise _wrong_arity(result) from None
        if reward.__class__ is not float and self._has_one_reward:
            reward = as_float(reward, "reward", self._fix_rewards)
        if terminated.__class__ is not bool:
            terminated = self._as_flag(terminated, "terminated")
        if truncated.__class__ is not bool:
            truncated = self._as_flag(truncated, "truncated")
        return (
            ([observation] if self._is_bare else self._flatten(observation)),
            [reward],
            terminated,
            truncated,
        )

    def render(self) -> Any:
        """Return what `env.render()` draws, uint8 `[H, W, 3]`, if its render mode is "rgb_array", else None."""
        return self.env.render() if self.env.render_mode == "rgb_array" else None

    def state_dict(self) -> Any:
        """Return `env.state_dict()` of the env or of the outermost wrapper that has one; else the env's attributes."""
        save = _wrapper_attr(self.env, "state_dict")
        return save() if callable(save) else super().state_dict()

    def read_state(self, state: Any) -> Callable[[], None]:
        """Return `load_state_dict` of the env or of the outermost wrapper that has one, with the state."""
        load = _wrapper_attr(self.env, "load_state_dict")
        return (
            functools.partial(load, state)
            if callable(load)
            else super().read_state(state)
        )


def _wrong_arity(result: Any) -> SpecError:
    message = f"step failed: expected (observation, reward, terminated, truncated, info), got {outline(result)}. "
    if isinstance(result, (tuple, list)) and len(result) == 4:
        return SpecError(message + _OLD_API.format(new="these five values"))
    return SpecError(message + "Return five values from env.step.")


def _wrapper_attr(env: gymnasium.Env[Any, Any], name: str) -> Any:
    try:
        return env.get_wrapper_attr(name)
    except AttributeError:
        return None
