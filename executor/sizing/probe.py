"""The probe: measure one env in an executor of one worker, and what further ones add in one of several envs.

Guarantees: no env is built in this process. Times are those of the worker, from its words in the slab; processor time
and memory are the kernel's figures of its process. A probe ends when it has enough samples, at the latest when its
budget is spent plus one step, reset or start of an executor.
Does not know: the load of other processes. It measures how long the worker waited for a processor.
Platforms: Linux (/proc).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from envherd.executor.batched import BatchedEnv
from envherd.executor.machine.gpus import memory_used_by
from envherd.executor.monitor.statistics import quantile
from envherd.executor.sizing.driving import RandomActions, Subject
from envherd.executor.sizing.measurement import Measurement, share_of_ends, without_pause
from envherd.executor.sizing.settings import Setting
from envherd.shm.slab import plan_slab
from envherd.shm.specs import EnvSpec
from envherd.workers.errors import EnvherdError
from envherd.workers.processes import descendants, memory_of, num_threads, parent_of, processor_ns

#: Called with the current activity and the used share of the budget.
Progress = Callable[[str, float], None]

#: Shares of the budget for uncounted steps (caches, lazy imports and compilers warm up in them), for steps, for
#: the resets before and after them, and for those of two envs.
_WARM_UP_SHARE, _STEPS_SHARE, _RESETS_SHARE = 0.02, 0.4, 0.08
#: Uncounted steps at least.
_WARM_UP_STEPS = 5
#: Steps, seconds and ended episodes that are enough; and a number of resets.
_ENOUGH_STEPS, _ENOUGH_S, _ENOUGH_EPISODES, _ENOUGH_RESETS = 500, 0.2, 2, 8
#: Steps that take less are measured again with this number of envs in the worker: one after the other, as in every
#: executor of such envs. A worker that is woken for each step has cold caches (CartPole on one processor: 37 us, with
#: eight envs 23 us; 2026-11-27).
#: That is not done with envs that take more memory than this: eight might be too many for the machine.
_SHORT_STEP_S, _SHORT_ENVS, _LIGHT_BYTES = 0.2e-3, 8, 128 * 2**20
#: A call that takes this many budgets longer, plus this many seconds, counts as hanging.
_PATIENCE_FACTOR, _PATIENCE_S = 4.0, 30.0
#: Bytes by which a process may grow because of Python itself.
_NOISE_BYTES = 64 * 1024
#: Most seconds until a worker has counted its last command, and seconds between looks.
_IDLE_S, _NAP_S = 1.0, 1e-4
#: No step takes less: all figures are times, and none is 0.
_LEAST_STEP_S = 1e-8
#: Least share of a step's processor time that counts as that of other threads.
_LEAST_HIDDEN = 0.02


def probe(subject: Subject, budget_s: float, progress: Progress) -> Measurement:
    """Measure an env in a worker.

    Args:
        subject: the env.
        budget_s: seconds of the measurement.
        progress: called with the stage and the used share of the budget.

    Raises:
        FactoryError: the factory raised, or returned no env.
        EnvError: the env raised.
        WorkerLost, WorkerTimeout: the worker died, or a call took too long.
    """
    began = time.monotonic()
    # One process for all of the time: its figures are read.
    options = replace(
        subject.options, on_worker_loss="raise", on_env_error="raise", recycle_after=None, max_worker_memory=None
    )
    subject = replace(subject, options=options)

    def show(stage: str) -> None:
        progress(stage, min(1.0, (time.monotonic() - began) / budget_s))

    def start(num_envs: int) -> BatchedEnv:
        show("build" if num_envs == 1 else f"{num_envs} envs")
        return subject.start(Setting(num_envs=num_envs, num_workers=1), _PATIENCE_S + _PATIENCE_FACTOR * budget_s)

    with start(1) as env:
        build_s = time.monotonic() - began
        one = _Env(env)
        show("reset")
        early = one.memory_after_resets(_RESETS_SHARE * budget_s)
        show("step")
        one.step_for(_WARM_UP_SHARE * budget_s, _WARM_UP_STEPS)
        one.episodes.clear()
        dirty = memory_of(one.pid)["dirty"]
        figures = one.measure_steps(_STEPS_SHARE * budget_s)
        grown = max(0, memory_of(one.pid)["dirty"] - dirty - _NOISE_BYTES)
        steps, episodes, under_way = figures["steps_measured"], np.array(one.episodes, np.int64), one.length
        threads = num_threads(one.pid)
        show("reset")
        late = one.memory_after_resets(_RESETS_SHARE * budget_s)
        gpu_bytes = memory_used_by(descendants(one.pid))
    why_alone = "ExecutorOptions(alone=True)" if options.alone else ""
    further_s, further_bytes = build_s, late["dirty"]
    if not why_alone and build_s + one.resets_s[0] < budget_s:
        is_short = figures["step_mean_s"] < _SHORT_STEP_S and late["dirty"] < _LIGHT_BYTES
        began_further = time.monotonic()
        count = _SHORT_ENVS if is_short else 2
        try:
            with start(count) as env:
                further_s = max(0.0, time.monotonic() - began_further - build_s) / (count - 1)
                several = _Env(env)
                all_bytes = several.memory_after_resets(_RESETS_SHARE * budget_s)["dirty"]
                further_bytes = max(0, all_bytes - early["dirty"]) // (count - 1)
                if is_short:
                    figures = several.measure_steps(_STEPS_SHARE * budget_s)
        except EnvherdError as error:
            why_alone = f"several in one failed: {error.message.partition(chr(10))[0]}"
    return Measurement(
        spec=one.spec,
        build_s=build_s,
        build_further_s=further_s,
        first_reset_s=one.resets_s[0],
        reset_median_s=float(np.median(one.resets_s[1:] or one.resets_s)),
        num_threads=max(0, threads - 1),
        end_share=share_of_ends(episodes, under_way),
        episode_steps=int(episodes[0]) if len(set(episodes.tolist())) == 1 else 0,
        worker_bytes=late["dirty"],
        further_env_bytes=further_bytes,
        shared_bytes=late["shared"],
        grown_per_1000_steps_bytes=int(grown * 1000 / steps),
        row_bytes=row_bytes(one.spec),
        gpu_bytes=gpu_bytes,
        why_alone=why_alone,
        resets_s=np.array(one.resets_s),
        **figures,
    )


class _Env:
    """The envs of one worker, stepped with random actions; all are reset when one ends.

    Attributes:
        pid: of the worker.
        resets_s: seconds of each reset.
        episodes: steps of each episode that ended.
        length: steps of the current one.
    """

    def __init__(self, env: BatchedEnv) -> None:
        self._env, self._actions = env, RandomActions(env)
        pool = env.engine.pool
        self.spec, self.pid, self._words = pool.specs[0], pool.pid_of(0), pool.slab.words
        self.resets_s: list[float] = []
        self.episodes: list[int] = []
        self.length = 0
        self._in_resets = np.zeros(3, np.int64)

    def reset(self) -> None:
        """Reset; note how long it took, and the processor time."""
        before, cpu = int(self._words["reset_ns"][0]), processor_ns(self.pid)
        self._env.reset()
        self.resets_s.append((int(self._words["reset_ns"][0]) - before) / 1e9)
        self._in_resets += np.subtract(processor_ns(self.pid), cpu)
        self.length = 0

    def step_for(self, seconds: float, least: int) -> None:
        """Make at least `least` steps, and more until the time is up or enough is known."""
        began, count = time.monotonic(), 0
        while True:
            spent_s = time.monotonic() - began
            is_known = count >= _ENOUGH_STEPS and spent_s >= _ENOUGH_S and len(self.episodes) >= _ENOUGH_EPISODES
            if count >= least and (spent_s >= seconds or is_known):
                return
            ends = self._words["ends"].sum()
            self._env.step(self._actions.set_in(self._env.current()))
            count += 1
            self.length += 1
            if self._words["ends"].sum() != ends:
                self.episodes.append(self.length)
                self.reset()

    def measure_steps(self, seconds: float) -> dict[str, Any]:
        """Step until enough is known; return the attributes of `Measurement` that are of steps."""
        before, bins_before = self._read()
        self.step_for(seconds, 1)
        after, bins = self._read()
        return step_figures(after - before, bins - bins_before)

    def _read(self) -> tuple[np.ndarray, np.ndarray]:
        """Return what steps have taken so far, int `[5]`, and their histogram.

        The first are the number of steps, and ns: busy, on a processor, waiting for one, on one in other threads.
        """
        words = self._words
        end = time.monotonic() + _IDLE_S
        while words["phase"][0] and time.monotonic() < end:  # a worker counts the time of a command after its answer
            time.sleep(_NAP_S)
        counts = words["env_steps"].sum(), words["busy_ns"][0] - words["reset_ns"][0]
        times = np.subtract(processor_ns(self.pid), self._in_resets)
        return np.array([*counts, *times]), words["step_bins"].copy()

    def memory_after_resets(self, seconds: float) -> dict[str, int]:
        """Reset and step for this time, and at least once; return the mean memory after a reset and a step.

        An env's memory may differ by a half from one episode to the next (Melting Pot, by when Lua collects garbage).

        Returns:
            "dirty": private data of the worker; "shared": what it and its helper have once for all workers.
        """
        began, states = time.monotonic(), list[dict[str, int]]()
        while not states or (len(states) < _ENOUGH_RESETS and time.monotonic() - began < seconds):
            self.reset()
            self.step_for(0.0, 1)
            states.append(memory_of(self.pid))
        mean = {key: sum(state[key] for state in states) // len(states) for key in states[0]}
        helper = parent_of(self.pid)  # of a worker of the portable pool, this process
        helper_pss = 0 if helper == os.getpid() else memory_of(helper, is_alone=True)["pss"]
        return {"dirty": mean["dirty"], "shared": helper_pss + mean["pss"] - mean["dirty"]}


def step_figures(counts: np.ndarray, bins: np.ndarray) -> dict[str, Any]:
    """Return the attributes of `Measurement` that are of steps; `step_mean_s` is never 0.

    Args:
        counts: int `[5]`, what the steps have taken; see `_Env._read`.
        bins: their histogram.
    """
    steps = int(counts[0])
    busy_s, cpu_s, delay_s, hidden_s = (counts[1:] / 1e9).tolist()
    bins, busy_s = without_pause(bins, busy_s)
    busy_s = max(busy_s, steps * _LEAST_STEP_S)
    # Between commands the worker also computes, as it looks for the next one, and waits for a processor: it may have
    # waited for longer than it was busy, while the kernel has counted no time on a processor and no step was sampled.
    least_s = max(_LEAST_STEP_S, quantile(bins, 0.1) or 0.0)
    undisturbed_s = min(busy_s, max(busy_s - delay_s, cpu_s, steps * least_s))
    own_s = min(cpu_s, undisturbed_s)
    hidden_s = hidden_s if hidden_s > _LEAST_HIDDEN * own_s else 0.0
    return {
        "steps_measured": steps,
        "step_median_s": quantile(bins, 0.5) or 0.0,
        "step_p99_s": quantile(bins, 0.99) or 0.0,
        "step_mean_s": undisturbed_s / steps,
        "cpu_per_step_s": (own_s + hidden_s) / steps,
        "hidden_cpu_share": hidden_s / max(own_s + hidden_s, 1e-9),
        "contention": 1 - undisturbed_s / max(busy_s, 1e-9),
        "step_bins": bins,
    }


def row_bytes(spec: EnvSpec) -> int:
    """Return bytes of one env in a batch: its transition, its next root, its inputs."""
    plan = plan_slab([spec], 1, 1)
    return plan.groups[0].frame.nbytes + sum(field.nbytes for field in plan.groups[0].inputs)
