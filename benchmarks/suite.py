"""Run the suite: the requested workloads one after the other, saving the results after each."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.accounting import pressure_line, pressure_while_idle
from benchmarks.report import sheet_of_targets, sheet_of_workload, to_rich
from benchmarks.rounds import measure
from benchmarks.summary import summarise
from benchmarks.work import iterations_per_us
from benchmarks.workloads import (
    PEERS,
    QUICK,
    WORKLOADS,
    Workload,
)
from envherd.executor.machine.machine import usable_cores

SCHEMA = "envherd.bench/1"
NAMES = tuple(one.name for one in WORKLOADS)
_QUICK_BUDGET_S = 35.0
_REST_S = 4.2  # the kernel updates its pressure every two seconds
_PACKAGES = (
    "envherd",
    "torch",
    "tensordict",
    "numpy",
    "gymnasium",
    "stable-baselines3",
    "torchrl",
    "tianshou",
    "pufferlib-core",
    "envpool",
    "ray",
    "dm-meltingpot",
)


@dataclass(frozen=True, kw_only=True)
class SuiteRequest:
    """The request of a run.

    Attributes:
        names: workloads; empty for all (or those of a quick run).
        peers: to include; empty for all.
        num_rounds: None for each workload's own.
        is_quick: at most a minute, for continuous integration.
        is_resumed: skip workloads that are in the file.
        path: of the JSON, which is written after each workload; results of other workloads are kept. None writes
            nothing.
    """

    names: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    num_rounds: int | None = None
    is_quick: bool = False
    is_resumed: bool = False
    path: Path | None


def describe_machine() -> dict[str, Any]:
    """Return a description of the machine."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = (
        next((line for line in lines if "model name" in line), ": ?")
        .split(":", 1)[1]
        .strip()
    )
    return {
        "cpu": model,
        "usable_cores": usable_cores(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def load(path: Path) -> dict[str, Any]:
    """Return earlier results.

    Raises:
        ValueError: it is not a file of results.
    """
    try:
        found = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(
            f"bench failed: expected results in {path}, got {error}."
        ) from None
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise ValueError(
            f"bench failed: expected results ({SCHEMA}) in {path}, got something else."
        )
    return found


def save(results: Mapping[str, Any], path: Path) -> None:
    """Write results atomically."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(as_json(results))
    draft.replace(path)


def as_json(results: Mapping[str, Any]) -> str:
    """Return results as they are written."""
    return json.dumps(results, indent=1) + "\n"


class Suite:
    """Runs a request and keeps the results.

    Args:
        request: of the run.
        console: for tables.
    """

    def __init__(self, request: SuiteRequest, console: Console) -> None:
        self._request = request
        self._console = console
        self._num_workers = usable_cores()
        self.results = self._begin()

    def run(self) -> dict[str, Any]:
        """Measure everything in the request and return the results."""
        request, began, is_prepared = self._request, time.monotonic(), False
        for name in request.names or (QUICK if request.is_quick else NAMES):
            if request.is_resumed and name in self.results["workloads"]:
                self._console.print(f"{name}: there already")
                continue
            if request.is_quick and time.monotonic() - began > _QUICK_BUDGET_S:
                self.results["failed"][name] = "no time was left in a quick run"
                continue
            if not is_prepared:
                prepare(
                    [
                        peer
                        for peer in PEERS
                        if not request.peers or peer in request.peers
                    ]
                )
                self.results["calibration"] = iterations_per_us()
                is_prepared = True
            self._measure(name)
            if request.path is not None:
                save(self.results, request.path)
        self._console.print(to_rich(sheet_of_targets(self.results, has_all=False)))
        if request.path is not None:
            self._console.print(f"written to {request.path}")
        return self.results

    def _begin(self) -> dict[str, Any]:
        fresh: dict[str, Any] = {
            "schema": SCHEMA,
            "machine": describe_machine(),
            "workloads": {},
            "failed": {},
        }
        if self._request.path is None or not self._request.path.exists():
            return fresh
        found = load(self._request.path)
        if found["machine"] == fresh["machine"]:
            return found
        self._console.print(
            f"{self._request.path} is of another machine or of other versions: all is measured anew"
        )
        return fresh

    def _measure(self, name: str) -> None:
        """Run one workload; if it fails, report that and continue."""
        self.results["failed"].pop(name, None)
        self._console.rule(name)
        try:
            workload = next(one for one in WORKLOADS if one.name == name)
            self.results["workloads"][name] = self._workload(workload)
            self._console.print(
                to_rich(sheet_of_workload(self.results["workloads"][name]))
            )
        except (
            Exception
        ) as error:  # the next one may work, and hours of measurements must not be lost
            self.results["failed"][name] = f"{type(error).__name__}: {error}"
            self._console.print(
                f"{name} failed: {type(error).__name__}: {error}",
                style="red",
                markup=False,
            )

    def _workload(self, workload: Workload) -> dict[str, Any]:
        request, began = self._request, time.monotonic()
        plan = workload.plan(request.num_rounds, is_quick=request.is_quick)
        contenders = workload.chosen(request.peers, is_quick=request.is_quick)
        job = workload.job(self.results["calibration"], self._num_workers)
        rest = None if request.is_quick else pressure_while_idle(_REST_S)
        entries, is_complete = measure(
            [(one, job) for one in contenders], plan, self._say
        )
        return {
            "title": workload.title,
            "reference": workload.reference,
            "judged_by": workload.judged_by,
            "has_ends": job.has_ends,
            "num_envs": job.num_envs,
            "num_workers": job.num_workers,
            "plan": plan._asdict(),
            "is_complete": is_complete,
            "date": time.strftime("%d %b %Y"),
            "pressure_at_rest": rest,
            "pressure_after": pressure_line(),
            "seconds": time.monotonic() - began,
            "contenders": summarise(
                entries,
                workload.reference,
                judged_by=workload.judged_by,
                pressure_at_rest=rest,
            ),
        }

    def _say(self, text: str) -> None:
        """On a terminal, print the current activity in a line that the next one replaces."""
        if self._console.is_terminal:
            self._console.print(
                f"{text:<100}", end="\r", style="dim", markup=False, highlight=False
            )


def prepare(peers: list[str]) -> None:
    """Import the pools' modules, which their processes, forked from this one, inherit.

    Torch gets one thread, here and in forked processes.
    """
    warnings.simplefilter("ignore")  # warnings of the peers
    torch.set_num_threads(1)
    kept = sys.modules.get("torch.utils.tensorboard")
    sys.modules["torch.utils.tensorboard"] = None  # type: ignore[assignment]  # SB3 would import it, and TensorFlow by it
    try:
        for peer, module in (
            ("torchrl", "torchrl.envs"),
            ("sb3", "stable_baselines3.common.vec_env"),
        ):
            if (
                peer in peers
                and importlib.util.find_spec(module.partition(".")[0]) is not None
            ):
                importlib.import_module(module)
    finally:
        del sys.modules["torch.utils.tensorboard"]
        if kept is not None:
            sys.modules["torch.utils.tensorboard"] = kept
