"""Worker processes and their helper: failures during their start, and cleanup."""

import contextlib
import errno
import functools
import gc
import os
import select
import signal
import socket
import threading
import time
import weakref
from unittest.mock import Mock

import psutil
import pytest

from envherd.executor import (
    ExecutorOptions,
    ParallelEnv,
    WorkerLost,
    WorkerTimeout,
    preloaded,
)
from envherd.executor.processes.crew import Crew
from envherd.executor.processes.worker_process import WorkerProcess, worker_config
from envherd.executor.start import zygote as helper
from envherd.executor.start.waiting import DeadlinePassed
from envherd.executor.start.zygote import Helper
from envherd.workers import messages
from envherd.workers.current import WorkerInfo
from envherd.workers.errors import Closed
from envherd.workers.process import zygote as worker_zygote
from envherd.workers.testing import CountingEnv
from tests.envs.breaking_envs import FaultyEnv
from tests.faults.children import in_child
from tests.gates import alarm, wait_for

#: Hangs if an environment variable is set, after writing the pid of its child to the file named by it.
HANGING = """
import os, subprocess, sys, time
if "HANGS" in os.environ:
    started = subprocess.Popen(["sleep", "60"])
    with open(os.environ["HANGS"] + ".part", "w") as file:
        file.write(str(started.pid))
    os.rename(os.environ["HANGS"] + ".part", os.environ["HANGS"])
    time.sleep(60)
"""


@pytest.fixture
def hanging(tmp_path, monkeypatch):
    """Return options of an executor whose helper imports a module that hangs, and where that writes a pid."""
    (tmp_path / "module_that_hangs.py").write_text(HANGING)
    monkeypatch.syspath_prepend(str(tmp_path))
    pid_file = tmp_path / "pid"
    return {
        "preload": ("module_that_hangs",),
        "env_vars": {"HANGS": str(pid_file)},
    }, pid_file


