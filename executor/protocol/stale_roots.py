"""Notice loops that act on roots which the envs have left: `td = env.step(policy(td))` without `td = td["next"]`.

Guarantees: a loop whose roots are the envs' present ones is not reported, also if its batches hold an old `next`. Plain
steps are not looked at: only those of a batch that already has a `next`, and the first ones of these.
"""

import logging
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from envherd.executor.batches.fast_tensordict import get_leaf
from envherd.executor.batches.transfer import as_array
from envherd.executor.protocol.call_guard import call_name
from envherd.shm.specs import EnvSpec

_log = logging.getLogger("envherd")
_NUM_LOOKS = 32
_STALE = (
    "%s acts on roots that the envs have left: env %d has made another step, and the observation in the batch is still "
    "the one from before. Pass the policy the envs' present roots: td['next'] after step, the second value of "
    "step_and_maybe_reset, or current() after recv. This is reported once."
)


class _Hashes(NamedTuple):
    """Of a row of the root, and of the same row of `next`."""

    root: int
    next: int


class StaleRoots:
    """Looks at the batches of steps for one executor; see the module.

    Args:
        keys: for each env, those of the observation.
        action_keys: for each env, that of one leaf of the action, or None.

    Attributes:
        looks_left: how many batches are still looked at.
    """

    looks_left = _NUM_LOOKS

    def __init__(
        self,
        keys: Sequence[Sequence[Any]],
        action_keys: Sequence[Any],
    ) -> None:
        self._keys = keys
        self._action_keys = action_keys
        # Env id -> those of its latest rows.
        self._seen: dict[int, _Hashes] = {}
        self._action: Any = lambda: None  # the latest one

    @classmethod
    def of(cls, specs: Sequence[EnvSpec]) -> Self:
        """Return one for envs with these specs."""
        return cls(
            [
                [leaf.key for leaf in spec.observation if not leaf.is_side]
                for spec in specs
            ],
            [spec.action[0].key if spec.action else None for spec in specs],
        )

    def forget(self) -> None:
        """Note that envs were reset."""
        self._seen.clear()

    def look(self, td: TensorDictBase, env_ids: np.ndarray) -> None:
        """Look at a batch `[k]` of some envs, which have been given its actions, before its `next` is replaced."""
        if (
            not self.looks_left
            or not len(env_ids)
            or (following := get_leaf(td, "next")) is None
        ):
            return
        # A look costs more than a step: a loop is judged by its first steps.
        self.looks_left -= 1
        roots = self._hashes(td, env_ids)
        nexts = self._hashes(following, env_ids)
        done = following.get("done", None)
        action_key = self._action_keys[env_ids[0]]
        # A lazy stack makes a new tensor each time, its rows do not.
        first = td
        if isinstance(td, LazyStackedTensorDict):
            first = td[0]
        action = None
        if action_key is not None:
            action = first.get(action_key, None)
        if roots is None or nexts is None or done is None:
            return
        # Such as frame skips, which ignore the roots.
        is_repeated = action is not None and action is self._action()
        has_left = []
        is_present = False
        for row, (env_id, root, next_) in enumerate(
            zip(
                env_ids.tolist(),
                roots,
                nexts,
                strict=True,
            )
        ):
            now = _Hashes(root, next_)
            before = self._seen.get(env_id, now)
            self._seen[env_id] = now
            if as_array(done[row].cpu()).any():
                continue
            # A step's batch that is passed again has the same root; one of `recv` has the `next` before its own.
            is_present = is_present or root not in before
            if next_ not in (root, before.next):
                has_left.append(env_id)
        if has_left and not is_present and not is_repeated:
            self.looks_left = 0
            _log.warning(_STALE, call_name(), has_left[0])
        self._action = (lambda: None) if action is None else weakref.ref(action)

    def _hashes(self, td: TensorDictBase, env_ids: np.ndarray) -> list[int] | None:
        """Return a hash of the observation in each row; None if it is not there."""
        if isinstance(td, LazyStackedTensorDict):
            rows = [
                self._hashes(row[None], env_ids[at : at + 1])
                for at, row in enumerate(td.unbind(0))
            ]
            return None if None in rows else [row[0] for row in rows if row]
        leaves = [td.get(key, None) for key in self._keys[env_ids[0]]]
        if not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
            return None
        arrays = [as_array(leaf.cpu()) for leaf in leaves]
        return [
            hash(tuple(array[row].tobytes() for array in arrays))
            for row in range(len(td))
        ]
