"""The portable pool: data as of the other pools, faults, ends, and what macOS and Windows lack taken away."""

import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from envherd.executor import (
    ExecutorOptions,
    ParallelEnv,
    SerialEnv,
    WorkerLost,
)
from envherd.executor.sizing.recommending import recommend
from envherd.executor.sizing.rule import Goal
from envherd.shm import platforms
from envherd.shm.segment import NAMES
from envherd.workers.adapters.named import NamedFactory, PettingZooFactory
from envherd.workers.guests.interpreters import InPython
from envherd.workers.testing import CountingEnv
from tests.envs.breaking_envs import FaultyEnv
from tests.envs.costly_envs import ParentEnv
from tests.envs.counting_envs import AgentsEnv, TextEnv
from tests.envs.disturbing_envs import HaltingEnv
from tests.executor.pools.test_lifecycle import is_running
from tests.extras import needs
from tests.faults.children import files_left
from tests.gates import Gate, interrupt, wait_for

pytestmark = pytest.mark.slow


def portable(num_envs, factory, *, num_workers=2, options=None, **arguments):
    """Return an executor over the portable pool."""
    options = ExecutorOptions(
        start_method="portable", close_timeout_s=2.0, **(options or {})
    )
    return ParallelEnv(
        num_envs, factory, num_workers=num_workers, seed=5, options=options, **arguments
    )


def data_of(env):
    """Return batches of steps, an exchange and a rollout, through resets."""
    with env:
        env.set_seed(11)
        root, batches = env.reset(), []
        for _ in range(12):
            batch, root = env.step_and_maybe_reset(env.rand_action(root))
            batches.append(batch)
        batches.append(env.rollout(9, break_when_any_done=False))
        return batches


FAMILIES = {
    "counting": functools.partial(CountingEnv, 5),
    "agents": functools.partial(AgentsEnv, 4),
    "text": functools.partial(TextEnv, 3),
    "cartpole": NamedFactory("gymnasium", "CartPole-v1"),
}
MORE_FAMILIES = [
    pytest.param(
        NamedFactory("dm_control", "cartpole/balance"),
        marks=needs("dm-control"),
        id="dm_control",
    ),
    pytest.param(
        PettingZooFactory("mpe2.simple_spread_v3"),
        marks=needs("pettingzoo"),
        id="pettingzoo",
    ),
]


@pytest.mark.parametrize(
    "factory",
    [
        *(pytest.param(factory, id=name) for name, factory in FAMILIES.items()),
        *MORE_FAMILIES,
    ],
)
@pytest.mark.long
def test_data_are_those_of_a_serial_executor_bit_for_bit(factory):
    torch.manual_seed(0)
    expected = data_of(SerialEnv(3, factory, seed=5))
    torch.manual_seed(0)
    for mine, its in zip(data_of(portable(3, factory)), expected, strict=True):
        assert (mine == its).all()


def test_some_envs_are_sent_and_received_and_asked_and_none_is_branched():
    with portable(4, CountingEnv) as env:
        root = env.reset()
        env.send(env.rand_action(root))
        assert len(env.recv(1)) + len(env.recv(3)) >= 4
        assert env.get("num_steps") == [1, 1, 1, 1]
        state = env.state_dict()
        env.step(env.rand_action(root))
        env.load_state_dict(state)
        assert env.get("num_steps") == [1, 1, 1, 1]
        assert "portable" in env.statistics().path
        with pytest.raises(
            ValueError,
            match=r"branch failed: .* got the portable pool. Use `env.restore\(",
        ):
            env.branch(0, [1])
        env.step(env.rand_action())


@pytest.mark.broken_pool
@pytest.mark.parametrize("fault", ["exit", "segfault"])
def test_a_worker_that_ends_by_itself_is_reported_with_its_output(fault):
    with portable(2, FaultyEnv, env_kwargs=[{}, {"fault": fault}]) as env:
        root = env.reset()
        _, root = env.step_and_maybe_reset(env.rand_action(root))
        with pytest.raises(
            WorkerLost, match="exit code 3" if fault == "exit" else "SIGSEGV"
        ) as lost:
            env.step(env.rand_action(root))
        assert lost.value.env_ids == (1,)
        assert fault == "exit" or "Fatal Python error" in lost.value.remote_traceback


def test_an_interrupt_ends_the_call_and_the_next_reset_works(tmp_path):
    gate = Gate(tmp_path)
    with portable(2, functools.partial(HaltingEnv, gate, 2)) as env:
        root = env.reset()
        _, root = env.step_and_maybe_reset(env.rand_action(root))
        interrupt(gate, lambda: env.step(env.rand_action(root)))
        env.step(env.rand_action(env.reset()))


