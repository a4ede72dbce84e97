"""Soak test: executors under random kills, stops, resets, opens and closes for a given time: `make soak`.

Every row is looked up in a book of `SerialEnv`'s rows (see `tests.faults.book`). This process's resources are sampled
once a second: memory, descriptors, threads, children, names in /dev/shm. At the end they must be as at the beginning.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import random
import signal
import statistics
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from envherd.executor import ExecutorOptions, ParallelEnv
from envherd.workers.testing import CountingEnv
from tests.faults.book import NUM_ENVS, Book, Checked
from tests.faults.matrix import _descendants

DOCS = Path(__file__).parents[2] / "docs"
ROOT_SEED = 3
DEEDS = ("fused", "step", "sent", "rollout", "reset")
#: Bytes by which this process may have grown at the end: allocators and torch keep some.
MAX_GROWTH = 32 << 20


@dataclass(frozen=True)
class Sample:
    """This process's resources, `at_s` seconds after the start."""

    at_s: float
    rss_mb: float
    descriptors: int
    threads: int
    children: int
    shm_names: int


@dataclass
class Report:
    """The result of a soak.

    Attributes:
        seed: of the random choices.
        samples: one a second, while executors are opened and closed.
        before, after: with all of them closed.
        done: operation -> count.
    """

    seed: int
    samples: list[Sample] = field(default_factory=list)
    before: Sample | None = None
    after: Sample | None = None
    done: Counter[str] = field(default_factory=Counter)

    def leaks(self) -> list[str]:
        """Return the resources that have grown."""
        assert self.before is not None
        assert self.after is not None
        names = ("descriptors", "threads", "children")
        found = [name for name in names if getattr(self.after, name) > getattr(self.before, name)]
        return found + (["memory"] if self.growth_mb() * 2**20 > MAX_GROWTH else [])

    def growth_mb(self) -> float:
        """Return by how much memory grew from the second tenth of the samples to the last one."""
        tenth = max(1, len(self.samples) // 10)
        early = [sample.rss_mb for sample in self.samples[tenth : 2 * tenth + 1]]
        return statistics.median([s.rss_mb for s in self.samples[-tenth:]]) - statistics.median(early)


def look(began: float) -> Sample:
    """Return this process's resources now."""
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    names = [name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")]  # those are other programs'
    return Sample(
        time.monotonic() - began,
        resident / 2**20,
        len(os.listdir("/proc/self/fd")),
        threading.active_count(),
        len(_descendants(os.getpid())),
        len(names),
    )


class Soak:
    """One run; everything random is drawn from `seed`."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._book = Book(ROOT_SEED)
        self.report = Report(seed)
        self._began = time.monotonic()
        self._looked = 0.0

    def run(self, seconds: float) -> Report:
        """Run for `seconds`, and return the report."""
        self._session(time.monotonic())  # so that one-time imports and allocations are done
        gc.collect()
        self.report.before = look(self._began)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._session(end)
        gc.collect()
        time.sleep(0.2)
        self.report.after = look(self._began)
        return self.report

    def _session(self, end: float) -> None:
        """Open an executor, use and break it for some time, then close or drop it."""
        options = ExecutorOptions(
            on_worker_loss="restart",
            max_restarts=10_000,
            build_timeout_s=5.0,
            step_timeout_s=1.0,
            reset_timeout_s=1.0,
            close_timeout_s=1.0,
            recycle_after=self._rng.choice([None, 1, 5]),
            restart_window_s=self._rng.choice([0.1, 0.1, 0.1, 60.0]),  # mostly no waits between restarts
        )
        num_workers = self._rng.randint(1, 3)
        env = ParallelEnv(NUM_ENVS, CountingEnv, num_workers=num_workers, seed=ROOT_SEED, options=options)
        self.report.done["opened"] += 1
        try:
            for _ in range(self._rng.randint(1, 4)):
                self._play(env, num_workers)
                if time.monotonic() > end:
                    break
            self._count(env)
        finally:
            if self._rng.random() < 0.2:
                self._disturb(env, num_workers, 0.0)
            env.close()

    def _count(self, env: Any) -> None:
        counted, done = env.statistics(), self.report.done
        done["env steps"] += counted.env_steps
        done["resets"] += counted.resets
        done["workers lost"] += counted.worker_losses
        done["workers recycled"] += counted.recycled
        done["rows interrupted"] += counted.interrupted

    def _play(self, env: Any, num_workers: int) -> None:
        checked = Checked(env, self._book)
        checked.begin(env.reset(seed=ROOT_SEED))
        for _ in range(12):
            timer = None
            if self._rng.random() < 0.4:
                timer = self._disturb(env, num_workers, self._rng.random() * 0.004)
            checked.play(self._rng.choice(DEEDS))
            if timer is not None:
                timer.join()
            if time.monotonic() > self._looked + 1:
                self._looked = time.monotonic()
                self.report.samples.append(look(self._began))
        self.report.done["rows compared"] += checked.num_compared

    def _disturb(self, env: Any, num_workers: int, after_s: float) -> threading.Timer:
        """Kill or stop a worker after a delay."""
        number = self._rng.choice([signal.SIGKILL] * 4 + [signal.SIGSEGV, signal.SIGSTOP])
        pid = env._pool.pid_of(self._rng.randrange(num_workers))
        self.report.done[f"{number.name} sent"] += 1

        def send() -> None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

        timer = threading.Timer(after_s, send)
        timer.start()
        if after_s == 0:
            timer.join()
        return timer


def draw(report: Report, path: Path) -> None:
    """Draw the samples."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(4, 1, sharex=True, figsize=(8, 8), layout="constrained")
    minutes = [sample.at_s / 60 for sample in report.samples]
    for axis, name in zip(axes, ("rss_mb", "descriptors", "threads", "children"), strict=True):
        axis.plot(minutes, [getattr(sample, name) for sample in report.samples], linewidth=0.8)
        axis.set_ylabel(name.replace("rss_mb", "memory, MiB"))
        axis.set_ylim(bottom=0)
    axes[-1].set_xlabel("minutes")
    figure.savefig(path, dpi=80)
    plt.close(figure)


def write(report: Report) -> None:
    """Write docs/reports/soak.md with its plot."""
    draw(report, DOCS / "images" / "soak.png")
    before, after = report.before, report.after
    assert before is not None
    assert after is not None
    lines = ["| what | how often |", "|---|---|"]
    lines += [f"| {name} | {count:,} |" for name, count in sorted(report.done.items())]
    held = ["| held with every executor closed | before | after |", "|---|---|---|"]
    names = ("rss_mb", "descriptors", "threads", "children", "shm_names")
    held += [f"| {name} | {getattr(before, name):.0f} | {getattr(after, name):.0f} |" for name in names]
    (DOCS / "reports" / "soak.md").write_text(
        "# Soak\n\n"
        f"Written by `make soak`: {after.at_s / 60:.0f} minutes, seed {report.seed}. Executors of {NUM_ENVS} envs on "
        "one to three workers are opened, used in every way, broken (killed, crashed, stopped at random instants) and "
        "closed; every row is compared with what `SerialEnv` gives for the same env, episode and step. No row "
        "was wrong: one would end the run. Memory grew by "
        f"{report.growth_mb():+.1f} MiB from the second tenth of the run to the last.\n\n"
        + "\n".join(lines)
        + "\n\n"
        + "\n".join(held)
        + "\n\nWhile it ran (the numbers rise and fall with the executors that are open):\n\n"
        "![memory, descriptors, threads and children over time](../images/soak.png)\n"
    )


def main() -> None:
    """Run from the shell."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true", help="write docs/reports/soak.md and its plot")
    arguments = parser.parse_args()
    report = Soak(arguments.seed).run(60 * arguments.minutes)
    print(json.dumps({"done": report.done, "samples": len(report.samples)}, indent=1))  # noqa: T201  # a report
    if arguments.write:
        write(report)
    if report.leaks():
        raise SystemExit(f"leaked: {', '.join(report.leaks())}")


if __name__ == "__main__":
    main()
