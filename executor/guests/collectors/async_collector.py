"""`AsyncCollector`: collects from envs that advance independently, and acts for the envs that are ready.

Guarantees: every transition is in exactly one batch, in the order of its env's steps. A batch has exactly
`frames_per_batch` transitions. The rows of one env depend only on its actions, not on which env was ready first. No env
waits for another: the policy runs on the envs that are ready.
"""

import contextlib
import itertools
import math
import queue
import threading
import time
import traceback
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, MutableSet, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from envherd.executor.batched import BatchedEnv
from envherd.executor.batches.actions import to_numpy
from envherd.executor.batches.arguments import as_count, need_seconds
from envherd.executor.batches.fast_tensordict import get_leaf, without_grad
from envherd.executor.batches.transfer import (
    Lane,
    as_array,
    take_rows,
    to_device,
)
from envherd.executor.guests.collectors.collector import BatchIterator
from envherd.executor.guests.collectors.policy import Placed, Policy
from envherd.executor.keywords import names_right_keyword
from envherd.executor.processes.error_messages import log, with_thread
from envherd.executor.rollouts.policy_state import leaf_keys, own_leaves, run_policy
from envherd.executor.rollouts.storage import ContiguousRows
from envherd.executor.start.waiting import DeadlinePassed
from envherd.shm.interrupts import uninterrupted
from envherd.workers.errors import (
    Closed,
    EnvError,
    EnvherdError,
    WorkerLost,
    WorkerTimeout,
)

VALID = "valid"
#: The `policy_version` of a row that stands for a lost step.
LOST = -1
#: Entries of a policy's result that are not written into the rows.
_NOT_ROOT = ("next", VALID, "step", "policy_version")
Bound = Literal["envs", "policy", "learner", "collector"]
Layout = Literal["rows", "flat"]
#: Number of latest transitions whose waits count in `AsyncStatistics`.
_NUM_WAITS = 1 << 16


@dataclass(frozen=True)
class AsyncStatistics:
    """Statistics of an `AsyncCollector` so far.

    Attributes:
        frames: transitions that were received.
        wait_s: seconds spent waiting for envs.
        policy_s: seconds spent in the policy.
        other_s: seconds spent on handling data.
        learner_s: seconds between batches in which nothing was collected because the learner ran; with `in_background`,
            because all batches ahead were waiting for the learner.
        queue_p50_s: median of the seconds from an env's answer until the policy was called for it, over the latest
            65,536 transitions.
        queue_p99_s: the 99th percentile of these seconds.
        batch_sizes: number of envs in one call of the policy -> number of such calls.
        version: of the policy's present weights.
        lag_mean: mean staleness: the version when the batch was handed out minus the version that had acted.
        lag_max: largest staleness.
    """

    frames: int
    wait_s: float
    policy_s: float
    other_s: float
    learner_s: float
    queue_p50_s: float
    queue_p99_s: float
    batch_sizes: dict[int, int]
    version: int
    lag_mean: float
    lag_max: int

    @property
    def spent(self) -> dict[Bound, float]:
        """Seconds by activity."""
        return {
            "envs": self.wait_s,
            "policy": self.policy_s,
            "learner": self.learner_s,
            "collector": self.other_s,
        }

    @property
    def bound_by(self) -> Bound:
        """The activity that took most of the time."""
        return max(self.spent, key=self.spent.__getitem__)


