"""The host: the process on a node that runs a share of the batch, as a `ParallelEnv` would.

Guarantees: every call is answered by a value or by an error of envs, workers or arguments; losses of workers are
handled here, as on one machine. If a loss has taken the episode of an env and the driver does not know that, an order
to step it is answered by an interrupted row. The host builds no env and imports no env package: factories pass through
as bytes.
Of Ray it knows only the name of its node.
Threads: Ray calls `report`, `ping` and `close` in one thread, all other methods in a second one.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import platform
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import Any

import cloudpickle
import numpy as np
import torch

from envherd.executor.batched import BatchedEnv
from envherd.executor.batches.random_actions import ActionSampler
from envherd.executor.cluster import rows
from envherd.executor.cluster.folding import Folded, fold
from envherd.executor.cluster.messages import ENV_WORDS, Answer, Order, Report, Share
from envherd.executor.machine.machine import read_machine, usable_cores
from envherd.executor.monitor.statistics import WorkerStatistics
from envherd.executor.pools import error_messages
from envherd.executor.pools.worker_pool import WorkerPool
from envherd.executor.protocol.env_states import Event
from envherd.executor.protocol.flight import Flight
from envherd.shm.slab import root_leaves
from envherd.shm.specs import EnvSpec
from envherd.workers import registries
from envherd.workers.errors import EnvherdError, FactoryError
from envherd.workers.infos import packer
from envherd.workers.protocol import RESET, STEP_RESET, Op

_NOBODY = np.zeros(0, np.int64)
#: Seconds between checks of the parent.
_PARENT_S = 0.5
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
    """Runs a share; see the module."""

    def __init__(self) -> None:
        _end_with_parent()
        self._policies: dict[int, Any] = {}
        self._version = -1

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
        )

    def ping(self) -> None:
        """Return, as a sign of life."""

    @_returns_errors
    def build(self, share: Share) -> tuple[list[EnvSpec], Report]:
        """Start the workers and build the envs; return their specs, and a report."""
        report, self._share = self.report(), share
        error_messages.numbering = error_messages.Numbering(share.first_env_id, share.first_worker_id, report.place)
        registries.install(share.registered)
        options = dataclasses.replace(share.options, loss_grace_s=None)  # an answer covers all envs of the order
        self._pool = pool = WorkerPool(share.blueprint, options)
        try:
            pool.start()
        except ValueError as error:
            raise FactoryError(f"{error} ({report.place})") from None
        if share.words is not None:
            for name, values in zip(ENV_WORDS, share.words, strict=True):
                pool.slab.words[name][:] = values
            resets = pool.slab.words["resets"]
            pool.resets_before_start[:] = [resets[list(block)].max() for block in share.blueprint.blocks]
        # Views: rollouts are pickled before the next command.
        self._env = BatchedEnv(pool, seed=share.blueprint.root_seed, device=None, copy=False, options=options)
        self._engine, self._is_seeded = self._env.engine, False
        self._places = self._engine.positions.places
        self._pack = packer(options.info_policy)
        return list(pool.specs), report

    # ---- commands ----------------------------------------------------------------------------

    @_returns_errors
    def run(self, order: Order) -> Answer:
        """Carry out an order and wait for all of its answers."""
        engine = self._engine
        ids = engine.all_ids if order.ids is None else order.ids
        is_cut = np.zeros(len(ids), bool)
        if order.op != RESET and engine.options.on_worker_loss == "restart":
            is_cut = engine.states.needs_reset[ids]
        cut, landed, errors = ids[is_cut], _NOBODY, list[EnvherdError]()
        if not is_cut.all():
            flight: Flight | None = None
            try:
                with engine.guard:
                    flight = self._begin(order, ids[~is_cut])
                    flight.land()
            except EnvherdError as error:
                errors.append(error)
            landed = flight.ids if flight is not None and flight.has_landed else _NOBODY
        if len(cut):
            try:
                with engine.guard:
                    self._cut_off(cut, resets=order.op == STEP_RESET)
            except EnvherdError as error:
                errors.append(error)
            landed = np.union1d(landed, cut)
        stepped = _NOBODY if order.op == RESET else landed
        return self._answer(ids, stepped, landed[engine.positions.in_root[landed]], errors)

    def _begin(self, order: Order, ids: np.ndarray) -> Flight:
        """Give some envs the command of an order."""
        engine = self._engine
        rows.write(self._pool.slab, self._places, order.inputs)

        def send_side_inputs() -> None:
            for message in order.prepared:
                engine.pool.prepare(message)

        if order.op == RESET:
            extras = {message.env_id: message for message in order.prepared}
            return engine.flights.begin(Op.RESET, ids, extras=extras)
        some = None if len(ids) == len(engine.all_ids) else ids
        return engine.flights.begin(Op(order.op), some, write_inputs=send_side_inputs)

    def _cut_off(self, env_ids: np.ndarray, *, resets: bool) -> None:
        """Write interrupted rows for envs that have lost their episodes, and reset them if the command would have."""
        positions, flights = self._engine.positions, self._engine.flights
        columns = positions.next_columns(env_ids)
        for env_id, column in zip(env_ids.tolist(), columns.tolist(), strict=True):
            positions.cut_off(env_id, column)
        positions.stepped(env_ids, columns)
        positions.interrupted[env_ids] = False
        flights.losses.note_interrupted(env_ids)
        if resets:
            self._engine.write_reset_masks(None)
            flights.begin(Op.RESET, env_ids).land()

    def _answer(
        self, ids: np.ndarray, stepped: np.ndarray, in_root: np.ndarray, errors: Sequence[EnvherdError] = ()
    ) -> Answer:
        """Return the answer for some envs, with the `next` of those that were stepped, and the roots of others."""
        engine, positions, side, words = self._engine, self._engine.positions, self._engine.side, self._pool.slab.words
        for error in errors:
            error.partial = None
        latest = side.latest(positions.in_root) if side.has_values else {}
        return Answer(
            nexts=rows.read(self._pool.slab, self._places, stepped, "next", positions.step_columns),
            roots=self._roots(in_root),
            interrupted=stepped[positions.interrupted[stepped, 0]],
            states=engine.states.values.copy(),
            words=np.stack([words[name] for name in ENV_WORDS]),
            tally=self._tally(),
            side={i: {"next": side.next[i], "root": latest[i]} for i in ids.tolist()} if latest else {},
            infos=self._infos(ids) if self._pack is not None else {},
            errors=errors,
        )

    def _roots(self, env_ids: np.ndarray) -> list[rows.Part]:
        """Return the present roots of some envs, whichever section they are in."""
        parts = []
        for index, group in enumerate(self._pool.slab.groups):
            own = env_ids[self._places.group_of[env_ids] == index]
            if len(own):
                names = [("root", *leaf.key) for leaf in root_leaves(group.spec)]
                parts.append((own, dict(zip(names, self._engine.positions.gather_roots(index, own), strict=True))))
        return parts

    def _infos(self, ids: np.ndarray) -> dict[int, dict[str, Any]]:
        kept, pack = self._engine.side.infos, self._pack
        assert pack is not None
        return {i: {section: pack(kept[section].get(i))[0] for section in kept} for i in ids.tolist()}

    def _tally(self) -> np.ndarray:
        pool, flights = self._pool, self._engine.flights
        own = [pool.num_losses, flights.losses.num_interrupted, int(flights.losses.num_errors.sum()), pool.num_recycled]
        return np.array(own) + self._share.tally

    # ---- everything else ---------------------------------------------------------------------

    @_returns_errors
    def seed(self, root_seed: int, episodes: Sequence[int] | None) -> None:
        """Use a new root seed; see `Pool.seed`."""
        self._engine.set_seed(root_seed, episodes)
        self._is_seeded = False

    @_returns_errors
    def ask(self, what: str, env_ids: list[int], question: dict[str, Any]) -> dict[int, Any]:
        """Send envs a request other than a step; see `Pool.ask`."""
        with self._engine.guard:
            return self._engine.ask(what, env_ids, **question)

    @_returns_errors
    def restore(self, env_ids: np.ndarray, roots: list[dict[str, Any]] | None, ended: np.ndarray | None) -> None:
        """Note that envs have been restored; see `Calls.restore`."""
        self._engine.restore(env_ids, roots, ended)

    def worker_output(self, worker_id: int) -> str:
        """Return the kept part of a worker's output."""
        return self._pool.worker_output(worker_id)

    @_returns_errors
    def statistics(self) -> tuple[list[WorkerStatistics], np.ndarray, np.ndarray]:
        """Return the workers' statistics with their ids in the batch, and the counts as `Answer` has them."""
        share, words = self._share, self._pool.slab.words
        workers = [
            dataclasses.replace(
                worker,
                worker_id=worker.worker_id + share.first_worker_id,
                env_ids=tuple(env_id + share.first_env_id for env_id in worker.env_ids),
                generation=worker.generation + share.generation,
                cpu=None,
            )
            for worker in self._env.statistics().workers
        ]
        return workers, np.stack([words[name] for name in ENV_WORDS]), self._tally()

    def close(self, timeout_s: float) -> None:
        """Close the envs and end the workers."""
        pool = getattr(self, "_pool", None)
        if pool is not None:
            pool.close(timeout_s)

    # ---- rollouts ----------------------------------------------------------------------------

    @_returns_errors
    def roll(  # noqa: PLR0913, PLR0917  # a rollout, and a policy
        self,
        num_steps: int,
        ended: np.ndarray,
        kwargs: Mapping[str, Any],
        policy_id: int | None,
        version: int,
        pickled: bytes | None,
        weights: list[np.ndarray] | None,
        is_factory: bool,  # noqa: FBT001
    ) -> tuple[Folded, Answer, int, float]:
        """Make a rollout on this node.

        Args:
            num_steps: T.
            ended: bool `[n]`, envs that must be reset even if their rows do not say so.
            kwargs: further arguments of `rollout`.
            policy_id: of the policy; None for random actions.
            version: of its weights.
            pickled: the policy; it replaces the previous one.
            weights: its parameters, then its buffers; None for a policy without.
            is_factory: what is pickled builds the policy.

        Returns:
            The data `[n, T]`, where the envs are, the version, and the seconds that it took.
        """
        began, engine = time.monotonic(), self._engine
        if policy_id is not None and policy_id not in self._policies:
            sent = cloudpickle.loads(pickled)
            self._policies, self._version = {policy_id: sent() if is_factory else sent}, -1
        policy = None if policy_id is None else self._policies[policy_id]
        if weights is not None and self._version != version:
            load_weights(policy, weights)
            self._version = version
        engine.states.move(np.flatnonzero(ended & ~engine.states.needs_reset), Event.IS_BROKEN_OFF)
        self._seed_own_generators()
        data = fold(self._env.rollout(num_steps, policy, **kwargs))
        return data, self._answer(engine.all_ids, _NOBODY, engine.all_ids), version, time.monotonic() - began

    def _seed_own_generators(self) -> None:
        """Seed the generators that this host uses instead of the driver, from streams of this share."""
        if self._is_seeded:
            return
        spawn_key = (_STREAM, self._share.first_env_id)
        seeds = np.random.SeedSequence(self._engine.seed, spawn_key=spawn_key).generate_state(2)
        self._engine.sampler = ActionSampler(self._pool.specs, int(seeds[0]))
        torch.manual_seed(int(seeds[1]))
        self._is_seeded = True


def load_weights(policy: Any, weights: list[np.ndarray]) -> None:
    """Write a module's parameters, then its buffers, into a module of the same kind."""
    with torch.no_grad():
        for mine, array in zip((*policy.parameters(), *policy.buffers()), weights, strict=True):
            mine.copy_(torch.tensor(array))


def _end_with_parent() -> None:
    """End this process without cleanup when its present parent has ended, however that ended.

    Ray's own processes check whether their parent has become process 1. Under a session manager, in some containers and
    with other subreapers it does not, and hosts would stay alive with all their workers.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_S)
        os._exit(1)

    threading.Thread(target=watch, name="envherd-parent", daemon=True).start()
