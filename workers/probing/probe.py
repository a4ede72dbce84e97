"""The probe: what a worker measures of an env, so that it can be said how many would fit and how fast they go.

Guarantees: envs are run exactly as a worker runs them (built by `Builder`, stepped and reset by `Block`, rows
written to a slab of its own); what is known so far is sent after every stage, so that a probe that is killed
has still said something; it stops at its budget, late by one step, reset or build at most, and by what is measured
last (steps in turn, python's lock: 0.15 of the budget); by half of the budget more where an env's memory differs from
one episode to the next.
Does not know: what other processes cost. Times that the machine spent on others are measured and sent along.
Platforms: Linux (/proc).
"""

from __future__ import annotations

import gc
import os
import sys
import threading
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
#: Steps that are not counted: caches, lazy imports and compilers warm up in them.
_WARM_UP_STEPS = 5
#: Steps at most: more would say nothing new, and their times are kept.
_MOST_STEPS = 20_000
#: Samples at most that are sent.
_MOST_SAMPLES = 4096
#: Nanoseconds from which a step or reset is long: the next is asked how long it waited for a processor.
_LONG_NS = 500_000
#: Shares of the budget: the first env's steps; then its further resets; then each further env; then all in turn.
# However long building took, steps get the least share.
_LEAST_STEPS_SHARE = 0.2
_STEPS_SHARE, _RESETS_SHARE, _FURTHER_SHARE, _TOGETHER_SHARE, _GIL_SHARE = 0.4, 0.15, 0.15, 0.1, 0.05
_MOST_RESETS = 20
#: An env whose memory differs from one episode to the next is reset until its mean is known so well (standard error
#: over mean, or bytes), or this share of the budget is used up.
_WELL_KNOWN, _WELL_KNOWN_BYTES, _LEAST_STATES, _VARYING_SHARE = 0.05, 2**18, 3, 0.5
#: Seconds for which a worker pauses between batches, where steps are so long that it does not spin meanwhile.
_PAUSE_S, _SPINS_BELOW_S = 1e-3, 0.2e-3
#: Steps of each env in a block of steps in turn, at least and at most, and blocks at least.
_LEAST_TOGETHER, _MOST_TOGETHER, _LEAST_BLOCKS = 3, 20, 3
#: Seconds between the wake-ups of the thread that looks whether an env lets other threads run.
_TICK_S = 50e-6
#: Seconds after which Python takes the lock from an env that holds it, while that is watched.
_SWITCH_S = 0.2

Send = Callable[[dict[str, Any]], None]


class Failed(Exception):
    """An env failed; its fault has been reported."""


