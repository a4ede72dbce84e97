"""Writes the page `docs/reports/faults.md` from the recordings of the fault tests: `python -m tools.faults_page FILE`.

The tests record to the file that ENVHERD_FAULTS names, one line of JSON per test. The last recording of a test counts,
so the tests can be run in parts. The section of the page from benchmarks/faults.py is kept.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import sys
from datetime import date
from pathlib import Path
from typing import Any

from tests.faults.matrix import CELLS, FAULTS, STATES, Cell

PAGE = Path(__file__).parents[1] / "docs" / "reports" / "faults.md"
#: Outcomes for the other envs that the page describes once, so that cells leave them out.
USUAL = ("go on", "go on, all", "go on; all after a reset")
PEERS = "## Other executors"

_HEAD = """# Faults

What the caller sees when an env, a worker or the machine fails. `make faults` writes this page from the results of its
tests ({machine}); an ordinary test run covers some of them.
The faults are real: processes are killed, and the GIL is held. After each fault, `close()` left no process, no
descriptor and no name in `/dev/shm`.

Times are from the call to the exception, in one run on a busy machine. Hangs had a deadline of 0.5 s (reset and
render: 2 s; build and rebuild: 4 s, or 12 s with `spawn`). A dash marks a combination that does not exist.

Faults are named in the tables:

- `value_error` to `unprintable`: the env raises that exception, or one that cannot be pickled, unpickled or printed.
- `none` to `ragged`: the env returns an observation that breaks its spec.
- `exit` to `term`: the worker exits, crashes or gets that signal.
- `sleep`, `spin`, `gil`, `stop`: the worker hangs asleep, in a loop, in C with the GIL held, or after SIGSTOP.

"""

_INTERLUDE = """
Two envs are in one worker, and one of them breaks. A third env is in another worker. If an env raises, all other envs
continue, including the one in the same worker, and the failed env can be reset. If a worker crashes, the envs of other
workers continue (after a reset if a cell says so). The envs of the crashed worker raise the error at every call. With
`on_worker_loss="restart"` they are built again:

"""

_RAISING = """

With `on_env_error="interrupt"`, an exception in a step or reset ends only the episode of its env:

"""

_METHODS = """

The next table has faults for which the start method could matter, with the other methods. With the portable pool, the
tests also cover all combinations of the tables above:

"""

_SURROUNDINGS = """## The caller and the machine

The owner is the process that made the executor.

| what | what the caller sees, and what is left |
|---|---|
"""


def record(name: str, **found: Any) -> None:
    """Append the results of a test to the file that ENVHERD_FAULTS names, if it is set."""
    if path := os.environ.get("ENVHERD_FAULTS"):
        with open(path, "a") as file:
            file.write(json.dumps({"name": name, **found}) + "\n")


def table(recorded: dict[str, dict[str, Any]], policy: str) -> list[str]:
    """Return the lines of the table of faults by states, for one policy of `Cell`."""
    states = [
        state
        for state in STATES
        if policy == "raise" or state not in ("build", "close")
    ]
    lines = ["| fault | " + " | ".join(states) + " |", "|---" * (1 + len(states)) + "|"]
    for fault in FAULTS:
        cells = [Cell(fault, state, policy) for state in states]
        if any(cell in CELLS for cell in cells):
            lines.append(
                f"| {fault} | "
                + " | ".join(_text(recorded, cell) for cell in cells)
                + " |"
            )
    return lines


def _text(recorded: dict[str, dict[str, Any]], cell: Cell) -> str:
    found = recorded.get(cell.name)
    if found is None:
        return "not run" if cell in CELLS else "-"
    is_usual = found["others"] in ("no executor", "closed too", *USUAL)
    others = "" if is_usual else f"; others {found['others']}"
    return f"{found['seen']}, {found['seconds']:.2f} s{others}"


def methods(recorded: dict[str, dict[str, Any]]) -> list[str]:
    """Return the lines of the table of start methods."""
    lines = [
        "| start method | fault | " + " | ".join(STATES) + " |",
        "|---" * (2 + len(STATES)) + "|",
    ]
    for method, fault in itertools.product(
        ("spawn", "portable"), ("segfault", "kill", "gil")
    ):
        cells = [
            _text(recorded, Cell(fault, state, "raise", method)) for state in STATES
        ]
        lines.append(f"| {method} | {fault} | " + " | ".join(cells) + " |")
    return lines


def write(recorded: dict[str, dict[str, Any]], page: Path = PAGE) -> None:
    """Write the page; keep its section of other executors."""
    machine = f"Python {platform.python_version()}, Linux {platform.release()}, {os.cpu_count()} processors"
    machine = f"{date.today():%d %b %Y}; {machine}"
    parts = [_HEAD.format(machine=machine), "## Envs and workers\n\n"]
    parts += [f"- **{state}**: {meaning}.\n" for state, (_, meaning) in STATES.items()]
    parts += [
        "\n",
        "\n".join(table(recorded, "raise")),
        "\n",
        _INTERLUDE,
        "\n".join(table(recorded, "restart")),
    ]
    parts += [_RAISING, "\n".join(table(recorded, "interrupt"))]
    parts += [_METHODS, "\n".join(methods(recorded)), "\n\n", _SURROUNDINGS]
    parts += sorted(
        f"| {found['what']} | {found['seen']} |\n"
        for found in recorded.values()
        if "what" in found
    )
    old = page.read_text() if page.exists() else ""
    peers = old[old.index(PEERS) :] if PEERS in old else ""
    page.write_text("".join(parts) + ("\n" + peers if peers else ""))


if __name__ == "__main__":
    rows = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    write({row["name"]: row for row in rows})
