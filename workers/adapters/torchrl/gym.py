"""Direct ways of `GymEnv`, `GymWrapper`, `DMControlEnv` and `DMControlWrapper`; see `direct.py`.

Without info readers, frame skips and vector envs, these only convert the values of a step. CartPole takes 6 us a step
instead of 110 (2-core x86, 2026-11).
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torchrl.data import Categorical
from torchrl.envs import EnvBase, TransformedEnv

from envherd.workers.adapters.base import EnvCall, StepValues
from envherd.workers.adapters.torchrl.direct import FLAGS, DirectWay, TdKey, action_reader, encoder, require
from envherd.workers.adapters.torchrl.private_api import converts_actions, wrapped_env
from envherd.workers.errors import FactoryError

_ENDS = ("done", "terminated", "truncated")
#: Packages whose envs and wrappers draw from numpy's generators only.
_WITHOUT_TORCH = ("ale_py", "gymnasium", "minigrid")
_NOT_ENDED = (FLAGS[False],) * 3


def base_env(env: EnvBase) -> EnvBase:
    """Return what is under an env's transforms."""
    while isinstance(env, TransformedEnv):
        env = env.base_env
    return env


def refuse_late_resets(env: EnvBase) -> None:
    """Refuse a Gymnasium vector env that spends a step on each of its resets.

    TorchRL refuses it too, unless the `gym` package is installed as well; then last observations are
    zeros, and every reset is in the data as a transition with reward 0.

    Raises:
        FactoryError: it is one. The env was closed.
    """
    base = base_env(env)
    if "GymWrapper" not in {cls.__name__ for cls in type(base).__mro__}:
        return
    mode = getattr(base, "autoreset_mode", None)
    if getattr(mode, "name", mode) == "NEXT_STEP":
        base.close()
        raise FactoryError(
            f"the factory failed: expected a vector env that does not reset itself, got a {type(base).__name__} of "
            f"one with autoreset_mode NEXT_STEP. Build it with autoreset_mode=AutoresetMode.DISABLED."
        )


class DirectGymLike(DirectWay):
    """Steps an env with one action, one reward and one end, whose observation is an array or a dict of arrays."""

    def __init__(self, env: EnvBase, inputs: list[TdKey], observed: list[TdKey], rewards: list[TdKey]) -> None:
        super().__init__(env, inputs, observed, rewards)
        require(env.wrapper_frame_skip == 1, "it skips frames")
        require(not env.info_dict_reader, "it reads infos")
        require(converts_actions(env), "its env takes tensors")
        require(inputs == ["action"] and rewards == ["reward"], f"it has the inputs {inputs} and the rewards {rewards}")
        require(sorted(map(str, observed[-3:])) == sorted(_ENDS), f"its observation and done leaves are {observed}")
        self.env = wrapped_env(env)
        action, reward = env.full_action_spec["action"], env.full_reward_spec["reward"]
        require(getattr(action, "mask", None) is None, "its action has a mask")
        require(tuple(reward.shape) == (1,) and reward.dtype.is_floating_point, "its reward is no float")
        self._as_native: Callable[[Any], Any] = action_reader(action)
        if type(env.read_action(action.zero())) is int:
            self._as_native = _as_int if type(action) is Categorical else _index_of
        self._encode_reward = encoder(reward)
        paths = [(key,) if isinstance(key, str) else key for key in observed[:-3]]
        self._encoders = [(path, encoder(env.full_observation_spec[path])) for path in paths]
        self._encode = self._encoders[0][1] if len(paths) == 1 and len(paths[0]) == 1 else None
        self._num_entries = len({path[0] for path in paths})
        self._end_order = [_ENDS.index(key) for key in observed[-3:]]

    def step(self, action: list[Any]) -> StepValues:
        return self._values(*self._advance(self._as_native(action[0])))

    def _values(self, observation: Any, reward: Any, terminated: bool, truncated: bool) -> StepValues:  # noqa: FBT001
        values = self._read(observation)
        has_ended = terminated or truncated
        ends = (has_ended, terminated, truncated)
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

    def _advance(self, action: Any) -> tuple[Any, Any, bool, bool]:
        """Step the env; return the observation, the reward, terminated and truncated."""
        raise NotImplementedError

    def _begin(self) -> Any:
        """Reset the env; return the observation."""
        raise NotImplementedError

    def _read(self, observation: Any) -> list[Any]:
        if not isinstance(observation, Mapping):
            if self._encode is None:
                raise KeyError(f"expected the observations {self.observed[:-3]}, got a {type(observation).__name__}")
            return [self._encode(observation)]
        if "state" in observation and "observation" not in observation:
            observation = {"observation" if name == "state" else name: value for name, value in observation.items()}
        if len(observation) != self._num_entries:
            raise KeyError(f"expected the observations {self.observed[:-3]}, got {list(observation)}")
        return [encode(functools.reduce(operator.getitem, path, observation)) for path, encode in self._encoders]

    def _number(self, reward: Any) -> Any:
        if reward is None:
            return 0.0  # as TorchRL's sum over the frames of a step
        return float(reward) if isinstance(reward, (float, int, np.number)) else self._encode_reward(reward)


class DirectGym(DirectGymLike):
    """Steps a `GymEnv` or `GymWrapper` of a Gymnasium env that is no vector env."""

    def __init__(self, env: EnvBase, inputs: list[TdKey], observed: list[TdKey], rewards: list[TdKey]) -> None:
        require(_gymnasium() and isinstance(wrapped_env(env), _gymnasium().Env), "it wraps no Gymnasium env")
        super().__init__(env, inputs, observed, rewards)

    def _advance(self, action: Any) -> tuple[Any, Any, bool, bool]:
        observation, reward, terminated, truncated, _ = self.env.step(action)
        return observation, reward, bool(terminated), bool(truncated)

    def _begin(self) -> Any:
        return self.env.reset()[0]

    def env_call(self) -> EnvCall | None:
        if not _draws_nothing_from_torch(self.env):  # its draws must be from its own state of the generator
            return None
        is_bare = self._encode is not None and isinstance(self.env.observation_space, _gymnasium().spaces.Box)
        flatten = None if is_bare else self._read
        return EnvCall(self._accept, give=self._as_native, flatten=flatten, holder=self, flags=self._end_order)

    def _accept(self, result: Any) -> StepValues:
        observation, reward, terminated, truncated, _ = result
        return self._values(observation, reward, bool(terminated), bool(truncated))


class DirectDMControl(DirectGymLike):
    """Steps a `DMControlEnv` or `DMControlWrapper`."""

    def _advance(self, action: Any) -> tuple[Any, Any, bool, bool]:
        timestep = self.env.step(action)
        if not timestep.last():
            return timestep.observation, timestep.reward, False, False
        is_cut = bool(np.isclose(timestep.discount, 1))
        return timestep.observation, timestep.reward, not is_cut, is_cut

    def _begin(self) -> Any:
        return self.env.reset().observation


def _gymnasium() -> Any:
    return sys.modules.get("gymnasium")


def _draws_nothing_from_torch(env: Any) -> bool:
    """Return whether an env, with its wrappers, consists of classes and functions of packages that do not use torch."""
    while True:
        parts = [type(env), *(value for value in vars(env).values() if callable(value))]
        if any((getattr(part, "__module__", None) or "").partition(".")[0] not in _WITHOUT_TORCH for part in parts):
            return False
        if not isinstance(env, _gymnasium().Wrapper):
            return True
        env = env.env


def _as_int(value: np.ndarray) -> int:
    return int(value)


def _index_of(value: np.ndarray) -> int:
    return int(value.argmax(-1))
