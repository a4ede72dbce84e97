"""Start the executor of a setting, and run it like a training loop, with random actions, in turns."""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from tensordict import TensorDictBase

from envherd.executor.assembly import is_portable, make_pool
from envherd.executor.batched import BatchedEnv
from envherd.executor.machine.machine import usable_cores
from envherd.executor.options import ExecutorOptions
from envherd.executor.sending.blueprint import as_factories, draw
from envherd.executor.serial import SerialEnv
from envherd.executor.sizing.settings import Mode, Setting
from envherd.executor.start.preloading import preloading
from envherd.shm.platforms import require
from envherd.workers.processes import scheduled_ns
from envherd.workers.testing import CountingEnv

#: Number of batches of random actions that are drawn in advance and used cyclically.
_NUM_DRAWN = 16
#: Uncounted batches before a turn.
_WARM_UP = 2
#: Least number of batches of a turn, unless they take more than `_LEAST_S`.
_LEAST_BATCHES = 4
#: Seconds after which a turn may have fewer batches.
_LEAST_S = 1.0
#: Seconds of a batch that is usually over before the kernel gives the processor to another program.
_SHORT_S = 1e-3


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
                blueprint = draw(
                    as_factories(1, self.make_env),
                    self.env_kwargs,
                    1,
                    0,
                    self.options,
                )
                stack.enter_context(
                    preloading(*blueprint.preload, options=self.options)
                ).wait_ready()
            yield

    def start(self, num_envs: int, num_workers: int, patience_s: float) -> BatchedEnv:
        """Start an executor with worker processes.

        Args:
            num_envs: N.
            num_workers: processes.
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
        blueprint = draw(
            as_factories(num_envs, self.make_env),
            self.env_kwargs,
            num_workers,
            0,
            options,
        )
        pool = make_pool(blueprint, options)
        try:
            pool.start()
            return BatchedEnv(pool, seed=0, device=None, copy=True, options=options)
        except BaseException:
            pool.close(timeout_s=0)
            raise

    @contextlib.contextmanager
    def turns(
        self,
        setting: Setting,
        span_s: float,
        policy_s: float,
        patience_s: float,
    ) -> "Iterator[Callable[[Mode], Turn]]":
        """Start the executor of a setting; yield what runs it for a turn in a mode.

        Args:
            setting: a `SerialEnv` runs in a worker; see `SerialHost`.
            span_s: see `Driver`.
            policy_s: see `Driver`.
            patience_s: see `start`.
        """
        if setting.num_workers:
            with self.start(setting.num_envs, setting.num_workers, patience_s) as env:
                yield Driver(env, span_s, policy_s).turn
            return
        # The other options concern the envs: they are those of the `SerialEnv`.
        options = ExecutorOptions(
            start_method=self.options.start_method,
            preload=self.options.preload,
            worker_threads=self.options.worker_threads,
            worker_output=self.options.worker_output,
            env_vars=self.options.env_vars,
            gpus=self.options.gpus,
        )
        how = {
            "subject": self,
            "num_envs": setting.num_envs,
            "span_s": span_s,
            "policy_s": policy_s,
        }
        with Subject(SerialHost, how, options).start(1, 1, patience_s) as env:
            # The measurements of another process come as a plain tuple.
            yield lambda mode: Turn(*env.call("driver.turn", mode)[0])


class Turn(NamedTuple):
    """The measurements of one turn of a setting.

    Attributes:
        steps: env-steps.
        resets: of envs in the turn.
        batches_s: seconds of each batch.
        times: of this thread, and then of each worker: seconds on a processor, waiting for one, and on commands (of
            this thread, in the policy).
    """

    steps: int
    resets: int
    batches_s: Sequence[float]
    times: Sequence[Sequence[float]]

    @property
    def seconds(self) -> float:
        """Seconds of all batches."""
        return sum(self.batches_s)

    @property
    def busy_share(self) -> float:
        """Share of the workers' time, spent on commands; of a `SerialEnv`, of this thread's time on a processor."""
        (run_s, _, _), *workers = self.times
        busy_s = [busy for _, _, busy in workers] or [run_s]
        return min(1.0, sum(busy_s) / len(busy_s) / self.seconds)

    def undisturbed_s(self, *, is_even: bool) -> float:
        """Return the seconds that it would take if no other program used the processors.

        This thread and the workers take turns, so the times that they wait for a processor are left out. Workers that
        share processors take at least their processor time, divided among the processors. Most short batches are over
        before the kernel stops a process, so all together do not take longer than the median says.

        Args:
            is_even: whether all steps take about as long. Otherwise the median says nothing, and workers wait for each
                other, which their times do not show: only the waiting of this thread and the slowest is left out.
        """
        (own_s, own_wait_s, policy_s), *workers = self.times
        run_s, wait_s, busy_s = np.reshape(workers, (-1, 3)).T
        shared_s = run_s.sum() / usable_cores()
        waited_s = own_wait_s + wait_s.max(initial=0.0)
        seconds = max(self.seconds - waited_s, own_s + shared_s)
        if not is_even:
            return seconds
        if workers:
            slowest_s = np.maximum(run_s, busy_s - wait_s).max()
            seconds = policy_s + own_s + max(slowest_s, shared_s)
        median_s = float(np.median(self.batches_s))
        return (
            min(seconds, median_s * len(self.batches_s))
            if median_s < _SHORT_S
            else seconds
        )


class Driver:
    """Steps an executor in turns; between turns no env is stepping.

    Args:
        env: the executor; it is reset.
        span_s: seconds of a turn.
        policy_s: seconds to sleep before each batch of actions, like a policy on a GPU.
    """

    def __init__(self, env: BatchedEnv, span_s: float, policy_s: float = 0.0) -> None:
        self.env = env
        self._span_s = span_s
        self._policy_s = policy_s
        self._root = env.reset()
        keys = [leaf.key for leaf in env.action_spec]
        self._has_masks = any(
            leaf.key[-1] == "action_mask" for leaf in env.observation_spec
        )
        self._drawn = itertools.cycle(
            [
                env.rand_action().select(*keys)
                for _ in range(0 if self._has_masks else _NUM_DRAWN)
            ]
        )

    def step(self) -> int:
        """Make one step of all envs; return their number."""
        _, self._root = self.env.step_and_maybe_reset(self._act(self._root))
        return self.env.num_envs

    def turn(self, mode: Mode) -> Turn:
        """Run for a turn in a mode."""
        batch = self.step if mode == "sync" else self._exchange
        if mode == "first-k":
            self.env.send(self._act(self._root))
        for _ in range(_WARM_UP):
            batch()
        resets, times = self._counters()
        steps = 0
        ticks = [time.perf_counter()]
        while (seconds := ticks[-1] - ticks[0]) < self._span_s or (
            len(ticks) <= _LEAST_BATCHES and seconds < _LEAST_S
        ):
            steps += batch()
            ticks.append(time.perf_counter())
        resets_after, times_after = self._counters()
        if mode == "first-k":
            self.env.recv(with_root=False)
            self._root = self.env.current()
        batches_s = np.diff(ticks).tolist()
        spent = (times_after - times).tolist()
        spent[0][2] = self._policy_s * len(batches_s)
        return Turn(steps, resets_after - resets, batches_s, spent)

    def _counters(self) -> tuple[int, np.ndarray]:
        """Return the number of resets, and the figures of `Turn.times` so far."""
        pool = self.env.engine.pool
        pids = [
            "thread-self",
            *(str(pool.pid_of(worker_id)) for worker_id in range(pool.num_workers)),
        ]
        # The words of a `SerialEnv` are those of one worker, and are left out.
        busy_ns = [0, *pool.slab.words["busy_ns"].tolist()]
        times = [
            [*(scheduled_ns(pid) or (0, 0)), busy]
            for pid, busy in zip(pids, busy_ns, strict=False)
        ]
        return int(pool.slab.words["resets"].sum()), np.array(times) / 1e9

    def _act(self, td: TensorDictBase, env_ids: Any = None) -> TensorDictBase:
        """Set actions of some envs, or of all, after the policy's time.

        They are legal if the envs have masks, else from batches that were drawn in advance.
        """
        if self._policy_s:
            time.sleep(self._policy_s)
        if self._has_masks:
            return self.env.rand_action(td)
        actions = next(self._drawn)
        return td.update(actions if env_ids is None else actions[env_ids])

    def _exchange(self) -> int:
        half = max(1, self.env.num_envs // 2)
        ids: Any = self.env.recv(min_envs=half, with_root=False)["env_ids"]
        # Envs that are batches have one for each row.
        env_ids = ids.reshape(len(ids), -1)[:, 0]
        self.env.send(self._act(self.env.current(env_ids), env_ids), env_ids)
        return len(env_ids)


class SerialHost(CountingEnv):
    """An env that has a `SerialEnv` of other envs, and its driver.

    It is in a worker: no env is built in this process, and one that crashes or hangs there excludes only its setting.

    Args:
        subject: the env.
        num_envs: of the `SerialEnv`.
        span_s, policy_s: see `Driver`.
    """

    def __init__(
        self,
        subject: Subject,
        num_envs: int,
        span_s: float,
        policy_s: float,
    ) -> None:
        super().__init__()
        env = SerialEnv(
            num_envs,
            subject.make_env,
            env_kwargs=subject.env_kwargs,
            seed=0,
            options=subject.options,
        )
        self.driver = Driver(env, span_s, policy_s)

    def close(self) -> None:
        """Close the executor."""
        self.driver.env.close()
