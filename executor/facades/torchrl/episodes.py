"""Statistics of episodes in the data of a TorchRL env that a worker runs for the TorchRL facade.

Keys, dtypes, shapes and sums are those of `block.episode_leaves`. Masks of a reset select what starts again: the return
of a group by the mask that decides for the group, length and time with any part of the row.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torchrl.data import Composite, Unbounded
from torchrl.envs import EnvBase, Transform

from envherd.workers.adapters.base import Adapter, Mask, Options
from envherd.workers.adapters.torchrl.adapter import require_dense
from envherd.workers.adapters.torchrl.private_api import aggregate_ends
from envherd.workers.adapters.torchrl.reading import reader, topmost
from envherd.workers.adapters.torchrl.specs import place_leaves
from envherd.workers.wrappers.episode_leaves import EpisodeLeaves, EpisodeSums
from envherd.workers.wrappers.wrapping import Wrapping, refuse_taken


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
        rewards = place_leaves(env.full_reward_spec)
        ends = topmost(place_leaves(env.full_done_spec))
        require_dense(rewards)
        self.sums = EpisodeSums(tuple(env.batch_size), [leaf.spec for leaf in rewards])
        refuse_taken(
            [(key,) if isinstance(key, str) else key for key in env.observation_keys],
            self.sums.roots,
            "episode_statistics",
        )
        self._readers = [reader(leaf) for leaf in rewards]
        self._masks = [(*path, "_reset") for path in ends]
        self._deciding = [
            next((path for path in ends if path == leaf.path[: len(path)]), ())
            for leaf in rewards
        ]
        self._shapes = {
            path: env.full_reward_spec[path].shape
            for leaf in rewards
            if (path := leaf.path[:-1])
        }

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Add the leaves."""
        device = observation_spec.device
        for path, shape in self._shapes.items():
            # A group may have rewards without an observation.
            if observation_spec.get(path, None) is None:
                observation_spec[path] = Composite(shape=shape, device=device)
        for leaf in self.sums.leaves:
            observation_spec[leaf.key] = Unbounded(
                leaf.shape,
                dtype=getattr(torch, leaf.dtype),
                device=device,
            )
        return observation_spec

    def written(self, td: TensorDictBase) -> TensorDictBase:
        """Copy the statistics into a root or `next`; return it."""
        for leaf, value in zip(self.sums.leaves, self.sums.values, strict=True):
            td.set(leaf.key, torch.tensor(value, device=td.device))
        return td

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.sums.begin()
        return tensordict

    def _step(
        self,
        tensordict: TensorDictBase,  # noqa: ARG002
        next_tensordict: TensorDictBase,
    ) -> TensorDictBase:
        self.sums.add([read(next_tensordict) for read in self._readers])
        return self.written(next_tensordict)

    def _reset(
        self,
        tensordict: TensorDictBase,
        tensordict_reset: TensorDictBase,
    ) -> TensorDictBase:
        rows = _selected(tensordict, self._masks)
        nodes = [
            tensordict.get(path, None) if path else None for path in self._deciding
        ]
        self.sums.restart(
            rows,
            [rows if node is None else _selected(node, ["_reset"]) for node in nodes],
        )
        return self.written(tensordict_reset)


class CountedLeaves(EpisodeLeaves):
    """The statistics behind the row of a hosted env whose steps go through the slab.

    Args:
        inner: the hosted env's `HostedAdapter`.
        sums: the statistics of its episode.
    """

    def __init__(self, inner: Adapter, sums: EpisodeSums) -> None:
        Wrapping.__init__(
            self,
            inner,
            [
                replace(leaf, key=(f"observation:{'/'.join(leaf.key)}",))
                for leaf in sums.leaves
            ],
            (),
            "episode_statistics",
        )
        self._sums = sums

    def reset(
        self,
        seed: int | None,
        options: Options = None,
        mask: Mask = None,
    ) -> list[Any]:
        if self.env.direct is not None:
            return super().reset(seed, options, mask)
        # The transform knows which parts are reset.
        return [*self.inner.reset(seed, options, mask), *self._sums.values]


def _selected(td: TensorDictBase, masks: list[Any]) -> np.ndarray:
    return np.asarray(aggregate_ends(td, reset_keys=masks).cpu())
