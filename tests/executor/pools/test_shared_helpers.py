"""Executors of a program share a helper that imports the same; it is kept for the next one, and never longer."""

import contextlib
import functools
import gc
import importlib
import os
import signal
import sys
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from envherd.executor import ExecutorOptions, ParallelEnv
from envherd.executor.start import zygote
from envherd.sb3 import SubprocVecEnv
from tests.envs.seeing_env import Seeing
from tests.executor.pools.test_lifecycle import is_running
from tests.extras import needs
from tests.faults.children import in_child
from tests.gates import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_helper")]


@pytest.fixture(autouse=True)
def kept(monkeypatch):
    """Keep helpers with quick imports also."""
    monkeypatch.setattr(zygote, "_KEPT_CPU_S", 0.0)


def helper_of(make_env=Seeing, **kwargs):
    with ParallelEnv(2, make_env, num_workers=2, **kwargs) as env:
        env.rollout(2)
        (helper,) = set(env.call("helper"))
    return helper


def test_the_next_executor_starts_from_the_helper_of_the_last_one():
    helper = helper_of()
    assert is_running(helper)
    assert psutil.Process(helper).children() == []
    assert [helper_of(), helper_of()] == [helper, helper]
    zygote.end_idle()
    assert not psutil.pid_exists(helper)


def test_executors_that_are_open_share_a_helper_and_each_ends_its_workers(monkeypatch):
    monkeypatch.setattr(zygote, "_KEPT_CPU_S", 100.0)
    with ParallelEnv(1, Seeing) as outer:
        (helper,) = outer.call("helper")
        assert helper_of() == helper
        assert [child.pid for child in psutil.Process(helper).children()] == [
            outer.statistics().workers[0].pid
        ]
        assert outer.rollout(2).shape == (1, 2)
    assert not psutil.pid_exists(helper)  # its imports were quick, so it is not kept


def test_processes_are_named():
    with ParallelEnv(1, Seeing) as env:
        (helper,) = env.call("helper")
        assert psutil.Process(helper).name() == "envherd-helper"
        assert (
            psutil.Process(env.statistics().workers[0].pid).name() == "envherd-worker"
        )
        assert "envherd helper: imports modules" in " ".join(
            psutil.Process(helper).cmdline()
        )


def test_a_worker_has_the_folder_of_its_executor_also_after_a_restart(
    tmp_path, monkeypatch
):
    helper = helper_of()
    monkeypatch.chdir(tmp_path)
    with ParallelEnv(
        1, Seeing, options=ExecutorOptions(on_worker_loss="restart", recycle_after=1)
    ) as env:
        assert env.call("folder") == [str(tmp_path)]
        monkeypatch.chdir("/")
        env.rollout(30, break_when_any_done=False)
        assert env.statistics().recycled > 0
        assert env.call("folder") == [str(tmp_path)]
        assert env.call("helper") == [helper]


def test_a_variable_that_imports_may_have_read_has_another_helper(monkeypatch):
    helper = helper_of()
    monkeypatch.setenv("SEEN", "1")
    with ParallelEnv(1, Seeing) as env:
        assert env.call("variable", "SEEN") == ["1"]
        (other,) = env.call("helper")
    assert other != helper
    monkeypatch.delenv("SEEN")
    with ParallelEnv(1, Seeing) as env:
        assert env.call("variable", "SEEN") == [None]
        assert env.call("helper") != [other]


