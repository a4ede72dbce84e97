"""From the outcomes of `test_matrix` to the page `docs/reports/families.md`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

#: Column -> what it says.
COLUMNS = {
    "contract": "the rules of `envherd.workers.testing`, for a bare block of envs, `SerialEnv` and `ParallelEnv` "
    "(for `ParallelEnv` alone, where a process can have one env, or keeps what an env has left)",
    "plain loop": "rollouts and single steps, compared bit for bit with the env driven by hand through its own API, "
    "with the same seeds and actions",
    "partial resets": "the same, with resets of random envs (or rows) by mask, in the middle of episodes and at their "
    "ends",
    "invalid transitions": "the number of collected transitions, and of those that the env driven by hand did not "
    "make: steps that only reset, observations of the next episode as last ones, steps after an end",
    "seeds": "the same seed gives the same data on one worker and on two, another seed gives others",
    "rendering": "the size of a picture",
    "async": "envs sent and received one by one, compared as above",
}

_HEAD = """# Families of envs

What was checked for each, by `make matrix`, which writes this page from the outcomes of the tests
(`tests/contracts/test_matrix.py`; an ordinary run of the tests makes the same checks with fewer steps). A dash: the
check does not apply, because the env cannot be seeded or a plain loop would have to repeat the adapter.

"""


def write_page(path: Path, rows: Mapping[str, Mapping[str, str]]) -> None:
    """Write the page.

    Args:
        path: where to.
        rows: title -> column -> cell.
    """
    lines = ["| family | " + " | ".join(COLUMNS) + " |", "|---" * (1 + len(COLUMNS)) + "|"]
    for title, cells in rows.items():
        lines.append(f"| {title} | " + " | ".join(cells.get(column, "not run") for column in COLUMNS) + " |")
    legend = [f"- **{column}**: {meaning}." for column, meaning in COLUMNS.items()]
    path.write_text(_HEAD + "\n".join(lines) + "\n\n" + "\n".join(legend) + "\n")


def read_page(path: Path) -> list[list[str]]:
    """Return the rows of the table, each a list of its cells, title first."""
    lines = [line for line in path.read_text().splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]
