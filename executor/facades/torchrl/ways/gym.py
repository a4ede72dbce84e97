"""Direct ways of `GymEnv`, `GymWrapper`, `DMControlEnv` and `DMControlWrapper`. `direct.py` has its rules.

Without info readers, frame skips and vector envs, these only convert the values of a step. CartPole takes 6 us a step
instead of 110 (2-core x86, 2026-11).
"""

import functools
import operator
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torchrl.data import Categorical
from torchrl.envs import EnvBase

from envherd.executor.facades.torchrl.ways.direct import (
    FLAGS,
    DirectWay,
    TdKey,
    action_reader,
    encoder,
    require,
)
from envherd.workers.adapters.base import EnvCall, StepValues
from envherd.workers.adapters.torchrl.private_api import converts_actions, wrapped_env

_ENDS = ("done", "terminated", "truncated")
#: Packages whose envs and wrappers draw from numpy's generators only.
_WITHOUT_TORCH = ("ale_py", "gymnasium", "minigrid")
_NOT_ENDED = (FLAGS[False],) * 3
_NO_INFO: dict[str, Any] = {}


class DirectGymLike(DirectWay):
    """Steps an env with one action, one reward and one end, whose observation is an array or a dict of arrays."""

    def __init__(
        self,
        env: EnvBase,
        inputs: list[TdKey],
        observed: list[TdKey],
        rewards: list[TdKey],
    ) -> None:
        super().__init__(env, inputs, observed, rewards)
        require(env.wrapper_frame_skip == 1, "it skips frames")
        require(not env.info_dict_reader, "it reads infos")
        require(converts_actions(env), "its env takes tensors")
        require(
            inputs == ["action"] and rewards == ["reward"],
            f"it has the inputs {inputs} and the rewards {rewards}",
        )
        require(
            sorted(map(str, observed[-3:])) == sorted(_ENDS),
            f"its observation and done leaves are {observed}",
        )
        self.env = wrapped_env(env)
        action = env.full_action_spec["action"]
        reward = env.full_reward_spec["reward"]
        require(getattr(action, "mask", None) is None, "its action has a mask")
        require(
            tuple(reward.shape) == (1,) and reward.dtype.is_floating_point,
            "its reward is no float",
        )
        self._as_native: Callable[[Any], Any] = action_reader(action)
        if type(env.read_action(action.zero())) is int:
            self._as_native = (
                int
                if type(action) is Categorical
                else lambda value: int(value.argmax(-1))
            )
        self._encode_reward = encoder(reward)
        paths = [(key,) if isinstance(key, str) else key for key in observed[:-3]]
        self._encoders = {
            path: encoder(env.full_observation_spec[path]) for path in paths
        }
        self._encode: Callable[[Any], np.ndarray] | None = None
        if len(paths) == 1 and len(paths[0]) == 1:
            (self._encode,) = self._encoders.values()
        self._num_entries = len({path[0] for path in paths})
        self._end_order = [_ENDS.index(key) for key in observed[-3:]]

    def step(self, action: list[Any]) -> StepValues:
        return self._accept(self.env.step(self._as_native(action[0])))

    def _accept(self, result: Any) -> StepValues:
        observation, reward, terminated, truncated, _ = result
        values = self._read(observation)
        has_ended = bool(terminated or truncated)
        ends = (has_ended, bool(terminated), bool(truncated))
        values += [FLAGS[ends[index]] for index in self._end_order]
        self.latest = values
        self.is_ahead = True
        if reward.__class__ is not float:
            reward = self._number(reward)
        return values, [reward], has_ended, False

    def reset(self) -> list[Any]:
        self.latest = values = [*self._read(self._begin()), *_NOT_ENDED]
        self.is_ahead = True
        return values

    def _begin(self) -> Any:
        """Reset the env; return the observation."""
        raise NotImplementedError

    def _read(self, observation: Any) -> list[Any]:
        if not isinstance(observation, Mapping):
            if self._encode is None:
                raise KeyError(
                    f"expected the observations {self.observed[:-3]}, got a {type(observation).__name__}"
                )
            return [self._encode(observation)]
        # TorchRL's wrapper renames it in the same way.
        if "state" in observation and "observation" not in observation:
            observation = {
                "observation" if name == "state" else name: value
                for name, value in observation.items()
            }
        if len(observation) != self._num_entries:
            raise KeyError(
                f"expected the observations {self.observed[:-3]}, got {list(observation)}"
            )
        return [
            encode(functools.reduce(operator.getitem, path, observation))
            for path, encode in self._encoders.items()
        ]

    def _number(self, reward: Any) -> Any:
        if reward is None:
            return 0.0  # as TorchRL's sum over the frames of a step
        return (
            float(reward)
            if isinstance(reward, (float, int, np.number))
            else self._encode_reward(reward)
        )


