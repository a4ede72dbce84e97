"""TorchRL's `AsyncEnvPool` on the executor: envs that advance independently, received as soon as they are ready.

    from envherd.executor.facades.torchrl import AsyncEnvPool        # was: from torchrl.envs import AsyncEnvPool

Guarantees: instances pass isinstance checks for TorchRL's `AsyncEnvPool`, with its methods, specs and results; no env
is built in this process; the caller owns received data. Several threads may send and receive at the same time, each its
own envs (`env_index=`). Intended differences are listed in docs/torchrl.md.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
import torchrl.envs
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, TensorDictBase
from torchrl.data import NonTensor
from torchrl.envs import EnvBase

from envherd.executor.batches.arguments import as_count
from envherd.executor.facades.installing import replaced
from envherd.executor.facades.torchrl import parallel_env
from envherd.executor.facades.torchrl.async_rows import (
    ENV_INDEX,
    SentRows,
    SlabRows,
    indices_in,
    rows_of,
    set_indices,
    stacked,
    without_index,
)
from envherd.executor.facades.torchrl.async_sent import Kind, SentEnvs
from envherd.executor.facades.torchrl.async_stats import ExchangeStats
from envherd.executor.facades.torchrl.batched import MakeEnv
from envherd.executor.facades.torchrl.crew import ProcessCrew
from envherd.executor.options import ExecutorOptions
from envherd.executor.parallel import ParallelEnv
from envherd.executor.pools.blueprint import as_kwargs, checked_options
from envherd.executor.protocol.env_states import Event
from envherd.executor.protocol.flight import Flight
from envherd.workers.adapters.hosts.torchrl_crossing import dumps
from envherd.workers.adapters.torchrl.private_api import AsyncHooks, place_specs
from envherd.workers.build import check_factory
from envherd.workers.errors import FactoryError
from envherd.workers.messages import Prepare
from envherd.workers.protocol import Flag, Op


class _PoolMeta(type(torchrl.envs.AsyncEnvPool)):  # type: ignore[misc]  # untyped
    """Skips TorchRL's metaclass, which would create an instance of a subclass for the backend."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:  # a class, seen from its metaclass
        return type(EnvBase).__call__(cls, *args, **kwargs)