def test_a_variable_that_imports_set_themselves_has_the_same_helper(
    tmp_path, monkeypatch
):
    (tmp_path / "module_that_sets.py").write_text(
        "import os\nos.environ['SET'] = 'here'\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    options = ExecutorOptions(preload=("module_that_sets", Seeing.__module__))
    helper = helper_of(options=options)
    monkeypatch.setenv("SET", "here")  # this process has imported it since
    assert helper_of(options=options) == helper
    monkeypatch.setenv("SET", "there")
    assert helper_of(options=options) != helper


@pytest.mark.parametrize(
    "change",
    [
        {"env_vars": {"SEEN": "1"}},
        {"worker_threads": 2},
        {"preload": ("wave",)},
        {"worker_output": "inherit"},
        {"start_method": "spawn"},
    ],
    ids=["variables", "threads", "modules", "output", "start method"],
)
@pytest.mark.long
def test_an_executor_whose_helper_would_be_another_has_another(change):
    with ParallelEnv(1, Seeing) as env:
        (helper,) = env.call("helper")
        assert helper_of(options=ExecutorOptions(**change)) != helper


def test_helper_is_shared_only_with_equal_surroundings():
    """Not that of the executor before it."""

    def body():
        helper = helper_of()
        os.umask(0o077)
        other = helper_of()
        os.nice(1)
        return helper, other, helper_of()

    assert len(set(in_child(body))) == 3


def test_modules_that_have_changed_are_imported_again(tmp_path, monkeypatch):
    source = "from tests.envs.seeing_env import Seeing\nclass Env(Seeing):\n    def version(self): return {}\n"
    file = tmp_path / "module_that_changes.py"
    file.write_text(source.format(1))
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("module_that_changes")
    make_env = module.Env
    with ParallelEnv(1, make_env) as first:
        assert first.call("version") == [1]
        helper = first.call("helper")
        assert [helper_of(make_env)] == helper
        file.write_text(source.format(23))
        # Also without a reload here.
        with ParallelEnv(1, make_env) as second:
            assert second.call("version") == [23]
            assert second.call("helper") != helper
        with ParallelEnv(1, importlib.reload(module).Env) as second:
            assert second.call("version") == [23]
        assert first.call("version") == [1]
    assert not psutil.pid_exists(helper[0])


def test_at_most_one_helper_is_kept():
    first = helper_of()
    second = helper_of(options=ExecutorOptions(preload=("wave",)))
    assert second != first
    assert not psutil.pid_exists(first)
    assert is_running(second)


def test_idle_helper_ends_and_the_next_executor_starts_another(monkeypatch):
    monkeypatch.setattr(zygote, "IDLE_S", 0.3)
    helper = helper_of()
    wait_for(lambda: not is_running(helper))
    other = helper_of()
    assert other != helper
    assert not psutil.pid_exists(helper)  # reaped
    with ParallelEnv(1, Seeing) as env:
        (helper,) = env.call("helper")
        time.sleep(0.6)
        assert is_running(helper)  # in use


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.long
def test_a_helper_that_was_killed_or_stopped_while_it_was_idle_is_replaced(number):
    helper = helper_of()
    os.kill(helper, number)
    assert helper_of() != helper
    assert not psutil.pid_exists(helper)


def test_a_helper_that_was_killed_under_two_executors_leaves_both_at_work():
    with ParallelEnv(1, Seeing) as one, ParallelEnv(1, Seeing) as two:
        (helper,) = one.call("helper")
        assert two.call("helper") == [helper]
        os.kill(helper, signal.SIGKILL)
        wait_for(lambda: not is_running(helper))
        assert one.rollout(2).shape == two.rollout(2).shape == (1, 2)
        assert helper_of() != helper
        pids = [env.statistics().workers[0].pid for env in (one, two)]
    wait_for(lambda: not any(map(is_running, pids)))


@pytest.mark.broken_pool
def test_shared_helper_replaces_workers_after_another_executor_closed():
    with ParallelEnv(
        1, Seeing, options=ExecutorOptions(on_worker_loss="restart")
    ) as env:
        helper = env.call("helper")
        assert [helper_of()] == helper
        os.kill(env.statistics().workers[0].pid, signal.SIGKILL)
        env.rollout(5, break_when_any_done=False)
        assert env.call("helper") == helper


def test_two_threads_that_start_at_once_share_a_helper():
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(helper_of())) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(set(found)) == 1


class Garbage:
    """In a cycle; its finalizer makes a call, as that of an executor that was not closed."""

    def __init__(self, call):
        self._cycle = self
        self._call = call

    def __del__(self):
        self._call()


