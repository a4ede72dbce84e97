"""The pool of hosts: gives them commands and waits for their answers. It takes the place of a pool of processes.

To flights, a lost host is the loss of all its workers. A worker is lost only if its host does not replace it.

Guarantees:
- Every wait ends at the latest when a host is found to be gone or silent.
- Answers are taken in the thread of the caller, one at a time. An answer whose handling was interrupted is handled
  again.
- A successor of a lost host starts where Ray has room, in its reservation. No call waits for it but those of its envs.
  A host that is lost repeatedly is finally not replaced.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import ray

from envherd.executor.cluster.host import versions
from envherd.executor.cluster.messages import ENV_WORDS, Answer, Order, Report, Share
from envherd.executor.cluster.ray_cluster import (
    COME_UP_S,
    Connection,
    Place,
    check_versions,
    living_nodes,
    release,
    reserve,
    start_hosts,
)
from envherd.executor.cluster.rows import read, write
from envherd.executor.cluster.shares import bundles_for, divide
from envherd.executor.monitor.statistics import WorkerStatistics
from envherd.executor.options import ExecutorOptions
from envherd.executor.pools.blueprint import spread
from envherd.executor.pools.command_words import CommandWords
from envherd.executor.pools.crew import Blueprint
from envherd.executor.pools.error_messages import another_spec, merge_answers, not_replaced
from envherd.executor.pools.replies import Outcome
from envherd.executor.pools.restarts import Restarts
from envherd.executor.pools.slab_pool import SlabPool
from envherd.executor.protocol.positions import Places
from envherd.shm.interrupts import uninterrupted
from envherd.shm.slab import Slab, plan_slab
from envherd.shm.specs import EnvSpec
from envherd.workers import messages, registries
from envherd.workers.errors import EnvherdError, WorkerLost, WorkerTimeout
from envherd.workers.protocol import RESET, Flag, Op

log = logging.getLogger("envherd")

#: Seconds between checks of hosts that owe an answer.
_LOOK_S = 1.0
#: Characters of Ray's error texts that are kept.
_MAX_LENGTH = 800
_LOSSES = (WorkerLost, WorkerTimeout)


class Call:
    """A call of a host's method. An interrupt comes before it is made, or after the host has it among its calls.

    Attributes:
        host, method: of which host.
        env_ids: of the batch, int64 `[k]`, which an order concerns; None for another call.
        ref: Ray's reference of the answer; None if the host was lost before.
        answer: of calls without envs; may be an error.
        is_answered: the answer was taken.
        is_lost: it is that its host was lost.
    """

    answer: Any = None
    ref: Any = None
    is_answered = is_lost = False

    def __init__(self, host: Host, method: str, args: tuple[Any, ...], env_ids: np.ndarray | None) -> None:
        self.host, self.method, self.env_ids = host, method, env_ids
        if host.loss is not None:
            self.lose(host.loss)
            return
        with uninterrupted():
            self.ref = host.place.call(method, *args)
            host.calls.append(self)

    def lose(self, loss: EnvherdError) -> None:
        """Answer it by the loss of its host."""
        self.answer, self.is_answered, self.is_lost = loss, True, True


class Host:
    """A host, and its envs.

    Attributes:
        index: among the hosts.
        share: of the host.
        place: where it runs.
        report: of the host.
        env_ids: int64 `[n]`, of the batch.
        first: the first of them.
        worker_ids: of the batch.
        loss: the error that describes its loss; None while it runs, or is being started.
        is_building: it has not yet built its envs.
        refusal: why it could not be started, until that was raised.
        calls: those without an answer, in their order.
        tally: see `Answer`.
    """

    is_building = True
    loss: EnvherdError | None = None
    refusal: EnvherdError | None = None
    tally: Any = 0

    def __init__(self, index: int, share: Share, place: Place, report: Report) -> None:
        self.index, self.share, self.place, self.report = index, share, place, report
        self.first = share.first_env_id
        self.env_ids = np.arange(self.first, self.first + len(share.blueprint.factories))
        self.worker_ids = range(share.first_worker_id, share.first_worker_id + len(share.blueprint.blocks))
        self.calls: list[Call] = []
        self._ping: Any = None

    def start(self) -> None:
        """Start a host in the place of this one, which is lost; it has no envs yet."""
        self._ping, self.loss, self.is_building = None, None, True
        self.place.start_host()

    def silence(self, node_timeout_s: float, placement_timeout_s: float) -> WorkerLost | None:
        """Return the loss of a host that has been silent for too long; ping it, or see whether it has answered."""
        if self._ping is None:
            self._ping, self._pinged_at = self.place.call("ping"), time.monotonic()
        elif ray.wait([self._ping], timeout=0)[0]:
            ping, self._ping = self._ping, None
            try:
                ray.get(ping)
            except ray.exceptions.RayError as error:
                return self.gone(error)
        else:
            silent_s = time.monotonic() - self._pinged_at
            if self.is_building and not self.place.is_there() and silent_s > placement_timeout_s:
                self.refusal = self.lost(f"no living node has had room for its share for {placement_timeout_s:g} s")
                return self.refusal
            if silent_s > (limit := COME_UP_S if self.is_building else node_timeout_s):
                return self.lost(f"it gave no sign of life for {limit:g} s")
        return None

    def gone(self, error: BaseException) -> WorkerLost:
        """Return the loss of a host that Ray says is gone."""
        text = " ".join(str(getattr(error, "cause", None) or error).split())
        return self.lost(f"{type(error).__name__}: {text[:_MAX_LENGTH]}")

    def lost(self, why: str) -> WorkerLost:
        """Return the error for a lost host."""
        first, last = self.worker_ids[0], self.worker_ids[-1]
        advice = " ExecutorOptions(on_worker_loss='restart') moves a lost node's envs to another."
        return WorkerLost(
            f"the call failed: {self.report.place} is lost with workers {first}-{last} (envs {self.env_ids[0]}-"
            f"{self.env_ids[-1]}): {why}." + ("" if self.share.options.on_worker_loss == "restart" else advice),
            env_ids=tuple(self.env_ids.tolist()),
            worker_id=first,
            node_id=self.report.node_id,
            phase="call",
        )


class Hosts(SlabPool):
    """The hosts of one executor; see `Pool`.

    Args:
        address: of the cluster.
        timeouts: seconds without a sign of life after which a host counts as lost, and seconds to wait for room.
        options: of the executor.

    Attributes:
        all: every host, in the order of its envs.
        interrupted: bool `[N, 1]`, whether a loss on its host has interrupted the latest row of an env.
    """

    why_python = ("the envs run in a Ray cluster",)
    holds_storages = False
    recyclable = None
    num_recycled = 0  # by this pool

    def __init__(self, address: str | None, timeouts: tuple[float, float], options: ExecutorOptions) -> None:
        self.all: list[Host] = []
        self.places: list[Place] = []
        self.options = options
        self.outcome = Outcome()
        self.lost: dict[int, EnvherdError] = {}
        self.num_losses = 0
        self._timeouts, self._looked_at = timeouts, time.monotonic()
        self._restarts = Restarts(options)
        self._prepared: dict[int, messages.Prepare] = {}
        self._is_up = self._is_closed = False
        self._connection = Connection(address)

    # ---- the start ---------------------------------------------------------------------------

    def start(
        self,
        blueprint: Blueprint,
        bundles: tuple[int | None, Mapping[str, float] | Sequence[Mapping[str, float]] | None],
        envs_per_node: Sequence[int] | None,
        num_workers: int | None,
        where: tuple[str, Mapping[str, Any] | None],
    ) -> None:
        """Start the hosts and make them build their envs; see `RayParallelEnv`.

        Args:
            blueprint: of the whole batch; its blocks are not used.
            bundles: number of hosts, and resources of each.
            envs_per_node: of each host; None for a number in proportion to its processors.
            num_workers: of each host; None for one per processor.
            where: strategy and runtime environment; see `ray_cluster.reserve`.

        Raises:
            ClusterError, FactoryError, WorkerLost, WorkerTimeout: the caller must call `close`.
        """
        self.num_envs = num_envs = len(blueprint.factories)
        asked = bundles_for(living_nodes(), num_envs, *bundles)
        self.places = reserve(asked, self._timeouts[1], *where)
        reports = start_hosts(self.places)
        weights = [bundle.get("CPU", 0) or report.cores for report, bundle in zip(reports, asked, strict=True)]
        counts = divide(num_envs, weights) if envs_per_node is None else list(envs_per_node)
        if len(counts) != len(reports) or sum(counts) != num_envs or min(counts) < 1:
            raise ValueError(
                f"RayParallelEnv failed: expected envs_per_node to spread {num_envs} envs over {len(reports)} nodes, "
                f"at least one each, got {counts}."
            )
        first_env, blocks = 0, list[tuple[int, ...]]()
        for index, (count, report, weight) in enumerate(zip(counts, reports, weights, strict=True)):
            own = spread(count, min(count, num_workers or max(1, min(report.cores, int(weight) or report.cores))))
            span, options = slice(first_env, first_env + count), self.options
            share = Share(
                first_env_id=first_env,
                first_worker_id=len(blocks),
                blueprint=dataclasses.replace(
                    blueprint, factories=blueprint.factories[span], env_kwargs=blueprint.env_kwargs[span], blocks=own
                ),
                registered=registries.collect(),
                options=dataclasses.replace(options, poison=False, first_env_id=options.first_env_id + first_env),
            )
            self.all.append(Host(index, share, self.places[index], report))
            blocks += [tuple(first_env + env_id for env_id in block) for block in own]
            first_env += count
        self.blueprint = dataclasses.replace(blueprint, blocks=tuple(blocks))
        self.num_workers, self.serving = len(blocks), range(len(blocks))
        self.worker_of = np.repeat(self.serving, [*map(len, blocks)])
        self.specs: list[EnvSpec] = []
        for host, (specs, _) in self._each("build", lambda host: (host.share,)):
            self.specs += specs
            host.is_building = False
        self.plan = plan_slab(self.specs, self.num_workers, self.options.num_frames)
        self.slab = Slab(self.plan, np.zeros(self.plan.nbytes, np.uint8))
        self._layout = Places(self.plan)
        self.words = CommandWords(self.slab)
        self._ops, self._columns = (np.zeros(num_envs, np.int64) for _ in range(2))
        self._is_prepared = np.zeros(num_envs, bool)
        self.interrupted = np.zeros((num_envs, 1), bool)
        self._is_up = True

    # ---- commands ----------------------------------------------------------------------------

    def submit_all(self, op: Op, target: int, column: int, reset_ids: np.ndarray | None = None) -> None:
        ops = np.full(self.num_envs, int(op))
        if reset_ids is not None:
            ops[reset_ids] = RESET
        self.submit(np.arange(self.num_envs), ops, target, np.full(self.num_envs, column))

    def submit(
        self,
        env_ids: np.ndarray,
        op: Op | np.ndarray,
        target: int,  # noqa: ARG002
        columns: np.ndarray,
        flags: int = 0,
    ) -> None:
        """Send hosts a command for some envs; `target` is the ring."""
        self._ops[env_ids] = op if isinstance(op, np.ndarray) else int(op)
        self._columns[env_ids] = columns
        self._is_prepared[env_ids] = bool(flags & Flag.PREPARED)
        self.interrupted[env_ids] = False
        self.words.write(env_ids, self._ops[env_ids])
        self.wake_workers()

    def submit_later(self, env_ids: np.ndarray, op: Op, target: int, columns: np.ndarray, flags: int = 0) -> None:
        """Send hosts a command for some envs, to complete one that they have failed to."""
        self.words.complete(env_ids)
        self.submit(env_ids, op, target, columns, flags)

    def prepare(self, message: messages.Prepare) -> None:
        """Keep the extras of an env's next command, which are sent with it."""
        self._prepared[message.env_id] = message

    def await_workers(self, env_ids: np.ndarray) -> None:
        """Raise if a worker of some envs is lost and cannot be replaced; see `Pool`."""
        for worker_id in set(self.worker_of[env_ids].tolist()) & self.lost.keys():
            if self.options.on_worker_loss != "restart":
                raise self.lost[worker_id]

    def wake_workers(self) -> None:
        """Send hosts the commands that were written and not sent; those to lost hosts are answered by the loss."""
        is_left = self.words.is_owed()
        for host in self.all:
            for call in host.calls:
                if call.env_ids is not None:
                    is_left[call.env_ids] = False
            left = host.env_ids[is_left[host.env_ids]]
            if len(left) and host.loss is not None:
                self._lose_answers(host)
            elif len(left):
                ops = self._ops[left]
                for op in set(ops.tolist()):
                    with uninterrupted():  # the extras are sent with the order, or still kept
                        self._order(host, op, left[ops == op])

    def _order(self, host: Host, op: int, env_ids: np.ndarray) -> None:
        first = host.first
        extras = [self._prepared.pop(i) for i in env_ids.tolist() if i in self._prepared] if self._prepared else []
        if op == RESET and not self._is_prepared[env_ids].any():
            extras = []  # of a command that was broken off
        section = "reset_mask" if op == RESET else "input"
        order = Order(
            op=op,
            ids=None if len(env_ids) == len(host.env_ids) else env_ids - first,
            inputs=read(self.slab, self._layout, env_ids, section, first=first),
            prepared=[dataclasses.replace(extra, env_id=extra.env_id - first) for extra in extras],
        )
        Call(host, "run", (order,), env_ids)

    # ---- answers -----------------------------------------------------------------------------

    def wait_all(self, timeout_s: float | None, more_for_resets_s: float | None = 0.0) -> bool:
        self.wait_some(np.arange(self.num_envs), self.num_envs, timeout_s, more_for_resets_s)
        return True

    def wait_some(  # as of `Pool`; the hosts enforce the deadlines of workers
        self,
        env_ids: np.ndarray,
        count: int,
        timeout_s: float | None,
        more_for_resets_s: float | None = 0.0,  # noqa: ARG002
        *,
        kill_late: bool = True,
        through_losses: bool = False,  # noqa: ARG002
    ) -> np.ndarray:
        """Wait until at least `count` of some envs have answered, and return those that have; see `Pool.wait_some`."""
        end = None if kill_late or timeout_s is None else time.monotonic() + timeout_s
        is_for_all = count == len(env_ids)
        is_wanted = np.zeros(self.num_envs, bool)
        is_wanted[env_ids] = True
        left: float | None = None if is_for_all else 0.0  # first take what has arrived
        while True:
            calls = [call for host in self.all for call in host.calls if call.env_ids is not None]
            calls = [call for call in calls if is_wanted[call.env_ids].any()]
            if not calls:
                self.wake_workers()  # a call that was broken off has left commands behind
            else:
                self._take(calls, len(calls) if is_for_all else 1, left)
            ready = self.words.ready(env_ids)
            left = None if end is None else end - time.monotonic()
            if len(ready) >= count or (left is not None and left <= 0):
                return self.words.by_order(ready)

    def get(self, call: Call) -> Any:
        """Wait for the answer to a call without envs.

        Raises:
            EnvherdError: the host returned it, or is lost.
        """
        while not call.is_answered:
            self._take([call], 1, None)
        if isinstance(call.answer, EnvherdError):
            raise call.answer
        return call.answer

    def _each(self, method: str, args_of: Callable[[Host], tuple[Any, ...]]) -> list[tuple[Host, Any]]:
        """Call a method of all living hosts at once, and return their answers; raises as `get`."""
        calls = [Call(host, method, args_of(host), None) for host in self.all if host.loss is None]
        return [(call.host, self.get(call)) for call in calls]

    def wait_any(self, calls: Sequence[Call]) -> Call:
        """Wait until one of some calls without envs is answered; return the first that is."""
        while not (done := [call for call in calls if call.is_answered]):
            self._take(calls, 1, None)
        return done[0]

    def _take(self, calls: Sequence[Call], count: int, timeout_s: float | None) -> None:
        """Take the answers that are there, at the latest when `count` of some calls, `timeout_s` or a check is due."""
        builds = [host.calls[0] for host in self.all if host.is_building and host.calls]
        limit = _LOOK_S if timeout_s is None else min(_LOOK_S, max(0.0, timeout_s))
        refs = {call.ref: call for host in self.all for call in host.calls}
        watched = [*dict.fromkeys(call.ref for call in (*builds, *calls) if not call.is_answered)]
        ready, _ = ray.wait(watched, num_returns=1 if builds else min(count, len(watched)), timeout=limit)
        if len(ready) < len(refs):
            ready, _ = ray.wait([*refs], num_returns=len(refs), timeout=0)
        for ref in ready:
            self._open(refs[ref])
        if time.monotonic() - self._looked_at >= _LOOK_S:  # also while other hosts answer
            self._looked_at = time.monotonic()
            for host in self.all:
                if host.calls and (loss := host.silence(*self._timeouts)):
                    self._lose(host, loss)

    def _open(self, call: Call) -> None:
        host = call.host
        if call not in host.calls:
            return  # another answer has shown that its host is lost
        try:
            answer = ray.get(call.ref)
        except ray.exceptions.RayError as error:
            self._lose(host, host.gone(error))
            return
        if call.env_ids is not None:
            self._land(host, call.env_ids, answer)
        elif call.method == "build" and self._is_up:
            self._take_rebuilt(host, answer)
        call.answer, call.is_answered = answer, True
        if call in host.calls:
            host.calls.remove(call)

    def _land(self, host: Host, env_ids: np.ndarray, answer: Answer | EnvherdError) -> None:
        """Take the answer to an order."""
        first, errors = host.first, [answer] if isinstance(answer, EnvherdError) else answer.errors
        is_missing = np.zeros(self.num_envs, bool)
        is_missing[env_ids] = True
        for worker_id in host.worker_ids if self.lost and self.options.on_worker_loss == "restart" else ():
            self.lost.pop(worker_id, None)  # the host may have replaced it since
        if not isinstance(answer, EnvherdError):
            self.take_rows(host, answer, self._columns)
            for ids, _ in (*answer.nexts, *answer.roots):
                is_missing[ids + first] = False
            self.interrupted[answer.interrupted + first] = True
            self.outcome.side.update({first + i: frame for i, frame in answer.side.items()})
            self.outcome.infos.update({first + i: frame for i, frame in answer.infos.items()})
        for error in errors:
            concerned = set(error.env_ids) & set(env_ids.tolist())
            if isinstance(error, _LOSSES):
                self.note_lost_worker(error)
            else:
                self.outcome.faults |= {
                    env_id: {"phase": error.context.get("phase", "step"), "error": error} for env_id in concerned
                }
            is_missing[[*concerned]] = False
        for env_id in np.flatnonzero(is_missing).tolist():
            self.outcome.faults[env_id] = {"phase": "step", "error": errors[0]}
        self.slab.words["answered_ns"][env_ids] = time.perf_counter_ns()
        self.words.reply_seq[env_ids] = self.words.command_seq[env_ids]

    def take_rows(self, host: Host, answer: Answer, columns: np.ndarray) -> None:
        """Write the rows of an answer to columns, int64 `[N]`, and keep its counts."""
        for parts in (answer.nexts, answer.roots):
            write(self.slab, self._layout, parts, columns, first=host.first)
        self._note_counts(host, answer.words, answer.tally)

    def _note_counts(self, host: Host, words: np.ndarray, tally: np.ndarray) -> None:
        for name, values in zip(ENV_WORDS, words, strict=True):
            self.slab.words[name][host.env_ids] = values
        host.tally = tally

    # ---- losses ------------------------------------------------------------------------------

    def note_lost_worker(self, error: EnvherdError) -> None:
        """Record the loss of a worker that its host does not replace."""
        worker_id = error.context["worker_id"]
        self.num_losses += 1
        self.lost[worker_id] = self.outcome.losses[worker_id] = error
        self.words.lose_answers(self.blueprint.envs_of([worker_id]), self.outcome)

    def _lose(self, host: Host, loss: EnvherdError) -> None:
        """Take a host out of service."""
        host.place.end_host()
        with uninterrupted():
            host.loss, calls, host.calls = loss, host.calls, []
            for call in calls:
                call.lose(loss)
            if self._is_up:
                num_workers = 0 if host.is_building else len(host.worker_ids)
                host.tally = host.tally + np.array([num_workers, 0, 0, 0])
                self.num_losses += num_workers
                self.lost.update(dict.fromkeys(host.worker_ids, loss))
                self.outcome.losses.update(dict.fromkeys(host.worker_ids, loss))
                self._lose_answers(host)
        log.warning("%s", loss.message)

    def _lose_answers(self, host: Host) -> None:
        """Answer the commands to a lost host by its loss."""
        if len(self.words.lose_answers(host.env_ids, self.outcome)):
            self.outcome.losses.update({worker_id: self.lost[worker_id] for worker_id in host.worker_ids})

    def begin_restart(self, worker_id: int) -> None:
        """Start a successor of the host of a lost worker; see `Pool`.

        Raises:
            WorkerLost: the host has not replaced the worker, too many hosts were lost within the window, or there was
                no room for the latest one.
        """
        host = next(host for host in self.all if worker_id in host.worker_ids)
        for other in host.worker_ids:
            self.outcome.losses.pop(other, None)
        if worker_id not in self.lost:
            return  # its host was restarted for another worker
        if host.loss is None:
            raise self.lost[worker_id]
        refusal, host.refusal = host.refusal, None
        if refusal is not None:
            raise refusal
        if self._restarts.next_delay_s(host.index) is None:
            raise not_replaced(self.lost[worker_id], self.options)
        words = np.stack([self.slab.words[name][host.env_ids] for name in ENV_WORDS])
        generation = host.share.generation + 1
        host.share = dataclasses.replace(host.share, words=words, tally=host.tally, generation=generation)
        with uninterrupted():
            host.start()
            Call(host, "build", (host.share,), None)
            for other in host.worker_ids:
                self.lost.pop(other, None)

    def _take_rebuilt(self, host: Host, built: tuple[list[EnvSpec], Report] | EnvherdError) -> None:
        try:
            if isinstance(built, EnvherdError):
                raise built
            specs, report = built
            check_versions(versions(), [report])
            for env_id, now in zip(host.env_ids.tolist(), specs, strict=True):
                if self.specs[env_id] != now:
                    raise another_spec(env_id, self.specs[env_id].difference(now))
        except EnvherdError as error:
            self._lose(host, error)
        else:
            host.report, host.is_building = report, False

    # ---- other calls -------------------------------------------------------------------------

    def seed(self, root_seed: int, episodes: Sequence[int] | None = None) -> None:
        self.await_workers(np.arange(self.num_envs))
        self.slab.words["episode"][:] = 0 if episodes is None else episodes
        for host in self.all:
            blueprint = dataclasses.replace(host.share.blueprint, root_seed=root_seed)
            host.share = dataclasses.replace(host.share, blueprint=blueprint)
        starts = None if episodes is None else np.asarray(episodes, np.int64)
        self._each("seed", lambda host: (root_seed, None if starts is None else starts[host.env_ids].tolist()))

    def ask(self, what: str, env_ids: list[int], **question: Any) -> dict[int, Any]:
        args, asked = question.pop("args", ()), dict[int, Call]()
        for worker_id in self.worker_of[env_ids].tolist():
            if worker_id in self.lost:
                raise self.lost[worker_id]
        for host in self.all:
            positions = [at for at, i in enumerate(env_ids) if 0 <= i - host.first < len(host.env_ids)]
            if positions:
                own = [env_ids[at] - host.first for at in positions]
                mine = tuple(args[at] for at in positions) if what in messages.PER_ENV else args
                asked[host.index] = Call(host, "ask", (what, own, {**question, "args": mine}), None)

        def take(index: int) -> dict[int, Any]:
            call, first = asked[index], self.all[index].first
            try:
                return {first + env_id: value for env_id, value in self.get(call).items()}
            except _LOSSES as error:
                if call.host.loss is None and self.options.on_worker_loss != "restart":
                    self.note_lost_worker(error)
                raise

        return merge_answers(asked, take)

    def restore(self, env_ids: np.ndarray, roots: Sequence[Mapping[str, Any]] | None, ended: np.ndarray | None) -> None:
        """Note on the hosts that envs have been restored; see `Calls.restore`."""

        def own(host: Host) -> tuple[Any, Any, Any]:
            mine = np.flatnonzero(np.isin(env_ids, host.env_ids))
            own_roots = None if roots is None else [dict(roots[i]) for i in mine.tolist()]
            return env_ids[mine] - host.first, own_roots, None if ended is None else ended[mine]

        self._each("restore", own)

    def roll(self, host: Host, *args: Any) -> Call:
        """Begin a rollout on a host; see `NodeHost.roll`."""
        return Call(host, "roll", args, None)

    def workers(self) -> list[WorkerStatistics]:
        """Return the statistics of all workers, and take the counts of their envs."""
        found: list[WorkerStatistics] = []
        for host, (workers, words, tally) in self._each("statistics", lambda _: ()):
            self._note_counts(host, words, tally)
            found += workers
        return found

    def worker_output(self, worker_id: int) -> str:
        for host in self.all:
            if worker_id in host.worker_ids:
                return str(self.get(Call(host, "worker_output", (worker_id - host.worker_ids[0],), None)))
        raise IndexError(worker_id)

    def close(self, timeout_s: float | None = None) -> None:
        """Close the envs, end the hosts and release their places, within `timeout_s` in all. Never raises."""
        if self._is_closed:
            return
        self._is_closed = True
        limit = self.options.close_timeout_s if timeout_s is None else timeout_s
        try:
            if ray.is_initialized() and limit > 0:
                refs = [host.place.call("close", limit) for host in self.all if host.loss is None]
                ray.wait(refs, num_returns=len(refs), timeout=limit) if refs else None
        except TimeoutError:  # of the program's signal handler: `ray.wait` raises none
            raise
        except Exception:
            log.debug("closing the hosts failed", exc_info=True)
        finally:
            release(self.places)
            self._connection.close()