class AsyncCollector(BatchIterator):
    """Iterates batches of `frames_per_batch` transitions: `[B, T]`, rows of T contiguous steps of one env, or `[B]`.

    An env that is a batch of rows adds its dimensions at the end: `[B, T, *B']`.
    Fast envs give more rows than slow ones. An episode that ends within a row is followed by the next one. Besides the
    entries of the envs and the policy, each transition has `env_ids` (int64), `step` (int64, the number of the env's
    step since the collector began; a step lost with an error leaves a gap) and `policy_version` (int64, of the weights
    that acted; -1 in a row that stands for a step lost in an interrupt).

    Args:
        env: the executor; nothing else may use it at the same time.
        policy: takes a root batch `[k]` of the envs that are ready (with `env_ids`) and returns it with the action;
            None draws random actions. Keys that it writes into `next` are in the root of the same env's next step.
        frames_per_batch: env steps per batch; rounded up to whole rows.
        layout: "rows" gives `[B, T]`; "flat" gives `[B]`, in the order in which the envs made their steps.
        steps_per_row: T; None for `frames_per_batch` / N, at least 1.
        total_frames: stop after this number of transitions, rounded up to whole batches; -1 never stops.
        min_batch: the policy waits for at least this number of envs.
        max_batch: the policy acts for at most this number of envs at once; None for all that are ready.
        deadline_s: seconds to wait for `max_batch` envs; then the policy acts once at least `min_batch` envs are ready.
            None acts as soon as `min_batch` are ready.
        batch_sizes: the only sizes of batches for the policy, ascending. A smaller batch is filled up with copies of
            its first row, and the entry `valid` (bool `[k]`) marks the rows of envs. The largest size limits
            `max_batch`. None allows any size.
        policy_device: device on which the policy runs; None does not move it. See `Collector`.
        storing_device: device of the batches; None for the CPU.
        primer: batch `[N]`, the policy's state at the beginning of an episode (a recurrent state).
        in_background: largest number of batches that a thread collects ahead while the caller learns; 1 is double
            buffering. The thread runs a copy of the policy, and `update_policy_` copies new weights to it. 0 collects
            in `collect`, with the policy itself. On CUDA the thread has its own stream, which does not wait for the
            learner's.
        postproc: applied to every batch.
        close_env: close the executor with the collector.

    Attributes:
        num_frames: transitions handed out so far.
        version: of the policy's weights, from 0; `update_policy_` increments it.

    Raises:
        ValueError: a number is out of range, the envs are of several kinds or have leaves without a fixed shape, or
            the policy cannot be copied and `in_background` is above 0.
    """

    _has_begun = _is_closing = False
    _num_received = 0
    _lag_sum = 0.0
    _lag_max = 0

    @names_right_keyword
    def __init__(  # noqa: PLR0913  # a collector's
        self,
        env: BatchedEnv,
        policy: Policy | None = None,
        *,
        frames_per_batch: int,
        layout: Layout = "rows",
        steps_per_row: int | None = None,
        total_frames: int = -1,
        min_batch: int = 1,
        max_batch: int | None = None,
        deadline_s: float | None = None,
        batch_sizes: Sequence[int] | None = None,
        policy_device: torch.device | str | None = None,
        storing_device: torch.device | str | None = None,
        primer: TensorDictBase | None = None,
        in_background: int = 0,
        postproc: Callable[[TensorDictBase], TensorDictBase] | None = None,
        close_env: bool = True,
    ) -> None:
        if not hasattr(env, "recv"):
            raise TypeError(
                f"AsyncCollector failed: expected an executor first, got {env!r}. Write (env, policy)."
            )
        super().__init__(
            env,
            policy,
            frames_per_batch=frames_per_batch,
            total_frames=total_frames,
            policy_device=policy_device,
            storing_device=storing_device,
            primer=primer,
            postproc=postproc,
            close_env=close_env,
        )
        steps_per_row = as_count(
            "AsyncCollector",
            "steps_per_row",
            steps_per_row,
            or_none=True,
        )
        in_background = as_count(
            "AsyncCollector",
            "in_background",
            in_background,
            least=0,
        )
        need_seconds("AsyncCollector", "deadline_s", deadline_s)
        num_envs = env.num_envs
        _check_env(env)
        self._sizes = _sizes(batch_sizes)
        self._limits = _limits(
            min_batch,
            max_batch,
            deadline_s,
            self._sizes,
            num_envs,
        )
        self._num_steps = _steps_per_row(
            layout,
            steps_per_row,
            self.frames_per_batch,
            num_envs,
        )
        self._is_flat = layout == "flat"
        self.env = env
        self.num_rows = math.ceil(self.frames_per_batch / self._num_steps)
        self.frames_per_batch = self.num_rows * self._num_steps
        self.version = 0
        self._primer = None if primer is None else primer.to("cpu")
        self._placed = (
            None
            if policy is None
            else Placed(policy, self._policy_device, is_apart=in_background > 0)
        )
        # Reentrant: the policy may call `update_policy_`.
        self._policy_lock = threading.RLock()
        acting_on = env.device if self._placed is None else self._placed.device
        # The stream of a thread; without one, the caller's.
        self._lane = Lane(acting_on if in_background else None)
        self._rows = ContiguousRows(
            num_envs,
            self._num_steps,
            self.num_rows + num_envs,
            [leaf.key for leaf in env.specs[0].done],
        )
        self._steps = np.zeros(num_envs, np.int64)
        # An error has reported the loss of that step.
        self._is_owed, self._is_reported = np.zeros((2, num_envs), bool)
        self._state: TensorDictBase | None = self._primer
        self._input_keys = [leaf.key for leaf in (*env.spec.action, *env.spec.state)]
        self._spent = dict.fromkeys(("wait", "policy", "learner", "other"), 0.0)
        self._since = time.perf_counter()
        self._batch_sizes: Counter[int] = Counter()
        self._answered_ns = env.engine.pool.slab.words["answered_ns"]
        self._sent_ns = np.zeros(num_envs, np.int64)
        # How long answers have waited for the policy, in ns.
        self._waits: deque[int] = deque(maxlen=_NUM_WAITS)
        dependents = env.engine.guard.dependents
        self._background = (
            _Background(self._collect_and_drop, in_background, dependents)
            if in_background
            else None
        )

    # ---- what users call ---------------------------------------------------------------------

    def collect(self) -> TensorDictBase:
        """Return the next batch, `[B, T]` with time last or `[B]`; the caller owns its memory.

        An exception in between, such as that of a signal handler, does not lose the batch, unless it comes in
        `postproc`.

        Raises:
            Closed: it was closed.
            EnvError, WorkerLost, WorkerTimeout: the transition concerned is lost, and its env begins a new episode. All
                other transitions are in later batches. Call again.
        """
        if self._is_closing:
            raise Closed(
                "collect failed: expected an open AsyncCollector, got one that is closed. Make a new one."
            )
        data = self._collect() if self._background is None else self._background.first()
        versions = as_array(data.get("policy_version"))
        lag = self.version - versions[versions != LOST]
        # A batch may have no lag: all its rows stand for lost steps.
        mean = float(lag.sum()) / max(1, len(lag))
        largest = int(lag.max(initial=self._lag_max))
        if self._storing_device is not None:
            data = to_device(data, self._storing_device)
        # No signal handler runs between a drop and the return: Python runs them at calls and in loops alone.
        if self._background is None:
            self._rows.drop(self.num_rows)
        else:
            self._background.drop()
        self.num_frames += self.frames_per_batch
        self._lag_sum += mean
        self._lag_max = largest
        return data if self._postproc is None else self._postproc(data)

    def update_policy_(
        self,
        parameters: TensorDictBase | Mapping[str, Any] | None = None,
    ) -> int:
        """Make the policy act with new weights from its next call on; return their version.

        Args:
            parameters: a state dict, or a TensorDict of parameters; None for the present weights of the original
                policy.
        """
        with self._policy_lock, self._lane.written_to():
            if self._placed is not None:
                if parameters is None:
                    self._placed.follow()
                elif isinstance(parameters, TensorDictBase):
                    parameters.data.to_module(self.policy, inplace=True)
                else:
                    self.policy.load_state_dict(parameters)
            self.version += 1
            return self.version

    def statistics(self) -> AsyncStatistics:
        """Return the statistics so far."""
        spent = self._spent
        num_batches = self.num_frames // self.frames_per_batch
        # A copy: the thread may add some meanwhile.
        median, late = np.percentile(self._waits.copy() or [0], [50, 99]) / 1e9
        return AsyncStatistics(
            frames=self._num_received,
            wait_s=spent["wait"],
            policy_s=spent["policy"],
            other_s=spent["other"],
            learner_s=spent["learner"],
            queue_p50_s=float(median),
            queue_p99_s=float(late),
            batch_sizes=dict(sorted(self._batch_sizes.items())),
            version=self.version,
            lag_mean=self._lag_sum / max(1, num_batches),
            lag_max=self._lag_max,
        )

    def close(self) -> None:
        """End the thread, and close the executor unless it is the caller's (`close_env=False`). Idempotent.

        It waits for envs that still step, up to `options.close_timeout_s`. If an env of the caller's executor has not
        answered by then, it logs a warning with the env's id, and leaves it under way.
        """
        self._is_closing = True
        end = time.monotonic() + self.env.options.close_timeout_s
        has_ended = True
        if self._background is not None:
            self._background.begin_close()
            has_ended = self._background.join(end - time.monotonic())
        if self._closes_env:
            self.env.close()  # also ends a thread's wait for a hanging env
            # The thread needs some time to see that its executor is closed.
            has_ended = self._background is None or self._background.join(1.0)
        if not has_ended:
            self._warn_of_close(
                "Its thread ends when they answer, or when the policy returns"
            )
        elif not self.env.is_closed:
            self._receive_rest(end)

    def _receive_rest(self, end: float) -> None:
        """Leave the caller an executor without pending envs, if they answer in time."""
        while self._has_sent():
            left_s = max(0.0, end - time.monotonic())
            with contextlib.suppress(
                EnvError,
                WorkerLost,
                WorkerTimeout,
                DeadlinePassed,
            ):
                # Failed envs are no longer under way.
                self.env.recv(1, left_s, max_envs=self.env.num_envs)
            if not left_s and self._has_sent():
                self._warn_of_close("Receive them with recv()")
                return

    def _warn_of_close(self, what_next: str) -> None:
        log.warning(
            "close failed: expected all envs to answer within %g s (close_timeout_s), got no answer from envs %s. %s, "
            "or close the executor. ExecutorOptions(step_timeout_s=...) ends envs that hang.",
            self.env.options.close_timeout_s,
            self.env.engine.states.under_way.nonzero()[0].tolist(),
            what_next,
        )

    shutdown = close
    """The same under TorchRL's name."""

    # ---- collecting --------------------------------------------------------------------------

    @without_grad
    def _collect(self) -> TensorDictBase:
        """Collect the next batch; it stays the next one until its rows are dropped."""
        with self._lane.entered():
            self._charge("learner")
            self._begin_idle()
            while len(self._rows.full) < self.num_rows:
                if self._is_closing:
                    raise Closed(
                        "collect failed: the AsyncCollector was closed meanwhile. Make a new one."
                    )
                try:
                    self._turn()
                except EnvherdError:
                    self._is_reported |= (
                        self._is_owed & ~self.env.engine.states.under_way
                    )
                    raise
            data = self._rows.first(self.num_rows)
            if self._is_flat:
                data = data[:, 0]
            self._charge("other")
            return data

    def _collect_and_drop(self) -> TensorDictBase:
        data = self._collect()
        self._rows.drop(self.num_rows)
        return data

    def _begin_idle(self) -> None:
        """Act for the envs without a command: all at first, later those that have failed."""
        env = self.env
        if not self._has_begun:
            if not env.is_resumed:
                env.reset()
            self._has_begun = True
            env.is_resumed = False
        self._rows.repair()
        self._has_sent()
        idle = np.flatnonzero(~self.env.engine.states.under_way)
        # Owed: acted for, but not yet in the rows. If such an env is idle, an interrupt has lost its transition.
        is_lost = self.env.engine.states.needs_reset | self._is_owed
        if is_lost[idle].any():
            failed = idle[is_lost[idle]]
            mask = torch.zeros(env.batch_size, dtype=torch.bool)
            mask[torch.from_numpy(failed)] = True
            handed_out = self._rows.cut(failed)
            env.reset(TensorDict({"_reset": mask}, env.batch_size))
            self._renew(failed)
            self._stand_in(handed_out[(self._is_owed & ~self._is_reported)[handed_out]])
            self._steps[failed] += self._is_owed[failed]  # count the lost step
            self._is_owed[failed] = self._is_reported[failed] = False
        for start in range(0, len(idle), self._limits.most):
            self._act(idle[start : start + self._limits.most])

    def _stand_in(self, env_ids: np.ndarray) -> None:
        """Write rows for steps that an interrupt has lost, after steps that were handed out and cannot be marked."""
        if len(env_ids):
            self._rows.stand_in(env_ids, policy_version=LOST)
            self._rows.advance(env_ids)

    def _has_sent(self) -> bool:
        """Return whether envs are under way, after recovery from an interrupt."""
        with self.env.engine.guard:
            return bool(self.env.engine.states.under_way.any())

    def _turn(self) -> None:
        """Receive the ready envs, and act for them."""
        min_batch, max_batch, deadline_s = self._limits
        self._charge("other")
        # Envs that have failed are not under way, so there may be fewer than `min_batch`.
        least = min(
            min_batch,
            int(np.count_nonzero(self.env.engine.states.under_way)),
        )
        try:
            td = self.env.recv(
                least,
                deadline_s,
                max_envs=max(least, max_batch),
                with_root=False,
            )
        except DeadlinePassed:
            return
        finally:
            self._charge("wait")
        following = get_leaf(td, "next")
        env_ids = to_numpy(get_leaf(td, "env_ids")).reshape(len(td), -1)[:, 0]
        self._rows.write(env_ids, following, is_next=True)
        if self._state is not None:
            self._renew(env_ids, following.get("done").squeeze(-1).cpu())
        self._rows.advance(env_ids)
        self._steps[env_ids] += 1
        self._is_owed[env_ids] = False
        self._num_received += len(env_ids)
        self._act(env_ids, td)

    def _act(self, env_ids: np.ndarray, received: TensorDictBase | None = None) -> None:
        """Act for some envs and send them; `received` is their batch if they have just been received."""
        root = self.env.current(
            env_ids if received is None else received.get("env_ids")
        )
        self._charge("other")
        if received is not None:
            answered_ns = self._answered_ns[env_ids]
            # A lost worker has not answered since the last send.
            has_answered = answered_ns > self._sent_ns[env_ids]
            waits = time.perf_counter_ns() - answered_ns[has_answered]
            self._waits.extend(waits.tolist())
        acted, version = self._acted(root, env_ids)
        self._charge("policy")
        written = get_leaf(acted, "next")
        own = None if written is None else own_leaves(written, self.env.engine.known)
        if any(get_leaf(acted, key) is not None for key in _NOT_ROOT):
            acted = acted.exclude(*_NOT_ROOT)
        self._rows.write(
            env_ids,
            acted,
            is_next=False,
            step=self._steps[env_ids],
            policy_version=version,
        )
        # Until here nothing has changed but a row that the policy can write again; from here on the step can be lost.
        self._is_owed[env_ids] = True
        if own is not None:
            self._keep_state(env_ids, own)
        self._sent_ns[env_ids] = time.perf_counter_ns()
        # Without what the policy adds, which the rows have already.
        given = acted.select(*self._input_keys, strict=False)
        # The refusal names what is there.
        if len(leaf_keys(given)) < len(self._input_keys):
            given = acted
        self.env.send(given, env_ids)
        self._charge("other")

    def _acted(
        self,
        root: TensorDictBase,
        env_ids: np.ndarray,
    ) -> tuple[TensorDictBase, int]:
        self._batch_sizes[len(env_ids)] += 1
        if self._state is not None:
            root.update(self._state[torch.from_numpy(env_ids)])
        if self._placed is None:
            return self.env.rand_action(root), self.version
        size = next(
            (size for size in self._sizes if size >= len(env_ids)),
            len(env_ids),
        )
        padded = root if not self._sizes else _padded(root, size)
        with self._policy_lock:
            acted = run_policy(self._placed, padded)
            # With the lock still held: it is that of the weights that have acted.
            version = self.version
        return (acted[: len(env_ids)] if len(acted) != len(env_ids) else acted), version

    # ---- the policy's state ------------------------------------------------------------------

    def _keep_state(self, env_ids: np.ndarray, own: TensorDictBase) -> None:
        """Keep the policy's state for the next step of some envs, batch `[k]`, on the CPU."""
        own = own.to("cpu")
        if self._state is None or self._state is self._primer:
            with torch.inference_mode(mode=False):  # it is written to later
                self._state = (
                    own[:1]
                    .expand(self.env.num_envs, *own.batch_size[1:])
                    .clone()
                    .zero_()
                )
                if self._primer is not None:
                    self._state.update(self._primer.clone())
        self._state[torch.from_numpy(env_ids)] = own

    def _renew(self, env_ids: np.ndarray, done: torch.Tensor | bool = True) -> None:  # noqa: FBT001, FBT002
        """Set the policy's state to the primer where episodes begin, if there is a primer.

        Args:
            env_ids: int64 `[k]`.
            done: bool `[k, *B]`, the rows that have ended, or all.
        """
        if (
            self._primer is not None
            and self._state is not None
            and self._state is not self._primer
        ):
            mask = torch.zeros(self.env.batch_size, dtype=torch.bool)
            mask[torch.from_numpy(env_ids)] = done
            for key in leaf_keys(self._primer):
                self._state.get(key)[mask] = self._primer.get(key)[mask]

    def _charge(self, what: str) -> None:
        """Add the time since the last call to an activity."""
        now = time.perf_counter()
        self._spent[what] += now - self._since
        self._since = now


