"""Reset-ahead: every env has two instances in two workers, and its next episode is begun before it is asked for.

Guarantees:
- The data are those of a run without it; see `workers.ahead` for what that takes of envs.
- A default reset goes to the instance that was prepared (and waits for it, if it is not done); one with a seed or
  options of its own, the first one, and those after `set_seed`, `call`, `set` and `load_state_dict` are made in the
  ordinary way, by the instance that serves.
- A spare that dies, is replaced or cannot be brings no row to harm: its env is reset in the ordinary way meanwhile.
  With `on_worker_loss="restart"` it is replaced while the others go on; with "raise" the env does without. So does an
  env that `call`, `set` or `load_state_dict` has reached: a new instance would not be what the other has become.
- Of two instances the one that serves answers `get`, `render` and `state_dict`; what may change an env (`call`,
  `set`, `load_state_dict`) reaches both, and the answers are the serving one's.
Assumes: one caller at a time, as the pool.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from envherd.executor.options import ExecutorOptions
from envherd.executor.pools.crew import Blueprint
from envherd.executor.pools.error_messages import log
from envherd.executor.pools.worker_pool import WorkerPool
from envherd.executor.protocol.recycling import Recycler, keeping_steps
from envherd.workers import messages
from envherd.workers.errors import EnvherdError, InternalError, SpecError, WorkerTimeout
from envherd.workers.process.ahead import pack_turn, unpack_turn
from envherd.workers.processes import memory_of
from envherd.workers.protocol import Op, unpack

if TYPE_CHECKING:
    from envherd.executor.protocol.engine import Engine

#: Questions that may change an env.
_CHANGES = ("call", "each", "set", "load_state_dict")


class AheadPool(WorkerPool):
    """A pool with two workers per env, `e` and `N + e`; a STEP_RESET steps only: `AheadResets` asks for the resets.

    Args:
        blueprint: with one env in each block.
        options: of the executor.

    Attributes:
        num_ahead: resets whose episode was ready when it was asked for.
        num_missed: all other resets.
        num_recycled: workers that were replaced between episodes.
    """

    def __init__(self, blueprint: Blueprint, options: ExecutorOptions) -> None:
        super().__init__(dataclasses.replace(blueprint, blocks=blueprint.blocks * 2), options)
        num_envs = self.num_workers = self.num_envs
        self.worker_of = np.arange(num_envs)
        self.serving: list[int] = list(range(num_envs))
        self.num_ahead = self.num_missed = self.num_recycled = 0
        self._gone: set[int] = set()  # spares that are not replaced
        self._was_handed = np.zeros(num_envs, bool)  # whether the latest reset has gone to the other one
        self._is_stale = np.ones(num_envs, bool)  # whether the next reset is not the one that was prepared
        self._is_changed = np.zeros(num_envs, bool)  # whether instances may not be as they were built
        self._episodes = [0] * len(self.worker_ids)  # that workers have begun since they came

    def _make_slab(self) -> None:
        specs, self.specs = self.specs, self.specs[: self.num_envs]
        if batched := [i for i, spec in enumerate(self.specs) if spec.batch_shape]:
            raise ValueError(
                f"reset_ahead failed: expected envs of one row, got batches of them (env {batched[0]}: "
                f"{self.specs[batched[0]].batch_shape}). Their rows end one by one, and cannot be handed over."
            )
        for env_id, (spec, other) in enumerate(zip(self.specs, specs[self.num_envs :], strict=True)):
            if spec != other:
                raise SpecError(
                    f"reset_ahead failed: expected equal specs of the two instances of env {env_id}, got a difference: "
                    f"{spec.difference(other)}. Its factory must build the same env every time."
                )
        super()._make_slab()
        self._turn, self._prepared = self.slab.words["turn"], self.slab.words["ready"]
        self._episode = self.slab.words["episode"]
        for env_id in range(self.num_envs):
            self._turn[env_id] = pack_turn(env_id, None)

    # ---- commands ----------------------------------------------------------------------------

    def submit_all(self, op: Op, target: int, column: int, reset_ids: np.ndarray | None = None) -> None:
        """Give every env the same command, but some (int `[k]`) a RESET."""
        ops = np.full(self.num_envs, op, np.int64)
        if reset_ids is not None:
            ops[reset_ids] = Op.RESET
        self.submit(self._all_ids, ops, target, np.full(self.num_envs, column))

    def submit(
        self, env_ids: np.ndarray, op: Op | np.ndarray, target: int, columns: np.ndarray, flags: int = 0
    ) -> None:
        """Give some envs a command each; those that are to be reset may change hands. See `WorkerPool.submit`."""
        for worker_id in list(self._rebuilding):
            if self._is_spare(worker_id) and worker_id not in self._leaving and self.crew.has_answered(worker_id):
                self._take_up(worker_id)
        self.await_workers(env_ids)
        ops = np.where(np.equal(op, Op.STEP_RESET), Op.STEP, op) + np.zeros(len(env_ids), np.int64)
        reset_ids = env_ids[ops == Op.RESET].tolist()
        for env_id in reset_ids:
            self._hand_over(env_id)
        super().submit(env_ids, ops, target, columns, flags)
        for env_id in reset_ids:
            self._send_off(self._spare_of(env_id))

    def await_workers(self, env_ids: np.ndarray) -> None:
        """Raise the loss of a worker of some envs that stays lost; others may be replaced by the env's other worker."""
        self._refuse_lost(self.worker_of[env_ids].tolist())

    def submit_later(self, env_ids: np.ndarray, op: Op, target: int, columns: np.ndarray, flags: int = 0) -> None:
        """As `submit`: where a worker is being rebuilt, the env's other one can be given the command now."""
        is_served = np.array([self._is_there(self._spare_of(i)) for i in env_ids.tolist()], bool)
        if is_served.any():
            self.submit(env_ids[is_served], op, target, columns[is_served], flags)
        if not is_served.all():
            super().submit_later(env_ids[~is_served], op, target, columns[~is_served], flags)

    def nudge(self) -> None:
        """Have every worker look for commands; an interrupt may have come between a turn and our own notes of it."""
        for env_id, turn in enumerate(self._turn.tolist()):
            self._note_server(env_id, unpack_turn(turn)[0])
        super().nudge()

    # ---- turns -------------------------------------------------------------------------------

    def _spare_of(self, env_id: int) -> int:
        server = int(self.worker_of[env_id])
        return server + self.num_envs if server < self.num_envs else server - self.num_envs

    def _is_spare(self, worker_id: int) -> bool:
        return bool(self.worker_of[worker_id % self.num_envs] != worker_id)

    def _is_there(self, worker_id: int) -> bool:
        """Return whether a worker can be given something to do; notes the loss of a spare that has died."""
        if worker_id in self._rebuilding or worker_id in self._gone or worker_id in self.lost:
            return False
        if self._is_spare(worker_id) and self.crew.workers[worker_id].has_exited():
            self._declare_lost(worker_id, self._death(worker_id))
            return False
        return True

    def _hand_over(self, env_id: int) -> None:
        """Choose who begins the next episode of an env that owes no answer; the other is to prepare the one after."""
        self._step_in(env_id)
        server, spare, episode = int(self.worker_of[env_id]), self._spare_of(env_id), int(self._episode[env_id])
        if server in self.lost:
            return  # which is the answer
        self._was_handed[env_id] = not self._is_stale[env_id] and self._is_there(spare)
        if self._was_handed[env_id]:
            server = spare
        if self._prepared[server] == episode + 1:
            self.num_ahead += 1
        else:
            self.num_missed += 1
        self._is_stale[env_id] = False
        self._episodes[server] += 1
        self._turn[env_id] = pack_turn(server, episode + 1)
        self._note_server(env_id, server)

    def _step_in(self, env_id: int) -> None:
        """Let an env be served by its spare, if the server is being rebuilt."""
        spare = self._spare_of(env_id)
        if int(self.worker_of[env_id]) in self._rebuilding and self._is_there(spare):
            self._turn[env_id] = pack_turn(spare, None)
            self._note_server(env_id, spare)

    def _note_server(self, env_id: int, worker_id: int) -> None:
        self.worker_of[env_id] = self.serving[env_id] = worker_id

    def _send_off(self, worker_id: int) -> None:
        """Wake a spare to prepare what its env's turn says; or replace it first, if it is due."""
        if not self._is_there(worker_id):
            return
        if self._is_due(worker_id):
            self.num_recycled += 1
            self.recycle(worker_id)  # its successor prepares it
        else:
            self._rings[worker_id]()

    def _is_due(self, worker_id: int) -> bool:
        options = self.options
        if self._is_changed[worker_id % self.num_envs]:
            return False
        if options.recycle_after is not None and self._episodes[worker_id] >= options.recycle_after:
            return True
        limit = options.max_worker_memory
        return limit is not None and memory_of(self.pid_of(worker_id))["uss"] > limit

    # ---- mail --------------------------------------------------------------------------------

    def prepare(self, message: messages.Prepare) -> None:
        """Send the extras of an env's next command ahead of it."""
        self._step_in(message.env_id)
        if message.has_seed or message.options:
            self._is_stale[message.env_id] = True
        super().prepare(message)

    def seed(self, root_seed: int) -> None:
        """Use a new root seed in every worker."""
        self._is_stale[:] = True
        for env_id, server in enumerate(self.serving):
            self._turn[env_id] = pack_turn(server, None)
        super().seed(root_seed)

    def question(self, what: str, env_ids: list[int], **question: Any) -> dict[int, list[int]]:
        """Ask as `WorkerPool.question` does; what may change envs is said to their other instances too."""
        args = question.get("args", ())
        by_worker = super().question(what, env_ids, **question)
        for position, env_id in enumerate(env_ids) if what in _CHANGES else ():
            self._is_stale[env_id] = self._is_changed[env_id] = True
            spare = self._spare_of(env_id)
            if self._is_there(spare):
                own = (args[position],) if what in messages.PER_ENV else args
                ask = messages.Ask(what=what, env_ids=(env_id,), is_silent=True, **{**question, "args": own})
                self.crew.mail(spare, ask)
        return by_worker

    # ---- losses ------------------------------------------------------------------------------

    def _declare_lost(self, worker_id: int, error: EnvherdError) -> None:
        """Take a worker out of service; a reset that it was to answer goes back to the env's other one."""
        if self._is_spare(worker_id):
            self._lose_spare(worker_id, error)
        elif isinstance(error, WorkerTimeout) or not self._take_back(worker_id, error):
            super()._declare_lost(worker_id, error)

    def _take_back(self, worker_id: int, error: EnvherdError) -> bool:
        """Give back the reset that was handed to a worker that has died since; return whether that was possible."""
        env_id = worker_id % self.num_envs
        other, op = self._spare_of(env_id), unpack(int(self._command[env_id]))[0]
        is_owed = self._command_seq[env_id] != self._reply_seq[env_id] and op == Op.RESET
        if not (is_owed and self._was_handed[env_id] and self._is_there(other)):
            return False
        self._was_handed[env_id] = False
        _, episode = unpack_turn(int(self._turn[env_id]))
        assert episode is not None
        self._status[env_id] = 0
        self._episode[env_id] = episode - 1  # it may have begun to count
        self._turn[env_id] = pack_turn(other, episode)
        self._note_server(env_id, other)
        self._rings[other]()
        self._lose_spare(worker_id, error)
        return True

    def _lose_spare(self, worker_id: int, error: EnvherdError) -> None:
        """Do without a spare, or replace it."""
        self.num_losses += 1
        self.crew.workers[worker_id].kill()
        is_wanted = self.options.on_worker_loss == "restart" and not self._is_changed[worker_id % self.num_envs]
        is_replaced = is_wanted and self._restarts.next_delay_s(worker_id) is not None
        log.warning(
            "%s It was preparing resets; env %d is %s.",
            error.message,
            worker_id % self.num_envs,
            "reset in the ordinary way until it is replaced"
            if is_replaced
            else "reset in the ordinary way from now on",
        )
        if not is_replaced:
            self._gone.add(worker_id)
            return
        with contextlib.suppress(EnvherdError):  # no further process can be started: see `_give_up_on`
            self._succeed(worker_id)

    def _do_without(self, worker_id: int) -> None:
        self._leaving.discard(worker_id)
        self._rebuilding.pop(worker_id, None)
        self._gone.add(worker_id)
        self.crew.workers[worker_id].kill()

    def _succeed(self, worker_id: int) -> None:
        self._prepared[worker_id] = self._episodes[worker_id] = 0
        super()._succeed(worker_id)

    def _take_up(self, worker_id: int) -> None:
        """Put a successor into service; a spare then prepares what its env's turn says. For spares, never raises."""
        if self._is_spare(worker_id) and self._is_changed[worker_id % self.num_envs]:
            self._do_without(worker_id)
            return
        is_spare = self._is_spare(worker_id)
        super()._take_up(worker_id)
        if not is_spare and worker_id not in self._rebuilding:  # the other instance, if there is one, is as new
            self._is_changed[worker_id % self.num_envs] = False

    def _try_another(self, worker_id: int, error: EnvherdError) -> None:
        if self._is_spare(worker_id):
            self._rebuilding.pop(worker_id, None)
            self._lose_spare(worker_id, error)
        else:
            super()._try_another(worker_id, error)

    def _give_up_on(self, worker_id: int, error: EnvherdError) -> None:
        if self._is_spare(worker_id):
            self._do_without(worker_id)
        else:
            super()._give_up_on(worker_id, error)


