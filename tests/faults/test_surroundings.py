"""Faults caused by the machine, the caller and unusual envs are reported clearly, and nothing is left."""

import contextlib
import functools
import os
import pickle
import re
import resource
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from tensordict import TensorDict

from envherd.executor import (
    ActionError,
    Closed,
    EnvError,
    ExecutorOptions,
    ParallelEnv,
    SerialEnv,
    WorkerLost,
    WorkerTimeout,
)
from envherd.executor.guests.leases import LeasePool
from envherd.executor.show.evaluate import evaluate
from envherd.workers.testing import CountingEnv
from tests.envs.breaking_envs import FaultyEnv
from tests.envs.counting_envs import ChattyEnv
from tests.envs.disturbing_envs import (
    MEDDLING,
    DeafEnv,
    ForkingEnv,
    GrowingEnv,
    HungryEnv,
    MeddlingEnv,
    NestedEnv,
)
from tests.executor.calls import ENDLESS
from tests.faults.children import (
    be_bound_by_process_limits,
    can_limit_memory,
    can_mount,  # noqa: F401  # in the condition of a mark
    files_left,
    fill,
    in_child,
    memory_group,
    mount_small,
)
from tests.faults.matrix import _held, _left
from tests.gates import wait_for
from tests.scale import IS_FULL
from tools.faults_page import record

pytestmark = [
    pytest.mark.slow,
    pytest.mark.broken_pool,
    pytest.mark.timeout(120),
    pytest.mark.usefixtures("own_helper"),
]

make = functools.partial(ParallelEnv, num_workers=2, seed=0)
METHODS = ["zygote", "portable"]


def make_by(start_method: Any, on_worker_loss: Any = "raise") -> Any:
    """Return an executor of two envs; the pool that forks workers has the start method "zygote"."""
    return make(
        2,
        ENDLESS,
        options=ExecutorOptions(
            start_method=start_method, on_worker_loss=on_worker_loss
        ),
    )


def actions(value: Any = 1, count: int = 2, dtype: Any = torch.int64) -> TensorDict:
    return TensorDict({"action": torch.full((count,), value, dtype=dtype)}, [count])


def works(env: Any) -> str:
    """Require that both envs make two steps, each following from the previous one."""
    root = env.reset()
    for count in (1, 2):
        root = env.step_and_maybe_reset(root.update(actions()))[1]
        assert root["observation"][:, 1:].tolist() == [[count, 1]] * 2
    return "works"


def message_of(error: BaseException) -> str:
    return f"`{type(error).__name__}`: {str(error).splitlines()[0]}"


# ---- the machine -------------------------------------------------------------------------------


def few_files() -> str:
    before = _held()
    for count, start in (
        (14, functools.partial(make, 2, ENDLESS)),
        (25, lambda: evaluate(None, ENDLESS, num_workers=2, max_steps=3)),
    ):
        with (
            files_left(count),
            pytest.raises(OSError, match=r"more open files \(2 workers\)"),
        ):
            start()
    assert not _left(before)
    with make(2, ENDLESS) as env:
        with (
            files_left(0),
            pytest.raises(
                OSError,
                match=r"shared memory failed: .*Too many open files.*\(ulimit -n\)",
            ),
        ):
            env.rollout(3)
        works(env)
    return (
        "`OSError` (EMFILE) with the numbers before anything is started; a rollout without room is refused, and steps "
        "work"
    )


def few_files_at_a_restart(start_method: str) -> str:
    """Without room for one of its descriptors a successor is lost, and with room it is replaced."""
    highest = max(map(int, os.listdir("/proc/self/fd")))
    # Fill the gaps that this process has inherited: they would be room for a successor.
    while (first := os.dup(0)) < highest:
        pass
    os.close(first)
    before = _held()
    assert np.ma  # imported at its first use
    seen = ""
    for count in range(60):
        with make_by(start_method, "restart") as env:
            env.reset()
            for worker_id in range(2):
                os.kill(env._pool.pid_of(worker_id), signal.SIGKILL)
            try:
                with files_left(count):
                    env.step(actions())
                break
            except WorkerLost as error:
                seen = message_of(error)
            assert re.search(
                r"starting a worker failed: .*Too many .*\(ulimit -n, ulimit -u\)\.$",
                seen,
            ), seen
            with contextlib.suppress(WorkerLost):  # of a worker that was lost before
                env.reset()
            works(env)
    assert 2 < count < 59, "the last one: it was never replaced"
    assert not _left(before)
    return seen


