"""What a parallel step costs besides the env: envs that do nothing, stepped by us and by others, in one run.

All pools are alive at the same time and take turns in short slots, in random order, so that whatever
else the machine does hits all of them alike. See benchmarks/README.md for how to read the numbers.

Run: python benchmarks/step_overhead.py [--quick]
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import os
import platform
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import psutil
import torch
from gymnasium.spaces import Box, Discrete
from rich.console import Console
from rich.table import Table

from envherd.executor import ParallelEnv, SerialEnv

NUM_ENVS, NUM_WORKERS = 8, 2
OURS, GYMNASIUM, TORCHRL = "envherd", "Gymnasium AsyncVectorEnv", "TorchRL ParallelEnv"
#: How many times the throughput of a peer is wanted, on the tiny env.
TARGETS = {GYMNASIUM: 8.0, TORCHRL: 30.0}
ROLLOUT_STEPS = 64
NOISY_SHARE = 0.1  # a slot is noisy if others used more than this share of the machine meanwhile
RESULTS = Path(__file__).parent / "results"


class Idle(gymnasium.Env[np.ndarray, Any]):
    """An env that costs nothing: always the same observation, never an end."""

    action_space = Discrete(2)
    observation: np.ndarray

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Return the observation."""
        super().reset(seed=seed, options=options)
        return self.observation, {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:  # noqa: ARG002  # it does nothing
        """Return the observation."""
        return self.observation, 0.0, False, False, {}


class Tiny(Idle):
    """Four floats."""

    observation_space = Box(-1.0, 1.0, (4,), np.float32)
    observation = np.zeros(4, np.float32)


class Image(Idle):
    """Four stacked frames of 84 x 84 bytes."""

    observation_space = Box(0, 255, (84, 84, 4), np.uint8)
    observation = np.zeros((84, 84, 4), np.uint8)


WORKLOADS: dict[str, type[Idle]] = {"tiny": Tiny, "image": Image}

#: One call, what ends the pool, and how many batches of `NUM_ENVS` steps a call makes.
Pool = tuple[Callable[[], Any], Callable[[], None], int]


def _envherd(make_env: Callable[[], Idle], *, copy: bool = True, is_serial: bool = False) -> Pool:
    kind: Any = SerialEnv if is_serial else ParallelEnv
    env = kind(NUM_ENVS, make_env, num_workers=NUM_WORKERS, seed=0, copy=copy)
    actions = torch.zeros(NUM_ENVS, dtype=torch.int64)
    root = env.reset()

    def step() -> None:
        nonlocal root
        _, root = env.step_and_maybe_reset(root.set("action", actions))

    return step, env.close, 1


def _envherd_rollout(make_env: Callable[[], Idle]) -> Pool:
    env = ParallelEnv(NUM_ENVS, make_env, num_workers=NUM_WORKERS, seed=0)
    actions = torch.zeros(NUM_ENVS, dtype=torch.int64)
    env.reset()

    def collect() -> None:
        env.rollout(
            ROLLOUT_STEPS, lambda root: root.set("action", actions), auto_reset=False, break_when_any_done=False
        )

    return collect, env.close, ROLLOUT_STEPS


def _gymnasium(make_env: Callable[[], Idle]) -> Pool:
    env = gymnasium.vector.AsyncVectorEnv([make_env] * NUM_ENVS)
    actions = np.zeros(NUM_ENVS, np.int64)
    env.reset()
    return lambda: env.step(actions), env.close, 1


def _sb3(make_env: Callable[[], Idle]) -> Pool:
    from stable_baselines3.common.vec_env import SubprocVecEnv

    env = SubprocVecEnv([make_env] * NUM_ENVS, start_method="fork")  # others only start more slowly
    actions = np.zeros(NUM_ENVS, np.int64)
    env.reset()
    return lambda: env.step(actions), env.close, 1


def _torchrl(make_env: Callable[[], Idle]) -> Pool:
    from torchrl.envs import GymWrapper
    from torchrl.envs import ParallelEnv as TorchRLParallelEnv

    make = functools.partial(_wrap_for_torchrl, GymWrapper, make_env)
    env = TorchRLParallelEnv(NUM_ENVS, make, mp_start_method="fork")  # others only start more slowly
    actions = torch.zeros(NUM_ENVS, dtype=torch.int64)
    root = env.reset()

    def step() -> None:
        nonlocal root
        _, root = env.step_and_maybe_reset(root.set("action", actions))

    return step, env.close, 1


def _wrap_for_torchrl(wrapper: Any, make_env: Callable[[], Idle]) -> Any:
    return wrapper(make_env(), categorical_action_encoding=True)


#: Those that fork this process come first, while it is small and has one thread.
CONTENDERS: dict[str, Callable[[Callable[[], Idle]], Pool]] = {
    GYMNASIUM: _gymnasium,
    TORCHRL: _torchrl,
    "SB3 SubprocVecEnv": _sb3,
    OURS: _envherd,
    "envherd copy=False": functools.partial(_envherd, copy=False),
    f"envherd rollout({ROLLOUT_STEPS})": _envherd_rollout,
    "envherd SerialEnv": functools.partial(_envherd, is_serial=True),
}


class Plan(NamedTuple):
    """How much to measure."""

    num_rounds: int
    slot_s: float
    num_tries: int


class Slot(NamedTuple):
    """What one slot of one pool took.

    Attributes:
        batch_us: wall microseconds per batch, median.
        steps_per_s: env steps per second of wall time.
        cpu_us: processor microseconds per env step, this process and all of the pool's together.
        others: share of the machine that was used by processes that are not ours, 0..1.
    """

    batch_us: float
    steps_per_s: float
    cpu_us: float
    others: float


@dataclass
class Contender:
    """One pool, and the slot of it that was kept of every round."""

    name: str
    call: Callable[[], Any]
    close: Callable[[], None]
    num_batches: int
    pids: set[int]
    slots: list[Slot] = field(default_factory=list)
    num_discarded: int = 0

    def run_round(self, seconds: float, num_tries: int) -> None:
        """Run a slot, again while others use the machine and tries are left; keep the quietest."""
        tries = [self._run(seconds)]
        while tries[-1].others > NOISY_SHARE and len(tries) < num_tries:
            tries.append(self._run(seconds))
        self.slots.append(min(tries, key=lambda slot: slot.others))
        self.num_discarded += len(tries) - 1

    def column(self, name: str) -> list[float]:
        """Return one field of the slots."""
        return [getattr(slot, name) for slot in self.slots]

    def _run(self, seconds: float) -> Slot:
        call, clock = self.call, time.perf_counter_ns
        ticks: list[int] = []
        ran, busy = self._ran_ns(), _busy_ns()
        began = clock()
        end = began + int(seconds * 1e9)
        while not ticks or ticks[-1] < end:
            call()
            ticks.append(clock())
        ran, busy = self._ran_ns() - ran, _busy_ns() - busy
        num_batches, wall_ns = len(ticks) * self.num_batches, ticks[-1] - began
        return Slot(
            batch_us=float(np.median(np.diff([began, *ticks]))) / self.num_batches / 1e3,
            steps_per_s=num_batches * NUM_ENVS / wall_ns * 1e9,
            cpu_us=ran / 1e3 / (num_batches * NUM_ENVS),
            others=max(0.0, (busy - ran) / (wall_ns * (os.cpu_count() or 1))),
        )

    def _ran_ns(self) -> int:
        """Return the nanoseconds that this process and the pool's have run."""
        tasks = [task for pid in (os.getpid(), *self.pids) for task in Path(f"/proc/{pid}/task").iterdir()]
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks)