class AheadResets:
    """Resets the envs that a step has ended, for an engine whose pool is an `AheadPool`.

    It has the place of a `Recycler`, whose work the pool does itself there.
    """

    def __init__(self, engine: Engine) -> None:
        if not isinstance(engine.pool, AheadPool):
            raise InternalError("AheadResets needs an AheadPool")
        self._engine = engine
        self._pool = engine.pool

    @property
    def num_recycled(self) -> int:
        """Workers that were replaced between episodes."""
        return self._pool.num_recycled

    def before_resets(self, env_ids: np.ndarray) -> None:
        """Do nothing: the pool hands envs over as it gives the commands."""

    def after_steps(self, env_ids: np.ndarray, columns: np.ndarray) -> list[int]:
        """Reset the envs that have ended.

        Args:
            env_ids: int `[k]`.
            columns: int `[k]`, ring columns that their roots go to.

        Returns:
            The envs that were reset: all of them.

        Raises:
            EnvError, WorkerLost, WorkerTimeout: the envs concerned are not reset, the others are.
        """
        if len(env_ids):
            rows = self._engine.rows
            rows.mark_ended(env_ids)  # should anything break this off
            with keeping_steps(rows, env_ids, columns):
                self._engine.reset_at(env_ids, columns)
        return env_ids.tolist()


def between_episodes(engine: Engine) -> AheadResets | Recycler | None:
    """Return what an engine is to call between the episodes of its envs."""
    if isinstance(engine.pool, AheadPool):
        return AheadResets(engine)
    if engine.options.recycles and isinstance(engine.pool, WorkerPool):
        return Recycler(engine, engine.pool)
    return None
