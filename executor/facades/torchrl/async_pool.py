"""TorchRL's `AsyncEnvPool` on the executor: envs that advance independently, received as soon as they are ready.

    from envherd.executor.facades.torchrl import AsyncEnvPool        # was: from torchrl.envs import AsyncEnvPool

Guarantees: instances are TorchRL's `AsyncEnvPool` to every isinstance check, with its methods, specs and results; no
env is built in this process; what is received is memory of the caller's own. Several threads may send and receive at
the same time, each its own envs (`env_index=`). What differs on purpose is listed in docs/torchrl.md.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
import torchrl.envs
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, TensorDictBase
from torchrl.data import NonTensor
from torchrl.envs import EnvBase

from envherd.executor.facades.installing import replaced
from envherd.executor.facades.torchrl import parallel_env
from envherd.executor.facades.torchrl.async_rows import (
    ENV_INDEX,
    PickledRows,
    SentRows,
    SlabRows,
    indices_in,
    rows_of,
    set_indices,
    stacked,
    without_index,
)
from envherd.executor.facades.torchrl.async_stats import ExchangeStats
from envherd.executor.facades.torchrl.async_waits import Turns
from envherd.executor.facades.torchrl.batched import MakeEnv
from envherd.executor.facades.torchrl.crew import ProcessCrew
from envherd.executor.options import ExecutorOptions
from envherd.executor.parallel import ParallelEnv
from envherd.executor.pools.worker_pool import WorkerPool
from envherd.executor.protocol.env_states import Event
from envherd.executor.protocol.flight import Flight
from envherd.workers.adapters.hosts.torchrl_crossing import dumps
from envherd.workers.adapters.torchrl.private_api import AsyncHooks, place_specs
from envherd.workers.build import check_factory
from envherd.workers.errors import EnvherdError, FactoryError
from envherd.workers.messages import Prepare
from envherd.workers.protocol import Flag, Op

Kind = Literal["step", "step_and_maybe_reset", "reset"]
#: What an env was sent, and whether it is received by its index: in a queue apart from all others.
Sent = tuple[Kind, bool]


class _PoolMeta(type(torchrl.envs.AsyncEnvPool)):  # type: ignore[misc]  # untyped
    """Skips what TorchRL does to its class, which is to make one of a subclass for each backend."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:  # a class, seen from its metaclass
        return type(EnvBase).__call__(cls, *args, **kwargs)


