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
SOURCES = [
    path
    for layer in ("shm", "workers", "executor")
    for path in (ROOT / layer).rglob("*.py")
]


@pytest.fixture
def probed_anew():
    """Let `platforms.missing` try again what it has tried before, and after the test once more."""
    platforms.missing.cache_clear()
    yield
    platforms.missing.cache_clear()


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
            yield from (
                alias.name
                for alias in child.names
                if alias.name in names.get(child.module, ())
            )
        yield from _used_at_import(child, names, lacking)


@pytest.mark.parametrize("system", ["windows", "macos"])
def test_no_module_needs_at_its_import_what_another_system_lacks(system):
    what = runpy.run_path(str(ROOT / "tests" / "lacking" / "sitecustomize.py"))
    names = {
        module: set(text.split()) for module, text in what["LACKING"][system].items()
    }
    missing = what["MISSING_MODULES"][system]
    assert len(SOURCES) > 200
    used = {
        path.name: list(_used_at_import(ast.parse(path.read_text()), names, missing))
        for path in SOURCES
    }
    assert {name: found for name, found in used.items() if found} == {}


def test_one_file_tells_systems_apart():
    telling = re.compile(r"sys\.platform|platform\.system|\bos\.name\b|IS_LINUX")
    assert [path.name for path in SOURCES if telling.search(path.read_text())] == [
        "platforms.py"
    ]


@pytest.mark.usefixtures("probed_anew")
@pytest.mark.parametrize(
    ("module", "name", "expected"),
    [
        (os, "fork", "fork"),
        (os, "waitid", "waitid"),
        (signal, "SIGKILL", "SIGKILL"),
        (select, "poll", "poll"),
        (socket, "recv_fds", "recv_fds"),
    ],
)
def test_a_name_that_the_forked_pool_needs_is_missed(
    module, name, expected, monkeypatch
):
    monkeypatch.delattr(module, name)
    assert platforms.missing() == (expected,)


@pytest.mark.parametrize(
    "more", [{}, {"is_group": True}, {"pidfd": 3}], ids=["process", "group", "pidfd"]
)
def test_no_signal_goes_to_this_process_its_group_or_all_processes(more, monkeypatch):
    sent = []
    for module, name in ((os, "kill"), (os, "killpg"), (signal, "pidfd_send_signal")):
        monkeypatch.setattr(module, name, lambda *signal: sent.append(signal))
    monkeypatch.setattr(os, "getpgrp", lambda: 4711)
    # A process with that id may be another one.
    own = [4711] if "is_group" in more else []
    for pid in (0, -1, 1, -2, -4711, os.getpid(), -os.getpid(), *own):
        with pytest.raises(
            ProcessLookupError, match=f"expected the id of another process, got {pid}"
        ):
            platforms.send_signal(pid, signal.SIGKILL, **more)
    platforms.end_own_group()  # this process does not lead it
    assert sent == []
    platforms.send_signal(4712, signal.SIGKILL, **more)
    assert len(sent) == 1


def test_a_lifeline_kills_this_process_or_its_group_only():
    read, write = os.pipe()
    try:
        for pid in (0, -1, 1, os.getppid(), -os.getppid()):
            with pytest.raises(
                ProcessLookupError, match="expected the id of this process"
            ):
                platforms.arm_lifeline(read, pid)
        assert not platforms.fcntl.fcntl(read, platforms.fcntl.F_GETOWN)
    finally:
        os.close(read)
        os.close(write)


#: Names of what sends signals; and the uses that are not: the one function, actors of Ray, and workers' own method.
SENDING = {
    "kill",
    "killpg",
    "pidfd_send_signal",
    "pthread_kill",
    "send_signal",
    "terminate",
    "F_SETOWN",
    "tgkill",
}
ALLOWED = re.compile(
    r"platforms\.send_signal|ray\.kill|(worker|copy|old|process|(self|pool)[.\w]*\.workers\[\w+\])\.kill"
)


def test_one_file_sends_signals():
    found = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module in ("os", "signal"):
                found |= {path.name for alias in node.names if alias.name in SENDING}
            elif (
                isinstance(node, ast.Attribute)
                and node.attr in SENDING
                and not ALLOWED.fullmatch(ast.unparse(node))
            ):
                found.add(path.name)
    assert found == {"platforms.py"}
    sources = [
        path
        for layer in ("workers", "executor")
        for path in (ROOT / layer).rglob("*.[ch]")
    ]
    assert not [
        path
        for path in sources
        if re.search(r"\b(t?g?kill|killpg|raise|sigqueue)\(", path.read_text())
    ]


@pytest.mark.usefixtures("probed_anew")
@pytest.mark.parametrize("error", [AttributeError, OSError])
def test_a_semaphore_that_raises_is_missed(error, monkeypatch):
    """The probe itself does not raise."""

    class Library:
        def __getattr__(self, name):
            raise error(name)

    monkeypatch.setattr(platforms, "libc", Library())
    assert "process-shared semaphores" in platforms.missing()


@pytest.mark.usefixtures("probed_anew")
def test_features_of_this_system_are_found(monkeypatch):
    assert platforms.missing() == ()
    platforms.missing.cache_clear()
    monkeypatch.setitem(platforms._NEEDS, "pidfd_open", lambda: os.close(-1))
    assert platforms.missing() == ("pidfd_open",)
