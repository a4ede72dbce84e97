"""What all ways to make a rollout have in common: the policy, its own entries, and the callback."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from tensordict import TensorDictBase

from envherd.executor.rollouts.policy_state import Carried, leaf_keys
from envherd.shm.specs import Key

E = TypeVar("E")


class Run(Generic[E]):
    """One rollout in progress.

    Args:
        engine: of the executor.
        policy: takes a root batch `[N]`, on the device of the batches.
        carried: the policy's own state.
        callback: called with each step's batch; or None.
        break_when_any_done: stop after the first step at which an env ends.
    """

    def __init__(
        self,
        engine: E,
        policy: Callable[[TensorDictBase], TensorDictBase],
        carried: Carried,
        callback: Callable[[TensorDictBase], Any] | None,
        *,
        break_when_any_done: bool,
    ) -> None:
        self._engine = engine
        self._policy = policy
        self._carried = carried
        self._callback = callback
        self._breaks = break_when_any_done
        self._extra_keys: list[Key] | None = None
        self._extras: list[TensorDictBase] = []

    def _keep_extras(self, acted: TensorDictBase, known: set[Key]) -> None:
        """Keep the entries of a step that are the policy's own.

        Args:
            acted: batch `[N]` from the policy.
            known: the envs' keys.
        """
        # Found in the first step: the steps of a rollout are stacked, so all must have the same.
        if self._extra_keys is None:
            own = {*known, ("env_ids",)}
            self._extra_keys = [
                key
                for key in leaf_keys(acted)
                if (key[1:] if key[0] == "next" else key) not in own
            ]
        if self._extra_keys:
            # The policy may reuse its memory, as CUDA graphs do.
            self._extras.append(acted.select(*self._extra_keys).clone())

    def _with_next(
        self,
        acted: TensorDictBase,
        next_td: TensorDictBase,
    ) -> TensorDictBase:
        """Return a step's batch with its `next` (VIEWS), including the policy's entries there."""
        if self._carried.state is not None:
            next_td.update(self._carried.state)
        return acted.copy().set("next", next_td)

    def _finished(self, data: TensorDictBase) -> TensorDictBase:
        """Return the batch of all steps, `[N, T]`, with the entries of the policy."""
        if self._extras:
            data.update(torch.stack(self._extras, 1))
        data.refine_names(None, "time", ...)
        return data