def is_running(pid: int) -> bool:
    """Return whether a process runs; one that has ended and waits to be reaped does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.long
@pytest.mark.parametrize("output", ["capture", "inherit"])
def test_an_import_that_hangs_in_the_helper_has_the_deadline_of_building(
    hanging, output
):
    kwargs, pid_file = hanging
    options = ExecutorOptions(build_timeout_s=8.0, worker_output=output, **kwargs)
    began = time.monotonic()
    with pytest.raises(
        WorkerTimeout,
        match=r"had not imported its modules within 8 s(.|\n)*module_that_hangs\.py",
    ):
        ParallelEnv(1, CountingEnv, options=options)
    assert time.monotonic() - began < 40, "it hangs for 60 s"
    wait_for(lambda: not is_running(int(pid_file.read_text())))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "error", "text"),
    [
        (signal.SIGALRM, TimeoutError, "^alarm$"),
        (signal.SIGINT, KeyboardInterrupt, "^$"),
    ],
    ids=["alarm", "Ctrl-C"],
)
def test_a_signal_while_modules_are_imported_ends_the_start_and_the_helper(
    hanging, number, error, text
):
    """An alarm of the program is not taken for the deadline."""
    kwargs, pid_file = hanging
    options = ExecutorOptions(build_timeout_s=30.0, **kwargs)

    def send():
        wait_for(pid_file.exists)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    with pytest.raises(error, match=text), alarm(60.0):
        ParallelEnv(1, CountingEnv, options=options)
    thread.join()
    wait_for(lambda: not is_running(int(pid_file.read_text())))


@pytest.mark.slow
def test_an_alarm_while_a_helper_ends_is_raised(monkeypatch):
    zygote = Helper(ExecutorOptions(), [])
    zygote.wait_ready()
    monkeypatch.setattr(helper, "_wait_exit", Mock(side_effect=TimeoutError("alarm")))
    with pytest.raises(TimeoutError, match=r"^alarm$"):
        zygote.close()
    monkeypatch.undo()
    zygote.close()  # continues
    assert not psutil.pid_exists(zygote.pid)


@pytest.mark.slow
def test_helpers_answer_counts_after_a_stop_beyond_its_deadline():
    with contextlib.closing(Helper(ExecutorOptions(), [])) as zygote:
        zygote.wait_ready()
        number = zygote._post({"op": "resume"}, [])
        select.select([zygote._sock], [], [])
        assert zygote._answer(number, timeout_s=-1.0)["is_current"]
        with pytest.raises(DeadlinePassed):
            zygote._answer(-1, timeout_s=0.0)


@pytest.mark.slow
def test_modules_that_hang_have_it_in_a_preloaded_block(hanging):
    kwargs, _ = hanging
    options = ExecutorOptions(build_timeout_s=1.0, env_vars=kwargs["env_vars"])
    with (
        pytest.raises(WorkerTimeout, match=r"had not imported its modules within 1 s"),
        preloaded("module_that_hangs", options=options),
    ):
        ParallelEnv(1, CountingEnv, options=options)


@pytest.mark.slow
@pytest.mark.parametrize("start_method", ["zygote", "spawn"])
def test_early_stack_request_does_not_kill_a_worker(start_method):
    options = ExecutorOptions(start_method=start_method)
    zygote = Helper(options, [])
    zygote.wait_ready()
    worker = WorkerProcess(
        WorkerInfo(worker_id=0, generation=0, num_workers=1, env_ids=(0,)),
        Mock(),
        zygote,
    )
    worker.open_log()
    worker.start(
        lambda sock, log: zygote.fork(
            worker_config(options, 0), [sock, zygote.lifeline_read, log]
        )
    )
    try:
        signal.pidfd_send_signal(worker.pidfd, signal.SIGUSR2)
        worker.channel.queue_message(messages.Close())
        assert worker.channel.flush_nowait()
        assert worker.wait_exit(30)
        assert worker.exit_code() == 0
    finally:
        worker.kill()
        worker.release()
        zygote.close()


def test_a_fork_in_another_thread_while_the_helper_starts_keeps_no_descriptor(
    monkeypatch,
):
    def pipes():
        """Return the pipes and sockets that this process has open."""
        targets = set()
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                targets.add(os.readlink(f"/proc/self/fd/{fd}"))
        return [target for target in targets if target.startswith(("pipe:", "socket:"))]

    kept = []

    def fork(*args, **kwargs):
        thread = threading.Thread(target=lambda: kept.append(in_child(pipes)))
        thread.start()
        thread.join()
        raise OSError(errno.EMFILE, "as at a limit")

    monkeypatch.setattr(helper.subprocess, "Popen", fork)
    before = pipes()
    with pytest.raises(WorkerLost, match="its helper process cannot be started"):
        Helper(ExecutorOptions(), [])
    assert len(set(kept[0]) - set(before)) == 1  # the pipe to its parent


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (None, "Set sys.executable, which is None, to"),
        ("", "Set sys.executable, which is '', to"),
        ("/nonexistent", "Set sys.executable, which is '/nonexistent', to"),
        ("/bin/true", "exit code 0, sys.executable '/bin/true'"),
    ],
)
def test_a_program_that_is_no_interpreter_is_named(monkeypatch, path, text):
    monkeypatch.setattr(helper.sys, "executable", path)
    with pytest.raises(WorkerLost, match=text):
        Helper(ExecutorOptions(), []).wait_ready()


@pytest.mark.slow
def test_a_worker_that_is_started_while_another_thread_closes_is_ended(monkeypatch):
    launch, launched = Crew._launch, []

    def launch_late(crew, worker_id, generation):
        launched.append(launch(crew, worker_id, generation))
        if generation:
            closing = threading.Thread(target=env.close)
            closing.start()
            closing.join()
        return launched[-1]

    monkeypatch.setattr(Crew, "_launch", launch_late)
    # A helper that outlives the executor does not end its workers.
    with preloaded("wave"):
        env = ParallelEnv(1, CountingEnv)
        env.engine.pool.crew.replace(0)
        assert env.is_closed
        wait_for(lambda: not is_running(launched[1].pid))
        assert (launched[1].pidfd, launched[1].log_fd) == (-1, -1)


def slow_to_return(mark):
    """Return an env; a process that finds the mark takes a second, and then leaves another mark."""
    if mark.exists():
        time.sleep(1)
        mark.with_suffix(".built").touch()
    mark.touch()
    return CountingEnv()


@pytest.mark.slow
@pytest.mark.broken_pool
def test_a_successor_that_is_built_while_another_thread_closes_closes_its_env(tmp_path):
    mark = tmp_path / "mark"
    env = ParallelEnv(
        1,
        functools.partial(slow_to_return, mark),
        options=ExecutorOptions(on_worker_loss="restart"),
    )
    env.reset()
    os.kill(env.engine.pool.pid_of(0), signal.SIGKILL)
    threading.Timer(0.5, env.close).start()
    with pytest.raises(Closed, match="this executor was closed while it waited"):
        env.reset()
    wait_for(mark.with_suffix(".built").exists)


@pytest.mark.slow
@pytest.mark.parametrize("start_method", ["zygote", "portable"])
def test_an_interrupted_close_ends_the_workers(start_method):
    env = ParallelEnv(
        2,
        FaultyEnv,
        num_workers=2,
        env_kwargs={"fault": "sleep", "at": "close"},
        options=ExecutorOptions(start_method=start_method, close_timeout_s=30),
    )
    pids = [worker.pid for worker in env.statistics().workers]
    with pytest.raises(TimeoutError, match="alarm"), alarm(1.0):
        env.close()
    assert not any(map(is_running, pids))
    assert env.is_closed


@pytest.mark.broken_pool
@pytest.mark.usefixtures("own_helper")
@pytest.mark.parametrize("policy", ["raise", "restart"])
def test_an_executor_that_is_dropped_after_a_loss_ends_its_workers(policy):
    """The error that was raised has the frames of the call, and these the executor."""

    def lose():
        options = ExecutorOptions(on_worker_loss=policy)
        env = ParallelEnv(2, CountingEnv, num_workers=2, options=options)
        env.reset()
        lost, other = (worker.pid for worker in env.statistics().workers)
        if policy == "restart":  # which fails
            os.kill(psutil.Process(lost).ppid(), signal.SIGKILL)
        os.kill(lost, signal.SIGKILL)
        for _ in range(2):
            with contextlib.suppress(WorkerLost):
                env.rollout(2)
        return weakref.ref(env), other

    env, pid = lose()
    gc.collect()
    assert env() is None
    assert not is_running(pid)


_ENDS_IN_A_CALL = """
import atexit, threading, weakref