def test_an_interrupt_at_the_start_leaves_no_log(monkeypatch):
    mkstemp, paths = tempfile.mkstemp, []

    def interrupted(**named):
        found = mkstemp(**named)
        paths.append(Path(found[1]))
        signal.raise_signal(signal.SIGINT)
        return found

    monkeypatch.setattr(tempfile, "mkstemp", interrupted)
    with pytest.raises(KeyboardInterrupt):
        portable(1, CountingEnv, num_workers=1)
    assert not any(path.exists() for path in paths)


@pytest.mark.broken_pool
def test_an_interrupt_does_not_lose_the_end_of_a_worker(monkeypatch):
    """Ctrl-C when the system has just reported that the worker has ended, which it does once."""
    waitpid, ended = os.waitpid, []

    def interrupted(pid, flag):
        found = waitpid(pid, flag)
        if found[0] and not ended:
            ended.append(found)
            signal.raise_signal(signal.SIGINT)
        return found

    with portable(2, CountingEnv, options={"on_worker_loss": "restart"}) as env:
        env.reset()
        worker = env.engine.pool.crew.workers[0]
        os.kill(worker.pid, signal.SIGKILL)
        monkeypatch.setattr(os, "waitpid", interrupted)
        with pytest.raises(KeyboardInterrupt):
            wait_for(worker.has_exited)
        assert worker.has_exited()
        assert worker.exit_code() == -signal.SIGKILL


def test_a_worker_is_killed_without_room_for_a_descriptor():
    with portable(2, CountingEnv) as env:
        worker = env._pool.crew.workers[0]
        with files_left(0):
            worker.kill()
        assert worker.wait_exit(5.0)


def test_a_limit_on_files_is_not_taken_for_another_system():
    platforms.missing.cache_clear()
    with files_left(0), pytest.raises(OSError, match=r"too many open files.*ulimit -n"):
        platforms.missing()


def test_a_saved_state_continues_in_all_envs_and_another_executor():
    with portable(2, FAMILIES["cartpole"]) as env:
        _, root = env.step_and_maybe_reset(env.rand_action(env.reset()))
        saved = env.save([0])
        env.restore(saved * 2)
        root = env.current()
        root["action"] = torch.tensor([1, 1])
        batch = env.step(root)["next", "observation"]
        assert batch[0].equal(batch[1])
    with SerialEnv(1, FAMILIES["cartpole"], seed=6) as env:
        env.reset()
        env.restore(saved)
        assert env.step(env.current().set("action", torch.tensor([1])))[
            "next", "observation"
        ].equal(batch[:1])


@pytest.mark.broken_pool
def test_worker_obeys_signals_that_its_owner_ignores_and_has_higher_oom_score():
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with portable(1, CountingEnv, num_workers=1) as env:
            root, pid = env.reset(), env.statistics().workers[0].pid
            assert Path(f"/proc/{pid}/oom_score_adj").read_text() == "300\n"
            os.kill(pid, signal.SIGTERM)
            wait_for(lambda: not is_running(pid), "the worker ignores SIGTERM")
            with pytest.raises(WorkerLost, match=r"SIGTERM\(-15\)"):
                env.step(env.rand_action(root))
    finally:
        signal.signal(signal.SIGTERM, before)


def test_processes_of_envs_end_with_their_worker_and_recycled_workers_are_replaced():
    with portable(1, ParentEnv, num_workers=1, options={"recycle_after": 1}) as env:
        first = env.get("child")[0]
        for _ in range(3):
            env.reset()
        assert env.statistics().workers[0].generation >= 1
        wait_for(lambda: not is_running(first), "the env's process still runs")


def _in_daemon():
    with portable(1, CountingEnv, num_workers=1) as env:
        env.rollout(2)


def test_a_daemon_of_multiprocessing_may_have_workers():
    child = multiprocessing.get_context("fork").Process(target=_in_daemon, daemon=True)
    child.start()
    child.join(60)
    assert child.exitcode == 0


