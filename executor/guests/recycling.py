"""Replace workers before their envs leak too much memory.

Guarantees: a worker is replaced only when all its envs are between episodes (they are about to be reset, or were reset
by the step that ended them), so no row is interrupted. Envs are closed as usual, built again, and reset with the seeds
that they would have had, so the data equal those of a run without recycling.
Does not know when a worker's envs will all be between episodes: with one env per worker, at every end; with several,
when they end together or are all reset. It waits until then.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from envherd.executor.protocol.engine import Engine
from envherd.executor.protocol.flight import Renew
from envherd.executor.protocol.info_reader import SideData
from envherd.executor.protocol.positions import Positions


@contextlib.contextmanager
def keeping_steps(
    positions: Positions,
    side: SideData,
    env_ids: np.ndarray,
    columns: np.ndarray,
) -> Iterator[None]:
    """Keep the rows of steps, while the envs that they ended are reset by separate commands.

    Args:
        positions: of the engine.
        side: of the engine.
        env_ids: int `[k]`.
        columns: int `[k]`, of their steps.
    """
    # The resets of the block write to the same places: what the steps have left there is put back.
    values = dict(side.next)
    infos = side.infos.read("next")
    flags: list[np.ndarray] = []
    for env_id, column in zip(env_ids.tolist(), columns.tolist(), strict=True):
        row = positions.where.row(env_id, column)
        flags += [row["next", *leaf.key] for leaf in positions.specs[env_id].done]
    ends = [flag.copy() for flag in flags]
    try:
        yield
    finally:
        # A loss in the block ends the next episode, not this one.
        for flag, end in zip(flags, ends, strict=True):
            flag[...] = end
        for env_id in env_ids.tolist():
            side.next[env_id] = values[env_id]
        side.infos.put("next", infos, env_ids.tolist())


class Recycler:
    """Replaces the workers of an engine that are due according to the options, when that interrupts no episode."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._pool = engine.pool

    def before_resets(
        self,
        env_ids: np.ndarray,
        lose: Callable[[np.ndarray], None],
    ) -> None:
        """Replace due workers all of whose envs are about to be reset; see `Renewal`."""
        for worker_id in self._whole_workers(env_ids):
            if self._is_due(worker_id, num_begun=0) and self._are_reset_whole(
                worker_id
            ):
                lose(np.array(self._pool.blueprint.blocks[worker_id]))
                self._pool.recycle(worker_id, is_anew=False)

    def after_steps(
        self,
        env_ids: np.ndarray,
        columns: np.ndarray,
        renew: Renew,
    ) -> None:
        """Replace due workers all of whose envs were just reset by the steps that ended them; see `Renewal`."""
        column_of = dict(zip(env_ids.tolist(), columns.tolist(), strict=True))
        with keeping_steps(self._engine.positions, self._engine.side, env_ids, columns):
            for worker_id in self._whole_workers(env_ids):
                ids = np.array(self._pool.blueprint.blocks[worker_id])
                # When a part of a batch ends, the rest is still in an episode.
                if self._is_due(worker_id, num_begun=1) and not any(
                    self._pool.specs[env_id].batch_shape for env_id in ids
                ):
                    renew(
                        ids,
                        np.array([column_of[i] for i in ids.tolist()]),
                        partial(self._pool.recycle, worker_id, is_anew=True),
                    )

    def _whole_workers(self, env_ids: np.ndarray) -> list[int]:
        """Return the workers in service all of whose envs are among these."""
        counts = np.bincount(
            self._pool.worker_of[env_ids],
            minlength=self._pool.num_workers,
        )
        return [
            w
            for w in np.flatnonzero(counts).tolist()
            if counts[w] == len(self._pool.blueprint.blocks[w])
            and self._pool.is_serving(w)
        ]

    def _are_reset_whole(self, worker_id: int) -> bool:
        """Return whether the next reset begins all episodes of a worker's envs, if an env is a batch."""
        for env_id in self._pool.blueprint.blocks[worker_id]:
            group, row = self._engine.positions.places.of_env[env_id]
            mask = self._engine.positions.slab.groups[group].inputs.get(("reset_mask",))
            if mask is not None and not mask[row].all():
                return False
        return True

    def _is_due(self, worker_id: int, num_begun: int) -> bool:
        options = self._engine.options
        env_ids = list(self._pool.blueprint.blocks[worker_id])
        resets = int(self._pool.slab.words["resets"][env_ids].max())
        # The reset that has begun the next episode has ended none.
        num_ended = resets - self._pool.resets_before_start[worker_id] - num_begun
        if options.recycle_after is not None and num_ended >= options.recycle_after:
            return True
        if options.max_worker_memory is None:
            return False
        num_bytes = self._pool.memory_of(worker_id)
        self._engine.memory.note(
            worker_id,
            self._pool.generation_of(worker_id),
            resets,
            num_bytes,
        )
        return num_bytes > options.max_worker_memory
