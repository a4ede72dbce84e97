"""Check this machine and installation for problems that envs would have; yield findings one by one.

Guarantees: checks are independent: one that raises becomes a finding, and the others continue. Nothing is changed.
The processes that a check starts end before its finding.
"""

import contextlib
import functools
import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import psutil

from envherd.executor.machine.gpus import find_renderers
from envherd.executor.machine.machine import (
    FILES_FIXED,
    FILES_PER_WORKER,
    Machine,
    read_machine,
)
from envherd.executor.options import ExecutorOptions, StartMethod
from envherd.shm import platforms
from envherd.workers import native
from envherd.workers.adapters.meltingpot import lua_edits, lua_tree
from envherd.workers.adapters.meltingpot.factory import (
    installed,
    scenario_names,
    substrate_names,
)
from envherd.workers.adapters.meltingpot.lua_tree import version_of

Level = Literal["ok", "warn", "fail"]
_GIB = 2**30
_MIB = 2**20
_FEWEST_FILES = 1024
_BUSY = 0.3
#: Packages of the extras, looked up by name without importing them.
_OPTIONAL = (
    "gymnasium",
    "dm_control",
    "pettingzoo",
    "stable-baselines3",
    "vmas",
    "envpool",
    "ray",
    "matplotlib",
)
_CORE = ("torch", "tensordict", "numpy", "cloudpickle", "psutil", "torchrl")


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        name: of the check.
        level: "ok"; "warn": it works, but perhaps badly; "fail": something that envherd offers does not work.
        found: the result.
        fix: advice; empty if none is needed.
    """

    name: str
    level: Level
    found: str
    fix: str = ""


#: Name of a check, without a number at its end -> advice if it does not pass. The core packages have one advice.
_FIXES = {
    "worker pool": "faster with Linux, in a container that allows these calls (docs/portable.md)",
    **dict.fromkeys(
        _CORE,
        "install the versions of constraints.txt: pip install -c constraints.txt -e '.[all]'",
    ),
    "plain steps": "install a C compiler, then envherd again; in a checkout: python setup.py build_ext --inplace",
    "dmlab2d": "pip install --force-reinstall --no-deps dmlab2d",
    "meltingpot": "reinstall it",
    "scenarios": (
        "put meltingpot-assets-2.3.0.tar.gz into the temporary directory, or use a network that can download it; then "
        "pip uninstall dm-meltingpot, and python -m envherd.install_meltingpot (docs/meltingpot.md)"
    ),
    "mujoco": "pip install --force-reinstall --no-deps mujoco mujoco-core mujoco-studio",
    "rendering": "export MUJOCO_GL=egl (a GPU or Mesa) or osmesa; `envherd rollout --gif` does so by itself",
    "EGL device": "mount the GPU's devices into the container; allow its files for this user; update the driver",
    "cores": "raise the quota (docker --cpus, limits.cpu, CPUQuota=), or use one worker",
    "load": "stop what else runs, or measure later: timings made now say little",
    "torch threads": (
        "export OMP_NUM_THREADS=1, or torch.set_num_threads(1) in your script: threads that wait for a processor make "
        "small networks up to 10 times slower"
    ),
    "memory": "ask `envherd size ENV` how many envs fit; raise the limit",
    "killed for memory": "fewer envs (`envherd size ENV`), or a higher limit",
    "open files": "ulimit -n 65536",
    "processes": "ulimit -u, docker --pids-limit, TasksMax=",
    "address space": "ulimit -v unlimited; limit memory with a control group instead",
    "/dev/shm": (
        "mount it, or docker --shm-size=1g; the portable pool and torch's DataLoader use it, forked workers do not"
    ),
}


def _judged(
    name: str,
    found: str,
    fix: str = "",
    *,
    is_ok: bool,
    otherwise: Level = "warn",
) -> Finding:
    """Return the finding of a check that passed, or else one with a fix, which is that of `_FIXES` by default."""
    return (
        Finding(name, "ok", found)
        if is_ok
        else Finding(name, otherwise, found, fix or _FIXES[name.rstrip(" 0123456789")])
    )


def examine() -> Iterator[Finding]:
    """Yield all findings, in the order of the report."""
    machine = read_machine()
    methods = ("portable",) if platforms.missing() else get_args(StartMethod)
    checks: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("python", _python),
        ("packages", _packages),
        ("plain steps", plain_steps),
        ("dmlab2d", _dmlab2d),
        ("meltingpot", _meltingpot),
        ("mujoco", _mujoco),
        ("rendering", _rendering),
        ("egl", _egl),
        *(
            (f"start method {method}", functools.partial(_start, method))
            for method in methods
        ),
        ("cores", lambda: cores(machine)),
        ("torch threads", lambda: torch_threads(machine)),
        ("memory", lambda: memory(machine)),
        ("limits", lambda: limits(machine)),
        ("/dev/shm", lambda: dev_shm(machine)),
        ("gpu", lambda: gpus(machine)),
        ("left behind", _left_behind),
    ]
    for what, check in checks:
        try:
            yield from check()
        except (
            Exception
        ) as error:  # report it as a finding, and continue with the next check
            yield Finding(
                what,
                "fail",
                f"the check raised {type(error).__name__}: {error}",
            )


# ---- installation ----------------------------------------------------------------------------------


def _python() -> Iterator[Finding]:
    yield Finding(
        "python",
        "ok",
        f"{platform.python_implementation()} {platform.python_version()} on {platform.platform()}",
    )
    lacks = ", ".join(platforms.missing())
    found = (
        f"the portable pool: this system lacks {lacks}"
        if lacks
        else "workers are forked; 'portable' is there too"
    )
    yield _judged("worker pool", found, is_ok=not lacks)


def _packages() -> Iterator[Finding]:
    yield Finding(
        "envherd",
        "ok",
        version_of("envherd") or "not installed as a package",
    )
    for name in _CORE:
        installed = version_of(name)
        if installed is not None:
            wrong = list(unmet(name, installed))
            yield _judged(
                name,
                "; ".join([installed, *wrong]),
                is_ok=not wrong,
                otherwise="fail",
            )
        elif name != "torchrl":
            yield Finding(name, "fail", "not installed", f"pip install {name}")
    families = [
        f"{name} {version}"
        for name in _OPTIONAL
        if (version := version_of(name)) is not None
    ]
    yield Finding("env families", "ok", ", ".join(families) or "none installed")


def plain_steps() -> Iterator[Finding]:
    """Report whether the C extension or Python makes plain steps, and why."""
    reasons = native.why_not()
    text = f"Python ({reasons[0]})" if reasons else "C"
    yield _judged(
        "plain steps",
        text,
        is_ok=not reasons or os.environ.get(native.SWITCH, "1") == "0",
    )


def unmet(name: str, installed: str) -> Iterator[str]:
    """Yield the requirements of envherd, torchrl and tensordict that the installed version of `name` does not meet."""
    from packaging.requirements import Requirement

    for wanting in ("envherd", "torchrl", "tensordict"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            for one in map(Requirement, importlib.metadata.requires(wanting) or []):
                is_extra = one.marker is not None and not one.marker.evaluate(
                    {"extra": ""}
                )
                if (
                    one.name == name
                    and not is_extra
                    and not one.specifier.contains(installed, prereleases=True)
                ):
                    yield f"{wanting} wants {one.specifier}"


def _dmlab2d() -> Iterator[Finding]:
    version = version_of("dmlab2d")
    if version is None:
        return
    done = subprocess.run(
        [sys.executable, "-P", "-c", "import dmlab2d"],
        capture_output=True,
        text=True,
        timeout=120.0,
        check=False,
    )
    is_ok = done.returncode == 0
    last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    found = version if is_ok else f"{version} cannot be imported: {last}"
    yield _judged("dmlab2d", found, is_ok=is_ok, otherwise="fail")


def _meltingpot() -> Iterator[Finding]:
    version = version_of("dm-meltingpot")
    if version is None:
        yield Finding(
            "meltingpot",
            "ok",
            "not installed",
            'pip install "envherd[meltingpot]", if you want it; where its download is blocked, before that '
            "python -m envherd.install_meltingpot",
        )
        return
    substrates = len(substrate_names())
    scenarios = len(scenario_names())
    yield _judged(
        "meltingpot",
        f"{version}, {substrates} substrates",
        is_ok=substrates > 0,
        otherwise="fail",
    )
    root = installed()
    models = (
        0
        if root is None
        else len([*root.glob("assets/saved_models/*/*/saved_model.pb")])
    )
    found = f"{scenarios} scenarios, models of {models} bots"
    if not models:
        found = f"the models of the bots are not installed: {scenarios} scenarios cannot run"
    yield _judged("scenarios", found, is_ok=models > 0)
    reason = lua_tree.why_not_edited()
    found = (
        f"its Lua runs as it is installed, because of {reason}"
        if reason
        else "its Lua runs with faster resets"
    )
    yield _judged(
        "meltingpot's Lua",
        found,
        f"install {' and '.join(map('=='.join, lua_edits.VERSIONS.items()))}; a reset takes up to twice as long now",
        is_ok=not reason,
    )


def _mujoco() -> Iterator[Finding]:
    """Look for files of MuJoCo 4 that pip removed with MuJoCo 3, which had the same, in an upgrade in place."""
    version = version_of("mujoco-core")
    if version is not None:
        lost = [
            str(file)
            for file in importlib.metadata.files("mujoco-core") or ()
            if not Path(file.locate()).exists()
        ]
        found = (
            f"{version}; {len(lost)} of its files are missing, such as {lost[0]}"
            if lost
            else version
        )
        yield _judged("mujoco", found, is_ok=not lost, otherwise="fail")


def _rendering() -> Iterator[Finding]:
    if version_of("mujoco") is None:
        return
    has_display = "DISPLAY" in os.environ or "MUJOCO_GL" in os.environ
    found = (
        f"MUJOCO_GL={os.environ.get('MUJOCO_GL', '')!r}"
        if has_display
        else "no display, and MUJOCO_GL is not set: MuJoCo cannot draw"
    )
    yield _judged("rendering", found, is_ok=has_display)


def _egl() -> Iterator[Finding]:
    for one in find_renderers():
        yield _judged(f"EGL device {one.number}", one.describe(), is_ok=not one.problem)


# ---- machine ---------------------------------------------------------------------------------------


def _start(name: Any) -> Iterator[Finding]:
    # Imported here, so earlier findings need not wait for torch.
    from envherd.executor.parallel import ParallelEnv
    from envherd.workers.testing import CountingEnv

    began = time.monotonic()
    with ParallelEnv(
        2,
        CountingEnv,
        num_workers=2,
        options=ExecutorOptions(start_method=name),
    ) as env:
        env.step_and_maybe_reset(env.rand_action(env.reset()))
        took = time.monotonic() - began
    yield Finding(
        f"start method {name}",
        "ok",
        f"two workers started and stepped in {took:.2f} s",
    )


def cores(machine: Machine) -> Iterator[Finding]:
    """Check the processors that this process may use."""
    found = f"{machine.cores:g} of {machine.num_cpus} may be used"
    threads = len(machine.cpus) - machine.physical_cores
    found += f", {threads} of them hyper-threads" if threads else ""
    quota = machine.cgroup.cpu_quota
    if quota is not None and quota < len(machine.cpus):
        found += f": a CPU quota of {quota:g}"
    elif len(machine.cpus) < machine.num_cpus:
        found += ": affinity or a cpuset"
    yield _judged("cores", found, is_ok=quota is None or quota >= 1)
    busy = machine.cpu_pressure or 0.0
    found = f"{machine.load:.2f} processes want a processor"
    if busy > _BUSY:
        found = f"something waited for a processor in {busy:.0%} of the last 10 s"
    yield _judged("load", found, is_ok=busy <= _BUSY)


def torch_threads(machine: Machine) -> Iterator[Finding]:
    """Compare the number of torch's threads in this process with the free processors."""
    import torch

    num_threads = torch.get_num_threads()
    free = max(0.0, machine.cores - machine.load)
    yield _judged(
        "torch threads",
        f"{num_threads}, with {free:.1f} of {machine.cores:g} processors free",
        # 0.5, because a machine is never quite idle.
        is_ok=num_threads <= max(1.0, free + 0.5),
    )


