"""The bounds in pyproject.toml are the versions of the rows in docs/reports/versions.md."""

from __future__ import annotations

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.test_imports import ALLOWED
from tools import compat

HEADS = ["Python", "", *compat.SHOWN.values()]
REQUIREMENTS = [one for one in compat.requirements((*compat.EXTRAS, "rllib")) if one.name in compat.SHOWN]


def versions_of(requirement: Requirement) -> list[Version]:
    """Return the tested versions of a requirement's package, for the Pythons of its marker."""
    versions = []
    for line, _ in compat.read_page().values():
        row = dict(zip(HEADS, (cell.strip() for cell in line.strip("|").split("|")), strict=False))
        python = row["Python"].rpartition(".")[0]
        is_for_it = requirement.marker is None or requirement.marker.evaluate({"python_version": python})
        if is_for_it and row[compat.SHOWN[requirement.name]] != "-":
            versions.append(Version(row[compat.SHOWN[requirement.name]]))
    return versions


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=str)
def test_the_lower_bound_is_the_oldest_version_that_was_run(requirement):
    (lowest,) = (Version(one.version) for one in requirement.specifier if one.operator == ">=")
    assert min(versions_of(requirement)) == lowest


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=str)
def test_the_upper_bound_is_above_the_newest_minor_version_that_was_run(requirement):
    for one in requirement.specifier:
        if one.operator == "<":
            upper = Version(one.version)
            assert max(versions_of(requirement)).release[:2] == (upper.major, upper.minor - 1)


@pytest.mark.parametrize(
    ("parts", "extras"), [(("shm/*", "workers/*", "executor/*"), ()), (("executor/doctor.py",), ("cli",))]
)
def test_what_an_installation_without_other_extras_imports_is_required(parts, extras):
    """What another package requires may be missing with its next version."""
    imported = set().union(*(ALLOWED[part] for part in parts))
    required = {one.name for one in compat.requirements(extras)}
    assert {name for name in imported if not name.startswith("envherd.")} <= required