_OWNER = """
import os, signal, sys, threading, time
import psutil
from envherd.executor import ExecutorOptions, ParallelEnv
from envherd.workers.testing import CountingEnv

class Mine(CountingEnv):  # of this script, which has no main guard
    def step(self, action):
        while sys.argv[1] == "hung":
            time.sleep(1)
        return super().step(action)

env = ParallelEnv(2, Mine, num_workers=2, options=ExecutorOptions(start_method="portable"))
root = env.reset()
print(os.getpid(), *(worker.pid for worker in env.statistics().workers), flush=True)
if sys.argv[1] == "hung":
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
env.step(env.rand_action(root))
if sys.argv[1] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("end", ["hung", "killed", "returns"])
def test_an_owner_that_ends_leaves_nothing(end, script_host, tmp_path):
    """The script has no main guard, and defines its env itself."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    done = script_host.run_text(_OWNER, end, folder=tmp_path, TMPDIR=str(temporary))
    assert done.returncode == (0 if end == "returns" else -signal.SIGKILL), done.stderr
    owner, *pids = map(int, done.stdout.split())
    assert len(pids) == 2
    wait_for(lambda: not any(map(is_running, pids)), "a worker still runs")

    def files():
        return [
            *temporary.glob("envherd-log-*"),
            *Path("/dev/shm").glob(f"{NAMES}{owner}-*"),
        ]

    wait_for(lambda: not files(), "a file is left")


_UNGUARDED = """
import multiprocessing, time
from envherd.executor import ExecutorOptions, ParallelEnv
from envherd.workers.testing import CountingEnv
env = ParallelEnv(1, CountingEnv, num_workers=1, options=ExecutorOptions(start_method="portable"))
child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(0,))
child.start()
child.join()
print("child", child.exitcode)
env.close()
"""


@pytest.mark.long
def test_script_without_main_guard_ends_with_one_clear_error(script_host, tmp_path):
    """The spawned process runs the script again; it starts no workers, and the script continues."""
    done = script_host.run_text(_UNGUARDED, folder=tmp_path)
    assert (done.returncode, done.stdout) == (0, "child 1\n")
    assert (
        done.stderr.count("Put what makes the executor into a function, or under") == 1
    )


def test_a_script_that_multiprocessing_runs_again_is_shown_the_guard(monkeypatch):
    monkeypatch.setattr(
        multiprocessing.process.current_process(), "_inheriting", True, raising=False
    )
    with pytest.raises(RuntimeError, match='if __name__ == "__main__":'):
        portable(1, CountingEnv, num_workers=1)


def test_an_env_is_sized():
    sizing = recommend(
        CountingEnv,
        goal=Goal(num_envs=2),
        budget_s=1.0,
        options=ExecutorOptions(start_method="portable"),
    )
    assert sizing.chosen.steps_per_s > 0


#: What is taken from envherd in a script and in its workers: calls that are missing or refused alone, or in strange
#: company; `tests.lacking.subsets` has more.
PARTS = (
    # The calls, names and modules that another system lacks.
    *("windows", "macos", "sandbox"),
    "os.memfd_create! os.posix_fallocate! os.killpg! os.kill! os.getppid! signal.pthread_sigmask! resource.getrlimit!",
    (
        "libc.sem_init os.sched_getaffinity! os.sched_yield! mmap.PROT_READ time.CLOCK_MONOTONIC faulthandler.register "
        "/proc"
    ),
)


@pytest.mark.long
def test_program_works_where_parts_of_linux_are_missing():
    command = [
        sys.executable,
        "-m",
        "tests.lacking.subsets",
        *(word for part in PARTS for word in ("--words", part)),
    ]
    root = Path(__file__).parents[3]
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, [root, *sys.path])),
    }
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=root,
        env=variables,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_interpreters_are_refused():
    with pytest.raises(ValueError, match="InPython"):
        portable(
            1,
            InPython(sys.executable, "envherd.workers.testing:CountingEnv"),
            num_workers=1,
        )


@pytest.mark.broken_pool
def test_a_program_that_is_no_interpreter_is_named(monkeypatch):
    multiprocessing.resource_tracker.ensure_running()
    monkeypatch.setattr(multiprocessing.spawn, "_python_exe", b"/bin/true")
    with pytest.raises(WorkerLost, match=r"exit code 0 before .* is '/bin/true'"):
        portable(1, CountingEnv, num_workers=1)


def test_kept_rollouts_keep_no_descriptors_and_no_names():
    with portable(2, CountingEnv, num_workers=1) as env:
        kept = [env.rollout(3, break_when_any_done=False) for _ in range(6)]
        before = len(os.listdir("/proc/self/fd"))
        kept += [env.rollout(3, break_when_any_done=False) for _ in range(6)]
        assert len(os.listdir("/proc/self/fd")) == before
    assert all(batch.numel() == 6 for batch in kept)
