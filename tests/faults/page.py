"""From what the tests of the matrix recorded to the page `docs/reports/faults.md`: `python -m tests.faults.page`.

Recordings are lines of JSON in the file that ENVHERD_FAULTS names, one per test; of one name the last counts, so
that the tests may be run in parts. The part of the page from benchmarks/faults.py stays as it is.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

from tests.faults.matrix import CELLS, FAULTS, STATES, Cell

PAGE = Path(__file__).parents[2] / "docs" / "reports" / "faults.md"
#: What the page says of all cells once.
USUAL = ("go on", "go on, all", "go on; all after a reset")
PEERS = "## Other executors"

_HEAD = """# Faults

What happens when something breaks. This page is written by `make faults` from the records of its tests
({machine}); an ordinary run makes part of them.
All faults are real: the process is really killed, the GIL really held. After every one of them `close()` left no
process, no descriptor and no name in /dev/shm.

Seconds are from the call to the exception, of one run on a busy machine. Hangs were given a deadline of 0.5 s (4 s to
build, 12 s if spawned; 2 s to reset and to render). A dash: there is no such thing.

"""

_INTERLUDE = """
The worker runs two envs, one of which breaks; another worker runs a third. When an env raises, all other envs continue,
including those in the same worker; the failed env can be reset. When a worker crashes, the envs of other workers
continue (after a reset where a cell says so). Those of the crashed worker raise the error at every call, or, with
`on_worker_loss="restart"`, are built anew:

"""


def record(name: str, **found: Any) -> None:
    """Keep what a test found, if ENVHERD_FAULTS names a file for that."""
    if path := os.environ.get("ENVHERD_FAULTS"):
        with open(path, "a") as file:
            file.write(json.dumps({"name": name, **found}) + "\n")


def table(recorded: dict[str, dict[str, Any]], policy: str) -> list[str]:
    """Return the lines of the table fault x state for one policy."""
    states = [state for state in STATES if policy == "raise" or state not in ("build", "close")]
    lines = ["| fault | " + " | ".join(states) + " |", "|---" * (1 + len(states)) + "|"]
    for fault in FAULTS:
        cells = [Cell(fault, state, policy) for state in states]
        if any(cell in CELLS for cell in cells):
            lines.append(f"| {fault} | " + " | ".join(_text(recorded, cell) for cell in cells) + " |")
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
    lines = ["| start method | fault | " + " | ".join(STATES) + " |", "|---" * (2 + len(STATES)) + "|"]
    for method in ("spawn", "fork"):
        for fault in ("segfault", "kill", "gil"):
            cells = [_text(recorded, Cell(fault, state, "raise", method)) for state in STATES]
            lines.append(f"| {method} | {fault} | " + " | ".join(cells) + " |")
    return lines


def write(recorded: dict[str, dict[str, Any]], page: Path = PAGE) -> None:
    """Write the page."""
    machine = f"Python {platform.python_version()}, Linux {platform.release()}, {os.cpu_count()} processors"
    parts = [_HEAD.format(machine=machine), "## Envs and workers\n\n"]
    parts += [f"- **{state}**: {meaning}.\n" for state, (_, meaning) in STATES.items()]
    parts += ["\n", "\n".join(table(recorded, "raise")), "\n", _INTERLUDE, "\n".join(table(recorded, "restart"))]
    parts += ["\n\nOther start methods, where they could matter:\n\n", "\n".join(methods(recorded)), "\n\n"]
    parts += ["## The caller and the machine\n\n| what | what the caller sees, and what is left |\n|---|---|\n"]
    parts += [f"| {found['what']} | {found['seen']} |\n" for found in recorded.values() if "what" in found]
    old = page.read_text() if page.exists() else ""
    peers = old[old.index(PEERS) :] if PEERS in old else ""
    page.write_text("".join(parts) + ("\n" + peers if peers else ""))


if __name__ == "__main__":
    rows = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    write({row["name"]: row for row in rows})
