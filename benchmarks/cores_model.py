"""A model of one machine with many processors: an event simulation with costs measured on a small machine.

There are a caller and W workers with n envs each. A worker runs the envs with a command one after the other, oldest
command first. The caller is one process. Its work for a batch is sequential (a part per batch, per env, per worker that
it rings, and per byte that it copies), and then the policy runs. There are three modes: "sync" waits for all envs,
"first-K" for the first half, "two groups" for one half while the other half steps.

With fewer processors than processes, the caller's work delays a running worker.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from benchmarks.work import Law, drawn_iterations

Mode = Literal["sync", "first-K", "two groups"]
MODES: tuple[Mode, ...] = ("sync", "first-K", "two groups")
_UNIT = 10_000  # mean iterations of the drawn steps, which are scaled to seconds


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The measured costs in seconds.

    Attributes:
        batch_s, env_s, byte_s, ring_s: of the caller's processor for a batch of all envs, for each env in it, for each
            byte of its rows, and for each worker that it rings.
        part_s, part_env_s: the same for a call that receives some envs and sends them on, and for each of them.
        worker_env_s: of a worker's processor for a step in addition to the env's.
        wake_s: from a worker's last answer to the caller's next line, and from a ring to the worker's first line.
    """

    batch_s: float
    env_s: float
    byte_s: float
    ring_s: float
    part_s: float
    part_env_s: float
    worker_env_s: float
    wake_s: float


@dataclass(frozen=True, kw_only=True)
class Work:
    """The envs' work.

    Attributes:
        name: for tables.
        step_s: of an env, on average.
        law: how step times are spread.
        row_bytes: of a row.
        policy_s: of the policy for each batch, on another device.
    """

    name: str
    step_s: float
    law: Law = "even"
    row_bytes: int = 16
    policy_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The setting of a run.

    Attributes:
        mode: see the module.
        num_workers: W.
        envs_per_worker: n.
        cores: processors, for the workers and the caller.
    """

    mode: Mode
    num_workers: int
    envs_per_worker: int
    cores: int

    @property
    def num_envs(self) -> int:
        """N."""
        return self.num_workers * self.envs_per_worker


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a simulation.

    Attributes:
        steps_per_s: env steps.
        of_ideal: relative to the speed of workers that run freely.
        caller_share: share of the time in which the caller's processor was busy.
    """

    steps_per_s: float
    of_ideal: float
    caller_share: float