def deleted_folder(start_method: str, folder: str) -> str:
    os.chdir(folder)
    os.rmdir(folder)
    before = _held()
    with make_by(start_method) as env:
        works(env)
    assert not _left(before)
    return "works"


def closed_descriptors(start_method: str) -> str:
    os.closerange(0, 3)
    with make_by(start_method, "restart") as env:
        works(env)
        os.closerange(0, 3)  # as a program that becomes a daemon later
        os.kill(env._pool.pid_of(1), signal.SIGKILL)
        env.step(actions())
        works(env)
        return "works; 0, 1 and 2 are " + ", ".join(
            {os.readlink(f"/proc/self/fd/{fd}") for fd in range(3)}
        )


def evaluated() -> None:
    evaluate(None, CountingEnv, episodes=2, num_workers=2)


def mapped() -> None:
    with LeasePool(CountingEnv, 2) as pool:
        # Each task still runs when the next one begins, which therefore needs another thread.
        list(pool.map(lambda *_: time.sleep(0.3), range(2)))


def few_processes(num_allowed: int, start: Callable[[], object]) -> str:
    be_bound_by_process_limits()
    before = _held()
    resource.setrlimit(resource.RLIMIT_NPROC, (num_allowed, num_allowed))
    with pytest.raises(
        WorkerLost,
        match=r"(starting a worker|evaluate|LeasePool|map) failed.*ulimit -u",
    ) as caught:
        start()
    assert not _left(before)
    return message_of(caught.value)


def little_address_space() -> str:
    taken = (
        int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    )
    with make(2, ENDLESS) as env:
        resource.setrlimit(resource.RLIMIT_AS, (taken + 2**28, -1))
        with pytest.raises(MemoryError, match="address space") as caught:
            env.rollout(2**23)
        works(env)
    return message_of(caught.value) + " Steps continue"


def little_address_space_in_workers() -> str:
    with make(2, [functools.partial(GrowingEnv, 99), ENDLESS]) as env:
        env.reset()
        env.step(actions())
        with pytest.raises(EnvError, match="MemoryError") as caught:
            env.step(actions())
        works(env)
    return f"`{type(caught.value).__name__}` of that env; all continue"


def killed_for_memory(flag: str) -> str:
    options = ExecutorOptions(on_worker_loss="restart")
    # Much more than this process uses: the kernel kills the largest process.
    with memory_group(1536 * 2**20):
        with make(2, [functools.partial(HungryEnv, flag), ENDLESS]) as env:
            env.reset()
            env.step(actions())
            with pytest.raises(
                WorkerLost, match="for the memory limit of that group"
            ) as caught:
                env.step(actions())
            assert caught.value.context["exit_code"] == -signal.SIGKILL
            assert caught.value.env_ids == (0,)
        os.unlink(flag)
        with make(
            2, [functools.partial(HungryEnv, flag), ENDLESS], options=options
        ) as env:
            data = env.rollout(4, break_when_any_done=False)["next"]
            assert data["interrupted"][..., 0].tolist() == [
                [False, True, False, False],
                [False] * 4,
            ]
            assert data["observation"][1, :, 1].tolist() == [1, 2, 3, 4]
            works(env)
    return message_of(caught.value)


def small_shm() -> str:
    mount_small("/dev/shm")
    fill("/dev/shm")
    with make(2, functools.partial(CountingEnv, 99, size=512)) as env:
        env.rollout(4)
        return works(env)


def read_only_shm() -> str:
    mount_small("/dev/shm", "size=64k,ro")
    with make(2, ENDLESS) as env:
        env.rollout(4)
        return works(env)


def full_temporary_folder(folder: str) -> str:
    mount_small(folder)
    fill(folder)
    os.environ["TMPDIR"] = folder
    os.chdir(folder)
    with make(2, ENDLESS) as env:
        env.rollout(4)
        return works(env)


needs_mounts = pytest.mark.skipif(
    "not can_mount()", reason="mounts of one's own are not allowed here"
)


def test_few_files():
    record("few files", what="RLIMIT_NOFILE too low", seen=in_child(few_files))


