"""Random actions: uniform over each leaf's legal values, from a generator of the root seed.

Where envs observe an `action_mask` beside a discrete action (at the root, or in a group of agents), and the batch that
actions are drawn for holds it, only what it allows is drawn; where it allows nothing, action 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase

from envherd.executor.intake import to_numpy
from envherd.shm.specs import Binary, Box, Discrete, EnvSpec, Key, LeafSpec, MultiDiscrete, OneHot

#: Width of the interval sampled where a Box has no bound on a side.
_UNBOUNDED_WIDTH = 2.0
_STREAM = 2**32 - 2  # spawn_key of the sampler's generator: apart from those of envs (workers.seeding)

Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


class ActionSampler:
    """Draws action batches for a list of envs."""

    def __init__(self, specs: Sequence[EnvSpec], seed: int) -> None:
        self._rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(_STREAM,)))
        self._specs = specs
        self._is_uniform = all(spec == specs[0] for spec in specs)
        self._draws = [
            [(leaf, drawer(leaf), _mask_key(spec, leaf)) for leaf in spec.action]
            for spec in (specs[:1] if self._is_uniform else specs)
        ]

    def fill(
        self,
        td: TensorDictBase | None,
        batch_size: torch.Size,
        device: torch.device | None,
        env_ids: np.ndarray | None = None,
    ) -> TensorDictBase:
        """Set the action leaves of `td`, or of a new batch of `batch_size`.

        Args:
            td: of all envs, or of some.
            batch_size: of all envs.
            device: of a new batch.
            env_ids: `[k]`, whose the rows are; None for all.
        """
        specs, all_draws = self._specs, self._draws
        if env_ids is not None:
            specs = [specs[env_id] for env_id in env_ids]
            all_draws = all_draws if self._is_uniform else [all_draws[env_id] for env_id in env_ids]
        if self._is_uniform:
            td = TensorDict({}, batch_size, device=device) if td is None else td
            for leaf, draw, mask_key in all_draws[0]:
                mask = None if mask_key is None else td.get(mask_key, None)
                if mask is None:
                    drawn = draw(self._rng, (len(specs), *leaf.shape))
                else:
                    drawn = draw_masked(self._rng, mask, leaf)
                td.set(leaf.key, torch.from_numpy(drawn))
            return td
        rows = [TensorDict({}, spec.batch_size) if td is None else td[i] for i, spec in enumerate(map(_Sized, specs))]
        for row, draws in zip(rows, all_draws, strict=True):
            for leaf, draw, mask_key in draws:
                mask = None if mask_key is None else row.get(mask_key, None)
                drawn = draw(self._rng, leaf.shape) if mask is None else draw_masked(self._rng, mask, leaf)
                row.set(leaf.key, torch.from_numpy(np.asarray(drawn)))
        return LazyStackedTensorDict(*rows, stack_dim=0) if td is None else td


def draw_masked(rng: np.random.Generator, mask: Any, leaf: LeafSpec) -> np.ndarray:
    """Return indices drawn uniformly from what a mask `[..., n]` allows, `[...]`; 0 where it allows nothing."""
    allowed = to_numpy(mask).astype(bool)
    order = np.where(allowed, rng.random(allowed.shape), -1.0)
    return np.asarray(order.argmax(-1), leaf.dtype)


def _mask_key(spec: EnvSpec, leaf: LeafSpec) -> Key | None:
    """Return where the mask of an action is, if the env observes one of the right shape."""
    if not isinstance(leaf.domain, Discrete) or leaf.key[-1] != "action":
        return None
    key = (*leaf.key[:-1], "action_mask")
    shape = (*leaf.shape, leaf.domain.n)
    return key if any(seen.key == key and seen.shape == shape for seen in spec.observation) else None


class _Sized:
    def __init__(self, spec: EnvSpec) -> None:
        self.batch_size = spec.batch_shape


def drawer(leaf: LeafSpec) -> Draw:
    """Return a function that draws legal values of a leaf: `draw(rng, shape) -> array [*shape]`.

    That of a leaf of the side channel raises ValueError: an env may have such actions, and they cannot be drawn.
    """
    dtype = np.dtype(leaf.dtype) if leaf.dtype else np.dtype(object)
    domain = leaf.domain
    if isinstance(domain, Discrete):
        return lambda rng, shape: rng.integers(0, domain.n, shape, dtype=dtype)
    if isinstance(domain, MultiDiscrete):
        nvec = np.asarray(domain.nvec)
        return lambda rng, shape: rng.integers(0, np.broadcast_to(nvec, shape), dtype=dtype)
    if isinstance(domain, Binary):
        return lambda rng, shape: rng.integers(0, 2, shape).astype(dtype)
    if isinstance(domain, OneHot):
        return lambda rng, shape: np.eye(domain.n, dtype=dtype)[rng.integers(0, domain.n, shape[:-1])]
    if leaf.is_side:
        return _refuser(leaf)
    if isinstance(domain, Box):
        return _box_drawer(domain, dtype)
    return lambda rng, shape: rng.uniform(-1.0, 1.0, shape).astype(dtype)


def _refuser(leaf: LeafSpec) -> Draw:
    def refuse(_rng: np.random.Generator, _shape: tuple[int, ...]) -> np.ndarray:
        raise ValueError(f"rand_action failed: {leaf} has no uniform distribution. Give the action yourself.")

    return refuse


def _box_drawer(domain: Box, dtype: np.dtype) -> Draw:
    low, high = (np.asarray(bound, np.float64) for bound in (domain.low, domain.high))
    has_low, has_high = np.isfinite(low), np.isfinite(high)
    safe_low: Any = np.where(has_low, low, np.where(has_high, high - _UNBOUNDED_WIDTH, -_UNBOUNDED_WIDTH / 2))
    safe_high: Any = np.where(has_high, high, np.where(has_low, low + _UNBOUNDED_WIDTH, _UNBOUNDED_WIDTH / 2))
    if dtype.kind in "iu":
        return lambda rng, shape: rng.integers(safe_low.astype(np.int64), safe_high.astype(np.int64) + 1, shape).astype(
            dtype
        )
    low_cast, high_cast = safe_low.astype(dtype), safe_high.astype(dtype)
    return lambda rng, shape: np.clip(rng.uniform(safe_low, safe_high, shape).astype(dtype), low_cast, high_cast)
