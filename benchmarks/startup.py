"""Measure a pool's start time, close time and memory in separate scripts, like users' scripts.

Each script builds a pool twice (the second time with a warm page cache and process), steps it, and reports its
measurements. Pools use their default start methods.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.ours import OURS
from benchmarks.peers import GYMNASIUM_ASYNC, SB3_SUBPROC, TORCHRL_PARALLEL
from benchmarks.workloads import ALL

LIMIT_S = 300.0
NUM_WORKERS, NUM_CLEAN_UP = 8, 4
TINY, CLEAN_UP = "tiny", "clean_up"

_SCRIPT = """
{top}
import json, os, sys, time, warnings
from benchmarks.work import SteadyFactory
warnings.simplefilter("ignore")


def make_torchrl_tiny():
    from torchrl.envs import GymWrapper
    return GymWrapper(SteadyFactory()(), categorical_action_encoding=True)


def make_torchrl_clean_up():
    from torchrl.envs import MeltingpotEnv
    return MeltingpotEnv("clean_up")


def build():
    {build}


def main():
    {imports}
    from benchmarks.startup import report_of
    report = []
    for _ in range({times}):
        began = time.perf_counter()
        env = build()
        root = env.reset()
        ready = time.perf_counter() - began
        {step}
        report.append(dict(ready_s=ready, **report_of({workers})))
        began = time.perf_counter()
        env.close()
        report[-1]["close_s"] = time.perf_counter() - began
    print("REPORT" + json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
"""
_OURS = "return ParallelEnv({n}, {factory}, num_workers={n}, seed=0)"
_ARRAYS = "import numpy\n        for _ in range(200):\n            env.step(numpy.zeros({n}, int))"
_TENSORDICTS = "for _ in range({steps}):\n            _, root = env.step_and_maybe_reset(env.rand_action(root))"
#: Contender -> code for its import, its build for `(n, factory)`, a step, and the pids of its workers.
_WAYS: dict[str, tuple[str, str, str, str]] = {
    OURS: (
        "global ParallelEnv, MeltingPotFactory; from envherd.executor import MeltingPotFactory, ParallelEnv",
        _OURS,
        _TENSORDICTS,
        "[worker.pid for worker in env.statistics().workers]",
    ),
    GYMNASIUM_ASYNC: (
        "global gymnasium; import gymnasium",
        "return gymnasium.vector.AsyncVectorEnv([{factory}] * {n})",
        _ARRAYS,
        "[process.pid for process in env.processes]",
    ),
    SB3_SUBPROC: (
        "global SubprocVecEnv; from stable_baselines3.common.vec_env import SubprocVecEnv",
        "return SubprocVecEnv([{factory}] * {n})",
        _ARRAYS,
        "[process.pid for process in env.processes]",
    ),
    TORCHRL_PARALLEL: (
        "global ParallelEnv; from torchrl.envs import ParallelEnv",
        "return ParallelEnv({n}, {factory})",
        _TENSORDICTS,
        "None",
    ),
}
_FACTORIES = {
    (OURS, TINY): "SteadyFactory()",
    (GYMNASIUM_ASYNC, TINY): "SteadyFactory()",
    (SB3_SUBPROC, TINY): "SteadyFactory()",
    (TORCHRL_PARALLEL, TINY): "make_torchrl_tiny",
    (OURS, CLEAN_UP): "MeltingPotFactory('clean_up')",
    (TORCHRL_PARALLEL, CLEAN_UP): "make_torchrl_clean_up",
}


def report_of(workers: list[int] | None) -> dict[str, Any]:
    """Return the memory of this process's descendants; called inside a script.

    Args:
        workers: their pids; None takes the children with the most private memory.

    Returns:
        "uss_per_worker": median; "pss_total": of workers and helpers together; "pss_helpers"; "processes".
    """
    from benchmarks.accounting import started_by

    sizes = {pid: _memory(pid) for pid in started_by(os.getpid())}
    if workers is None:
        largest = sorted(sizes, key=lambda pid: sizes[pid][0], reverse=True)
        workers = largest[: max(1, len([pid for pid in largest if sizes[pid][0] > sizes[largest[0]][0] / 2]))]
    return {
        "uss_per_worker": statistics.median(sizes[pid][0] for pid in workers),
        "pss_per_worker": statistics.median(sizes[pid][1] for pid in workers),
        "pss_total": sum(pss for _, pss in sizes.values()),
        "pss_helpers": sum(pss for pid, (_, pss) in sizes.items() if pid not in workers),
        "processes": len(sizes),
    }


def _memory(pid: int) -> tuple[int, int]:
    """Return `(uss, pss)` of one process in bytes; zeros if it has ended."""
    uss = pss = 0
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0, 0
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        if name in ("Private_Clean", "Private_Dirty"):
            uss += int(rest.split()[0]) * 1024
        elif name == "Pss":
            pss = int(rest.split()[0]) * 1024
    return uss, pss


def script_of(name: str, env: str, *, imports_torch: bool, times: int) -> str:
    """Return the text of a script that starts a contender `times` times."""
    imports, build, step, workers = _WAYS[name]
    count, steps = (NUM_WORKERS, 200) if env == TINY else (NUM_CLEAN_UP, 20)
    return _SCRIPT.format(
        top="import torch" if imports_torch else "",
        imports=imports,
        build=build.format(n=count, factory=_FACTORIES[name, env]),
        step=step.format(n=count, steps=steps),
        times=times,
        workers=workers,
    )


def run_script(text: str) -> list[dict[str, Any]] | str:
    """Run a script; return its report, or why there is none."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "script.py"
        path.write_text(text)
        process = subprocess.Popen(
            [sys.executable, str(path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            out, err = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            return f"failed: no end within {LIMIT_S:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
    for line in out.splitlines():
        if line.startswith("REPORT"):
            return list(json.loads(line.removeprefix("REPORT")))
    return f"failed: {(err.strip().splitlines() or ['no output'])[-1][:300]}"


def env_build_s() -> float:
    """Return the seconds to import and build the tiny env in a process with numpy, as in every worker."""
    code = (
        "import time, numpy; began = time.perf_counter()\n"
        "from benchmarks.work import SteadyFactory\n"
        "SteadyFactory()().reset(); print(time.perf_counter() - began)"
    )
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def measure(num_times: int, chosen: Callable[[str], bool], say: Callable[[str], None]) -> dict[str, Any]:
    """Run every script `num_times` times.

    Returns:
        "env_build_s": median; "tiny" and "clean_up": contender -> "status" and, for "plain" and "torch" (the script
        imports torch), medians of "ready_s" (first pool of a process), "again_s" (second one), "close_s", and the
        bytes of `report_of`.
    """
    found: dict[str, Any] = {"env_build_s": statistics.median(env_build_s() for _ in range(3)), TINY: {}, CLEAN_UP: {}}
    for name, env in _FACTORIES:
        if not chosen(name):
            continue
        if not ALL[name].is_installed:
            found[env][name] = {"status": "not installed"}
            continue
        cases: dict[str, Any] = {"status": "measured"}
        for case, imports_torch in (("plain", False), ("torch", True)):
            if env == CLEAN_UP and imports_torch:
                continue  # only `tiny` compares the script's own imports
            say(f"{name}, {env}, {case}")
            repeats = num_times if env == TINY else max(1, num_times // 3)
            text = script_of(name, env, imports_torch=imports_torch, times=2)
            reports: list[list[dict[str, Any]]] = []
            for _ in range(repeats):
                report = run_script(text)
                if isinstance(report, str):
                    cases["status"] = report
                    break
                reports.append(report)
            if len(reports) < repeats:
                break
            cases[case] = _medians(reports)
        found[env][name] = cases
    return found


def _medians(reports: list[list[dict[str, Any]]]) -> dict[str, float]:
    first, second = [report[0] for report in reports], [report[1] for report in reports]
    medians = {key: statistics.median(report[key] for report in first) for key in first[0]}
    return {**medians, "again_s": statistics.median(report["ready_s"] for report in second)}