def simulate(costs: Costs, work: Work, setting: Setting, num_steps: int = 6000) -> Outcome:
    """Run `num_steps` env steps (at least 120 of each env), after a tenth as many unmeasured ones."""
    run, num_envs = _Run(costs, work, setting), setting.num_envs
    num_steps = max(num_steps, 120 * num_envs)
    groups = [list(range(num_envs))[half::2] for half in (0, 1)]
    turn, before = 0, (0.0, 0.0, 0)
    run.send(range(num_envs), run.batch_s(num_envs))
    while run.steps < num_steps + before[2]:
        if setting.mode == "sync":
            ready = run.take_all(range(num_envs))
            run.send(ready, run.batch_s(num_envs))
        else:
            if setting.mode == "first-K":
                ready = run.take_first(max(1, num_envs // 2))
            else:
                ready, turn = run.take_all(groups[turn]), 1 - turn
            run.send(ready, run.part_s(len(ready)))
        if not before[2] and run.steps >= num_steps // 10:
            before = (run.now, run.busy_s, run.steps)
    seconds = run.now - before[0]
    rate = (run.steps - before[2]) / seconds
    of_ideal = rate * work.step_s / min(setting.num_workers, setting.cores)
    return Outcome(steps_per_s=rate, of_ideal=of_ideal, caller_share=(run.busy_s - before[1]) / seconds)


class _Run:
    """One simulation under way.

    Attributes:
        now: the caller's time.
        busy_s: of its processor so far.
        steps: that the caller has received.
    """

    def __init__(self, costs: Costs, work: Work, setting: Setting) -> None:
        num_workers = setting.num_workers
        self.now = self.busy_s = 0.0
        self.steps = 0
        self._costs, self._work = costs, work
        self._worker_of = np.repeat(np.arange(num_workers), setting.envs_per_worker).tolist()
        self._queues: list[deque[int]] = [deque() for _ in range(num_workers)]
        self._running: list[tuple[float, int] | None] = [None] * num_workers  # (end, env)
        self._free_at = [0.0] * num_workers
        self._ends: list[tuple[float, int]] = []  # heap of (end, worker); stale entries are skipped
        self._done: deque[int] = deque()
        self._done_at: dict[int, float] = {}
        self._shares_cores, self._victim = setting.cores <= num_workers, 0
        raw = drawn_iterations(work.law, _UNIT) / _UNIT * work.step_s if work.step_s else np.zeros(1)
        self._lengths = raw.tolist()
        stride = max(1, len(self._lengths) // len(self._worker_of))
        self._at = [env * stride % len(self._lengths) for env in range(len(self._worker_of))]

    def batch_s(self, count: int) -> float:
        """Return the caller's cost of a batch of all envs."""
        costs = self._costs
        return costs.batch_s + count * (costs.env_s + costs.byte_s * self._work.row_bytes)

    def part_s(self, count: int) -> float:
        """Return the caller's cost of receiving `count` envs and sending them on."""
        costs = self._costs
        return costs.part_s + count * (costs.part_env_s + costs.byte_s * self._work.row_bytes)

    def send(self, env_ids: Sequence[int], cost_s: float) -> None:
        """Let the caller work for `cost_s`, wait for the policy, and ring the workers of some envs."""
        self._spend(cost_s)
        self.now += self._work.policy_s
        fresh: dict[int, list[int]] = {}
        for env_id in env_ids:
            fresh.setdefault(self._worker_of[env_id], []).append(env_id)
        for worker, ids in fresh.items():
            self._spend(self._costs.ring_s)
            self._advance(self.now)
            self._queues[worker].extend(ids)
            if self._running[worker] is None:
                self._start(worker, max(self.now + self._costs.wake_s, self._free_at[worker]))

    def take_all(self, env_ids: Sequence[int]) -> list[int]:
        """Wait for some envs."""
        wanted = list(env_ids)
        while not all(one in self._done_at for one in wanted):
            self._next_end()
        self._take(wanted)
        return wanted

    def take_first(self, count: int) -> list[int]:
        """Wait for any `count` envs; take all that are ready by then."""
        self._advance(self.now)
        while len(self._done) < count:
            self._next_end()
        chosen = [self._done[index] for index in range(count)]
        self._take(chosen)
        return chosen

    def _take(self, env_ids: Sequence[int]) -> None:
        came = max(self._done_at.pop(one) for one in env_ids)
        taken = set(env_ids)
        self._done = deque(one for one in self._done if one not in taken)
        if came > self.now:
            self.now = came + self._costs.wake_s
        self.steps += len(env_ids)

    def _spend(self, seconds: float) -> None:
        """Use a processor for the caller; if none is free, a running worker waits."""
        self.busy_s += seconds
        if self._shares_cores:
            self._advance(self.now)
            for _ in self._running:
                self._victim = (self._victim + 1) % len(self._running)
                found = self._running[self._victim]
                if found is not None:
                    later = (found[0] + seconds, found[1])
                    self._running[self._victim] = later
                    heapq.heappush(self._ends, (later[0], self._victim))
                    break
        self.now += seconds

    def _start(self, worker: int, at_s: float) -> None:
        env_id = self._queues[worker].popleft()
        index = self._at[env_id]
        self._at[env_id] = (index + 1) % len(self._lengths)
        end = at_s + self._costs.worker_env_s + self._lengths[index]
        self._running[worker] = (end, env_id)
        heapq.heappush(self._ends, (end, worker))

    def _advance(self, to_s: float) -> None:
        """Advance the workers to a time."""
        while self._ends and self._ends[0][0] <= to_s:
            self._next_end()

    def _next_end(self) -> None:
        """End the next step."""
        while True:
            end, worker = heapq.heappop(self._ends)
            found = self._running[worker]
            if found is not None and found[0] == end:
                break
        self._done.append(found[1])
        self._done_at[found[1]] = self._free_at[worker] = end
        self._running[worker] = None
        if self._queues[worker]:
            self._start(worker, end)
