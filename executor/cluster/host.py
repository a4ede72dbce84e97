"""The host: what runs on a node. It holds the workers of a share of the batch and the slab they write to.

Guarantees: every order is answered, by rows or by an error, whatever became of the workers; an env that answers is not
held up by its neighbours in other workers. The host builds no env and imports none: factories pass through as bytes.
Knows nothing of Ray but the name of its node: the carrier of the orders calls methods from one thread for
`collect`, one for `report` and `ping`, and one for the rest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import torch
from tensordict import TensorDict

from envherd.executor.batched import BatchedEnv
from envherd.executor.batches.random_actions import ActionSampler
from envherd.executor.cluster.folding import fold
from envherd.executor.cluster.orders import (
    ENV_WORDS,
    Built,
    Figures,
    Order,
    PolicyKind,
    Reply,
    Report,
    Rolled,
    RollOrder,
    Share,
    Survey,
)
from envherd.executor.cluster.parentage import end_with_parent
from envherd.executor.cluster.wire import End
from envherd.executor.machine.machine import read_machine, usable_cores
from envherd.executor.options import ExecutorOptions
from envherd.executor.pools import error_messages as diagnosis
from envherd.executor.pools.blueprint import spread
from envherd.executor.pools.crew import Blueprint
from envherd.executor.pools.replies import Outcome
from envherd.executor.pools.worker_pool import WorkerPool
from envherd.executor.protocol.env_states import Event
from envherd.executor.protocol.flight import Flight
from envherd.executor.rollouts.policy_state import leaf_keys
from envherd.executor.sizing.probing import ProbeLimits, Subject
from envherd.executor.sizing.recommending import measure
from envherd.executor.sizing.settings import WORKERS_ONLY
from envherd.shm.cgroups import read_word
from envherd.shm.slab import WORDS
from envherd.workers.errors import EnvherdError, FactoryError
from envherd.workers.protocol import RESET, Flag, Op

_NOBODY = np.zeros(0, np.int64)
_STREAM = 2**32 - 3  # spawn_key of a host's own generators: apart from envs' and from the driver's sampler


def versions() -> dict[str, str]:
    """Return the versions that must be equal on all nodes, by name."""
    python = platform.python_version()
    names = ("envherd", "ray", "numpy", "torch", "tensordict", "cloudpickle")
    return {"python": python.rpartition(".")[0], **{name: metadata.version(name) for name in names}}


class NodeHost:
    """Runs a share; see the module."""

    def __init__(self) -> None:
        end_with_parent()
        self._lock = threading.Lock()
        self._door = threading.Lock()  # held while waiting for the lock, so that `collect` does not take it again
        self._hailing = threading.Lock()
        self._is_renewing = False  # the call that has the pool must not be broken off, and ends soon
        self._is_built = threading.Event()  # or cannot be
        self._policies: dict[int, Any] = {}
        self._versions: dict[int, int] = {}

    def report(self) -> Report:
        """Say what there is, before there are envs."""
        import ray

        return Report(
            node_id=ray.get_runtime_context().get_node_id(),
            hostname=socket.gethostname(),
            pid=os.getpid(),
            cores=usable_cores(),
            memory_bytes=read_machine().memory_available,
            versions=versions(),
            boot_id=read_word(Path("/proc/sys/kernel/random/boot_id")) or "",
        )

    def ping(self) -> int:
        """Say that this process lives."""
        return os.getpid()

    def survey(self, subject: Subject, limits: ProbeLimits) -> Survey | EnvherdError:
        """Look at this machine, measure an env and run it on workers; what went wrong is returned."""
        options = ExecutorOptions()
        try:
            measured, machine, found = measure(subject, WORKERS_ONLY, limits, options)
        except EnvherdError as error:
            return error
        return Survey(machine=machine, measured=measured, runs=found.runs)

    # ---- start -------------------------------------------------------------------------------

    def build(self, share: Share) -> Built | EnvherdError:
        """Start the workers and build the envs; what went wrong is returned."""
        report = self.report()
        diagnosis.numbering = diagnosis.Numbering(share.first_env_id, share.first_worker_id, report.place)
        blocks = spread(len(share.factories), share.num_workers)
        blueprint = Blueprint(share.factories, share.env_kwargs, blocks, share.root_seed, share.preload)
        options = dataclasses.replace(share.options, loss_grace_s=None)  # an answer is of all envs that were asked
        pool = WorkerPool(blueprint, options)
        try:
            pool.start()
        except EnvherdError as error:
            self._is_built.set()
            return error
        except ValueError as error:
            self._is_built.set()
            return FactoryError(f"{error} ({report.place})")
        self._share = share
        self._pool = pool
        self._env = BatchedEnv(pool, seed=share.root_seed, device=None, copy=True, options=options)
        self._flights = self._env.engine.flights
        self._positions = self._flights.positions
        self._end = End(pool.slab, pool.plan)
        self._all_ids = np.arange(pool.num_envs)
        self._is_sent = np.zeros(pool.num_envs, bool)
        self._numbers = np.zeros(pool.num_envs, np.int64)
        self._sent_at = 0.0
        self._seed_own_generators(share.root_seed)
        self._is_built.set()
        return Built(specs=tuple(pool.specs), blocks=blocks, pids=self.pids(), report=report)

    def _seed_own_generators(self, root_seed: int) -> None:
        """Draw what is drawn here, and not in the driver, from streams of this share's own."""
        seeds = np.random.SeedSequence(root_seed, spawn_key=(_STREAM, self._share.first_env_id)).generate_state(2)
        self._env.engine.sampler = ActionSampler(self._pool.specs, int(seeds[0]))
        torch.manual_seed(int(seeds[1]))

    # ---- commands ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Hold the pool alone: a wait in `collect` lets go of it."""
        with self._door:
            with self._hailing:
                if not self._is_renewing:
                    self._pool.hail()
            self._lock.acquire()
            self._pool.unhail()
        try:
            yield
        finally:
            self._lock.release()

    def run(self, order: Order) -> Reply:
        """Carry out an order and wait for all of its answers."""
        with self._exclusive():
            try:
                flight = self._begin(order)
                self._wait_for(flight, order)
                return self._answer(flight)
            except EnvherdError as error:
                self._flights.losses.forget()
                return Reply(failure=error)

    def _begin(self, order: Order, flags: int = 0) -> Flight:
        """Give the envs of an order its commands. The driver knows which are legal."""
        flights = self._flights
        if order.inputs is not None:
            self._end.unpack_inputs(order.inputs, order.ids)
        if not flights.states.are_running():
            ids = self._all_ids if order.ids is None else order.ids
            flights.states.move(ids, Event.IS_BROKEN_OFF)  # answers that the driver does not wait for any more
            flights.states.move(ids, Event.IS_ALLOWED)
        extras = {extra.env_id: extra for extra in order.extras}
        return flights.begin(
            Op(order.op),
            order.ids,
            resets=order.reset_ids,
            extras=extras,
            is_parked=bool(flags),
            flags=flags,
            is_late=order.is_late,
        )

    def _wait_for(self, flight: Flight, order: Order) -> None:
        reset_s = self._pool.options.reset_timeout_s
        if flight.is_all:
            self._pool.wait_all(order.timeout_s, reset_s)
        else:
            self._pool.wait_some(flight.ids, len(flight.ids), order.timeout_s, reset_s)

    def submit(self, order: Order) -> EnvherdError | None:
        """Begin an order whose answers `collect` brings, env by env."""
        with self._exclusive():
            try:
                assert order.ids is not None
                self._begin(order, Flag.EACH)
            except EnvherdError as error:
                return error
            self._numbers[order.ids] = order.number
            self._is_sent[order.ids] = True
            self._sent_at = time.monotonic()
        return None

    def collect(self, timeout_s: float | None) -> Reply:
        """Wait until at least one env has answered a submitted order; return all that have.

        Args:
            timeout_s: seconds from the latest order after which workers that owe an answer are killed.
        """
        self._is_built.wait()  # it comes in another thread than this
        while True:
            with self._door:
                self._lock.acquire()
            try:
                sent = np.flatnonzero(self._is_sent)
                if not len(sent):
                    return Reply(ids=_NOBODY, numbers=_NOBODY)
                left = None if timeout_s is None else max(0.0, self._sent_at + timeout_s - time.monotonic())
                ready = self._pool.wait_some(sent, 1, left, self._pool.options.reset_timeout_s)
                if len(ready) or self._pool.outcome:
                    return self._collected(ready)
            finally:
                self._lock.release()

    def _collected(self, ready: np.ndarray) -> Reply:
        numbers = self._numbers[ready]
        self._is_sent[ready] = False
        try:
            return self._answer(self._flights.open_delivery(ready), numbers)
        except EnvherdError as error:  # a successor that a worker was to be replaced by
            self._flights.losses.forget()
            self._is_sent[:] = False
            return Reply(ids=_NOBODY, numbers=_NOBODY, failure=error)

    def _answer(self, flight: Flight, numbers: np.ndarray | None = None) -> Reply:
        """Note where envs are after commands, and report it.

        Args:
            flight: all of whose envs have answered.
            numbers: int64 `[k]`, of their orders, if these were submitted.
        """
        flights = self._flights
        with self._renewing():
            outcome = flights.report(flight)
        if outcome is None and flight.is_all and flight.op != Op.RESET:
            root_ids = _NOBODY if flight.was_reset is None else flight.was_reset
            return self._reply(self._end.pack_rows(None, flight.at, root_ids, flight.at), (None, None, root_ids), None)
        lost = flights.losses.envs_of(outcome.losses) if outcome is not None else _NOBODY
        self._is_sent[lost] = False
        alive = ~np.isin(flight.ids, lost)
        told, root_ids = flight.ids[alive], _NOBODY if flight.was_reset is None else flight.was_reset
        next_ids = told[flights.states.ops[told] != RESET]
        columns = flights.states.columns
        packed = self._end.pack_rows(next_ids, columns[next_ids], root_ids, columns[root_ids])
        reply = self._reply(packed, (told, next_ids, root_ids), outcome)
        return reply if numbers is None else dataclasses.replace(reply, numbers=numbers[alive])

    @contextlib.contextmanager
    def _renewing(self) -> Iterator[None]:
        """Keep other calls from breaking off what may replace a worker between episodes."""
        if not self._pool.options.recycles:
            yield
            return
        with self._hailing:
            self._is_renewing = True
            self._pool.unhail()
        try:
            yield
        finally:
            self._is_renewing = False

    def _reply(
        self,
        rows: np.ndarray,
        who: tuple[np.ndarray | None, np.ndarray | None, np.ndarray],
        outcome: Outcome | None,
    ) -> Reply:
        ids, next_ids, root_ids = who
        words = self._pool.slab.words
        return Reply(
            rows=rows,
            ids=ids,
            next_ids=next_ids,
            root_ids=root_ids,
            env_words=np.stack([words[name] for name in ENV_WORDS]),
            outcome=outcome,
        )

    # ---- everything else ---------------------------------------------------------------------

    def seed(self, root_seed: int, episodes: Sequence[int] | None = None) -> EnvherdError | None:
        """Use a new root seed; see `Pool.seed`."""
        with self._exclusive():
            try:
                self._env.engine.set_seed(root_seed, episodes)
            except EnvherdError as error:
                return error
            self._seed_own_generators(root_seed)
        return None

    def ask(self, what: str, env_ids: list[int], question: dict[str, Any]) -> dict[int, Any] | EnvherdError:
        """Ask envs for something that is not a step; see `Pool.ask`."""
        with self._exclusive():
            try:
                return self._pool.ask(what, env_ids, **question)
            except EnvherdError as error:
                return error

    def restart(self, worker_id: int) -> tuple[int, ...] | EnvherdError:
        """Begin to replace a lost worker; return the workers' pids."""
        with self._exclusive():
            try:
                self._pool.begin_restart(worker_id)
            except EnvherdError as error:
                return error
            return self.pids()

    def pids(self) -> tuple[int, ...]:
        """Return the workers' process ids."""
        return tuple(self._pool.pid_of(worker_id) for worker_id in range(self._pool.num_workers))

    def output(self, worker_id: int) -> str:
        """Return what a worker has printed."""
        return self._pool.worker_output(worker_id)

    def figures(self) -> Figures:
        """Return what the workers have done and use."""
        with self._exclusive():
            statistics = self._env.engine.statistics()
        workers = statistics.workers
        words = self._pool.slab.words
        told = [name for name, (length, writer, _) in WORDS.items() if length != "env" and writer == "worker"]
        told += ["seat", "looks", "stacked"]  # of placement, which is the host's business
        return Figures(
            processes=[(one.uss_bytes, one.pss_bytes, one.cpu_s) for one in workers],
            words={name: words[name].reshape(self._pool.num_workers, -1).copy() for name in told},
            now_ns=time.monotonic_ns(),
            pids=tuple(one.pid for one in workers),
            generations=tuple(one.generation for one in workers),
            recycled=statistics.recycled,
        )

    def close(self, timeout_s: float) -> None:
        """Close the envs and end the workers."""
        pool = getattr(self, "_pool", None)
        if pool is not None:
            pool.close(timeout_s)

    # ---- rollouts ----------------------------------------------------------------------------

    def take_policy(self, policy_id: int, pickled: bytes, kind: PolicyKind) -> None:
        """Take a policy, or what builds one here; the one before it is forgotten."""
        given = cloudpickle.loads(pickled)
        self._policies = {policy_id: given() if kind == "factory" else given}
        self._versions = {policy_id: -1}

    def roll(self, order: RollOrder, weights: list[np.ndarray] | None) -> Rolled | EnvherdError:
        """Make a rollout here; what went wrong is returned."""
        began = time.monotonic()
        policy: Any = None
        if order.policy_id is not None:
            policy = self._policies[order.policy_id]
            if weights is not None and self._versions[order.policy_id] != order.version:
                load_weights(policy, weights)
                self._versions[order.policy_id] = order.version
        engine = self._env.engine
        before = self._pool.num_losses, engine.flights.losses.num_interrupted
        with self._exclusive():
            engine.states.restore(self._all_ids, order.ended)
            try:
                data = self._env.rollout(order.num_steps, policy, **order.kwargs)
            except EnvherdError as error:
                error.partial = None
                return error
            columns = self._positions.columns
            assert self._positions.in_root.all()
            rows = self._end.pack_rows(_NOBODY, 0, self._all_ids, columns.copy())
            reply = self._reply(rows, (None, _NOBODY, self._all_ids), None)
        leaves = _plain_leaves(data)
        kept, folded = (None, {}) if leaves is None else fold(leaves)
        return Rolled(
            leaves=kept,
            folded=folded,
            batch=data if leaves is None else None,
            tail=tuple(data.batch_size[2:]),
            version=order.version,
            reply=reply,
            worker_losses=self._pool.num_losses - before[0],
            interrupted=engine.flights.losses.num_interrupted - before[1],
            wall_s=time.monotonic() - began,
        )


def weights_of(policy: torch.nn.Module) -> list[np.ndarray]:
    """Return a module's parameters, then its buffers, on the host (VIEWS where they are there)."""
    return [tensor.detach().cpu().numpy() for tensor in (*policy.parameters(), *policy.buffers())]


def load_weights(policy: torch.nn.Module, weights: list[np.ndarray]) -> None:
    """Put what `weights_of` returned into a module of the same kind."""
    with torch.no_grad():
        for mine, array in zip((*policy.parameters(), *policy.buffers()), weights, strict=True):
            mine.copy_(torch.tensor(array))


def _plain_leaves(data: Any) -> dict[tuple[str, ...], np.ndarray] | None:
    """Return the leaves of a batch as arrays, or None if it is no plain TensorDict of tensors."""
    if type(data) is not TensorDict:
        return None
    leaves = {}
    for key in leaf_keys(data):
        value = data.get(key)
        if not isinstance(value, torch.Tensor):
            return None
        leaves[key] = value.numpy()
    return leaves
