"""Leases: whatever an env, a caller or the system does, each call is answered, and each slot serves the next lease."""

import asyncio
import contextlib
import gc
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from envherd import (
    Closed,
    EnvError,
    ExecutorOptions,
    FactoryError,
    InPython,
    LeasePool,
    WorkerLost,
    WorkerTimeout,
)
from envherd.executor.guests.monitor import Watch, plates
from envherd.executor.processes.worker_process import WorkerProcess
from tests.envs.leased_envs import Odd, World
from tests.faults.children import in_child
from tests.gates import wait_for
from tests.scale import IS_FULL

pytestmark = pytest.mark.broken_pool


@pytest.fixture
def pool():
    with LeasePool(World, 2, timeout_s=30) as one:
        yield one


def all_pids(pool, num_envs=2):
    """Lease all envs at once; return their pids."""
    with contextlib.ExitStack() as stack:
        envs = [stack.enter_context(pool.lease()) for _ in range(num_envs)]
        assert not any(env.call(lambda world: world.is_busy) for env in envs), (
            "in the middle of somebody's call"
        )
        return {env.step()[0] for env in envs}


# ---- calls --------------------------------------------------------------------------------------


def test_any_arguments_and_results(pool):
    with pool.lease() as env:
        for value in (
            1,
            "text",
            {"a": [np.arange(3)]},
            World,
            range(3),
            {1, 2},
            None,
            -(10**30),
            KeyError,
        ):
            np.testing.assert_equal(
                env.echo(value, key=value), ((value,), {"key": value})
            )
        assert env.call(lambda world, more: world.count + more, 5) == 5
        assert env.echo(timeout_s=3)[1] == {"timeout_s": 3}, (
            "of the method, not of the call"
        )


#: Calls -> the error, and whether the env is lost.
CALLS = {
    "KeyError": (lambda env: env.fail(KeyError, "mine"), KeyError, "mine", False),
    "StopIteration": (
        lambda env: env.fail(StopIteration, "mine"),
        StopIteration,
        "mine",
        False,
    ),
    "TimeoutError": (
        lambda env: env.fail(TimeoutError, "mine"),
        TimeoutError,
        "mine",
        False,
    ),
    "Closed": (lambda env: env.fail(Closed, "mine"), Closed, "mine", False),
    "odd": (
        lambda env: env.fail(Odd, int, "x"),
        EnvError,
        r"the env raised .*Odd: .* \(invalid literal",
        False,
    ),
    "no error": (
        lambda env: env.fail(Odd, int, "3"),
        EnvError,
        r"the env raised .*Odd: .* \('int' object",
        False,
    ),
    "unreadable": (
        lambda env: env.call(lambda _: Odd(int, "x")),
        EnvError,
        "that cannot be read here",
        False,
    ),
    "argument": (
        lambda env: env.echo(threading.Lock()),
        TypeError,
        "cannot pickle '_thread.lock' object",
        False,
    ),
    "attribute": (
        lambda env: env.count(),
        TypeError,
        "'int' object is not callable",
        False,
    ),
    "nothing": (
        lambda env: env.nothing(),
        AttributeError,
        "'World' object has no attribute 'nothing'",
        False,
    ),
    "private": (
        lambda env: env._hidden(),
        AttributeError,
        "'_hidden' is private",
        False,
    ),
    "hang": (
        lambda env: env.call("hang", timeout_s=0.3),
        WorkerTimeout,
        r"within 0.3 s (.*\n)+.*in hang",
        True,
    ),
    "closed socket": (
        lambda env: env.call(
            lambda _: os.closerange(3, 1000) or time.sleep(60),  # type: ignore[func-returns-value]
            timeout_s=0.3,
        ),
        WorkerTimeout,
        "within 0.3 s",
        True,
    ),
    "endless output": (
        lambda env: env.call(World.talk, 10**9, timeout_s=1),
        WorkerTimeout,
        r"(?s)\A(?=.*in talk).{1,200000}\Z",
        True,
    ),
    "much output": (
        lambda env: env.call(World.talk, 40_000),
        WorkerLost,
        r"(?s)\A.{1,1200000}\Z",
        True,
    ),
    "die": (lambda env: env.die(), WorkerLost, r"SIGKILL.*\n(.*\n)*last words", True),
    "leave": (
        lambda env: env.fail(SystemExit, 3),
        EnvError,
        "raised SystemExit: 3",
        True,
    ),
    "interrupt": (
        lambda env: env.fail(KeyboardInterrupt, "now"),
        EnvError,
        "raised KeyboardInterrupt: now",
        True,
    ),
    "lock": (
        lambda env: env.call(lambda _: [threading.Lock()]),
        EnvError,
        "that can be sent, got a list",
        True,
    ),
    "large": (
        lambda env: env.call(lambda _: b"x" * 2_000_000),
        EnvError,
        "at most 1,000,000 bytes, got 2,000,0",
        True,
    ),
    "no deadline": (
        lambda env: env.call("step", timeout_s=float("nan")),
        ValueError,
        "got nan",
        False,
    ),
    "deadline": (
        lambda env: env.call("step", timeout_s="soon"),
        TypeError,
        "'str'",
        False,
    ),
    "between": (
        lambda env: [
            env.call(lambda _: threading.Timer(0.1, World().die).start()),
            wait_for(lambda: env._seat.over),  # type: ignore[func-returns-value]
            env.step(),
        ],
        WorkerLost,
        "^lease .*SIGKILL",
        True,
    ),
}


