"""Play a fixed set of episodes of several tasks, in envs that are built when they are needed and closed after it.

Guarantees:
- Which episodes are played, and their seeds, is decided before the first one begins. Each one that begins is recorded
  once: as ended, or as failed with the error of its env.
- There are at most as many envs as seats. A seat closes its env, and ends its process, before it builds another.
- Torch's generator is seeded before each call of a policy, by the episode and the step of the first row. With one row a
  call (`max_batch=1`) an episode therefore depends on its seed, the env and the policy, and on nothing else.

A seat is a thread with one worker process, which builds the next env while other seats play. The caller's thread calls
the policies, for the seats that are ready, and writes the records. A passed executor is played in the caller's thread.

Assumes: a reset with a seed makes an env forget its earlier episodes.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from envherd.executor.batched import BatchedEnv
from envherd.executor.batches.fast_tensordict import get_leaf
from envherd.executor.batches.random_actions import ActionSampler
from envherd.executor.options import ExecutorOptions
from envherd.executor.parallel import ParallelEnv
from envherd.executor.pools.blueprint import as_factories, draw
from envherd.executor.pools.preloading import helper_for
from envherd.executor.pools.variables import gpus_of, variables_of
from envherd.executor.rollouts.policy_state import leaf_keys, own_leaves, run_policy
from envherd.executor.show.camera import Camera, enlarged
from envherd.executor.show.records import EpisodeRecord, RecordFile
from envherd.executor.show.video import Video
from envherd.shm import platforms
from envherd.shm.specs import EnvSpec, Key
from envherd.workers.build import Factory
from envherd.workers.errors import EnvError, EnvherdError, ResetNeeded, SpecError, WorkerLost, WorkerTimeout
from envherd.workers.seeding import episode_seed

#: What ends an episode as failed. All other errors end the evaluation: they are of the policy or of the caller. An env
#: needs a reset in the middle of an episode if it did not answer in time when another worker of its executor was lost.
_FAULTS = (EnvError, ResetNeeded, SpecError, WorkerLost, WorkerTimeout)
_SUCCESS_KEYS = ("success", "is_success")


class Part(NamedTuple):
    """What acts in the envs of a task.

    Attributes:
        policy: takes a batch of envs.
        primed: its state at the beginning of an episode, batch `[1]`; or None.
        rewards: keys whose sums are the returns.
    """

    policy: Callable[[TensorDictBase], TensorDictBase]
    primed: TensorDictBase | None
    rewards: Sequence[Key]


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The settings of a run.

    Attributes:
        episodes: of each task.
        seed: root seed: episode i has the seed of the first episode of env i under this root seed.
        max_steps: truncate episodes after this number of steps; or None.
        max_batch: call a policy for at most this number of envs.
        success: called with the last info and the record of an episode; None reads the infos.
        videos: folder of the films, or None.
        filmed: numbers of the episodes of each task that are filmed.
        fps: steps per second of video.
    """

    episodes: int
    seed: int
    max_steps: int | None = None
    max_batch: int = 1
    success: Callable[[Mapping[str, Any], EpisodeRecord], bool] | None = None
    videos: Path | None = None
    filmed: frozenset[int] = frozenset()
    fps: float = 30.0


class RandomActions:
    """A policy that draws legal actions of envs of one agent, from torch's generator."""

    def __init__(self, spec: EnvSpec) -> None:
        self._spec = spec

    def __call__(self, root: TensorDictBase) -> TensorDictBase:
        """Set the actions."""
        sampler = ActionSampler([self._spec], int(torch.randint(2**62, ())))
        return sampler.fill(root, root.batch_size, root.device, np.zeros(len(root), np.int64))


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
    film: Video | None = None
    path: Path | None = None


class _Request(NamedTuple):
    """Envs of one executor that wait for actions."""

    part: Part
    env: BatchedEnv
    root: TensorDictBase
    episodes: list[_Episode]
    reply: SimpleQueue[Any]


class _Stopped(Exception):
    """Ends the thread of a seat whose run has ended early."""


