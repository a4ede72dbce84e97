"""The engine of a batch over hosts: it splits a command, calls every host, and concatenates the answers.

It has the methods of `Engine` that `BatchedEnv` uses, and refuses the same calls. Each host is an executor by itself:
what is done with rows, seeds, faults and lost workers happens there. The driver knows the state of every env, where its
latest rows were received, and how to replace a lost host.

Guarantees: those of `BatchedEnv`. A command is sent only if it is legal for all its envs, and all actions are checked
before any is sent. The rows of a lost host are made here, from the last true observations.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase

from envherd.executor.batches.actions import GroupIntake, to_numpy
from envherd.executor.batches.fast_tensordict import set_leaf
from envherd.executor.batches.hand_out import GroupBatch
from envherd.executor.cluster.hosts import Call, Host, Hosts
from envherd.executor.cluster.messages import Answer, Built, Order
from envherd.executor.cluster.packing import Packed, Rows, pack
from envherd.executor.monitor.statistics import Statistics, WorkerStatistics, num_agents
from envherd.executor.options import ExecutorOptions
from envherd.executor.pools.blueprint import spread
from envherd.executor.protocol.call_guard import CallGuard
from envherd.executor.protocol.calls import Calls
from envherd.executor.protocol.columns import Places
from envherd.executor.protocol.env_states import EnvStates, Event, State
from envherd.executor.protocol.exchange import Exchange, set_ids
from envherd.executor.protocol.plain import Plain
from envherd.executor.protocol.side_data import SideData
from envherd.workers.errors import EnvherdError, WorkerLost, WorkerTimeout
from envherd.workers.messages import Prepare
from envherd.workers.protocol import Op

_NO_EXTRAS: Mapping[int, Prepare] = {}
#: State of an env on its host -> what its answer was.
_EVENTS = {State.NEEDS_RESET: Event.FAILS, State.RUNNING: Event.ANSWERED, State.ENDED: Event.ENDS}
#: Its state -> what has happened to it, if it was given no command.
_PLACED = {State.NEEDS_RESET: Event.IS_BROKEN_OFF, State.RUNNING: Event.IS_ALLOWED, State.ENDED: Event.IS_OVER}


class ClusterEngine(Calls):
    """The engine of a `RayParallelEnv`; see the module.

    Attributes:
        device: of the batches, or None.
        batches, positions: this engine; an `Engine` has separate objects for these.
        side: the infos.
        in_root: bool `[N]`, envs whose present row is that of a reset.
        has_landed: bool `[N]`, sent envs that have answered.
        errors: of sent envs, which `recv` must raise.
        hosts: all of them.
    """

    pool: Hosts  # type: ignore[assignment]  # with the attributes that are used here
    plain = Plain.never("the envs run in a Ray cluster")
    mover = None

    def __init__(
        self, pool: Hosts, *, seed: int, device: torch.device | None, copy: bool, options: ExecutorOptions
    ) -> None:
        super().__init__(pool, options)  # type: ignore[arg-type]
        del copy  # batches are always the caller's own
        self.hosts, self.device = pool, device
        self.batches = self.positions = self
        self.states = EnvStates(self.num_envs)
        self.side = SideData(self.specs, options.info_policy)
        self._is_replacing = options.on_worker_loss == "restart"
        self._places = places = Places(pool.plan)
        groups = [GroupBatch(one, 1, None, has_interrupted=self._is_replacing) for one in pool.slab.groups]
        self._nexts = Rows("next", groups, places.group_of)
        self._roots, self._following = (Rows("root", groups, places.group_of) for _ in range(2))
        self._sent: dict[int, TensorDictBase] = {}  # env id -> its latest actions, of envs that are not plain
        self._intakes = [
            GroupIntake(group, options.check_actions, self._reader(index) if group.spec.state else None)
            for index, group in enumerate(pool.slab.groups)
        ]
        self.in_root = np.ones(self.num_envs, bool)
        self.has_landed = np.zeros(self.num_envs, bool)
        self._is_next_in_root = np.zeros(self.num_envs, bool)
        self._outcomes = np.zeros(self.num_envs, np.int8)  # a `State` each
        self._is_parked = np.zeros(self.num_envs, bool)
        self._sent_as = np.zeros(self.num_envs, np.int64)  # increasing numbers
        self._failures: list[EnvherdError] = []  # of the present command
        self._lost: dict[int, EnvherdError] = {}  # env id -> the loss of its worker, which is not replaced
        self.errors: list[EnvherdError] = []
        self._calls: list[Call] = []  # of the present command
        self._reset_mask: np.ndarray | None = None
        self.guard = CallGuard(self)
        pool.on_loss, pool.on_built = self._note_loss, self._note_built
        self.use_seed(seed)

    @property
    def is_in_flight(self) -> bool:
        """Whether a command of the current call is under way."""
        return bool(self._calls)

    # ---- batches -----------------------------------------------------------------------------

    def current(self, env_ids: np.ndarray) -> TensorDictBase:
        """Return the present root batch `[k]` of some envs, in its own memory."""
        return self._on_device(self._roots.batch(env_ids))

    def _on_device(self, td: TensorDictBase) -> TensorDictBase:
        return td if self.device is None else td.to(self.device)

    def _reader(self, group: int) -> Any:
        """Return the function that reads leaves of the present roots of a group's rows; see `GroupIntake`."""
        env_ids = self._places.env_ids[group]

        def present(key: Any, rows: np.ndarray | None) -> np.ndarray | None:
            value = self._roots.batch(env_ids if rows is None else env_ids[rows]).get(key, None)
            return None if value is None else to_numpy(value)

        return present

    def roots(self) -> list[dict[str, Any]]:
        """Return each env's present root, as nested dicts of tensors and side values (copies)."""
        return [td.to_dict() for td in self.current(self.all_ids).unbind(0)]

    def _cut_off(self, env_ids: np.ndarray) -> Packed:
        """Return the `next` of envs whose episodes were lost: the last true observation, reward 0, truncated."""
        td = self._roots.batch(env_ids)
        rows = [(td, self.specs[env_ids[0]])]
        if len(self._intakes) > 1:
            rows = [(row, self.specs[env_id]) for row, env_id in zip(td.unbind(0), env_ids.tolist(), strict=True)]
        for row, spec in rows:
            lead = tuple(row.batch_size[: row.ndim - len(spec.batch_shape)])
            for leaf in spec.reward:
                row.set(leaf.key, torch.zeros(*lead, *leaf.shape, dtype=getattr(torch, leaf.dtype)))
            for leaf in spec.done:
                row.set(leaf.key, torch.full((*lead, *leaf.shape), leaf.key[-1] != "terminated"))
            if self._is_replacing:
                row.set("interrupted", torch.ones(*row.batch_size, 1, dtype=torch.bool))
        return pack(td if len(rows) == 1 else torch.stack([row for row, _ in rows], 0))

    # ---- commands ----------------------------------------------------------------------------

    def step_all(
        self, td: TensorDictBase, op: Op, cut: np.ndarray | None = None
    ) -> tuple[TensorDictBase, TensorDictBase | None]:
        """Step all envs; return the `next` batch, and the root after it if the op is STEP_RESET.

        Args:
            td: batch `[N]` with the inputs.
            op: STEP or STEP_RESET.
            cut: envs whose episodes were lost in the reset before; see `reset_for_rollout`.
        """
        if td.batch_size[:1] != (self.num_envs,):
            raise ValueError(f"step failed: expected a batch of {self.num_envs} envs, got batch size {td.batch_size}.")
        self.refuse_rolling()
        if cut is not None:
            self.states.move(cut, Event.IS_ALLOWED)  # the hosts find them lost
        inputs = self._read(td, self.all_ids)
        self._command(op, self.all_ids, inputs)
        missing = np.flatnonzero(~self.has_landed)
        if len(missing):
            self._nexts.put(missing, self._cut_off(missing))
        next_td = self._on_device(self._nexts.batch(self.all_ids))
        self._deliver(np.flatnonzero(self.has_landed))
        if self._failures:
            self._failures[0].partial = next_td
            raise self._failures[0]
        if op != Op.STEP_RESET:
            return next_td, None
        if self.in_root.any():
            return next_td, self.current(self.all_ids)
        return next_td, self._root_over(next_td)

    def _root_over(self, next_td: TensorDictBase) -> TensorDictBase:
        """Return the root after a step without resets: the tensors of its `next`."""
        if len(self._intakes) > 1:
            return self.current(self.all_ids)
        return next_td.select(*(leaf.key for leaf in (*self.specs[0].observation, *self.specs[0].done)))

    def _read(self, td: TensorDictBase, env_ids: np.ndarray) -> Any:
        """Check the actions of some envs; return them as arrays `[k, ...]`, or the batch if they are more than arrays.

        Raises:
            ActionError, ResetNeeded, Busy: nothing was sent.
        """
        self.states.check(Op.STEP, env_ids)
        if len(self._intakes) == 1 and not self._intakes[0].side_leaves:
            return self._intakes[0].read(td, None if len(env_ids) == self.num_envs else env_ids)
        for position, env_id in enumerate(env_ids.tolist()):
            intake, row = self._intakes[self._places.group_of[env_id]], self._places.row_of[[env_id]]
            own = td[position].unsqueeze(0)
            intake.read(own, row)
            intake.read_side(own, row)
        return td.detach()

    def _part(self, inputs: Any, positions: np.ndarray) -> Packed:
        """Return the checked actions at some positions."""
        if isinstance(inputs, TensorDictBase):
            return Packed(None, self._actions(inputs[torch.from_numpy(positions)]).clone())
        first, last = positions[0], positions[-1] + 1
        at: Any = slice(first, last) if last - first == len(positions) else positions
        return Packed({leaf.key: value[at] for leaf, value in zip(self._intakes[0].leaves, inputs, strict=True)})

    def _actions(self, td: TensorDictBase) -> TensorDictBase:
        keys = dict.fromkeys(leaf.key for spec in self.specs for leaf in (*spec.action, *spec.state))
        actions = td.select(*keys, strict=False)
        return actions if actions.device is None else actions.cpu().clear_device_()

    def _command(
        self,
        op: Op,
        env_ids: np.ndarray,
        inputs: Any = None,
        extras: Mapping[int, Prepare] = _NO_EXTRAS,
        *,
        is_parked: bool = False,
    ) -> None:
        """Give some envs a command; wait for the answers, unless `recv` shall (`is_parked`)."""
        self.states.check(op, env_ids)
        self.refuse_lost(env_ids)
        self.states.start(env_ids, op, 0)
        self.has_landed[env_ids], self._is_parked[env_ids] = False, is_parked
        self._sent_as[env_ids] = self._sent_as.max() + 1
        if not is_parked:
            self._failures = []
        for host, positions in self.hosts.parts(env_ids):
            own, first, mask = env_ids[positions], host.share.first_env_id, self._reset_mask
            order = Order(
                op=int(op),
                ids=None if own.tolist() == host.env_ids.tolist() else own - first,
                inputs=None if inputs is None else self._part(inputs, positions),
                mask=None if mask is None or op != Op.RESET else mask[host.env_ids],
                extras={i - first: replace(extras[i], env_id=i - first) for i in own.tolist() if i in extras},
            )
            call = Call(host, "run", (order,), self._note, own, is_parked=is_parked)
            if not is_parked:
                self._calls.append(call)
            self.hosts.post(call)
        if not is_parked:
            self.hosts.wait_for(self._calls)
            self._calls = []

    def refuse_lost(self, env_ids: np.ndarray) -> None:
        """Raise if the worker or the host of some envs is lost and is not replaced; nothing was sent."""
        for env_id in env_ids.tolist() if self._lost else ():
            if env_id in self._lost:
                raise self._lost[env_id]
        self.hosts.refuse_lost(env_ids)

    # ---- answers -----------------------------------------------------------------------------

    def _note(self, call: Call, answer: Answer | EnvherdError) -> None:
        """Note the answer to a command."""
        env_ids = call.env_ids
        assert env_ids is not None
        if isinstance(answer, EnvherdError):
            if not call.is_dropped:
                (self.errors if call.is_parked else self._failures).append(answer)
                self._note_lost(env_ids)
            return
        self._note_counts(call.host, answer)
        first = call.host.share.first_env_id
        for error in answer.errors:
            self.note_lost_workers(error)
        if call.is_dropped:
            return
        stepped, cut, roots = answer.ids + first, answer.cut + first, answer.root_ids + first
        self._nexts.put(stepped, answer.next)
        if len(cut):
            self._nexts.put(cut, self._cut_off(cut))
            self.hosts.tally[1] += len(cut)
        self._following.put(stepped, answer.next)
        self._following.take_over(cut, self._nexts)
        self._following.put(roots, answer.roots)
        self._is_next_in_root[env_ids] = np.isin(env_ids, roots)
        self._outcomes[env_ids] = answer.states[env_ids - first]
        landed = env_ids if call.args[0].op == Op.RESET else np.concatenate([stepped, cut])
        if call.is_parked and answer.errors:  # `recv` raises their errors, and returns no rows of these envs
            landed = landed[(self._outcomes[landed] != State.NEEDS_RESET) | np.isin(landed, cut)]
        failed = np.setdiff1d(env_ids, landed)
        self._note_infos(answer, first, env_ids)
        (self.errors if call.is_parked else self._failures).extend(answer.errors)
        self._roots.take_over(failed[np.isin(failed, roots)], self._following)
        self.states.move(failed, Event.FAILS)
        self.hosts.slab.words["answered_ns"][landed] = time.perf_counter_ns()
        self.has_landed[landed] = True

    def note_lost_workers(self, error: EnvherdError) -> None:
        """Note that a host has lost a worker that is not replaced: its envs cannot be stepped any more."""
        if not self._is_replacing and isinstance(error, (WorkerLost, WorkerTimeout)):
            self._lost.update(dict.fromkeys(error.env_ids, error))

    def _note_counts(self, host: Host, answer: Answer) -> None:
        """Note the counts of a host, and which of its idle envs have lost their episodes."""
        host.words, host.tally = answer.words.copy(), answer.tally
        self.hosts.slab.words["episode"][host.env_ids] = answer.words[0]
        idle = host.env_ids[~self.states.under_way[host.env_ids]]
        is_lost = answer.states[idle - host.env_ids[0]] == State.NEEDS_RESET
        self._note_lost(idle[is_lost & (self.states.values[idle] != State.NEEDS_RESET)])

    def _note_infos(self, answer: Answer, first: int, env_ids: np.ndarray) -> None:
        for section, infos in answer.infos.items():
            kept = self.side.infos[section]
            for env_id in env_ids.tolist():
                kept.pop(env_id, None)
            kept.update({first + env_id: info for env_id, info in infos.items()})

    def _note_lost(self, env_ids: np.ndarray) -> None:
        """Note that envs have lost their episodes: their present rows are truncated."""
        if len(env_ids):
            self._roots.put(env_ids, self._cut_off(env_ids))
            self.states.move(env_ids, Event.IS_LOST)

    def _note_loss(self, host: Host) -> None:
        """Note that the envs of a lost host without a command have lost their episodes."""
        idle = host.env_ids[~self.states.under_way[host.env_ids]]
        self._note_lost(idle[self.states.values[idle] != State.NEEDS_RESET])

    def _note_built(self, host: Host, built: Built) -> None:
        host.words = built.answer.words.copy()

    def place(self, host: Host, answer: Answer) -> None:
        """Note where all envs of a host are, after something other than a command."""
        self._roots.put(host.env_ids, answer.roots)
        self.in_root[host.env_ids] = True
        host.words, host.tally = answer.words.copy(), answer.tally
        self.hosts.slab.words["episode"][host.env_ids] = answer.words[0]
        for value, event in _PLACED.items():
            self.states.move(host.env_ids[answer.states == value], event)

    def _deliver(self, env_ids: np.ndarray) -> None:
        """Make the latest rows of envs that have answered their present ones."""
        self._roots.take_over(env_ids, self._following)
        self.in_root[env_ids] = self._is_next_in_root[env_ids]
        for value, event in _EVENTS.items():
            self.states.move(env_ids[self._outcomes[env_ids] == value], event)
        self.has_landed[env_ids] = False

    # ---- resets ------------------------------------------------------------------------------

    def write_reset_masks(self, mask: np.ndarray | None) -> None:
        """Keep the mask of the next reset, bool `[N, *B]`; None for all parts."""
        self._reset_mask = mask if self.specs[0].batch_shape else None

    def reset_envs(self, env_ids: np.ndarray, extras: Mapping[int, Prepare] = _NO_EXTRAS) -> None:
        """Reset some envs and wait for them."""
        self._command(Op.RESET, env_ids, extras=extras)
        self._deliver(env_ids[self.has_landed[env_ids]])
        if self._failures:
            raise self._failures[0]

    def reset_for_rollout(self, *, auto_reset: bool) -> tuple[np.ndarray, np.ndarray | None]:
        """Reset all envs, or those that have ended; see `Engine.reset_for_rollout`."""
        if auto_reset:
            self.write_reset_masks(None)
            self.reset_envs(self.all_ids)
            return np.ones(self.num_envs, bool), None
        fresh = self.states.needs_reset
        if not fresh.any():
            return fresh, None
        before = self._roots.like()
        before.take_over(self.all_ids, self._roots)
        mask = None
        if self.specs[0].batch_shape:
            mask = to_numpy(self.current(self.all_ids)["done"])[..., 0].copy()
            mask[fresh & ~mask.reshape(self.num_envs, -1).any(1)] = True
        self.write_reset_masks(mask)
        self.reset_envs(np.flatnonzero(fresh))
        cut = np.flatnonzero(self.states.needs_reset & ~fresh)
        self._roots.take_over(cut, before)  # the interrupted row reports the loss, not the row before it
        return fresh, cut if len(cut) else None

    def restore(self, roots: Sequence[Mapping[str, Any]] | None, ended: np.ndarray | None) -> None:
        """Note that all envs have been restored; see `Calls.restore`."""
        calls = []
        for host in self.hosts.all:
            own = None if roots is None else [dict(roots[i]) for i in host.env_ids.tolist()]
            over = None if ended is None else ended[host.env_ids]
            calls.append(self.hosts.call(host, "restore", own, over))
        for host, call in zip(self.hosts.all, calls, strict=True):
            self.place(host, self.hosts.get(call))

    # ---- everything else ---------------------------------------------------------------------

    def recover(self) -> None:
        """After a call was broken off anywhere: wait for its commands, and drop their answers."""
        self.is_rolling = False
        for call in self._calls:
            call.is_dropped = True
        for host in self.hosts.all:
            for call in host.calls:
                call.is_dropped = call.is_dropped or (call.env_ids is not None and not call.is_parked)
        self.hosts.wait_for([call for host in self.hosts.all for call in host.calls if call.is_dropped])
        self._calls = []
        parked = [call.env_ids for host in self.hosts.all for call in host.calls if call.is_parked]
        is_sent = self.has_landed & self._is_parked
        is_sent[np.concatenate([np.zeros(0, np.int64), *parked])] = True
        broken = np.flatnonzero(self.states.under_way & ~is_sent)
        if len(broken):
            self._roots.put(broken, self._cut_off(broken))
            self.states.move(broken, Event.IS_BROKEN_OFF)
        self.is_dirty = False

    def ask(self, what: str, env_ids: list[int], **question: Any) -> dict[int, Any]:
        """Send envs a request other than a step; see `Pool.ask`. They answer after the steps that were sent before."""
        try:
            return self.hosts.ask(what, env_ids, **question)
        except EnvherdError:
            for host, _ in self.hosts.parts(np.array(env_ids, np.int64)):
                if host.loss is None and not host.calls:
                    self._note_counts(host, self.hosts.get(self.hosts.call(host, "status")))
            raise

    def statistics(self) -> Statistics:
        """Return the statistics so far."""
        living = [host for host in self.hosts.all if host.loss is None]
        calls = [self.hosts.call(host, "statistics") for host in living]
        found = {call.host.index: self.hosts.get(call) for call in calls}
        parts = [found.get(host.index) or _of_lost(host) for host in self.hosts.all]
        workers = [
            _renumbered(worker, host)
            for host, part in zip(self.hosts.all, parts, strict=True)
            for worker in part.workers
        ]
        steps = [count for part in parts for count in part.steps_per_env]
        tally = self.hosts.tally
        return Statistics(
            env_steps=sum(steps),
            agent_steps=sum(count * num_agents(spec) for count, spec in zip(steps, self.specs, strict=True)),
            resets=sum(part.resets for part in parts),
            episodes=sum(part.episodes for part in parts),
            worker_losses=int(tally[0]) + sum(part.worker_losses for part in parts),
            interrupted=int(tally[1]) + sum(part.interrupted for part in parts),
            env_errors=int(tally[2]) + sum(part.env_errors for part in parts),
            recycled=int(tally[3]) + sum(part.recycled for part in parts),
            steps_per_env=tuple(steps),
            resets_per_env=tuple(count for part in parts for count in part.resets_per_env),
            wall_s=time.monotonic() - self.ready_at,
            workers=tuple(workers),
            path=str(self.plain),
        )

    # ---- send and recv -----------------------------------------------------------------------

    def send(self, td: TensorDictBase, env_ids: np.ndarray, op: Op) -> None:
        """Check a batch of actions and send them to the hosts."""
        inputs = self._read(td, env_ids)
        if isinstance(inputs, TensorDictBase):
            self._sent |= dict(zip(env_ids.tolist(), self._actions(inputs).clone().unbind(0), strict=True))
        else:
            self._intakes[0].write(inputs, env_ids)
        self._command(op, env_ids, inputs, is_parked=True)

    def wait_for(self, sent: np.ndarray, wanted: int, timeout_s: float | None) -> np.ndarray:
        """Wait until some sent envs have answered; return these, the oldest command first.

        Raises:
            EnvherdError: of an env, or of a host; the envs concerned are no longer under way.
        """
        end = None if timeout_s is None else time.monotonic() + timeout_s
        left: float | None = 0.0  # first take what has arrived
        while True:
            self.hosts.wait([call for host in self.hosts.all for call in host.calls if call.is_parked], 1, left)
            self.raise_error()
            ready = sent[self.has_landed[sent]]
            left = None if end is None else end - time.monotonic()
            if len(ready) >= wanted or (left is not None and left <= 0):
                return ready[np.argsort(self._sent_as[ready], kind="stable")]

    def raise_error(self) -> None:
        """Raise the next error of envs that were sent, if there is one."""
        if self.errors:
            raise self.errors.pop(0)

    def take_sent(self, env_ids: np.ndarray, *, with_root: bool) -> TensorDictBase:
        """Return the transitions of envs that have answered."""
        next_td = self._on_device(self._nexts.batch(env_ids))
        td: TensorDictBase = TensorDict({}, next_td.batch_size, device=next_td.device)
        if with_root:
            td = self._with_inputs(self.current(env_ids), env_ids)
        td.set("next", next_td)
        self._deliver(env_ids)
        return set_ids(td, env_ids)

    def _with_inputs(self, td: TensorDictBase, env_ids: np.ndarray) -> TensorDictBase:
        """Add the latest actions of some envs to their roots."""
        if not self._sent:
            intake = self._intakes[0]
            for leaf, value in zip(intake.leaves, intake.current(env_ids), strict=True):
                set_leaf(td, leaf.key, torch.from_numpy(value))
            return td
        rows = [self._sent[env_id] for env_id in env_ids.tolist()]
        if isinstance(td, LazyStackedTensorDict):
            for own, row in zip(td.tensordicts, rows, strict=True):
                own.update(row)
            return td
        return td.update(torch.stack(rows, 0))