class AsyncEnvPool(AsyncHooks, torchrl.envs.AsyncEnvPool, metaclass=_PoolMeta):  # type: ignore[misc]  # untyped
    """TorchRL's `AsyncEnvPool`, its envs in the executor's worker processes.

    Args:
        env_makers: callable that builds a TorchRL env, or a list of one per env.
        backend: accepted; envs are in worker processes whatever it says.
        stack: "dense", "maybe_dense" or "lazy": how rows become a batch.
        exchange: "shm" refuses envs whose leaves do not fit into shared memory; "queue", "auto" and None use it where
            they do, and pickles for other envs.
        worker_affinity: for each worker process the processor that it runs on, as a list of one; or a callable that
            returns it.
        envs_per_worker: envs in one process, each on a separate thread if there are more than one.
        create_env_kwargs: keyword arguments of the factories: one dict for all, or one for each.
        options: of the executor. None: actions are handed to the envs unchecked, as TorchRL does.

    Attributes:
        min_get: how many envs `..._recv` waits for by default.
        num_envs: N.

    Raises:
        FactoryError: an env instead of a factory, or a factory that cannot be pickled, raised or gave no env.
        ValueError: an argument is none of the above, or `exchange="shm"` does not suit the envs.
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
        create_env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        options: ExecutorOptions | None = None,
    ) -> None:
        makers = [env_makers] if callable(env_makers) or not isinstance(env_makers, Sequence) else list(env_makers)
        for maker in makers:
            check_factory(maker)
        _need("backend", backend, ("threading", "multiprocessing"))
        _need("stack", stack, ("dense", "maybe_dense", "lazy"))
        _need("exchange", exchange, ("queue", "shm", "auto", None))
        if isinstance(envs_per_worker, bool) or not isinstance(envs_per_worker, int) or envs_per_worker < 1:
            raise ValueError(
                f"AsyncEnvPool failed: expected envs_per_worker as a positive integer, got {envs_per_worker!r}."
            )
        self.__dict__["_crew"] = None
        EnvBase.__init__(self)
        self.min_get, self.env_makers, self.num_envs = 1, makers, len(makers)
        self.backend, self.stack, self.exchange = backend, stack, exchange or "auto"
        self.envs_per_worker, self.worker_affinity = envs_per_worker, worker_affinity
        self.create_env_kwargs = _kwargs_each(create_env_kwargs, self.num_envs)
        self.num_workers = -(-self.num_envs // envs_per_worker)
        options = options or ExecutorOptions(check_actions="off", affinity=_affinity(worker_affinity, self.num_workers))
        self._begin(replace(options, episode_seeds=False, env_threads=envs_per_worker > 1 or options.env_threads))

    # ---- lifecycle ---------------------------------------------------------------------------

    def _begin(self, options: ExecutorOptions) -> None:
        """Start the workers, and learn what their envs are."""
        executors: list[ParallelEnv] = []

        def make(*args: Any, **kwargs: Any) -> ParallelEnv:
            executors.append(ParallelEnv(*args, **kwargs))
            return executors[0]

        try:
            crew = ProcessCrew(
                self.env_makers, self.create_env_kwargs, self.num_workers, options, make, is_crossing=True
            )
        except FactoryError as error:
            if "type_name" in error.context:
                raise parallel_env.build_failed(error) from error
            raise
        self._crew, self._executor, engine = crew, executors[0], executors[0].engine
        try:
            assert isinstance(engine.pool, WorkerPool)
            self._turns = Turns(engine, engine.pool)
            self._places: dict[int, Sent] = {}
            self._failures: dict[int, tuple[Sent, Exception]] = {}
            self._resets: dict[int, Flight] = {}
            self._sent_rows = SentRows(self.num_envs)
            self._exchange_stats = ExchangeStats(engine.pool.slab.words["answered_ns"])
            self._learn_specs(crew)
            engine.allow_steps()  # TorchRL leaves it to the envs whether they may be stepped before a reset
        except BaseException:
            self.shutdown()
            raise

    def _learn_specs(self, crew: ProcessCrew) -> None:
        ids = range(self.num_envs)
        self._found = crew.tell(ids, [("describe", (), {})] * self.num_envs)
        self._rows = rows_of(self._found, self._executor.specs)
        self._is_alike = all(rows is self._rows[0] for rows in self._rows)
        if self.exchange == "shm" and self.resolved_exchange != "shm":
            raise ValueError(
                "AsyncEnvPool failed: expected envs of one kind whose leaves are tensors of fixed shapes with "
                "exchange='shm', got others. Use exchange='auto'."
            )
        self._specs = [one.specs for one in self._found]
        place_specs(self, self._specs, NonTensor(example_data=0, shape=(self.num_envs, *self.env_batch_sizes[0])))

    def _specs_of_envs(self) -> list[Any]:
        return self._specs

    @property
    def env_batch_sizes(self) -> list[torch.Size]:
        """The batch size of each env."""
        return [one.batch_size for one in self._found]

    def shutdown(self) -> None:
        """Close the envs and end the workers. Idempotent."""
        crew = self.__dict__.get("_crew")
        if crew is not None:
            crew.close()
        self.is_closed = True

    @property
    def resolved_exchange(self) -> Literal["queue", "shm"]:
        """Say "shm" if all rows cross through shared memory in arrays of one structure, else "queue"."""
        return "shm" if self._is_alike and isinstance(self._rows[0], SlabRows) else "queue"

    @property
    def exchange_keys(self) -> tuple[Any, ...]:
        """The keys of all leaves of a step, `next` included, with shared memory; else none."""
        return self._rows[0].keys if self.resolved_exchange == "shm" else ()

    def stats(self, *, reset: bool = False) -> dict[str, float | int]:
        """Return how batches were received so far; see TorchRL.

        Args:
            reset: begin anew.
        """
        with self._turns:
            return self._exchange_stats.read(is_reset=reset)

    def set_seed(self, seed: int | None = None, static_seed: bool = False) -> int | None:  # noqa: FBT001, FBT002  # TorchRL's
        """Seed env after env with TorchRL's chain of seeds; return the seed that follows."""
        with self._turns:
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
            RuntimeError: an env was sent already.
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
        """Reset some envs without waiting for them; see `async_step_send`.

        Args:
            tensordict: what their resets are given; None for nothing.
            env_index: the envs.
        """
        self._send("reset", tensordict, env_index)

    def _send(self, kind: Kind, td: TensorDictBase | None, env_index: int | list[int] | None) -> None:
        is_alone = isinstance(env_index, int)
        if env_index is None:
            if td is None or td.get(ENV_INDEX, None) is None:
                raise ValueError(
                    f"async_{kind}_send failed: expected env_index, or a tensordict that has it, got neither."
                )
            ids = indices_in(td)
        else:
            ids = [env_index] if isinstance(env_index, int) else [int(i) for i in env_index]
        if td is None:
            td = stacked([TensorDict({}, self.env_batch_sizes[i]) for i in ids])
        elif td.shape == self.env_batch_sizes[ids[0]]:  # of one env
            td = td.unsqueeze(0)
        if len(td) != len(ids):
            raise ValueError(f"async_{kind}_send failed: expected {len(ids)} rows (envs {ids}), got {len(td)}.")
        rows = without_index(td)
        with self._turns:
            busy = [i for i in ids if i in self._places]
            if busy:
                raise RuntimeError(
                    f"Some envs are still processing a step: envs that are busy: {busy}, queried: {ids}."
                )
            parts = [(env_ids, own, self._inputs(kind, env_ids, own)) for env_ids, own in self._by_rows(ids, rows)]
            for env_ids, own, inputs in parts:
                self._sent_rows.put(env_ids, own)
                self._start(kind, env_ids, inputs)
                for env_id in env_ids:
                    self._failures.pop(env_id, None)
                    self._places[env_id] = kind, is_alone
            if kind != "reset":
                self._exchange_stats.note_sent(ids)

    def _by_rows(self, ids: list[int], rows: Any) -> list[tuple[list[int], Any]]:
        """Return envs whose rows cross in the same way, and their rows."""
        if self._is_alike:
            return [(ids, rows)]
        kinds: dict[int, list[int]] = {}
        for place, env_id in enumerate(ids):
            kinds.setdefault(id(self._rows[env_id]), []).append(place)
        return [([ids[i] for i in places], stacked([rows[i] for i in places])) for places in kinds.values()]

    def _inputs(self, kind: Kind, ids: list[int], rows: TensorDictBase) -> TensorDictBase:
        """Return what some envs are given: `[k]`."""
        return rows if kind == "reset" else self._rows[ids[0]].inputs_of(rows)

    def _start(self, kind: Kind, ids: list[int], inputs: TensorDictBase) -> None:
        if kind == "reset":
            for env_id, row in zip(ids, inputs.unbind(0), strict=True):
                self._start_reset(env_id, row)
            return
        env_ids, states = np.array(ids), self._executor.engine.states
        needs_reset = states.needs_reset[env_ids]
        if needs_reset.any():
            states.move(env_ids[needs_reset], Event.IS_ALLOWED)
        self._executor.send(inputs, torch.from_numpy(env_ids), maybe_reset=kind == "step_and_maybe_reset")

    def _start_reset(self, env_id: int, row: TensorDictBase) -> None:
        engine = self._executor.engine
        extras = {}
        if not row.is_empty():
            extras[env_id] = Prepare(env_id=env_id, options={"row": dumps(row)})
        with engine.guard:
            self._resets[env_id] = engine.flights.begin(
                Op.RESET, np.array([env_id]), extras=extras, is_parked=True, flags=int(Flag.EACH)
            )

    # ---- recv --------------------------------------------------------------------------------

    def async_step_recv(
        self,
        min_get: int | None = None,
        env_index: int | None = None,
        *,
        max_get: int | None = None,
        timeout: float | None = None,
    ) -> TensorDictBase:
        """Return what envs were sent, with the `next` of their steps, as soon as enough are ready.

        Args:
            min_get: how many at least; None for the attribute `min_get`.
            env_index: this env alone, which was sent by its index; the other arguments are ignored then.
            max_get: how many at most; None for all that are ready.
            timeout: seconds. The call waits up to that long for `max_get` envs, and then returns those that are ready,
                if these are `min_get`.

        Returns:
            Batch `[k]` by ascending index, with `env_index`; of one env, without that dimension, with `env_index=`.

        Raises:
            TimeoutError: fewer than `min_get` in time. Nothing is lost: receive again.
            RuntimeError: fewer were sent.
            EnvError, WorkerLost, WorkerTimeout: the envs concerned are no longer sent; the rest are.
        """
        return self._recv("step", min_get, env_index, max_get, timeout)[0]

    def async_step_and_maybe_reset_recv(
        self,
        min_get: int | None = None,
        env_index: int | None = None,
        *,
        max_get: int | None = None,
        timeout: float | None = None,
    ) -> tuple[TensorDictBase, TensorDictBase]:
        """Return the steps as `async_step_recv` does, and where these envs are after them."""
        batch, root = self._recv("step_and_maybe_reset", min_get, env_index, max_get, timeout)
        assert root is not None
        return batch, root

    def async_reset_recv(
        self,
        min_get: int | None = None,
        env_index: int | None = None,
        *,
        max_get: int | None = None,
        timeout: float | None = None,
    ) -> TensorDictBase:
        """Return where envs are that were reset; see `async_step_recv`."""
        return self._recv("reset", min_get, env_index, max_get, timeout)[0]

    def _recv(
        self, kind: Kind, min_get: int | None, env_index: int | None, max_get: int | None, timeout: float | None
    ) -> tuple[TensorDictBase, TensorDictBase | None]:
        if env_index is not None:
            return self._recv_one(kind, int(env_index))
        least = self.min_get if min_get is None else min_get
        if least < 1:
            raise ValueError(f"min_get must be positive, got {least}.")
        if max_get is not None and max_get < least:
            raise ValueError(f"max_get must be at least min_get, got min_get={least} and max_get={max_get}.")
        if timeout is not None and timeout < 0:
            raise ValueError(f"timeout must be non-negative, got {timeout}.")
        awaited = _Awaited(self, (kind, False), least)
        with self._turns:
            awaited.check()
            num_sent = len(awaited.ids())
            most = num_sent if max_get is None else min(max_get, num_sent)
            ready = self._turns.wait(awaited, least, most, timeout)
            if len(ready) < least:
                raise TimeoutError(
                    f"async_{kind}_recv failed: expected {least} envs within {timeout:g} s, got {len(ready)}. Nothing "
                    f"is lost: receive again."
                )
            ids = sorted(ready[:most].tolist())
            self._exchange_stats.note_received(ids, max_get, is_acted_on=kind != "reset")
            parts = [self._taken(kind, env_ids) for env_ids in self._split(ids)]
        batch = self._joined([part[0] for part in parts], ids)
        return batch, None if parts[0][1] is None else self._joined([part[1] for part in parts], ids)

    def _recv_one(self, kind: Kind, env_id: int) -> tuple[TensorDictBase, TensorDictBase | None]:
        with self._turns:
            self._turns.wait(_Awaited(self, (kind, True), 1, env_id), 1, 1, None)
            self._exchange_stats.note_received([env_id], 1, is_acted_on=kind != "reset")
            batch, root = self._taken(kind, [env_id])
        row = batch[0].set(ENV_INDEX, NonTensorData(env_id))
        return row, None if root is None else root[0].set(ENV_INDEX, NonTensorData(env_id))

    def _split(self, ids: list[int]) -> list[list[int]]:
        return [env_ids for env_ids, _ in self._by_rows(ids, [TensorDict()] * len(ids))]

    def _joined(self, parts: list[Any], ids: list[int]) -> TensorDictBase:
        """Return the batch of envs whose rows came in parts, as `stack` says, by ascending index."""
        batch = parts[0]
        if len(parts) > 1:
            by_id = dict(
                zip(
                    [i for own in self._split(ids) for i in own],
                    [row for part in parts for row in part.unbind(0)],
                    strict=True,
                )
            )
            rows = [by_id[i] for i in ids]
            batch = torch.stack(rows) if self.stack == "dense" else stacked(rows)
        if self.stack == "lazy" and not isinstance(batch, LazyStackedTensorDict):
            batch = LazyStackedTensorDict(*batch.unbind(0), stack_dim=0)
        return set_indices(batch, ids)

    def _taken(self, kind: Kind, ids: list[int]) -> tuple[TensorDictBase, TensorDictBase | None]:
        """Return what envs that are ready have given, `[k]`: what was sent with `next`, and the root after it."""
        rows, executor, env_ids = self._rows[ids[0]], self._executor, np.array(ids)
        batch = self._sent_rows.take(ids)
        for env_id in ids:
            del self._places[env_id]
        if kind == "reset":
            with executor.engine.guard:
                for env_id in ids:
                    self._resets.pop(env_id).land()
            batch = batch.exclude(*self.reset_keys)
            return batch.update(rows.root_of(executor.current(env_ids))), None
        received = executor.recv(env_ids=torch.from_numpy(env_ids), with_root=False)
        following = rows.next_of(received)
        batch.set("next", following)
        if kind == "step":
            return batch, None
        return batch, self._root_after(rows, batch, received)

    def _root_after(
        self, rows: SlabRows | PickledRows, batch: TensorDictBase, received: TensorDictBase
    ) -> TensorDictBase:
        """Return where envs are after steps, and what else was in their rows, which goes on into the root."""
        root = rows.root_of(self._executor.current(received.get("env_ids")))
        own = set(batch.keys(include_nested=True, leaves_only=True)) - rows.known if not rows.has_state else {ENV_INDEX}
        if any(key[0] != "next" for key in own):
            root = self.step_mdp(batch).update(root).exclude(*rows.reward_keys)
        return root

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
        """Reset all envs, or what the masks of `tensordict` name, and wait for them."""
        self.async_reset_send(tensordict, list(range(self.num_envs)))
        return self.async_reset_recv(self.num_envs)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        following: TensorDictBase = self.step(tensordict).get("next")
        return following

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        return self.reset(tensordict, **kwargs)