def memory(machine: Machine) -> Iterator[Finding]:
    """Check the memory that this process may use."""
    found = f"{machine.memory_available / _GIB:.1f} of {machine.memory_total / _GIB:.1f} GiB available"
    if machine.cgroup.memory_limit is not None:
        found += f", a limit of {machine.cgroup.memory_limit / _GIB:.1f} GiB"
    yield _judged("memory", found, is_ok=machine.memory_available >= _GIB)
    if machine.cgroup.oom_kills:
        yield _judged(
            "killed for memory",
            f"the kernel has killed {machine.cgroup.oom_kills} processes for the memory limit so far",
            is_ok=False,
        )


def limits(machine: Machine) -> Iterator[Finding]:
    """Check limits on descriptors, processes and address space."""
    left = machine.files_left
    if left is None:
        yield Finding("open files", "ok", "no limit")
    else:
        yield _judged(
            "open files",
            f"{left:,} left: enough for {max(0, left - FILES_FIXED) // FILES_PER_WORKER:,} workers",
            is_ok=left >= _FEWEST_FILES - 64,
            otherwise="fail" if left < _FEWEST_FILES // 8 else "warn",
        )
    room = machine.processes_left
    found = (
        "no limit"
        if room is None
        else f"{room:,} more processes and threads are allowed"
    )
    yield _judged("processes", found, is_ok=room is None or room >= 64)
    space = machine.address_space
    if space is not None:
        yield _judged(
            "address space",
            f"{space / _GIB:.1f} GiB of address space: libraries reserve far more than they use",
            is_ok=False,
        )