class Play:
    """One run.

    Args:
        tasks: name -> factory of its envs. Or one executor, whose envs play.
        rules: see `Rules`.
        records: of the episodes that have been played, and of those that will be.
        prepare: returns what acts in a task, from its name and an executor of its envs; called in the caller's thread,
            once for each task.
    """

    def __init__(
        self,
        tasks: Mapping[str, Factory | BatchedEnv],
        rules: Rules,
        records: RecordFile,
        prepare: Callable[[str, BatchedEnv], Part],
    ) -> None:
        self._tasks, self.rules, self._records, self._prepare = tasks, rules, records, prepare
        self._todo = {
            name: deque(number for number in range(rules.episodes) if number not in records.tasks[name].episodes)
            for name in tasks
        }
        self._parts: dict[str, Part] = {}
        self._lock = threading.Lock()  # of the next six, which all seats use
        self._num_seats_at: Counter[str] = Counter()
        self._unbuildable: set[str] = set()
        self._build_s: dict[str, float] = {}
        self._episode_s: dict[str, float] = {}
        self._envs: set[BatchedEnv] = set()
        self._is_stopping = False
        self._inbox: SimpleQueue[Any] = SimpleQueue()  # of the caller's thread: requests, and functions to call
        self._replies: dict[int, SimpleQueue[Any]] = {}  # of each seat, by its thread
        self._num_playing = 0
        self.build_error: EnvherdError | None = None

    @property
    def num_left(self) -> int:
        """Number of episodes that have not begun."""
        return sum(map(len, self._todo.values()))

    def play_in(self, name: str, env: BatchedEnv) -> None:
        """Play all episodes of a task in an executor, in this thread.

        An env whose worker is lost, and not replaced, begins no more episodes. If none is left, the other episodes are
        recorded as failed.
        """
        error = _Session(self, name, env, is_own=False).play()
        while error is not None and (episode := self.take(name)) is not None:
            self.note(name, episode, error)

    def run(self, num_seats: int, options: ExecutorOptions) -> None:
        """Play all episodes, in envs of at most `num_seats` worker processes; an exception closes the envs."""
        factories = as_factories(len(self._tasks), list(self._tasks.values()))
        modules = draw(factories, None, 1, 0, options).preload  # refuses factories that cannot be pickled
        is_shared = options.start_method == "zygote" and options.worker_output == "capture"
        if is_shared and not options.differ_by_worker and not platforms.missing():
            options = replace(options, preload=modules)  # one helper for all tasks, so that a worker starts in 0.1 s
            helper: Any = contextlib.closing(helper_for(options, modules))
        else:
            helper = contextlib.nullcontext()
        threads = [
            threading.Thread(target=self._seat, args=(one,), name=f"evaluate-{i}", daemon=True)
            for i, one in enumerate(_options_of_seats(options, num_seats))
        ]
        with helper:
            try:
                for thread in threads:
                    self._num_playing += 1
                    thread.start()
                while self._num_playing:
                    self._serve_next()
            except BaseException:
                self._stop()
                raise
            finally:
                for thread in threads:
                    if thread.ident is not None:  # one that is building an env ends, and closes it, when it is built
                        thread.join(options.close_timeout_s if self._is_stopping else None)

    def _stop(self) -> None:
        with self._lock:
            self._is_stopping = True
            envs, replies = list(self._envs), list(self._replies.values())
        for env in envs:  # the calls of other threads raise Closed
            env.close()
        for reply in replies:
            reply.put(_Stopped())

    # ---- in the caller's thread ------------------------------------------------------------------

    def _serve_next(self) -> None:
        """Wait for a seat; call its function, or the policies for the seats that are ready."""
        requests: list[_Request] = []
        item = self._inbox.get()
        while item is not None:
            if isinstance(item, _Request):
                requests.append(item)
            else:
                item()
            is_full = sum(len(one.episodes) for one in requests) >= self.rules.max_batch
            item = None if is_full or self._inbox.empty() else self._inbox.get()  # no other thread gets items
        if requests:
            self._act_for(requests)

    def _act_for(self, requests: list[_Request]) -> None:
        """Call the policies, once for all rows of one policy and one kind, and answer."""
        rows = [(one, at) for one in requests for at in range(len(one.episodes))]
        kinds: dict[Any, list[tuple[_Request, int]]] = {}
        for one, at in rows:
            root = one.root if len(one.episodes) == 1 else one.root[at : at + 1]
            if (state := one.episodes[at].state) is not None:
                root.update(state)
            shapes = () if len(rows) == 1 else tuple((key, root.get(key).shape) for key in leaf_keys(root))
            kinds.setdefault((id(one.part.policy), shapes), []).append((one._replace(root=root), at))
        actions: dict[int, list[TensorDictBase]] = {}
        for group in kinds.values():
            first, episodes = group[0][0], [one.episodes[at] for one, at in group]
            batch = first.root if len(group) == 1 else torch.cat([one.root for one, _ in group])
            _seed_torch(episode_seed(episodes[0].seed, 0, episodes[0].length))
            acted = run_policy(first.part.policy, batch)
            written = get_leaf(acted, "next")
            own = None if written is None else own_leaves(written, first.env.engine.known)
            inputs = [leaf.key for leaf in (*first.env.spec.action, *first.env.spec.state)]
            acted = acted.select(*inputs, strict=False).clone()  # the policy may reuse its memory, as CUDA graphs do
            for row, episode in enumerate(episodes):
                episode.state = None if own is None else own[row : row + 1].clone()
                actions[id(episode)] = [acted] if len(group) == 1 else [acted[row : row + 1]]
        for one in requests:
            parts = [row for episode in one.episodes for row in actions[id(episode)]]
            one.reply.put(parts[0] if len(parts) == 1 else torch.cat(parts))

    def _note(self, name: str, episode: _Episode, error: EnvherdError | None) -> None:
        """Record an episode that has ended or failed."""
        if episode.film is not None:
            episode.film.close()
        returns = tuple(np.atleast_1d(episode.returns).tolist()) if episode.length else ()
        known = [one for one in episode.successes if one is not None]
        record = EpisodeRecord(
            episode=episode.number,
            seed=episode.seed,
            length=episode.length,
            returns=returns,
            success=None if error is not None or not known else bool(episode.successes[-1]),
            success_once=None if error is not None or not known else any(known),
            error=None if error is None else f"{type(error).__name__}: {error.message}",
            video=None if episode.path is None else str(episode.path),
        )
        if self.rules.success is not None and error is None:
            record = replace(record, success=bool(self.rules.success(episode.info, record)), success_once=None)
        self._records.add(name, record)
        if not (self._todo[name] or self._num_seats_at[name] > 1):
            self._parts.pop(name, None)  # a policy of this task alone is not needed any more

    # ---- in the threads of the seats -------------------------------------------------------------

    def _seat(self, options: ExecutorOptions) -> None:
        """Build and play until no episode is left."""
        with self._lock:
            self._replies[threading.get_ident()] = SimpleQueue()
        try:
            while (name := self._choose()) is not None:
                self._build_and_play(name, options)
        except BaseException as error:
            if not self._is_stopping:
                self._inbox.put(partial(_raise, error))
        finally:
            self._inbox.put(self._end_seat)

    def _end_seat(self) -> None:
        self._num_playing -= 1

    def _choose(self) -> str | None:
        """Return the task that a seat shall play, None for none.

        The first task without a seat. If all have one: the task with most episodes left, if these take longer than to
        build another env.
        """
        with self._lock:
            left = {name: len(todo) for name, todo in self._todo.items() if todo}
            name = next((one for one in left if not self._num_seats_at[one]), None)
            if name is None:
                shared = [one for one in left if one not in self._unbuildable and self._is_worth_sharing(one)]
                name = max(shared, key=left.__getitem__, default=None)
            if name is None or self._is_stopping:
                return None
            self._num_seats_at[name] += 1
            return name

    def _is_worth_sharing(self, name: str) -> bool:
        if name not in self._episode_s:
            return True
        seconds = len(self._todo[name]) * self._episode_s[name] / self._num_seats_at[name]
        return seconds > self._build_s.get(name, 0.0)

    def _build_and_play(self, name: str, options: ExecutorOptions) -> None:
        began, factory = time.monotonic(), self._tasks[name]
        try:
            env = ParallelEnv(1, factory, num_workers=1, seed=self.rules.seed, options=options)
        except EnvherdError as error:
            self._fail_task(name, error)
            return
        try:
            with self._lock:
                self._envs.add(env)
                self._build_s[name] = time.monotonic() - began
                is_stopping = self._is_stopping
            if not is_stopping:
                _Session(self, name, env, is_own=True).play()
        finally:
            env.close()  # its memory is free before this seat builds another
            with self._lock:
                self._envs.discard(env)
                self._num_seats_at[name] -= 1

    def _fail_task(self, name: str, error: EnvherdError) -> None:
        """Record the episodes of a task as failed, unless another seat has an env for them or is building one."""
        with self._lock:
            self._unbuildable.add(name)
            self._num_seats_at[name] -= 1
            is_last = not self._num_seats_at[name]
        self.build_error = self.build_error or error
        while is_last and (episode := self.take(name)) is not None:
            self.note(name, episode, error)

    def part_of(self, name: str, env: BatchedEnv) -> Part:
        """Return what acts in a task."""
        found: Part = self._call(
            lambda: self._parts.get(name) or self._parts.setdefault(name, self._prepare(name, env))
        )
        return found

    def take(self, name: str) -> _Episode | None:
        """Return the next episode of a task, None for none."""
        with self._lock:
            number = self._todo[name].popleft() if self._todo[name] else None
        return None if number is None else _Episode(number, episode_seed(self.rules.seed, number, 0))

    def note(self, name: str, episode: _Episode, error: EnvherdError | None = None) -> None:
        """Record an episode that has ended or, with an error, failed."""
        self._episode_s[name] = time.monotonic() - episode.began
        self._call(partial(self._note, name, episode, error))

    def act(self, request: _Request) -> TensorDictBase:
        """Return the actions for a request."""
        reply = self._replies.get(threading.get_ident())
        if reply is None:
            self._act_for([request])
            return request.reply.get()
        self._inbox.put(request._replace(reply=reply))
        return self._answer(reply)

    def _call(self, function: Callable[[], Any]) -> Any:
        """Call a function in the caller's thread, and return its result."""
        reply = self._replies.get(threading.get_ident())
        if reply is None:
            return function()
        self._inbox.put(lambda: reply.put(function()))
        return self._answer(reply)

    @staticmethod
    def _answer(reply: SimpleQueue[Any]) -> Any:
        answer = reply.get()
        if isinstance(answer, _Stopped):
            raise answer
        return answer