class DirectGym(DirectGymLike):
    """Steps a `GymEnv` or `GymWrapper` of a Gymnasium env that is no vector env."""

    def __init__(
        self,
        env: EnvBase,
        inputs: list[TdKey],
        observed: list[TdKey],
        rewards: list[TdKey],
    ) -> None:
        require(
            _gymnasium() and isinstance(wrapped_env(env), _gymnasium().Env),
            "it wraps no Gymnasium env",
        )
        super().__init__(env, inputs, observed, rewards)

    def _begin(self) -> Any:
        return self.env.reset()[0]

    def env_call(self) -> EnvCall | None:
        # Its draws must be from its own state of the generator.
        if not _draws_nothing_from_torch(self.env):
            return None
        is_bare = self._encode is not None and isinstance(
            self.env.observation_space,
            _gymnasium().spaces.Box,
        )
        return EnvCall(
            self._accept,
            give=self._as_native,
            flatten=None if is_bare else self._read,
            holder=self,
            flags=self._end_order,
        )


class DirectDMControl(DirectGymLike):
    """Steps a `DMControlEnv` or `DMControlWrapper`."""

    def __init__(
        self,
        env: EnvBase,
        inputs: list[TdKey],
        observed: list[TdKey],
        rewards: list[TdKey],
    ) -> None:
        super().__init__(env, inputs, observed, rewards)
        self.env = _FiveValues(self.env)

    def _begin(self) -> Any:
        return self.env.reset().observation

    def env_call(self) -> EnvCall | None:
        if not _is_of_suite(wrapped_env(self.torchrl_env)):
            return None
        return EnvCall(
            self._accept,
            give=self._as_native,
            flatten=self._read,
            holder=self,
            flags=self._end_order,
        )


class _FiveValues:
    """A dm_control env whose `step` returns what that of a Gymnasium env does."""

    def __init__(self, env: Any) -> None:
        self._step = env.step
        self.reset = env.reset

    def step(self, action: Any) -> tuple[Any, ...]:
        timestep = self._step(action)
        if not timestep.last():
            return timestep.observation, timestep.reward, False, False, _NO_INFO
        # dm_control ends an episode by its time limit with discount 1.
        is_cut = bool(np.isclose(timestep.discount, 1))
        return timestep.observation, timestep.reward, not is_cut, is_cut, _NO_INFO


def _is_of_suite(env: Any) -> bool:
    """Return whether an env and its task are of dm_control's suite, which draws from numpy's generators only."""
    inner = (
        env._env if type(env).__module__ == "dm_control.suite.wrappers.pixels" else env  # noqa: SLF001  # its env
    )
    if type(inner).__module__ != "dm_control.rl.control":
        return False
    held = (value for part in (inner, inner.task) for value in vars(part).values())
    parts = [type(inner.task), *filter(callable, held)]
    return all(
        (getattr(part, "__module__", None) or "").startswith("dm_control.suite.")
        for part in parts
    )


def _gymnasium() -> Any:
    return sys.modules.get("gymnasium")


def _draws_nothing_from_torch(env: Any) -> bool:
    """Return whether an env, with its wrappers, consists of classes and functions of packages that do not use torch."""
    while True:
        parts = [type(env), *(value for value in vars(env).values() if callable(value))]
        if any(
            (getattr(part, "__module__", None) or "").partition(".")[0]
            not in _WITHOUT_TORCH
            for part in parts
        ):
            return False
        if not isinstance(env, _gymnasium().Wrapper):
            return True
        env = env.env