@pytest.mark.parametrize("by", ["signal handler", "garbage"])
def test_a_request_within_another_of_the_same_thread(by):
    """A signal handler, or the finalizer of an executor that was not closed, may close an executor."""
    answers = []
    until = 0
    request = {"op": "status", "pid": 0}

    def disturb(*_):
        answers.append(helper._request(request, timeout_s=5.0))

    def at_bytecode(frame, event, _):
        nonlocal until
        frame.f_trace_opcodes = True
        if not frame.f_code.co_filename.endswith(
            ("executor/start/zygote.py", "workers/messages.py")
        ):
            return None
        until -= event == "opcode"
        if not until:
            sys.settrace(None)
            if by == "garbage":
                Garbage(disturb)
            else:
                signal.raise_signal(signal.SIGALRM)
        return at_bytecode

    handler = signal.signal(signal.SIGALRM, disturb)
    threshold = gc.get_threshold()
    with ParallelEnv(1, Seeing) as env:
        helper = env._pool.crew._zygote
        gc.collect()
        gc.set_threshold(1)
        try:
            for number in range(1, 1000, 5):
                until = number
                sys.settrace(at_bytecode)
                try:
                    answers.append(helper._request(request, timeout_s=5.0))
                finally:
                    sys.settrace(None)
                if until > 0:
                    break
        finally:
            gc.set_threshold(*threshold)
            signal.signal(signal.SIGALRM, handler)
        assert len(answers) >= 2 * (number // 5) > 100
        assert len({answer["number"] for answer in answers}) == len(answers)
        assert env.call("helper") == [helper.pid]


def test_interrupted_start_does_not_stop_another_that_shares_its_helper(
    tmp_path, monkeypatch
):
    (tmp_path / "module_that_waits.py").write_text(
        "import os, pathlib, time\n"
        "here = pathlib.Path(__file__).parent\n"
        "(here / 'began').touch()\n"
        "while not (here / 'go').exists(): time.sleep(0.01)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    options = ExecutorOptions(preload=("module_that_waits", Seeing.__module__))
    found = []

    def start():
        wait_for((tmp_path / "began").exists)
        other.start()
        wait_for(
            lambda: any(len(helper._users) == 2 for helper in list(zygote._zygotes))
        )
        os.kill(os.getpid(), signal.SIGINT)

    other = threading.Thread(target=lambda: found.append(helper_of(options=options)))
    thread = threading.Thread(target=start)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        ParallelEnv(1, Seeing, options=options)
    thread.join()
    assert found == []
    (tmp_path / "go").touch()
    other.join()
    assert len(found) == 1


def test_a_close_that_has_failed_counts_its_executor_once(monkeypatch):
    """The executor that stays keeps the helper, and with the last one it ends."""
    monkeypatch.setattr(zygote, "_KEPT_CPU_S", 100.0)
    with ParallelEnv(1, Seeing) as stays:
        (helper,) = stays.call("helper")
        for name in ("_post", "_answer"):
            leaves = ParallelEnv(1, Seeing)
            with monkeypatch.context() as failing:
                failing.setattr(zygote.Helper, name, Mock(side_effect=MemoryError))
                with pytest.raises(MemoryError):
                    leaves._pool.crew.close(0.0)
            leaves.close()
            assert helper_of() == helper
            assert stays.rollout(2).shape == (1, 2)
        monkeypatch.setattr(
            zygote, "_wait_exit", Mock(side_effect=[MemoryError, None, None])
        )
        with pytest.raises(MemoryError):
            stays.close()
    assert not psutil.pid_exists(helper)


def test_a_fork_of_the_owner_starts_from_another_helper():
    helper = helper_of()
    in_fork = in_child(helper_of)
    assert in_fork != helper
    assert is_running(helper)
    assert helper_of() == helper
    wait_for(lambda: not is_running(in_fork))


def test_a_fork_in_the_midst_of_a_request_collects_garbage():
    with zygote._undisturbed():
        assert not gc.isenabled()
        assert in_child(gc.isenabled)
    assert gc.isenabled()


@needs("torchrl")
@pytest.mark.long
def test_the_helper_of_torchrls_envs_is_kept_and_has_no_tensorflow(monkeypatch):
    from torchrl.envs import GymEnv

    from envherd import torchrl

    monkeypatch.setattr(zygote, "_KEPT_CPU_S", 0.5)  # also on a quick machine
    helpers = []
    for _ in range(2):
        with contextlib.closing(
            torchrl.ParallelEnv(
                2, functools.partial(GymEnv, "CartPole-v1"), num_processes=1
            )
        ) as env:
            env.reset()
            (worker,) = {handle.pid for handle in env._workers}
            helpers.append(psutil.Process(worker).ppid())
            assert "tensorflow" not in Path(f"/proc/{worker}/maps").read_text()
    assert helpers[0] == helpers[1]


@needs("torchrl")
def test_the_modules_of_the_torchrl_facade_exist():
    from torchrl.envs import GymEnv

    from envherd.executor.facades.torchrl.crew import _hosted_factory

    factory = _hosted_factory(
        functools.partial(GymEnv, "CartPole-v1"), ExecutorOptions()
    )
    for name in factory.preload:
        with contextlib.suppress(ModuleNotFoundError):
            assert importlib.util.find_spec(name) is not None, name
            continue
        assert not name.startswith("envherd."), name


@needs("sb3")
def test_facades_share_it():
    helpers = set()
    for _ in range(2):
        with contextlib.closing(SubprocVecEnv([Seeing])) as env:
            helpers.update(env.env_method("helper"))
    assert len(helpers) == 1
