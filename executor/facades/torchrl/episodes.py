"""Statistics of episodes in the data of a TorchRL env that a worker runs for the TorchRL facade.

Keys, dtypes, shapes and sums are those of `block.episode_leaves`. Masks of a reset select what starts again: the return
of a group by the mask that decides for the group, length and time with any part of the row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torchrl.data import Composite, Unbounded
from torchrl.envs import EnvBase, Transform

from envherd.workers.adapters.base import StepValues
from envherd.workers.adapters.torchrl.adapter import require_dense
from envherd.workers.adapters.torchrl.direct import DirectWay, direct_way
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
        reward_paths: of the rewards, in the order of the sums.

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
        self.reward_paths = [leaf.path for leaf in rewards]
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

    def direct_way(self, env: EnvBase, inputs: list[Any], observed: list[Any], rewards: list[Any]) -> DirectWay | str:
        """Return an object that steps the env directly, with the statistics, or why there is none."""
        counted = {leaf.key for leaf in self.sums.leaves}
        way = direct_way(env, inputs, [key for key in observed if key not in counted], rewards)
        return way if isinstance(way, str) else CountedWay(way, self, observed)

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


class CountedWay(DirectWay):
    """A direct way whose values include the statistics.

    Args:
        way: of the env without them.
        statistics: the transform that writes them.
        observed: keys of the values.
    """

    def __init__(self, way: DirectWay, statistics: EpisodeStatistics, observed: list[Any]) -> None:
        super().__init__(way.torchrl_env, way.inputs, observed, way.rewards)
        self._way, self._statistics, self._sums = way, statistics, statistics.sums
        sources = [*way.observed, *(leaf.key for leaf in self._sums.leaves)]
        self._order = [sources.index(key) for key in observed]
        paths = [(key,) if isinstance(key, str) else key for key in way.rewards]
        self._reward_order = [paths.index(path) for path in statistics.reward_paths]

    def step(self, action: list[Any]) -> StepValues:
        self._sums.begin()
        values, rewards, has_ended, _ = self._way.step(action)
        self._sums.add([rewards[index] for index in self._reward_order])
        self.is_ahead = True
        return self._ordered(values), rewards, has_ended, False

    def reset(self) -> list[Any]:
        values = self._way.reset()
        self._sums.restart()
        self.is_ahead = True
        return self._ordered(values)

    def follow(self, root: Any) -> None:
        self._way.follow(root)

    def root(self) -> Any:
        self.is_ahead = False
        return self._statistics.written(self._way.root())

    def _ordered(self, values: list[Any]) -> list[Any]:
        sources = [*values, *self._sums.values]
        return [sources[index] for index in self._order]


def _selected(td: TensorDictBase, masks: list[Any]) -> np.ndarray:
    selected: np.ndarray = aggregate_ends(td, reset_keys=masks).cpu().numpy()
    return selected
