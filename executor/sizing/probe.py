"""The probe: measure one env in an executor of one worker, and what further ones add in one of several envs.

Guarantees: no env is built in this process. Times are those of the worker, from its words in the slab; processor time
and memory are the kernel's figures of its process. A probe ends when it has enough samples, at the latest when its
budget is spent plus one step, reset or start of an executor.
Does not know: the load of other processes. It measures how long the worker waited for a processor.
Platforms: Linux (/proc).
"""

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from tensordict import TensorDictBase

from envherd.executor.assembly import is_portable, make_pool
from envherd.executor.batched import BatchedEnv
from envherd.executor.guests.monitor import quantile
from envherd.executor.options import ExecutorOptions
from envherd.executor.sending.blueprint import as_factories, draw
from envherd.executor.serial import SerialEnv
from envherd.executor.sizing.rule import Measurement, Mode, Setting
from envherd.executor.start.zygote import preloading
from envherd.shm.platforms import require
from envherd.shm.slab import plan_slab
from envherd.workers.errors import EnvherdError
from envherd.workers.processes import (
    memory_of,
    num_threads,
    parent_of,
    processor_ns,
)
from envherd.workers.testing import CountingEnv

# ---- driving -----------------------------------------------------------------------------------
# Start the executor of a setting, and run it like a training loop, with random actions, in turns.

#: Number of batches of random actions that are drawn in advance and used cyclically.
_NUM_DRAWN = 16
#: Uncounted batches before a turn.
_WARM_UP = 2
#: Least number of batches of a turn, unless they take more than `_LEAST_S`.
_LEAST_BATCHES = 4
#: Seconds after which a turn may have fewer batches.
_LEAST_S = 1.0


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
        seconds: of all batches.
        busy_share: of the workers' time, spent on commands; of a `SerialEnv`, of this thread's time on a processor.
    """

    steps: int
    resets: int
    seconds: float
    busy_share: float


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
        pool = self.env.engine.pool
        resets = pool.slab.words["resets"].sum()
        busy_s = self._busy_s()
        steps = 0
        num_batches = 0
        began = time.perf_counter()
        while (seconds := time.perf_counter() - began) < self._span_s or (
            num_batches < _LEAST_BATCHES and seconds < _LEAST_S
        ):
            steps += batch()
            num_batches += 1
        resets = int(pool.slab.words["resets"].sum() - resets)
        busy_share = min(1.0, (self._busy_s() - busy_s) / seconds)
        if mode == "first-k":
            self.env.recv(with_root=False)
            self._root = self.env.current()
        return Turn(steps, resets, seconds, busy_share)

    def _busy_s(self) -> float:
        """Return the workers' mean seconds on commands; of a `SerialEnv`, those of this thread on a processor."""
        pool = self.env.engine.pool
        if not pool.num_workers:
            return time.thread_time()
        return float(pool.slab.words["busy_ns"].mean()) / 1e9

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


# ---- probe -------------------------------------------------------------------------------------

#: Share of the budget for steps.
_STEPS_SHARE = 0.4
#: Share of the budget for the resets before the steps. Those after the steps and those of several envs have as much.
_RESETS_SHARE = 0.08
_SPAN_S = 0.02  # of a turn
#: Least steps of a measurement that ends before its time is spent.
_ENOUGH_STEPS = 500
#: Least seconds of such a measurement.
_ENOUGH_S = 0.2
#: Least number of episodes that end in such a measurement.
_ENOUGH_EPISODES = 2
#: Most resets of a measurement of memory.
_ENOUGH_RESETS = 8
#: Steps that take fewer seconds are measured again with several envs in the worker: one after the other, as in every
#: executor of such envs. A worker that is woken for each step has cold caches (CartPole on one processor: 37 us, with
#: eight envs 23 us; 2026-11-27).
_SHORT_STEP_S = 0.2e-3
#: Number of envs in that second measurement.
_SHORT_ENVS = 8
#: Most memory of an env that is measured again: several that take more might be too many for the machine.
_LIGHT_BYTES = 128 * 2**20
#: Budgets that a call may take, in addition to `PATIENCE_S`, before it counts as hanging.
_PATIENCE_FACTOR = 4.0
#: Seconds that any call may take.
PATIENCE_S = 30.0
#: Bytes by which a process may grow because of Python itself.
_NOISE_BYTES = 64 * 1024
#: Most seconds until a worker has counted its last command.
_IDLE_S = 1.0
#: Seconds between two looks at its words.
_NAP_S = 1e-4
#: No step takes less: all figures are times, and none is 0.
_LEAST_STEP_S = 1e-8
#: Most seconds of the mean step, in seconds of the 99th percentile: a step that is much longer than all others is a
#: pause of the machine, or too rare to count.
_PAUSE_FACTOR = 2.0
#: Least share of a step's processor time that counts as that of other threads.
_LEAST_HIDDEN = 0.02
#: Parts of an episode that the one under way adds to those that have ended, in the mean: half of one if all have the
#: same length, nothing if every step is equally likely to end it.
_UNDER_WAY = 0.25


