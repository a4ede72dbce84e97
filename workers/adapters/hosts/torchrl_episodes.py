"""Statistics of episodes in the data of a TorchRL env that a worker runs for the TorchRL facade.

Keys, dtypes, shapes and sums are those of `block.episode_leaves`. Masks of a reset select what starts again: the return
of a group by the mask that decides for the group, length and time with any part of the row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Composite, Unbounded
from torchrl.envs import EnvBase, Transform

from envherd.workers.adapters.base import StepValues
from envherd.workers.adapters.torchrl.adapter import require_dense
from envherd.workers.adapters.torchrl.gym import DirectGym, direct_gym
from envherd.workers.adapters.torchrl.private_api import aggregate_ends
from envherd.workers.adapters.torchrl.reading import reader, topmost
from envherd.workers.adapters.torchrl.specs import place_leaves
from envherd.workers.block.episode_leaves import EpisodeSums
from envherd.workers.block.wrapping import refuse_taken


class EpisodeStatistics(Transform):  # type: ignore[misc]  # untyped
    """Writes the statistics into root and `next`, and their specs into the observation spec.

    Args:
        env: the env to put it around.

    Attributes:
        sums: the statistics.

    Raises:
        SpecError: the env has an observation named `episode` itself, or a reward without a fixed shape.
    """

    def __init__(self, env: EnvBase) -> None:
        super().__init__()
        rewards, ends = place_leaves(env.full_reward_spec), topmost(place_leaves(env.full_done_spec))
        require_dense(rewards)
        self.sums = EpisodeSums(tuple(env.batch_size), [leaf.spec for leaf in rewards])
        observed = [(key,) if isinstance(key, str) else key for key in env.observation_keys]
        refuse_taken(observed, self.sums.roots, "episode_statistics")
        self._readers = [reader(leaf) for leaf in rewards]
        self._masks = [(*path, "_reset") for path in ends]
        self._deciding = [next((path for path in ends if path == leaf.path[: len(path)]), ()) for leaf in rewards]
        self._shapes = {path: env.full_reward_spec[path].shape for leaf in rewards if (path := leaf.path[:-1])}

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Add the leaves."""
        device = observation_spec.device
        for path, shape in self._shapes.items():
            if observation_spec.get(path, None) is None:
                observation_spec[path] = Composite(shape=shape, device=device)
        for leaf in self.sums.leaves:
            observation_spec[leaf.key] = Unbounded(leaf.shape, dtype=getattr(torch, leaf.dtype), device=device)
        return observation_spec

    def direct_gym(self, env: EnvBase, inputs: list[Any], observed: list[Any], rewards: list[Any]) -> DirectGym | None:
        """Return an object that steps the env directly, with the statistics; see `gym.direct_gym`."""
        keys = [leaf.key for leaf in self.sums.leaves]
        of_env = [key for key in observed if key not in keys]
        is_plain = observed[1:4] == keys and direct_gym(env, inputs, of_env, rewards) is not None
        return CountedGym(env, self) if is_plain else None

    def written(self, td: TensorDictBase) -> TensorDictBase:
        """Copy the statistics into a root or `next`; return it."""
        for leaf, value in zip(self.sums.leaves, self.sums.values, strict=True):
            td.set(leaf.key, torch.tensor(value, device=td.device))
        return td

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.sums.begin()
        return tensordict

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:  # noqa: ARG002
        self.sums.add([read(next_tensordict) for read in self._readers])
        return self.written(next_tensordict)

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        rows = _selected(tensordict, self._masks)
        nodes = [tensordict.get(path, None) if path else None for path in self._deciding]
        self.sums.restart(rows, [rows if node is None else _selected(node, ["_reset"]) for node in nodes])
        return self.written(tensordict_reset)


class CountedGym(DirectGym):
    """A `DirectGym` whose values have the statistics behind the observation."""

    def __init__(self, env: EnvBase, statistics: EpisodeStatistics) -> None:
        super().__init__(env)
        self._statistics, self._sums = statistics, statistics.sums

    def step(self, action: list[Any]) -> StepValues:
        self._sums.begin()
        (observation, *flags), rewards, has_ended, _ = super().step(action)
        self._sums.add(rewards)
        return [observation, *self._sums.values, *flags], rewards, has_ended, False

    def reset(self) -> list[Any]:
        observation, *flags = super().reset()
        self._sums.restart()
        return [observation, *self._sums.values, *flags]

    def root(self) -> TensorDict:
        root: TensorDict = self._statistics.written(super().root())
        return root


def _selected(td: TensorDictBase, masks: list[Any]) -> np.ndarray:
    selected: np.ndarray = aggregate_ends(td, reset_keys=masks).cpu().numpy()
    return selected
