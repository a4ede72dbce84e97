"""Start the executor of a setting, and run it like a training loop, with random actions, in turns."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from tensordict import TensorDictBase

from envherd.executor.batched import BatchedEnv
from envherd.executor.monitor.statistics import read_workers
from envherd.executor.options import ExecutorOptions
from envherd.executor.pools.blueprint import as_factories, draw
from envherd.executor.pools.portable import is_portable, make_pool
from envherd.executor.pools.preloading import preloading
from envherd.executor.sizing.settings import Mode, Setting
from envherd.shm.platforms import require

#: Number of batches of random actions that are drawn in advance and used cyclically.
_NUM_DRAWN = 16
#: Uncounted batches before a turn, least number of batches of a turn, and the largest number of seconds for reaching
#: it.
_WARM_UP, _LEAST_BATCHES, _LEAST_S = 2, 4, 1.0


@dataclass(frozen=True)
class Subject:
    """The env that is sized.

    Attributes:
        make_env: see `ParallelEnv`; called in workers only.
        env_kwargs: keyword arguments of the call.
        options: of the executors.
    """

    make_env: Callable[..., Any]
    env_kwargs: dict[str, Any]
    options: ExecutorOptions

    @contextlib.contextmanager
    def helper(self) -> Iterator[None]:
        """Make all executors start their workers from one helper, if possible, and wait until it is ready.

        Raises:
            ValueError: this system has no /proc, where the figures of workers are read.
        """
        require("measuring an env", "/proc")
        with contextlib.ExitStack() as stack:
            if self.options.start_method == "zygote" and not is_portable(self.options):
                blueprint = draw(as_factories(1, self.make_env), self.env_kwargs, 1, 0, self.options)
                stack.enter_context(preloading(*blueprint.preload, options=self.options)).wait_ready()
            yield

    def start(self, setting: Setting, patience_s: float) -> BatchedEnv:
        """Start the executor of a setting with worker processes.

        Args:
            setting: see `Setting`.
            patience_s: most seconds for a build, a reset or a step of a worker.

        Raises:
            EnvherdError: it cannot be started; none of its processes is left running.
        """
        own = self.options
        options = replace(
            own,
            build_timeout_s=min(patience_s, own.build_timeout_s or patience_s),
            reset_timeout_s=min(patience_s, own.reset_timeout_s or patience_s),
            step_timeout_s=min(patience_s, own.step_timeout_s or patience_s),
        )
        factories = as_factories(setting.num_envs, self.make_env)
        blueprint = draw(factories, self.env_kwargs, setting.num_workers, 0, options)
        pool = make_pool(blueprint, options)
        try:
            pool.start()
            return BatchedEnv(pool, seed=0, device=None, copy=True, options=options)
        except BaseException:
            pool.close(timeout_s=0)
            raise


@dataclass(frozen=True, kw_only=True)
class Turn:
    """The measurements of one turn of a setting.

    Attributes:
        steps: env-steps.
        seconds: of all steps.
        resets: of envs in the turn.
        busy_s: seconds that workers spent on commands, summed over workers.
    """

    steps: int
    seconds: float
    resets: int = 0
    busy_s: float = 0.0


class RandomActions:
    """Random actions for an executor: legal ones if it has masks, else from batches that were drawn in advance."""

    def __init__(self, env: BatchedEnv) -> None:
        self._env = env
        self._has_masks = any(leaf.key[-1] == "action_mask" for leaf in env.observation_spec)
        keys = [leaf.key for leaf in env.action_spec]
        count = 0 if self._has_masks else _NUM_DRAWN
        self._drawn = itertools.cycle([env.rand_action().select(*keys) for _ in range(count)])

    def set_in(self, td: TensorDictBase, env_ids: Any = None) -> TensorDictBase:
        """Set the actions of some envs, or of all, in the batch to act on (which has their state, if they take one)."""
        if self._has_masks:
            return self._env.rand_action(td)
        drawn = next(self._drawn)
        return td.update(drawn if env_ids is None else drawn[env_ids])


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
            self._root = env.reset()
            self.start_s = time.monotonic() - began
            self._actions = RandomActions(env)
            self._half = max(1, env.num_envs // 2)
        except BaseException:
            env.close()
            raise

    def close(self) -> None:
        """Close the executor."""
        self._env.close()

    def turn(self, mode: Mode, least_steps: int = 0) -> Turn:
        """Run for a turn in a mode, and for at least `least_steps` env-steps."""
        batch = self._step if mode == "sync" else self._exchange
        if mode == "first-k":
            self._env.send(self._act(self._root, None))
        for _ in range(_WARM_UP):
            batch()
        resets, busy_s = self._counters()
        count, steps, seconds = 0, 0, 0.0
        began = time.perf_counter()
        while seconds < self._span_s or steps < least_steps or (count < _LEAST_BATCHES and seconds < _LEAST_S):
            steps += batch()
            count += 1
            seconds = time.perf_counter() - began
        after = self._counters()
        if mode == "first-k":
            self._env.recv(with_root=False)
            self._root = self._env.current()
        return Turn(steps=steps, seconds=seconds, resets=after[0] - resets, busy_s=after[1] - busy_s)

    def _counters(self) -> tuple[int, float]:
        """Return resets and the workers' busy seconds as in `statistics()`, without reading the processes."""
        pool = self._env.engine.pool
        workers = read_workers(pool.slab.words, pool.blueprint.blocks, time.monotonic_ns())
        return int(pool.slab.words["resets"].sum()), sum(one.busy_s for one in workers)

    def _act(self, td: TensorDictBase, env_ids: Any) -> TensorDictBase:
        """Set actions, after the policy's time."""
        if self._policy_s:
            time.sleep(self._policy_s)
        return self._actions.set_in(td, env_ids)

    def _step(self) -> int:
        _, self._root = self._env.step_and_maybe_reset(self._act(self._root, None))
        return self._env.num_envs

    def _exchange(self) -> int:
        env_ids: Any = self._env.recv(min_envs=self._half, with_root=False)["env_ids"]
        root = self._env.current(env_ids)
        self._env.send(self._act(root, env_ids), env_ids)
        return len(env_ids)