@pytest.mark.parametrize(
    ("call", "kind", "text", "is_lost"), CALLS.values(), ids=CALLS.keys()
)
def test_only_a_lost_env_ends_its_lease_and_no_other(call, kind, text, is_lost):
    with (
        LeasePool(World, 2, 30, max_result_bytes=1_000_000) as pool,
        pool.lease() as other,
    ):
        before = other.step()[0]
        with pool.lease() as env:
            pid = env.step()[0]
            with pytest.raises(kind, match=text) as raised:
                call(env)
            assert "ExecutorOptions" not in str(raised.value)
            assert ("in fail" in str(raised.value.__cause__)) == (
                "fail" in call.__code__.co_names
            )
            with pytest.raises(kind) if is_lost else contextlib.nullcontext():
                assert env.step() == (pid, 2)
        assert other.step() == (before, 2), "the other lease does not notice"
        assert (all_pids(pool, 1) != {pid}) == is_lost


# ---- leases -------------------------------------------------------------------------------------


def test_threads_and_loops_share_a_pool_first_come_first_served():
    async def in_task(one, number, order):
        async with one.lease() as env:
            order += (await env.echo(number))[0]

    async def in_loop(one):
        order = []
        await asyncio.gather(*(in_task(one, number, order) for number in range(20)))
        return order

    # Two slots could overtake each other after they have taken a lease.
    with LeasePool(World, 1) as one, ThreadPoolExecutor(3) as threads:
        answers = [threads.submit(lambda: asyncio.run(in_loop(one))) for _ in range(3)]
        assert list(
            one.map(lambda env, task: env.step(0.001) and task, range(30))
        ) == list(range(30))
        assert [answer.result() for answer in answers] == [list(range(20))] * 3


