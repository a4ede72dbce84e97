"""Simulators that step many rows at once and speak torch: what their adapters share.

Guarantees
- An action reaches the simulator as a tensor without a round trip through numpy: in a worker it is a tensor over
  the slab itself (`torch.from_numpy` of a VIEW), in `SerialEnv` it is the caller's own tensor. A simulator on a GPU
  is given one transfer and nothing else is moved.
- A simulator that keeps the actions it is given is noticed, and gets copies from then on: the slab is written anew
  for the next step.
- Rows that a reset does not name are handed out as they were, bit for bit, whatever the simulator computes anew.
- Python's, numpy's and torch's (CPU) global generators are the simulator's own while it runs, seeded with each
  episode of all rows, so that neighbours in a worker do not draw from each other; generators of GPUs are shared.
  A reset of some rows seeds nothing: one generator serves all of them.
Assumes: one thread at a time. Imports torch, as only workers with such simulators import this module.
"""

from __future__ import annotations

import contextlib
import sys
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from envherd.shm.specs import LeafSpec
from envherd.workers import seeding
from envherd.workers.adapters.base import Adapter, StepValues
from envherd.workers.adapters.common.generators import OwnGenerators
from envherd.workers.adapters.torchrl.reading import to_numpy
from envherd.workers.errors import ResetNeeded, SpecError

Leaves = list[torch.Tensor]

#: What a reset or step of the simulator gives: observation and reward leaves, then terminated and truncated `[B]`.
Stepped = tuple[Leaves, Leaves, torch.Tensor, torch.Tensor]

#: Steps whose actions are copied to see whether the simulator keeps them (some keep the one before, too).
_NUM_PROBED = 2


class TorchBatchAdapter(Adapter):
    """A simulator of B rows behind the partial-reset protocol; see the module.

    Subclasses set `spec`, with `batch_shape` `(B,)`, and implement the three methods at the end.

    Args:
        env: what the factory returned.
        num_rows: B.
        device: where the simulator's tensors are.
        keeps_actions: whether the simulator holds on to the tensors it is given; None finds out.

    Attributes:
        device: where the simulator's tensors are.
        gives_tensors: hand out tensors as they are instead of arrays; set by an executor that can take them.
    """

    takes_tensors = True

    def __init__(self, env: Any, num_rows: int, device: Any, *, keeps_actions: bool | None = None) -> None:
        self.env = env
        self.device = torch.device(device)
        self._num_rows = num_rows
        self._lender = _Lender(self.device, keeps_actions=keeps_actions)
        self._generators = OwnGenerators(seeding.caller_state, seeding.restore_caller)
        self._latest: Leaves | None = None

    def reset(
        self, seed: int | None, options: Mapping[str, Any] | None = None, mask: np.ndarray | None = None
    ) -> list[Any]:
        """Start an episode in all rows, or in those in `mask` (the first reset is of all rows); see `Adapter.reset`.

        Args:
            seed: seeds the simulator where all rows are reset, otherwise not used.
            options: handed to the simulator where it takes any.
            mask: bool `[B, 1]`, the rows to reset; None for all.

        Returns:
            Values aligned with `spec.observation`: VIEWS of the simulator's tensors where they are on the CPU.
        """
        kwargs = dict(options or {})
        with self._on_stage():
            if mask is None or self._latest is None:
                if seed is not None:
                    _seed_generators(seed)
                latest = self._reset_all(seed, kwargs)
            else:
                rows = torch.from_numpy(mask.reshape(-1)).to(self.device)
                before = [leaf.clone() for leaf in self._latest]  # the simulator may write to what it gave
                latest = choose(rows, self._reset_rows(rows, kwargs), before)
        self._latest = latest
        return self._given(latest)

    def step(self, action: list[Any]) -> StepValues:
        """Make one transition of all rows; see `Adapter.step`.

        Args:
            action: aligned with `spec.action`: tensors of the caller's, or VIEWS of the slab.

        Returns:
            Values as of `reset`; terminated and truncated as bool arrays `[B, 1]`, copies.
        """
        if self._latest is None:
            raise ResetNeeded("step failed: expected a reset first, got a step. Reset the env.")
        with self._on_stage():
            observation, rewards, terminated, truncated = self._step(self._lender.lend(action))
        self._lender.check(self.origin)
        self._latest = observation
        return self._given(observation), self._given(rewards), self._flags(terminated), self._flags(truncated)

    @contextlib.contextmanager
    def _on_stage(self) -> Iterator[None]:
        """Run as if the process were the simulator's own: no gradients, and its own random generators."""
        with torch.no_grad(), self._generators:
            yield

    def _given(self, leaves: Leaves) -> list[Any]:
        return leaves if self.gives_tensors else [to_numpy(leaf) for leaf in leaves]

    def _flags(self, flags: torch.Tensor) -> np.ndarray:
        if flags.dtype is not torch.bool or flags.numel() != self._num_rows:
            raise SpecError(
                f"step failed: expected ends as bool ({self._num_rows},), got {flags.dtype} {tuple(flags.shape)}. "
                f"Fix the env."
            )
        return np.array(to_numpy(flags)).reshape(self._num_rows, 1)

    @abstractmethod
    def _reset_all(self, seed: int | None, options: dict[str, Any]) -> Leaves:
        """Reset all rows and return the observation leaves."""

    @abstractmethod
    def _reset_rows(self, rows: torch.Tensor, options: dict[str, Any]) -> Leaves:
        """Reset some rows, bool `[B]` with at least one set, and return observation leaves; only these rows count."""

    @abstractmethod
    def _step(self, actions: Leaves) -> Stepped:
        """Step all rows once."""