def probe(
    subject: Subject,
    budget_s: float,
    show: Callable[[str], None],
) -> Measurement:
    """Measure an env in a worker.

    Args:
        subject: the env.
        budget_s: seconds of the measurement.
        show: called with the stage.

    Raises:
        FactoryError: the factory raised, or returned no env.
        EnvError: the env raised.
        WorkerLost, WorkerTimeout: the worker died, or a call took too long.
    """
    began = time.monotonic()
    patience_s = PATIENCE_S + _PATIENCE_FACTOR * budget_s
    # One process for all of the time: its figures are read.
    subject = replace(
        subject,
        options=replace(
            subject.options,
            on_worker_loss="raise",
            on_env_error="raise",
            recycle_after=None,
            max_worker_memory=None,
        ),
    )
    with subject.start(1, 1, patience_s) as env:
        build_s = further_s = time.monotonic() - began
        one = Probe(env, _SPAN_S)
        first_reset_s = one.read()["reset_s"]
        early = one.memory_after_resets(_RESETS_SHARE * budget_s)
        show("probe: step")
        one.turn("sync")  # caches, lazy imports and compilers warm up
        figures = one.measure_steps(_STEPS_SHARE * budget_s)
        threads = num_threads(one.pid)
        late = one.memory_after_resets(_RESETS_SHARE * budget_s)
        # What it and its helper have once for all workers.
        shared_bytes = late["pss"] - late["dirty"]
        helper = parent_of(one.pid)
        if helper != os.getpid():  # which is the parent in the portable pool
            shared_bytes += memory_of(helper, is_alone=True)["pss"]
        all_of = one.read()
    # A worker counts the step before a reset with the reset.
    resets_s = (
        all_of["reset_s"] - first_reset_s - all_of["ends"] * figures["step_mean_s"]
    )
    reset_mean_s = max(0.0, resets_s / (all_of["resets"] - 1)) * (
        1 - figures["contention"]
    )
    why_alone = "ExecutorOptions(alone=True)" if subject.options.alone else ""
    further_bytes = late["dirty"]
    if not why_alone and build_s + first_reset_s < budget_s:
        is_short = (
            figures["step_mean_s"] < _SHORT_STEP_S and late["dirty"] < _LIGHT_BYTES
        )
        count = _SHORT_ENVS if is_short else 2
        began = time.monotonic()
        show(f"probe: {count} envs")
        try:
            with subject.start(count, 1, patience_s) as env:
                further_s = max(0.0, time.monotonic() - began - build_s) / (count - 1)
                several = Probe(env, _SPAN_S)
                all_bytes = several.memory_after_resets(_RESETS_SHARE * budget_s)[
                    "dirty"
                ]
                further_bytes = max(0, all_bytes - early["dirty"]) // (count - 1)
                if is_short:
                    figures = several.measure_steps(_STEPS_SHARE * budget_s)
        except EnvherdError as error:
            why_alone = f"several in one failed: {error.message.partition(chr(10))[0]}"
    group = plan_slab([env.spec], 1, 1).groups[0]
    return Measurement(
        row_bytes=group.frame.nbytes + sum(leaf.nbytes for leaf in group.inputs),
        is_batch=bool(env.spec.batch_shape),
        build_s=build_s,
        build_further_s=further_s,
        first_reset_s=first_reset_s,
        reset_mean_s=reset_mean_s,
        num_threads=max(0, threads - 1),
        worker_bytes=late["dirty"],
        further_env_bytes=further_bytes,
        shared_bytes=shared_bytes,
        why_alone=why_alone,
        **figures,
    )


