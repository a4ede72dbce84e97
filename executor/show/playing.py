"""Play a fixed set of episodes of several tasks, in envs that are built when they are needed and closed after it.

Guarantees:
- Which episodes are played, and their seeds, is decided before the first one begins. Each one that begins is recorded
  once: as ended, or as failed with the error of its env.
- There are at most as many envs as seats. A seat closes its env, and ends its process, before it builds another.
- Torch's generator is seeded before each call of a policy, by the episode and the step of the first row. With a seat,
  that is the only row, so an episode depends on its seed, the env and the policy, and on nothing else. With
  `Rules.max_batch`, one call acts for all seats that wait for a policy, and an episode may depend on which these are.

A seat is a generator that yields what takes long: to build an env, to wait for it, to close it. Its thread carries
these operations out, so that one seat builds while others play. All else runs in the caller's thread: the choice of
tasks, the policies, the records. A passed executor is played without a thread, with one batch of all its envs.

Assumes: a reset with a seed makes an env forget its earlier episodes.
"""

import contextlib
import math
import threading
import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from envherd.executor.batched import BatchedEnv
from envherd.executor.batches.fast_tensordict import get_leaf
from envherd.executor.machine.machine import FILES_PER_EXECUTOR, require_room
from envherd.executor.options import ExecutorOptions
from envherd.executor.parallel import ParallelEnv
from envherd.executor.processes.error_messages import log, with_thread
from envherd.executor.rollouts.policy_state import leaf_keys, own_leaves, run_policy
from envherd.executor.sending.blueprint import as_factories, draw
from envherd.executor.sending.variables import gpus_of, variables_of
from envherd.executor.show.results import Cast, EpisodeRecord
from envherd.executor.start.zygote import helper_for
from envherd.shm import platforms
from envherd.shm.specs import Key
from envherd.workers.build import Factory
from envherd.workers.errors import (
    EnvError,
    EnvherdError,
    ResetNeeded,
    SpecError,
    WorkerLost,
    WorkerTimeout,
)
from envherd.workers.seeding import episode_seed

#: What takes long; the generator that yields it gets its result or its exception.
_Operation = Callable[[], Any]
_Work = Generator["_Operation | _Session", Any, None]
#: Seconds after the end of a run for the commands that its envs carry out.
_LAST_COMMAND_S = 1.0
#: What ends an episode as failed. All other errors end the evaluation: they are of the policy or of the caller. An env
#: needs a reset in the middle of an episode if it did not answer in time when another worker of its executor was lost.
_FAULTS = (EnvError, ResetNeeded, SpecError, WorkerLost, WorkerTimeout)
#: Seconds after which an episode is suspected never to end.
_LONG_S = 5.0
_SUCCESS_KEYS = ("success", "is_success")