def _busy_ns() -> int:
    """Return the nanoseconds that all processors have worked, for whomever (in steps of 10 ms)."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) * 10**9 // os.sysconf("SC_CLK_TCK")


def measure(make_env: Callable[[], Idle], plan: Plan) -> list[Contender]:
    """Start every pool, let them take turns, and end them."""
    contenders: list[Contender] = []
    try:
        for name, build in CONTENDERS.items():
            before = _descendants()
            call, close, num_batches = build(make_env)
            contenders.append(Contender(name, call, close, num_batches, _descendants() - before))
        for contender in contenders:
            for _ in range(3):
                contender.call()
        order = random.Random(0)
        for _ in range(plan.num_rounds):
            for contender in order.sample(contenders, len(contenders)):
                contender.run_round(plan.slot_s, plan.num_tries)
    finally:
        for contender in contenders:
            contender.close()
    return contenders


def _descendants() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


def summarise(contenders: list[Contender]) -> dict[str, dict[str, Any]]:
    """Return, per contender, medians over rounds and the quartiles of our throughput over its own."""
    ours = next(one for one in contenders if one.name == OURS)
    summary = {}
    for one in contenders:
        faster = np.divide(ours.column("steps_per_s"), one.column("steps_per_s"))
        cheaper = np.divide(one.column("cpu_us"), ours.column("cpu_us"))
        others = one.column("others")
        summary[one.name] = {
            "processes": len(one.pids),
            "batch_us": statistics.median(one.column("batch_us")),
            "steps_per_s": statistics.median(one.column("steps_per_s")),
            "cpu_us_per_step": statistics.median(one.column("cpu_us")),
            "ours_is_faster": np.quantile(faster, (0.25, 0.5, 0.75)).tolist(),
            "ours_needs_less_cpu": np.quantile(cheaper, (0.25, 0.5, 0.75)).tolist(),
            "others_share": statistics.median(others),
            "noisy_slots": sum(share > NOISY_SHARE for share in others),
            "discarded_slots": one.num_discarded,
        }
    return summary


def show(console: Console, workload: str, summary: dict[str, dict[str, Any]], plan: Plan) -> None:
    """Print one workload's table."""
    table = Table(
        title=f"{workload}: {NUM_ENVS} envs that cost nothing, {plan.num_rounds} rounds", title_justify="left"
    )
    columns = (
        "",
        "us/batch",
        "env steps/s",
        "CPU us/step",
        "envherd is faster",
        "uses less CPU",
        "others",
        "noisy slots",
    )
    for index, header in enumerate(columns):
        table.add_column(header, justify="right" if index else "left", no_wrap=True)
    for name, row in summary.items():
        (low, mid, high), cpu = row["ours_is_faster"], row["ours_needs_less_cpu"][1]
        table.add_row(
            name,
            f"{row['batch_us']:.1f}",
            f"{row['steps_per_s']:,.0f}",
            f"{row['cpu_us_per_step']:.2f}",
            "" if name == OURS else f"{mid:.1f}x ({low:.1f}-{high:.1f})",
            "" if name == OURS else f"{cpu:.1f}x",
            f"{row['others_share']:.0%}",
            f"{row['noisy_slots']}",
            style="bold" if name == OURS else "",
        )
    console.print(table)