class Probe(Driver):
    """Steps the envs of one worker, and reads what the worker and the kernel count of it."""

    @property
    def pid(self) -> int:
        """Process id of the worker."""
        return self.env.engine.pool.pid_of(0)

    def read(self) -> dict[str, Any]:
        """Return what the worker has done and taken so far.

        Returns:
            Numbers: `steps`, `ends`, `resets`. Seconds: `busy_s` in steps and resets, `reset_s` in resets; of all the
            time `cpu_s` on a processor, `delay_s` waiting for one, `hidden_s` on one in other threads. `bins`: the
            histogram of sampled steps, int `[NUM_BINS]`.
        """
        words = self.env.engine.pool.slab.words
        end = time.monotonic() + _IDLE_S
        # A worker counts the time of a command after its answer.
        while words["phase"][0] and time.monotonic() < end:
            time.sleep(_NAP_S)
        cpu_ns, delay_ns, hidden_ns = processor_ns(self.pid)
        return {
            "steps": int(words["env_steps"].sum()),
            "ends": int(words["ends"].sum()),
            "resets": int(words["resets"].sum()),
            "busy_s": int(words["busy_ns"][0]) / 1e9,
            "reset_s": int(words["reset_ns"][0]) / 1e9,
            "cpu_s": cpu_ns / 1e9,
            "delay_s": delay_ns / 1e9,
            "hidden_s": hidden_ns / 1e9,
            "bins": words["step_bins"].copy(),
        }

    def measure_steps(self, seconds: float) -> dict[str, Any]:
        """Step until enough is known; return the attributes of `Measurement` that are of steps."""
        began = time.monotonic()
        before = self.read()
        dirty = memory_of(self.pid)["dirty"]
        while True:
            self.turn("sync")
            made = {key: value - before[key] for key, value in self.read().items()}
            spent_s = time.monotonic() - began
            is_known = (
                made["steps"] >= _ENOUGH_STEPS
                and spent_s >= _ENOUGH_S
                and made["ends"] >= _ENOUGH_EPISODES
            )
            if spent_s >= seconds or is_known:
                break
        figures = step_figures(made)
        grown = max(0, memory_of(self.pid)["dirty"] - dirty - _NOISE_BYTES)
        figures["grown_per_1000_steps_bytes"] = grown * 1000 // made["steps"]
        return figures

    def memory_after_resets(self, seconds: float) -> dict[str, int]:
        """Reset and step for this time, and at least once; return the mean memory after a reset and steps.

        An env's memory may differ by a half from one episode to the next (Melting Pot, by when Lua collects garbage).

        Returns:
            "dirty": private data of the worker. "pss": the same, libraries, and its part of shared memory.
        """
        states: list[dict[str, int]] = []
        end = time.monotonic() + seconds
        while not states or (len(states) < _ENOUGH_RESETS and time.monotonic() < end):
            self._root = self.env.reset()
            self.step()
            states.append(memory_of(self.pid))
        return {
            key: sum(state[key] for state in states) // len(states)
            for key in ("dirty", "pss")
        }


def step_figures(made: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of `Measurement` that are of steps; `step_mean_s` is never 0.

    Args:
        made: steps and what they took; see `Probe.read`.
    """
    steps = made["steps"]
    bins = made["bins"]
    p99_s = quantile(bins, 0.99) or 0.0
    # A worker counts the step before a reset with the reset.
    alone = max(1, steps - made["ends"])
    steps_s = max(made["busy_s"] - made["reset_s"], steps * _LEAST_STEP_S)
    if p99_s:
        steps_s = min(steps_s, _PAUSE_FACTOR * p99_s * alone)
    busy_s = steps_s + made["reset_s"]
    # Between commands the worker also computes, as it looks for the next one, and waits for a processor: it may have
    # waited for longer than it was busy, while the kernel has counted no time on a processor and no step was sampled.
    least_s = max(_LEAST_STEP_S, quantile(bins, 0.1) or 0.0)
    undisturbed_s = min(
        busy_s,
        max(busy_s - made["delay_s"], made["cpu_s"], steps * least_s),
    )
    own_s = min(made["cpu_s"], undisturbed_s)
    hidden_s = made["hidden_s"] if made["hidden_s"] > _LEAST_HIDDEN * own_s else 0.0
    mean_s = steps_s / alone * undisturbed_s / busy_s
    return {
        "steps_measured": steps,
        "step_median_s": quantile(bins, 0.5) or 0.0,
        "step_p99_s": p99_s,
        "step_mean_s": mean_s,
        "cpu_per_step_s": mean_s * (own_s + hidden_s) / undisturbed_s,
        "hidden_cpu_share": hidden_s / max(own_s + hidden_s, 1e-9),
        "contention": 1 - undisturbed_s / busy_s,
        "end_share": (made["ends"] + _UNDER_WAY) / steps if made["ends"] else 0.0,
    }
