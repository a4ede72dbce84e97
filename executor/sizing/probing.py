"""Run a probe, a worker process that measures an env, under limits of time and memory.

Guarantees: nothing is left behind in any case. If a probe is killed, by a limit or by the kernel, its measurements
until then are returned, or `ProbeFailed` is raised if there are none.
"""

from __future__ import annotations

import contextlib
import select
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from envherd.executor.machine.gpus import memory_used_by
from envherd.executor.options import ExecutorOptions
from envherd.executor.pools.error_messages import Frame, env_error, factory_error
from envherd.executor.pools.preloading import find_helper
from envherd.executor.pools.worker_process import WorkerProcess, worker_config
from envherd.executor.pools.zygote import Zygote
from envherd.executor.sizing.measurement import Measurement, from_figures
from envherd.shm.interrupts import ignoring_refusals
from envherd.workers import messages, registries
from envherd.workers.errors import EnvherdError
from envherd.workers.processes import anonymous_bytes, descendants, memory_of

#: Seconds between readings of the probe's memory. An env that allocates 10 GiB/s is noticed 0.2 GiB late.
_LOOK_S = 0.02
#: Seconds between reports of progress in one stage.
_SHOW_S = 0.1
#: A probe may be late by one build, reset or step; then it is killed.
_LATE_FACTOR = 4.0
#: Number of envs that it builds in one process.
_NUM_ENVS = 2
_MIB = 2**20

Progress = Callable[[str, float], None]


class ProbeFailed(EnvherdError, RuntimeError):
    """An env could not be measured: the probe ended or was killed before it had made a step."""


