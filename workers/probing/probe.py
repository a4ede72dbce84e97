"""The probe: measure one env in a worker, so that settings which cannot fit need not be tried.

Guarantees: the env is run exactly as a worker runs it (built by `Builder`, stepped and reset by `Block`, rows written
to a private slab). The probe sends its results after every stage, so a killed probe has reported the earlier stages. It
ends when it has enough samples, at the latest when its budget is spent plus one step, reset or build.
Does not know: the load of other processes. It measures and sends the time that it waited for a processor.
Platforms: Linux (/proc).
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from envherd.shm.slab import Slab, plan_slab
from envherd.shm.specs import EnvSpec, LeafSpec
from envherd.workers import seeding
from envherd.workers.block.block import Block
from envherd.workers.build import Builder
from envherd.workers.messages import Probe
from envherd.workers.processes import children_cpu_ns, memory_of, num_threads, run_delay_ns
from envherd.workers.protocol import RING, Op, Status, pack
from envherd.workers.random_values import draw
from envherd.workers.reply import Fault

_STEP, _RESET = pack(Op.STEP, RING, 0), pack(Op.RESET, RING, 0)
#: Number of first steps that are not counted: caches, lazy imports and compilers warm up in them.
_WARM_UP_STEPS = 5
#: Samples at most that are sent.
_MOST_SAMPLES = 4096
#: Nanoseconds above which a step or reset is long: then the next one's wait for a processor is also read.
_LONG_NS = 500_000
#: Largest shares of the budget: the first env's steps, its further resets, a further env's steps, its resets.
_STEPS_SHARE, _RESETS_SHARE, _FURTHER_STEPS_SHARE, _FURTHER_RESETS_SHARE = 0.4, 0.15, 0.05, 0.15
#: Least share of the budget for steps, however long building took.
_LEAST_STEPS_SHARE = 0.2
#: Steps, seconds and ended episodes that are enough; and the largest number of steps.
_ENOUGH_STEPS, _ENOUGH_S, _ENOUGH_EPISODES, _MOST_STEPS = 500, 0.3, 2, 20_000
#: Number of resets that is enough, and the largest number.
_ENOUGH_RESETS = 8

Send = Callable[[dict[str, Any]], None]


class Failed(Exception):
    """An env failed; its fault has been reported."""


class Run:
    """One env over its own slab, and the times of what it did.

    Attributes:
        steps: int64 `[3, most]`: wall, the thread's processor time, and waiting for a processor, of each step, in ns.
        num_steps: columns of it that are filled.
        resets: the same three of each reset.
        episodes: steps of each ended episode.
        length: steps of the current one.
    """

    def __init__(self, message: Probe, env_id: int, builder: Builder, send: Send, steps: np.ndarray) -> None:
        seeding.seed_globals(seeding.build_seed(message.root_seed, env_id))
        adapter = builder.build(message.factory, message.env_kwargs)
        self.spec: EnvSpec = adapter.spec
        self.env_id = env_id
        self.block = Block(0, {env_id: adapter}, message.root_seed, self._note, message.block)
        plan = plan_slab([self.spec] * (env_id + 1), 1, 2)  # rows are looked up by id: the last one is this env's
        self._slab = Slab(plan, np.zeros(plan.nbytes, np.uint8))
        self.block.attach(self._slab)
        self._send = send
        self._rng = np.random.default_rng(message.root_seed)
        self._inputs = self._slab.groups[0].inputs
        self._fault: dict[str, Any] | None = None
        self.has_ended = True
        self._is_at_root = True
        self.steps = steps
        self.num_steps = 0
        self._is_long = {_STEP: True, _RESET: True}
        self.resets: list[tuple[int, int, int]] = []
        self.episodes: list[int] = []
        self.length = 0

    def close(self) -> None:
        """Close the env."""
        for slot in self.block.slots.values():
            slot.adapter.close()

    @property
    def times(self) -> np.ndarray:
        """Times of the steps made, int64 `[3, num_steps]`."""
        return self.steps[:, : self.num_steps]

    def reset(self) -> None:
        """Reset the env and keep how long it took."""
        if self.spec.batch_shape:
            self._inputs["reset_mask",][self.env_id] = True
        status, times = self._time(_RESET)
        self.resets.append(times)
        self._check(status)
        self.has_ended, self._is_at_root = False, True
        self.length = 0

    def _time(self, command: int) -> tuple[int, tuple[int, int, int]]:
        """Carry out a command; return how it ended, and ns of wall, processor, and waiting for a processor."""
        execute, env_id = self.block.execute, self.env_id
        delay, is_long = 0, self._is_long[command]
        if is_long:  # reading /proc would flush a short step's caches, and short steps are seldom interrupted
            delay = run_delay_ns()
        cpu = time.thread_time_ns()
        began = time.perf_counter_ns()
        status = execute(env_id, command)
        wall = time.perf_counter_ns() - began
        cpu = time.thread_time_ns() - cpu
        self._is_long[command] = wall > _LONG_NS
        return status, (wall, cpu, run_delay_ns() - delay if is_long else 0)

    def step(self) -> int:
        """Step the env with random legal actions, after a reset if it has ended; record the times.

        Returns:
            Nanoseconds of processor time.
        """
        if self.has_ended:
            self.reset()
        self._draw()
        status, times = self._time(_STEP)
        self.steps[:, self.num_steps] = times
        self.num_steps += 1
        self._check(status)
        self._is_at_root = False
        self.has_ended = bool(self.block.slots[self.env_id].has_ended)
        self.length += 1
        if self.has_ended:
            self.episodes.append(self.length)
        return times[1]

    def step_for(self, seconds: float, least: int = 1, *, until_known: bool = False) -> int:
        """Step until the time is up; return how many steps were made.

        Args:
            seconds: at most, once `least` steps were made.
            least: steps at least.
            until_known: end as soon as there are enough samples.
        """
        began, count = time.monotonic(), 0
        while self.num_steps < self.steps.shape[1]:
            spent_s = time.monotonic() - began
            if count >= least and (spent_s >= seconds or (until_known and self._is_known(count, spent_s))):
                break
            self.step()
            count += 1
        return count

    def _is_known(self, count: int, spent_s: float) -> bool:
        return count >= _ENOUGH_STEPS and spent_s >= _ENOUGH_S and len(self.episodes) >= _ENOUGH_EPISODES

    def forget(self) -> None:
        """Drop the recorded times of steps, but not those of resets."""
        self.num_steps = 0

    def _draw(self) -> None:
        for leaf in (*self.spec.action, *self.spec.state):
            mask = self._mask(leaf)
            if mask is not None:
                value: Any = (self._rng.random(mask.shape) * mask).argmax(-1)
            else:
                value = draw(leaf, self._rng)
            self._inputs[("input", *leaf.key)][self.env_id] = value

    def _mask(self, leaf: LeafSpec) -> np.ndarray | None:
        """Return the env's mask of legal actions, bool `[*leaf.shape, n]`, or None if it has none."""
        name = ("next", *leaf.key[:-1], "action_mask")
        columns = self._slab.groups[0].columns
        if name not in columns or columns[name][0, self.env_id].shape[:-1] != leaf.shape:
            return None
        section = "root" if self._is_at_root else "next"
        mask = columns[(section, *leaf.key[:-1], "action_mask")][0, self.env_id]
        return mask if mask.any() else None

    def _note(self, frame: dict[str, Any]) -> None:
        if frame["kind"] == "fault":
            self._fault = frame

    def _check(self, status: int) -> None:
        if status == Status.FAILED:
            assert self._fault is not None
            self._send(self._fault)
            raise Failed