has_ended = threading.Event()
atexit.unregister(weakref.finalize._exitfunc)
atexit.register(has_ended.wait, 30)
atexit.register(weakref.finalize._exitfunc)  # last, so all finalizers run before the wait

import sys, time
from envherd import ExecutorOptions, ParallelEnv, SerialEnv
from envherd.workers.testing import CountingEnv

class Slow(CountingEnv):
    def step(self, action):
        time.sleep(float(sys.argv[1]))
        return super().step(action)

env = ParallelEnv(2, Slow, num_workers=2, options=ExecutorOptions(close_timeout_s=0.5))
env.reset()

def use():
    try:
        while True:
            env.step_and_maybe_reset(env.rand_action())
    except Exception as error:
        print(type(error).__name__, flush=True)
    finally:
        has_ended.set()

threading.Thread(target=use, daemon=True).start()
while env.engine.pool.words.has_answered().all() and not env.statistics().env_steps:
    time.sleep(0.01)
"""


@pytest.mark.slow
@pytest.mark.parametrize("step_s", [0, 0.01, 60])
def test_exit_during_a_threads_call_reports_no_loss(step_s, script_host, tmp_path):
    """The thread gets `Closed`, and nothing is logged."""
    done = script_host.run_text(_ENDS_IN_A_CALL, str(step_s), folder=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "Closed\n", "")


def test_a_helper_forgets_the_logs_of_workers_that_have_ended():
    """Once their processes are gone: it may start workers for months."""
    one, other = socket.socketpair()
    with one, other:
        helper = worker_zygote.Zygote(
            messages.WorkerChannel(one), -1, 0, must_exec=False
        )
        helper._alive, helper._worker_of_log = {2}, {11: 1, 12: 2}
        helper._sweep(lambda _: False)
        os.close(helper._wake_read)
        os.close(helper._wake_write)
    assert helper._worker_of_log == {12: 2}


def test_the_stacks_of_a_worker_that_ends_meanwhile_are_none(monkeypatch):
    monkeypatch.setattr("envherd.shm.platforms.catches", lambda _pid, _signal: False)
    WorkerProcess._request_stacks(Mock(pid=2**30))  # no such process