def judge(console: Console, summary: dict[str, dict[str, Any]]) -> None:
    """Say whether the targets for the tiny env are met."""
    for peer, target in TARGETS.items():
        times = summary[peer]["ours_is_faster"][1]
        verdict = "met" if times >= target else "MISSED"
        console.print(f"target {verdict}: {times:.1f} times the throughput of {peer}, at least {target:g} wanted")


def pressure() -> str:
    """Return the kernel's own account of how busy the processors are, or an empty string."""
    path = Path("/proc/pressure/cpu")
    return path.read_text().splitlines()[0] if path.exists() else ""


def machine() -> dict[str, Any]:
    """Return what the numbers were measured on."""
    model = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), ": ?")
    packages = ("envherd", "torch", "tensordict", "numpy", "gymnasium", "stable-baselines3", "torchrl")
    return {
        "cpu": model.split(":", 1)[1].strip(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {name: importlib.metadata.version(name) for name in packages},
    }


def main() -> None:
    """Measure, print, and write the results as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="3 rounds of 0.1 s slots instead of 12 of 0.2 s, no second tries"
    )
    parser.add_argument("--workload", choices=WORKLOADS, action="append", help="default: all")
    parser.add_argument("--out", type=Path, help="where to write the JSON (default: benchmarks/results/)")
    arguments = parser.parse_args()
    plan = (
        Plan(num_rounds=3, slot_s=0.1, num_tries=1) if arguments.quick else Plan(num_rounds=12, slot_s=0.2, num_tries=4)
    )
    warnings.simplefilter("ignore")  # of the peers, about themselves
    sys.modules["torch.utils.tensorboard"] = None  # type: ignore[assignment]  # peers import it, and TensorFlow by it
    torch.set_num_threads(1)
    console = Console(width=132)
    report: dict[str, Any] = {"machine": machine(), "plan": plan._asdict(), "pressure": [pressure()]}
    for workload in arguments.workload or WORKLOADS:
        summary = report[workload] = summarise(measure(WORKLOADS[workload], plan))
        report["pressure"].append(pressure())
        show(console, workload, summary, plan)
        if workload == "tiny":
            judge(console, summary)
    console.print(f"CPU pressure before and after: {report['pressure'][0] or 'unknown'} | {report['pressure'][-1]}")
    out = arguments.out or RESULTS / f"step_overhead{'-quick' if arguments.quick else ''}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=2) + "\n")
    console.print(f"written to {out}")


if __name__ == "__main__":
    main()