class AsyncEnvPool(AsyncHooks, torchrl.envs.AsyncEnvPool, metaclass=_PoolMeta):  # type: ignore[misc]  # untyped
    """TorchRL's `AsyncEnvPool` with its envs in the executor's worker processes.

    Args:
        env_makers: callable that builds a TorchRL env, or a list of one per env.
        backend: accepted but not used; envs are always in worker processes.
        stack: "dense", "maybe_dense" or "lazy": how rows become a batch.
        exchange: "shm" refuses envs whose leaves do not fit into shared memory; "queue", "auto" and None use shared
            memory for envs whose leaves fit, and pickles for others.
        worker_affinity: for each worker process a list of the one processor that it runs on, or a callable that returns
            it.
        envs_per_worker: envs in one process, each on a separate thread if there are more than one.
        create_env_kwargs: keyword arguments of the factories: one dict for all, or one for each.
        options: of the executor. None: actions are passed to the envs unchecked, as in TorchRL.

    Attributes:
        min_get: number of envs that `..._recv` waits for by default.
        num_envs: N.

    Raises:
        FactoryError: an env instead of a factory, or a factory that cannot be pickled, raised or returned no env.
        ValueError: an invalid argument, or `exchange="shm"` does not fit the envs.
    """

    def __init__(  # noqa: PLR0913  # TorchRL's
        self,
        env_makers: MakeEnv | Sequence[MakeEnv],
        *,
        backend: Literal["threading", "multiprocessing"] = "multiprocessing",
        stack: Literal["dense", "maybe_dense", "lazy"] = "dense",
        exchange: Literal["queue", "shm", "auto"] | None = None,
        worker_affinity: Sequence[Sequence[int]] | Callable[[int], Sequence[int]] | None = None,
        envs_per_worker: int = 1,
        create_env_kwargs: dict[str, Any] | Sequence[dict[str, Any]] | None = None,
        options: ExecutorOptions | None = None,
    ) -> None:
        makers = [env_makers] if callable(env_makers) or not isinstance(env_makers, Sequence) else list(env_makers)
        for maker in makers:
            check_factory(maker, "GymEnv('CartPole-v1')")
        for name, value, allowed in (
            ("backend", backend, ("threading", "multiprocessing")),
            ("stack", stack, ("dense", "maybe_dense", "lazy")),
            ("exchange", exchange, ("queue", "shm", "auto", None)),
        ):
            if value not in allowed:
                raise ValueError(f"AsyncEnvPool failed: expected {name} to be one of {allowed}, got {value!r}.")
        as_count("AsyncEnvPool", "envs_per_worker", envs_per_worker)
        self.__dict__["_crew"] = None
        EnvBase.__init__(self)
        self.min_get, self.env_makers, self.num_envs = 1, makers, len(makers)
        self.backend, self.stack, self.exchange = backend, stack, exchange or "auto"
        self.envs_per_worker, self.worker_affinity = envs_per_worker, worker_affinity
        self.create_env_kwargs = as_kwargs(self.num_envs, create_env_kwargs)
        self.num_workers = -(-self.num_envs // envs_per_worker)
        usual = ExecutorOptions(check_actions="off", affinity=_affinity(worker_affinity, self.num_workers))
        options = checked_options(usual if options is None else options)
        self._begin(replace(options, episode_seeds=False, env_threads=envs_per_worker > 1 or options.env_threads))

    # ---- lifecycle ---------------------------------------------------------------------------

    def _begin(self, options: ExecutorOptions) -> None:
        """Start the workers, and read their envs' specs."""
        try:
            self._crew = crew = ProcessCrew(
                self.env_makers, self.create_env_kwargs, self.num_workers, options, ParallelEnv, is_crossing=True
            )
        except FactoryError as error:
            if "type_name" in error.context:
                raise parallel_env.build_failed(error) from error
            raise
        try:
            self._executor, engine = crew.executor, crew.executor.engine
            self._sent = SentEnvs(engine)
            self._sent_rows = SentRows(self.num_envs)
            self._exchange_stats = ExchangeStats(engine.pool.slab.words["answered_ns"])
            self._learn_specs(crew)
            engine.allow_steps()  # in TorchRL the env decides whether it may be stepped before a reset
        except BaseException:
            self.shutdown()
            raise

    def _learn_specs(self, crew: ProcessCrew) -> None:
        ids = range(self.num_envs)
        self._found = crew.tell(ids, [("describe", (), {})] * self.num_envs)
        kinds = [(spec, found.specs) for spec, found in zip(self._executor.specs, self._found, strict=True)]
        self._is_alike = all(kind == kinds[0] for kind in kinds)
        self._rows = [rows_of(found, spec) for found, (spec, _) in zip(self._found, kinds, strict=True)]
        if self.exchange == "shm" and self.resolved_exchange != "shm":
            raise ValueError(
                "AsyncEnvPool failed: expected envs of one kind whose leaves are tensors of fixed shapes with "
                "exchange='shm', got others. Use exchange='auto'."
            )
        place_specs(
            self, self._specs_of_envs(), NonTensor(example_data=0, shape=(self.num_envs, *self.env_batch_sizes[0]))
        )

    def _specs_of_envs(self) -> list[Any]:
        return [one.specs for one in self._found]

    @property
    def env_batch_sizes(self) -> list[torch.Size]:
        """The batch size of each env."""
        return [one.batch_size for one in self._found]

    def shutdown(self) -> None:
        """Close the envs and end the workers. Idempotent."""
        if self.__dict__.get("_crew") is not None:
            self._crew.close()
        self.is_closed = True

    @property
    def resolved_exchange(self) -> Literal["queue", "shm"]:
        """Either "shm", if all rows go through shared memory with one structure, or "queue"."""
        return "shm" if self._is_alike and isinstance(self._rows[0], SlabRows) else "queue"

    @property
    def exchange_keys(self) -> tuple[Any, ...]:
        """The keys of all leaves of a step, including `next`, if rows go through shared memory; else none."""
        if self.resolved_exchange == "queue":
            return ()
        return tuple(self._found[0].tensordict.keys(include_nested=True, leaves_only=True))

    def stats(self, *, reset: bool = False) -> dict[str, float | int]:
        """Return TorchRL's counts of received batches; `reset` clears them."""
        with self._sent:
            return self._exchange_stats.read(is_reset=reset)

    def set_seed(self, seed: int | None = None, static_seed: bool = False) -> int | None:  # noqa: FBT001, FBT002  # TorchRL's
        """Seed env after env with TorchRL's chain of seeds; return the seed that follows."""
        with self._sent:
            for env_id in range(self.num_envs):
                seed = self._crew.tell([env_id], [("seed", (seed,), {"static": static_seed})])[0]
        return seed

    # ---- send --------------------------------------------------------------------------------

    def async_step_send(self, tensordict: TensorDictBase, env_index: int | list[int] | None = None) -> None:
        """Step some envs without waiting for them.

        Args:
            tensordict: rows `[k]` with the actions; the row of one env if `env_index` is an int.
            env_index: the envs; None for those that the key `env_index` names.

        Raises:
            RuntimeError: an env is already under way.
        """
        self._send("step", tensordict, env_index)

    def async_step_and_maybe_reset_send(
        self, tensordict: TensorDictBase, env_index: int | list[int] | None = None
    ) -> None:
        """Step some envs, and reset those that end, without waiting for them; see `async_step_send`."""
        self._send("step_and_maybe_reset", tensordict, env_index)

    def async_reset_send(
        self, tensordict: TensorDictBase | None = None, env_index: int | list[int] | None = None
    ) -> None:
        """Reset some envs, given `tensordict` or nothing, without waiting for them; see `async_step_send`."""
        self._send("reset", tensordict, env_index)

    def _send(self, kind: Kind, td: TensorDictBase | None, env_index: int | list[int] | None) -> None:
        if env_index is not None:
            ids = [env_index] if isinstance(env_index, int) else [int(i) for i in env_index]
        elif td is not None and td.get(ENV_INDEX, None) is not None:
            ids = indices_in(td)
        else:
            raise ValueError(f"async_{kind}_send failed: expected env_index, or a tensordict that has it, got neither.")
        if td is None:
            td = stacked([TensorDict({}, self.env_batch_sizes[i]) for i in ids])
        elif td.shape == self.env_batch_sizes[ids[0]]:  # of one env
            td = td.unsqueeze(0)
        if len(td) != len(ids):
            raise ValueError(f"async_{kind}_send failed: expected {len(ids)} rows (envs {ids}), got {len(td)}.")
        rows = without_index(td)
        with self._sent:
            self._sent.refuse_sent(ids)
            parts = [(ids, rows)] if self._is_alike else [([i], rows[row : row + 1]) for row, i in enumerate(ids)]
            inputs = [own if kind == "reset" else self._rows[part[0]].inputs_of(own) for part, own in parts]
            for (part, own), given in zip(parts, inputs, strict=True):
                self._sent_rows.put(part, own)
                queue = kind, env_index if isinstance(env_index, int) else None
                self._sent.start(part, queue, functools.partial(self._start, kind, part, given))
            if kind != "reset":
                self._exchange_stats.note_sent(ids)

    def _start(self, kind: Kind, ids: list[int], inputs: TensorDictBase) -> list[Flight]:
        """Send inputs `[k]` to envs of one kind; return the flights of resets."""
        engine, env_ids = self._executor.engine, np.array(ids)
        if kind == "reset":
            with engine.guard:
                return [self._start_reset(*item) for item in zip(ids, inputs.unbind(0), strict=True)]
        needs_reset = engine.states.needs_reset[env_ids]
        if needs_reset.any():
            engine.states.move(env_ids[needs_reset], Event.IS_ALLOWED)
        self._executor.send(inputs, torch.from_numpy(env_ids), maybe_reset=kind == "step_and_maybe_reset")
        return []

    def _start_reset(self, env_id: int, row: TensorDictBase) -> Flight:
        extras = {} if row.is_empty() else {env_id: Prepare(env_id=env_id, options={"row": dumps(row)})}
        flights = self._executor.engine.flights
        return flights.begin(Op.RESET, np.array([env_id]), extras=extras, is_parked=True, flags=int(Flag.EACH))

    # ---- recv --------------------------------------------------------------------------------

    def async_step_recv(
        self,
        min_get: int | None = None,
        env_index: int | None = None,
        *,
        max_get: int | None = None,
        timeout: float | None = None,
    ) -> TensorDictBase:
        """Return the sent rows with the `next` of their steps, as soon as enough envs are ready.

        Args:
            min_get: least number of envs; None for the attribute `min_get`.
            env_index: receive only this env, which was sent by its index; the other arguments are then ignored.
            max_get: largest number of envs; None for all that are ready.
            timeout: seconds from the call on to wait for `max_get` envs; then the call returns those that are ready,
                if there are at least `min_get`. 0 does not wait.

        Returns:
            Batch `[k]` by ascending index, with the key `env_index`; with the argument `env_index`, the row of that
            env.

        Raises:
            TimeoutError: fewer than `min_get` in time. Nothing is lost: receive again.
            RuntimeError: fewer were sent.
            EnvError, WorkerLost, WorkerTimeout: the envs concerned are no longer under way; the others still are.
        """
        return self._recv("step", min_get, env_index, max_get, timeout)[0]

    def async_step_and_maybe_reset_recv(
        self, min_get: int | None = None, env_index: int | None = None, **limits: Any
    ) -> tuple[TensorDictBase, TensorDictBase]:
        """Return the steps, and the envs' roots after them; the arguments are those of `async_step_recv`."""
        batch, root = self._recv("step_and_maybe_reset", min_get, env_index, **limits)
        assert root is not None
        return batch, root

    def async_reset_recv(
        self, min_get: int | None = None, env_index: int | None = None, **limits: Any
    ) -> TensorDictBase:
        """Return the roots of envs that were reset; the arguments are those of `async_step_recv`."""
        return self._recv("reset", min_get, env_index, **limits)[0]

    def _recv(
        self,
        kind: Kind,
        min_get: int | None,
        env_index: int | None,
        max_get: int | None = None,
        timeout: float | None = None,
    ) -> tuple[TensorDictBase, TensorDictBase | None]:
        least = self.min_get if min_get is None else min_get
        if env_index is not None:
            env_index, least, max_get, timeout = int(env_index), 1, 1, None
        if least < 1:
            raise ValueError(f"min_get must be positive, got {least}.")
        if max_get is not None and max_get < least:
            raise ValueError(f"max_get must be at least min_get, got min_get={least} and max_get={max_get}.")
        if timeout is not None and timeout < 0:
            raise ValueError(f"timeout must be non-negative, got {timeout}.")
        with self._sent:
            ids = sorted(self._sent.wait((kind, env_index), least, max_get, timeout))
            self._exchange_stats.note_received(ids, max_get, is_acted_on=kind != "reset")
            parts = [self._taken(kind, part) for part in ([ids] if self._is_alike else [[i] for i in ids])]
        batch, root = (self._joined(part, ids, env_index) for part in zip(*parts, strict=True))
        assert batch is not None
        return batch, root

    def _joined(self, parts: tuple[Any, ...], ids: list[int], env_index: int | None) -> TensorDictBase | None:
        """Return one batch, stacked according to `stack`, or the row of one env; None for no parts."""
        if parts[0] is None:
            return None
        if env_index is not None:
            return parts[0][0].set(ENV_INDEX, NonTensorData(env_index))
        batch = parts[0]
        if len(parts) > 1:
            batch = torch.cat(parts) if self.stack == "dense" else stacked([part[0] for part in parts])
        if self.stack == "lazy" and not isinstance(batch, LazyStackedTensorDict):
            batch = LazyStackedTensorDict(*batch.unbind(0), stack_dim=0)
        return set_indices(batch, ids)

    def _taken(self, kind: Kind, ids: list[int]) -> tuple[TensorDictBase, TensorDictBase | None]:
        """Return for ready envs `[k]`: the sent rows with `next`, and the roots after them."""
        rows, executor, env_ids = self._rows[ids[0]], self._executor, np.array(ids)
        batch = self._sent_rows.take(ids)
        if kind == "reset":
            self._sent.land(ids)
            batch = batch.exclude(*self.reset_keys)
            return batch.update(rows.root_of(executor.current(env_ids))), None
        receive = functools.partial(executor.recv, env_ids=torch.from_numpy(env_ids), with_root=False)
        received = self._sent.receive(ids, receive)
        batch.set("next", rows.next_of(received))
        if kind == "step":
            return batch, None
        root = rows.root_of(executor.current(received.get("env_ids")))
        own = set(batch.keys(include_nested=True, leaves_only=True)) - rows.known if not rows.has_state else {ENV_INDEX}
        if any(key[0] != "next" for key in own):  # other entries of the rows are carried to the root
            root = self.step_mdp(batch).update(root).exclude(*rows.reward_keys)
        return batch, root

    # ---- all envs at once --------------------------------------------------------------------

    def step(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Step all envs and wait for them; return a batch `[N]` as `async_step_recv` does."""
        self.async_step_send(tensordict, list(range(self.num_envs)))
        return self.async_step_recv(self.num_envs)

    def step_and_maybe_reset(self, tensordict: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        """Step all envs, reset those that end, and wait for all."""
        self.async_step_and_maybe_reset_send(tensordict, list(range(self.num_envs)))
        return self.async_step_and_maybe_reset_recv(self.num_envs)

    def reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:  # noqa: ARG002  # TorchRL's
        """Reset all envs, or those that the masks of `tensordict` select, and wait for them."""
        self.async_reset_send(tensordict, list(range(self.num_envs)))
        return self.async_reset_recv(self.num_envs)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        following: TensorDictBase = self.step(tensordict).get("next")
        return following

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        return self.reset(tensordict, **kwargs)


def installed() -> contextlib.AbstractContextManager[None]:
    """Replace TorchRL's `ParallelEnv`, `SerialEnv` and `AsyncEnvPool` by ours, in all of TorchRL, for a block."""
    return replaced(
        "torchrl",
        {
            torchrl.envs.ParallelEnv: parallel_env.ParallelEnv,
            torchrl.envs.SerialEnv: parallel_env.SerialEnv,
            torchrl.envs.AsyncEnvPool: AsyncEnvPool,
        },
    )


def _affinity(masks: Any, num_workers: int) -> tuple[int, ...] | None:
    """Return the processor of each worker."""
    if masks is None:
        return None
    listed = [masks(i) for i in range(num_workers)] if callable(masks) else list(masks)
    if len(listed) != num_workers or any(len(mask) != 1 for mask in listed):
        raise ValueError(
            f"AsyncEnvPool failed: expected worker_affinity as one processor for each of {num_workers} workers, got "
            f"{listed}. Leave it out to let workers run on any."
        )
    return tuple(int(mask[0]) for mask in listed)
