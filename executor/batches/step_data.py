"""The batches of a step of all envs of one kind, compiled for these envs."""

from collections.abc import Callable

import numpy as np
from tensordict import TensorDict, TensorDictBase

from envherd.executor.batches.fast_tensordict import Shell
from envherd.executor.batches.hand_out import GroupBatch
from envherd.executor.batches.memory import Taken
from envherd.workers.protocol import Op

#: A batch, and the root after it; None without a root.
WithRoot = tuple[TensorDictBase, TensorDictBase | None]
#: The batches of a step, created before their memory is filled: the memory of `next`, or None for the frame's own; that
#: of `interrupted`, or None; the `next` batch; the root, or None. A plain tuple, because each step creates one.
Draft = tuple[np.ndarray | None, np.ndarray | None, TensorDict, TensorDict | None]


class StepBatches:
    """The batches of a step of all envs, which are one group: made while the workers step, filled afterwards.

    Args:
        batch: the group.
        next_shell: over the leaves of its `next`.
        root_over_next: over the same leaves, for a step after which no env was reset.
        root_shell: over the leaves of its root.
        is_copy: hand out copies of steps, not views of the ring.
        interrupted: the latest flags, bool `[N, *B, 1]` (VIEW); each `next` gets a copy. None for no such leaf.

    Attributes:
        draft: op -> `column -> draft`: creates the batches of a step before its rows exist; `finish` fills them.
    """

    def __init__(
        self,
        batch: GroupBatch,
        next_shell: Shell,
        root_over_next: Shell,
        root_shell: Shell,
        *,
        is_copy: bool,
        interrupted: np.ndarray | None = None,
    ) -> None:
        self._batch = batch
        self._build_next = next_shell.build
        self._build_over_next = root_over_next.build
        self._build_root = root_shell.build
        self._is_copy = is_copy
        self._interrupted = interrupted
        self.draft = {
            op: self._drafter(has_root=op == Op.STEP_RESET)
            for op in (Op.STEP, Op.STEP_RESET)
        }

    def _drafter(self, *, has_root: bool) -> Callable[[int], Draft]:
        """Return the function that drafts the batches of a step to a column, for `draft`."""
        # Names of the closure, because attributes take longer.
        build_next = self._build_next
        build_root = self._build_over_next
        take: Callable[[int], Taken] = self._take
        if self._is_copy:
            take = self._batch.memory.take
        interrupted = self._interrupted

        def draft(column: int) -> Draft:
            buffer, leaves = take(column)
            flags = None
            if interrupted is not None:
                flags = np.empty_like(interrupted)
                leaves = [*leaves, *self._batch.to_tensors([flags])]
            next_td = build_next(leaves)
            return buffer, flags, next_td, build_root(leaves) if has_root else None

        return draft

    def _take(self, column: int) -> Taken:
        """Return a column's leaves as views, in place of memory for copies."""
        return None, self._batch.next_views(column)

    def finish(
        self,
        draft: Draft,
        column: int,
        reset_ids: np.ndarray | None,
    ) -> WithRoot:
        """Return the `next` batch `[N]` of a step, and the root after it.

        Args:
            draft: of this step.
            column: of the ring.
            reset_ids: int64 `[k]`, envs that were reset after the step; None for none.

        Returns:
            Copies, or the frame that is lent, or views if the executor hands out views. The root shares the leaves of
            `next` unless an env was reset.
        """
        buffer, flags, next_td, root = draft
        if flags is not None:
            flags[...] = self._interrupted
        if buffer is not None:
            buffer[:] = self._batch.next_bytes[column]
        if reset_ids is not None and root is not None:
            root = self._build_root(self._batch.mended_roots(column, reset_ids))
        return next_td, root
