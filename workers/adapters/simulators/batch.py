"""The base of adapters for simulators that step many rows at once on torch tensors.

Guarantees
- An action reaches the simulator as a tensor without a round trip through numpy: in a worker it is a tensor over
  the slab itself (`torch.from_numpy` of a VIEW), in `SerialEnv(1, ...)` it is the caller's own tensor. For a
  simulator on a GPU, the actions are transferred once and nothing else is moved.
- A simulator that keeps a reference to its actions is detected and gets copies from then on, because the next step
  overwrites the slab.
- Rows that a reset does not select are returned unchanged, bit for bit, even if the simulator recomputes them.
- While a simulator runs, Python's, numpy's and torch's (CPU) global generators hold its own state, so envs of the same
  worker do not affect each other. A reset of all rows seeds them; a reset of some rows does not, because one generator
  serves all rows. Generators of GPUs are shared.
Assumes: one thread at a time. Imports torch, as only workers with such simulators import this module.
"""

from __future__ import annotations

import contextlib
import sys
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from envherd.workers import seeding
from envherd.workers.adapters.base import Adapter, Mask, Options, StepValues
from envherd.workers.adapters.common.generators import OwnGenerators
from envherd.workers.adapters.torchrl.reading import to_numpy
from envherd.workers.errors import ResetNeeded, SpecError

Leaves = list[torch.Tensor]

#: Result of a step of the simulator: observation and reward leaves, then terminated and truncated `[B]`.
Stepped = tuple[Leaves, Leaves, torch.Tensor, torch.Tensor]

#: Number of first steps whose actions are copied, to detect whether the simulator keeps them (some also keep the
#: previous ones).
_NUM_PROBED = 2


class TorchBatchAdapter(Adapter):
    """A simulator of B rows behind the partial-reset protocol; see the module.

    Subclasses set `spec`, with `batch_shape` `(B,)`, and implement the three methods at the end.

    Args:
        env: what the factory returned.
        num_rows: B.
        device: where the simulator's tensors are.
        keeps_actions: whether the simulator keeps references to its action tensors; None detects it.

    Attributes:
        device: where the simulator's tensors are.
        gives_tensors: return tensors instead of arrays; set by an executor that accepts them.
    """

    takes_tensors = True

    def __init__(
        self, env: Any, num_rows: int, device: Any, *, keeps_actions: bool | None = None
    ) -> None:
        self.env = env
        self.device = torch.device(device)
        self._num_rows = num_rows
        self._lender = _Lender(self.device, keeps_actions=keeps_actions)
        self._generators = OwnGenerators(seeding.caller_state, seeding.restore_caller)
        self._latest: Leaves | None = None

    def reset(
        self, seed: int | None, options: Options = None, mask: Mask = None
    ) -> list[Any]:
        """Start an episode in all rows, or in those in `mask` (the first reset is of all rows).

        Args:
            seed: seeds the simulator if all rows are reset, otherwise not used.
            options: passed to the simulator if it takes any.
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
                # The simulator may overwrite its tensors.
                before = [leaf.clone() for leaf in self._latest]
                latest = choose(rows, self._reset_rows(rows, kwargs), before)
        self._latest = latest
        return self._given(latest)

    def step(self, action: list[Any]) -> StepValues:
        """Make one transition of all rows.

        Args:
            action: aligned with `spec.action`: the caller's tensors, or VIEWS of the slab.

        Returns:
            Values as of `reset`; terminated and truncated as bool arrays `[B, 1]`, copies.
        """
        if self._latest is None:
            raise ResetNeeded(
                "step failed: expected a reset first, got a step. Reset the env."
            )
        with self._on_stage():
            observation, rewards, terminated, truncated = self._step(
                self._lender.lend(action)
            )
        self._lender.check(self.origin)
        self._latest = observation
        return (
            self._given(observation),
            self._given(rewards),
            self._flags(terminated),
            self._flags(truncated),
        )

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


def choose(
    rows: torch.Tensor, leaves: Sequence[torch.Tensor], others: Sequence[torch.Tensor]
) -> Leaves:
    """Return `leaves` in the rows set in bool `[B]`, and `others` in the rest, in fresh memory."""
    return [
        torch.where(rows.view(-1, *(1,) * (leaf.ndim - 1)), leaf, other)
        for leaf, other in zip(leaves, others, strict=True)
    ]


def _seed_generators(seed: int) -> None:
    """Seed the global generators, but not those of other devices."""
    has_devices = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    before = torch.cuda.get_rng_state_all() if has_devices else None
    seeding.seed_globals(seed)
    if before is not None:
        torch.cuda.set_rng_state_all(before)


class _Lender:
    """Passes actions as tensors, without a copy as long as the simulator does not keep them."""

    def __init__(self, device: torch.device, *, keeps_actions: bool | None) -> None:
        self._device = device
        self._is_on_cpu = device.type == "cpu"
        self._is_copying = bool(keeps_actions)
        self._num_left = _NUM_PROBED if keeps_actions is None else 0
        self._is_known = keeps_actions is not None
        self._lent: list[np.ndarray] = []

    def lend(self, values: Sequence[Any]) -> Leaves:
        """Return tensors on the simulator's device, over the same memory if that is the CPU."""
        tensors = []
        for value in values:
            if isinstance(value, torch.Tensor):  # the caller's own
                tensors.append(value.to(self._device))
                continue
            array = np.asarray(value)
            if self._is_on_cpu:
                array = (
                    array.copy() if self._is_copying or self._num_left else array[...]
                )
                self._lent.append(array)
            tensors.append(torch.from_numpy(array).to(self._device))
        return tensors

    def check(self, origin: str) -> None:
        """After a step, check by reference counts whether the simulator has kept the tensors that it was lent.

        Raises:
            SpecError: it has kept them for the first time now, after it was lent the slab itself.
        """
        lent, self._lent = self._lent, []
        if self._is_known:
            return
        is_kept = any(sys.getrefcount(lent[index]) > 2 for index in range(len(lent)))
        is_probe, self._num_left = (
            self._num_left > 0,
            max(0, self._num_left - bool(lent)),
        )
        if not is_kept:
            return
        self._is_known = self._is_copying = True
        if not is_probe:
            raise SpecError(
                f"step failed: expected an env that either always or never keeps its actions, got one that began to "
                f"(built by {origin}); the next action would overwrite them. Return the adapter from the factory, "
                f"with keeps_actions=True, or clone() the actions in the env."
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
