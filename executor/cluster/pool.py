"""The pool whose workers are on other machines: what an executor gives commands to and waits for.

It is a `Pool`, so that everything above it is the same code as on one machine. Its slab is memory
of the driver's own; inputs go from it to the hosts, and rows come back into it, one buffer per host and order.

Guarantees:
- An env's answer is read only if it is to the latest order for it; what an interrupt left behind is recognised.
- A host that is gone, or silent for `node_timeout_s`, is a loss of its workers; the other hosts go on, rows whole.
- Orders for one host are carried out in the order in which they were given.
Assumes: one caller at a time.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import ray
import torch

from envherd.executor.batches.device_rows import Residence
from envherd.executor.batches.tensor_actions import Lend
from envherd.executor.cluster.facts import WorkerFacts
from envherd.executor.cluster.fleet import Fleet
from envherd.executor.cluster.orders import Order, Reply
from envherd.executor.cluster.post import Post
from envherd.executor.cluster.recovery import Recovery
from envherd.executor.cluster.remote_share import RemoteShare
from envherd.executor.cluster.wire import DriverMemory
from envherd.executor.options import ExecutorOptions
from envherd.executor.pools.crew import Blueprint
from envherd.executor.pools.error_messages import Frame, merge_answers
from envherd.executor.pools.replies import Outcome
from envherd.shm.slab import Slab, Storage, StoragePlan, plan_slab
from envherd.workers import messages
from envherd.workers.errors import EnvherdError
from envherd.workers.protocol import RING, Flag, Op


class ClusterPool(WorkerFacts):
    """Hosts over one slab in the driver.

    Args:
        blueprint: of the whole batch; one block per worker, of all hosts in turn.
        shares: one per host, built.
        options: of the executor.
        fleet: replaces lost hosts, and ends with the pool.

    Attributes:
        shares: one per host.
        post: what hosts have been asked.
    """

    def __init__(self, blueprint: Blueprint, shares: list[RemoteShare], options: ExecutorOptions, fleet: Fleet) -> None:
        self.blueprint = blueprint
        self.options = options
        self.shares = shares
        self.num_envs = len(blueprint.factories)
        self.num_workers = len(blueprint.blocks)
        self.worker_of = np.repeat(np.arange(self.num_workers), [len(b) for b in blueprint.blocks])
        self.share_of = np.repeat(np.arange(len(shares)), [share.num_envs for share in shares])
        self.lost: dict[int, EnvherdError] = {}
        self.forfeited = np.zeros(self.num_envs, bool)
        self.num_losses = 0
        self.num_ahead = self.num_missed = 0
        self.holds_storages = False
        self.serving = range(self.num_workers)
        self.recyclable = None  # the hosts recycle
        self.outcome = Outcome()
        self.lenders: dict[int, Lend] = {}  # hosts read their inputs from the slab
        self.specs = [spec for share in shares for spec in share.specs]
        self.plan = plan_slab(self.specs, self.num_workers, options.num_frames)
        self.slab = Slab(self.plan, np.zeros(self.plan.nbytes, np.uint8))
        for share in shares:
            share.attach(self.slab)
        self._fleet = fleet
        self._storages: dict[int, Storage] = {}
        self._number = 0
        self._command_seq = self.slab.words["command_seq"]
        self._reply_seq = self.slab.words["reply_seq"]
        self._is_under_way = np.zeros(self.num_envs, bool)  # whether the latest command has left this process
        self._is_each = np.zeros(self.num_envs, bool)  # whether it is answered env by env
        self._targets: dict[int, int] = {}  # of the latest order for all envs: number -> target
        self._columns = np.zeros(self.num_envs, np.int64)
        self._extras: dict[int, messages.Prepare] = {}
        self.recovery = Recovery(self, fleet)
        self.post = Post(self.lose_share, self._mend, self.recovery.advance)
        self._failure: EnvherdError | None = None
        self._is_closed = False

    @property
    def number(self) -> int:
        """Number of the latest command."""
        return self._number

    def was_given(self, env_ids: np.ndarray, since: int) -> np.ndarray:
        """Return which envs were given a command after that of number `since`, bool `[k]`."""
        return np.asarray((self._command_seq[env_ids] > since) & self._is_under_way[env_ids])

    # ---- commands ----------------------------------------------------------------------------

    def compile(self) -> None:
        """Return None: a command takes longer than all that could be saved."""

    def compile_exchange(self, facts: Mapping[str, Any]) -> None:
        """Return None, likewise."""

    def submit_all(self, op: Op, target: int, column: int, reset_ids: np.ndarray | None = None) -> None:
        """Give every env the same command, but some (int `[k]`) a RESET."""
        if self.lost:
            self._revive(range(self.num_workers))
        self._number += 1
        self._is_under_way[:] = False
        self._is_each[:] = False
        self.forfeited[:] = False
        self._command_seq.fill(self._number)
        self._targets = {self._number: target}
        self._columns.fill(column)
        for share in self.shares:
            own = None
            if reset_ids is not None:
                own = reset_ids[self.share_of[reset_ids] == share.share_id] - share.first_env_id
                own = own if len(own) else None
            self._give(share, op, None, own)
        self._answer_for_lost()

    def submit(
        self, env_ids: np.ndarray, op: Op | np.ndarray, target: int, columns: np.ndarray, flags: int = 0
    ) -> None:
        """Give some envs a command each, at ring columns of their own; see `Pool.submit`."""
        assert target == RING
        self.await_workers(env_ids)
        if not flags & Flag.PREPARED:  # what is kept was for resets that were refused
            for env_id in env_ids[np.broadcast_to(np.asarray(op) == Op.RESET, len(env_ids))].tolist():
                self._extras.pop(env_id, None)
        self._submit(env_ids, op, columns, flags)
        self._answer_for_lost()

    def submit_later(self, env_ids: np.ndarray, op: Op, target: int, columns: np.ndarray, flags: int = 0) -> None:
        """As `submit`, for envs of a worker that is being replaced."""
        assert target == RING
        self._submit(env_ids, op, columns, flags, is_late=True)

    def _submit(
        self, env_ids: np.ndarray, op: Op | np.ndarray, columns: np.ndarray, flags: int, *, is_late: bool = False
    ) -> None:
        self._number += 1
        self._is_under_way[env_ids] = False
        self._is_each[env_ids] = bool(flags & Flag.EACH)
        self._columns[env_ids] = columns
        self.forfeited[env_ids] = False
        self._command_seq[env_ids] = self._number
        for share_id in np.unique(self.share_of[env_ids]).tolist():
            share = self.shares[share_id]
            is_own = self.share_of[env_ids] == share_id
            ids = np.sort(env_ids[is_own])
            ops = op if not isinstance(op, np.ndarray) else op[is_own][np.argsort(env_ids[is_own])]
            self._give(share, ops, ids - share.first_env_id, None, is_late=is_late)

    def _give(
        self,
        share: RemoteShare,
        op: Any,
        ids: np.ndarray | None,
        reset_ids: np.ndarray | None,
        *,
        is_late: bool = False,
    ) -> None:
        """Send one host what is for it; `ids` are the share's own."""
        asked = share.env_ids if ids is None else ids + share.first_env_id
        extras = [self._extras.pop(i) for i in asked.tolist() if i in self._extras] if self._extras else []
        if share.is_gone and not share.is_moving:
            return  # its loss is the answer
        steps = np.any(np.asarray(op) != Op.RESET)
        is_each = bool(self._is_each[asked[0]])
        limit = self.options.step_timeout_s if steps and not is_each else self.options.reset_timeout_s
        order = Order(
            number=self._number,
            op=op,
            ids=ids,
            reset_ids=reset_ids,
            inputs=share.end.pack_inputs(ids) if steps else None,
            extras=tuple(share.localize(extra) for extra in extras),
            timeout_s=limit,
            is_late=is_late,
        )
        if share.is_moving:
            self.recovery.hold(share, functools.partial(self._send, share, order, is_each=is_each))
        else:
            self._send(share, order, is_each=is_each)
        self._is_under_way[asked] = True

    def _send(self, share: RemoteShare, order: Order, *, is_each: bool) -> None:
        if is_each:
            self.post.expect(share, share.call("act", "submit", order), self._take_refusal)
            self._collect_from(share)
        else:
            self.post.expect(share, share.call("act", "run", order), functools.partial(self._take_run, order.number))

    def _collect_owed(self, share: RemoteShare) -> None:
        if (self._is_each & self._is_under_way & (self._command_seq != self._reply_seq))[share.env_ids].any():
            self._collect_from(share)

    def _collect_from(self, share: RemoteShare) -> None:
        """Have a host send what answers come, if nobody has asked it to."""
        if share.is_collecting or share.is_gone:
            return
        self.post.expect(share, share.call("answer", "collect", self.options.step_timeout_s), self._take_collected)
        share.is_collecting = True

    def nudge(self) -> None:
        """After a call was broken off: what has not left this process will not; its answer is that nothing was done."""
        unsent = (self._command_seq != self._reply_seq) & ~self._is_under_way
        self._reply_seq[unsent] = self._command_seq[unsent]
        self._extras.clear()

    def _answer_for_lost(self) -> None:
        """Let commands to workers that had been lost before end in that loss at once."""
        for worker_id, error in self.lost.items():
            if self._forfeit(worker_id):
                self.outcome.losses[worker_id] = error

    def _forfeit(self, worker_id: int) -> bool:
        """Take what a lost worker's envs owe as answered; return whether they owed anything."""
        env_ids = np.array(self.blueprint.blocks[worker_id])
        owing = env_ids[self._command_seq[env_ids] != self._reply_seq[env_ids]]
        self.forfeited[owing] = True  # first: an interrupt must not leave an answer that no worker gave
        self._reply_seq[owing] = self._command_seq[owing]
        return bool(len(owing))

    def take_outcome(self, env_ids: np.ndarray | None = None) -> Outcome:
        """Return what happened since the last call, and forget it; see `Pool.take_outcome`."""
        outcome, self.outcome = self.outcome.hand_out(env_ids)
        return outcome

    def outstanding(self) -> np.ndarray:
        """Return the env ids that owe an answer, int `[k]`."""
        return np.flatnonzero(self._command_seq != self._reply_seq)

    # ---- waiting -----------------------------------------------------------------------------

    def await_workers(self, env_ids: np.ndarray) -> None:
        """Raise the loss of a worker of some envs that stays lost, before anything is given to it."""
        if self.lost:
            self._revive(np.unique(self.worker_of[env_ids]).tolist())

    def wait_all(self, timeout_s: float | None, more_for_resets_s: float | None = 0.0) -> bool:  # noqa: ARG002
        """Wait for every outstanding answer and return True; what else happened is in `outcome`.

        The hosts keep the deadline.
        """
        while self._command_seq.tobytes() != self._reply_seq.tobytes():
            self.post.take(None)
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

        With `kill_late` the hosts keep the deadline.
        """
        end = None if timeout_s is None or kill_late else time.monotonic() + timeout_s
        self.post.take(0.0)
        while True:
            ready = env_ids[self._command_seq[env_ids] == self._reply_seq[env_ids]]
            left = None if end is None else end - time.monotonic()
            if len(ready) >= count or (left is not None and left <= 0):
                break
            self.post.take(left)
        self._raise_failure()
        return ready[np.argsort(self._command_seq[ready], kind="stable")]

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _mend(self) -> None:
        """Have nobody wait for what will not come by itself."""
        for share in self.shares:
            self._collect_owed(share)
        self._answer_for_lost()

    # ---- answers -----------------------------------------------------------------------------

    def _take_refusal(self, share: RemoteShare, error: EnvherdError | None) -> None:
        if error is not None:
            self.fail(share, error)

    def fail(self, share: RemoteShare, error: EnvherdError) -> None:
        """Note that a host could not carry out an order: nobody knows where its envs are."""
        self._failure = self._failure or error
        worker_id = error.context.get("worker_id")
        if isinstance(worker_id, int) and worker_id in share.worker_ids:
            self.lost[worker_id] = error
        self._reply_seq[share.env_ids] = self._command_seq[share.env_ids]

    def _take_collected(self, share: RemoteShare, reply: Reply) -> None:
        share.is_collecting = False
        if reply.failure is not None:  # what its envs have answered went with it: they begin again, all of them
            self.lose_share(share, reply.failure)
            return
        assert reply.ids is not None
        if reply.rows is not None:
            env_ids = reply.ids + share.first_env_id
            is_current = self._command_seq[env_ids] == reply.numbers
            share.write(reply, self._columns[share.env_ids], None)
            self._note(share, reply)
            told = env_ids[is_current]
            self._reply_seq[told] = self._command_seq[told]
        self._collect_owed(share)

    def _take_run(self, number: int, share: RemoteShare, reply: Reply) -> None:
        """Take the answer to an order for all envs of a share, or for some."""
        if reply.failure is not None:
            self.fail(share, reply.failure)
            return
        env_ids = share.env_ids if reply.ids is None else reply.ids + share.first_env_id
        told = env_ids[self._command_seq[env_ids] == number]
        if len(told):
            share.write(reply, self._columns[share.env_ids], self._storages.get(self._targets.get(number, RING)))
        self._note(share, reply)
        self._reply_seq[told] = number

    def _note(self, share: RemoteShare, reply: Reply) -> None:
        share.note_words(self.slab.words, reply)
        if reply.outcome is None:
            return
        for kind in ("faults", "side", "infos"):
            for frame in getattr(reply.outcome, kind).values():
                moved: Frame = {**frame, "env_id": frame["env_id"] + share.first_env_id}
                getattr(self.outcome, kind)[moved["env_id"]] = moved
        for worker_id, error in reply.outcome.losses.items():
            self._declare_lost(share.worker_ids[worker_id], error)

    # ---- losses ------------------------------------------------------------------------------

    def _declare_lost(self, worker_id: int, error: EnvherdError) -> None:
        """Take a worker out of service: its loss is the answer to what its envs owe."""
        self.num_losses += 1
        self._note_lost(worker_id, error)

    def _note_lost(self, worker_id: int, error: EnvherdError) -> None:
        self.lost[worker_id] = error
        self.outcome.losses[worker_id] = error
        self._forfeit(worker_id)

    def lose_share(self, share: RemoteShare, error: EnvherdError) -> None:
        """Take a host and all its workers out of service."""
        if share.is_gone:
            return
        share.abandon()
        self.post.forget(share)
        self.num_losses += len(share.worker_ids)
        self.take_out(share, error)

    def take_out(self, share: RemoteShare, error: EnvherdError) -> None:
        """Let the loss of all workers of a share, which has no host, be the answer to what its envs owe."""
        for worker_id in share.worker_ids:
            self._note_lost(worker_id, error)

    def begin_restart(self, worker_id: int) -> None:
        """Start a successor of a lost worker; of a lost host's worker, start a host elsewhere, with all of its workers.

        Raises:
            WorkerLost, WorkerTimeout: too many restarts within the window, or no room for a host.
        Blocks: as long as its host, if that lives, is busy with other orders; never for a place for a new host.
        """
        error = self.lost.get(worker_id)
        self.outcome.losses.pop(worker_id, None)
        if error is None:
            return  # it came back with its host
        share = self.shares[int(self.share_of[self.blueprint.blocks[worker_id][0]])]
        if not share.is_gone:
            pids = self.request(share, "act", "restart", worker_id - share.worker_ids[0])
            if isinstance(pids, EnvherdError):
                raise pids
            share.pids = pids
            share.generations[worker_id - share.worker_ids[0]] += 1
            del self.lost[worker_id]
            return
        self.recovery.begin(share, error)

    def _revive(self, worker_ids: Iterable[int]) -> None:
        """Raise the loss of a worker that stays lost, before anything is given to it."""
        for worker_id in worker_ids:
            if worker_id in self.lost and self.options.on_worker_loss != "restart":
                raise self.lost[worker_id]

    # ---- mail --------------------------------------------------------------------------------

    def prepare(self, message: messages.Prepare) -> None:
        """Keep the extras of an env's next command; they go with it."""
        self._revive([int(self.worker_of[message.env_id])])
        self._extras[message.env_id] = message

    def seed(self, root_seed: int, episodes: Sequence[int] | None = None) -> None:
        """Use a new root seed on every host; see `Pool.seed`."""
        self._revive(range(self.num_workers))
        self.slab.words["episode"][:] = 0 if episodes is None else episodes
        refs = []
        for share in self.shares:
            share.root_seed = root_seed
            if not share.is_gone:
                own = None if episodes is None else [episodes[i] for i in share.env_ids.tolist()]
                refs.append((share, share.call("act", "seed", root_seed, own)))
        for share, ref in refs:
            error = self.post.get(share, ref)
            if isinstance(error, EnvherdError):
                raise error

    def ask(self, what: str, env_ids: list[int], **question: Any) -> dict[int, Any]:
        """Ask envs for something that is not a step; see `Pool.ask`."""
        return self.answers(self.question(what, env_ids, **question), what)

    def question(self, what: str, env_ids: list[int], **question: Any) -> dict[int, Any]:
        """Ask as `ask` does, and do not wait; return share id -> what `answers` waits for."""
        workers = {int(self.worker_of[env_id]) for env_id in env_ids}
        self._revive(workers)
        if gone := [worker_id for worker_id in sorted(workers) if worker_id in self.lost]:
            raise self.lost[gone[0]]
        args = question.pop("args", ())
        asked = {}
        for share in self.shares:
            ids = [i for i in env_ids if int(self.share_of[i]) == share.share_id]
            if ids:
                own = tuple(args[env_ids.index(i)] for i in ids) if what in messages.PER_ENV else args
                local = [i - share.first_env_id for i in ids]
                self.recovery.await_place(share)
                asked[share.share_id] = share.call("act", "ask", what, local, {"args": own, **question})
        return asked

    def has_answered(self, asked: dict[int, Any]) -> bool:
        """Return whether `answers` would not block."""
        refs = list(asked.values())
        return len(ray.wait(refs, num_returns=len(refs), timeout=0)[0]) == len(refs)

    def request(self, share: RemoteShare, group: str, method: str, *args: Any) -> Any:
        """Call a method of a share's host and wait for its answer; see `Post.get`."""
        self.recovery.await_place(share)
        return self.post.get(share, share.call(group, method, *args))

    def answers(self, asked: dict[int, Any], what: str) -> dict[int, Any]:  # noqa: ARG002  # as of `Pool`
        """Wait for the answers to a question."""
        return merge_answers(asked, lambda share_id: self._answer(self.shares[share_id], asked[share_id]))

    def _answer(self, share: RemoteShare, ref: Any) -> dict[int, Any]:
        answer = self.post.get(share, ref)
        if isinstance(answer, EnvherdError):
            raise answer
        return {i + share.first_env_id: value for i, value in answer.items()}

    # ---- rollout storages --------------------------------------------------------------------

    def settle(self, device: torch.device | None) -> dict[int, Residence]:  # noqa: ARG002
        """Leave nothing on a device: what hosts give goes through the slab."""
        return {}

    def attach_storage(self, target: int, plan: StoragePlan) -> DriverMemory:
        """Write to a new rollout storage as `target`."""
        memory = DriverMemory(plan.nbytes)
        self._storages[target] = Storage(plan, memory.array())
        return memory

    def detach_storage(self, target: int) -> None:
        """Forget a rollout storage."""
        self._storages.pop(target, None)

    # ---- the end -----------------------------------------------------------------------------

    def close(self, timeout_s: float | None = None) -> None:
        """Close the envs and end the hosts within `timeout_s` in all (default: the option's). Never raises."""
        limit = self.options.close_timeout_s if timeout_s is None else timeout_s
        if self._is_closed:
            return
        self._is_closed = True
        with contextlib.suppress(Exception):
            if ray.is_initialized() and limit > 0:
                refs = [share.call("watch", "close", limit) for share in self.shares if not share.is_gone]
                ray.wait(refs, num_returns=len(refs), timeout=limit) if refs else None
        for share in self.shares:
            share.abandon()
        self._fleet.give_back()
