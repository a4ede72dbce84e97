"""The direct way of `VmasEnv` and `VmasWrapper`, see `direct.py`; and the state of the generators of TorchRL envs.

A step calls VMAS as TorchRL does, with the same tensors, and stacks what it returns for each agent, without a
tensordict for each of them. Resets of all rows and of some are TorchRL's own code.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torchrl.envs import EnvBase

from envherd.workers.adapters.base import StepValues
from envherd.workers.adapters.common.generators import OwnGenerators
from envherd.workers.adapters.torchrl.direct import DirectWay, TdKey, builder, require
from envherd.workers.adapters.torchrl.gym import base_env
from envherd.workers.adapters.torchrl.private_api import wrapped_env

#: `(observations, infos)` of all agents -> the values of one leaf, `[B, ...]`.
Take = Callable[[Any, Any], torch.Tensor]


def own_generators(env: EnvBase) -> OwnGenerators:
    """Return an env's own state of the generators that envs of a process share: torch's, and the one of VMAS."""
    torchs, base = torch.default_generator, base_env(env)
    if "VmasWrapper" not in {cls.__name__ for cls in type(base).__mro__}:
        return OwnGenerators(torchs.get_state, torchs.set_state)
    shared: list[Any] = wrapped_env(base).vmas_random_state  # one list for all VMAS envs of the process

    def restore(state: list[Any]) -> None:
        torchs.set_state(state[0])
        shared[:] = state[1:]

    return OwnGenerators(lambda: [torchs.get_state(), *shared], restore)


class DirectVmas(DirectWay):
    """Steps one batch of rows of a scenario."""

    takes_batches = True

    def __init__(self, env: EnvBase, inputs: list[TdKey], observed: list[TdKey], rewards: list[TdKey]) -> None:
        super().__init__(env, inputs, observed, rewards)
        groups = {
            group: [env.agent_names_to_indices_map[name] for name in names] for group, names in env.group_map.items()
        }
        require(sorted(inputs) == sorted((group, "action") for group in groups), f"its inputs are {inputs}")
        require(sorted(rewards) == sorted((group, "reward") for group in groups), f"its rewards are {rewards}")
        require({"done", "terminated"} <= set(observed), f"its observation and done leaves are {observed}")
        self._native = wrapped_env(env)
        self._groups = groups
        self._dtypes = [env.full_action_spec[key].dtype for key in inputs]
        self._takes = [self._taker(key) for key in observed if not isinstance(key, str)]
        require(len(self._takes) == len(observed) - 2, f"its observation and done leaves are {observed}")
        self._root: TensorDictBase | None = None

    def _taker(self, key: TdKey) -> Take:
        """Return what reads a leaf of a group, such as `(group, "observation")` or `(group, "info", name)`."""
        group, what, *path = key
        members = self._groups[group]
        shape = self.torchrl_env.full_observation_spec[key].shape
        require(what in ("observation", "info") and shape[1] == len(members), f"it observes {key}")
        is_info = what == "info"

        def take(observations: Any, infos: Any) -> torch.Tensor:
            source = infos if is_info else observations
            values = [functools.reduce(operator.getitem, path, source[index]) for index in members]
            return _stacked([value.to(torch.float32) for value in values] if is_info else values)

        return take

    def follow(self, root: TensorDictBase | None) -> None:
        self._root = root

    def step(self, action: list[Any]) -> StepValues:
        env, native = self.torchrl_env, self._native
        given: list[Any] = [None] * native.n_agents
        with torch.no_grad():
            for (group, _), dtype, value in zip(self.inputs, self._dtypes, action, strict=True):
                tensor = torch.from_numpy(np.asarray(value)).to(dtype)
                for index, own in zip(self._groups[group], env.read_action(tensor, group=group), strict=True):
                    given[index] = own
            observations, rewards, done, infos = native.step(given)
            done = done.view(-1, 1).numpy()
            taken = iter([take(observations, infos).numpy() for take in self._takes])
            self.latest = [done.copy() if isinstance(key, str) else next(taken) for key in self.observed]
            paid = [_stacked([rewards[i] for i in self._groups[group]]).numpy() for group, _ in self.rewards]
        self.is_ahead = True
        return self.latest, paid, bool(done.any()), False

    def reset(self) -> list[Any]:
        env, root = self.torchrl_env, self.root() if self.is_ahead else self._root
        with torch.no_grad():
            has_ended = root is not None and env.any_done(root)
            root = env.reset(root, select_reset_only=True) if has_ended else env.reset()
        self.latest = [root.get(key).numpy() for key in self.observed]
        self.is_ahead = True
        return self.latest

    def root(self) -> TensorDictBase:
        """Return the env's current root; its tensors are those that VMAS returned, which it never writes again."""
        self.is_ahead = False
        if self._build is None:
            self._build = builder(self.torchrl_env, self.observed)
        self._root = self._build([torch.from_numpy(value) for value in self.latest])
        return self._root


def _stacked(values: list[torch.Tensor]) -> torch.Tensor:
    """Return the values of a group's agents, `[B, ...]` each, as one `[B, agents, ...]`; numbers get a dimension."""
    stack = torch.stack(values, 1)
    return stack.unsqueeze(-1) if stack.ndim == 2 else stack