def choose(rows: torch.Tensor, leaves: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> Leaves:
    """Return `leaves` in the rows set in bool `[B]`, and `others` in the rest, in fresh memory."""
    return [
        torch.where(rows.view(-1, *(1,) * (leaf.ndim - 1)), leaf, other)
        for leaf, other in zip(leaves, others, strict=True)
    ]


def _seed_generators(seed: int) -> None:
    """Seed the global generators; those of other devices stay as they are."""
    has_devices = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    before = torch.cuda.get_rng_state_all() if has_devices else None
    seeding.seed_globals(seed)
    if before is not None:
        torch.cuda.set_rng_state_all(before)


class _Lender:
    """Hands actions over as tensors, without a copy as long as the simulator does not keep them."""

    def __init__(self, device: torch.device, *, keeps_actions: bool | None) -> None:
        self._device = device
        self._is_on_cpu = device.type == "cpu"
        self._is_copying = bool(keeps_actions)
        self._num_left = _NUM_PROBED if keeps_actions is None else 0
        self._is_known = keeps_actions is not None
        self._lent: list[np.ndarray] = []

    def lend(self, values: Sequence[Any]) -> Leaves:
        """Return tensors on the simulator's device: over the same memory where that is on the CPU."""
        tensors = []
        for value in values:
            if isinstance(value, torch.Tensor):  # the caller's own
                tensors.append(value.to(self._device))
                continue
            array = np.asarray(value)
            if self._is_on_cpu:
                array = array.copy() if self._is_copying or self._num_left else array[...]
                self._lent.append(array)
            tensors.append(torch.from_numpy(array).to(self._device))
        return tensors

    def check(self, origin: str) -> None:
        """After the step: see whether the simulator has kept what it was lent, by who refers to the memory.

        Raises:
            SpecError: it did for the first time now, after it was lent the slab itself.
        """
        lent, self._lent = self._lent, []
        if self._is_known:
            return
        is_kept = any(sys.getrefcount(lent[index]) > 2 for index in range(len(lent)))
        is_probe, self._num_left = self._num_left > 0, max(0, self._num_left - bool(lent))
        if not is_kept:
            return
        self._is_known = self._is_copying = True
        if not is_probe:
            raise SpecError(
                f"step failed: expected an env that either always or never keeps its actions, got one that began to "
                f"(built by {origin}); the next action would overwrite them. Return the adapter from the factory, "
                f"with keeps_actions=True, or clone() the actions in the env."
            )


def check_keys(leaves: Sequence[LeafSpec], reserved: frozenset[str], where: str) -> None:
    """Refuse observation names at the root that a batch uses itself.

    Raises:
        SpecError: names the first one.
    """
    for leaf in leaves:
        if leaf.key[0] in reserved:
            raise SpecError(
                f"reading {where} failed: expected observation names other than {', '.join(sorted(reserved))}, "
                f"got {leaf.key[0]!r} at the root. Rename it in a wrapper around the env."
            )


def torch_dtype_name(dtype: torch.dtype, where: str) -> str:
    """Return the name that numpy and torch share for a dtype.

    Raises:
        SpecError: numpy has no such dtype.
    """
    name = str(dtype).removeprefix("torch.")
    if not hasattr(np, name) and name != "bool":
        raise SpecError(
            f"reading {where} failed: expected a dtype that numpy has too, got {dtype}. Cast it in a wrapper, "
            f"e.g. to torch.float32."
        )
    return name
