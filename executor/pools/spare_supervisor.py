"""Supervision for envs with two workers: one that serves the env, and an optional spare.

Guarantees:
- The loss of a spare, or of its successor, does not affect any answer: it is logged and counted. With
  `on_worker_loss="restart"` the spare is replaced, unless its env has been changed since it was built.
- A reset that was handed to a worker which dies goes back to the env's other worker, if that can make it.
"""

from __future__ import annotations

import contextlib
import time
from typing import Protocol

from envherd.executor.options import ExecutorOptions
from envherd.executor.pools.crew import Crew
from envherd.executor.pools.error_messages import log
from envherd.executor.pools.supervisor import Absence, Condition, Supervised, Supervisor
from envherd.executor.pools.turns import Turns
from envherd.workers.errors import EnvherdError, WorkerTimeout


class SparelySupervised(Supervised, Protocol):
    """What a `SpareSupervisor` also uses of its pool; see `AheadPool`."""

    num_envs: int

    def owes_reset(self, env_id: int) -> bool:
        """Return whether an env has a RESET to answer."""
        ...

    def forget_messages(self, env_id: int) -> None:
        """Forget that an env has announced messages."""
        ...

    def ring(self, worker_id: int) -> None:
        """Make a worker look for commands and turns."""
        ...


class SpareSupervisor(Supervisor):
    """A supervisor of workers that have spares.

    Args:
        pool: of the workers.
        crew: the workers.
        options: of the executor.
        turns: of the envs.
    """

    def __init__(self, pool: SparelySupervised, crew: Crew, options: ExecutorOptions, turns: Turns) -> None:
        super().__init__(pool, crew, options)
        self._owner, self._turns = pool, turns

    def is_there(self, worker_id: int) -> bool:
        """Return whether a worker can take commands; record the loss of a spare that has died."""
        if worker_id in self.absent:
            return False
        if self._turns.is_spare(worker_id) and self._crew.workers[worker_id].has_exited():
            self.declare_lost(worker_id, self.death(worker_id))
            return False
        return True

    def take_up_spares(self) -> None:
        """Put spares that have built their envs into service; never waits or raises."""
        for worker_id, absence in list(self.absent.items()):
            is_built = absence.condition is Condition.BUILDING and self._turns.is_spare(worker_id)
            if is_built and self._crew.has_answered(worker_id):
                self._take_up(worker_id)

    def declare_lost(self, worker_id: int, error: EnvherdError) -> None:
        """Take a worker out of service; a reset that it owes goes back to the env's other worker."""
        error = self._recorded(worker_id, error)
        if self._turns.is_spare(worker_id):
            self._lose_spare(worker_id, error)
        elif isinstance(error, WorkerTimeout) or not self._take_back(worker_id, error):
            super().declare_lost(worker_id, error)

    def _take_back(self, worker_id: int, error: EnvherdError) -> bool:
        """Give back the reset that was handed to a worker that has died since; return whether that was possible."""
        turns, env_id = self._turns, worker_id % self._owner.num_envs
        other = turns.spare_of(env_id)
        if not (self._owner.owes_reset(env_id) and turns.was_handed[env_id] and self.is_there(other)):
            return False
        turns.was_handed[env_id] = False
        self._owner.forget_messages(env_id)
        turns.give_back(env_id)
        self._owner.ring(other)
        self._lose_spare(worker_id, error)
        return True

    def _lose_spare(self, worker_id: int, error: EnvherdError) -> None:
        """Replace a lost spare, or leave its env without one."""
        self.num_losses += 1
        self._crew.workers[worker_id].kill()
        env_id = worker_id % self._owner.num_envs
        is_wanted = self._options.on_worker_loss == "restart" and not self._turns.is_changed[env_id]
        is_replaced = is_wanted and self._restarts.next_delay_s(worker_id) is not None
        log.warning(
            "%s It was preparing resets; env %d is %s.",
            error.message,
            env_id,
            "reset in the ordinary way until it is replaced"
            if is_replaced
            else "reset in the ordinary way from now on",
        )
        if not is_replaced:
            self._do_without(worker_id)
            return
        self._leave(worker_id)  # first: after an interrupt no successor may be forgotten
        with contextlib.suppress(EnvherdError):  # no further process can be started: see `_give_up_on`
            self._succeed(worker_id)

    def _do_without(self, worker_id: int) -> None:
        self.absent[worker_id] = Absence(Condition.GONE, time.monotonic())
        self._crew.workers[worker_id].kill()

    def _succeed(self, worker_id: int) -> None:
        self._turns.note_replaced(worker_id)
        super()._succeed(worker_id)

    def _take_up(self, worker_id: int) -> None:
        """Put a successor into service; a spare prepares the episode in its env's turn. Never raises for spares."""
        env_id, is_spare = worker_id % self._owner.num_envs, self._turns.is_spare(worker_id)
        if is_spare and self._turns.is_changed[env_id]:
            self._do_without(worker_id)
            return
        super()._take_up(worker_id)
        if not is_spare and not self.is_being_replaced(worker_id):  # the other instance, if any, is new, too
            self._turns.is_changed[env_id] = False

    def _try_another(self, worker_id: int, error: EnvherdError) -> None:
        if self._turns.is_spare(worker_id):
            self._lose_spare(worker_id, error)
        else:
            super()._try_another(worker_id, error)

    def _give_up_on(self, worker_id: int, error: EnvherdError) -> None:
        if self._turns.is_spare(worker_id):
            self._do_without(worker_id)
        else:
            super()._give_up_on(worker_id, error)