class ClusterExchange(Exchange):
    """Sends to hosts: an env is ready when all envs of its host that were sent with it are."""

    _engine: ClusterEngine  # type: ignore[assignment]  # with the same methods, as far as they are used

    def recall(self, env_ids: Any) -> None:
        """Return None: roots are always copies."""

    def send(self, td: TensorDictBase, env_ids: np.ndarray, op: Op) -> None:
        """Check a batch of actions and send them to the hosts."""
        self._engine.refuse_rolling()
        if len(env_ids):
            self._engine.send(td, env_ids, op)

    def recv(self, *args: Any, **kwargs: Any) -> TensorDictBase:
        """Wait for some of the envs that were sent; see `BatchedEnv.recv`."""
        self._engine.raise_error()
        return super().recv(*args, **kwargs)

    def _wait_for(self, sent: np.ndarray, wanted: int, timeout_s: float | None) -> np.ndarray:
        return self._engine.wait_for(sent, wanted, timeout_s)

    def _take(self, ready: np.ndarray, *, with_root: bool) -> TensorDictBase:
        return self._engine.take_sent(ready, with_root=with_root)


def _renumbered(worker: WorkerStatistics, host: Host) -> WorkerStatistics:
    """Return a host's figures of a worker with the ids of the whole batch."""
    return replace(
        worker,
        worker_id=worker.worker_id + host.worker_ids[0],
        env_ids=tuple(env_id + host.share.first_env_id for env_id in worker.env_ids),
        generation=worker.generation + host.num_predecessors,
        cpu=None,
    )


def _of_lost(host: Host) -> Statistics:
    """Return the statistics of a host that is lost: the counts of its latest answer."""
    words = np.zeros((4, len(host.env_ids)), np.int64) if host.words is None else host.words
    _, steps, resets, ends = words
    blocks = spread(len(host.env_ids), len(host.worker_ids))
    workers = tuple(
        WorkerStatistics(
            index, 0, block, 0, 0.0, 0.0, 0, 0, 0.0, int(steps[[*block]].sum()), int(resets[[*block]].sum())
        )
        for index, block in enumerate(blocks)
    )
    counts = tuple(steps.tolist()), tuple(resets.tolist())
    return Statistics(sum(counts[0]), 0, sum(counts[1]), int(ends.sum()), 0, 0, 0, *counts, 0.0, workers)
