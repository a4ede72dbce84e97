"""The executor: a batch of envs behind the partial-reset protocol, whatever runs them.

`ParallelEnv` and `SerialEnv` are this class over a pool of worker processes or over the caller's own.

Guarantees:
- `step` never resets; `reset` touches exactly the rows asked for; `next` holds the true last
  observation; an env that has ended is not stepped (`ResetNeeded`).
- A refused call has touched nothing. A call that an interrupt broke off leaves the envs concerned in
  need of a reset, and nothing stale can come back later.
- Data handed out with `copy=True` is the caller's own.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Self

import numpy as np
import torch
from tensordict import TensorDictBase

from envherd.executor.intake import RESET_KEY, reset_mask, to_numpy
from envherd.executor.options import ExecutorOptions
from envherd.executor.pool import WorkerPool, env_error
from envherd.executor.rollout import RolloutRunner
from envherd.executor.rows import Rows
from envherd.executor.sampling import ActionSampler
from envherd.executor.serial_pool import SerialPool
from envherd.executor.statistics import Statistics, count
from envherd.shm.specs import EnvSpec, LeafSpec
from envherd.workers import messages
from envherd.workers.errors import Busy, Closed, EnvherdError, ResetNeeded
from envherd.workers.protocol import RING, Flag, Op
from envherd.workers.seeding import draw_root_seed

Pool = WorkerPool | SerialPool
ENV_IDS = "env_ids"


class BatchedEnv:
    """A batch of envs; made as `ParallelEnv` or `SerialEnv`.

    Attributes:
        num_envs: N.
        num_workers: processes that run them (0 for a `SerialEnv`).
        seed: the root seed in use; drawn from the system's entropy if none was given.
        device: where batches are handed out, or None.
        specs: one `EnvSpec` per env.
    """

    def __init__(self, pool: Pool, *, seed: int, device: torch.device | None, copy: bool, options: ExecutorOptions) -> None:
        self._pool = pool
        self._owner = os.getpid()
        self._turn = threading.RLock()
        self._is_closed = False
        self._is_dirty = False
        self.options = options
        self.seed = seed
        self.device = device
        self.num_envs = pool.num_envs
        self.num_workers = pool.num_workers
        self.specs: tuple[EnvSpec, ...] = tuple(pool.specs)
        self._finalizer = weakref.finalize(self, _close_pool, pool, self._owner)
        self._rows = Rows(pool.slab, options, device, is_copy=copy)
        self._intake = self._rows.intakes[0] if len(self._rows.intakes) == 1 else None
        self._all = np.arange(self.num_envs)
        self._pending = np.zeros(self.num_envs, bool)
        self._pending_op = np.zeros(self.num_envs, np.int64)
        self._pending_column = np.zeros(self.num_envs, np.int64)
        self._sampler = ActionSampler(self.specs, seed)
        self._num_errors = 0
        self._num_interrupted = 0
        self._ready_at = time.monotonic()
        self._rollouts = RolloutRunner(self)

    # ---- what it is --------------------------------------------------------------------------

    @property
    def spec(self) -> EnvSpec:
        """The spec of env 0; the spec of every env unless the envs are different tasks (see `specs`)."""
        return self.specs[0]

    @property
    def observation_spec(self) -> tuple[LeafSpec, ...]:
        """What a reset or step gives (of one env, env 0)."""
        return self.spec.observation

    @property
    def action_spec(self) -> tuple[LeafSpec, ...]:
        """What a step takes (of one env, env 0)."""
        return self.spec.action

    @property
    def reward_spec(self) -> tuple[LeafSpec, ...]:
        """The reward leaves (of one env, env 0)."""
        return self.spec.reward

    @property
    def done_spec(self) -> tuple[LeafSpec, ...]:
        """The done leaves (of one env, env 0): done, terminated, truncated, then nested ones."""
        return self.spec.done

    @property
    def batch_size(self) -> torch.Size:
        """`[N]`, or `[N, *B]` if every env is itself a batch of shape B."""
        shapes = {spec.batch_shape for spec in self.specs}
        return torch.Size((self.num_envs, *(shapes.pop() if len(shapes) == 1 else ())))

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._is_closed

    def __repr__(self) -> str:
        state = ", closed" if self._is_closed else ""
        return f"{type(self).__name__}({self.num_envs} x {self.spec.family}, num_workers={self.num_workers}{state})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError(f"pickling failed: a live {type(self).__name__} holds processes; pickle its factories instead.")

    # ---- reset and step ----------------------------------------------------------------------

    def reset(
        self,
        td: TensorDictBase | None = None,
        *,
        seed: int | Sequence[int] | None = None,
        list_of_kwargs: Sequence[dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> TensorDictBase:
        """Start new episodes and return where all envs are now.

        Args:
            td: may carry a `_reset` mask (bool `[N]` or `[N, 1]`, or nested: `("agents", "_reset")`):
                only those envs are reset, the others come back as they truly are. Without one, all
                are. Never changed.
            seed: one root seed for everything from here on (as `set_seed`), or one seed per env for
                this reset alone.
            list_of_kwargs: keyword arguments for each env's own reset.
            **kwargs: keyword arguments for every env's own reset, e.g. gymnasium's `options={...}`.

        Returns:
            The root batch `[N]`: observation, done, terminated, truncated. Own memory.

        Raises:
            EnvError: an env raised; the others were reset. WorkerLost, WorkerTimeout, Busy, Closed.
        """
        with self._exclusively():
            shape = tuple(self.batch_size)
            mask = reset_mask(td, shape)
            env_ids = self._all if mask is None else np.flatnonzero(mask.reshape(self.num_envs, -1).any(1))
            self._refuse_pending(env_ids)
            if isinstance(seed, int):
                self._set_seed(seed)
                seed = None
            if len(env_ids):
                self._prepare_resets(env_ids, seed, list_of_kwargs, kwargs)
                self._write_reset_masks(mask)
                self._reset_envs(env_ids)
            return self._rows.current(self._all)

    def step(self, td: TensorDictBase) -> TensorDictBase:
        """Step every env once.

        Args:
            td: batch `[N]` with the action (and state, where the envs have one). Gets the key `next`.

        Returns:
            `td` itself, with `next`: observation, reward, done, terminated, truncated (float32 reward
            `[N, 1]` and bool flags `[N, 1]` unless the envs' family says otherwise).

        Raises:
            ActionError, ResetNeeded: refused, nothing was stepped.
            EnvError: an env raised; the others were stepped, see `error.partial`.
            WorkerLost, WorkerTimeout, Busy, Closed.
        """
        with self._exclusively():
            column, _ = self._step_all(td, Op.STEP)
            td.set("next", self._rows.next_td(self._rows.next_leaves(column)))
            return td

    def step_and_maybe_reset(self, td: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        """Step every env once, and reset those that ended, in one round trip.

        Returns:
            `(td, root)`: `td` as `step` returns it, with the true last observations in `next`, and
            the batch to act on next: reset observations for the envs that ended, and `next` for the
            rest (the same tensors, as `step_mdp` shares them, when no env ended).
        """
        with self._exclusively():
            column, reset_ids = self._step_all(td, Op.STEP_RESET)
            leaves = self._rows.next_leaves(column)
            td.set("next", self._rows.next_td(leaves))
            return td, self._rows.root_after(leaves, column, reset_ids)

    def rollout(self, max_steps: int, policy: Any = None, **kwargs: Any) -> TensorDictBase:
        """Collect up to `max_steps` steps; see `RolloutRunner.run` for the arguments and the result."""
        self._check_usable()
        return self._rollouts.run(max_steps, policy, **kwargs)

    def rand_action(self, td: TensorDictBase | None = None) -> TensorDictBase:
        """Return `td` (or a new batch `[N]`) with uniformly drawn legal actions, from a generator of the root seed."""
        return self._sampler.fill(td, self.batch_size, self.device)

    # ---- send and recv -----------------------------------------------------------------------

    def send(self, td: TensorDictBase, env_ids: Any = None, *, maybe_reset: bool = True) -> None:
        """Step some envs without waiting for them.

        Args:
            td: batch `[k]` with their actions.
            env_ids: int `[k]`; default: td's own `env_ids`, else all envs.
            maybe_reset: also reset those that end, as `step_and_maybe_reset` does.

        Raises:
            ActionError, ResetNeeded, Busy: refused, nothing was sent.
        """
        with self._exclusively():
            ids = self._ids_of(td, env_ids)
            self._refuse_pending(ids)
            self._refuse_ended(ids)
            self._write_inputs(td, ids)
            op = Op.STEP_RESET if maybe_reset else Op.STEP
            columns = self._rows.next_columns(ids)
            self._pool.submit(ids, op, RING, columns, Flag.EACH)
            self._pending[ids] = True
            self._pending_op[ids] = op
            self._pending_column[ids] = columns

    def recv(self, min_envs: int | None = None, timeout_s: float | None = None) -> TensorDictBase:
        """Return the transitions of the first envs that are ready, the longest sent first.

        Args:
            min_envs: how many; default: all that were sent.
            timeout_s: seconds; None waits for ever (each step still has its own deadline, if one is set).

        Returns:
            Batch `[min_envs]` with `env_ids` (int64), the root observation and action of each step,
            and its `next`. Where those envs are after it: `current(env_ids)`. Own memory.

        Raises:
            TimeoutError: fewer were ready in time. Nothing is lost: receive again.
            EnvError, WorkerLost, WorkerTimeout: the envs concerned are no longer sent; the rest are.
        """
        with self._exclusively():
            sent = np.flatnonzero(self._pending)
            wanted = len(sent) if min_envs is None else min_envs
            if not 0 < wanted <= len(sent):
                raise ValueError(f"recv failed: expected 1 to {len(sent)} envs (those that were sent), got {wanted}.")
            ready = self._wait_ready(sent, wanted, timeout_s)[:wanted]
            return self._take_ready(ready)

    def current(self, env_ids: Any = None) -> TensorDictBase:
        """Return where envs are now: the root batch `[k]` to act on next, with their `env_ids`. Own memory."""
        with self._exclusively():
            ids = self._all if env_ids is None else np.atleast_1d(to_numpy(env_ids)).astype(np.int64)
            self._refuse_pending(ids)
            td = self._rows.current(ids)
            return td if env_ids is None else td.set(ENV_IDS, torch.from_numpy(ids.copy()))

    # ---- everything else ---------------------------------------------------------------------

    def set_seed(self, seed: int) -> int:
        """Use a new root seed: the next reset of every env begins its episode 0. Returns the seed."""
        with self._exclusively():
            self._refuse_pending(self._all)
            self._set_seed(seed)
            return seed

    def call(self, name: str, *args: Any, env_ids: Iterable[int] | None = None, **kwargs: Any) -> list[Any]:
        """Call a method of each env (dotted names reach further) and return the results in env order."""
        return self._ask("call", env_ids, name=name, args=args, kwargs=kwargs)

    def get(self, name: str, env_ids: Iterable[int] | None = None) -> list[Any]:
        """Return an attribute of each env, in env order."""
        return self._ask("get", env_ids, name=name)

    def set(self, name: str, value: Any, env_ids: Iterable[int] | None = None) -> None:
        """Set an attribute of each env: to `value`, or to `value[i]` if it is a list with one item per env."""
        ids = self._ids(env_ids)
        values = value if isinstance(value, list) and len(value) == len(ids) else [value] * len(ids)
        self._ask("set", ids, name=name, args=tuple(values))

    def render(self) -> list[Any]:
        """Return a picture of each env now, uint8 `[H, W, 3]`, or None where an env cannot draw itself."""
        return self._ask("render", None)

    def state_dict(self) -> dict[str, Any]:
        """Return each env's own state, `{"env0": ..., ...}`; raises EnvError where envs have none."""
        return {f"env{i}": state for i, state in enumerate(self._ask("state_dict", None))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what `state_dict` returned."""
        self._ask("load_state_dict", None, args=tuple(state[f"env{i}"] for i in range(self.num_envs)))

    def statistics(self) -> Statistics:
        """Return what was done so far, and each worker's load and memory."""
        self._check_usable()
        return count(self._pool, self.specs, self._ready_at, self._num_errors, self._num_interrupted)

    def worker_output(self, worker_id: int) -> str:
        """Return what a worker has printed, as far as it is kept (empty unless output is captured)."""
        self._check_usable()
        return self._pool.worker_output(worker_id)

    def close(self) -> None:
        """Close the envs and end the workers, within `options.close_timeout_s`. Idempotent, never raises."""
        if self._is_closed:
            return
        self._is_closed = True
        if os.getpid() == self._owner:
            self._finalizer()

    # ---- inside ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _exclusively(self) -> Any:
        """Hold the executor for one call; refuse a second thread, a closed executor, a forked copy."""
        if not self._turn.acquire(blocking=False):
            raise Busy("the call failed: another thread is using this executor. One caller at a time.")
        try:
            self._check_usable()
            if self._is_dirty:
                self._recover()
            yield
        finally:
            self._turn.release()

    def _check_usable(self) -> None:
        if self._is_closed:
            raise Closed("the call failed: this executor is closed. Make a new one.")
        if os.getpid() != self._owner:
            raise Closed("the call failed: this executor belongs to the process that made it. Make one in this process.")

    def _recover(self) -> None:
        """After an interrupt: let what is under way finish, and forget its answers."""
        idle = np.flatnonzero(~self._pending)
        self._pool.wait_some(idle, len(idle), self.options.reset_timeout_s)
        self._pool.take_outcome()
        self._is_dirty = False

    @contextlib.contextmanager
    def _interruptible(self, env_ids: np.ndarray) -> Any:
        """Wait inside this; if the wait is broken off, the envs' answers are lost: they need a reset."""
        try:
            yield
        except BaseException as error:
            if not isinstance(error, EnvherdError):
                self._is_dirty = True
            self._rows.mark_ended(env_ids)
            raise

    def _ids(self, env_ids: Iterable[int] | None) -> list[int]:
        return list(range(self.num_envs)) if env_ids is None else [int(i) for i in env_ids]

    def _ids_of(self, td: TensorDictBase, env_ids: Any) -> np.ndarray:
        if env_ids is None:
            env_ids = td.get(ENV_IDS, None)
        ids = self._all if env_ids is None else np.atleast_1d(to_numpy(env_ids)).astype(np.int64)
        if td.batch_size[:1] != (len(ids),) or len(np.unique(ids)) != len(ids):
            raise ValueError(f"send failed: expected one row for each of {len(ids)} different envs, got {td.batch_size}.")
        if len(ids) and (ids.min() < 0 or ids.max() >= self.num_envs):
            raise ValueError(f"send failed: expected env ids 0 to {self.num_envs - 1}, got {ids.tolist()}.")
        return ids

    def _refuse_pending(self, env_ids: np.ndarray) -> None:
        if self._pending[env_ids].any():
            busy = env_ids[self._pending[env_ids]].tolist()
            raise Busy(f"the call failed: envs {busy} still owe an answer. recv() them first.", env_ids=tuple(busy))

    def _refuse_ended(self, env_ids: np.ndarray) -> None:
        if self._rows.has_ended and self._rows.ended[env_ids].any():
            ended = env_ids[self._rows.ended[env_ids]].tolist()
            raise ResetNeeded(
                f"step failed: expected running envs, but envs {ended} have ended or were never reset. Reset them with a "
                f"'_reset' mask, or use step_and_maybe_reset. No env was stepped.",
                env_ids=tuple(ended),
            )

    def _write_inputs(self, td: TensorDictBase, env_ids: np.ndarray | None) -> None:
        """Check and write the actions of a batch; nothing is written unless all of it is legal."""
        if self._intake is not None:
            rows = None if env_ids is None else self._rows.row_of[env_ids]
            self._intake.write(self._intake.read(td, rows), rows)
            if self._intake.side_leaves:
                self._send_side_inputs(td, self._all if env_ids is None else env_ids)
            return
        ids = self._all if env_ids is None else env_ids
        checked = []
        for position, env_id in enumerate(ids.tolist()):
            intake = self._rows.intakes[self._rows.group_of[env_id]]
            rows = self._rows.row_of[[env_id]]
            checked.append((intake, intake.read(td[position : position + 1], rows), rows))
        for intake, values, rows in checked:
            intake.write(values, rows)

    def _send_side_inputs(self, td: TensorDictBase, env_ids: np.ndarray) -> None:
        assert self._intake is not None
        for position, env_id in enumerate(env_ids.tolist()):
            row = td[position]
            values = [_plain(row.get(leaf.key)) for leaf in self._intake.side_leaves]
            self._pool.prepare(messages.Prepare(env_id=env_id, side=values))

    def _step_all(self, td: TensorDictBase, op: Op) -> tuple[int, np.ndarray | None]:
        """Step all envs; return the column and the ids that ended, or None."""
        if td.batch_size[:1] != (self.num_envs,):
            raise ValueError(f"step failed: expected a batch of {self.num_envs} envs, got batch size {td.batch_size}.")
        if self._pending.any():
            self._refuse_pending(self._all)
        if self._rows.has_ended:
            self._refuse_ended(self._all)
        self._write_inputs(td, None)
        rows, pool = self._rows, self._pool
        column = rows.next_column()
        with self._interruptible(self._all):
            pool.submit_all(op, RING, column)
            pool.wait_all(self.options.step_timeout_s)
        if pool.outcome:
            self._settle_steps(self._all, op, np.full(self.num_envs, column), td)
        elif rows.has_interrupted:
            rows.interrupted.fill(False)
        ended = rows.stepped_all(column)
        if op == Op.STEP_RESET and ended is not None:
            rows.were_reset(ended, np.full(len(ended), column))
        return column, ended

    def _settle_steps(self, env_ids: np.ndarray, op: Op, columns: np.ndarray, td: TensorDictBase | None) -> None:
        """Deal with what happened besides the rows of a step; raises if that is for the caller to deal with."""
        rows, outcome = self._rows, self._pool.take_outcome()
        rows.note_side(outcome.side)
        rows.interrupted.fill(False)
        self._num_errors += len(outcome.faults)
        lost = [i for w in outcome.losses for i in self._pool.blueprint.blocks[w] if i in set(env_ids.tolist())]
        failed = [i for i, fault in outcome.faults.items() if fault["phase"] == "step"]
        at = dict(zip(env_ids.tolist(), columns.tolist(), strict=True))
        for env_id in [*lost, *failed]:
            source = {key: array.copy() for key, array in rows.latest_root(env_id).items()}
            rows.end_at(env_id, rows.ring_row(env_id, at[env_id]), source)
        error = self._first_error(outcome.losses, outcome.faults)
        if error is not None:
            self._raise_partial(error, env_ids, columns, [*lost, *outcome.faults])
        if lost:
            rows.interrupted[lost] = True
            self._num_interrupted += len(lost)
            if op == Op.STEP_RESET:
                ids = np.array(sorted(lost))
                self._submit_and_settle_resets(ids, np.array([at[i] for i in ids.tolist()]))

    def _first_error(self, losses: dict[int, EnvherdError], faults: dict[int, Any]) -> EnvherdError | None:
        """Return what to raise: a loss that is not made good, else the first env's fault; begins restarts."""
        for worker_id, loss in losses.items():
            if self.options.on_worker_loss != "restart":
                return loss
            try:
                self._pool.begin_restart(worker_id)
            except EnvherdError as error:
                return error
        return env_error(list(faults.values()), self._pool) if faults else None

    def _raise_partial(self, error: EnvherdError, env_ids: np.ndarray, columns: np.ndarray, dead: list[int]) -> None:
        """Raise an error that carries the rows of the envs that went on."""
        rows = self._rows
        rows.stepped(env_ids, columns)
        rows.mark_ended(dead)
        if len(env_ids) == self.num_envs and len(set(columns.tolist())) == 1:
            error.partial = rows.next_td(rows.next_leaves(int(columns[0])))
        raise error

    def _prepare_resets(
        self, env_ids: np.ndarray, seeds: Sequence[int] | None, per_env: Sequence[dict[str, Any]] | None, common: dict[str, Any]
    ) -> None:
        if seeds is None and not per_env and not common:
            return
        for given, name in ((seeds, "seed"), (per_env, "list_of_kwargs")):
            if given is not None and len(given) != self.num_envs:
                raise ValueError(f"reset failed: expected {self.num_envs} items in {name}, got {len(given)}.")
        for env_id in env_ids.tolist():
            options = {**common, **(per_env[env_id] if per_env else {})}
            seed = None if seeds is None else int(seeds[env_id])
            self._pool.prepare(
                messages.Prepare(env_id=env_id, seed=seed, has_seed=seeds is not None, options=options or None)
            )

    def _write_reset_masks(self, mask: np.ndarray | None) -> None:
        """Tell envs that are batches themselves which of their rows to reset."""
        for group in self._rows.slab.groups:
            target = group.inputs.get(("reset_mask",))
            if target is None:
                continue
            target[...] = True if mask is None else mask.reshape(target.shape)

    def _reset_envs(self, env_ids: np.ndarray) -> None:
        if len(env_ids) == self.num_envs:
            columns = np.full(self.num_envs, self._rows.next_column())
        else:
            columns = self._rows.next_columns(env_ids)
        self._submit_and_settle_resets(env_ids, columns)

    def _submit_and_settle_resets(self, env_ids: np.ndarray, columns: np.ndarray) -> None:
        """Reset envs at columns; replaces lost workers and tries again, as often as the options allow."""
        rows, pool = self._rows, self._pool
        while len(env_ids):
            with self._interruptible(env_ids):
                pool.submit(env_ids, Op.RESET, RING, columns)
                pool.wait_some(env_ids, len(env_ids), self.options.reset_timeout_s)
            outcome = pool.take_outcome()
            rows.note_side(outcome.side)
            self._num_errors += len(outcome.faults)
            lost = {i for w in outcome.losses for i in pool.blueprint.blocks[w]}
            dead = np.isin(env_ids, list(lost | set(outcome.faults)))
            rows.were_reset(env_ids[~dead], columns[~dead])
            rows.mark_ended(env_ids[dead])
            error = self._first_error(outcome.losses, outcome.faults)
            if error is not None:
                raise error
            rows.mark_ended(sorted(lost))
            env_ids, columns = env_ids[dead], columns[dead]

    def _wait_ready(self, sent: np.ndarray, wanted: int, timeout_s: float | None) -> np.ndarray:
        """Wait for envs that were sent; deals with losses on the way."""
        deadline = self.options.step_timeout_s if timeout_s is None else timeout_s
        end = None if deadline is None else time.monotonic() + deadline
        while True:
            left = None if end is None else max(0.0, end - time.monotonic())
            ready = self._pool.wait_some(sent, wanted, left, kill_late=timeout_s is None)
            if self._pool.outcome:
                self._settle_sent()
                ready = ready[~np.isin(ready, self._pool.outstanding())]
            if len(ready) >= wanted:
                return ready
            if timeout_s is not None and end is not None and time.monotonic() >= end:
                raise TimeoutError(
                    f"recv failed: expected {wanted} envs within {timeout_s:g} s, got {len(ready)}. Nothing is lost: recv again."
                )

    def _settle_sent(self) -> None:
        """Deal with what happened to envs that were sent: raise, or let a successor reset what was lost."""
        rows, outcome = self._rows, self._pool.take_outcome()
        rows.note_side(outcome.side)
        self._num_errors += len(outcome.faults)
        lost = np.array([i for w in outcome.losses for i in self._pool.blueprint.blocks[w]], np.int64)
        lost = lost[self._pending[lost]]
        error = self._first_error(outcome.losses, outcome.faults)
        if error is not None:
            dead = [*lost.tolist(), *outcome.faults]
            self._pending[dead] = False
            rows.mark_ended(dead)
            raise error
        columns = self._pending_column[lost]
        for env_id, column in zip(lost.tolist(), columns.tolist(), strict=True):
            source = {key: array.copy() for key, array in rows.latest_root(env_id).items()}
            rows.end_at(env_id, rows.ring_row(env_id, column), source)
        rows.interrupted[lost] = True
        self._num_interrupted += len(lost)
        to_reset = self._pending_op[lost] == Op.STEP_RESET
        if to_reset.any():
            self._pool.submit_later(lost[to_reset], Op.RESET, RING, columns[to_reset], Flag.EACH)

    def _take_ready(self, ready: np.ndarray) -> TensorDictBase:
        """Make the batch for envs that have answered, and take them off the list of those sent."""
        rows = self._rows
        columns = self._pending_column[ready]
        td = rows.current(ready)
        self._add_inputs(td, ready)
        td.set("next", rows.next_of(ready, columns))
        rows.interrupted[ready] = False
        self._pending[ready] = False
        ended = rows.stepped(ready, columns)
        resets = ended & (self._pending_op[ready] == Op.STEP_RESET)
        if resets.any():
            rows.were_reset(ready[resets], columns[resets])
        return td.set(ENV_IDS, torch.from_numpy(ready.copy()))

    def _add_inputs(self, td: TensorDictBase, env_ids: np.ndarray) -> None:
        if self._intake is None:
            return
        values = self._intake.current(self._rows.row_of[env_ids])
        for leaf, value in zip(self._intake.leaves, values, strict=True):
            td.set(leaf.key, torch.from_numpy(value))

    def _set_seed(self, seed: int) -> None:
        self.seed = draw_root_seed() if seed is None else int(seed)
        self._pool.seed(self.seed)
        self._sampler = ActionSampler(self.specs, self.seed)

    def _ask(self, what: str, env_ids: Iterable[int] | None, **question: Any) -> list[Any]:
        with self._exclusively():
            ids = self._ids(env_ids)
            answers = self._pool.ask(what, env_ids=ids, **question)
            return [_crossed(answers[i]) for i in ids]


def _close_pool(pool: Pool, owner: int) -> None:
    if os.getpid() == owner:
        pool.close()


def _crossed(answer: dict[str, Any]) -> Any:
    if "pickled" in answer:
        return pickle.loads(answer["pickled"])  # only with options.pickle_replies
    return answer["plain"]


def _plain(value: Any) -> Any:
    data = getattr(value, "data", value)
    return data.numpy() if isinstance(data, torch.Tensor) else data


__all__ = ["ENV_IDS", "RESET_KEY", "BatchedEnv"]
