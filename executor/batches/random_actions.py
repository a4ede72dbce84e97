"""Random actions: uniform over each leaf's legal values, from a generator seeded by the root seed.

If a batch holds the envs' `action_mask` of a discrete action (at the root, or in a group of agents), only actions that
it allows are drawn; action 0 if it allows none.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase

from envherd.executor.batches.actions import to_numpy
from envherd.executor.batches.grad_mode import outside_inference_mode
from envherd.shm.specs import EnvSpec, Key, LeafSpec
from envherd.workers import seeding
from envherd.workers.random_values import Draw, draw_masked, drawer, mask_key

# spawn_key of the sampler's generator: different from those of envs (workers.seeding).
_STREAM = 2**32 - 2


class _Action(NamedTuple):
    """A leaf of an action, what draws its values, and the key of its mask; None without one."""

    leaf: LeafSpec
    draw: Draw
    mask: Key | None


class ActionSampler:
    """Draws action batches for a list of envs."""

    def __init__(
        self,
        specs: Sequence[EnvSpec],
        seed: int,
        first_env_id: int = 0,
    ) -> None:
        # Executors that run shares of one batch draw different actions.
        share = (first_env_id,) if first_env_id else ()
        self._rng = np.random.default_rng(
            np.random.SeedSequence(seed, spawn_key=(_STREAM, *share))
        )
        self._specs = specs
        # Of each env, the first env with an equal spec.
        self._kinds = [specs.index(spec) for spec in specs]
        # All envs have the first one's spec.
        self._is_uniform = not any(self._kinds)
        self._actions = {
            kind: [
                _Action(
                    leaf,
                    drawer(leaf) or _refuser(leaf),
                    mask_key(specs[kind], leaf),
                )
                for leaf in specs[kind].action
            ]
            for kind in set(self._kinds)
        }

    @property
    def state(self) -> dict[str, Any]:
        """The state of its generator: plain data."""
        return dict(self._rng.bit_generator.state)

    @state.setter
    def state(self, state: Mapping[str, Any]) -> None:
        self._rng.bit_generator.state = state

    def check(self, state: Any) -> None:
        """Refuse what is no state of this generator, with an exception of any type."""
        np.random.PCG64().state = dict(seeding.bits_of(state).state)  # type: ignore[assignment]

    @outside_inference_mode
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
            env_ids: `[k]`, of the rows; None for all.

        Returns:
            `td` itself; or a lazy stack of its rows, if the envs are different tasks and `td` is no lazy stack.
        """
        kinds = self._kinds
        if env_ids is not None:
            kinds = [self._kinds[env_id] for env_id in env_ids]
        is_stack = isinstance(td, LazyStackedTensorDict)
        if self._is_uniform or (
            td is not None and not is_stack and len(set(kinds)) == 1
        ):
            if td is None:
                td = TensorDict({}, batch_size, device=device)
            self._draw(td, next(iter(kinds), 0), (len(kinds),))
            return td
        if td is None:
            rows = [TensorDict({}, self._specs[kind].batch_shape) for kind in kinds]
        else:
            rows = [td[i] for i in range(len(kinds))]
        for row, kind in zip(rows, kinds, strict=True):
            self._draw(row, kind, ())
        # The rows of a stack were set in place. Those of a batch are new TensorDicts over its other leaves.
        if td is not None and is_stack:
            return td
        return LazyStackedTensorDict(*rows, stack_dim=0)

    def _draw(self, td: TensorDictBase, kind: int, lead: tuple[int, ...]) -> None:
        """Set the action leaves of rows of one kind, `[*lead]`."""
        for leaf, draw, masking in self._actions[kind]:
            # Without a mask in the batch, as before the first reset, every action is allowed.
            mask = masking and td.get(masking, None)
            if mask is None:
                drawn = draw(self._rng, (*lead, *leaf.shape))
            else:
                drawn = draw_masked(self._rng, to_numpy(mask), leaf)
            td.set(leaf.key, torch.from_numpy(np.asarray(drawn)))


def _refuser(leaf: LeafSpec) -> Draw:
    """Return what refuses to draw the values of a leaf without a uniform distribution."""

    def refuse(_rng: np.random.Generator, _shape: tuple[int, ...]) -> np.ndarray:
        raise ValueError(
            f"rand_action failed: expected an action of a fixed shape, got {'/'.join(leaf.key)} without one (a text, a "
            f"graph or a sequence). Pass a policy that sets it."
        )

    return refuse
