"""Soak test: executors under random kills, stops, resets, opens and closes for a given time: `make soak`.

The sessions are those of the fuzzers, so every row is compared with the envs' diary (see `tests.oracles.fuzzing`). They
run in one process, whose resources are sampled once a second: memory, descriptors, threads, children, names in
/dev/shm. At the end they must be as at the beginning.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

from envherd.executor.start.zygote import end_idle
from tests.conftest import descendants
from tests.oracles.fuzz_executor import play
from tests.oracles.fuzzing import Watch

DOCS = Path(__file__).parents[1] / "docs"
#: Option sets of the fuzzers.
VARIANTS = ("plain", "shared", "recycle", "threads", "views", "late", "pairs", "text")
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
        found = [
            name
            for name in names
            if getattr(self.after, name) > getattr(self.before, name)
        ]
        return found + (["memory"] if self.growth_mb() * 2**20 > MAX_GROWTH else [])

    def growth_mb(self) -> float:
        """Return by how much memory grew from the second tenth of the samples to the last one."""
        tenth = max(1, len(self.samples) // 10)
        early = [sample.rss_mb for sample in self.samples[tenth : 2 * tenth + 1]]
        return statistics.median(
            [s.rss_mb for s in self.samples[-tenth:]]
        ) - statistics.median(early)


def look(began: float) -> Sample:
    """Return this process's resources now."""
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf(
        "SC_PAGE_SIZE"
    )
    # Other programs'.
    names = [
        name
        for name in os.listdir("/dev/shm")
        if not name.startswith(("sem.mp-", "psm_"))
    ]
    return Sample(
        time.monotonic() - began,
        resident / 2**20,
        len(os.listdir("/proc/self/fd")),
        threading.active_count(),
        len(descendants()),
        len(names),
    )


class Sampler(Watch):
    """Samples this process's resources once a second, when a session begins an operation.

    Args:
        report: that gets the samples.
    """

    def __init__(self, report: Report) -> None:
        super().__init__()
        self._report, self._looked = report, 0.0

    def begin(self, what: str) -> None:
        """Take a sample if one is due."""
        if time.monotonic() > self._looked + 1:
            self._looked = time.monotonic()
            self._report.samples.append(look(self._began))

    def note(self, what: str) -> None:
        """Print nothing."""


class Soak:
    """One run; everything random is drawn from `seed`."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self.report = Report(seed)
        self._sampler = Sampler(self.report)
        self._began = time.monotonic()

    def run(self, seconds: float) -> Report:
        """Run for `seconds`, and return the report."""
        self._session()  # so that one-time imports and allocations are done
        self.report.before = self._look()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._session()
        self.report.after = self._look()
        return self.report

    def _look(self) -> Sample:
        """Return this process's resources with all executors closed."""
        gc.collect()
        end_idle()
        time.sleep(0.2)
        return look(self._began)

    def _session(self) -> None:
        """Open an executor, use and break it for some time, and close it."""
        session = play(
            self._rng,
            self._rng.choice(VARIANTS),
            self._sampler,
            self._rng.randint(20, 60),
        )
        oracle, done = session.oracle, self.report.done
        done["opened"] += 1
        done["env steps"] += sum(oracle.steps.values())
        done["resets"] += sum(oracle.resets.values())
        done["workers killed from outside"] += session.num_kills
        done["traps of envs"] += session.num_sprung
        done["workers lost"] += session.num_losses
        done["rows compared"] += oracle.num_transitions
        done["rows interrupted"] += oracle.num_interrupted


def draw(report: Report, path: Path) -> None:
    """Draw the samples."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(4, 1, sharex=True, figsize=(8, 8), layout="constrained")
    minutes = [sample.at_s / 60 for sample in report.samples]
    for axis, name in zip(
        axes, ("rss_mb", "descriptors", "threads", "children"), strict=True
    ):
        values = [getattr(sample, name) for sample in report.samples]
        axis.plot(minutes, values, linewidth=0.8)
        axis.set_ylabel(name.replace("rss_mb", "memory, MiB"))
        axis.set_ylim(0, 1.25 * max(values, default=1))  # no line lies on the frame
        axis.grid(alpha=0.3)
    axes[-1].set_xlabel("minutes")
    figure.suptitle("The process that opens and breaks executors, during a soak run")
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
    held += [
        f"| {name} | {getattr(before, name):.0f} | {getattr(after, name):.0f} |"
        for name in names
    ]
    (DOCS / "reports" / "soak.md").write_text(
        "# Soak\n\n"
        f"Written by `make soak`: {after.at_s / 60:.0f} minutes, seed {report.seed}, {date.today():%d %b %Y}. The "
        "program opens executors of up to five envs, uses them in every way, breaks them (workers are killed, crash or "
        "stop at random instants) and closes them. It compares every row with the diary that its env writes. A "
        "wrong row would end the run; none was wrong. Memory grew by "
        f"{report.growth_mb():+.1f} MiB from the second tenth of the run to the last.\n\n"
        + "\n".join(lines)
        + "\n\n"
        + "\n".join(held)
        + "\n\nWhile it ran (the numbers rise and fall with the executors that are open):\n\n"
        "![memory, descriptors, threads and children over time](../images/soak.png)\n"
    )


def main() -> None:
    """Run from the shell."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--write", action="store_true", help="write docs/reports/soak.md and its plot"
    )
    arguments = parser.parse_args()
    report = Soak(arguments.seed).run(60 * arguments.minutes)
    # A report.
    print(json.dumps({"done": report.done, "samples": len(report.samples)}, indent=1))
    if arguments.write:
        write(report)
    if report.leaks():
        raise SystemExit(f"leaked: {', '.join(report.leaks())}")


if __name__ == "__main__":
    main()
