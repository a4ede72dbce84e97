"""Command words for a STEP_RESET that is given as a STEP and, if that ends the episode, a RESET after it.

Guarantees: an env that gets both has answered when it has answered the second. Until the numbers of the second are
written, an interrupt changes nothing.
"""

from __future__ import annotations

import numpy as np

from envherd.executor.pools.command_words import CommandWords
from envherd.executor.pools.replies import Outcome
from envherd.executor.pools.waiting import Clock
from envherd.shm.slab import Slab
from envherd.workers.protocol import STEP_RESET, Status

_NONE = -1  # number of no command
_FAILED = int(Status.FAILED)  # for arrays; see `workers.protocol.STEP`


class FusedWords(CommandWords):
    """See the module and `CommandWords`.

    Args:
        slab: of the words.
        clock: counts how long envs owe the answer to a RESET.
    """

    def __init__(self, slab: Slab, clock: Clock) -> None:
        super().__init__(slab)
        self._clock = clock
        num_envs = len(self.command_seq)
        self._ends = slab.words["ends"]
        self._fused = np.full(num_envs, _NONE)  # number of the STEP that may require a RESET
        self._following = np.full(num_envs, _NONE)  # number of the RESET after it, until its messages are read
        self._resets = np.zeros(num_envs, np.int64)  # the RESET to give
        self._num_ends = np.zeros(num_envs, np.int64)  # before the STEP
        self._followed_at = np.zeros(num_envs)  # seconds of the clock

    def note_order(self, env_ids: np.ndarray, ops: int | np.ndarray, resets: np.ndarray | int) -> None:
        """Record the op of the next command of some envs.

        Args:
            env_ids: int `[k]`.
            ops: of all of them, or int `[k]`.
            resets: the command to give if a STEP_RESET ends the episode, likewise.
        """
        self._resets[env_ids], self._num_ends[env_ids] = resets, self._ends[env_ids]
        number = self.number[0] + 1
        self._fused[env_ids] = np.where(np.equal(ops, STEP_RESET), number, _NONE)  # once the command has this number

    def take_ended(self) -> np.ndarray:
        """Return the envs to reset, int `[k]`: their STEP_RESET has ended their episode."""
        is_stepped = (self._fused == self.command_seq) & super().has_answered()
        if not is_stepped.any():
            return np.flatnonzero(is_stepped)
        has_ended = (self._ends != self._num_ends) & (self.status != _FAILED) & ~self.answers_lost
        self._fused[is_stepped & ~has_ended] = _NONE
        return np.flatnonzero(is_stepped & has_ended)

    def write_resets(self, env_ids: np.ndarray) -> None:
        """Write RESETs for envs whose episodes have ended."""
        self._following[env_ids], self._followed_at[env_ids] = self.number[0] + 1, self._clock.now()
        self.complete(env_ids)
        self.write(env_ids, self._resets[env_ids])

    def has_answered(self) -> np.ndarray:
        return np.asarray(super().has_answered() & (self._fused != self.command_seq))

    def is_idle(self) -> bool:
        return bool(self.has_answered().all())

    def lose_answers(self, env_ids: np.ndarray, outcome: Outcome) -> np.ndarray:
        owing = super().lose_answers(env_ids, outcome)
        self._fused[owing] = self._following[owing] = _NONE
        return owing

    def is_following(self, env_id: int) -> bool:
        """Return whether the messages of an env are those of the RESET after its STEP."""
        return bool(self._following[env_id] == self.command_seq[env_id])

    def forget_following(self, is_read: np.ndarray) -> None:
        """Note that the messages of some envs, bool `[N]`, were read."""
        self._following[is_read] = _NONE

    def is_in_parts(self) -> np.ndarray:
        """Return which envs have reported the first of two parts of their answer, bool `[N]`."""
        return np.asarray((self._fused == self.command_seq) | (self._following == self.command_seq))

    def owes_following(self) -> np.ndarray:
        """Return which envs owe the answer to a RESET after their STEP, bool `[N]`."""
        return np.asarray((self._following == self.command_seq) & (self.command_seq != self.reply_seq))

    def late_following(self, limit_s: float) -> list[int]:
        """Return the envs that have owed the answer to such a RESET for longer than `limit_s`."""
        return np.flatnonzero(self.owes_following() & (self._followed_at < self._clock.now() - limit_s)).tolist()
