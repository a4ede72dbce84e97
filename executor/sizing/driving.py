"""Run an executor like a training loop, with random actions, synchronously or first-K, in turns."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from tensordict import TensorDictBase

from envherd.executor.batched import BatchedEnv
from envherd.executor.monitor.loads import read_loads
from envherd.executor.sizing.settings import Mode

#: Number of batches of random actions that are drawn in advance and used cyclically.
_NUM_DRAWN = 16
#: Uncounted batches before a turn, least number of batches of a turn, and the largest number of seconds for reaching
#: it.
_WARM_UP, _LEAST_BATCHES, _LEAST_S = 2, 4, 1.0
#: A batch with resets that takes this many times as long as the fastest batch waited for the resets.
_STANDS_OUT = 3.0


@dataclass(frozen=True, kw_only=True)
class Turn:
    """The measurements of one turn of a setting.

    Attributes:
        steps: env-steps.
        seconds: of all steps.
        resets: of envs in the turn.
        busy_s: seconds that workers spent on commands, summed over workers.
        reset_s: of these, on commands with a reset; estimated from samples.
        reset_wait_s: seconds by which batches with resets took longer than others, if clearly longer.
    """

    steps: int
    seconds: float
    resets: int = 0
    busy_s: float = 0.0
    reset_s: float = 0.0
    reset_wait_s: float = 0.0

    @property
    def rate(self) -> float:
        """Env-steps per second."""
        return self.steps / self.seconds


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Figures of an executor after its turns.

    Attributes:
        step_p50_s, step_p99_s: of the worker with the largest ones; None if too few steps were timed.
        worker_bytes: private memory of its workers.
    """

    step_p50_s: float | None = None
    step_p99_s: float | None = None
    worker_bytes: int = 0


class Runner(Protocol):
    """An executor that a search runs in turns.

    Attributes:
        start_s: seconds until it was ready and its envs were reset.
    """

    start_s: float

    def turn(self, mode: Mode, least_steps: int = 0) -> Turn:
        """Run for a turn in a mode, and for at least `least_steps` env-steps."""

    def figures(self) -> Figures:
        """Return its figures."""

    def close(self) -> None:
        """End it."""


class Driver:
    """Starts an executor and steps it in turns; between turns no env is stepping.

    Args:
        open_env: starts the executor.
        span_s: seconds of a turn.
        policy_s: seconds to sleep before each batch of actions, like a policy on a GPU.
    """

    def __init__(self, open_env: Callable[[], BatchedEnv], span_s: float, policy_s: float = 0.0) -> None:
        began = time.monotonic()
        self._env = env = open_env()
        try:
            self._span_s, self._policy_s = span_s, policy_s
            self._keys = [leaf.key for leaf in (*env.action_spec, *env.spec.state)]
            self._root = env.reset()
            self.start_s = time.monotonic() - began
            self._has_masks = any(leaf.key[-1] == "action_mask" for leaf in env.observation_spec)
            self._drawn = [env.rand_action().select(*self._keys) for _ in range(_NUM_DRAWN)]
            self._num_acts = 0
            self._half = max(1, env.num_envs // 2)
        except BaseException:
            env.close()
            raise

    def close(self) -> None:
        """Close the executor."""
        self._env.close()

    def figures(self) -> Figures:
        """Return the figures of the workers in `statistics()`."""
        workers = self._env.statistics().workers
        known = [(one.step_p50_s, one.step_p99_s) for one in workers if one.step_p50_s and one.step_p99_s]
        return Figures(
            step_p50_s=max((p50 for p50, _ in known), default=None),
            step_p99_s=max((p99 for _, p99 in known), default=None),
            worker_bytes=sum(one.uss_bytes for one in workers),
        )

    def turn(self, mode: Mode, least_steps: int = 0) -> Turn:
        """Run for a turn in a mode, or for at least `least_steps` env-steps from a reset of all envs."""
        batch = self._step if mode == "sync" else self._exchange
        if least_steps:  # first-K shifts envs' episodes against each other, which synchronous steps do not
            self._root = self._env.reset()
        if mode == "first-k":
            self._env.send(self._act(self._root, None))
        for _ in range(_WARM_UP):
            batch()
        before = self._counters()
        steps, seconds, reset_wait_s = self._run(batch, least_steps)
        if mode == "first-k" and least_steps:  # pending resets belong to whole episodes
            began = time.perf_counter()
            steps += self._receive_rest()
            seconds += time.perf_counter() - began
        resets, busy_s, reset_s = (after - first for after, first in zip(self._counters(), before, strict=True))
        if mode == "first-k" and not least_steps:
            self._receive_rest()
        return Turn(
            steps=steps, seconds=seconds, resets=int(resets), busy_s=busy_s, reset_s=reset_s, reset_wait_s=reset_wait_s
        )

    def _receive_rest(self) -> int:
        """Wait for the envs that are stepping, and return their number."""
        received = self._env.recv(with_root=False)
        self._root = self._env.current()
        return len(received)

    def _run(self, batch: Callable[[], int], least_steps: int) -> tuple[int, float, float]:
        """Return the steps, their seconds, and the seconds of waiting for resets."""
        num_resets = self._env.engine.pool.slab.words["resets"].sum
        count, steps, spent_s, waited_s = 0, 0, 0.0, 0.0
        fastest_s, seen = math.inf, num_resets()
        began = time.perf_counter()
        while spent_s < self._span_s or steps < least_steps or (count < _LEAST_BATCHES and spent_s < _LEAST_S):
            steps += batch()
            count += 1
            before_s, spent_s = spent_s, time.perf_counter() - began
            took_s = spent_s - before_s
            fastest_s = min(fastest_s, took_s)
            if took_s > _STANDS_OUT * fastest_s and num_resets() != seen:
                seen = num_resets()
                waited_s += took_s - fastest_s
        return steps, spent_s, waited_s

    def _counters(self) -> tuple[float, float, float]:
        """Return resets, busy and reset seconds as in `statistics()`, without reading the processes."""
        pool = self._env.engine.pool
        loads = [
            load
            for load in read_loads(pool.slab.words, pool.blueprint.blocks, time.monotonic_ns())
            if load.worker_id in pool.serving
        ]
        resets = float(pool.slab.words["resets"].sum())
        return resets, sum(load.busy_s for load in loads), sum(load.reset_s for load in loads)

    def _act(self, td: TensorDictBase, env_ids: Any) -> TensorDictBase:
        """Set actions, after the policy's time."""
        if self._policy_s:
            time.sleep(self._policy_s)
        if self._has_masks:
            return self._env.rand_action(td)
        drawn = self._drawn[self._num_acts % _NUM_DRAWN]
        self._num_acts += 1
        return td.update(drawn if env_ids is None else drawn[env_ids])

    def _step(self) -> int:
        _, self._root = self._env.step_and_maybe_reset(self._act(self._root, None))
        return self._env.num_envs

    def _exchange(self) -> int:
        env_ids: Any = self._env.recv(min_envs=self._half, with_root=False)["env_ids"]
        root = self._env.current(env_ids)
        self._env.send(self._act(root, env_ids), env_ids)
        return len(env_ids)
