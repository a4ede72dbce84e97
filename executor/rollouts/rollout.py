"""Rollouts: T steps of all envs, which the workers write directly into `[N, T, ...]`.

Guarantees: a worker writes an observation once, and it is not copied again; the policy gets views of the data that will
be returned; a transition's `next` is never a reset observation, and the root after an end is never a terminal one.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDictBase,
    is_leaf_nontensor,
)

from envherd.executor.batches.arguments import (
    as_count,
    need_batch,
    need_bools,
    need_callables,
    need_state,
    refuse_unused_root,
)
from envherd.executor.batches.fast_tensordict import as_tensor
from envherd.executor.batches.grad_mode import without_grad
from envherd.executor.batches.hand_out import stack_groups
from envherd.executor.batches.transfer import as_array
from envherd.executor.progress import counted
from envherd.executor.protocol.fast_step import compile_command
from envherd.executor.protocol.positions import storage_columns
from envherd.executor.rollouts.policy_state import Carried, leaf_keys, run_policy
from envherd.executor.rollouts.stepwise import StepwiseRun
from envherd.executor.rollouts.storage import Lease, StorageShelf
from envherd.shm.slab import input_leaves
from envherd.shm.specs import EnvSpec, Key
from envherd.workers.errors import EnvherdError
from envherd.workers.protocol import Op

if TYPE_CHECKING:
    from envherd.executor.protocol.engine import Engine

RolloutPolicy = Callable[[TensorDictBase], TensorDictBase]

_log = logging.getLogger("envherd")
_CUT = (
    "rollout returned %d of %d steps, since an env ended. Pass break_when_any_done=False to reset the envs that end "
    "and collect all steps, or True to stop as now without this message."
)


class Actor(Protocol):
    """The method that a rollout without a policy uses of the executor."""

    def rand_action(self, td: TensorDictBase | None = None) -> TensorDictBase:
        """Return `td` (or a new batch) with random actions."""


class RolloutRunner:
    """Runs rollouts for one executor.

    Attributes:
        state_left: the policy's state when the latest rollout was broken off, own memory; None if it was not.
    """

    def __init__(self, engine: Engine, run: type[StepwiseRun] | None = None) -> None:
        """Create one.

        Args:
            engine: of the executor.
            run: makes all rollouts; None if only those on a device are made step by step.
        """
        self._engine = engine
        self._run_type = run
        if run is None and engine.batches.mover is not None:
            self._run_type = StepwiseRun
        self._shelf = StorageShelf(engine.pool)
        self.state_left: TensorDictBase | None = None

    @without_grad
    def run(  # noqa: PLR0913  # the arguments of TorchRL's rollout
        self,
        env: Actor,
        max_steps: int,
        policy: RolloutPolicy | None = None,
        *,
        callback: Callable[[Any, TensorDictBase], Any] | None = None,
        auto_reset: bool = True,
        break_when_any_done: bool | None = None,
        tensordict: TensorDictBase | None = None,
        set_truncated: bool = False,
        out: TensorDictBase | None = None,
        primer: TensorDictBase | None = None,
    ) -> TensorDictBase:
        """Collect up to `max_steps` steps of all envs; `env` is given to the callback. See `BatchedEnv.rollout`."""
        engine = self._engine
        _check(
            max_steps,
            policy,
            callback,
            (auto_reset, break_when_any_done, set_truncated),
        )
        need_state("rollout", "primer", primer, engine.num_envs)
        need_state("rollout", "tensordict", tensordict, engine.num_envs)
        is_asked, break_when_any_done = (
            break_when_any_done is not None,
            break_when_any_done in (None, True),
        )
        max_steps = as_count("rollout", "max_steps", max_steps)
        refuse_unused_root(tensordict, auto_reset=auto_reset)
        if out is not None:
            self._check_out(out, max_steps)
        if primer is not None and (
            own := [key for key in leaf_keys(primer) if key in engine.known]
        ):
            raise ValueError(
                f"rollout failed: expected primer without the envs' own keys, got {own[0]}. Leave it out."
            )

        def finish(data: TensorDictBase) -> TensorDictBase:
            if not is_asked and data.batch_size[1] < max_steps:
                _log.warning(_CUT, data.batch_size[1], max_steps)
            if set_truncated:
                _mark_truncated(data, engine.specs)
            return data if out is None else _fill(out, data)

        with engine.guard:
            engine.guard.refuse_rolling()
            engine.refuse_under_way(engine.all_ids)
            act = self._checked(policy or env.rand_action)
            watch = (
                None
                if callback is None
                else self._checked(functools.partial(callback, env))
            )
            carried = Carried(engine.known, tensordict, primer)
            if self._run_type is not None:
                stepwise = self._run_type(
                    engine, act, carried, watch, break_when_any_done=break_when_any_done
                )
                with self._leaving(carried):
                    return finish(stepwise.collect(max_steps, auto_reset=auto_reset))
            reused = (
                self._shelf.find(out)
                if out is not None and out.batch_size[1] == max_steps
                else None
            )
            lease = reused or self._shelf.lend(max_steps)
            run = _Run(
                engine,
                lease,
                act,
                watch,
                carried=carried,
                break_when_any_done=break_when_any_done,
            )
            try:
                with self._leaving(carried):
                    run.start(auto_reset=auto_reset)
                    num_steps = run.go(max_steps)
                    data = run.result(num_steps)
            finally:
                engine.positions.move_back()
                self._shelf.end_rollout(lease)
        return finish(data)

    @contextlib.contextmanager
    def _leaving(self, carried: Carried) -> Iterator[None]:
        """Keep the policy's state if the rollout is broken off."""
        self.state_left = None
        try:
            yield
        except BaseException:
            self.state_left = None if carried.state is None else carried.state.clone()
            raise

    def _check_out(self, out: TensorDictBase, max_steps: int) -> None:
        """Refuse an `out` that does not fit the rollouts of these envs."""
        need_batch("rollout", out, "out")
        shape, own = tuple(out.batch_size), tuple(self._engine.batch_size)
        if len(shape) < 2 or (shape[0], *shape[2:]) != own or not shape[1]:
            expected = ", ".join(map(str, (own[0], "T", *own[1:])))
            raise ValueError(
                f"rollout failed: expected out of batch size [{expected}], T at least 1, got {[*shape]}."
            )
        if shape[1] < max_steps:
            raise ValueError(
                f"rollout failed: expected out of at least {max_steps} steps (max_steps), got {shape[1]}. Pass "
                f"max_steps={shape[1]}, or a longer out."
            )
        if len(self._engine.pool.plan.groups) > 1 and not isinstance(
            out, LazyStackedTensorDict
        ):
            raise ValueError(
                f"rollout failed: expected out to be a lazy stack, since the envs are different tasks, got a "
                f"{type(out).__name__}. Give what an earlier rollout returned."
            )

    def _checked(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a call of the policy or the callback that checks afterwards that the executor is still open."""

        def checked(*args: Any) -> Any:
            result = call(*args)
            self._engine.guard.check()
            return result

        return checked


def _check(
    max_steps: Any, policy: Any, callback: Any, switches: tuple[Any, Any, Any]
) -> None:
    """Refuse arguments of wrong types."""
    if callable(max_steps):
        raise TypeError(
            "rollout failed: expected the number of steps first, got a callable. Write (200, policy)."
        )
    need_callables("rollout", policy=policy, callback=callback)
    auto_reset, breaks, set_truncated = switches
    need_bools("rollout", auto_reset=auto_reset, set_truncated=set_truncated)
    if breaks is not None:
        need_bools("rollout", break_when_any_done=breaks)


class _Run:
    """One rollout in progress."""

    def __init__(
        self,
        engine: Engine,
        lease: Lease,
        policy: RolloutPolicy,
        callback: Callable[..., Any] | None,
        *,
        carried: Carried,
        break_when_any_done: bool,
    ) -> None:
        self._engine = engine
        self._positions, self._side, self._batches = (
            engine.positions,
            engine.side,
            engine.batches,
        )
        self._lease = lease
        self._policy = policy
        self._callback = callback
        self._breaks = break_when_any_done
        self._extra_keys: list[Any] | None = None
        self._extras: list[TensorDictBase] = []
        self._interrupted: list[np.ndarray] = []
        self._side_inputs: list[dict[int, Any]] = []
        self._side_roots: list[dict[int, Any]] = []
        self._side_nexts: list[dict[int, Any]] = []
        self._next_done = [group["next", "done"] for group in lease.storage.columns]
        self.carried = carried
        self._fresh = np.ones(engine.num_envs, bool)
        self._cut: np.ndarray | None = None  # see `Flight`
        #: The tensors that keep the inputs of a step, and the keys that they are read from.
        self._kept_inputs = [
            (columns["input", *leaf.key], group.inputs["input", *leaf.key])
            for group, columns in zip(
                self._positions.slab.groups, lease.storage.columns, strict=True
            )
            for leaf in input_leaves(group.spec)
        ]

    def start(self, *, auto_reset: bool) -> None:
        """Reset envs as requested, and fill column 0 of the root."""
        self._fresh, self._cut = self._engine.reset_for_rollout(auto_reset=auto_reset)
        lease = self._lease
        self._positions.move_to(
            storage_columns(lease.target, lease.storage, self._positions.places)
        )
        self._commands = {
            op: compile_command(self._engine, op) for op in (Op.STEP, Op.STEP_RESET)
        }

    def go(self, num_steps: int) -> int:
        """Step until the end; return how many steps were made."""
        positions, side, flights = self._positions, self._side, self._engine.flights
        for step in counted(num_steps, "rollout"):
            is_last = step == num_steps - 1
            if side.has_values:
                self._side_roots.append(side.latest(positions.in_root))
            with self._engine.rolling():
                acted = self._act(step)
            op = Op.STEP if is_last or self._breaks else Op.STEP_RESET
            cut, self._cut = self._cut, None
            flight = (
                self._commands[op](step)
                if cut is None
                else flights.begin(op, at=step, cut=cut)
            )
            try:
                if not flight.has_landed:
                    flights.land(flight)
            except EnvherdError:
                self.carried.renew(flight.fresh)
                raise
            if positions.has_interrupted:
                self._interrupted.append(positions.interrupted.copy())
            if side.has_values:
                self._side_nexts.append(dict(side.next))
            if self._callback is not None:
                with self._engine.rolling():
                    self._callback(self._with_next(acted, step))
            if self.carried.is_in_use:
                self._fresh = flight.fresh
            if self._breaks and any(done[:, step].any() for done in self._next_done):
                return step + 1
        return num_steps

    def _with_next(self, acted: TensorDictBase, step: int) -> TensorDictBase:
        """Return a step's batch with its `next` (VIEWS), including the policy's entries there."""
        leaves = [
            [tensors["next", *key][:, step] for key in batch.next_keys]
            for tensors, batch in zip(
                self._lease.tensors, self._batches.groups, strict=True
            )
        ]
        next_td = self._batches.next_td(leaves)
        if self.carried.state is not None:
            next_td.update(self.carried.state)
        return acted.copy().set("next", next_td)

    def _act(self, step: int) -> TensorDictBase:
        root = self._root(step)
        self.carried.hand_over(root, self._fresh)
        acted = run_policy(self._policy, root)
        self._engine.write_inputs(acted)
        if self._engine.side_inputs:
            self._side_inputs.append(dict(self._engine.side_inputs))
        self.carried.keep(acted)
        for kept, given in self._kept_inputs:
            kept[:, step] = given
        if self._extra_keys is None:
            self._extra_keys = [key for key in leaf_keys(acted) if self._is_extra(key)]
        if self._extra_keys:
            self._extras.append(acted.select(*self._extra_keys).clone())
        return acted

    def _is_extra(self, key: Key) -> bool:
        own = key[1:] if key[0] == "next" else key
        return own not in self._engine.known and own[0] != "env_ids"

    def _root(self, step: int) -> TensorDictBase:
        batches = self._batches
        if not self._engine.plain.rows:
            return batches.root_shell.build(self._lease.roots[0][step])
        tds: list[TensorDictBase] = []
        for roots, batch in zip(self._lease.roots, batches.groups, strict=True):
            td = batch.shell("root", (batch.num_rows,)).build(roots[step])
            batches.add_root_side(td, batch, batch.slab.plan.env_ids)
            tds.append(td)
        return stack_groups(tds, self._positions.places.pairs)

    def result(self, num_steps: int) -> TensorDictBase:
        """Return the collected batch `[N, num_steps]`."""
        tds: list[TensorDictBase] = []
        for tensors, batch in zip(
            self._lease.tensors, self._batches.groups, strict=True
        ):
            cut = {
                n: t
                if num_steps == self._lease.num_columns
                else as_tensor(as_array(t)[:, :num_steps].copy())
                for n, t in tensors.items()
            }
            tds.append(self._group_result(batch, cut, num_steps))
        data = stack_groups(tds, self._positions.places.pairs)
        if self._extras:
            data.update(torch.stack(self._extras, 1))
        data.refine_names(None, "time", ...)
        return data

    def _group_result(
        self, batch: Any, tensors: dict[Any, torch.Tensor], num_steps: int
    ) -> TensorDictBase:
        lead = (batch.num_rows, num_steps)
        next_leaves = [tensors["next", *key] for key in batch.next_keys]
        ids = list(batch.slab.plan.env_ids)
        if self._positions.has_interrupted:
            per_env = np.stack([one[ids] for one in self._interrupted], 1)
            shape = batch.spec.batch_shape
            flags = as_tensor(
                np.broadcast_to(
                    per_env.reshape(*lead, *(1 for _ in shape), 1), (*lead, *shape, 1)
                ).copy()
            )
            next_leaves.append(flags)
        td = batch.shell("root", lead).build(
            [tensors["root", *key] for key in batch.root_keys]
        )
        td.set("next", batch.shell("next", lead).build(next_leaves))
        for leaf in input_leaves(batch.spec):
            td.set(leaf.key, tensors["input", *leaf.key])
        for index, key in batch.side_keys:
            self._add_side(td, index, key, ids)
        for index, key in batch.side_input_keys:
            td.set(
                key,
                _non_tensor(
                    [[step[i][index] for step in self._side_inputs] for i in ids]
                ),
            )
        return td

    def _add_side(
        self, td: TensorDictBase, index: int, key: Any, ids: list[int]
    ) -> None:
        """Add a side-channel leaf to the root and to `next`."""
        for steps, where in (
            (self._side_roots, key),
            (self._side_nexts, ("next", *key)),
        ):
            td.set(
                where, _non_tensor([[step[i][index] for step in steps] for i in ids])
            )


def _mark_truncated(data: TensorDictBase, specs: Sequence[EnvSpec]) -> None:
    """Mark the last step of every env, and of its agents, as truncated, only in the data: the envs keep running."""
    rows = data.tensordicts if isinstance(data, LazyStackedTensorDict) else [data]
    for row, spec in zip(rows, specs, strict=False):
        last = -1 if row is not data else (slice(None), -1)
        for leaf in spec.done:
            if leaf.key[-1] != "terminated":
                row["next", *leaf.key][last] = True


def _fill(out: TensorDictBase, data: TensorDictBase) -> TensorDictBase:
    """Copy a rollout's data to the caller's batch; return the part that was filled."""
    num_steps = data.batch_size[1]
    part = out if num_steps == out.batch_size[1] else out[:, :num_steps]
    if isinstance(data, LazyStackedTensorDict):
        for place, row in zip(part.unbind(0), data.unbind(0), strict=True):
            _copy(place, row)
    else:
        _copy(part, data)
    return part


def _copy(out: TensorDictBase, data: TensorDictBase) -> None:
    for key in data.keys(
        include_nested=True, leaves_only=True, is_leaf=is_leaf_nontensor
    ):
        value, place = data.get(key), out.get(key, None)
        if not isinstance(value, torch.Tensor) or place is None:
            out.set(key, value)
        elif place.shape != value.shape:
            raise ValueError(
                f"rollout failed: expected out to hold {key} of shape {tuple(value.shape)}, got {tuple(place.shape)}."
            )
        elif (
            place.data_ptr() != value.data_ptr()
        ):  # the workers have not written it there
            place.copy_(value)


def _non_tensor(values: list[list[Any]]) -> Any:
    """Return copies of `[N, T]` values as non-tensor data."""
    return NonTensorStack(
        *(
            NonTensorStack(*(NonTensorData(copy.deepcopy(v)) for v in row))
            for row in values
        )
    )