class Part(NamedTuple):
    """What acts in the envs of a task.

    Attributes:
        policy: a `Placed`; takes a batch of envs.
        primed: its state at the beginning of an episode, batch `[1]`; or None.
        rewards: keys whose sums are the returns.
    """

    policy: Any
    primed: TensorDictBase | None
    rewards: Sequence[Key]


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The settings of a run.

    Attributes:
        episodes: of each task.
        seed: root seed: episode i has the seed of the first episode of env i under this root seed.
        max_steps: truncate episodes after this number of steps; or None.
        success: called with the last info and the record of an episode; None reads the infos.
        max_batch: largest number of seats for which one call of a policy acts; None for one seat.
        deadline_s: with `max_batch`, how long a seat waits for others.
    """

    episodes: int
    seed: int
    max_steps: int | None = None
    success: Callable[[Mapping[str, Any], EpisodeRecord], bool] | None = None
    max_batch: int | None = None
    deadline_s: float = 0.0


@dataclass
class Task:
    """A task of a run.

    Attributes:
        name: of the task.
        env: the factory of its envs, or the executor that plays them.
        left: numbers of the episodes that have not begun.
        records: of the episodes that have ended or failed, in this order.
        cast: who plays in it; None until an env has been built.
        part: what acts in its envs; None before the first env is built, and after the last episode.
        num_seats: number of seats that have an env of it or are building one.
        build_s: seconds of the latest build of an env; infinite if that failed.
        episode_s: seconds of the latest episode; infinite before the first.
        is_reported: a warning has named an episode that may never end.
    """

    name: str
    env: Any
    left: list[int]
    records: list[EpisodeRecord] = field(default_factory=list)
    cast: Cast | None = None
    part: Part | None = None
    num_seats: int = 0
    build_s: float = 0.0
    episode_s: float = math.inf
    is_reported: bool = False


@dataclass
class _Episode:
    """An episode under way."""

    number: int
    seed: int
    state: TensorDictBase | None = None
    began: float = field(default_factory=time.monotonic)
    length: int = 0
    returns: Any = 0.0
    successes: list[bool | None] = field(default_factory=list)
    info: Mapping[str, Any] = field(default_factory=dict)


class _Seat(threading.Thread):
    """A thread that carries out operations one after the other, and has at most one env; it begins at once.

    Args:
        number: of the seat.
        options: of the workers.
        outcomes: gets the outcome of each operation.
        work_of: makes the generator that yields the operations.
    """

    def __init__(
        self,
        number: int,
        options: ExecutorOptions,
        outcomes: "SimpleQueue[_Outcome]",
        work_of: "Callable[[_Seat], _Work]",
    ) -> None:
        super().__init__(name=f"evaluate-{number}", daemon=True)
        self._options = options
        self._outcomes = outcomes
        self.work = work_of(self)
        self._env: ParallelEnv | None = None
        self.todo: SimpleQueue[_Operation | None] = SimpleQueue()
        with_thread("evaluate", self.start)

    def run(self) -> None:
        """Carry out operations until None comes."""
        while (operation := self.todo.get()) is not None:
            self._outcomes.put((self, _carry_out(self.work, operation)))

    def build(self, factory: Factory, seed: int) -> ParallelEnv:
        """Return an executor of one env."""
        self._env = None
        self._env = ParallelEnv(
            1,
            factory,
            num_workers=1,
            seed=seed,
            options=self._options,
        )
        return self._env

    def close(self) -> None:
        """Close the env, if there is one. Idempotent."""
        if self._env is not None:
            self._env.close()

    def end(self) -> None:
        """Wait for the thread; close an env whose operation takes long. A thread that builds an env is left."""
        self.join(_LAST_COMMAND_S)
        if self._env is not None:
            self._env.close()
            self.join()

    def abort(self) -> None:
        """Kill the env's process, if there is one, so that its close ends."""
        if self._env is not None:
            pool: Any = self._env.engine.pool
            # The loss of its worker then needs no warning and no successor.
            pool.crew.is_closing = True
            pool.crew.workers[0].kill()


#: A seat whose operation has been carried out, and what resumes its generator.
_Outcome = tuple[_Seat, _Operation]


def _carry_out(work: _Work, operation: _Operation) -> _Operation:
    """Carry out an operation of a generator; return what resumes the generator with the result or the exception."""
    try:
        return partial(work.send, operation())
    except BaseException as error:  # raised in the generator
        return partial(work.throw, error)


def _next_of(resume: _Operation) -> Any:
    """Resume a generator; return its next operation, None at the end."""
    try:
        return resume()
    except StopIteration:
        return None


