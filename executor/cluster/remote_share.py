"""A share as the driver sees it: the state of its host, and the place of its rows in the driver's slab.

| state | it has | what is sent to it | how it ends |
|---|---|---|---|
| BUILDING | a host, which has not built its envs yet | is carried out after that | SERVING; LOST |
| SERVING | a host and envs | is carried out | LOST |
| LOST | none | is dropped | PAUSED or SEARCHING, if it is to be replaced |
| PAUSED | none, as it was lost again and again | is kept | SEARCHING, at `search_at` |
| SEARCHING | none; Ray looks for a place | is kept | BUILDING; REFUSED |
| REFUSED | none: no place was found, which is to be raised once more | is dropped | LOST |
"""

from __future__ import annotations

import dataclasses
import enum
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import ray

from envherd.executor.cluster.orders import ENV_WORDS, Built, Figures, Reply, Report, Share
from envherd.executor.cluster.ray_cluster import COME_UP_S, Place
from envherd.executor.cluster.wire import WireRows
from envherd.shm.slab import Slab, Storage, plan_slab
from envherd.shm.specs import EnvSpec
from envherd.workers import messages
from envherd.workers.errors import EnvherdError, WorkerLost
from envherd.workers.protocol import RING

#: Seconds without an answer after which the driver pings a host.
_PATIENCE_S = 2.0
#: Characters of Ray's error texts that are kept.
_MAX_LENGTH = 800
_COLORS = re.compile(r"\x1b\[[0-9;]*m")

State = enum.Enum("State", ["BUILDING", "SERVING", "LOST", "PAUSED", "SEARCHING", "REFUSED"])


