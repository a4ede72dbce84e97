"""Rollouts: T steps of all envs, in memory `[N, T, ...]` that the workers write, or step by step for a device.

Guarantees: a worker writes an observation once, and it is not copied again; the policy gets views of the data that will
be returned; a transition's `next` is never a reset observation, and the root after an end is never a terminal one.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDictBase, is_leaf_nontensor

from envherd.executor.batches.actions import GroupIntake
from envherd.executor.batches.arguments import check_rollout, need_batch
from envherd.executor.batches.fast_tensordict import (
    as_tensor,
    outside_inference_mode,
    without_grad,
)
from envherd.executor.batches.hand_out import (
    GroupBatch,
    add_side,
    non_tensor,
    stack_groups,
)
from envherd.executor.batches.transfer import as_array
from envherd.executor.processes.error_messages import log
from envherd.executor.progress import counted
from envherd.executor.protocol.engine import Engine
from envherd.executor.protocol.fast import compile_command
from envherd.executor.protocol.flight import Flight
from envherd.executor.protocol.positions import storage_columns
from envherd.executor.rollouts.policy_state import Carried, Run, leaf_keys, run_policy
from envherd.executor.rollouts.storage import Lease, StorageShelf
from envherd.shm.slab import input_leaves
from envherd.shm.specs import EnvSpec
from envherd.workers.errors import EnvherdError
from envherd.workers.protocol import Op

# ---- stepwise ----------------------------------------------------------------------------------
# Rollouts for batches on a device: steps are moved one by one and stacked at the end.
#
# Workers cannot write to a device's memory, so a shared storage has no advantage. Instead each step is one transfer,
# and the steps are stacked on the learner's device. Guarantees and result are those of `rollout`, including
# `interrupted` rows after a loss.


class StepwiseRun(Run[Engine]):
    """One rollout in progress; its steps are stacked at the end."""

    def collect(self, max_steps: int, *, auto_reset: bool) -> TensorDictBase:
        """Return `[N, t]`, on the device."""
        engine = self._engine
        self._steps: list[TensorDictBase] = []
        self._root_keys = {
            leaf.key
            for spec in engine.specs
            for leaf in (*spec.observation, *spec.done)
        }
        self._input_keys = {
            leaf.key
            for group in engine.pool.slab.groups
            for leaf in input_leaves(group.spec)
        }

        fresh, cut = engine.reset_for_rollout(auto_reset=auto_reset)
        root = engine.batches.current(engine.all_ids)
        for step in counted(max_steps, "rollout"):
            self._carried.hand_over(root, fresh)
            is_last = self._breaks or step == max_steps - 1
            root = self._step(root, Op.STEP if is_last else Op.STEP_RESET, cut)
            fresh = self._reset_before(self._steps[-1]["next"])
            if self._breaks and (engine.states.needs_reset.any() or cut is not None):
                break
            cut = None
        return self._finished(outside_inference_mode(torch.stack)(self._steps, 1))

    def _step(
        self,
        root: TensorDictBase,
        op: Op,
        cut: np.ndarray | None,
    ) -> TensorDictBase:
        """Make one step; return the root after it."""
        engine = self._engine
        # The policy may write into the root itself.
        kept = root.select(*self._root_keys, strict=False)
        with engine.rolling:
            acted = run_policy(self._policy, root)
        try:
            next_td, after = engine.step_all(acted, op, cut)
        except EnvherdError as error:
            # With a partial batch, the other envs were stepped, and the policy's state follows them.
            if error.partial is not None:
                self._carried.keep(acted)
                self._carried.renew(self._reset_before(error.partial))
            raise
        self._carried.keep(acted)
        if after is None:
            after = next_td.select(*self._root_keys, strict=False)
        self._keep_extras(acted, engine.known)
        # The policy may reuse its memory, as CUDA graphs do.
        kept.update(acted.select(*self._input_keys, strict=False).clone())
        places = engine.positions.places
        for group, own, env_ids in places.by_group(kept, engine.all_ids):
            keys = engine.intakes[group].side_keys
            add_side(own, keys, engine.side_inputs, env_ids.tolist())
        self._steps.append(kept.set("next", next_td))
        if self._callback is not None:
            with engine.rolling:
                self._callback(self._with_next(acted, next_td))
        return after

    def _reset_before(self, next_td: TensorDictBase) -> np.ndarray:
        """Return what was reset after a step, bool `[N]` or `[N, *B]`."""
        return self._engine.batches.ended_parts(
            self._engine.positions.in_root,
            lambda: next_td,
        )


# ---- rollout -----------------------------------------------------------------------------------

RolloutPolicy = Callable[[TensorDictBase], TensorDictBase]

_CUT = (
    "rollout returned %d of %d steps, since an env ended. Pass break_when_any_done=False to reset the envs that end "
    "and collect all steps, or True to stop as now without this message."
)


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
        env: Any,
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
        """Collect up to `max_steps` steps of all envs, as `BatchedEnv.rollout`.

        The callback gets `env`, the executor, which draws the actions if there is no policy.
        """
        engine = self._engine
        max_steps = check_rollout(
            max_steps,
            policy,
            callback,
            tensordict,
            primer,
            engine.num_envs,
            auto_reset=auto_reset,
            break_when_any_done=break_when_any_done,
            set_truncated=set_truncated,
        )
        # None stops as True does, and says so in the log.
        breaks = break_when_any_done is not False
        if out is not None:
            self._check_out(out, max_steps)
        if primer is not None and (
            own := [key for key in leaf_keys(primer) if key in engine.known]
        ):
            raise ValueError(
                f"rollout failed: expected primer without the envs' own keys, got {own[0]}. Leave it out."
            )
        with engine.guard:
            engine.guard.refuse_rolling()
            engine.refuse_under_way(engine.all_ids)
            act = self._checked(policy or env.rand_action)
            watch = None
            if callback is not None:
                watch = self._checked(functools.partial(callback, env))
            carried = Carried(engine.known, tensordict, primer)
            with self._leaving(carried):
                run = (self._run_type or _StorageRun)(
                    engine,
                    act,
                    carried,
                    watch,
                    break_when_any_done=breaks,
                )
                if isinstance(run, _StorageRun):
                    data = self._in_storage(run, max_steps, out, auto_reset=auto_reset)
                else:
                    data = run.collect(max_steps, auto_reset=auto_reset)
        if break_when_any_done is None and data.batch_size[1] < max_steps:
            log.warning(_CUT, data.batch_size[1], max_steps)
        if set_truncated:
            _mark_truncated(data, engine.specs)
        if out is None:
            return data
        return _fill(out, data)

    def _in_storage(
        self,
        run: "_StorageRun",
        max_steps: int,
        out: TensorDictBase | None,
        *,
        auto_reset: bool,
    ) -> TensorDictBase:
        """Make a rollout in a storage: that of `out`, if workers still map it, so that nothing is copied."""
        lease = self._shelf.find(out, max_steps) or self._shelf.lend(max_steps)
        try:
            run.start(lease, auto_reset=auto_reset)
            return run.result(run.go(max_steps))
        finally:
            # In this order: nothing may read the storage once it can be lent to another rollout.
            self._engine.positions.move_back()
            self._shelf.end_rollout(lease)

    @contextlib.contextmanager
    def _leaving(self, carried: Carried) -> Iterator[None]:
        """Keep the policy's state if the rollout is broken off."""
        self.state_left = None
        try:
            yield
        except BaseException:
            # A clone: the policy may reuse its memory.
            if carried.state is not None:
                self.state_left = carried.state.clone()
            raise

    def _check_out(self, out: TensorDictBase, max_steps: int) -> None:
        """Refuse an `out` that does not fit the rollouts of these envs."""
        need_batch("rollout", out, "out")
        shape = tuple(out.batch_size)
        own = tuple(self._engine.batch_size)
        if len(shape) < 2 or (shape[0], *shape[2:]) != own or not shape[1]:
            raise ValueError(
                f"rollout failed: expected out of batch size [{', '.join(map(str, (own[0], 'T', *own[1:])))}], T at "
                f"least 1, got {[*shape]}."
            )
        if shape[1] < max_steps:
            raise ValueError(
                f"rollout failed: expected out of at least {max_steps} steps (max_steps), got {shape[1]}. Pass "
                f"max_steps={shape[1]}, or a longer out."
            )
        if len(self._engine.pool.plan.groups) > 1 and not isinstance(
            out,
            LazyStackedTensorDict,
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


class _KeptInput(NamedTuple):
    """An input of the envs.

    Attributes:
        present: array of the present step.
        kept: array of all steps, `[n, T, ...]`.
    """

    present: np.ndarray
    kept: np.ndarray


class _StorageRun(Run[Engine]):
    """One rollout in progress, in a storage."""

    def start(self, lease: Lease, *, auto_reset: bool) -> None:
        """Reset envs as requested, and fill column 0 of the root in a storage."""
        self._positions = self._engine.positions
        self._batches = self._engine.batches
        self._interrupted: list[np.ndarray] = []
        self._side_inputs: list[dict[int, Any]] = []
        self._side_roots: list[dict[int, Any]] = []
        self._side_nexts: list[dict[int, Any]] = []
        self._lease = lease
        self._next_done = [group["next", "done"] for group in lease.storage.columns]
        self._kept_inputs = [
            _KeptInput(group.inputs["input", *leaf.key], columns["input", *leaf.key])
            for group, columns in zip(
                self._positions.slab.groups,
                lease.storage.columns,
                strict=True,
            )
            for leaf in input_leaves(group.spec)
        ]
        self._fresh, self._cut = self._engine.reset_for_rollout(auto_reset=auto_reset)
        # Not before the reset, whose rows belong to the slab's own columns.
        self._positions.move_to(
            storage_columns(lease.target, lease.storage, self._positions.places)
        )
        self._commands = {
            op: compile_command(self._engine, op) for op in (Op.STEP, Op.STEP_RESET)
        }

    def go(self, num_steps: int) -> int:
        """Step until the end; return how many steps were made."""
        positions = self._positions
        side = self._engine.side
        for step in counted(num_steps, "rollout"):
            if side.has_values:
                self._side_roots.append(side.latest(positions.in_root))
            with self._engine.rolling:
                acted = self._act(step)
            # An env that ends in the last step stays ended: the next call decides what follows.
            is_last = self._breaks or step == num_steps - 1
            op = Op.STEP if is_last else Op.STEP_RESET
            cut = self._cut
            self._cut = None
            flight = (
                self._commands[op](step)
                if cut is None
                else self._engine.flights.begin(op, at=step, cut=cut)
            )
            try:
                if not flight.has_landed:
                    self._engine.flights.land(flight)
            except EnvherdError:
                # The flight was made good before it raised: its envs may be in new episodes.
                self._carried.renew(self._reset_by(flight, step))
                raise
            if positions.has_interrupted:
                self._interrupted.append(positions.interrupted.copy())
            if side.has_values:
                self._side_nexts.append(dict(side.next))
            if self._callback is not None:
                with self._engine.rolling:
                    self._callback(self._with_next(acted, self._next_td(step)))
            if self._carried.is_in_use:
                self._fresh = self._reset_by(flight, step)
            if self._breaks and any(done[:, step].any() for done in self._next_done):
                return step + 1
        return num_steps

    def _reset_by(self, flight: Flight, step: int) -> np.ndarray:
        """Return what a step has reset, bool `[N]` or `[N, *B]`."""
        return self._batches.ended_parts(
            flight.fresh,
            functools.partial(self._next_td, step),
        )

    def _next_td(self, step: int) -> TensorDictBase:
        """Return the `next` batch of a step (VIEWS)."""
        leaves = [
            [tensors["next", *key][:, step] for key in batch.next_keys]
            for tensors, batch in zip(
                self._lease.tensors,
                self._batches.groups,
                strict=True,
            )
        ]
        return self._batches.next_td(leaves)

    def _act(self, step: int) -> TensorDictBase:
        root = self._root(step)
        self._carried.hand_over(root, self._fresh)
        acted = run_policy(self._policy, root)
        # Before anything is kept: illegal actions are refused here.
        self._engine.write_inputs(acted)
        if self._engine.side_inputs:
            self._side_inputs.append(dict(self._engine.side_inputs))
        self._carried.keep(acted)
        for one in self._kept_inputs:
            one.kept[:, step] = one.present
        self._keep_extras(acted, self._engine.known)
        return acted

    def _root(self, step: int) -> TensorDictBase:
        batches = self._batches
        if not self._engine.plain.rows:
            return batches.root_shell.build(self._lease.roots[0][step])
        tds: list[TensorDictBase] = []
        for roots, batch in zip(self._lease.roots, batches.groups, strict=True):
            td = batch.shell("root", (batch.num_rows,)).build(roots[step])
            batches.add_root_side(td, batch, batch.slab.plan.env_ids)
            tds.append(td)
        return stack_groups(tds, self._positions.places.of_env)

    def result(self, num_steps: int) -> TensorDictBase:
        """Return the collected batch `[N, num_steps]`."""
        tds: list[TensorDictBase] = []
        for tensors, batch, intake in zip(
            self._lease.tensors,
            self._batches.groups,
            self._engine.intakes,
            strict=True,
        ):
            made = tensors
            # A copy, so that the storage is free: its last columns hold an earlier rollout.
            if num_steps < self._lease.num_columns:
                made = {
                    name: as_tensor(as_array(tensor)[:, :num_steps].copy())
                    for name, tensor in tensors.items()
                }
            tds.append(self._group_result(batch, intake, made, num_steps))
        return self._finished(stack_groups(tds, self._positions.places.of_env))

    def _group_result(
        self,
        batch: GroupBatch,
        intake: GroupIntake,
        tensors: dict[Any, torch.Tensor],
        num_steps: int,
    ) -> TensorDictBase:
        lead = (batch.num_rows, num_steps)
        next_leaves = [tensors["next", *key] for key in batch.next_keys]
        ids = list(batch.slab.plan.env_ids)
        if self._positions.has_interrupted:
            per_env = np.stack([one[ids] for one in self._interrupted], 1)
            shape = batch.spec.batch_shape
            # One flag of an env counts for all its rows.
            flags = np.broadcast_to(
                per_env.reshape(*lead, *(1 for _ in shape), 1),
                (*lead, *shape, 1),
            )
            next_leaves.append(as_tensor(flags.copy()))
        td = batch.shell("root", lead).build(
            [tensors["root", *key] for key in batch.root_keys]
        )
        td.set("next", batch.shell("next", lead).build(next_leaves))
        for leaf in input_leaves(batch.spec):
            td.set(leaf.key, tensors["input", *leaf.key])
        for steps, keys, section in (
            (self._side_roots, batch.side_keys, ()),
            (self._side_nexts, batch.side_keys, ("next",)),
            (self._side_inputs, intake.side_keys, ()),
        ):
            for index, key in keys.items():
                td.set(
                    (*section, *key),
                    non_tensor(
                        [[step[i][index] for step in steps] for i in ids],
                        td.batch_size,
                    ),
                )
        return td


def _mark_truncated(data: TensorDictBase, specs: Sequence[EnvSpec]) -> None:
    """Mark the last step of every env, and of its agents, as truncated, only in the data: the envs keep running."""
    rows = [data]
    if isinstance(data, LazyStackedTensorDict):
        rows = data.tensordicts
    # Envs of a whole batch are equal, so its first spec is that of all.
    for row, spec in zip(rows, specs, strict=False):
        for leaf in spec.done:
            if leaf.key[-1] != "terminated":
                # Steps are the first dimension of a row of the stack, and the second of a whole batch.
                row["next", *leaf.key].select(int(row is data), -1).fill_(1)


def _fill(out: TensorDictBase, data: TensorDictBase) -> TensorDictBase:
    """Copy a rollout's data to the caller's batch; return the part that was filled."""
    part = out
    # A rollout of all steps returns `out` itself.
    if data.batch_size[1] < out.batch_size[1]:
        part = out[:, : data.batch_size[1]]
    if isinstance(data, LazyStackedTensorDict):
        for place, row in zip(part.unbind(0), data.unbind(0), strict=True):
            _copy(place, row)
    else:
        _copy(part, data)
    return part


def _copy(out: TensorDictBase, data: TensorDictBase) -> None:
    for key in data.keys(
        include_nested=True,
        leaves_only=True,
        is_leaf=is_leaf_nontensor,
    ):
        value = data.get(key)
        place = out.get(key, None)
        if not isinstance(value, torch.Tensor) or place is None:
            out.set(key, value)
        elif place.shape != value.shape:
            raise ValueError(
                f"rollout failed: expected out to hold {key} of shape {tuple(value.shape)}, got {tuple(place.shape)}."
            )
        elif place.data_ptr() != value.data_ptr():
            # The workers have not written it there.
            place.copy_(value)
