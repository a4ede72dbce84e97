"""Compare faults under envherd and other executors: when the caller knows, what is left, what still works.

Every case runs in a separate process, whose orphans this one adopts and counts. Executors have their default settings,
except for envherd's deadline if an env hangs (the others have none, or one of hours) and TorchRL's start method.

Run: python -m benchmarks.faults [--write]    (--write: into docs/reports/faults.md)
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import json
import os
import platform
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete

from benchmarks import ROOT

NUM_ENVS, VICTIM, FAULT_STEP = 3, 2, 3
LIMIT_S = 10.0  # for a call to return; later it counts as hanging
DEADLINE_S = 1.0  # for envherd
_PR_SET_CHILD_SUBREAPER = 36
OURS = "envherd"

FAULTS = {
    "raises": "raises in step",
    "unpicklable": "raises what cannot be pickled",
    "segfault": "segfault in step",
    "kill": "worker SIGKILLed in step",
    "gil": "hangs with the GIL held",
    "owner": "parent SIGKILLed, env hung",
}


class Faulty(gymnasium.Env[np.ndarray, Any]):
    """Counts its steps in four floats; at one step it records the time and breaks."""

    observation_space = Box(-1e6, 1e6, (4,), np.float32)
    action_space = Discrete(2)

    def __init__(self, fault: str | None = None, stamp: str = "") -> None:
        self._fault, self._stamp = fault, stamp
        self._count = 0

    def reset(
        self, *, seed: int | None = None, options: Any = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin to count."""
        super().reset(seed=seed, options=options)
        self._count = 0
        return np.zeros(4, np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:  # noqa: ARG002  # it only counts
        """Count, or break; once."""
        self._count += 1
        if (
            self._fault is not None
            and self._count == FAULT_STEP
            and not Path(self._stamp).exists()
        ):
            Path(self._stamp).write_text(str(time.monotonic()))
            _break(self._fault)
        return np.full(4, self._count, np.float32), 0.0, False, False, {}


def _break(fault: str) -> None:
    if fault == "raises":
        raise ValueError("the env broke on purpose")
    if fault == "unpicklable":
        error = ValueError("the env broke on purpose")
        error.held = lambda: None  # type: ignore[attr-defined]
        raise error
    if fault == "segfault":
        ctypes.string_at(0)
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    mutex, lock = ctypes.create_string_buffer(64), ctypes.PyDLL(None).pthread_mutex_lock
    lock(mutex)
    lock(mutex)


#: Functions that end a pool, reset it, and step it once.
Pool = tuple[Callable[[], Any], Callable[[], Any], Callable[[], Any]]


def ours(makers: list[Callable[[], Any]]) -> Pool:
    """Build `ParallelEnv`."""
    from envherd.executor import ExecutorOptions, ParallelEnv

    options = ExecutorOptions(step_timeout_s=DEADLINE_S, on_worker_loss="restart")
    env = ParallelEnv(NUM_ENVS, makers, num_workers=NUM_ENVS, options=options)

    def step() -> Any:
        td, _ = env.step_and_maybe_reset(env.rand_action())
        if td["next", "interrupted"].any():
            raise RuntimeError("rows `interrupted`")
        return td

    return env.close, env.reset, step


def gymnasium_async(makers: list[Callable[[], Any]]) -> Pool:
    """Build `AsyncVectorEnv`."""
    env = gymnasium.vector.AsyncVectorEnv(makers)
    return env.close, env.reset, lambda: env.step(np.zeros(NUM_ENVS, np.int64))


def sb3(makers: list[Callable[[], Any]]) -> Pool:
    """Build `SubprocVecEnv`."""
    from stable_baselines3.common.vec_env import SubprocVecEnv

    env = SubprocVecEnv(makers)
    return env.close, env.reset, lambda: env.step(np.zeros(NUM_ENVS, np.int64))


def torchrl(makers: list[Callable[[], Any]]) -> Pool:
    """Build TorchRL's `ParallelEnv`, forked: spawned workers take half a minute to import it on a busy machine."""
    from torchrl.envs import GymWrapper, ParallelEnv

    env = ParallelEnv(
        NUM_ENVS,
        [lambda make=make: GymWrapper(make()) for make in makers],
        mp_start_method="fork",
    )
    return env.close, env.reset, lambda: env.step(env.rand_action())


EXECUTORS: dict[str, Callable[[list[Callable[[], Any]]], Pool]] = {
    OURS: ours,
    "Gymnasium AsyncVectorEnv": gymnasium_async,
    "SB3 SubprocVecEnv": sb3,
    "TorchRL ParallelEnv": torchrl,
}
PACKAGES = ("gymnasium", "stable_baselines3", "torchrl")


def run_case(executor: str, fault: str, folder: str) -> None:
    """Run in the process with the fault: record what the caller sees, and when."""
    stamp = f"{folder}/stamp"
    say = functools.partial(_say, f"{folder}/reported")
    breaking = functools.partial(Faulty, "gil" if fault == "owner" else fault, stamp)
    makers: list[Callable[[], Any]] = [Faulty] * NUM_ENVS
    makers[VICTIM] = breaking
    close, reset, step = EXECUTORS[executor](makers)
    reset()
    say(stage="ready")
    try:
        for _ in range(FAULT_STEP + 1):
            step()
        say(stage="seen", what="nothing", seconds=None)
    except BaseException as error:
        text = f"{type(error).__name__}: {error}".splitlines()[0].rstrip(": ")
        say(
            stage="seen",
            what=text,
            seconds=time.monotonic() - float(Path(stamp).read_text()),
        )
    try:
        reset()
        step()
        say(stage="used", what="yes")
    except BaseException as error:
        say(stage="used", what=f"no: {type(error).__name__}")
    try:
        close()
        say(stage="closed", what="ok")
    except BaseException as error:
        say(stage="closed", what=type(error).__name__)


def _say(path: str, **line: Any) -> None:
    with open(path, "a") as file:
        file.write(json.dumps(line) + "\n")


def measure(executor: str, fault: str) -> dict[str, Any]:
    """Run one case; return the observations, and what was left after its process had ended."""
    before = set(os.listdir("/dev/shm"))
    with tempfile.TemporaryDirectory() as folder:
        pid = os.fork()
        if pid == 0:
            null = os.open(os.devnull, os.O_RDWR)
            for fd in range(3):
                os.dup2(null, fd)
            with contextlib.suppress(BaseException):
                run_case(executor, fault, folder)
            os._exit(0)
        heard = _follow(pid, Path(folder), fault)
    time.sleep(2.0)
    left = _children()
    for one in left:
        with contextlib.suppress(OSError):
            os.kill(one, signal.SIGKILL)
            os.waitpid(one, 0)
    heard["processes"], heard["names"] = (
        len(left),
        len(set(os.listdir("/dev/shm")) - before),
    )
    for name in set(os.listdir("/dev/shm")) - before:
        with contextlib.suppress(OSError):
            os.unlink(f"/dev/shm/{name}")
    return heard


def _follow(pid: int, folder: Path, fault: str) -> dict[str, Any]:
    """Read a case's reports stage by stage; kill it if it hangs, or if that is the fault."""
    heard: dict[str, Any] = {}
    limit = time.monotonic() + 60
    while True:
        reported = folder / "reported"
        for line in map(
            json.loads, reported.read_text().splitlines() if reported.exists() else ()
        ):
            if line["stage"] not in heard:
                heard[line["stage"]] = line
                limit = time.monotonic() + LIMIT_S
        has_ended = os.waitpid(pid, os.WNOHANG)[0] == pid
        is_due = fault == "owner" and (folder / "stamp").exists() and "ready" in heard
        if has_ended:
            return heard
        if time.monotonic() > limit or is_due:
            time.sleep(0.3)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return heard
        time.sleep(0.005)


def _children() -> list[int]:
    """Return the pids of adopted orphans that still live."""
    found = []
    for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        with contextlib.suppress(OSError):
            if (
                Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
                == "Z"
            ):
                os.waitpid(int(child), 0)
            else:
                found.append(int(child))
    return found


def cell(heard: dict[str, Any], fault: str) -> str:
    """Return a short text for the outcome of a case."""
    left = f"{heard['processes']} processes" + (
        f" and {heard['names']} names in /dev/shm" if heard["names"] else ""
    )
    left = "nothing left" if left == "0 processes" else f"**{left} left**"
    if fault == "owner":
        return left
    if "ready" not in heard:
        return "could not be built"
    if "seen" not in heard:
        return f"**hangs**; {left}"
    seen, used, closed = heard["seen"], heard.get("used"), heard.get("closed")
    what = (
        seen["what"]
        .partition(": the env br")[0][:60]
        .replace("RuntimeError: rows", "rows")
        .replace("|", "/")
    )
    usable = "**hangs when used**" if used is None else f"usable: {used['what']}"
    if used is not None and closed is None:
        usable += ", **`close` hangs**"
    elif closed is not None and closed["what"] != "ok":
        usable += f", `close` raises {closed['what']}"
    when = "" if seen["seconds"] is None else f" after {seen['seconds']:.2f} s"
    return f"{what}{when}; {usable}; {left}"


def as_table(found: dict[str, dict[str, dict[str, Any]]]) -> str:
    """Return the table in Markdown."""
    lines = [
        "| fault | " + " | ".join(EXECUTORS) + " |",
        "|---" * (1 + len(EXECUTORS)) + "|",
    ]
    for fault, title in FAULTS.items():
        lines.append(
            f"| {title} | "
            + " | ".join(cell(found[name][fault], fault) for name in EXECUTORS)
            + " |"
        )
    return "\n".join(lines)


def write(table: str) -> None:
    """Put the table into docs/reports/faults.md."""
    versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    title = "## Other executors"
    text = (
        f"{title}\n\n`python -m benchmarks.faults` causes the same faults in the last of three envs "
        f"({date.today():%d %b %Y}; {versions}, Python {platform.python_version()}; {os.cpu_count()} processors). "
        "All executors have their default settings, with two "
        "exceptions. TorchRL's workers are forked, since they start sooner. envherd has a deadline of "
        f"{DEADLINE_S:g} s and "
        '`on_worker_loss="restart"`; its times include building and resetting the env in the new worker. *Hangs* means '
        f"that the call did not return within {LIMIT_S:g} s. *Left* is counted 2 s after the process of the executor "
        "has ended.\n\n" + table + "\n"
    )
    page = ROOT / "docs" / "reports" / "faults.md"
    old = page.read_text() if page.exists() else "# Faults\n\n"
    page.write_text(old.split(title)[0].rstrip("\n") + "\n\n" + text)


def _be_alone_in_shm() -> None:
    """Run again with a private /dev/shm, if that is allowed, so that only our own names are counted."""
    if "--alone" in sys.argv or os.getuid() != 0:
        return
    program = 'mount -t tmpfs -o size=1g none /dev/shm && exec "$0" "$@"'
    os.execvp(
        "unshare",
        ["unshare", "-m", "sh", "-c", program, sys.executable, *sys.argv, "--alone"],
    )


def main() -> None:
    """Run from the shell."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument(
        "--write", action="store_true", help="put the table into docs/reports/faults.md"
    )
    parser.add_argument(
        "--only",
        nargs="*",
        default=list(FAULTS),
        choices=list(FAULTS),
        help="these faults",
    )
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    _be_alone_in_shm()
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    for name in (
        *PACKAGES,
        "torchrl.envs",
        "stable_baselines3.common.vec_env",
        "envherd.executor.parallel",
    ):
        __import__(name)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    found: dict[str, dict[str, dict[str, Any]]] = {name: {} for name in EXECUTORS}
    for fault in arguments.only:
        for name in EXECUTORS:
            found[name][fault] = measure(name, fault)
            print(f"{fault:12} {name:26} {cell(found[name][fault], fault)}", flush=True)
    if set(arguments.only) == set(FAULTS):
        table = as_table(found)
        print(table)
        if arguments.write:
            write(table)


if __name__ == "__main__":
    main()