class Run:
    """One env over a slab of its own, and the times of what it did.

    Attributes:
        steps: int64 `[3, most]`: wall, the thread's processor time, and waiting for a processor, of each step, in ns.
        num_steps: columns of it that are filled.
        resets: the same three of each reset.
        episodes: how many steps each of the episodes had that have ended.
        length: how many the one under way has.
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
        if is_long:  # a look at /proc costs a short step its caches, and short steps are seldom interrupted
            delay = run_delay_ns()
        cpu = time.thread_time_ns()
        began = time.perf_counter_ns()
        status = execute(env_id, command)
        wall = time.perf_counter_ns() - began
        cpu = time.thread_time_ns() - cpu
        self._is_long[command] = wall > _LONG_NS
        return status, (wall, cpu, run_delay_ns() - delay if is_long else 0)

    def step(self) -> int:
        """Step the env with random legal actions, after a reset if it has ended; keep how long that took.

        Returns:
            ns of the processor.
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

    def step_for(self, seconds: float, most: int, least: int = 1) -> int:
        """Step until the time is up; return how many steps were made."""
        end = time.monotonic() + seconds
        count = 0
        while self.num_steps < self.steps.shape[1] and (count < least or (count < most and time.monotonic() < end)):
            self.step()
            count += 1
        return count

    def forget(self) -> None:
        """Drop the times of what was done so far, but those of resets."""
        self.num_steps = 0

    def _draw(self) -> None:
        for leaf in (*self.spec.action, *self.spec.state):
            mask = self._mask(leaf)
            if mask is not None:
                value: Any = (self._rng.random(mask.shape) * mask).argmax(-1)
            else:
                value = draw(leaf, self._rng)
            self._inputs["input", *leaf.key][self.env_id] = value

    def _mask(self, leaf: LeafSpec) -> np.ndarray | None:
        """Return what an env says of which actions are legal now, bool `[*leaf.shape, n]`, if it does."""
        name = ("next", *leaf.key[:-1], "action_mask")
        columns = self._slab.groups[0].columns
        if name not in columns or columns[name][0, self.env_id].shape[:-1] != leaf.shape:
            return None
        section = "root" if self._is_at_root else "next"
        mask = columns[section, *leaf.key[:-1], "action_mask"][0, self.env_id]
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
        # Touched, and there before any memory is measured: none of the env's.
        self._times = np.ones((3, _MOST_STEPS + _WARM_UP_STEPS), np.int64)
        self._builder = Builder(message.block.info_keys, message.block.env_type)

    def run(self) -> None:
        """Measure, and report; what an env raises is reported instead."""
        try:
            self._figures["base"] = memory_of(os.getpid())
            self._figures["threads_before"] = num_threads(os.getpid())
            self._tell("build")
            first = self._measure_first()
            self._measure_further()
            self._measure_together()
            self._watch_gil(first)
            self._tell("done", is_last=True)
        except Failed:
            pass
        finally:
            for run in self._runs:
                try:
                    run.close()
                except BaseException as error:  # an env that cannot be closed has been measured all the same
                    self._figures["close_error"] = f"{type(error).__name__}: {error}"

    def _budget(self, share: float) -> float:
        return share * self._message.budget_s

    def _left(self) -> float:
        return self._message.budget_s - (time.monotonic() - self._began)

    def _tell(self, stage: str, *, is_last: bool = False) -> None:
        share = min(1.0, (time.monotonic() - self._began) / self._message.budget_s)
        frame = {"kind": "probed", "stage": stage, "share": share, "figures": self._figures, "is_last": is_last}
        self._send(frame)

    def _build(self, env_id: int) -> Run:
        gc.collect()
        before = memory_of(os.getpid())
        modules = set(sys.modules)
        began, cpu = time.monotonic(), _cpu_ns()
        try:
            run = Run(self._message, env_id, self._builder, self._send, self._times)
        except BaseException as error:  # a factory may raise anything; the parent decides
            self._send(Fault.from_exception(env_id, "build", error).to_plain())
            raise Failed from None
        self._runs.append(run)
        built_s = time.monotonic() - began
        new = {name.partition(".")[0] for name in set(sys.modules) - modules}
        self._figures["envs"].append(
            {
                "build_s": built_s,
                "build_cpu_s": (_cpu_ns() - cpu) / 1e9,
                "before": before,
                "imported": sorted(name for name in new if _is_package(name)),
            }
        )
        if env_id == 0:
            self._figures["spec"] = run.spec.to_plain()
        return run

    def _measure_first(self) -> Run:
        run = self._build(0)
        self._tell("reset")
        run.reset()
        self._tell("step")
        run.step_for(self._budget(_STEPS_SHARE) / 5, _WARM_UP_STEPS)
        run.forget()
        entry = self._figures["envs"][0]
        gc.collect()
        entry["warm"] = memory_of(os.getpid())
        pid = os.getpid()
        process, main_cpu = _cpu_ns(), time.thread_time_ns()
        delay, began = run_delay_ns(), time.perf_counter_ns()
        seconds = min(self._budget(_STEPS_SHARE), max(self._left() * 0.6, self._budget(_LEAST_STEPS_SHARE)))
        steps = self._step_and_tell(run, seconds)
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
        entry["ready"] = self._measure_resets(run)
        return run

    def _step_and_tell(self, run: Run, seconds: float) -> int:
        """Step for so long, saying now and then how far it is."""
        steps = run.step_for(seconds / 4, _MOST_STEPS // 4)
        for _ in range(3):
            self._tell("step")
            steps += run.step_for(seconds / 4, _MOST_STEPS // 4, least=0)
        return steps

    def _measure_resets(self, run: Run) -> dict[str, int]:
        """Reset some more, so that there are later resets to speak of, and see what memory they take; return that."""
        gc.collect()
        before = memory_of(os.getpid())
        num_resets = len(run.resets)
        most_s = max(self._left() * 0.5, 0.0)
        typical = _reset_for(run, min(self._budget(_RESETS_SHARE), most_s), most_s, self._figures["base"])
        grown_bytes = memory_of(os.getpid())["uss"] - before["uss"]
        self._figures["resets"] = np.array(run.resets, np.int64)
        self._figures["forced_resets"] = {"count": len(run.resets) - num_resets, "grown_bytes": grown_bytes}
        return typical

    def _measure_further(self) -> None:
        """Build further envs in this process, for their memory."""
        for env_id in range(1, self._message.num_envs):
            cost = self._figures["envs"][-1]["build_s"] + self._runs[-1].resets[0][0] / 1e9
            # A second env is worth being late for: from the first alone nobody knows what the others add.
            if (
                cost > (self._message.budget_s if env_id == 1 else self._left())
                or self._runs[0].block.slots[0].adapter.is_alone
            ):
                return
            self._tell(f"env {env_id + 1}")
            run = self._build(env_id)
            run.step_for(self._budget(_FURTHER_SHARE) / 2, 100)
            entry = self._figures["envs"][-1]
            varying_s = self._budget(_VARYING_SHARE) if env_id == 1 else self._left()
            seconds = min(self._budget(_FURTHER_SHARE), self._left())
            entry["ready"] = _reset_for(run, seconds, varying_s, entry["before"])

    def _measure_together(self) -> None:
        """Measure how many times as long a step takes in a worker as it does in a loop over one env.

        A worker pauses while the caller has its turn, and steps several envs in turn: each finds the processor's caches
        full of what others needed. All are compared in short blocks that follow each other, since a machine that others
        use changes its speed.
        """
        count, typical_s = len(self._runs), float(np.median(self._figures["steps"]["times"][0])) / 1e9
        pause_s = _PAUSE_S if typical_s > _SPINS_BELOW_S else 0.0
        seconds = self._budget(_TOGETHER_SHARE)
        each = min(_MOST_TOGETHER, int(seconds / (_LEAST_BLOCKS * (3 * count * typical_s + 2 * pause_s + 1e-9))))
        if each < _LEAST_TOGETHER or self._runs[0].block.slots[0].adapter.is_alone:
            return
        self._tell("together")
        for run in self._runs:
            run.steps = np.ones((3, 3 * each), np.int64)
        ratios, end = list[tuple[float, float]](), time.monotonic() + seconds
        while len(ratios) < _LEAST_BLOCKS or time.monotonic() < end:
            for run in self._runs:
                run.forget()
            loops = [run.step() for run in self._runs for _ in range(each)]
            paused, together = (_in_turn(runs, each, pause_s) for runs in (self._runs[:1], self._runs))
            loop = max(1.0, float(np.median(loops)))
            ratios.append((paused / loop, together / loop))
        self._runs[0].steps = self._times
        paused_factor, factor = np.median(ratios, axis=0).tolist()
        self._figures["together"] = {"envs": count, "paused": paused_factor, "factor": factor}

    def _watch_gil(self, run: Run) -> None:
        """Measure in which share of a step other Python threads could run."""
        self._tell("gil")
        ticker = _Ticker()
        interval = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_S)
        try:
            ticker.start()
            rate = ticker.rate_of(lambda: time.sleep(0.02))
            if run.has_ended:
                run.reset()
            stepped = ticker.rate_of(lambda: run.step_for(min(self._budget(_GIL_SHARE), 0.25), 100, least=1))
        finally:
            ticker.stop()
            sys.setswitchinterval(interval)
        self._figures["gil_free_share"] = min(1.0, stepped / rate) if rate > 0 else None


class _Ticker(threading.Thread):
    """Counts how often a thread gets to run."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._is_over = False
        self._ticks = 0

    def run(self) -> None:
        while not self._is_over:
            self._ticks += 1
            time.sleep(_TICK_S)

    def rate_of(self, call: Callable[[], Any]) -> float:
        """Return ticks per second while something is called."""
        before, began = self._ticks, time.perf_counter()
        call()
        return (self._ticks - before) / (time.perf_counter() - began)

    def stop(self) -> None:
        self._is_over = True
        self.join()


def _cpu_ns() -> int:
    """Return nanoseconds of processor time of this process, all its threads, and what it has started."""
    return time.process_time_ns() + children_cpu_ns(os.getpid())


def _is_package(name: str) -> bool:
    """Return whether a module is somebody's that can be imported by name: not python's own, ours or a script's."""
    if name in sys.stdlib_module_names or name.startswith("_") or name in ("envherd", "builtins"):
        return False
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return spec is not None and spec.submodule_search_locations is not None


def _reset_for(run: Run, seconds: float, most_s: float, before: dict[str, int]) -> dict[str, int]:
    """Reset an env for so long, and at least once; return the mean memory of this process after a reset.

    What an env takes may differ by a half from one episode to the next (Melting Pot, by when Lua collects garbage).
    Then it is reset until the mean is known well.

    Args:
        run: the env's.
        seconds: if the mean is known well by then.
        most_s: else.
        before: memory of this process before the env was there.
    """
    began, states, is_enough = time.monotonic(), list[dict[str, int]](), False
    while not is_enough:
        run.reset()
        gc.collect()
        states.append(memory_of(os.getpid()))
        is_known = _is_well_known([state["dirty"] - before["dirty"] for state in states])
        is_enough = len(states) == _MOST_RESETS or time.monotonic() - began >= (seconds if is_known else most_s)
    return {key: sum(state[key] for state in states) // len(states) for key in states[0]}


def _is_well_known(values: list[int]) -> bool:
    """Return whether the mean of some values is known well enough for them to be all."""
    if len(values) < _LEAST_STATES:
        return False
    error = float(np.std(values, ddof=1)) / len(values) ** 0.5
    return error <= max(_WELL_KNOWN_BYTES, _WELL_KNOWN * abs(float(np.mean(values))))


def _in_turn(runs: list[Run], num_rounds: int, pause_s: float) -> float:
    """Step envs in turn, pausing before each round; return the typical ns of the processor for a step."""
    rounds: list[float] = []
    for _ in range(num_rounds):
        if pause_s:
            time.sleep(pause_s)
        rounds.append(sum(run.step() for run in runs) / len(runs))
    return float(np.median(rounds))


def _thinned(times: np.ndarray) -> np.ndarray:
    """Return at most `_MOST_SAMPLES` columns, evenly chosen."""
    count = times.shape[1]
    return times[:, np.linspace(0, count - 1, min(count, _MOST_SAMPLES)).astype(int)]


def _clock_cost() -> int:
    """Return nanoseconds of the processor's time that reading the clocks adds to a step's."""
    costs = []
    for _ in range(200):
        began = time.thread_time_ns()
        time.perf_counter_ns()
        time.perf_counter_ns()
        costs.append(time.thread_time_ns() - began)
    return int(np.median(costs))
