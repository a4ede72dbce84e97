"""One helper for several executors: they start from it, leave nothing behind, and do not affect each other."""

import contextlib
import sys
import time
from pathlib import Path

import pytest

from envherd.executor import ExecutorOptions, ParallelEnv, preloaded
from tests.envs.seeing_env import Seeing
from tests.executor.pools.test_shared_helpers import helper_of
from tests.gates import wait_for

pytestmark = pytest.mark.slow


def is_there(pid):
    return Path(f"/proc/{pid}").exists()


def test_executors_share_a_helper_that_has_the_modules():
    with preloaded("wave", "sched"):
        first = helper_of()
        with ParallelEnv(2, Seeing, num_workers=1) as env:
            assert env.call("has_imported", "sched") == [True, True]
            assert env.call("helper") == [first, first]
            assert helper_of() == first  # while the other executor is open
            assert env.rollout(2).shape == (2, 2)
    assert not is_there(first)
    assert helper_of() != first


def test_a_closed_executor_leaves_nothing_in_it():
    with preloaded("wave"):
        with ParallelEnv(2, Seeing, num_workers=2) as env:
            pids = [worker.pid for worker in env.statistics().workers] + env.call(
                "leave_one"
            )
        assert not any(map(is_there, pids))
        with ParallelEnv(1, Seeing) as env:
            other = env.call("leave_one")[0]
            helper_of()
            assert is_there(other)  # another executor's end is not its own


@pytest.mark.parametrize("is_forked", [False, True])
def test_closing_an_executor_ends_its_background_processes_and_no_others(is_forked):
    with preloaded("wave"), ParallelEnv(1, Seeing) as kept:
        background = kept.call("leave_background", is_forked=is_forked)[0]
        with ParallelEnv(1, Seeing) as closed:
            own = closed.call("leave_background", is_forked=is_forked)[0]
        assert not is_there(own)
        assert is_there(background)
    assert not is_there(background)


def test_helper_lives_until_its_last_user_closes():
    with preloaded("wave"):
        env = ParallelEnv(1, Seeing)
        helper = env.call("helper")[0]
    assert is_there(helper)
    assert env.rollout(2).shape == (1, 2)
    env.close()
    env.close()
    assert not is_there(helper)


def test_workers_see_what_the_owner_sees_when_they_start(tmp_path, monkeypatch):
    monkeypatch.setenv("GONE", "1")
    with preloaded("wave"):
        shared = helper_of()
        monkeypatch.chdir(tmp_path)
        monkeypatch.delenv("GONE")
        monkeypatch.setenv("SEEN", "2")
        with ParallelEnv(1, Seeing) as env:
            assert env.call("helper") == [shared]
            assert env.call("variable", "SEEN") == ["2"]
            assert env.call("variable", "GONE") == [None]
            assert env.call("folder") == [str(tmp_path)]


@pytest.mark.parametrize("start_method", ["zygote", "spawn", "preloaded"])
def test_environment_variables_and_import_path_may_be_of_any_size(
    start_method, monkeypatch
):
    """Each is larger than a socket's buffer, and the path also than the largest argument of a program."""
    monkeypatch.setattr(
        sys,
        "path",
        [*sys.path, *(f"/nowhere/{number}/{'x' * 1000}" for number in range(400))],
    )
    for number in range(4):
        monkeypatch.setenv(f"LARGE_{number}", "x" * 100_000)
    is_shared = start_method == "preloaded"
    with preloaded("wave") if is_shared else contextlib.nullcontext():
        monkeypatch.setenv("LARGE_4", "y" * 100_000)
        options = (
            ExecutorOptions()
            if is_shared
            else ExecutorOptions(start_method=start_method)
        )
        with ParallelEnv(1, Seeing, options=options) as env:
            assert env.call("variable", "LARGE_4") == ["y" * 100_000]
            assert env.call("last_of_path") == [sys.path[-1]]


def test_an_executor_whose_helper_would_be_another_has_its_own():
    with preloaded("wave"):
        shared = helper_of()
        assert helper_of(options=ExecutorOptions(env_vars={"SEEN": "1"})) != shared
        assert helper_of(options=ExecutorOptions(worker_threads=2)) != shared
        with preloaded("sched"):
            assert helper_of() != shared
        assert helper_of() == shared


@pytest.mark.parametrize(
    ("name", "is_forked"), [("jemalloc_bg_thd", True), ("other", False)]
)
def test_workers_are_forked_unless_a_module_has_started_a_thread(
    tmp_path, monkeypatch, name, is_forked
):
    """The thread of jemalloc is prepared for forks."""
    (tmp_path / f"{name}_starts.py").write_text(
        "import threading, pathlib, time\n"
        "def run():\n"
        f"    pathlib.Path('/proc/thread-self/comm').write_text('{name}')\n"
        "    named.set()\n"
        "    time.sleep(1000)\n"
        "named = threading.Event()\n"
        "threading.Thread(target=run, daemon=True).start()\n"
        "named.wait()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with preloaded(f"{name}_starts"), ParallelEnv(1, Seeing) as env:
        assert env.call("has_imported", f"{name}_starts") == [is_forked]


def test_a_module_that_cannot_be_imported_is_named():
    with (
        pytest.raises(ImportError, match=r"no_such_module_here.*ModuleNotFoundError"),
        preloaded("no_such_module_here"),
    ):
        ParallelEnv(1, Seeing)
    with pytest.raises(ValueError, match="expected names of modules"), preloaded():
        pass


def test_the_script_goes_on_while_the_helper_imports(tmp_path, monkeypatch):
    (tmp_path / "waits_for_go.py").write_text(
        "import os, pathlib, time\nwhile not pathlib.Path(os.environ['GO']).exists():\n    time.sleep(0.01)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    options = ExecutorOptions(env_vars={"GO": str(tmp_path / "go")})
    with preloaded("waits_for_go", options=options):
        (tmp_path / "go").touch()
        with ParallelEnv(1, Seeing, options=options) as env:
            assert env.call("has_imported", "waits_for_go") == [True]


def test_the_end_of_a_block_ends_a_helper_that_still_imports(tmp_path, monkeypatch):
    (tmp_path / "never_ends.py").write_text(
        "import os, pathlib, time\npathlib.Path(os.environ['AT']).write_text(str(os.getpid()))\ntime.sleep(1000)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    at = tmp_path / "at"
    with preloaded("never_ends", options=ExecutorOptions(env_vars={"AT": str(at)})):
        wait_for(lambda: at.exists() and at.read_text())
        began = time.monotonic()
    assert time.monotonic() - began < 30, "it imports for 1,000 s"
    assert not is_there(at.read_text())
