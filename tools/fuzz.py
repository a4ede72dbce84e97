"""Run the fuzzers for some time: `make fuzz MINUTES=10`, `python -m tools.fuzz --minutes 10`.

Every case is a separate process, forked from this one, which has imported everything. A hang or a crash of a case is
reported, and the next one begins. The option sets take turns in a random order. Exit code 1 means that some cases
failed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import os
import random
import re
import secrets
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

#: Set before numpy is imported: a process that forks should have one thread. Cases start threads themselves.
os.environ |= {
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}

from tests.oracles import fuzz_executor, fuzzing  # see above

#: Seconds for a case as a whole.
CASE_S = 4 * fuzzing.HANG_S
TAIL = 25


def run_case(variant: str, seed: int, operations: int, log: Path) -> str:
    """Run one case in a fork; return "" or a text on its failure. `log` gets its operations."""
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            os.close(descriptor)
            sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1)
            code = fuzzing.run_case(fuzz_executor.run, seed, variant, operations)
        except BaseException:
            code = 3
        os._exit(code)
    end = time.monotonic() + CASE_S
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            code = os.waitstatus_to_exitcode(status)
            break
        if time.monotonic() > end:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return f"took longer than {CASE_S:g} s"
        time.sleep(0.01)
    if code == 0:
        return ""
    lines = log.read_text(errors="replace").splitlines()
    if any(line.startswith("Timeout (") for line in lines):
        return "hung"
    causes = [
        line
        for line in lines
        if line[:1].strip()
        and not line.startswith(("Traceback", "During", "The above"))
    ]
    return causes[-1] if causes else f"exit code {code}"


def _is_runnable(variant: str) -> bool:
    """Return whether what a variant needs is installed."""
    names = {name: name for name in ("gymnasium", "pettingzoo", "torchrl")}
    needed = {**names, "sb3": "stable_baselines3"}.get(
        variant.removeprefix("interrupted ")
    )
    return needed is None or importlib.util.find_spec(needed) is not None


def cases(
    variant: str | None, first: int, skipped: Sequence[str] = ()
) -> Iterator[tuple[str, int]]:
    """Yield option set and seed of cases: all option sets in a random order, again and again."""
    found = [one for one in fuzz_executor.VARIANTS if variant in (None, one)]
    found = [one for one in found if one not in skipped and _is_runnable(one)]
    random.Random(first).shuffle(found)
    for seed, one in enumerate(itertools.cycle(found), first):
        yield one, seed


def _tail(log: Path) -> list[str]:
    """Return the options, the last operations and what came after them."""
    lines = log.read_text(errors="replace").splitlines()
    is_operation = [bool(re.match(r" *\d+\.\d{3} ", line)) for line in lines]
    opened = max(
        (i for i, line in enumerate(lines) if is_operation[i] and " open " in line),
        default=0,
    )
    operations = [
        line
        for line, is_one in zip(
            lines[opened + 1 :], is_operation[opened + 1 :], strict=True
        )
        if is_one
    ]
    rest = [
        line
        for line, is_one in zip(
            lines[opened + 1 :], is_operation[opened + 1 :], strict=True
        )
        if not is_one
    ]
    return [lines[opened] if lines else "", *operations[-TAIL:], *rest[-TAIL:]]


def main() -> int:
    """Run from the shell."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.fuzz", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument(
        "--cases",
        type=int,
        default=0,
        help="stop after this number of cases; default: when the time is over",
    )
    parser.add_argument("--variant", help="one option set alone")
    parser.add_argument(
        "--skip", action="append", default=[], help="leave an option set out"
    )
    parser.add_argument(
        "--seed", type=int, help="of the first case; default: a fresh one"
    )
    parser.add_argument("--operations", type=int, default=120, help="of each case")
    parser.add_argument(
        "--logs",
        type=Path,
        default=Path("build/fuzz"),
        help="where the logs of failed cases go",
    )
    arguments = parser.parse_args()
    arguments.logs.mkdir(parents=True, exist_ok=True)
    first = (
        secrets.randbelow(10**6) * 1000 if arguments.seed is None else arguments.seed
    )
    end = time.monotonic() + 60 * arguments.minutes
    passed: Counter[str] = Counter()
    failed: list[str] = []
    for number, (variant, seed) in enumerate(
        cases(arguments.variant, first, arguments.skip)
    ):
        if time.monotonic() > end or (arguments.cases and number >= arguments.cases):
            break
        log = arguments.logs / f"{re.sub(r'[ ,]+', '_', variant)}-{seed}.log"
        what = run_case(variant, seed, arguments.operations, log)
        if not what:
            passed[variant] += 1
            log.unlink()
            continue
        command = f"python -m tools.fuzz --variant {variant!r} --seed {seed} --cases 1"
        command += f" --operations {arguments.operations}"
        failed.append(f"{what}\n  repeat: {command}\n  log: {log}")
        print(f"\nFAILED {failed[-1]}", *_tail(log), sep="\n  ", flush=True)
    print(
        f"\n{passed.total()} cases passed:",
        *(f"{count:5d} {name}" for name, count in sorted(passed.items())),
        sep="\n  ",
    )
    print(f"{len(failed)} failed:" if failed else "none failed", *failed, sep="\n  ")
    return 1 if failed else 0


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