class _Limits(NamedTuple):
    """When the policy acts.

    Attributes:
        least: number of envs.
        most: number of envs.
        deadline_s: seconds to wait for `most`, or None.
    """

    least: int
    most: int
    deadline_s: float | None


class _Made(NamedTuple):
    """A batch, or the error in its place, and its number."""

    number: int
    found: TensorDictBase | BaseException


class _Background:
    """Collects in a thread, at most `num_ahead` batches ahead of the caller.

    An error takes the place of a batch, and the thread continues after it, unless it is `Closed`. A batch stays in the
    queue until `drop`, so that an interrupt of the caller does not lose it. The thread holds the collector only while
    it collects, and ends when the collector is freed or closed, or its executor is closed.

    Args:
        collect: method of the collector.
        num_ahead: see the class.
        dependents: of the executor's call guard.
    """

    def __init__(
        self,
        collect: Any,
        num_ahead: int,
        dependents: MutableSet[Any],
    ) -> None:
        self._collect = weakref.WeakMethod(collect)
        self._num_ahead = num_ahead
        weakref.finalize(collect.__self__, self.begin_close).atexit = False
        dependents.add(self)
        self._batches: deque[_Made] = deque()
        self._taken = -1  # number of the batch that is being handed out
        # Tokens are hints to look at the batches again. (An interrupt inside `Event.set` would keep its lock.)
        self._has_room: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._has_more: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._is_closing = False
        self._thread: threading.Thread | None = None

    def first(self) -> TensorDictBase:
        """Return the next batch, which stays in the queue, or remove and raise what was raised in its place."""
        if self._thread is None:
            thread = threading.Thread(
                target=self._run,
                name="envherd-collector",
                daemon=True,
            )
            # A thread that the system refuses is started by the next call.
            with uninterrupted():
                with_thread("AsyncCollector", thread.start)
                self._thread = thread
        self._has_room.put(None)
        _drain(self._has_more)
        while not self._batches:
            self._has_more.get()
        self._taken, found = self._batches[0]
        self._has_room.put(None)
        # The last one, which stays; what is raised holds the collector.
        if isinstance(found, Closed):
            raise Closed(str(found))
        if isinstance(found, BaseException):
            self.drop()
            raise found
        return found

    def drop(self) -> None:
        """Remove the next batch; without a call of a C function, in which a signal handler could run."""
        del self._batches[0]

    def _run(self) -> None:
        numbers = itertools.count()
        while True:
            _drain(self._has_room)
            # Looked at after the token was dropped that announces it.
            if self._is_closing:
                break
            if (
                sum(one.number != self._taken for one in tuple(self._batches))
                >= self._num_ahead
            ):
                self._has_room.get()
                continue
            found = self._collected()
            self._put(next(numbers), found)
            if isinstance(found, Closed):
                return
        self._put(
            next(numbers),
            Closed(
                "collect failed: the AsyncCollector was closed meanwhile. Make a new one."
            ),
        )

    def _collected(self) -> TensorDictBase | BaseException:
        """Return the next batch, or what was raised in its place, which does not hold the collector."""
        collect = self._collect()
        if collect is None:
            return Closed("collect failed: the AsyncCollector was freed.")
        try:
            return collect()
        except BaseException as error:
            raised: BaseException | None = error
            while raised is not None:
                traceback.clear_frames(raised.__traceback__)
                raised = raised.__context__
            return error
        finally:
            del collect  # the traceback also holds this frame

    def _put(self, number: int, found: TensorDictBase | BaseException) -> None:
        self._batches.append(_Made(number, found))
        self._has_more.put(None)

    def begin_close(self) -> None:
        """Begin no further batch. May be called by a destructor or a signal handler, more than once."""
        self._is_closing = True
        self._has_room.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait until the thread has ended, up to `timeout_s`; it first receives the envs that it waits for."""
        if self._thread is None or self._thread is threading.current_thread():
            return True
        self._thread.join(max(0.0, timeout_s))
        return not self._thread.is_alive()


def _drain(tokens: queue.SimpleQueue[None]) -> None:
    """Drop all tokens; called by their only reader."""
    while not tokens.empty():
        tokens.get()


def _steps_per_row(
    layout: str,
    asked: int | None,
    frames_per_batch: int,
    num_envs: int,
) -> int:
    """Return T; 1 for flat batches."""
    if layout not in get_args(Layout):
        raise ValueError(
            f"AsyncCollector failed: expected layout to be one of {get_args(Layout)}, got {layout!r}."
        )
    if layout == "flat":
        if asked is not None:
            raise ValueError(
                f"AsyncCollector failed: expected no steps_per_row with layout='flat', got {asked}."
            )
        return 1
    return asked or max(1, frames_per_batch // num_envs)


def _sizes(asked: Any) -> list[int]:
    """Return the sizes of the policy's batches, ascending; none if any is allowed."""
    if asked is None:
        return []
    if isinstance(asked, str) or not isinstance(asked, Iterable):
        raise TypeError(
            f"AsyncCollector failed: expected batch_sizes as a list of ints or None, got {asked!r}."
        )
    return sorted(
        as_count("AsyncCollector", "each of batch_sizes", size) for size in asked
    )


