"""Reset-ahead: an env has two instances in two workers; one serves while the other is reset for the next episode.

Guarantees:
- An episode that was prepared is the one that an ordinary reset would have begun: it is taken only if its seed is that
  of the reset asked for, and no options are. Otherwise the env is reset there and then.
- What a prepared reset raised is raised when its episode is asked for.
- A worker carries out a command only while it serves the env, whatever wakes it.
Assumes: both instances are as their factory built them but for what `call`, `set` and `load_state_dict` have done to
both; an env whose reset depends on its earlier episodes, beyond its seed, has two histories here.

The parent writes one word per env, the *turn*: who serves it, and which episode the other is to prepare. It does so
only while the env owes no answer (or owes one that a dead worker cannot give), and before the number of the next
command; a worker reads that number before the turn. So one that finds both a new command and a turn that is its own may
take it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from envherd.workers.block.block import Block
from envherd.workers.block.slot import Slot
from envherd.workers.process.loop import Loop
from envherd.workers.protocol import Op

_WORKER_BITS = 24


def pack_turn(worker_id: int, episode: int | None) -> int:
    """Return the turn word: `worker_id` serves; the other prepares `episode`, or nothing."""
    return worker_id | (0 if episode is None else episode + 1) << _WORKER_BITS


def unpack_turn(turn: int) -> tuple[int, int | None]:
    """Return `(worker_id, episode or None)` of a turn word."""
    episode = turn >> _WORKER_BITS
    return turn & (1 << _WORKER_BITS) - 1, episode - 1 if episode else None


@dataclass(frozen=True)
class _Kept:
    """A reset that was made ahead: what it gave, or what it raised."""

    seed: int | None
    observation: list[Any]
    error: BaseException | None = None


class AheadBlock(Block):
    """A block of one env that can be reset before its episode is asked for."""

    _kept: _Kept | None = None
    num_seeds = 0  # root seeds that it has received

    def seed(self, root_seed: int, episodes: Sequence[int] | None = None) -> None:  # noqa: ARG002  # see below
        """Use a new root seed. The count of episodes is the parent's to set: this env may be the other worker's."""
        self.use_root_seed(root_seed)
        self.num_seeds += 1
        self.forget_ahead()
        for slot in self.slots.values():
            slot.adapter.reseeded()

    def forget_ahead(self) -> None:
        """Throw away what was prepared: the env is no longer as it was then."""
        self._kept = None
        if "ready" in self._words:
            self._words["ready"][self.worker_id] = 0

    def reset_ahead(self, episode: int) -> None:
        """Reset the env for an episode to come, and keep what it gives."""
        (slot,) = self.slots.values()
        self.forget_ahead()
        slot.must_reset = True
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
        slot.side["next"][:] = [None] * len(slot.side["next"])  # of an episode that it has served before the other one
        if kept is None or options or kept.seed != seed:
            return super()._begin_episode(slot, seed, options, mask)
        if kept.error is not None:
            raise kept.error
        return kept.observation


class AheadLoop(Loop):
    """Serves one env while it is this worker's turn, and prepares its next episode while it is not."""

    _block: AheadBlock
    _seen = (0, 0)  # the turn, and the root seed, for which was prepared

    def _scan(self) -> None:
        """Carry out the command that is there, or prepare what is wanted."""
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
        if number <= words["reply_seq"][env_id]:  # an old number, perhaps: the other one may have served meanwhile
            return
        words["status"][env_id] = self._execute_timed(env_id, words["command"][env_id], 1)
        words["answered_ns"][env_id] = time.perf_counter_ns()
        words["reply_seq"][env_id] = number
        self._done.ring()

    def _prepare(self, episode: int | None) -> None:
        if episode is not None:
            began = time.perf_counter_ns()
            self._block.reset_ahead(episode)
            self._words["reset_ns"][self._block.worker_id] += time.perf_counter_ns() - began
        self._go.rest()  # the next episode is far: who waits for it takes no processor