@pytest.mark.skipif(
    os.getuid() != 0,
    reason="the limit counts all processes of a user: needs one without any",
)
@pytest.mark.parametrize(
    ("num_allowed", "start"),
    [
        pytest.param(1, functools.partial(make_by, "zygote"), id="no helper"),
        pytest.param(2, functools.partial(make_by, "zygote"), id="no worker"),
        pytest.param(1, functools.partial(make_by, "portable"), id="no tracker"),
        pytest.param(2, functools.partial(make_by, "portable"), id="one worker"),
        # Each slot, seat and task has a thread.
        pytest.param(2, evaluated, id="no seat"),
        pytest.param(5, mapped, id="one slot"),
        pytest.param(7, mapped, id="one task"),
    ],
)
def test_few_processes(num_allowed, start, request):
    record(
        request.node.callspec.id,
        what="RLIMIT_NPROC too low",
        seen=in_child(few_processes, num_allowed, start),
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("start_method", METHODS)
@pytest.mark.parametrize(
    "body",
    [few_files_at_a_restart, deleted_folder, closed_descriptors],
    ids=lambda b: b.__name__,
)
@pytest.mark.long
def test_a_start_in_odd_surroundings(body, start_method, tmp_path):
    record(
        f"{body.__name__} {start_method}",
        what=f"{body.__name__.replace('_', ' ')} ({start_method})",
        seen=in_child(
            body,
            start_method,
            *([str(tmp_path)] if body is deleted_folder else []),
        ),
    )


def _reap_all(*_: object) -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


@pytest.mark.parametrize("start_method", METHODS)
@pytest.mark.parametrize(
    "handler", [signal.SIG_IGN, _reap_all], ids=["ignored", "reaped"]
)
@pytest.mark.long
def test_death_is_noticed_where_the_program_ignores_or_reaps_children(
    handler, start_method
):
    def body() -> bool:
        before, handlers = _held(), signal.signal(signal.SIGCHLD, handler)
        with make_by(start_method) as env:
            env.reset()
            began, used_s = time.monotonic(), time.process_time()
            os.kill(env._pool.pid_of(1), signal.SIGKILL)
            expected = "SIGKILL" if start_method == "zygote" else "unknown exit code"
            with pytest.raises(WorkerLost, match=expected):
                env.step(actions())
            assert time.process_time() - used_s < 1.0
            assert time.monotonic() - began < 30
        with make_by(start_method, "restart") as env:
            env.reset()
            os.kill(env._pool.pid_of(1), signal.SIGKILL)
            env.step(actions())
            works(env)
        signal.signal(signal.SIGCHLD, handlers)
        return not _left(before)

    assert in_child(body)


@pytest.mark.parametrize(
    ("body", "limit"),
    [
        (little_address_space, "RLIMIT_AS low"),
        (little_address_space_in_workers, "RLIMIT_AS low"),
        pytest.param(small_shm, "/dev/shm", marks=needs_mounts),
        pytest.param(
            read_only_shm,
            "/dev/shm",
            marks=[needs_mounts, pytest.mark.full],
        ),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_little_memory(body, limit):
    record(
        body.__name__,
        what=f"{limit}: {body.__name__.replace('_', ' ')}",
        seen=in_child(body),
    )


@pytest.mark.long
def test_killed_for_the_memory_limit_of_a_control_group(tmp_path):
    """The kernel kills the worker, whose score is raised by a third of the limit: see `process.entry`, `_OOM_SCORE`."""
    if not can_limit_memory():
        pytest.skip("control groups of one's own are not allowed here")
    record(
        "out of memory",
        what="memory beyond the limit of the control group",
        seen=in_child(killed_for_memory, str(tmp_path / "hungry")),
    )


@needs_mounts
def test_full_temporary_folder(tmp_path):
    record(
        "full disk",
        what="TMPDIR and current folder full",
        seen=in_child(full_temporary_folder, str(tmp_path)),
    )


# ---- the owner ---------------------------------------------------------------------------------


def _end(how: str, state: str, start_method: str, write: int) -> None:
    """Run as an owner that ends in a state, with a hanging worker and a fork that survives."""
    hung = functools.partial(
        FaultyEnv, "gil", at="construct" if state == "build" else "step", step=1
    )
    options = ExecutorOptions(start_method=start_method)  # type: ignore[arg-type]
    if state == "build":
        threading.Timer(1.0, functools.partial(_leave, how)).start()
        make(2, [ENDLESS, hung], options=options)
    env = make(2, [ENDLESS, hung], options=options)
    env.reset()
    if os.fork() == 0:
        os.close(write)
        signal.pause()
    if state == "sent":
        env.send(actions())
        time.sleep(0.2)
    os.write(write, b"ready")
    if state in ("step", "rollout"):
        threading.Timer(0.3, functools.partial(_leave, how)).start()
        env.step(actions()) if state == "step" else env.rollout(5)
    _leave(how)


def _leave(how: str) -> None:
    if how == "exits":
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL if how == "is killed" else signal.SIGTERM)
    time.sleep(60)


ENDS = [
    (how, state, start_method)
    for start_method in METHODS
    for how in ("is killed", "exits", "gets SIGTERM")
    for state in ("build", "idle", "step", "sent", "rollout")
]
QUICK_ENDS = [
    ("is killed", "build", "zygote"),
    ("exits", "sent", "zygote"),
    ("is killed", "step", "portable"),
]


@pytest.mark.parametrize(
    ("how", "state", "start_method"), ENDS if IS_FULL else QUICK_ENDS
)
def test_an_owner_that_ends(how, state, start_method):
    """Its workers end with it, also one stuck in C, although a process that it had forked survives."""
    before = _held()
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        try:
            _end(how, state, start_method, write)
        finally:
            os._exit(1)
    os.close(write)
    os.read(read, 5)
    os.close(read)
    os.waitpid(pid, 0)
    forked = (
        []
        if state == "build"
        else [int(p) for p in _held()[0] - before[0] if _is_copy_of_this(p)]
    )
    for one in forked:
        # Its owner has ended: it must not hold the workers' lifelines.
        wait_for(lambda one=one: {str(one)} >= _held()[0] - before[0])
        os.kill(one, signal.SIGKILL)
        os.waitpid(one, 0)
    assert not _left(before)
    what = f"the owner {how} in state {state}, a worker hung ({start_method})"
    record(f"owner {how} {state} {start_method}", what=what, seen="nothing is left")


def _is_copy_of_this(pid: str) -> bool:
    try:
        return (
            Path(f"/proc/{pid}/cmdline").read_bytes()
            == Path("/proc/self/cmdline").read_bytes()
        )
    except OSError:
        return False


# ---- envs that meddle --------------------------------------------------------------------------


QUICK_MEDDLING = {
    "closes descriptors 0 to 255",
    "installs signal handlers",
    "starts processes",
    "forks",
    "forks a process that raises",
    "uses a pool of forked processes",
}


@pytest.mark.parametrize(
    "name", [name for name in MEDDLING if IS_FULL or name in QUICK_MEDDLING]
)
def test_an_env_that_meddles(name):
    before = _held()
    options = ExecutorOptions(step_timeout_s=20.0, reset_timeout_s=20.0)
    with make(
        2, [functools.partial(MeddlingEnv, MEDDLING[name]), ENDLESS], options=options
    ) as env:
        works(env)
        works(env)
        assert env.call("echo", 3) == [[[3], {}]] * 2
        data = env.rollout(3)
        assert data["next", "observation"][..., 1].tolist() == [[1, 2, 3]] * 2
        began = time.monotonic()
        env.close()
        assert time.monotonic() - began < 15
    assert not _left(before)
    record(
        f"meddles {name}",
        what=f"an env {name}",
        seen="nothing: it works, and nothing is left",
    )


@pytest.mark.parametrize("env_threads", [False, True])
@pytest.mark.parametrize("where", ["reset", "step", "echo", "close"])
def test_a_process_that_an_env_has_forked_ends_where_it_returns(where, env_threads):
    options = ExecutorOptions(step_timeout_s=20.0, env_threads=env_threads)
    factory = functools.partial(MeddlingEnv, os.fork, where)
    with make(2, [factory, ENDLESS], num_workers=1, options=options) as env:
        for _ in range(2):
            works(env)
            assert env.call("echo", 3) == [[[3], {}]] * 2
            env.rebuild([0])
        works(env)
        children = psutil.Process(env.call("pid")[0]).children()
        assert len(children) >= 2
        wait_for(lambda: all(one.status() == "zombie" for one in children))


@pytest.mark.parametrize("is_late", [False, True])
def test_a_process_forked_in_the_reset_after_a_step_stores_nothing(is_late):
    options = ExecutorOptions(step_timeout_s=10.0)
    factory = functools.partial(ForkingEnv, is_late=is_late)
    with (
        make(2, factory, seed=0, options=options) as env,
        SerialEnv(2, functools.partial(CountingEnv, 3), seed=0) as expected,
    ):
        roots = [env.reset(), expected.reset()]
        for count in range(8):
            if count == 5 and is_late:
                time.sleep(0.5)  # the other process has returned
            roots = [
                one.step_and_maybe_reset(root.update(actions()))[1]
                for one, root in zip((env, expected), roots, strict=True)
            ]
            assert torch.equal(*(root["observation"] for root in roots))


def test_stack_of_hung_worker_is_read_although_env_handles_the_signal():
    options = ExecutorOptions(step_timeout_s=0.5)
    with make(1, DeafEnv, num_workers=1, options=options) as env:
        env.reset()
        with pytest.raises(Exception, match=r"breaking_envs\.py"):
            env.step(actions(count=1))


def test_the_error_for_a_stopped_worker_names_the_limit_that_has_passed():
    options = ExecutorOptions(step_timeout_s=0.5)
    with make(1, [ENDLESS], num_workers=1, options=options) as env:
        env.reset()
        os.kill(env.statistics().workers[0].pid, signal.SIGSTOP)
        with pytest.raises(
            WorkerTimeout, match=r"idle.*\(.*Options\.step_timeout_s or"
        ):
            env.step(actions(count=1))


def test_an_env_that_prints_megabytes():
    with make(2, [functools.partial(ChattyEnv, 1 << 22, 32), ENDLESS]) as env:
        root = env.reset()
        for _ in range(20):
            root = env.step_and_maybe_reset(root.update(actions()))[1]
        assert root["observation"][:, 1].tolist() == [20, 20]
        assert os.fstat(env.engine.pool.crew.workers[0].log_fd).st_size < 1 << 24
    record(
        "prints",
        what="an env prints 4 MB at every step",
        seen="nothing: the oldest output is dropped",
    )


# ---- callers -----------------------------------------------------------------------------------

BAD_ACTIONS: dict[str, Callable[[], TensorDict]] = {
    "too few": lambda: actions(count=1),
    "of another inner shape": lambda: TensorDict(
        {"action": torch.ones(2, 3, dtype=torch.int64)}, [2]
    ),
    "of floats": lambda: actions(1.0, dtype=torch.float32),
    "NaN": lambda: actions(float("nan"), dtype=torch.float32),
    "out of range": lambda: actions(99),
    "negative": lambda: actions(-1),
    "on another device": lambda: TensorDict(
        {"action": torch.ones(2, dtype=torch.int64, device="meta")}, [2]
    ),
    "missing": lambda: TensorDict({}, [2]),
}


def test_bad_actions_step_no_env():
    with make(2, ENDLESS) as env:
        env.reset()
        for name, bad in BAD_ACTIONS.items():
            for call in (env.step, env.step_and_maybe_reset, env.send):
                with pytest.raises((ActionError, ValueError, KeyError)) as caught:
                    call(bad())
                assert env.statistics().steps_per_env == (0, 0), name
            record(
                f"actions {name}",
                what=f"actions {name}",
                seen=message_of(caught.value).replace("|", "/"),
            )
        works(env)


def test_a_live_executor_that_is_pickled_forked_and_used_after_its_end():
    env = make(2, ENDLESS)
    env.reset()
    with pytest.raises(TypeError):
        pickle.dumps(env)

    def use() -> str:
        with pytest.raises(Closed):
            env.step(actions())
        env.close()
        return "Closed"

    assert in_child(use) == "Closed"
    works(env)
    env.close()
    env.close()
    with pytest.raises(Closed):
        env.step(actions())
    record(
        "pickled",
        what="pickling a live executor",
        seen="`TypeError`; the executor continues",
    )
    record(
        "forked",
        what="using or closing it in a fork of the owner",
        seen="`Closed`; the owner's executor continues",
    )
    record(
        "closed", what="closing twice; using it after `close`", seen="nothing; `Closed`"
    )


def test_two_executors_at_once():
    with make(2, ENDLESS) as one, make(2, ENDLESS) as two:
        one.reset()
        works(two)
        one.send(actions())
        os.kill(two.call("pid")[0], signal.SIGKILL)
        with pytest.raises(WorkerLost):
            two.reset()
        assert one.recv()["next", "observation"][:, 1].tolist() == [1, 1]
    record(
        "two",
        what="two executors at once, a worker of one killed",
        seen="the other does not notice",
    )


@pytest.mark.skipif(not IS_FULL, reason="imports torch in two workers")
def test_an_executor_in_an_env_of_an_executor():
    before = _held()
    for ending in ("close", "kill"):
        with make(2, NestedEnv) as env:
            assert env.call("inner_steps") == [5, 5]
            works(env)
            if ending == "kill":
                os.kill(env.call("pid")[0], signal.SIGKILL)
        assert not _left(before)
    record(
        "nested",
        what="an executor in an env of an executor, and its end",
        seen="works; nothing is left",
    )