class Prober:
    """Carries out one `Probe`."""

    def __init__(self, message: Probe, send: Send) -> None:
        self._message = message
        self._send = send
        self._began = time.monotonic()
        self._figures: dict[str, Any] = {"envs": []}
        self._runs: list[Run] = []
        # Allocated and touched before any memory is measured, so it does not count as the env's.
        self._times = np.ones((3, _MOST_STEPS + _WARM_UP_STEPS), np.int64)
        self._builder = Builder(
            message.block.info_keys, message.block.env_type, episode_statistics=message.block.episode_statistics
        )

    def run(self) -> None:
        """Measure and report; if an env raises, report the fault instead."""
        try:
            self._figures["base"] = memory_of(os.getpid())
            self._figures["threads_before"] = num_threads(os.getpid())
            self._tell("build")
            self._measure_first()
            self._measure_further()
            self._tell("done", is_last=True)
        except Failed:
            pass
        finally:
            for run in self._runs:
                try:
                    run.close()
                except BaseException as error:  # the env has been measured already
                    self._figures["close_error"] = f"{type(error).__name__}: {error}"

    def _budget(self, share: float) -> float:
        return share * self._message.budget_s

    def _left(self) -> float:
        return self._message.budget_s - (time.monotonic() - self._began)

    def _tell(self, stage: str, *, is_last: bool = False) -> None:
        self._send({"kind": "probed", "stage": stage, "figures": self._figures, "is_last": is_last})

    def _build(self, env_id: int) -> Run:
        gc.collect()
        before = memory_of(os.getpid())
        began = time.monotonic()
        try:
            run = Run(self._message, env_id, self._builder, self._send, self._times)
        except BaseException as error:  # a factory may raise anything; the parent decides
            self._send(Fault.from_exception(env_id, "build", error).to_plain())
            raise Failed from None
        self._runs.append(run)
        self._figures["envs"].append({"build_s": time.monotonic() - began, "before": before})
        if env_id == 0:
            self._figures["spec"] = run.spec.to_plain()
            self._figures["is_alone"] = run.block.slots[0].adapter.is_alone
        return run

    def _measure_first(self) -> None:
        run = self._build(0)
        self._tell("reset")
        run.reset()
        self._tell("step")
        run.step_for(self._budget(_STEPS_SHARE) / 5, _WARM_UP_STEPS, until_known=True)
        run.forget()
        entry = self._figures["envs"][0]
        gc.collect()
        entry["warm"] = memory_of(os.getpid())
        pid = os.getpid()
        process, main_cpu = _cpu_ns(), time.thread_time_ns()
        delay, began = run_delay_ns(), time.perf_counter_ns()
        seconds = min(self._budget(_STEPS_SHARE), max(self._left() * 0.6, self._budget(_LEAST_STEPS_SHARE)))
        steps = run.step_for(seconds, until_known=True)
        delay, span_ns = run_delay_ns() - delay, time.perf_counter_ns() - began
        main_cpu, process = time.thread_time_ns() - main_cpu, _cpu_ns() - process
        gc.collect()
        entry["stepped"] = memory_of(pid)
        self._figures["steps"] = {
            "count": steps,
            "episodes": np.array(run.episodes, np.int64),
            "under_way": 0 if run.has_ended else run.length,
            "main_cpu_ns": main_cpu,
            "process_cpu_ns": process,
            "times": _thinned(run.times).copy(),
            "contention": min(1.0, delay / max(1, span_ns)),
            "clock_ns": _clock_cost(),
        }
        self._figures["threads"] = num_threads(pid)
        self._figures["resets"] = np.array(run.resets, np.int64)
        self._tell("resets")
        entry["ready"] = _reset_for(run, min(self._budget(_RESETS_SHARE), max(self._left() * 0.5, 0.0)))
        self._figures["resets"] = np.array(run.resets, np.int64)

    def _measure_further(self) -> None:
        """Build a second env in this process, even beyond the budget: only it shows the memory of a further env."""
        cost = self._figures["envs"][-1]["build_s"] + self._runs[-1].resets[0][0] / 1e9
        if self._message.num_envs < 2 or cost > self._message.budget_s or self._figures["is_alone"]:
            return
        self._tell("env 2")
        run = self._build(1)
        run.step_for(self._budget(_FURTHER_STEPS_SHARE), until_known=True)
        entry = self._figures["envs"][-1]
        seconds = min(self._budget(_FURTHER_RESETS_SHARE), self._left())
        entry["ready"] = _reset_for(run, seconds) if seconds > 0 else memory_of(os.getpid())