class Play:
    """One run.

    Args:
        tasks: name -> factory of its envs. Or one executor, whose envs play.
        rules: see `Rules`.
        prepare: returns what acts in a task, and who plays there, from its name and an executor of its envs; called in
            the caller's thread, once for each task.

    Attributes:
        tasks: with the records of their episodes.
        build_error: of the first env that could not be built.
    """

    def __init__(
        self,
        tasks: Mapping[str, Factory | BatchedEnv],
        rules: Rules,
        prepare: Callable[[str, BatchedEnv], tuple[Part, Cast]],
    ) -> None:
        self.rules = rules
        self.prepare = prepare
        self.tasks = [
            Task(name, env, list(range(rules.episodes))) for name, env in tasks.items()
        ]
        self.build_error: Exception | None = None

    def play_in(self, env: BatchedEnv) -> None:
        """Play all episodes of the only task in an executor, in this thread.

        Raises:
            WorkerLost, WorkerTimeout: a worker was lost and is not replaced. Its episodes are recorded as failed.
            Busy: an env was sent and not received. Nothing was played.
        """
        engine = env.engine
        engine.refuse_under_way(engine.all_ids)
        work = _Session(self, self.tasks[0], env).play()
        resume: _Operation = partial(work.send, None)
        try:
            while (operation := _next_of(resume)) is not None:
                if isinstance(operation, _Session):
                    resume = partial(work.send, *_act([operation]))
                else:
                    resume = _carry_out(work, operation)
        finally:
            # A run that ends early leaves envs that can be reset: the next call drops their answers.
            sent = np.flatnonzero(engine.states.under_way)
            if len(sent):
                engine.is_dirty = True
                engine.give_up(sent)

    def run(self, num_seats: int, options: ExecutorOptions) -> None:
        """Play all episodes, in envs of at most `num_seats` worker processes; an exception closes the envs.

        Raises:
            TooMany, OSError: the machine has no room for the workers. Nothing was started.
        """
        is_shared = (
            options.start_method == "zygote"
            and options.worker_output == "capture"
            and not options.differ_by_worker
            and not platforms.missing()
        )
        require_room(
            num_workers=num_seats,
            files_per_worker=FILES_PER_EXECUTOR[is_shared],
        )
        factories = as_factories(len(self.tasks), [task.env for task in self.tasks])
        # Refuses factories that cannot be pickled.
        modules = draw(factories, None, 1, 0, options).preload
        # The options of a seat do not differ by worker any more. Other helpers than a shared one import for one task.
        if is_shared or options.differ_by_worker:
            options = replace(options, preload=modules)
        outcomes: SimpleQueue[_Outcome] = SimpleQueue()
        waiting: dict[_Seat, _Session] = {}
        seats: list[_Seat] = []
        with contextlib.ExitStack() as at_end:
            if is_shared:
                # One helper for all tasks, so that a worker starts in 0.1 s.
                at_end.callback(helper_for(self, options, modules).close, self)
            at_end.callback(self._end, seats)
            for i, one in enumerate(_options_of_seats(options, num_seats)):
                seat = _Seat(i, one, outcomes, self._work_of)
                seats.append(seat)
                outcomes.put((seat, partial(seat.work.send, None)))
            while seats:
                for seat, resume in self._next_outcomes(outcomes, waiting, len(seats)):
                    operation = _next_of(resume)
                    if isinstance(operation, _Session):
                        waiting[seat] = operation
                    else:
                        seat.todo.put(operation)
                    if operation is None:
                        seats.remove(seat)

    def _next_outcomes(
        self,
        outcomes: SimpleQueue[_Outcome],
        waiting: "dict[_Seat, _Session]",
        num_seats: int,
    ) -> Sequence[_Outcome]:
        """Wait for an operation, or act for seats that wait for a policy; return the outcome of each seat concerned.

        A policy acts as soon as as many seats wait as may, or all; or when the first of them has waited long enough.
        """
        if not waiting:
            return [outcomes.get()]
        first = next(iter(waiting.values()))
        seats = [
            seat
            for seat, session in waiting.items()
            if session is first or session.kind == first.kind
        ]
        limit = self.rules.max_batch or 1
        end = first.waits_since + self.rules.deadline_s
        if len(seats) < limit and len(waiting) < num_seats:
            with contextlib.suppress(Empty):
                return [outcomes.get(timeout=max(0.0, end - time.monotonic()))]
        seats = seats[:limit]
        acted = _act([waiting.pop(seat) for seat in seats])
        return [
            (seat, partial(seat.work.send, actions))
            for seat, actions in zip(seats, acted, strict=True)
        ]

    @staticmethod
    def _end(seats: Collection[_Seat]) -> None:
        """End the seats: each after the operation under way; an env whose operation takes long is closed meanwhile.

        A seat that is building an env closes it when it is built. Ctrl-C ends the processes of all envs at once.
        """
        for seat in seats:
            seat.todo.put(seat.close)
            seat.todo.put(None)
        # All at once: an env that hangs takes the whole time of a close. What a seat's thread waits for raises Closed.
        # In threads also because an interrupted `join` may take a thread that runs for one that has ended.
        with ThreadPoolExecutor(max(1, len(seats)), "evaluate-close") as threads:
            try:
                try:
                    ends = threads.map(_Seat.end, seats)
                except RuntimeError:  # the system refuses a thread
                    ends = map(_Seat.end, seats)
                list(ends)
            except BaseException:
                for seat in seats:
                    seat.abort()
                raise

    def _work_of(self, seat: _Seat) -> _Work:
        """Build and play until no episode is left."""
        while (task := self._choose()) is not None:
            began = time.monotonic()
            try:
                env = yield partial(seat.build, task.env, self.rules.seed)
            # OSError: no room in /dev/shm or for open files.
            except (EnvherdError, MemoryError, OSError) as error:
                self._fail_task(task, error)
                continue
            task.build_s = time.monotonic() - began
            # What the caller's `policy_for` raises ends the run.
            session = _Session(self, task, env)
            with contextlib.suppress(*_FAULTS):  # the next episode gets a new env
                yield from session.play()
            yield seat.close  # its memory is free before this seat builds another
            task.num_seats -= 1

    def _choose(self) -> Task | None:
        """Return the task that a seat shall play, None for none.

        The first task without a seat. If all have one: the task with most episodes left, if these take longer than to
        build another env.
        """
        found = [
            task
            for task in self.tasks
            if task.left
            and (
                not task.num_seats
                or len(task.left) * task.episode_s / task.num_seats > task.build_s
            )
        ]
        chosen = max(
            found,
            key=lambda task: len(task.left) if task.num_seats else math.inf,
            default=None,
        )
        if chosen is not None:
            chosen.num_seats += 1
        return chosen

    def _fail_task(self, task: Task, error: Exception) -> None:
        """Record the episodes of a task as failed, unless another seat has an env for them or is building one."""
        task.build_s = math.inf
        task.num_seats -= 1
        self.build_error = self.build_error or error
        while task.left and not task.num_seats:
            self.note(task, self.take(task), error)

    def take(self, task: Task, state: TensorDictBase | None = None) -> _Episode:
        """Return the next episode of a task, which has one left, with the policy's first state."""
        number = task.left.pop(0)
        return _Episode(number, episode_seed(self.rules.seed, number, 0), state)

    def note(
        self,
        task: Task,
        episode: _Episode,
        error: Exception | None = None,
    ) -> None:
        """Record an episode that has ended or, with an error, failed."""
        task.episode_s = time.monotonic() - episode.began
        known = [one for one in episode.successes if one is not None and error is None]
        record = EpisodeRecord(
            episode=episode.number,
            seed=episode.seed,
            length=episode.length,
            returns=tuple(np.atleast_1d(episode.returns).tolist())
            if episode.length
            else (),
            success=bool(episode.successes[-1]) if known else None,
            success_once=any(known) if known else None,
            error=None if error is None else f"{type(error).__name__}: {error}",
        )
        if self.rules.success is not None and error is None:
            try:
                success = bool(self.rules.success(episode.info, record))
            except EnvherdError as raised:
                # As such it would be taken for a fault of the env.
                raise RuntimeError(
                    f"evaluate failed: success raised {type(raised).__name__}: {raised}"
                ) from raised
            record = replace(record, success=success, success_once=None)
        task.records.append(record)
        if not (task.left or task.num_seats > 1):
            # A policy of this task alone is not needed any more.
            task.part = None


