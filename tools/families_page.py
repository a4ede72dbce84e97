"""Writes the page `docs/reports/families.md` from the results of `test_matrix`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

#: Column -> meaning of its cells, for the legend of the page.
COLUMNS = {
    "contract": "the rules of `envherd.executor.testing` that hold: for `SerialEnv`, and for `ParallelEnv` with "
    "its own pool and with the portable pool. Families of which a process can "
    "have only one env, or whose envs leave state in their process, are checked with `ParallelEnv` only",
    "plain loop": "the transitions of rollouts and single steps that equal, bit for bit, those of the env driven "
    "directly through its own API, with the same seeds and actions",
    "partial resets": "the resets of random envs (or rows) by mask, during and at the end of episodes. All transitions "
    "are compared as in *plain loop*",
    "invalid transitions": "the collected transitions that the env, driven directly, did not make: steps that only "
    "reset, observations of the next episode as last ones, steps after an end",
    "seeds": "whether the same seed gives the same data on one worker and on two, and another seed gives other data",
    "rendering": "height and width of a picture, in pixels",
    "async": "the transitions of envs that were sent and received one by one, compared as in *plain loop*",
    "portable": "the transitions of rollouts, single steps and exchanges with the portable pool that equal, bit for "
    "bit, those with forked workers",
}

_HEAD = """# Families of envs

`make matrix` writes this page from the results of `tests/contracts/test_matrix.py`. An ordinary test run makes the same
checks with fewer steps. A dash marks a check that does not apply: the env cannot be seeded, or driving it directly
would repeat the code of its adapter.

"""


def write_page(path: Path, rows: Mapping[str, Mapping[str, str]]) -> None:
    """Write the page.

    Args:
        path: of the page.
        rows: title -> column -> cell.
    """
    lines = [
        "| family | " + " | ".join(COLUMNS) + " |",
        "|---" * (1 + len(COLUMNS)) + "|",
    ]
    for title, cells in rows.items():
        lines.append(
            f"| {title} | "
            + " | ".join(cells.get(column, "not run") for column in COLUMNS)
            + " |"
        )
    legend = [f"- **{column}**: {meaning}." for column, meaning in COLUMNS.items()]
    path.write_text(_HEAD + "\n".join(lines) + "\n\n" + "\n".join(legend) + "\n")


def read_page(path: Path) -> list[list[str]]:
    """Return the rows of the page's table, each as a list of cells that begins with the title."""
    lines = [line for line in path.read_text().splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]
