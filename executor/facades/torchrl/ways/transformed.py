"""The direct way of a `TransformedEnv` around an env that has one. `direct.py` has its rules.

The transforms run as TorchRL runs them, on fresh tensordicts; the env inside is stepped directly, and the root follows
from `next` without TorchRL's reading of specs. Resets are TorchRL's own, and so are the steps that transforms make
themselves (`FrameSkipTransform`).
"""

from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.envs import EnvBase

from envherd.executor.batches.fast_tensordict import get_leaf, maker
from envherd.executor.facades.torchrl.ways.direct import (
    DirectWay,
    NotDirect,
    TdKey,
    builder,
    direct_way,
    leaf_keys,
    leaves_of,
    require,
    restarted,
)
from envherd.workers.adapters.base import StepValues
from envherd.workers.adapters.torchrl.private_api import inversions


class DirectTransformed(DirectWay):
    """Steps one such env."""

    takes_batches = True

    def __init__(
        self,
        env: EnvBase,
        inputs: list[TdKey],
        observed: list[TdKey],
        rewards: list[TdKey],
    ) -> None:
        super().__init__(env, inputs, observed, rewards)
        inner = env.base_env
        # It has no separate root.
        require(not isinstance(inner, type(env)), "around a TransformedEnv")
        way = direct_way(inner, *leaf_keys(inner))
        if isinstance(way, str):
            raise NotDirect(f"around {way}")
        self._way = way
        self._build_next = builder(inner, [*way.observed, *way.rewards])
        done = leaves_of(inner.full_done_spec)
        self._is_ours = [way.reuses_buffers or key in done for key in way.observed]
        self._reward_dtypes = [inner.full_reward_spec[key].dtype for key in way.rewards]
        specs = {**leaves_of(env.full_action_spec), **leaves_of(env.full_state_spec)}
        self._dtypes = [specs[key].dtype for key in inputs]
        self._shapes = {key: env.full_reward_spec[key].shape for key in rewards}
        # `any_done` decides for all others.
        self._has_simple_end = {"done", "terminated"} <= set(env.full_done_spec.keys())
        self._make = maker(env.batch_size, env.device)
        self._root: TensorDictBase | None = None

    def follow(self, root: TensorDictBase | None) -> None:
        env = self.torchrl_env
        self._root = root
        self._transform = env.transform
        self._inversions = inversions(env.transform)
        rewards = list(env.reward_keys)
        states = set(env.state_keys)
        # What `step_mdp` moves from `next` to the root, and what it leaves out of the old root.
        self._taken = [
            *env.observation_keys,
            *(key for key in rewards if key in states),
            *env.done_keys,
        ]
        self._dropped = {
            "next",
            *env.done_keys,
            *env.reset_keys,
            *(key for key in rewards if key not in states),
        }
        self._is_flat = all(
            isinstance(key, str) for key in (*self.inputs, *self._taken, *self._dropped)
        )

    def step(self, action: list[Any]) -> StepValues:
        with torch.no_grad():
            root, given = self._with_inputs(action)
            for invert in self._inversions:
                given = invert(given)
            following = self._transform._step(given, self._stepped(given))  # noqa: SLF001  # env authors write it
            for key, shape in self._shapes.items():
                reward = get_leaf(following, key)
                if reward.shape != shape:
                    following.set(key, reward.view(shape))
            self._root = root = self._advanced(root, following)
            if self._has_simple_end:
                has_ended = bool(get_leaf(following, "done").any())
            else:
                has_ended = bool(self.torchrl_env.any_done(root))
                self._root = (
                    root.exclude(*self.torchrl_env.reset_keys) if has_ended else root
                )
        self.is_ahead = True
        return (
            _arrays(following, self.observed),
            _arrays(following, self.rewards),
            has_ended,
            False,
        )

    def reset(self) -> list[Any]:
        with torch.no_grad():
            self._root = root = restarted(self.torchrl_env, self._root)
        self.is_ahead = True
        return _arrays(root, self.observed)

    def root(self) -> TensorDictBase | None:
        self.is_ahead = False
        return self._root

    def _with_inputs(self, action: list[Any]) -> tuple[TensorDictBase, TensorDictBase]:
        """Return the root with the inputs of a step, twice; the root itself stays as it is."""
        root = self._make({}) if self._root is None else self._root
        inputs = [
            (key, torch.from_numpy(np.asarray(value)).to(dtype))
            for key, dtype, value in zip(
                self.inputs,
                self._dtypes,
                action,
                strict=True,
            )
        ]
        if self._is_flat and root.__class__ is TensorDict:
            source = dict(root.items())
            source.update(inputs)
            if all(value.__class__ is torch.Tensor for value in source.values()):
                return self._make(source), self._make(dict(source))
        root = root.copy()
        for key, tensor in inputs:
            root.set(key, tensor)
        return root, root.copy()

    def _stepped(self, given: TensorDictBase) -> TensorDictBase:
        """Step the env inside; return its `next`."""
        way = self._way
        values, rewards, _, _ = way.step(
            [get_leaf(given, key).detach().numpy() for key in way.inputs]
        )
        tensors = [
            _tensor(value, is_ours=is_ours)
            for value, is_ours in zip(values, self._is_ours, strict=True)
        ]
        for reward, dtype in zip(rewards, self._reward_dtypes, strict=True):
            tensors.append(
                torch.tensor([reward], dtype=dtype)
                if reward.__class__ is float
                else _tensor(reward, is_ours=True)
            )
        return self._build_next(tensors)

    def _advanced(
        self,
        root: TensorDictBase,
        following: TensorDictBase,
    ) -> TensorDictBase:
        """Return the root after a step: the same as `step_mdp`."""
        if self._is_flat:
            source = {
                name: value for name, value in root.items() if name not in self._dropped
            }
            source.update((name, get_leaf(following, name)) for name in self._taken)
            if all(value.__class__ is torch.Tensor for value in source.values()):
                return self._make(source)
        advanced: TensorDictBase = self.torchrl_env.step_mdp(
            root.set("next", following)
        )
        return advanced


def _arrays(td: TensorDictBase, keys: list[TdKey]) -> list[Any]:
    return [get_leaf(td, key).numpy() for key in keys]


def _tensor(value: Any, *, is_ours: bool) -> torch.Tensor:
    """Return a value of a way as a tensor: a copy where the way writes it again, else a VIEW, as TorchRL's."""
    if is_ours or value.__class__ is tuple:
        return torch.from_numpy(np.array(value))
    return torch.from_numpy(
        value if value.flags.c_contiguous or min(value.strides) > 0 else value.copy()
    )