@dataclass(frozen=True, kw_only=True)
class ProbeLimits:
    """Limits of a probe.

    Attributes:
        budget_s: seconds of the measurement, including start and build.
        memory_bytes: largest memory; None for all that is available.
        grace_s: seconds in addition to four budgets for one build, reset or step.
    """

    budget_s: float = 3.0
    memory_bytes: int | None = None
    grace_s: float = 30.0


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The subject of a probe: a pickled factory, its arguments and its modules."""

    factory: bytes
    env_kwargs: dict[str, Any]
    preload: tuple[str, ...]
    seed: int


def probe(subject: Subject, limits: ProbeLimits, options: ExecutorOptions, progress: Progress) -> Measurement:
    """Measure an env in a separate worker.

    Args:
        subject: see `Subject`.
        limits: see `ProbeLimits`.
        options: of workers and envs.
        progress: called with the stage and the used share of the budget.

    Raises:
        FactoryError: the factory raised, or returned no env.
        EnvError: the env raised before enough was measured.
        ProbeFailed: the probe was ended by a limit, or died, before it had made a step.
    """
    began = time.monotonic()
    with _worker(subject, options) as (zygote, worker):
        start_s = time.monotonic() - began
        watch = _Watch(worker, limits, progress)
        watch.begin(subject, options)
        watch.run()
        # Read while both live: memory shared by both counts as the helper's.
        return watch.result(zygote, start_s)


@contextlib.contextmanager
def _worker(subject: Subject, options: ExecutorOptions) -> Iterator[tuple[Zygote, WorkerProcess]]:
    zygote = find_helper(options) or Zygote(options, list(subject.preload))
    worker = None
    try:
        zygote.wait_ready()
        worker = WorkerProcess(0, 0, zygote, worker_config(options, 0))
        yield zygote, worker
    finally:
        if worker is not None:
            with ignoring_refusals():
                worker.channel.queue_message(messages.Close())
                worker.channel.flush_nowait()
            worker.wait_exit(1.0)
            worker.kill()
            worker.wait_exit(1.0)
            worker.release()
        zygote.close()


class _Watch:
    """Reads a probe's reports, and kills it at its limits."""

    def __init__(self, worker: WorkerProcess, limits: ProbeLimits, progress: Progress) -> None:
        self._worker = worker
        self._limits = limits
        self._progress = progress
        self._figures: dict[str, Any] = {}
        self._stage = "start"
        self._fault: Frame | None = None
        self._peak_bytes = 0
        self._gpu_bytes: int | None = None
        self._stopped_by = ""

    def begin(self, subject: Subject, options: ExecutorOptions) -> None:
        message = messages.Probe(
            factory=subject.factory,
            env_kwargs=subject.env_kwargs,
            root_seed=subject.seed,
            block=options.for_block(),
            num_envs=_NUM_ENVS,
            budget_s=self._limits.budget_s,
        )
        self._worker.channel.queue_message(messages.Register(entries=registries.collect()))
        self._worker.channel.queue_message(message)

    def run(self) -> None:
        """Wait until the probe has reported everything, has ended, or must be killed."""
        began, shown_at, shown = time.monotonic(), 0.0, ""
        end = began + self._limits.budget_s * _LATE_FACTOR + self._limits.grace_s
        poller = select.poll()
        poller.register(self._worker.channel.sock, select.POLLIN)
        poller.register(self._worker.pidfd, select.POLLIN)
        while not self._stopped_by:
            poller.poll(_LOOK_S * 1000)
            has_exited = self._worker.has_exited()
            if self._take():
                return
            now = time.monotonic()
            if now - shown_at > _SHOW_S or self._stage != shown:
                shown_at, shown = now, self._stage
                self._progress(shown, min(1.0, (now - began) / self._limits.budget_s))
            if has_exited:
                self._explain_death()
            elif now > end:
                self._explain_lateness(now - began)
            else:
                self._look_at_memory()

    def _take(self) -> bool:
        """Read new reports; return whether the last one has come."""
        channel = self._worker.channel
        with contextlib.suppress(ConnectionError):
            channel.flush_nowait()
        frames = channel.drain_nowait()
        while frames:
            frame = frames.pop(0)
            if frame["kind"] == "fault":
                self._fault = frame
                return True
            if frame["kind"] == "probed":
                self._stage, self._figures = frame["stage"], frame["figures"]
                if frame["is_last"]:
                    self._gpu_bytes = memory_used_by(descendants(self._worker.pid))
                    return True
        return False

    def _look_at_memory(self) -> None:
        self._peak_bytes = max(self._peak_bytes, anonymous_bytes(self._worker.pid))
        most = self._limits.memory_bytes
        if most is None or self._peak_bytes <= most:
            return
        used = memory_of(self._worker.pid)["uss"]  # the fast reading counts pages that are shared with the helper
        self._peak_bytes = used
        if used > most:
            self._worker.kill()
            self._worker.wait_exit(1.0)
            self._stopped_by = f"it took {used / _MIB:,.0f} MiB of the {most / _MIB:,.0f} MiB that it may ({self._at})"

    @property
    def _at(self) -> str:
        return f"stage {self._stage}"

    def _explain_death(self) -> None:
        how = self._worker.exit_description()
        if "SIGKILL" in how and self._worker.killed_for_memory() == "group":
            peak = f"{self._peak_bytes / _MIB:,.0f} MiB"
            self._stopped_by = f"the kernel killed it for the memory limit of its control group at {peak} ({self._at})"
        elif "SIGKILL" in how:
            peak = f"{self._peak_bytes / _MIB:,.0f} MiB"
            self._stopped_by = f"it was killed (SIGKILL), often for want of memory, at {peak} ({self._at})"
        else:
            self._stopped_by = f"it ended with {how} ({self._at})"

    def _explain_lateness(self, seconds: float) -> None:
        stack = self._worker.stack()
        self._worker.kill()
        self._worker.wait_exit(1.0)
        self._stopped_by = f"one call took longer than the {seconds:.0f} s that it was given ({self._at}):\n{stack}"

    def result(self, zygote: Zygote, start_s: float) -> Measurement:
        """Return the measurement, or raise the reason why there is none."""
        if self._fault is not None and (self._fault["phase"] == "build" or "steps" not in self._figures):
            raise self._error(self._fault)
        if self._fault is not None:
            self._stopped_by = f"the env raised {self._fault['type_name']}: {self._fault['message']}"
        both, own = memory_of(zygote.pid), memory_of(self._worker.pid)  # the worker is the helper's child
        measured = from_figures(
            self._figures,
            helper_bytes=max(0, both["pss"] - own["uss"]),
            start_s=start_s,
            gpu_bytes=self._gpu_bytes,
            stopped_by=self._stopped_by,
        )
        if measured is not None:
            return measured
        lines = self._worker.last_lines()
        raise ProbeFailed(
            f"measuring failed: the probe was ended before it had made a step: {self._stopped_by}."
            + (f"\nIts last output:\n{lines}" if lines else ""),
            phase=self._stage,
            peak_bytes=self._peak_bytes,
        )

    def _error(self, fault: Frame) -> EnvherdError:
        if fault["phase"] == "build":
            return factory_error(fault, self._worker)
        return env_error([fault], 0, self._worker.pid)
