"""The pool whose workers are on other machines: gives commands to the hosts and waits for their answers.

It is a `Pool`, so all code above it is the same as on one machine. Its slab is memory of the driver; it sends inputs
from the slab to the hosts, and writes their rows to the slab. Each host has its own pool, to which it passes the
commands.

Guarantees:
- An answer is used only if it belongs to the latest order for its env; answers left by an interrupt are recognised.
- If a host is gone, or silent for `node_timeout_s`, its workers count as lost; the other hosts continue, and their rows
  are complete.
- A host carries out its orders in the order in which they were sent.
Assumes: one caller at a time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import ray

from envherd.executor.cluster.fleet import Fleet
from envherd.executor.cluster.orders import Order, Reply
from envherd.executor.cluster.remote_share import RemoteShare, State
from envherd.executor.cluster.wire import DriverMemory
from envherd.executor.options import ExecutorOptions
from envherd.executor.pools.base import RecyclablePool, WorkerFigures
from envherd.executor.pools.command_words import CommandWords
from envherd.executor.pools.crew import Blueprint
from envherd.executor.pools.error_messages import Frame, merge_answers
from envherd.executor.pools.replies import Outcome
from envherd.executor.pools.slab_pool import SlabPool
from envherd.shm.slab import Slab, Storage, StoragePlan, plan_slab
from envherd.workers import messages
from envherd.workers.errors import EnvherdError
from envherd.workers.protocol import RESET, RING, Flag, Op

log = logging.getLogger("envherd")


class ClusterPool(SlabPool):
    """Hosts over one slab in the driver; see the module, and `Pool`.

    Args:
        blueprint: of the whole batch; one block per worker, host after host.
        options: of the executor.
        fleet: of hosts that have built their envs; closed with the pool.

    Attributes:
        fleet: see Args.
        shares: one per host.
    """

    holds_storages = False
    why_python = ("the envs run in a Ray cluster",)  # whose messages take far longer than a command

    def __init__(self, blueprint: Blueprint, options: ExecutorOptions, fleet: Fleet) -> None:
        self.blueprint = blueprint
        self.options = options
        self.fleet = fleet
        self.shares = fleet.shares
        self.num_envs = len(blueprint.factories)
        self.num_workers = len(blueprint.blocks)
        self.worker_of = np.repeat(np.arange(self.num_workers), [len(b) for b in blueprint.blocks])
        self.lost: dict[int, EnvherdError] = {}
        self.num_losses = 0
        self.serving = range(self.num_workers)
        self.resets_before_start = np.zeros(self.num_workers, np.int64)
        self.outcome = Outcome()
        self.specs = [spec for share in self.shares for spec in share.specs]
        self.plan = plan_slab(self.specs, self.num_workers, options.num_frames)
        self.slab = Slab(self.plan, np.zeros(self.plan.nbytes, np.uint8))
        for share in self.shares:
            share.attach(self.slab)
        self._share_of = [share for share in self.shares for _ in share.worker_ids]  # of each worker
        self._storages: dict[int, Storage] = {}
        self._words = CommandWords(self.slab)
        self._is_under_way = np.zeros(self.num_envs, bool)  # whether the latest command has left this process
        self._is_each = np.zeros(self.num_envs, bool)  # whether it is answered by `collect`
        self._extras: dict[int, messages.Prepare] = {}
        fleet.on_loss, fleet.on_quiet = self._take_out, self._mend
        self._failure: EnvherdError | None = None
        self._is_closed = False

    @property
    def recyclable(self) -> RecyclablePool | None:
        """This pool, because the engine knows when the envs of a worker are between episodes."""
        return self

    def was_given(self, env_ids: np.ndarray, since: int) -> np.ndarray:
        """Return which envs were given a command after that of number `since`, bool `[k]`."""
        return np.asarray((self._words.command_seq[env_ids] > since) & self._is_under_way[env_ids])

    # ---- commands ----------------------------------------------------------------------------

    def submit_all(self, op: Op, target: int, column: int, reset_ids: np.ndarray | None = None) -> None:
        """Give every env the same command, but some (int `[k]`) a RESET."""
        self._refuse_lost(range(self.num_workers))
        self._is_under_way[:] = self._is_each[:] = False
        self._words.write_all(0, None, 0)  # the hosts' words hold the command itself
        for share in self.shares:
            own = None
            if reset_ids is not None:
                own = np.intersect1d(reset_ids, share.env_ids) - share.first_env_id
            self._give(share, op, None, target, column, own if own is not None and len(own) else None)
        self._answer_for_lost()

    def submit(
        self, env_ids: np.ndarray, op: Op | np.ndarray, target: int, columns: np.ndarray, flags: int = 0
    ) -> None:
        self.await_workers(env_ids)
        if not flags & Flag.PREPARED:  # kept messages are from refused resets
            for env_id in env_ids[np.broadcast_to(np.asarray(op) == RESET, len(env_ids))].tolist():
                self._extras.pop(env_id, None)
        self._submit(env_ids, op, target, columns, flags)
        self._answer_for_lost()

    def submit_later(self, env_ids: np.ndarray, op: Op, target: int, columns: np.ndarray, flags: int = 0) -> None:
        """As `submit`, for envs of a worker that is being replaced."""
        self._submit(env_ids, op, target, columns, flags, is_late=True)

    def _submit(
        self, env_ids: np.ndarray, op: Any, target: int, columns: np.ndarray, flags: int, *, is_late: bool = False
    ) -> None:
        assert target == RING
        self._is_under_way[env_ids] = False
        self._is_each[env_ids] = bool(flags & Flag.EACH)
        self._words.write(env_ids, np.zeros(len(env_ids), np.int64))
        for share in self.shares:
            is_own = (env_ids >= share.env_ids[0]) & (env_ids <= share.env_ids[-1])
            if is_own.any():
                ops, ids = op[is_own] if isinstance(op, np.ndarray) else op, env_ids[is_own] - share.first_env_id
                self._give(share, ops, ids, target, columns[is_own], flags=int(flags), is_late=is_late)

    def _give(
        self,
        share: RemoteShare,
        op: Any,
        ids: np.ndarray | None,
        target: int,
        columns: Any,
        reset_ids: np.ndarray | None = None,
        **more: Any,
    ) -> None:
        """Send one host its part of a command; see `Order`."""
        asked = share.env_ids if ids is None else ids + share.first_env_id
        extras = [self._extras.pop(i) for i in asked.tolist() if i in self._extras] if self._extras else []
        if share.is_out:
            return  # its loss is the answer
        has_steps, is_each = bool(np.any(np.asarray(op) != RESET)), bool(self._is_each[asked[0]])
        order = Order(
            number=self.number,
            op=op,
            ids=ids,
            target=target,
            columns=columns,
            reset_ids=reset_ids,
            inputs=share.wire_rows.pack_inputs(ids) if has_steps or share.wire_rows.has_masks else None,
            extras=tuple(share.localize(extra) for extra in extras),
            timeout_s=self.options.step_timeout_s if has_steps and not is_each else self.options.reset_timeout_s,
            **more,
        )
        share.knows_roots = False
        if is_each:
            self.fleet.send(share, "submit", (order,), self._take_refusal)
            self._collect_from(share)
        else:
            self.fleet.send(share, "run", (order,), self._take_reply)
        self._is_under_way[asked] = True

    def _collect_from(self, share: RemoteShare) -> None:
        """Call a host's `collect`, unless a call is pending."""
        if not share.is_collecting and not share.is_out:
            self.fleet.send(share, "collect", (self.options.step_timeout_s,), self._take_collected)
            share.is_collecting = True

    def _collect_owed(self, share: RemoteShare) -> None:
        if (self._is_each & self._is_under_way & self._words.is_owed())[share.env_ids].any():
            self._collect_from(share)

    def wake_workers(self) -> None:
        """After a call was broken off: drop commands that were not sent, and count them as answered without effect."""
        words = self._words
        unsent = words.is_owed() & ~self._is_under_way
        words.reply_seq[unsent] = words.command_seq[unsent]
        self._extras.clear()

    def _answer_for_lost(self) -> None:
        """Answer commands to workers that were already lost with that loss."""
        for worker_id, error in self.lost.items():
            if self._lose_answers_of(worker_id):
                self.outcome.losses[worker_id] = error

    def _lose_answers_of(self, worker_id: int) -> bool:
        """Count a lost worker's envs as answered; return whether they owed anything."""
        return bool(len(self._words.lose_answers(np.array(self.blueprint.blocks[worker_id]), self.outcome)))

    # ---- waiting -----------------------------------------------------------------------------

    def await_workers(self, env_ids: np.ndarray) -> None:
        """Raise if a worker of some envs is lost and is not replaced, before any command is sent."""
        if self.lost:
            self._refuse_lost(np.unique(self.worker_of[env_ids]).tolist())

    def _refuse_lost(self, worker_ids: Iterable[int]) -> None:
        if self.lost and self.options.on_worker_loss != "restart":
            for worker_id in worker_ids:
                if worker_id in self.lost:
                    raise self.lost[worker_id]

    def wait_all(self, timeout_s: float | None, more_for_resets_s: float | None = 0.0) -> bool:  # noqa: ARG002
        """Wait for every outstanding answer and return True; reports besides rows are in `outcome`.

        The hosts enforce the deadline.
        """
        while not self._words.is_idle():
            self.fleet.take(None)
        self._raise_failure()
        return True

    def wait_some(  # as of `Pool`
        self,
        env_ids: np.ndarray,
        count: int,
        timeout_s: float | None,
        more_for_resets_s: float | None = 0.0,  # noqa: ARG002  # the hosts keep the deadline
        *,
        kill_late: bool = True,
        through_losses: bool = False,  # noqa: ARG002  # it always does
    ) -> np.ndarray:
        """Wait until at least `count` of some envs have answered; return those, oldest command first.

        With `kill_late` the hosts enforce the deadline.
        """
        end = None if timeout_s is None or kill_late else time.monotonic() + timeout_s
        self.fleet.take(0.0)
        while True:
            ready = self._words.ready(env_ids)
            left = None if end is None else end - time.monotonic()
            if len(ready) >= count or (left is not None and left <= 0):
                break
            self.fleet.take(left)
        self._raise_failure()
        return ready[np.argsort(self._words.order[ready], kind="stable")]

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _mend(self) -> None:
        """Handle envs for which no answer is coming: their host was not asked, or they were lost before."""
        for share in self.shares:
            self._collect_owed(share)
        self._answer_for_lost()

    # ---- answers -----------------------------------------------------------------------------

    def _take_refusal(self, share: RemoteShare, error: EnvherdError | None) -> None:
        if error is not None:
            self.fail(share, error)

    def fail(self, share: RemoteShare, error: EnvherdError) -> None:
        """Note that a host could not carry out an order: the states of its envs are unknown."""
        self._failure = self._failure or error
        worker_id = error.context.get("worker_id")
        if isinstance(worker_id, int) and worker_id in share.worker_ids:
            self.lost[worker_id] = error
        self._words.reply_seq[share.env_ids] = self._words.command_seq[share.env_ids]

    def _take_collected(self, share: RemoteShare, reply: Reply | EnvherdError) -> None:
        share.is_collecting = False
        self._take_reply(share, reply)
        self._collect_owed(share)

    def _take_reply(self, share: RemoteShare, reply: Reply | EnvherdError) -> None:
        """Take the answers to orders."""
        if isinstance(reply, EnvherdError):
            self.fail(share, reply)
            return
        words, env_ids = self._words, share.env_ids if reply.ids is None else reply.ids + share.first_env_id
        numbers = np.broadcast_to(reply.numbers, len(env_ids))
        is_current = words.command_seq[env_ids] == numbers
        if is_current.any():
            share.write(reply, self._storages)
        share.note_words(self.slab.words, self.resets_before_start, reply)
        self._note(share, reply.outcome)
        self.slab.words["answered_ns"][env_ids[is_current]] = time.perf_counter_ns()  # nodes have other clocks
        words.reply_seq[env_ids[is_current]] = numbers[is_current]

    def _note(self, share: RemoteShare, outcome: Outcome | None) -> None:
        """Take over a host's report on events besides rows."""
        if outcome is None:
            return
        for kind in ("faults", "side", "infos"):
            for frame in getattr(outcome, kind).values():
                moved: Frame = {**frame, "env_id": frame["env_id"] + share.first_env_id}
                getattr(self.outcome, kind)[moved["env_id"]] = moved
        for worker_id, error in outcome.losses.items():
            self.num_losses += 1
            self._note_lost(share.worker_ids[worker_id], error)

    # ---- losses ------------------------------------------------------------------------------

    def _note_lost(self, worker_id: int, error: EnvherdError) -> None:
        """Take a worker out of service: its envs' pending commands are answered by its loss."""
        self.lost[worker_id] = error
        self.outcome.losses[worker_id] = error
        self._lose_answers_of(worker_id)

    def _take_out(self, share: RemoteShare, error: EnvherdError) -> None:
        """Answer the pending commands of a share with an error: its host is lost, or no other place was found."""
        if share.state is State.LOST:
            self.num_losses += len(share.worker_ids)
        for worker_id in share.worker_ids:
            self._note_lost(worker_id, error)

    def begin_restart(self, worker_id: int) -> None:
        """Start a successor of a lost worker; of a lost host's worker, start a host elsewhere, with all of its workers.

        Raises:
            WorkerLost, WorkerTimeout: too many restarts within the window, or no room for a host.
        Blocks: while its host, if that lives, is busy with other orders; never for a search of a place.
        """
        self.outcome.losses.pop(worker_id, None)
        if worker_id not in self.lost:
            return  # it was restored with its host
        share = self._share_of[worker_id]
        if share.has_host:
            self._replace("begin_restart", worker_id)
            del self.lost[worker_id]
            return
        self.fleet.begin_move(share)
        for own_id in share.worker_ids:
            self.lost.pop(own_id, None)

    def is_serving(self, worker_id: int) -> bool:
        """Return whether neither a worker nor its host is lost."""
        return worker_id not in self.lost and self._share_of[worker_id].has_host

    def recycle(self, worker_id: int, *, is_anew: bool) -> None:
        try:
            self._replace("recycle", worker_id, is_anew=is_anew)
        except EnvherdError:
            if self._share_of[worker_id].has_host or self.options.on_worker_loss != "restart":
                raise  # otherwise its host was lost, and the next reset reports that

    def _replace(self, method: str, worker_id: int, **how: bool) -> None:
        """Make a worker's host begin to replace it."""
        share, own_id = self._place_of(worker_id)
        self.fleet.request(share, "tell_pool", method, own_id, **how)
        share.pids = self.fleet.request(share, "pids")
        share.generations[own_id] += 1

    # ---- mail --------------------------------------------------------------------------------

    def prepare(self, message: messages.Prepare) -> None:
        """Keep the extras of an env's next command; they are sent with it."""
        self._refuse_lost([int(self.worker_of[message.env_id])])
        self._extras[message.env_id] = message

    def seed(self, root_seed: int, episodes: Sequence[int] | None = None) -> None:
        self._refuse_lost(range(self.num_workers))
        self.slab.words["episode"][:] = 0 if episodes is None else episodes
        refs = []
        for share in self.shares:
            share.root_seed = root_seed
            if share.has_host:
                own = None if episodes is None else [episodes[i] for i in share.env_ids.tolist()]
                refs.append((share, share.call("seed", root_seed, own)))
        for share, ref in refs:
            self.fleet.get(share, ref)

    def question(self, what: str, env_ids: list[int], **question: Any) -> dict[int, Any]:
        """Begin `ask` without waiting; return share id -> reference for `answers`."""
        workers = {int(self.worker_of[env_id]) for env_id in env_ids}
        self._refuse_lost(workers)
        if gone := [worker_id for worker_id in sorted(workers) if worker_id in self.lost]:
            raise self.lost[gone[0]]
        args = question.pop("args", ())
        asked = {}
        for share in self.shares:
            ids = [i for i in env_ids if i in share.env_ids]
            if ids:
                own = tuple(args[env_ids.index(i)] for i in ids) if what in messages.PER_ENV else args
                local = [i - share.first_env_id for i in ids]
                self.fleet.await_host(share)
                asked[share.share_id] = share.call("tell_pool", "ask", what, local, args=own, **question)
        return asked

    def has_answered(self, asked: dict[int, Any]) -> bool:
        refs = list(asked.values())
        return len(ray.wait(refs, num_returns=len(refs), timeout=0)[0]) == len(refs)

    def answers(self, asked: dict[int, Any], what: str) -> dict[int, Any]:  # noqa: ARG002  # as of `Pool`
        """Wait for the answers to a question."""
        return merge_answers(asked, lambda share_id: self._answer(self.shares[share_id], asked[share_id]))

    def _answer(self, share: RemoteShare, ref: Any) -> dict[int, Any]:
        return {i + share.first_env_id: value for i, value in self.fleet.get(share, ref).items()}

    # ---- rollout storages --------------------------------------------------------------------

    def attach_storage(self, target: int, plan: StoragePlan) -> DriverMemory:
        """Write to a new rollout storage as `target`."""
        memory = DriverMemory(plan.nbytes)
        self._storages[target] = Storage(plan, memory.array())
        return memory

    def detach_storage(self, target: int) -> None:
        """Forget a rollout storage."""
        self._storages.pop(target, None)

    # ---- facts about workers -----------------------------------------------------------------

    def _place_of(self, worker_id: int) -> tuple[RemoteShare, int]:
        """Return the share of a worker, and its worker id on the host."""
        share = self._share_of[worker_id]
        return share, worker_id - share.worker_ids[0]

    def worker_output(self, worker_id: int) -> str:
        share, own_id = self._place_of(worker_id)
        return str(self.fleet.request(share, "tell_pool", "worker_output", own_id)) if share.has_host else ""

    def pid_of(self, worker_id: int) -> int:
        share, own_id = self._place_of(worker_id)
        return share.pids[own_id]

    def generation_of(self, worker_id: int) -> int:
        share, own_id = self._place_of(worker_id)
        return share.generations[own_id]

    def memory_of(self, worker_id: int) -> int:
        share, own_id = self._place_of(worker_id)
        return int(self.fleet.request(share, "memory", own_id))

    @property
    def num_recycled(self) -> int:
        """How often workers were replaced between episodes, as of the latest `figures`."""
        return sum(share.num_recycled for share in self.shares)

    def is_alive(self, worker_id: int) -> bool:
        """Return whether a worker's loss has not been noticed."""
        return worker_id not in self.lost

    def figures(self) -> list[WorkerFigures]:
        """Return the hosts' figures of their workers; zeros for lost ones."""
        found: list[WorkerFigures] = []
        for share in self.shares:
            if not share.has_host:
                found += [WorkerFigures(0, 0, 0.0, None)] * len(share.worker_ids)
                continue
            figures = self.fleet.request(share, "figures")
            share.note_figures(self.slab.words, figures)
            found += [WorkerFigures(uss, pss, cpu_s, None) for uss, pss, cpu_s in figures.processes]
        return found

    # ---- the end -----------------------------------------------------------------------------

    def close(self, timeout_s: float | None = None) -> None:
        """Close the envs and end the hosts within `timeout_s` in all (default: the option's). Never raises."""
        limit = self.options.close_timeout_s if timeout_s is None else timeout_s
        if self._is_closed:
            return
        self._is_closed = True
        try:
            if ray.is_initialized() and limit > 0:
                refs = [share.call("close", limit) for share in self.shares if share.has_host]
                ray.wait(refs, num_returns=len(refs), timeout=limit) if refs else None
        except TimeoutError:  # of the program's signal handler: `ray.wait` raises none
            raise
        except Exception:
            log.debug("closing the hosts failed", exc_info=True)
        finally:
            self.fleet.give_back()