class _Session:
    """One executor that plays episodes of one task.

    A generator that yields the session waits for the policy, and gets the actions; see `_act`.

    Args:
        play: the run.
        task: of the episodes.
        env: the executor: the task's own, or one that a seat has built.

    Attributes:
        playing: episodes under way, by env.
        root: batch with a row for each of these, in this order.
        waits_since: when it began to wait for the policy (monotonic seconds).

    Raises:
        EnvherdError: of an env, after which it cannot play on. The episodes that it concerns are recorded as failed.
    """

    def __init__(
        self,
        play: Play,
        task: Task,
        env: BatchedEnv,
    ) -> None:
        self._play = play
        self.task = task
        self.env = env
        if task.part is None:
            task.part, task.cast = play.prepare(task.name, env)
        self.part = task.part
        self.playing: dict[int, _Episode] = {}

    @property
    def kind(self) -> Any:
        """What the sessions have in common for which one call of a policy can act."""
        leaves = {key: self.root.get(key) for key in leaf_keys(self.root)}
        shapes = [(key, leaf.shape[1:], leaf.dtype) for key, leaf in leaves.items()]
        return (
            id(self.part.policy.policy),
            shapes,
            next(iter(self.playing.values())).state is None,  # the first step
        )

    def play(self) -> _Work:
        """Play until no episode is left."""
        while (begun := self._begin()) or self.playing:
            try:
                if begun:
                    yield from self._reset(begun)
                yield from self._step()
            except _FAULTS as error:
                self._fail(error)

    def _begin(self) -> dict[int, _Episode]:
        begun = {
            env_id: self._play.take(self.task, self.part.primed)
            for env_id in range(self.env.num_envs)
            if env_id not in self.playing and self.task.left
        }
        self.playing |= begun
        return begun

    def _reset(self, begun: Mapping[int, _Episode]) -> _Work:
        """Reset envs."""
        num_envs = self.env.num_envs
        mask = torch.tensor([i in begun for i in range(num_envs)], device="cpu")
        seeds = [
            begun[env_id].seed if env_id in begun else None
            for env_id in range(num_envs)
        ]
        yield partial(
            self.env.reset,
            TensorDict({"_reset": mask}, [num_envs]),
            seed=seeds,
        )

    def _step(self) -> _Work:
        """Act once in each env that plays, and count it. Episodes whose env fails are recorded."""
        env = self.env
        ids = list(self.playing)
        self.root = env.current(ids)
        self.waits_since = time.monotonic()
        # What a policy raises is not raised here: it ends the run, and is no fault of the env.
        actions = yield self
        env.send(actions, ids, maybe_reset=False)
        while ids:
            try:
                received = yield partial(env.recv, env_ids=ids, with_root=False)
            except _FAULTS as error:  # the other envs are still under way
                self._fail(error)
                ids = [env_id for env_id in ids if env_id in self.playing]
            else:
                self._count(ids, received.get("next"))
                break

    def _count(self, ids: list[int], following: TensorDictBase) -> None:
        """Count a step; record the episodes that it ended."""
        rewards = np.concatenate(
            [
                following.get(key).reshape(len(ids), -1).double().numpy(force=True)
                for key in self.part.rewards
            ],
            axis=1,
        )
        is_over = following.get("done").flatten().tolist()
        nobody = torch.zeros(len(ids), device="cpu")
        is_lost = following.get("interrupted", nobody).flatten().tolist()
        infos: Sequence[Mapping[str, Any]] = (
            [{}] * self.env.num_envs
            if self.env.options.info_policy == "drop"
            else self.env.infos("next")
        )
        for at, env_id in enumerate(ids):
            episode = self.playing[env_id]
            if is_lost[at]:
                self._fail(self._interruption(env_id))
                continue
            episode.length += 1
            episode.returns = episode.returns + rewards[at]
            episode.info = infos[env_id]
            episode.successes.append(_success_in(episode.info))
            if is_over[at] or episode.length == self._play.rules.max_steps:
                self._play.note(self.task, self.playing.pop(env_id))
            elif (
                time.monotonic() - episode.began > _LONG_S
                and self._play.rules.max_steps is None
                and not self.task.is_reported
            ):
                self.task.is_reported = True
                log.warning(
                    "evaluate: episode %d of %r has not ended in %.0f s and %d steps. If it may never end, pass "
                    "max_steps= (--max-steps).",
                    episode.number,
                    self.task.name,
                    _LONG_S,
                    episode.length,
                )

    def _interruption(self, env_id: int) -> EnvherdError:
        """Return the error for an interrupted row."""
        if self.env.options.on_env_error == "raise":
            return WorkerLost(
                f"step failed: the worker of env {env_id} was lost.",
                env_ids=(env_id,),
            )
        return EnvError(
            f"step failed: env {env_id} was interrupted: it raised, or its worker was lost (see the log).",
            env_ids=(env_id,),
        )

    def _fail(self, error: EnvherdError) -> None:
        """Record the episodes of the envs that an error concerns as failed."""
        for env_id in error.env_ids or list(self.playing):
            if env_id in self.playing:
                self._play.note(self.task, self.playing.pop(env_id), error)
        is_lost = (
            isinstance(error, (WorkerLost, WorkerTimeout))
            and self.env.options.on_worker_loss == "raise"
        )
        # A seat builds another env after an error, whatever state the env is in.
        if self.env is not self.task.env or is_lost:
            raise error


