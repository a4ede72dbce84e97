"""The host: the process on a node that passes commands to a pool, whose workers run a share of the batch.

Guarantees: every order is answered by rows or by an error, even if workers are lost; an env's answer does not wait for
envs of other workers. The host builds no env and imports no env package: factories pass through as bytes.
Does not know the states of envs, or how to handle a loss: only the driver has flights. Of Ray it knows only the name of
its node.
Threads: Ray calls `collect` in one thread, `report`, `ping` and `memory` in another, all other methods in a third.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import platform
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import torch
from tensordict import TensorDict, is_leaf_nontensor

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
from envherd.executor.cluster.wire import WireRows
from envherd.executor.machine.machine import read_machine, usable_cores
from envherd.executor.options import ExecutorOptions
from envherd.executor.pools import error_messages
from envherd.executor.pools.blueprint import spread
from envherd.executor.pools.crew import Blueprint
from envherd.executor.pools.worker_pool import WorkerPool
from envherd.executor.protocol.columns import Places, ring_columns
from envherd.executor.sizing.probing import ProbeLimits, Subject
from envherd.executor.sizing.recommending import measure
from envherd.executor.sizing.settings import WORKERS_ONLY
from envherd.shm.cgroups import read_word
from envherd.shm.slab import WORDS
from envherd.workers import registries
from envherd.workers.errors import EnvherdError, FactoryError
from envherd.workers.protocol import RESET, RING, STEP_RESET

_NOBODY = np.zeros(0, np.int64)
_STREAM = 2**32 - 3  # spawn_key of a host's generators: different from the envs' and from the driver's sampler


def versions() -> dict[str, str]:
    """Return the versions that must be equal on all nodes, by name."""
    python = platform.python_version()
    names = ("envherd", "ray", "numpy", "torch", "tensordict", "cloudpickle")
    return {"python": python.rpartition(".")[0], **{name: metadata.version(name) for name in names}}


def _returns_errors(method: Callable[..., Any]) -> Callable[..., Any]:
    """Make a method return its errors instead of raising them, because Ray would wrap them."""

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except EnvherdError as error:
            error.partial = None
            return error

    return run


class NodeHost:
    """Runs a share; see the module. Its methods return the errors of envs, workers and arguments."""

    def __init__(self) -> None:
        end_with_parent()
        self._lock = threading.Lock()
        self._door = threading.Lock()  # held while waiting for the lock, so that `collect` does not take it again
        self._is_built = threading.Event()  # or the build has failed
        self._rolling: BatchedEnv | None = None  # over the same pool; made for the first rollout
        self._policies: dict[int, Any] = {}
        self._versions: dict[int, int] = {}

    def report(self) -> Report:
        """Return a report on the node, before there are envs."""
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
        """Return, as a sign of life."""
        return os.getpid()

    @_returns_errors
    def survey(self, subject: Subject, limits: ProbeLimits) -> Survey:
        """Read this machine's limits, measure an env and run it on workers."""
        measured, machine, found = measure(subject, WORKERS_ONLY, limits, ExecutorOptions())
        return Survey(machine=machine, measured=measured, runs=found.runs)

    # ---- start -------------------------------------------------------------------------------

    @_returns_errors
    def build(self, share: Share) -> Built:
        """Start the workers and build the envs."""
        report = self.report()
        error_messages.numbering = error_messages.Numbering(share.first_env_id, share.first_worker_id, report.place)
        registries.install(share.registered)
        blocks = spread(len(share.factories), share.num_workers)
        blueprint = Blueprint(share.factories, share.env_kwargs, blocks, share.root_seed, share.preload)
        options = dataclasses.replace(share.options, loss_grace_s=None)  # an answer covers all envs of the order
        pool = WorkerPool(blueprint, options)
        try:
            pool.start()
            self._adopt(share, pool)
        except ValueError as error:
            raise FactoryError(f"{error} ({report.place})") from None
        finally:
            self._is_built.set()
        return Built(specs=tuple(pool.specs), pids=self.pids(), report=report)

    def _adopt(self, share: Share, pool: WorkerPool) -> None:
        """Take over a started pool, with the counts of the host before."""
        self._share, self._pool, self._root_seed = share, pool, share.root_seed
        if share.words is not None:
            for name, values in zip(ENV_WORDS, share.words, strict=True):
                pool.slab.words[name][:] = values
            resets = pool.slab.words["resets"]
            pool.resets_before_start[:] = [resets[list(block)].max() for block in pool.blueprint.blocks]
        self._wire_rows = WireRows(pool.slab, pool.plan)
        self._ring = ring_columns(pool.slab, Places(pool.plan))
        self._all_ids = np.arange(pool.num_envs)
        self._is_sent = np.zeros(pool.num_envs, bool)
        self._numbers, self._ops, self._columns = (np.zeros(pool.num_envs, np.int64) for _ in range(3))
        self._sent_at = 0.0

    # ---- commands ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Acquire the pool exclusively: a wait in `collect` releases it."""
        with self._door:
            self._pool.stop_waits()
            self._lock.acquire()
            self._pool.allow_waits()
        try:
            yield
        finally:
            self._lock.release()

    @_returns_errors
    def run(self, order: Order) -> Reply:
        """Carry out an order and wait for all of its answers."""
        reset_s = self._pool.options.reset_timeout_s
        with self._exclusive():
            try:
                self._give(order)
                if order.ids is None:
                    self._pool.wait_all(order.timeout_s, reset_s)
                else:
                    self._pool.wait_some(order.ids, len(order.ids), order.timeout_s, reset_s)
            except EnvherdError:
                self._pool.outcome.losses.clear()  # the driver gets this one
                raise
            reply = self._reply(order.ids)
        return reply if order.target == RING else dataclasses.replace(reply, target=order.target, columns=order.columns)

    def _give(self, order: Order) -> None:
        """Give the envs of an order its commands. The driver has checked that they are legal."""
        pool, ids = self._pool, self._all_ids if order.ids is None else order.ids
        if order.inputs is not None:
            self._wire_rows.unpack_inputs(order.inputs, order.ids)
        for extra in order.extras:
            pool.prepare(extra)
        columns = order.columns % pool.plan.num_frames
        if order.ids is None:
            pool.submit_all(order.op, RING, columns, order.reset_ids)
        elif order.is_late:
            pool.submit_later(ids, order.op, RING, columns, order.flags)
            pool.wake_workers()  # its successor may be running already, so no worker is replaced
        else:
            pool.submit(ids, order.op, RING, columns, order.flags)
        self._numbers[ids], self._ops[ids], self._columns[ids] = order.number, order.op, columns
        if order.reset_ids is not None:
            self._ops[order.reset_ids] = RESET

    @_returns_errors
    def submit(self, order: Order) -> None:
        """Begin an order whose answers `collect` returns env by env."""
        with self._exclusive():
            self._give(order)
            self._is_sent[order.ids] = True
            self._sent_at = time.monotonic()

    @_returns_errors
    def collect(self, timeout_s: float | None) -> Reply:
        """Wait until at least one env has answered a submitted order; return all that have.

        Args:
            timeout_s: seconds from the latest order after which workers that owe an answer are killed.
        """
        self._is_built.wait()  # `build` runs in another thread
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
                    self._is_sent[ready] = False
                    return self._reply(ready)
            finally:
                self._lock.release()

    def _reply(self, ids: np.ndarray | None) -> Reply:
        """Return the answers to the latest commands of some envs (None for all), none of which owes an answer."""
        pool = self._pool
        asked = self._all_ids if ids is None else ids
        outcome = pool.outcome.hand_out(asked) if pool.outcome else None
        if outcome is not None:
            lost = pool.blueprint.envs_of(outcome.losses)
            outcome.forget_rows(lost)  # an env may have answered before its worker was lost
            self._is_sent[lost] = False
            ids = asked = asked[~np.isin(asked, lost)]
        ops, columns = self._ops[asked], self._columns[asked]
        is_stepped, is_reset = ops != RESET, ops == RESET
        may_be_reset = ops == STEP_RESET
        is_reset[may_be_reset] = self._ring.next_done_of(asked[may_be_reset], columns[may_be_reset])
        if outcome is not None:
            is_reset &= ~np.isin(asked, [*outcome.faults])
        next_ids, root_ids = asked[is_stepped], asked[is_reset]
        is_all = ids is None and bool(is_stepped.all())
        at: Any = int(columns[0]) if is_all else columns[is_stepped]
        return Reply(
            ids=ids,
            numbers=int(self._numbers[0]) if ids is None else self._numbers[asked],
            columns=at if is_all else columns,
            next_ids=None if is_all else next_ids,
            nexts=self._wire_rows.pack_rows("next", None if is_all else next_ids, at),
            root_ids=root_ids,
            roots=self._wire_rows.pack_rows("root", root_ids, columns[is_reset]),
            words=self._counts(),
            resets_before_start=pool.resets_before_start.copy(),
            outcome=outcome,
        )

    def _counts(self) -> np.ndarray:
        """Return the workers' counts of each env, int64 `[ENV_WORDS, n]`."""
        return np.stack([self._pool.slab.words[name] for name in ENV_WORDS])

    # ---- everything else ---------------------------------------------------------------------

    @_returns_errors
    def seed(self, root_seed: int, episodes: Sequence[int] | None = None) -> None:
        """Use a new root seed; see `Pool.seed`."""
        with self._exclusive():
            self._pool.seed(root_seed, episodes)
            self._root_seed, self._is_seeded = root_seed, False

    @_returns_errors
    def tell_pool(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the pool; see `Pool`."""
        with self._exclusive():
            return getattr(self._pool, method)(*args, **kwargs)

    def memory(self, worker_id: int) -> int:
        """Return the bytes of private memory of a worker and its descendants."""
        return self._pool.memory_of(worker_id)

    def pids(self) -> tuple[int, ...]:
        """Return the workers' process ids."""
        return tuple(map(self._pool.pid_of, self._pool.worker_ids))

    def figures(self) -> Figures:
        """Return the workers' counts and resources."""
        pool = self._pool
        with self._exclusive():
            figures = pool.figures()
        names = [name for name, (length, writer, _) in WORDS.items() if length != "env" and writer == "worker"]
        return Figures(
            processes=[(one.uss_bytes, one.pss_bytes, one.cpu_s) for one in figures],
            words={name: pool.slab.words[name].reshape(pool.num_workers, -1).copy() for name in names},
            now_ns=time.monotonic_ns(),
            pids=self.pids(),
            generations=tuple(map(pool.generation_of, pool.worker_ids)),
            recycled=pool.num_recycled,
        )

    def close(self, timeout_s: float) -> None:
        """Close the envs and end the workers."""
        pool = getattr(self, "_pool", None)
        if pool is not None:
            pool.close(timeout_s)

    # ---- rollouts ----------------------------------------------------------------------------

    def take_policy(self, policy_id: int, pickled: bytes, kind: PolicyKind) -> None:
        """Take a policy, or a callable that builds one here; it replaces the previous one."""
        given = cloudpickle.loads(pickled)
        self._policies = {policy_id: given() if kind == "factory" else given}
        self._versions = {policy_id: -1}

    @_returns_errors
    def roll(self, order: RollOrder, weights: list[np.ndarray] | None) -> Rolled:
        """Make a rollout on this node."""
        began = time.monotonic()
        policy: Any = None
        if order.policy_id is not None:
            policy = self._policies[order.policy_id]
            if weights is not None and self._versions[order.policy_id] != order.version:
                load_weights(policy, weights)
                self._versions[order.policy_id] = order.version
        with self._exclusive():
            env = self._rolling = self._rolling or self._make_executor()
            engine = env.engine
            before = self._pool.num_losses, engine.flights.losses.num_interrupted
            self._seed_own_generators(env)
            self._put(env, order)
            data = env.rollout(order.num_steps, policy, **order.kwargs)
            positions, side = engine.positions, engine.side
            assert positions.in_root.all()
            reply = Reply(
                words=self._counts(),
                resets_before_start=self._pool.resets_before_start.copy(),
                roots=[array.copy() for array in self._wire_rows.pack_rows("root", None, positions.columns)],
            )
        leaves = _plain_leaves(data)
        kept, folded = (None, {}) if leaves is None else fold(leaves)
        return Rolled(
            leaves=kept,
            folded=folded,
            batch=data if leaves is None else None,
            tail=tuple(data.batch_size[2:]),
            version=order.version,
            reply=reply,
            side=[side.root[env_id] for env_id in self._all_ids.tolist()] if side.has_values else [],
            worker_losses=self._pool.num_losses - before[0],
            interrupted=engine.flights.losses.num_interrupted - before[1],
            wall_s=time.monotonic() - began,
        )

    def _make_executor(self) -> BatchedEnv:
        """Return an executor for rollouts over the pool."""
        options = dataclasses.replace(self._share.options, loss_grace_s=None)
        self._is_seeded = False
        return BatchedEnv(self._pool, seed=self._root_seed, device=None, copy=True, options=options)

    def _seed_own_generators(self, env: BatchedEnv) -> None:
        """Seed the generators that this host uses instead of the driver, from streams of this share."""
        if self._is_seeded:
            return
        seeds = np.random.SeedSequence(self._root_seed, spawn_key=(_STREAM, self._share.first_env_id)).generate_state(2)
        env.engine.sampler = ActionSampler(self._pool.specs, int(seeds[0]))
        torch.manual_seed(int(seeds[1]))
        self._is_seeded = True

    def _put(self, env: BatchedEnv, order: RollOrder) -> None:
        """Set the envs' positions before a rollout."""
        engine = env.engine
        if order.roots is not None:
            columns = engine.positions.reset_columns(self._all_ids)
            self._wire_rows.unpack_rows("root", order.roots, None, columns)
            engine.flights.put(self._all_ids, columns)
            engine.side.root.update(enumerate(order.side or ()))
        engine.states.restore(self._all_ids, order.ended)


def weights_of(policy: torch.nn.Module) -> list[np.ndarray]:
    """Return a module's parameters, then its buffers, as arrays on the CPU (VIEWS if they are on the CPU)."""
    return [tensor.detach().cpu().numpy() for tensor in (*policy.parameters(), *policy.buffers())]


def load_weights(policy: torch.nn.Module, weights: list[np.ndarray]) -> None:
    """Write weights from `weights_of` into a module of the same kind."""
    with torch.no_grad():
        for mine, array in zip((*policy.parameters(), *policy.buffers()), weights, strict=True):
            mine.copy_(torch.tensor(array))


def _plain_leaves(data: Any) -> dict[tuple[str, ...], np.ndarray] | None:
    """Return the leaves of a batch as arrays, or None if it is no plain TensorDict of tensors."""
    if type(data) is not TensorDict:
        return None
    leaves: dict[tuple[str, ...], np.ndarray] = {}
    for key in data.keys(include_nested=True, leaves_only=True, is_leaf=is_leaf_nontensor):
        value = data.get(key)
        if not isinstance(value, torch.Tensor):
            return None
        leaves[key if isinstance(key, tuple) else (key,)] = value.numpy()
    return leaves