class _Session:
    """One executor that plays episodes of one task.

    Args:
        play: the run.
        name: of the task.
        env: the executor.
        is_own: it is a seat's, which builds another one after an error, whatever state the env is in.
    """

    def __init__(self, play: Play, name: str, env: BatchedEnv, *, is_own: bool) -> None:
        self._play, self._name, self._env, self._is_own = play, name, env, is_own
        self._rules = play.rules
        self._part = play.part_of(name, env)
        self._camera = None if self._rules.videos is None else Camera(env)
        self._playing: dict[int, _Episode] = {}  # by env
        self._usable = set(range(env.num_envs))
        self._error: EnvherdError | None = None

    def play(self) -> EnvherdError | None:
        """Play until no episode is left, or no env that can play one; return the latest error of an env."""
        try:
            while not (self._is_own and self._error):
                begun = self._begin()
                if not (begun or self._playing):
                    break
                try:
                    if begun:
                        self._reset(begun)
                    self._step()
                except _FAULTS as error:
                    self._fail(error)
        finally:
            for episode in self._playing.values():  # of a run that ends early
                if episode.film is not None:
                    episode.film.close()
        return self._error

    def _begin(self) -> dict[int, _Episode]:
        begun: dict[int, _Episode] = {}
        for env_id in sorted(self._usable - self._playing.keys()):
            if (episode := self._play.take(self._name)) is not None:
                episode.state = self._part.primed
                begun[env_id] = episode
        self._playing |= begun
        return begun

    def _reset(self, begun: Mapping[int, _Episode]) -> None:
        """Reset envs, and begin films."""
        num_envs = self._env.num_envs
        mask = torch.zeros(num_envs, dtype=torch.bool)
        mask[list(begun)] = True
        seeds = [begun[env_id].seed if env_id in begun else None for env_id in range(num_envs)]
        root = self._env.reset(TensorDict({"_reset": mask}, [num_envs]), seed=seeds)
        for env_id, episode in begun.items():
            if self._rules.videos is not None and episode.number in self._rules.filmed:
                self._rules.videos.mkdir(parents=True, exist_ok=True)
                stem = re.sub(r"[^\w.-]+", "_", self._name)
                episode.path = self._rules.videos / f"{stem}_episode{episode.number}.mp4"
                episode.film = Video(episode.path, self._rules.fps)
                self._film(episode, root, env_id, env_id)

    def _step(self) -> None:
        """Act once in each env that plays, and count it. Episodes whose env fails are recorded."""
        env, ids = self._env, list(self._playing)
        episodes = [self._playing[env_id] for env_id in ids]
        actions = self._play.act(_Request(self._part, env, env.current(ids), episodes, SimpleQueue()))
        env.send(actions, ids, maybe_reset=False)
        while ids:
            try:
                following = env.recv(env_ids=ids, with_root=False).get("next")
            except _FAULTS as error:  # the other envs are still under way
                self._fail(error)
                ids = [env_id for env_id in ids if env_id in self._playing]
            else:
                self._count(ids, following)
                break

    def _count(self, ids: list[int], following: TensorDictBase) -> None:
        """Count a step; record the episodes that it ended."""
        rewards = np.concatenate(
            [following.get(key).reshape(len(ids), -1).double().numpy(force=True) for key in self._part.rewards], axis=1
        )
        is_over = following.get("done").flatten().tolist()
        interrupted = following.get("interrupted", None)
        is_lost = [False] * len(ids) if interrupted is None else interrupted.flatten().tolist()
        infos = self._env.infos("next") if self._env.options.info_policy != "drop" else None
        for at, env_id in enumerate(ids):
            episode = self._playing[env_id]
            if is_lost[at]:
                self._fail(WorkerLost(f"step failed: the worker of env {env_id} was lost.", env_ids=(env_id,)))
                continue
            episode.length += 1
            episode.returns = episode.returns + rewards[at]
            if infos is not None:
                episode.info = infos[env_id]
                episode.successes.append(_success_in(episode.info))
            self._film(episode, following, at, env_id)
            if is_over[at] or episode.length == self._rules.max_steps:
                self._play.note(self._name, self._playing.pop(env_id))

    def _fail(self, error: EnvherdError) -> None:
        """Record the episodes of the envs that an error concerns as failed."""
        self._error = error
        for env_id in error.env_ids or list(self._playing):
            if env_id in self._playing:
                self._play.note(self._name, self._playing.pop(env_id), error)
        if isinstance(error, (WorkerLost, WorkerTimeout)) and self._env.options.on_worker_loss == "raise":
            self._usable.difference_update(error.env_ids)  # their worker is not replaced

    def _film(self, episode: _Episode, td: TensorDictBase, at: int, env_id: int) -> None:
        """Add the picture of an env, whose row of the batch is `at`, to the film of its episode, if there is one."""
        if episode.film is None or self._camera is None:
            return
        is_seen = bool(self._camera.key)
        (frame,) = self._camera.look(td[at : at + 1], [0]) if is_seen else self._camera.look(td, [env_id])
        if frame is not None:
            episode.film.add(enlarged(frame))


def _seed_torch(seed: int) -> None:
    """Seed torch's generators. `torch.manual_seed` takes 0.5 ms and keeps a stack trace, until CUDA is initialised."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's
        torch.cuda.manual_seed_all(seed)


def _raise(error: BaseException) -> None:
    raise error


def _success_in(info: Mapping[str, Any]) -> bool | None:
    """Return what an info reports, None without an entry."""
    found = next((info[key] for key in _SUCCESS_KEYS if key in info), None)
    return None if found is None else bool(np.all(found))


def _options_of_seats(options: ExecutorOptions, num_seats: int) -> list[ExecutorOptions]:
    """Return the options of each seat, whose worker gets what worker i of one executor would get."""
    each = [options] * num_seats
    if options.affinity is not None:
        cpus = options.affinity
        each = [replace(one, affinity=(cpus[i % len(cpus)],)) for i, one in enumerate(each)]
    if options.differ_by_worker:  # a module may read the variables when it is imported
        variables = variables_of(options, gpus_of(options, num_seats))
        preload = options.preload or ()
        each = [
            replace(one, env_vars=own, gpus=None, preload=preload) for one, own in zip(each, variables, strict=True)
        ]
    return each