def _limits(
    min_batch: int,
    max_batch: int | None,
    deadline_s: float | None,
    sizes: Sequence[int],
    num_envs: int,
) -> _Limits:
    """Return when the policy acts, after a check of the arguments."""
    most = min([num_envs, *sizes[-1:]])
    asked = as_count("AsyncCollector", "max_batch", max_batch, or_none=True)
    if asked is not None:
        if asked > num_envs:
            raise ValueError(
                f"AsyncCollector failed: expected max_batch of at most {num_envs} (envs), got {asked}."
            )
        most = min(most, asked)
    least = as_count("AsyncCollector", "min_batch", min_batch)
    if least > most:
        raise ValueError(
            f"AsyncCollector failed: expected min_batch of at most {most} (max_batch), got {least}."
        )
    return _Limits(least, most, deadline_s)


def _check_env(env: BatchedEnv) -> None:
    num_kinds = len(env.engine.pool.plan.groups)
    if num_kinds != 1:
        raise ValueError(
            f"AsyncCollector failed: expected envs of one kind, got {num_kinds}."
        )
    side = [leaf for leaf in env.specs[0].leaves() if leaf.is_side]
    if side:
        raise ValueError(
            f"AsyncCollector failed: expected leaves of fixed shapes, got {side[0]}. Leave it out."
        )


def _padded(root: TensorDictBase, size: int) -> TensorDictBase:
    """Return a batch filled up to a size with copies of its first row, with `valid`, which marks the other rows."""
    count = len(root)
    padded = root
    if size > count:
        padded = take_rows(root, [*range(count), *[0] * (size - count)])
    valid = torch.arange(size, device="cpu") < count
    return padded.set(
        VALID,
        valid.reshape(size, *(1 for _ in root.batch_size[1:]))
        .expand(padded.batch_size)
        .clone(),
    )
