"""Writes `docs/reports/families.md` where `ENVHERD_MATRIX` names it: see `make matrix`."""

import os
from pathlib import Path

import pytest

_cells: dict[str, dict[str, str]] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep what the tests of the matrix have recorded."""
    name = report.nodeid.partition("test_matrix.py::test_family[")[2].rstrip("]")
    if name and report.when == "call" and not report.skipped:
        _cells[name] = {column: str(cell) for column, cell in report.user_properties}


def pytest_sessionfinish() -> None:
    """Write the page; rows of families that were not run stay as they are."""
    target = os.environ.get("ENVHERD_MATRIX")
    if not target or not _cells:
        return
    from tests.contracts.families import FAMILIES
    from tools.families_page import COLUMNS, read_page, write_page

    page = Path(target)
    known = (
        {row[0]: dict(zip(COLUMNS, row[1:], strict=False)) for row in read_page(page)}
        if page.exists()
        else {}
    )
    rows = {
        family.title: _cells.get(name) or known.get(family.title, {})
        for name, family in FAMILIES.items()
    }
    write_page(page, rows)