@pytest.mark.parametrize(
    ("ordered", "fail", "error", "text"),
    [
        (True, lambda _, task: 1 // task, ZeroDivisionError, "by zero"),
        (False, lambda _, task: 1 // task, ZeroDivisionError, "by zero"),
        # It is not the end of the results.
        (True, lambda _, task: next(iter(range(task))), RuntimeError, "StopIteration"),
    ],
)
def test_map(pool, ordered, fail, error, text):
    found = list(
        pool.map(
            lambda env, task: env.step(0.1 * (task == 0)) and task,
            iter(range(9)),
            ordered=ordered,
        )
    )
    assert (found if ordered else sorted(found)) == list(range(9))
    with pytest.raises(error, match=text):
        list(pool.map(fail, [1, 0, *[1] * 20]))
    iterator = pool.map(lambda env, task: env.hang() if task else task, range(9))
    assert next(iterator) == 0
    iterator.close()  # does not wait for the others
    assert len(all_pids(pool)) == 2


def cancelled(pool):
    """A call, and waits for an env, whose objects live on; the first one when its slot has answered."""
    granted, *waiting = [pool.lease() for _ in range(4)]

    async def main():
        entering = asyncio.create_task(granted.__aenter__())
        # The loop does not see the answer.
        asyncio.get_running_loop().call_soon(time.sleep, 0.2)
        await asyncio.sleep(0)
        entering.cancel()
        async with pool.lease(), pool.lease() as env:
            for call in (*(lease.__aenter__() for lease in waiting), env.hang()):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(call, 0.1)
            with pytest.raises(Closed, match="a call was cancelled"):
                await env.step()

    asyncio.run(main())
    return granted, waiting


def cancelled_unbegun(pool):
    """Calls that are cancelled before their slot takes them: the env gets none, and is kept."""
    before = all_pids(pool)

    async def main():
        for _ in range(20):
            async with pool.lease() as env:
                call = asyncio.ensure_future(env.hang())
                await asyncio.sleep(0)
                call.cancel()

    asyncio.run(main())
    assert all_pids(pool) == before


def dropped(pool):
    """Tasks that are in a call, or wait for an env, when their loop closes."""

    async def play():
        async with pool.lease() as env:
            await env.hang()

    loop = asyncio.new_event_loop()
    tasks = [loop.create_task(play()) for _ in range(3)]
    loop.run_until_complete(asyncio.sleep(0.1))
    loop.close()
    return tasks


def interrupted(pool):
    """Ctrl-C in a call, and while waiting for an env."""
    with pool.lease(), pool.lease() as env:
        for wait in (pool.lease().__enter__, env.hang):
            with pytest.raises(KeyboardInterrupt):  # noqa: PT012  # it may come before the wait
                threading.Timer(0.1, os.kill, (os.getpid(), 2)).start()
                wait()


def forgotten(pool):
    pool.lease().__enter__()  # never left
    with pytest.raises(ZeroDivisionError), pool.lease():
        gc.collect(1 / 0)


def killed_idle(pool):
    for process in [psutil.Process(pid) for pid in all_pids(pool)]:
        process.kill()
        process.wait(20)


@pytest.mark.parametrize(
    "end",
    [cancelled, cancelled_unbegun, dropped, interrupted, forgotten, killed_idle],
)
def test_every_end_gives_the_slot_back(pool, end):
    kept = end(pool)
    assert len(all_pids(pool)) == 2, kept


def lease_in_fork(pool, env):
    for call in (env.step, pool.lease().__enter__):
        with pytest.raises(Closed, match="of another process"):
            call()
    pool.close()


def test_closed_pool_fork_and_unentered_lease_raise_closed(pool):
    lease = pool.lease()
    with pytest.raises(Closed, match="expected a lease that was entered"):
        lease.step()
    with lease as env:
        assert in_child(lease_in_fork, pool, env) is None
        with pytest.raises(Closed, match="expected a new lease"), lease:
            pass
        threading.Timer(0.1, pool.close).start()
        for call in (env.hang, env.step, pool.lease().__enter__):
            with pytest.raises(Closed):
                call()


# ---- slots --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "on_return", ["keep", "rebuild", World.reset, World.hang, World.die, World.fail]
)
def test_on_return_between_leases(on_return, caplog):
    timeout_s = 1.0 if on_return is World.hang else 30.0
    with (
        LeasePool(World, 1, timeout_s, on_return=on_return) as pool,
        caplog.at_level("WARNING", "envherd"),
    ):
        (first,), (second,) = all_pids(pool, 1), all_pids(pool, 1)
        with pool.lease() as env:
            count = env.step()[1]
    assert (first == second) == (on_return in ("keep", World.reset))
    assert count == {"keep": 3, World.reset: 11}.get(on_return, 1)
    # Without the pickled bytes of an exception.
    assert any(
        "on_return has failed: " in one and "b'" not in one for one in caplog.messages
    ) == (on_return in (World.hang, World.die, World.fail))


def test_an_env_that_cannot_be_built_again_is_reported(tmp_path):
    with LeasePool(lambda: os.mkdir(tmp_path / "built") or World(), 1) as pool:
        with pytest.raises(WorkerLost), pool.lease() as env:
            env.die()
        for _ in range(2):
            with (
                pytest.raises(FactoryError, match="raised FileExistsError"),
                pool.lease(),
            ):
                pass
        os.rmdir(tmp_path / "built")
        assert len(all_pids(pool, 1)) == 1


def test_options_of_processes_hold_and_top_shows_the_lessees():
    options = ExecutorOptions(
        env_vars=[{"SLOT": "a"}, {"SLOT": "b"}], max_worker_memory=200_000_000
    )
    with LeasePool(
        World, 2, options=options, env_kwargs=[{"start": 5}, {"start": 7}]
    ) as pool:
        with pool.lease(12) as one, pool.lease("\ud800" + "ä" * 100) as other:
            assert {env.call(lambda _: os.environ["SLOT"]) for env in (one, other)} == {
                "a",
                "b",
            }
            assert sorted([one.step()[1], other.step()[1]]) == [6, 8]
            plate = next(
                one
                for one in plates()
                if (one.pid, one.content["env"]) == (os.getpid(), "lease")
            )
            with contextlib.closing(Watch(plate)) as watch:
                assert {worker.phase for worker in watch.look().workers} == {
                    "12",
                    "?" + "ä" * 31,
                }
            one.call(print)
            assert "World object" in pool.worker_output(0) + pool.worker_output(1)
            released = SimpleNamespace(log_fd=2**20)  # by another thread
            assert not WorkerProcess.log(released)
            large = one.step()[0]
            one.call(lambda world: setattr(world, "held", b"x" * 300_000_000))
        assert large not in all_pids(pool)
    with (
        LeasePool(
            InPython(sys.executable, f"{World.__module__}:World", {"start": 3}), 1
        ) as pool,
        pool.lease() as env,
    ):
        assert env.step()[1] == 4


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (
            {"make_env": World()},
            FactoryError,
            "expected a callable that builds an env, got",
        ),
        ({"make_env": lambda: None}, FactoryError, "returned None, expected an env"),
        ({"make_env": lambda: World}, FactoryError, "expected an env"),
        (
            {"make_env": (lambda env: lambda: env)(World())},  # noqa: PLC3002
            FactoryError,
            "returned the captured variable `env`",
        ),
        (
            {"make_env": (lambda lock: lambda: lock)(threading.Lock())},  # noqa: PLC3002
            FactoryError,
            "captured the variable `lock`",
        ),
        ({"make_env": lambda: 1 / 0}, FactoryError, "raised ZeroDivisionError"),
        (
            {"make_env": lambda: LeasePool(World, 1)},
            FactoryError,
            "expected the process to be the program's own, got Worker",
        ),
        ({"num_envs": 0}, ValueError, "num_envs failed"),
        (
            {"timeout_s": 0},
            ValueError,
            "timeout_s to be seconds above 0 or None, got 0",
        ),
        (
            {"on_return": "reset"},
            ValueError,
            "on_return to be 'keep', 'rebuild' or a function",
        ),
        ({"max_result_bytes": 0}, ValueError, "max_result_bytes to be a positive int"),
        (
            {"options": ExecutorOptions(start_method="portable")},
            ValueError,
            "start_method to be",
        ),
        ({"n_envs": 3}, TypeError, "Did you mean num_envs"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_is_refused(arguments, error, text):
    with pytest.raises(error, match=text):
        LeasePool(**{"make_env": World, "num_envs": 1, "timeout_s": 5, **arguments})


# ---- many ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_calls_that_never_return_cost_only_their_own_time():
    num_calls, num_envs = (960, 64) if IS_FULL else (80, 8)

    def call(number):
        with contextlib.suppress(WorkerTimeout), pool.lease() as env:
            return env.hang() if number % 5 < 2 else env.echo(number)

    with (
        LeasePool(World, num_envs, timeout_s=1.0) as pool,
        ThreadPoolExecutor(2 * num_envs) as threads,
    ):
        answers = list(threads.map(call, range(num_calls)))
    assert answers == [
        None if number % 5 < 2 else ((number,), {}) for number in range(num_calls)
    ]


#: Calls, most of which end a lease.
ENDS = [["step"], ["step"], ["step"], ["fail"], ["fail", SystemExit], ["die"], ["hang"]]


def live(pool, seed):
    """End leases in random ways."""
    rng = np.random.default_rng(seed)

    async def cancel():
        async with pool.lease() as env:
            await asyncio.wait_for(env.step(rng.choice([0, 0.02])), 0.01)

    for _ in range(625 if IS_FULL else 12):
        with contextlib.suppress(
            ValueError, Closed, EnvError, WorkerLost, WorkerTimeout, TimeoutError
        ):
            asyncio.run(cancel())
            with pool.lease() as env:
                env.call(*ENDS[rng.integers(len(ENDS))], timeout_s=0.02)
                env.step()


@pytest.mark.slow
def test_random_ends_leave_every_slot_usable():
    """`ENVHERD_FULL=1` makes it long."""
    found = []
    with LeasePool(World, 4, timeout_s=20) as pool, ThreadPoolExecutor(8) as threads:
        for base in (0, 8):
            list(threads.map(live, [pool] * 8, range(base, base + 8)))
            assert len(all_pids(pool, 4)) == 4
            gc.collect()
            now = psutil.Process()
            found.append(
                np.array(
                    [
                        now.memory_info().rss / 5e6,
                        now.num_fds(),
                        threading.active_count() * 4,
                    ]
                )
            )
    assert (found[1] - found[0] < 4).all()
