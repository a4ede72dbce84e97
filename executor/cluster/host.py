"""The host: the process on a node that runs a share of the batch, as a `ParallelEnv` would.

Guarantees: every call is answered by a value or by an error of envs, workers or arguments; losses of workers are
handled here, as on one machine. An env of an order that must be reset has lost its episode since the driver's latest
answer: it is not stepped, and reported as cut. The host builds no env and imports no env package: factories pass
through as bytes.
Of Ray it knows only the name of its node.
Threads: Ray calls `report`, `ping` and `close` in one thread, all other methods in a second one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import platform
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

import cloudpickle
import numpy as np
import torch
from tensordict import TensorDictBase

from envherd.executor.batched import BatchedEnv
from envherd.executor.batches.random_actions import ActionSampler
from envherd.executor.cluster.messages import ENV_WORDS, Answer, Built, Order, Report, Rolled, RollOrder, Share
from envherd.executor.cluster.packing import Packed, Rest, fold, keys_of, pack
from envherd.executor.machine.machine import read_machine, usable_cores
from envherd.executor.monitor.statistics import Statistics
from envherd.executor.pools import error_messages
from envherd.executor.pools.blueprint import spread
from envherd.executor.pools.crew import Blueprint
from envherd.executor.pools.worker_pool import WorkerPool
from envherd.executor.protocol.env_states import Event
from envherd.shm.specs import Key
from envherd.workers import registries
from envherd.workers.errors import EnvherdError, FactoryError
from envherd.workers.protocol import RESET, STEP_RESET

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
    def build(self, share: Share) -> Built:
        """Start the workers and build the envs."""
        report = self.report()
        error_messages.numbering = error_messages.Numbering(share.first_env_id, share.first_worker_id, report.place)
        registries.install(share.registered)
        blocks = spread(len(share.factories), share.num_workers)
        blueprint = Blueprint(share.factories, share.env_kwargs, blocks, share.root_seed, share.preload)
        options = dataclasses.replace(share.options, loss_grace_s=None)  # an answer covers all envs of the order
        self._pool = pool = WorkerPool(blueprint, options)
        try:
            pool.start()
        except ValueError as error:
            raise FactoryError(f"{error} ({report.place})") from None
        if share.words is not None:
            for name, values in zip(ENV_WORDS, share.words, strict=True):
                pool.slab.words[name][:] = values
            resets = pool.slab.words["resets"]
            pool.resets_before_start[:] = [resets[list(block)].max() for block in blocks]
        # Views: they are pickled before the next command.
        self._env = BatchedEnv(pool, seed=share.root_seed, device=None, copy=False, options=options)
        self._engine = self._env.engine
        self._first_env_id, self._is_seeded = share.first_env_id, False
        groups = self._engine.batches.groups
        self._keys: dict[str, list[Key] | None] = {"next": None, "root": None}
        if len(groups) == 1 and not groups[0].side_keys:
            self._keys = {section: keys_of(groups[0], section) for section in self._keys}
        return Built(specs=self._env.specs, report=report, answer=self.status())

    # ---- commands ----------------------------------------------------------------------------

    @_returns_errors
    def run(self, order: Order) -> Answer:
        """Carry out an order and wait for all of its answers."""
        engine = self._engine
        ids = engine.all_ids if order.ids is None else order.ids
        if order.op != RESET:
            return self._step(order, ids)
        errors = []
        try:
            with engine.guard:
                engine.write_reset_masks(order.mask)
                engine.reset_envs(ids, order.extras)
        except EnvherdError as error:
            errors.append(error)
        return self._answer(ids, errors=errors)

    def _step(self, order: Order, ids: np.ndarray) -> Answer:
        """Step some envs; reset those whose episodes were lost, if the order resets envs at all."""
        env, engine = self._env, self._engine
        assert order.inputs is not None
        td = order.inputs.batch(len(ids))
        is_cut = engine.states.needs_reset[ids] if engine.options.on_worker_loss == "restart" else np.zeros(0, bool)
        cut, stepped, errors = _NOBODY, ids, list[EnvherdError]()
        if is_cut.any():
            cut, stepped = ids[is_cut], ids[~is_cut]
            td = td[torch.from_numpy(~is_cut)] if len(stepped) else td
            if order.op == STEP_RESET:
                errors += self.run(Order(op=RESET, ids=cut)).errors
        next_td: TensorDictBase | None = None
        if len(stepped) == env.num_envs:
            try:
                (env.step_and_maybe_reset if order.op == STEP_RESET else env.step)(td)
                next_td = td.get("next")
            except EnvherdError as error:
                next_td = error.partial
                errors.append(error)
        elif len(stepped):
            next_td, stepped = self._exchange(td, stepped, errors, maybe_reset=order.op == STEP_RESET)
        return self._answer(ids, stepped, next_td, cut, errors)

    def _exchange(
        self, td: TensorDictBase, ids: np.ndarray, errors: list[EnvherdError], *, maybe_reset: bool
    ) -> tuple[TensorDictBase | None, np.ndarray]:
        """Step some envs; return the `next` batch of those that did not fail, and their ids."""
        states = self._engine.states
        try:
            self._env.send(td, ids, maybe_reset=maybe_reset)
        except EnvherdError as error:
            errors.append(error)
        while len(left := ids[states.under_way[ids]]):
            try:
                return self._env.recv(env_ids=left, with_root=False).get("next"), left
            except EnvherdError as error:
                errors.append(error)
        return None, _NOBODY

    @_returns_errors
    def status(self) -> Answer:
        """Return where all envs are."""
        return self._answer(_NOBODY)

    def _answer(
        self,
        ids: np.ndarray,
        stepped: np.ndarray = _NOBODY,
        next_td: TensorDictBase | None = None,
        cut: np.ndarray = _NOBODY,
        errors: Sequence[EnvherdError] = (),
    ) -> Answer:
        """Return the answer to an order for some envs; without any, where all are."""
        engine, words = self._engine, self._pool.slab.words
        root_ids = ids[engine.positions.in_root[ids]] if len(ids) else engine.all_ids
        kept = engine.side.infos.items() if engine.options.infos != "drop" else ()
        for error in errors:
            error.partial = None
        return Answer(
            ids=stepped if next_td is not None else _NOBODY,
            next=None if next_td is None else pack(next_td, self._keys["next"]),
            cut=cut,
            root_ids=root_ids,
            roots=pack(engine.batches.current(root_ids), self._keys["root"]) if len(root_ids) else None,
            states=engine.states.values.copy(),
            words=np.stack([words[name] for name in ENV_WORDS]),
            tally=np.array(
                [
                    self._pool.num_losses,
                    engine.flights.losses.num_interrupted,
                    engine.flights.num_errors,
                    self._pool.num_recycled,
                ]
            ),
            infos={name: {i: infos[i] for i in ids.tolist() if i in infos} for name, infos in kept},
            errors=list(errors),
        )

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
    def restore(self, roots: list[dict[str, Any]] | None, ended: np.ndarray | None) -> Answer:
        """Note that envs have been restored; see `Calls.restore`."""
        self._engine.restore(roots, ended)
        return self.status()

    def worker_output(self, worker_id: int) -> str:
        """Return the kept part of a worker's output."""
        return self._pool.worker_output(worker_id)

    @_returns_errors
    def statistics(self) -> Statistics:
        """Return the statistics of this share."""
        return self._env.statistics()

    def close(self, timeout_s: float) -> None:
        """Close the envs and end the workers."""
        pool = getattr(self, "_pool", None)
        if pool is not None:
            pool.close(timeout_s)

    # ---- rollouts ----------------------------------------------------------------------------

    @_returns_errors
    def roll(self, order: RollOrder, pickled: bytes | None, weights: list[np.ndarray] | None) -> Rolled:
        """Make a rollout on this node.

        Args:
            order: see there.
            pickled: the policy, or a callable that builds one here; it replaces the previous one.
            weights: its parameters, then its buffers; None for a policy without.
        """
        began, engine = time.monotonic(), self._engine
        policy = None if order.policy_id is None else self._policy(order, order.policy_id, pickled, weights)
        lost = np.flatnonzero(order.ended & ~engine.states.needs_reset)
        engine.states.move(lost, Event.IS_BROKEN_OFF)
        self._seed_own_generators()
        data = self._env.rollout(order.num_steps, policy, **order.kwargs)
        packed, folded = pack(data), dict[Key, Rest]()
        if packed.leaves is not None:
            kept, folded = fold(packed.leaves)
            packed = Packed(kept)
        return Rolled(
            data=packed,
            folded=folded,
            tail=tuple(data.batch_size[2:]),
            version=order.version,
            answer=self.status(),
            wall_s=time.monotonic() - began,
        )

    def _policy(self, order: RollOrder, policy_id: int, pickled: Any, weights: list[np.ndarray] | None) -> Any:
        """Return the policy of an order, with the weights of its version."""
        if policy_id not in self._policies:
            sent = cloudpickle.loads(pickled)
            self._policies = {policy_id: sent() if order.is_factory else sent}
            self._version = -1
        policy = self._policies[policy_id]
        if weights is not None and self._version != order.version:
            load_weights(policy, weights)
            self._version = order.version
        return policy

    def _seed_own_generators(self) -> None:
        """Seed the generators that this host uses instead of the driver, from streams of this share."""
        if self._is_seeded:
            return
        seeds = np.random.SeedSequence(self._engine.seed, spawn_key=(_STREAM, self._first_env_id)).generate_state(2)
        self._engine.sampler = ActionSampler(self._pool.specs, int(seeds[0]))
        torch.manual_seed(int(seeds[1]))
        self._is_seeded = True


def load_weights(policy: torch.nn.Module, weights: list[np.ndarray]) -> None:
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
    with contextlib.suppress(ProcessLookupError):  # it has ended already
        pidfd = os.pidfd_open(parent)
        threading.Thread(target=_end_with, args=(pidfd,), name="envherd-parent", daemon=True).start()
        if os.getppid() == parent:
            return
    os._exit(1)


def _end_with(pidfd: int) -> None:
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    poller.poll()
    os._exit(1)