def installed() -> contextlib.AbstractContextManager[None]:
    """Put our `ParallelEnv`, `SerialEnv` and `AsyncEnvPool` in place of TorchRL's, in all of TorchRL, for a block."""
    return replaced(
        "torchrl",
        {
            torchrl.envs.ParallelEnv: parallel_env.ParallelEnv,
            torchrl.envs.SerialEnv: parallel_env.SerialEnv,
            torchrl.envs.AsyncEnvPool: AsyncEnvPool,
        },
    )


@dataclass(frozen=True, eq=False)
class _Awaited:
    """What a thread waits for in an `AsyncEnvPool`; see `async_waits.Awaited`."""

    pool: AsyncEnvPool
    sent: Sent
    least: int
    env_id: int | None = None

    def ids(self) -> np.ndarray:
        places = self.pool._places  # noqa: SLF001  # of this module
        if self.env_id is not None:
            return np.array([self.env_id] if places.get(self.env_id) == self.sent else [], np.int64)
        return np.array([i for i, sent in places.items() if sent == self.sent], np.int64)

    def check(self) -> None:
        failures = self.pool._failures  # noqa: SLF001
        for env_id, (sent, error) in list(failures.items()):
            if sent == self.sent and self.env_id in (None, env_id):
                failures.pop(env_id)
                raise error
        num_sent = len(self.ids())
        if num_sent < self.least:
            raise RuntimeError(f"Cannot await {self.least} {self.sent[0]} when only {num_sent} were sent.")

    def note(self, error: Exception) -> bool:
        pool = self.pool
        if not isinstance(error, EnvherdError):
            return False
        under_way = pool._executor.engine.states.under_way  # noqa: SLF001
        failed = [i for i in pool._places if not under_way[i]]  # noqa: SLF001
        for env_id in failed:
            pool._failures[env_id] = pool._places.pop(env_id), error  # noqa: SLF001
            pool._resets.pop(env_id, None)  # noqa: SLF001
        return bool(failed)


def _need(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"AsyncEnvPool failed: expected {name} to be one of {allowed}, got {value!r}.")


def _kwargs_each(kwargs: Any, num_envs: int) -> list[dict[str, Any]]:
    if kwargs is None or isinstance(kwargs, Mapping):
        return [dict(kwargs or {}) for _ in range(num_envs)]
    if len(kwargs) != num_envs:
        raise ValueError(
            f"create_env_kwargs must be a dict or a list of dicts with length {num_envs}, got {len(kwargs)}."
        )
    return [dict(one) for one in kwargs]


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
