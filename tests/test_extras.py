"""Extras named by tests exist."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tests import extras

ROOT = Path(__file__).parents[1]


def test_every_extra_that_a_test_may_need_can_be_installed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(extras.PACKAGES) <= set(project["optional-dependencies"])


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(extras.PACKAGES, "ray", ("no_such_package_x",))
    assert extras.needs("gymnasium", "ray").kwargs == {"reason": "needs envherd[ray]"}
    assert extras.needs("gymnasium", "ray").args == (True,)
    with pytest.raises(pytest.skip.Exception, match=r"needs envherd\[ray\]"):
        extras.skip_without("gymnasium", "ray")