def _cpu_ns() -> int:
    """Return nanoseconds of processor time of this process, all its threads, and what it has started."""
    return time.process_time_ns() + children_cpu_ns(os.getpid())


def _reset_for(run: Run, seconds: float) -> dict[str, int]:
    """Reset an env for this time, and at least once; return the mean memory of this process after a reset.

    An env's memory may differ by a half from one episode to the next (Melting Pot, by when Lua collects garbage).
    """
    began, states = time.monotonic(), list[dict[str, int]]()
    while not states or (len(states) < _ENOUGH_RESETS and time.monotonic() - began < seconds):
        run.reset()
        gc.collect()
        states.append(memory_of(os.getpid()))
    return {key: sum(state[key] for state in states) // len(states) for key in states[0]}


def _thinned(times: np.ndarray) -> np.ndarray:
    """Return at most `_MOST_SAMPLES` columns, evenly chosen."""
    count = times.shape[1]
    return times[:, np.linspace(0, count - 1, min(count, _MOST_SAMPLES)).astype(int)]


def _clock_cost() -> int:
    """Return the nanoseconds of processor time that reading the clocks adds to a step."""
    costs = []
    for _ in range(200):
        began = time.thread_time_ns()
        time.perf_counter_ns()
        time.perf_counter_ns()
        costs.append(time.thread_time_ns() - began)
    return int(np.median(costs))
