"""The part of an engine that does not depend on where rows are: refusals, seeds, and the arguments of resets."""

import contextlib
import operator
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from envherd.executor.batches.memory import Leaves
from envherd.executor.batches.random_actions import ActionSampler
from envherd.executor.options import ExecutorOptions
from envherd.executor.pools.base import Pool
from envherd.executor.processes.memory_log import MemoryLog
from envherd.executor.protocol.env_states import EnvStates, Event
from envherd.shm.interrupts import uninterrupted
from envherd.shm.specs import EnvSpec
from envherd.workers import messages
from envherd.workers.seeding import as_root_seed


class Received(NamedTuple):
    """The batch that the latest `recv` returned.

    Attributes:
        ids: its `env_ids`, which the caller may have changed since.
        env_ids: the same, unchanged.
        leaves: of its `next`; None if they are not the envs' present roots.
        num_writes: torch's number of writes to these leaves when it was received.
        number, num_losses: those of the latest command and of losses; if one has changed, `leaves` are outdated.
    """

    ids: torch.Tensor
    env_ids: np.ndarray
    leaves: Leaves | None
    num_writes: float
    number: int
    num_losses: int

    def is_of(self, env_ids: Any) -> bool:
        """Return whether an object is `ids`, with the values that they had."""
        return (
            env_ids is self.ids and self.ids.numpy().tobytes() == self.env_ids.tobytes()
        )


class Rolling:
    """A context that sets `engine.is_rolling` (0.3 us; a generator-based one takes 1)."""

    def __init__(self, engine: "Calls") -> None:
        self._engine = engine

    def __enter__(self) -> None:
        self._engine.is_rolling = True

    def __exit__(self, *_: object) -> None:
        self._engine.is_rolling = False


class Calls:
    """What calls of every engine share: refusals, seeds and arguments of resets; the base of engines.

    Attributes:
        pool: of the executor.
        batches, positions: the envs' rows.
        states: the state of every env.
        known: keys of the envs' leaves, without `next`.
        is_rolling: a rollout is in progress; its policy and callback may send requests to envs, but not step them.
        is_dirty: a call was broken off.
        is_asking: a facade has asked the envs, and will take their answers in another call.
        received: the batch that was received last, while it holds its envs' present roots; else None.
        ready_at: monotonic seconds.
        memory: samples of the workers' memory.
    """

    batches: Any
    positions: Any
    states: EnvStates

    def __init__(self, pool: Pool, options: ExecutorOptions) -> None:
        self.pool = pool
        self.options = options
        self.specs: tuple[EnvSpec, ...] = tuple(pool.specs)
        self.num_envs = pool.num_envs
        self.known = {leaf.key for spec in self.specs for leaf in spec.leaves()}
        self.all_ids = np.arange(self.num_envs)
        self.memory = MemoryLog()
        self.is_rolling = self.is_dirty = self.is_asking = False
        self.received: Received | None = None
        self._rolling = Rolling(self)
        self.ready_at = time.monotonic()

    @property
    def batch_size(self) -> torch.Size:
        """`[N]`, or `[N, *B]` if every env is itself a batch of shape B."""
        return torch.Size((self.num_envs, *self.specs[0].batch_shape))

    # ---- refusals ----------------------------------------------------------------------------

    def refuse_under_way(self, env_ids: np.ndarray) -> None:
        """Raise `Busy` if any of the envs has a command whose answer was not taken yet."""
        if not self.states.are_running():
            self.states.check(Event.RESET, env_ids)

    def rolling(self) -> Rolling:
        """Return the context for a rollout's policy or callback, during which envs must not be stepped."""
        return self._rolling

    # ---- seeds and arguments -----------------------------------------------------------------

    def extras_of(
        self,
        env_ids: np.ndarray,
        seeds: Sequence[int | None] | None,
        per_env: Sequence[dict[str, Any]] | None,
        common: dict[str, Any],
    ) -> dict[int, messages.Prepare]:
        """Return the messages to send ahead of the envs' resets, by env id: seeds and keyword arguments.

        Raises:
            ValueError, TypeError: not one item for each env, or an item is no seed or no dict.
        """
        if seeds is None and per_env is None and not common:
            return {}
        # Before any message is made: a refused reset sends none.
        for given, name in ((seeds, "seed"), (per_env, "list_of_kwargs")):
            if given is not None and len(given) != self.num_envs:
                raise ValueError(
                    f"reset failed: expected {self.num_envs} items in {name}, got {len(given)}."
                )
        extras = {}
        for env_id in env_ids.tolist():
            own = {} if per_env is None else per_env[env_id]
            if not isinstance(own, Mapping):
                raise TypeError(
                    f"reset failed: expected a dict in list_of_kwargs, got {own!r} (env {env_id})."
                )
            seed = None if seeds is None else _as_seed(seeds[env_id], env_id)
            # An env's own argument takes the place of a common one.
            options = {**common, **own} or None
            extras[env_id] = messages.Prepare(
                env_id=env_id,
                seed=seed,
                has_seed=seeds is not None,
                options=options,
            )
        return extras

    def use_seed(self, seed: int | None) -> None:
        """Seed the generator of random actions."""
        self.seed = as_root_seed(seed, "set_seed")
        self.num_branches = 0
        self.sampler = ActionSampler(self.specs, self.seed, self.options.first_env_id)

    def set_seed(self, seed: int | None, episodes: Sequence[int] | None = None) -> None:
        """Use a new root seed everywhere; the next resets begin these episodes, or episode 0 of all envs."""
        self.refuse_under_way(self.all_ids)
        self.use_seed(seed)
        self.pool.seed(self.seed, episodes)

    def give_up(self, env_ids: np.ndarray) -> None:
        """Note that envs, int64 `[k]`, must be reset, unless `restore` follows; their roots show it."""
        with uninterrupted():  # or rows and states would disagree
            self.positions.mark_lost(env_ids)
            self.states.move(env_ids, Event.IS_BROKEN_OFF)
        self.received = None

    def restore(
        self,
        env_ids: np.ndarray,
        roots: Sequence[Mapping[str, Any]] | None,
        ended: np.ndarray | None,
    ) -> None:
        """Note that envs have been restored.

        Args:
            env_ids: int64 `[k]`.
            roots: their present roots; None if these are unknown, and all envs count as running.
            ended: bool `[k]`, envs that must be reset.
        """
        with uninterrupted():
            if roots is None or ended is None:
                # The observations from before stay: only the flags are known.
                self.positions.mark_running()
                self.states.move(env_ids, Event.IS_ALLOWED)
            else:
                self.batches.put_roots(env_ids, roots)
                self.states.restore(env_ids, ended)


def _as_seed(given: Any, env_id: int) -> int | None:
    if given is None:
        return None
    if not isinstance(given, bool):
        with contextlib.suppress(TypeError):
            return operator.index(given)
    raise ValueError(
        f"reset failed: expected an integer or None as seed, got {given!r} (env {env_id})."
    )
