"""The bounds in pyproject.toml are the versions of the rows in docs/reports/versions.md."""

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.test_imports import ALLOWED
from tools import compat

HEADS = ["Python", "", *compat.SHOWN.values()]
REQUIREMENTS = [
    one
    for one in compat.requirements((*compat.EXTRAS, "rllib"))
    if one.name in compat.SHOWN
]


def versions_of(requirement: Requirement) -> list[Version]:
    """Return the tested versions of a requirement's package, for the Pythons of its marker."""
    versions = []
    for line, _ in compat.read_page().values():
        row = dict(
            zip(
                HEADS,
                (cell.strip() for cell in line.strip("|").split("|")),
                strict=False,
            )
        )
        python = row["Python"].rpartition(".")[0]
        is_for_it = requirement.marker is None or requirement.marker.evaluate(
            {"python_version": python}
        )
        if is_for_it and row[compat.SHOWN[requirement.name]] != "-":
            versions.append(Version(row[compat.SHOWN[requirement.name]]))
    return versions


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=str)
def test_the_lower_bound_is_the_oldest_version_that_was_run(requirement):
    lower = [
        Version(one.version) for one in requirement.specifier if one.operator == ">="
    ]
    assert [min(versions_of(requirement))] == lower


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=str)
def test_the_upper_bound_is_above_the_newest_minor_version_that_was_run(requirement):
    for one in requirement.specifier:
        if one.operator == "<":
            *head, last = Version(one.version).release
            assert max(versions_of(requirement)).release[: len(head) + 1] == (
                *head,
                last - 1,
            )


@pytest.mark.parametrize(
    ("parts", "extras"),
    [(("shm/*", "workers/*", "executor/*"), ()), (("executor/doctor.py",), ("cli",))],
)
def test_modules_imported_without_extras_are_required(parts, extras):
    """What another package requires may be missing with its next version."""
    imported = set().union(*(ALLOWED[part] for part in parts))
    required = {one.name for one in compat.requirements(extras)}
    assert {name for name in imported if not name.startswith("envherd.")} <= required