class RemoteShare:
    """The envs of one host, as the driver sees them.

    Args:
        share_id: its place among the shares.
        plan: of the host.
        home: its place, where a host has been started.
        report: the host's report on its node.
        node_timeout_s: seconds without a sign of life after which a host counts as lost.

    Attributes:
        state: see the module.
        loss: the latest loss of its host, if any.
        search_at: monotonic seconds at which the search begins, if it is PAUSED.
        held: calls for its next host: method, arguments, and handler of the answer.
        env_ids: int64 `[n]`, of the batch.
        worker_ids: of the batch.
        pids: of the workers, on their machine.
        generations: how often each was replaced.
        num_recycled: how often workers were replaced between episodes, when the host was last asked.
        is_collecting: whether a call of the host's `collect` is pending.
        knows_roots: whether the host has the envs' present roots, because their latest steps were a rollout there.
        heard_at: when it last answered, `time.monotonic()`.
    """

    loss: EnvherdError
    search_at = 0.0

    def __init__(self, share_id: int, plan: Share, home: Place, report: Report, node_timeout_s: float) -> None:
        self.share_id = share_id
        self.home = home
        self.report = report
        self.first_env_id = plan.first_env_id
        self.num_envs = len(plan.factories)
        self.env_ids = np.arange(plan.first_env_id, plan.first_env_id + self.num_envs)
        self.worker_ids = range(plan.first_worker_id, plan.first_worker_id + plan.num_workers)
        self.root_seed = plan.root_seed
        self.specs: tuple[EnvSpec, ...] = ()
        self.pids: tuple[int, ...] = ()
        self.generations = [0] * plan.num_workers
        self.num_recycled = 0
        self.state = State.LOST
        self.held: list[tuple[str, tuple[Any, ...], Handler]] = []
        self.is_collecting = self.knows_roots = False
        self._plan = plan
        self._node_timeout_s = node_timeout_s
        self._slab: Slab | None = None

    @property
    def has_host(self) -> bool:
        """Whether there is a host, which may still be building."""
        return self.state in (State.BUILDING, State.SERVING)

    @property
    def is_moving(self) -> bool:
        """Whether a place is being searched for, or will be."""
        return self.state in (State.PAUSED, State.SEARCHING)

    @property
    def is_out(self) -> bool:
        """Whether there is no host, and none will follow."""
        return not (self.has_host or self.is_moving)

    @property
    def place(self) -> str:
        """The host's name in messages."""
        return self.report.place

    def build(self) -> Any:
        """Make the host, which may still be starting, build the envs; return the reference of its answer."""
        self._recycled_before = self.num_recycled
        if self.pids:
            self.generations = [generation + 1 for generation in self.generations]
        self._generations_before = list(self.generations)
        self.state = State.BUILDING
        self.heard_at = time.monotonic()
        self._ping: Any = None
        self._pinged_at = 0.0
        words = None if self._slab is None else np.stack([self._slab.words[name][self.env_ids] for name in ENV_WORDS])
        return self.call("build", dataclasses.replace(self._plan, root_seed=self.root_seed, words=words))

    def take_built(self, built: Built) -> None:
        """Record the host's specs and workers."""
        self.state = State.SERVING
        self.specs = built.specs
        self.pids = built.pids
        self.report = built.report

    def attach(self, slab: Slab) -> None:
        """Take this share's rows of the batch's slab."""
        self._slab = slab
        plan = plan_slab(self.specs, len(self.worker_ids), slab.plan.num_frames)
        self.wire_rows = WireRows(slab, plan, self.first_env_id)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the host; return the reference of its answer at once."""
        return self.home.call(method, *args, **kwargs)

    def localize(self, message: messages.Prepare) -> messages.Prepare:
        """Return a message with the env's id on the host."""
        return dataclasses.replace(message, env_id=message.env_id - self.first_env_id)

    # ---- rows --------------------------------------------------------------------------------

    def write(self, reply: Reply, storages: Mapping[int, Storage]) -> None:
        """Write the rows of a reply to the ring, or to a rollout storage.

        Args:
            reply: of the host.
            storages: target -> storage of the batch.
        """
        assert reply.root_ids is not None
        if reply.target != RING:
            if reply.target in storages:  # otherwise the rollout is over
                at = storages[reply.target], reply.columns
                self.wire_rows.unpack_to_storage(reply.nexts, reply.next_ids, reply.roots, reply.root_ids, at)
            return
        columns = np.zeros(self.num_envs, np.int64)
        columns[slice(None) if reply.ids is None else reply.ids] = reply.columns
        at_next = reply.columns if reply.next_ids is None else columns[reply.next_ids]
        self.wire_rows.unpack_rows("next", reply.nexts, reply.next_ids, at_next)
        self.wire_rows.unpack_rows("root", reply.roots, reply.root_ids, columns[reply.root_ids])

    def note_words(self, words: Mapping[str, np.ndarray], resets_before_start: np.ndarray, reply: Reply) -> None:
        """Take over the host's counts."""
        if reply.words is not None and reply.resets_before_start is not None:
            for name, values in zip(ENV_WORDS, reply.words, strict=True):
                words[name][self.env_ids] = values
            resets_before_start[self.worker_ids.start : self.worker_ids.stop] = reply.resets_before_start

    def note_figures(self, words: dict[str, np.ndarray], figures: Figures) -> None:
        """Take over the figures of the host's workers."""
        self.pids, self.num_recycled = figures.pids, self._recycled_before + figures.recycled
        self.generations = [base + own for base, own in zip(self._generations_before, figures.generations, strict=True)]
        for name, values in figures.words.items():
            place = words[name].reshape(-1, values.shape[1])
            place[list(self.worker_ids)] = values
            if name == "since_ns":  # by another machine's clock
                place[list(self.worker_ids)] += time.monotonic_ns() - figures.now_ns

    # ---- life and death ----------------------------------------------------------------------

    def silence(self) -> WorkerLost | None:
        """Return the loss of a host that has been silent for too long; ping a silent one."""
        now = time.monotonic()
        if self._ping is not None:
            done, _ = ray.wait([self._ping], num_returns=1, timeout=0)
            if done:
                ping, self._ping = self._ping, None
                try:
                    ray.get(ping)
                except ray.exceptions.RayError as error:
                    return self.gone(error)
                self.heard_at = now
            elif now - self._pinged_at > (limit := COME_UP_S if self.state is State.BUILDING else self._node_timeout_s):
                return self._loss(f"it gave no sign of life for {limit:g} s")
        if self._ping is None and now - self.heard_at > _PATIENCE_S:
            self._ping, self._pinged_at = self.call("ping"), now
        return None

    def gone(self, error: BaseException) -> WorkerLost:
        """Return the loss of a host that Ray says is gone."""
        lines = [line.strip() for line in _COLORS.sub("", str(error)).splitlines() if line.strip()]
        text = " ".join(lines)
        text = text if len(text) < _MAX_LENGTH else f"{text[: _MAX_LENGTH // 2]} ... {text[-_MAX_LENGTH // 2 :]}"
        return self._loss(f"{type(error).__name__}: {text}")

    def no_room(self) -> WorkerLost:
        """Return the loss of a host that cannot be replaced."""
        return self._loss(f"{self.loss} It was not replaced: no living node has room for its share")

    def _loss(self, why: str) -> WorkerLost:
        first, last = self.worker_ids[0], self.worker_ids[-1]
        advice = " ExecutorOptions(on_worker_loss='restart') moves a lost node's envs to another."
        return WorkerLost(
            f"the call failed: {self.place} is lost with workers {first}-{last} (envs {self.env_ids[0]}-"
            f"{self.env_ids[-1]}): {why}." + ("" if self._plan.options.on_worker_loss == "restart" else advice),
            env_ids=tuple(self.env_ids.tolist()),
            worker_id=first,
            node_id=self.report.node_id,
            phase="call",
        )

    def end_host(self, loss: EnvherdError) -> None:
        """End the host, if it still lives, and record its loss."""
        self.state, self.loss = State.LOST, loss
        self.is_collecting = self.knows_roots = False
        self.home.end_host()

    def refuse(self) -> None:
        """Note that no place was found."""
        self.state, self.loss = State.REFUSED, self.no_room()
        self.drop_held()

    def drop_held(self) -> None:
        """Drop the calls for the next host."""
        if not self.has_host:
            self.held.clear()
            self.is_collecting = False


#: Takes an answer of a host.
Handler = Callable[[RemoteShare, Any], None]