def dev_shm(machine: Machine) -> Iterator[Finding]:
    """Check /dev/shm, which envherd does not use but other libraries need."""
    if not platforms.HAS_DEV_SHM:
        return
    total = machine.shm_total or 0
    found = (
        f"{(machine.shm_free or 0) / _MIB:,.0f} of {total / _MIB:,.0f} MiB free"
        if total
        else "there is none"
    )
    yield _judged("/dev/shm", found, is_ok=total >= _GIB)


def gpus(machine: Machine) -> Iterator[Finding]:
    """List the GPUs."""
    if not machine.gpus:
        yield Finding("gpu", "ok", "none; batches stay on the cpu")
    for gpu in machine.gpus:
        free = (
            "" if gpu.free_bytes is None else f", {gpu.free_bytes / _GIB:.1f} GiB free"
        )
        yield Finding(
            "gpu",
            "ok",
            f"{gpu.name}, {gpu.memory_bytes / _GIB:.1f} GiB{free}",
        )


def _left_behind() -> Iterator[Finding]:
    user = platforms.user_id()
    if user is None:
        return
    orphans = " ".join(str(process.pid) for process in orphans_of(user))
    found = f"workers whose owner has gone: {orphans}" if orphans else "nothing"
    yield _judged(
        "left behind",
        found,
        f"kill -9 {orphans}",
        is_ok=not orphans,
        otherwise="fail",
    )


def orphans_of(user: int) -> Iterator[psutil.Process]:
    """Yield this user's helpers and workers whose owner has gone, and their children."""
    for process in psutil.process_iter(["cmdline", "uids", "ppid"]):
        info = process.info
        line = " ".join(info["cmdline"] or ())
        is_orphan = info["ppid"] == 1 and info["uids"] and info["uids"].real == user
        if is_orphan and (
            "envherd.workers.process.zygote import main" in line
            or "envherd.workers.process.entry" in line
        ):
            yield process
            with contextlib.suppress(psutil.Error):
                yield from process.children(recursive=True)
