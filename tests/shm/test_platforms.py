"""What each system has: found by trying, and needed by no module when it is imported."""

import ast
import os
import re
import runpy
import select
import signal
import socket
from pathlib import Path

import pytest

from envherd.shm import platforms

ROOT = Path(__file__).parents[2]


def _used_at_import(node, names, lacking):
    """Yield the attributes and modules that a file needs when it is imported, and that a system lacks."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.Lambda)):
            for part in (*child.args.defaults, *filter(None, child.args.kw_defaults)):
                yield from _used_at_import(ast.Expr(part), names, lacking)
            continue
        if isinstance(child, ast.Attribute) and isinstance(child.value, ast.Name):
            if child.attr in names.get(child.value.id, ()):
                yield f"{child.value.id}.{child.attr}"
        elif isinstance(child, ast.Import):
            yield from ({alias.name for alias in child.names} & lacking)
        elif isinstance(child, ast.ImportFrom):
            yield from (alias.name for alias in child.names if alias.name in names.get(child.module, ()))
        yield from _used_at_import(child, names, lacking)


@pytest.mark.parametrize("system", ["windows", "macos"])
def test_no_module_needs_at_its_import_what_another_system_lacks(system):
    what = runpy.run_path(str(ROOT / "tests" / "lacking" / "sitecustomize.py"))
    names = {module: set(text.split()) for module, text in what["LACKING"][system].items()}
    missing = what["MISSING_MODULES"][system]
    files = [path for layer in ("shm", "workers", "executor") for path in (ROOT / layer).rglob("*.py")]
    assert len(files) > 200
    used = {path.name: list(_used_at_import(ast.parse(path.read_text()), names, missing)) for path in files}
    assert {name: found for name, found in used.items() if found} == {}


def test_one_file_tells_systems_apart():
    files = [path for layer in ("shm", "workers", "executor") for path in (ROOT / layer).rglob("*.py")]
    telling = re.compile(r"sys\.platform|platform\.system|\bos\.name\b|IS_LINUX")
    assert [path.name for path in files if telling.search(path.read_text())] == ["platforms.py"]


@pytest.mark.parametrize(
    ("module", "name", "expected"),
    [
        (os, "fork", "fork"),
        (os, "waitid", "waitid"),
        (signal, "SIGKILL", "SIGKILL"),
        (select, "poll", "poll"),
        (socket, "send_fds", "send_fds"),
    ],
)
def test_a_name_that_the_forked_pool_needs_is_missed(module, name, expected, monkeypatch):
    platforms.missing.cache_clear()
    monkeypatch.delattr(module, name)
    try:
        assert platforms.missing() == (expected,)
    finally:
        platforms.missing.cache_clear()


@pytest.mark.parametrize("error", [AttributeError, OSError])
def test_a_semaphore_that_raises_is_missed(error, monkeypatch):
    """The probe itself does not raise."""

    class Library:
        def __getattr__(self, name):
            raise error(name)

    platforms.missing.cache_clear()
    monkeypatch.setattr(platforms, "libc", Library())
    try:
        assert "process-shared semaphores" in platforms.missing()
    finally:
        platforms.missing.cache_clear()


def test_what_this_system_has_is_found(monkeypatch):
    assert platforms.missing() == ()
    platforms.missing.cache_clear()
    monkeypatch.setitem(platforms._NEEDS, "pidfd_open", lambda: os.close(-1))
    try:
        assert platforms.missing() == ("pidfd_open",)
    finally:
        platforms.missing.cache_clear()
