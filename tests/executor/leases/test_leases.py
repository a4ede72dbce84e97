"""Leases: whatever an env, a caller or the system does, each call is answered, and each slot serves the next lease."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import psutil
import pytest

from envherd import Closed, EnvError, ExecutorOptions, FactoryError, InPython, LeasePool, WorkerLost, WorkerTimeout
from envherd.executor.monitor.watching import Watch, plates
from tests.envs.leased_envs import World, broken_after_first
from tests.faults.children import in_child
from tests.scale import IS_FULL

pytestmark = pytest.mark.broken_pool


@pytest.fixture
def pool():
    with LeasePool(World, 2, timeout_s=30) as one:
        yield one


def all_pids(pool, num_envs=2):
    """Lease all envs at once; return their pids."""
    with contextlib.ExitStack() as stack:
        return {stack.enter_context(pool.lease()).step()[0] for _ in range(num_envs)}


# ---- calls --------------------------------------------------------------------------------------


def test_any_arguments_and_results(pool):
    with pool.lease() as env:
        for value in (1, "text", {"a": [np.arange(3)]}, World, range(3), {1, 2}, None, -(10**30)):
            np.testing.assert_equal(env.echo(value, key=value), ((value,), {"key": value}))
        assert env.call(lambda world, more: world.count + more, 5) == 5
        assert env.echo(timeout_s=3)[1] == {"timeout_s": 3}, "of the method, not of the call"


ERRORS = (KeyError("k"), StopIteration(3), TimeoutError("t"), Closed("mine"), subprocess.TimeoutExpired("c", 3))


@pytest.mark.parametrize("error", ERRORS, ids=lambda value: type(value).__name__)
def test_exceptions_arrive_as_themselves(pool, error):
    async def call():
        async with pool.lease() as env:
            with pytest.raises(RuntimeError if isinstance(error, StopIteration) else type(error)):
                await env.fail(error)
            return (await env.step())[1]

    with pool.lease() as env:
        with pytest.raises(type(error)) as raised:
            env.fail(error)
        assert (raised.value.args, env.step()[1]) == (error.args, 1), "the lease continues"
        assert "in fail" in str(raised.value.__cause__)
    assert asyncio.run(call()) in (1, 2)


#: Calls that do not end the lease.
REFUSED = {
    "fail_oddly": (EnvError, r"the env raised .*Odd: odd \(.*number", ()),
    "unreadable": (EnvError, r"a result that cannot be read here \(invalid literal", ()),
    "echo": (TypeError, "cannot pickle '_thread.lock' object", (threading.Lock(),)),
    "count": (TypeError, "'int' object is not callable", ()),
    "nothing": (AttributeError, "'World' object has no attribute 'nothing'", ()),
    "_hidden": (AttributeError, "'_hidden' is private", ()),
}
#: Calls that do.
LOSSES = {
    "hang": (WorkerTimeout, r"no answer within 0.3 s .*\n(.*\n)*.*in hang", ()),
    "die": (WorkerLost, r"SIGKILL.*\n(.*\n)*last words", ()),
    "leave": (EnvError, "raised SystemExit: 3", ()),
    "fail": (EnvError, "raised KeyboardInterrupt: now", (KeyboardInterrupt("now"),)),
    "lock": (EnvError, "expected a result that can be sent, got a list", ()),
    "iter": (EnvError, "expected a result that can be sent, got a generator", ()),
    "many": (EnvError, "at most 1,000,000 bytes, got 2,000,0", (2_000_000,)),
    "kill_later": (WorkerLost, "SIGKILL", ()),
}


@pytest.mark.parametrize("method", [*REFUSED, *LOSSES])
def test_only_a_lost_env_ends_its_lease_and_no_other(method):
    kind, text, args = {**REFUSED, **LOSSES}[method]
    with LeasePool(World, 2, 30, max_result_bytes=1_000_000) as pool, pool.lease() as other:
        before = other.step()[0]
        with pool.lease() as env:
            pid = env.step()[0]
            with pytest.raises(kind, match=text) as raised:  # noqa: PT012  # the env may be lost after its call
                getattr(env, method)(*args) if method in REFUSED else env.call(method, *args, timeout_s=0.3)
                env.step(time.sleep(0.5))
            assert ("The lease is over, and its env is built anew." in str(raised.value)) == (method in LOSSES)
            assert "ExecutorOptions" not in str(raised.value)
            with pytest.raises(kind) if method in LOSSES else contextlib.nullcontext():
                assert env.step() == (pid, 2)
        assert other.step() == (before, 2), "the other lease does not notice"
        with pool.lease() as again:
            assert (again.step()[0] != pid) == (method in LOSSES)


# ---- leases -------------------------------------------------------------------------------------


def test_threads_and_loops_use_a_pool_at_once_and_are_served_in_order(pool):
    async def in_task(one, number, order):
        async with one.lease() as env:
            order.append(number)
            await env.step(0.001)
            return (await env.echo(number))[0][0]

    async def in_loop(one, order):
        return await asyncio.gather(*(in_task(one, number, order) for number in range(20)))

    def in_thread(_):
        return asyncio.run(in_loop(pool, []))

    assert list(pool.map(lambda _, task: in_thread(task), [])) == []
    answers = []
    threads = [threading.Thread(target=lambda: answers.append(in_thread(0))) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert list(pool.map(lambda env, task: env.step(0.001) and task, range(30))) == list(range(30))
    for thread in threads:
        thread.join()
    assert answers == [list(range(20))] * 3
    order = []
    with LeasePool(World, 1) as one:  # two slots could overtake each other after they have taken a lease
        asyncio.run(in_loop(one, order))
    assert order == sorted(order)


@pytest.mark.parametrize("ordered", [True, False])
def test_map(pool, ordered):
    found = list(pool.map(lambda env, task: env.step(0.1 * (task == 0)) and task, iter(range(9)), ordered=ordered))
    assert (found if ordered else sorted(found)) == list(range(9))
    with pytest.raises(ZeroDivisionError):
        list(pool.map(lambda env, task: 1 // task, [1, 0, *[1] * 20]))
    iterator = pool.map(lambda env, task: env.hang() if task else task, range(9))
    assert next(iterator) == 0
    iterator.close()  # does not wait for the others
    assert len(all_pids(pool)) == 2


def cancelled(pool):
    async def main():
        async with pool.lease() as env:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(env.hang(), 0.1)
            with pytest.raises(Closed, match="a call was cancelled"):
                await env.step()

    asyncio.run(main())


def dropped(pool):
    """Tasks that are in a call, or wait for an env, when their loop closes."""

    async def play():
        async with pool.lease() as env:
            await env.hang()

    loop = asyncio.new_event_loop()
    tasks = [loop.create_task(play()) for _ in range(3)]
    loop.run_until_complete(asyncio.sleep(0.1))
    for task in tasks:
        task._log_destroy_pending = False
    loop.close()
    return tasks


def interrupted(pool):
    """Ctrl-C in a call, and while waiting for an env."""
    with pool.lease(), pool.lease() as env:
        for wait in (pool.lease().__enter__, env.hang):
            timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
            timer.start()
            with pytest.raises(KeyboardInterrupt):
                wait()
            timer.join()


def raised(pool):
    with pytest.raises(ZeroDivisionError), pool.lease():
        _ = 1 / 0


def forgotten(pool):
    pool.lease().__enter__()  # never left
    gc.collect()


def killed_idle(pool):
    for process in [psutil.Process(pid) for pid in all_pids(pool)]:
        process.kill()
        process.wait(20)


@pytest.mark.parametrize("end", [cancelled, dropped, interrupted, raised, forgotten, killed_idle])
def test_every_end_gives_the_slot_back(pool, end):
    kept = end(pool)
    assert len(all_pids(pool)) == 2
    with pool.lease() as env:
        assert not env.call(lambda world: world.is_busy), "nobody gets an env in the middle of a call"
    del kept


def lease_in_fork(pool, env):
    for call in (env.step, pool.lease().__enter__):
        with pytest.raises(Closed, match="of another process"):
            call()
    pool.close()


def test_a_closed_pool_a_fork_and_a_lease_that_is_not_entered_answer(pool):
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


@pytest.mark.parametrize("on_return", ["keep", "rebuild", World.clean, World.hang, World.die, World.fail])
def test_what_is_done_between_leases(on_return, caplog):
    with LeasePool(World, 1, 0.5, on_return=on_return) as pool, caplog.at_level(logging.WARNING, "envherd"):
        (first,), (second,) = all_pids(pool, 1), all_pids(pool, 1)
        with pool.lease() as env:
            count = env.step()[1]
    assert (first == second) == (on_return in ("keep", World.clean))
    assert count == {"keep": 3, World.clean: 11}.get(on_return, 1)
    assert ("on_return has failed: " in caplog.text) == (on_return in (World.hang, World.die, World.fail))


def test_an_env_that_cannot_be_built_again_is_reported(tmp_path):
    with LeasePool(functools.partial(broken_after_first, str(tmp_path)), 1) as pool:
        with pytest.raises(WorkerLost), pool.lease() as env:
            env.die()
        for _ in range(2):
            with pytest.raises(FactoryError, match="raised FileExistsError"), pool.lease():
                pass
        os.rmdir(tmp_path / "built")
        assert len(all_pids(pool, 1)) == 1


def test_options_of_processes_hold_and_top_shows_the_lessees():
    options = ExecutorOptions(env_vars=[{"SLOT": "a"}, {"SLOT": "b"}], max_worker_memory=200_000_000)
    with LeasePool(World, 2, options=options, env_kwargs=[{"start": 5}, {"start": 7}]) as pool:
        with pool.lease("rollout 12") as one, pool.lease("ä" * 100) as other:
            assert sorted([one.environ("SLOT"), other.environ("SLOT")]) == ["a", "b"]
            assert sorted([one.step()[1], other.step()[1]]) == [6, 8]
            plate = next(one for one in plates() if (one.pid, one.content["env"]) == (os.getpid(), "lease"))
            with contextlib.closing(Watch(plate)) as watch:
                assert {worker.phase for worker in watch.look().workers} == {"rollout 12", "ä" * 32}
            with pytest.raises(KeyError):
                one.fail(KeyError("k"))
            assert "about to fail" in pool.worker_output(0) + pool.worker_output(1)
            large = one.step()[0]
            one.grow(300_000_000)
        assert large not in all_pids(pool)
    target = f"{broken_after_first.__module__}:World"
    with LeasePool(InPython(sys.executable, target, {"start": 3}), 1) as pool, pool.lease() as env:
        assert env.step()[1] == 4


def pool_in_worker():
    LeasePool(World, 1)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"make_env": World()}, FactoryError, "expected a callable that builds an env, got"),
        ({"make_env": lambda: None}, FactoryError, "returned None, expected an env"),
        ({"make_env": lambda: World}, FactoryError, "expected an env"),
        ({"make_env": lambda: 1 / 0}, FactoryError, "raised ZeroDivisionError"),
        (
            {"make_env": pool_in_worker},
            FactoryError,
            "LeasePool failed: expected the process to be the program's own, got Worker",
        ),
        ({"num_envs": 0}, ValueError, "num_envs failed"),
        ({"timeout_s": 0}, ValueError, "timeout_s to be seconds above 0 or None, got 0"),
        ({"on_return": "reset"}, ValueError, "on_return to be 'keep', 'rebuild' or a function"),
        ({"max_result_bytes": 0}, ValueError, "max_result_bytes to be a positive int"),
        ({"options": ExecutorOptions(start_method="portable")}, ValueError, "start_method to be"),
        ({"options": ExecutorOptions(capsules="x")}, ValueError, "capsules to be None"),
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

    async def one(pool, number):
        async with pool.lease() as env:
            with contextlib.suppress(WorkerTimeout):
                return await (env.hang() if number % 5 < 2 else env.echo(number))

    async def main(pool):
        return await asyncio.gather(*(one(pool, number) for number in range(num_calls)))

    with LeasePool(World, num_envs, timeout_s=1.0) as pool:
        answers = asyncio.run(main(pool))
    assert answers == [None if number % 5 < 2 else ((number,), {}) for number in range(num_calls)]


def play(env, rng):
    """End a lease in a random way."""
    what = rng.choice(["step", "step", "step", "fail", "die", "hang", "leave", "kill_later"])
    env.call(what, *[ValueError("v")] * (what == "fail"), timeout_s=0.02)
    env.step()


@pytest.mark.slow
def test_random_ends_leave_every_slot_usable():
    """`ENVHERD_FULL=1` makes it long."""

    async def play_and_cancel(rng):
        async with pool.lease() as env:
            await asyncio.wait_for(env.step(rng.choice([0, 0.02])), 0.01)

    def live(seed):
        rng = random.Random(seed)
        for _ in range(1_250 if IS_FULL else 12):
            with contextlib.suppress(ValueError, Closed, EnvError, WorkerLost, WorkerTimeout, TimeoutError):
                if rng.random() < 0.3:
                    asyncio.run(play_and_cancel(rng))
                else:
                    with pool.lease() as env:
                        play(env, rng)

    found = []
    with LeasePool(World, 4, timeout_s=20) as pool:
        for base in (0, 8):
            threads = [threading.Thread(target=live, args=(base + index,)) for index in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert len(all_pids(pool, 4)) == 4
            gc.collect()
            process = psutil.Process()
            found.append(np.array([process.memory_info().rss / 5e6, process.num_fds(), threading.active_count() * 4]))
        assert (found[1] - found[0] < 4).all()
