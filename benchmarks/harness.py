"""What all benchmarks share: pools that are alive together and take turns, and what is said of them.

All pools are alive at the same time, each under a process of its own as in a program that has one, and
take turns in short slots, in random order, so that whatever else the machine does hits all of them alike;
what is compared is the ratio within a round.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import multiprocessing
import os
import platform
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
from rich.console import Console
from rich.table import Table

NUM_ENVS, NUM_WORKERS = 8, 2
NOISY_SHARE = 0.1  # a slot is noisy if others used more than this share of the machine meanwhile
_WARM_UP = 0.2  # share of a slot that a pool runs before it is measured
RESULTS = Path(__file__).parent / "results"

#: One call, what ends the pool, and how many batches of `NUM_ENVS` steps a call makes.
Pool = tuple[Callable[[], Any], Callable[[], None], int]


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
    """One pool, in a process of its own as a program would have it, and the slot of it that was kept of every round."""

    name: str
    build: Callable[[], Pool]
    slots: list[Slot] = field(default_factory=list)
    num_discarded: int = 0
    num_processes: int = 0

    def start(self) -> None:
        """Start its process and have it build the pool; returns when that is done."""
        context = multiprocessing.get_context("fork")  # which cannot harm: this process has one thread
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_host, args=(self.build, theirs))
        self._process.start()
        theirs.close()
        self.num_processes = self._pipe.recv()

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

    def stop(self) -> None:
        """End its pool and its process."""
        self._pipe.send(None)
        self._process.join()

    def _run(self, seconds: float) -> Slot:
        self._pipe.send(seconds)
        slot: Slot = self._pipe.recv()
        return slot


def _host(build: Callable[[], Pool], pipe: Any) -> None:
    """Serve slots of one pool until told to stop."""
    call, close, num_batches = build()
    try:
        for _ in range(3):
            call()
        pids = _descendants()
        pipe.send(len(pids))
        while (seconds := pipe.recv()) is not None:
            pipe.send(_run_slot(call, num_batches, pids, seconds))
    finally:
        close()


def _run_slot(call: Callable[[], Any], num_batches: int, pids: set[int], seconds: float) -> Slot:
    clock = time.perf_counter_ns
    ticks: list[int] = []
    warm = clock() + int(seconds * _WARM_UP * 1e9)
    while clock() < warm:  # its processes have slept for seconds, and are spread over the cores anew
        call()
    ran, busy = _ran_ns(pids), _busy_ns()
    began = clock()
    end = began + int(seconds * 1e9)
    while not ticks or ticks[-1] < end:
        call()
        ticks.append(clock())
    ran, busy = _ran_ns(pids) - ran, _busy_ns() - busy
    total, wall_ns = len(ticks) * num_batches, ticks[-1] - began
    return Slot(
        batch_us=float(np.median(np.diff([began, *ticks]))) / num_batches / 1e3,
        steps_per_s=total * NUM_ENVS / wall_ns * 1e9,
        cpu_us=ran / 1e3 / (total * NUM_ENVS),
        others=max(0.0, (busy - ran) / (wall_ns * (os.cpu_count() or 1))),
    )


def _ran_ns(pids: set[int]) -> int:
    """Return the nanoseconds that this process and others have run."""
    tasks = [task for pid in (os.getpid(), *pids) for task in Path(f"/proc/{pid}/task").iterdir()]
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks)


def _busy_ns() -> int:
    """Return the nanoseconds that all processors have worked, for whomever (in steps of 10 ms)."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) * 10**9 // os.sysconf("SC_CLK_TCK")


def measure(builders: Mapping[str, Callable[[], Pool]], plan: Plan) -> list[Contender]:
    """Start every pool, let them take turns, and end them."""
    contenders: list[Contender] = []
    try:
        for name, build in builders.items():
            contender = Contender(name, build)
            contender.start()
            contenders.append(contender)
        order = random.Random(0)
        for _ in range(plan.num_rounds):
            for contender in order.sample(contenders, len(contenders)):
                contender.run_round(plan.slot_s, plan.num_tries)
    finally:
        for contender in contenders:
            contender.stop()
    return contenders


def _descendants() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


def summarise(contenders: list[Contender], rival_of: Callable[[str], str]) -> dict[str, dict[str, Any]]:
    """Return, per contender, medians over rounds and the quartiles of our throughput over its own.

    Args:
        contenders: after `measure`.
        rival_of: name of a contender -> name of ours that it is compared with.
    """
    by_name = {one.name: one for one in contenders}
    summary = {}
    for one in contenders:
        ours = by_name[rival_of(one.name)]
        faster = np.divide(ours.column("steps_per_s"), one.column("steps_per_s"))
        cheaper = np.divide(one.column("cpu_us"), ours.column("cpu_us"))
        others = one.column("others")
        summary[one.name] = {
            "rival": ours.name,
            "processes": one.num_processes,
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


def show(console: Console, title: str, summary: dict[str, dict[str, Any]]) -> None:
    """Print a table of a summary."""
    table = Table(title=title, title_justify="left")
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
            "" if name == row["rival"] else f"{mid:.1f}x ({low:.1f}-{high:.1f})",
            "" if name == row["rival"] else f"{cpu:.1f}x",
            f"{row['others_share']:.0%}",
            f"{row['noisy_slots']}",
            style="bold" if name == row["rival"] else "",
        )
    console.print(table)


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


class Run:
    """One run of a benchmark: its arguments, its plan, and the report that it writes.

    Args:
        name: of the benchmark, and of its JSON.
        parser: with the benchmark's own arguments.
    """

    def __init__(self, name: str, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--quick", action="store_true", help="3 rounds of 0.2 s slots instead of 12 of 0.5 s, no second tries"
        )
        parser.add_argument("--out", type=Path, help="where to write the JSON (default: benchmarks/results/)")
        self.arguments = parser.parse_args()
        quick, full = Plan(num_rounds=3, slot_s=0.2, num_tries=1), Plan(num_rounds=12, slot_s=0.5, num_tries=4)
        self.plan = quick if self.arguments.quick else full
        self.console = Console(width=132)
        self.report: dict[str, Any] = {"machine": machine(), "plan": self.plan._asdict(), "pressure": [pressure()]}
        self._name = name
        warnings.simplefilter("ignore")  # of the peers, about themselves
        sys.modules["torch.utils.tensorboard"] = None  # type: ignore[assignment]  # peers import it, and TensorFlow by it
        torch.set_num_threads(1)

    def add(self, workload: str, title: str, summary: dict[str, dict[str, Any]]) -> None:
        """Print a summary and keep it for the report."""
        self.report[workload] = summary
        self.report["pressure"].append(pressure())
        show(self.console, f"{title}, {self.plan.num_rounds} rounds", summary)

    def judge(self, summary: dict[str, dict[str, Any]], targets: Mapping[str, float]) -> None:
        """Say which targets are met: peer -> how many times its throughput is wanted."""
        for peer, target in targets.items():
            times = summary[peer]["ours_is_faster"][1]
            verdict = "met" if times >= target else "MISSED"
            self.console.print(
                f"target {verdict}: {times:.1f} times the throughput of {peer}, at least {target:g} wanted"
            )

    def finish(self) -> None:
        """Write the report."""
        before, after = self.report["pressure"][0] or "unknown", self.report["pressure"][-1]
        self.console.print(f"CPU pressure before and after: {before} | {after}")
        out = self.arguments.out or RESULTS / f"{self._name}{'-quick' if self.arguments.quick else ''}.json"
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(self.report, indent=2) + "\n")
        self.console.print(f"written to {out}")