def _act(sessions: Sequence[_Session]) -> list[TensorDictBase]:
    """Call the policy of some sessions of one kind once, and keep its state; return the actions of each."""
    episodes = [episode for one in sessions for episode in one.playing.values()]
    first = episodes[0]
    session = sessions[0]
    root: Any = (
        session.root
        if len(sessions) == 1
        else torch.cat([one.root for one in sessions])
    )
    states = [one.state for one in episodes if one.state is not None]
    if states and len(states) < len(episodes):
        raise ValueError(
            f"evaluate failed: expected primer with the first state of a policy that acts for {len(episodes)} envs at "
            f"once, got None. Pass primer={{key: tensor}}."
        )
    if states:
        root.update(torch.cat(states))
    _seed_torch(episode_seed(first.seed, 0, first.length))
    try:
        acted = run_policy(session.part.policy, root)
    except Exception as error:
        error.add_note(
            f"The policy acted in step {first.length} of episode {first.number} of task {session.task.name!r}."
        )
        raise
    own = own_leaves(get_leaf(acted, "next"), session.env.engine.known)
    for row, episode in enumerate(episodes):
        episode.state = None if own is None else own[row : row + 1].clone()
    spec = session.env.spec
    inputs = acted.select(
        *(leaf.key for leaf in (*spec.action, *spec.state)),
        strict=False,
    )
    parts = (
        [inputs]
        if len(sessions) == 1
        else inputs.split([len(one.playing) for one in sessions])
    )
    # The policy may reuse its memory, as CUDA graphs do.
    return [part.clone() for part in parts]


def _seed_torch(seed: int) -> None:
    """Seed torch's generators. `torch.manual_seed` takes 0.5 ms and keeps a stack trace, until CUDA is initialised."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's
        torch.cuda.manual_seed_all(seed)


def _success_in(info: Mapping[str, Any]) -> bool | None:
    """Return what an info reports, None without an entry."""
    found = next((info[key] for key in _SUCCESS_KEYS if key in info), None)
    return None if found is None else bool(np.all(found))


def _options_of_seats(
    options: ExecutorOptions,
    num_seats: int,
) -> list[ExecutorOptions]:
    """Return the options of each seat, whose worker gets what worker i of one executor would get."""
    variables = variables_of(options, gpus_of(options, num_seats))
    cpus = options.affinity  # each seat takes one, in turn
    return [
        replace(
            options,
            env_vars=own,
            gpus=None,
            affinity=cpus and (cpus[i % len(cpus)],),
        )
        for i, own in enumerate(variables)
    ]
