"""Reset-ahead: an env has two instances in two workers; one serves while the other is reset for the next episode.

Guarantees:
- A prepared episode is the one that an ordinary reset would have begun: it is used only if the requested
  reset has the same seed and no options. Otherwise the env is reset at that time.
- An exception of a prepared reset is raised when its episode is requested.
- A worker carries out a command only while it serves the env, even if it is woken for another reason.
Assumes: both instances differ from a newly built env only by `call`, `set` and `load_state_dict`, which reach both. An
env whose reset depends on its earlier episodes, and not only on its seed, has two histories here.

The parent writes one word per env, the *turn*: the worker that serves it, and the episode that the other one prepares.
It does so only while the env owes no answer (or owes one that a dead worker cannot give), and before the number of the
next command. A worker reads that number before the turn. So a worker that finds a new command and its own turn may
carry out the command.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from envherd.shm.sync import keep_order
from envherd.workers.block.block import Block
from envherd.workers.block.slot import Slot
from envherd.workers.block.slot_states import Event
from envherd.workers.process.loop import Loop
from envherd.workers.protocol import Op

_WORKER_BITS = 24


def pack_turn(worker_id: int, episode: int | None) -> int:
    """Return the turn word: `worker_id` serves; the other worker prepares `episode`, or nothing."""
    return worker_id | (0 if episode is None else episode + 1) << _WORKER_BITS


def unpack_turn(turn: int) -> tuple[int, int | None]:
    """Return `(worker_id, episode or None)` of a turn word."""
    episode = turn >> _WORKER_BITS
    return turn & (1 << _WORKER_BITS) - 1, episode - 1 if episode else None


@dataclass(frozen=True)
class _Kept:
    """A reset that was made ahead: its result or its exception."""

    seed: int | None
    observation: list[Any]
    error: BaseException | None = None


class AheadBlock(Block):
    """A block of one env that can be reset before its episode is requested."""

    _kept: _Kept | None = None
    num_seeds = 0  # root seeds that it has received

    def seed(self, root_seed: int, episodes: Sequence[int] | None = None) -> None:  # noqa: ARG002  # see below
        """Use a new root seed. The parent sets the count of episodes, because the other worker may serve the env."""
        self.use_root_seed(root_seed)
        self.num_seeds += 1
        self.forget_ahead()
        for slot in self.slots.values():
            slot.adapter.reseeded()

    def why_python(self) -> list[str]:
        return [*super().why_python(), "reset_ahead=True"]

    def forget_ahead(self) -> None:
        """Drop the prepared episode: the env has changed since."""
        self._kept = None
        if "ready" in self._words:
            self._words["ready"][self.worker_id] = 0

    def _note_change(self, slot: Slot) -> None:
        if unpack_turn(self._words["turn"][slot.env_id])[0] == self.worker_id:  # else the next episode may have begun
            super()._note_change(slot)

    def reset_ahead(self, episode: int) -> None:
        """Reset the env for a later episode, and keep the result."""
        (slot,) = self.slots.values()
        self.forget_ahead()
        slot.move(Event.IS_BROKEN_OFF)
        self._phase[self.worker_id] = slot.phase_words[Op.RESET]
        seed = slot.seed_of(episode)
        try:
            self._kept = _Kept(seed, super()._begin_episode(slot, seed, None, None))
        except BaseException as error:  # whatever it is: see `Block.execute`
            self._kept = _Kept(seed, [], error)
        self._words["ready"][self.worker_id] = episode + 1

    def _begin_episode(
        self, slot: Slot, seed: int | None, options: dict[str, Any] | None, mask: np.ndarray | None
    ) -> list[Any]:
        kept = self._kept
        self.forget_ahead()
        slot.side["next"][:] = [None] * len(slot.side["next"])  # left from an earlier episode that this worker served
        if kept is None or options or kept.seed != seed:
            return super()._begin_episode(slot, seed, options, mask)
        if kept.error is not None:
            raise kept.error
        return kept.observation


class AheadLoop(Loop):
    """Serves one env while it is this worker's turn, and prepares its next episode while it is not."""

    _block: AheadBlock
    _seen = (0, 0)  # the turn and the root seed of the latest preparation

    def _scan(self) -> None:
        """Carry out a new command, or prepare the episode that the turn names."""
        words, worker_id = self._words, self._block.worker_id
        (env_id,) = self._latest
        number = words["command_seq"][env_id]  # before the turn: see the module
        turn = words["turn"][env_id]
        if self._mail_read < words["mail_seq"][worker_id] and not self._check_mail():
            return
        server, episode = unpack_turn(turn)
        if server != worker_id:
            seen = turn, self._block.num_seeds
            if seen != self._seen:
                self._seen = seen
                self._prepare(episode)
            return
        if number <= words["reply_seq"][env_id]:  # the number may be old: the other worker may have served meanwhile
            return
        keep_order()  # before what the number announces
        words["status"][env_id] = self._execute_timed(env_id, words["command"][env_id], 1)
        words["answered_ns"][env_id] = time.perf_counter_ns()
        keep_order()
        words["reply_seq"][env_id] = number
        self._done.ring()

    def _prepare(self, episode: int | None) -> None:
        if episode is not None:
            began = time.perf_counter_ns()
            self._block.reset_ahead(episode)
            self._words["reset_ns"][self._block.worker_id] += time.perf_counter_ns() - began
        self._go.rest()  # the next episode is far off: do not spin until then
