"""Leases: whatever an env, a caller or the system does, each call is answered, and each slot serves the next lease."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
import weakref

import numpy as np
import psutil
import pytest

from envherd import Closed, EnvError, ExecutorOptions, FactoryError, InPython, LeasePool, WorkerLost, WorkerTimeout
from envherd.executor.monitor.watching import Watch, plates
from tests.envs.leased_envs import World, broken_after_first
from tests.faults.children import in_child
from tests.scale import IS_FULL

#: Seconds within which a slot serves again, on a busy machine.
_BACK_S = 20.0


@pytest.fixture
def pool():
    with LeasePool(World, 2, timeout_s=30) as one:
        yield one


def pid_of(pool):
    with pool.lease() as env:
        return env.step()[0]


def all_pids(pool, num_envs=2):
    """Lease all envs at once; return their pids."""
    with contextlib.ExitStack() as stack:
        return {stack.enter_context(pool.lease()).step()[0] for _ in range(num_envs)}


# ---- calls --------------------------------------------------------------------------------------


def test_any_arguments_and_results(pool):
    with pool.lease() as env:
        for value in (1, "text", {"a": [np.arange(3)]}, World, range(3), pickle.PickleBuffer, {1, 2}, None, -(10**30)):
            (back,), kwargs = env.echo(value, key=value)
            np.testing.assert_equal(back, value)
            np.testing.assert_equal(kwargs["key"], value)
        assert env.wait(0.01) == "waited"  # an asynchronous method
        assert env.call(lambda world, more: world.count + more, 5) == 5
        assert env.echo(timeout_s=3)[1] == {"timeout_s": 3}  # of the method, not of the call
        with pytest.raises(TypeError, match=r"call echo failed: expected arguments that can be pickled, got a .*lock"):
            env.echo(threading.Lock())
        with pytest.raises(AttributeError, match="is private"):
            env._hidden  # noqa: B018
        assert env.step()[1] == 1


@pytest.mark.parametrize(
    "error",
    [KeyError("k"), StopIteration(3), TimeoutError("t"), Closed("mine"), subprocess.TimeoutExpired("c", 3)],
    ids=lambda value: type(value).__name__,
)
def test_exceptions_arrive_as_themselves(pool, error):
    async def call():
        async with pool.lease() as env:
            with pytest.raises(RuntimeError if isinstance(error, StopIteration) else type(error)) as raised:
                await env.fail(error)
            return raised.value, (await env.step())[1]

    with pool.lease() as env:
        with pytest.raises(type(error)) as raised:
            env.fail(error)
        assert raised.value.args == error.args
        assert "in fail" in str(raised.value.__cause__)
        assert env.step()[1] == 1, "the lease goes on"
    assert asyncio.run(call())[1] in (1, 2)


def test_an_exception_that_cannot_be_made_here_is_an_env_error(pool):
    with pool.lease() as env:
        with pytest.raises(EnvError, match=r"call fail_oddly failed: the env raised Odd: odd \(env \d, worker \d, pid"):
            env.fail_oddly()
        assert env.step()[1] == 1


LOSSES = {
    "hang": (WorkerTimeout, r"no answer within 0.3 s .*\n(.*\n)*.*in hang", ()),
    "die": (WorkerLost, r"SIGKILL.*\n(.*\n)*last words", ()),
    "leave": (EnvError, "raised SystemExit: 3", ()),
    "fail": (EnvError, "raised KeyboardInterrupt: now", (KeyboardInterrupt("now"),)),
    "lock": (EnvError, "expected a result that can be sent, got a list", ()),
    "many": (EnvError, "at most 1,000,000 bytes, got 2,000,0", (2_000_000,)),
    "unreadable": (ValueError, "invalid literal", ()),
}


@pytest.mark.broken_pool
@pytest.mark.parametrize("method", LOSSES)
def test_a_lost_env_ends_its_lease_alone(method):
    kind, text, args = LOSSES[method]
    with LeasePool(World, 2, 30, max_result_bytes=1_000_000) as pool, pool.lease() as other:
        before = other.step()[0]
        with pool.lease() as env:
            lost = env.step()[0]
            with pytest.raises(kind, match=text) as raised:
                env.call(method, *args, timeout_s=0.3 if method == "hang" else 0.0)
            assert kind is ValueError or "The lease is over, and its env is built anew." in str(raised.value)
            assert "ExecutorOptions" not in str(raised.value)
            assert "Its episode goes on" not in str(raised.value)
            with pytest.raises(Closed, match=f"step failed: this lease is over .its env was lost in {method}"):
                env.step()
        assert other.step() == (before, 2), "the other lease does not notice"
        with pool.lease() as again:
            pid, count = again.step()
        assert (pid != lost, count) == (True, 1)


def test_a_result_is_not_kept(pool):
    with pool.lease() as env:
        result = weakref.ref(env.echo(np.zeros(3))[0][0])
        time.sleep(0.1)  # for the slot to wait again
        assert result() is None


def test_plain_results_are_never_unpickled():
    with LeasePool(World, 1, results="plain") as pool, pool.lease() as env:
        assert env.echo(1, [2.5], a=np.float32(1))[1] == {"a": np.float32(1)}
        with pytest.raises(EnvError, match="the env raised KeyError: 'k'"):
            env.fail(KeyError("k"))
        with pytest.raises(EnvError, match=r"can be sent, got a Unreadable \(value is a tests"):
            env.unreadable()


# ---- leases -------------------------------------------------------------------------------------


def test_leases_are_served_first_come_first_served():
    order = []

    async def one(pool, number):
        async with pool.lease():
            order.append(number)
            await asyncio.sleep(0.002)

    async def main():
        async with LeasePool(World, 1) as pool:  # two slots could overtake each other after they have taken a lease
            await asyncio.gather(*(one(pool, number) for number in range(40)))

    asyncio.run(main())
    assert order == sorted(order)


def test_threads_and_loops_use_a_pool_at_once(pool):
    """Each env is in one call at a time, and each caller gets its own answers."""
    answers = []

    def in_thread(number):
        for _ in range(5):
            with pool.lease() as env:
                answers.append(env.echo(number)[0] == (number,))
                env.step(0.001)

    async def in_task(number):
        async with pool.lease() as env:
            answers.append((await env.echo(number))[0] == (number,))
            await env.step(0.001)

    async def in_loop():
        await asyncio.gather(*map(in_task, range(20)))

    threads = [threading.Thread(target=in_thread, args=(number,)) for number in range(6)]
    threads += [threading.Thread(target=lambda: asyncio.run(in_loop())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [True] * 70


@pytest.mark.broken_pool
@pytest.mark.parametrize("ordered", [True, False])
def test_map(pool, ordered):
    def play(env, task):
        env.step(0.1 if task == 0 else 0.0)
        return task

    found = list(pool.map(play, iter(range(9)), ordered=ordered))
    assert (found if ordered else sorted(found)) == list(range(9))
    with pytest.raises(ZeroDivisionError):
        list(pool.map(lambda env, task: 1 // task, [1, 0, *[1] * 20]))
    iterator = pool.map(lambda env, task: env.hang() if task else task, range(9))
    assert next(iterator) == 0
    iterator.close()  # does not wait for the others
    assert len(all_pids(pool)) == 2


def cancelled(pool, wait_s=0.1):
    async def main():
        async with pool.lease() as env:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(env.hang(), wait_s)
            with pytest.raises(Closed, match="this lease is over"):
                await env.step()

    asyncio.run(main())


def dropped(pool):
    """A task that is in a call when its loop closes."""

    async def play():
        async with pool.lease() as env:
            await env.call("hang", timeout_s=0.5)

    loop = asyncio.new_event_loop()
    tasks = [loop.create_task(play()) for _ in range(3)]  # one of them waits for an env
    loop.run_until_complete(asyncio.sleep(0.1))
    for task in tasks:
        task._log_destroy_pending = False
    loop.close()  # the tasks are still referenced
    return tasks


def wait_for(pool, method):
    with pool.lease() as env:
        if method == "hang":
            env.hang()
        with pool.lease():  # there is none
            pass


def interrupted(pool):
    """Ctrl-C in a call, and while waiting for an env."""

    def interrupt():
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    with pool.lease():
        for method in ("hang", "wait"):
            thread = threading.Thread(target=interrupt)
            thread.start()
            with pytest.raises(KeyboardInterrupt):
                wait_for(pool, method)
            thread.join()


def raised(pool):
    with pytest.raises(ZeroDivisionError), pool.lease():
        _ = 1 / 0


def forgotten(pool):
    pool.lease().__enter__()  # never left
    gc.collect()


def killed_idle(pool):
    killed = {worker.pid for worker in pool.workers()}
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    end_s = time.monotonic() + _BACK_S
    while not killed.isdisjoint(worker.pid for worker in pool.workers()) and time.monotonic() < end_s:
        time.sleep(0.01)


ENDS = (cancelled, dropped, interrupted, raised, forgotten, killed_idle)


@pytest.mark.broken_pool
@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
def test_every_end_gives_the_slot_back(pool, end):
    kept = end(pool)
    began = time.monotonic()
    assert len(all_pids(pool)) == 2
    assert time.monotonic() - began < _BACK_S
    del kept
    with pool.lease() as env:
        assert not env.call(lambda world: world.is_busy), "nobody gets an env in the middle of a call"


@pytest.mark.parametrize("on_return", ["keep", "rebuild", lambda world: setattr(world, "count", 10)])
def test_what_is_done_between_leases(on_return):
    with LeasePool(World, 1, on_return=on_return) as pool:
        found = []
        for _ in range(2):
            with pool.lease() as env:
                env.step()
                found.append(env.step())
    first, second = found
    assert (first[0] == second[0]) == (on_return != "rebuild")
    assert second[1] == {"keep": 4, "rebuild": 2}.get(on_return if isinstance(on_return, str) else "", 12)


@pytest.mark.broken_pool
@pytest.mark.parametrize("on_return", [World.hang, World.die, World.fail], ids=lambda function: function.__name__)
def test_an_on_return_that_fails_costs_the_env(on_return, caplog):
    with LeasePool(World, 1, 0.5, on_return=on_return) as pool, caplog.at_level(logging.WARNING, "envherd"):
        assert pid_of(pool) != pid_of(pool)
    assert "on_return has failed: " in caplog.text


# ---- limits and surroundings --------------------------------------------------------------------


def test_options_of_processes_hold(tmp_path):
    options = ExecutorOptions(env_vars=[{"SLOT": "a"}, {"SLOT": "b"}], max_worker_memory=200_000_000)
    with LeasePool(World, 2, options=options, env_kwargs=[{"start": 5}, {"start": 7}]) as pool:
        with pool.lease() as one, pool.lease() as other:
            assert sorted([one.environ("SLOT"), other.environ("SLOT")]) == ["a", "b"]
            assert sorted([one.step()[1], other.step()[1]]) == [6, 8]
            with pytest.raises(KeyError):
                one.fail(KeyError("k"))
            assert "about to fail" in pool.worker_output(0) + pool.worker_output(1)
            large = one.step()[0]
            one.grow(300_000_000)
        assert large not in all_pids(pool)
    target = f"{broken_after_first.__module__}:World"
    with LeasePool(InPython(sys.executable, target, {"start": 3}), 1) as pool, pool.lease() as env:
        assert env.step()[1] == 4


def test_top_shows_the_lessees(pool):
    with pool.lease("rollout 12"), pool.lease("ä" * 100):
        plate = next(plate for plate in plates() if plate.pid == os.getpid() and plate.content["env"] == "lease")
        with contextlib.closing(Watch(plate)) as watch:
            shown = {worker.phase for worker in watch.look().workers}
        assert shown == {"rollout 12", "ä" * 32} == {worker.phase for worker in pool.workers()}
        assert all(0 <= worker.phase_s < 60 for worker in pool.workers())


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"make_env": World()}, FactoryError, "expected a callable that builds an env, got"),
        ({"make_env": lambda: None}, FactoryError, "returned None, expected an env"),
        ({"make_env": lambda: World}, FactoryError, "expected an env"),
        ({"make_env": lambda: 1 / 0}, FactoryError, "raised ZeroDivisionError"),
        ({"num_envs": 0}, ValueError, "num_envs failed"),
        ({"timeout_s": 0}, ValueError, "timeout_s to be seconds above 0 or None, got 0"),
        ({"on_return": "reset"}, ValueError, "on_return to be 'keep', 'rebuild' or a function"),
        ({"results": "json"}, ValueError, "results to be one of"),
        ({"max_result_bytes": 0}, ValueError, "max_result_bytes to be a positive int"),
        ({"options": ExecutorOptions(start_method="portable")}, ValueError, "start_method to be"),
        ({"options": ExecutorOptions(capsules="x")}, ValueError, "capsules=None"),
        ({"n_envs": 3}, TypeError, "Did you mean num_envs"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_is_refused(arguments, error, text):
    with pytest.raises(error, match=text):
        LeasePool(**{"make_env": World, "num_envs": 1, "timeout_s": 5, **arguments})


def pool_in_worker():
    LeasePool(World, 1)


def test_a_pool_has_no_batch_and_is_not_made_in_a_worker(pool):
    with pytest.raises(AttributeError, match="a LeasePool has no rollout: it has no batch"):
        pool.rollout  # noqa: B018
    with pytest.raises(FactoryError, match="LeasePool failed: expected the program's own process, got Worker"):
        LeasePool(pool_in_worker, 1)


def lease_in_fork(pool):
    with pytest.raises(Closed, match="of another process"), pool.lease():
        pass
    pool.close()


@pytest.mark.broken_pool
def test_a_closed_pool_and_a_fork_answer(pool):
    with pool.lease() as env:
        assert in_child(lease_in_fork, pool) is None
        waiting = threading.Thread(target=pool.close)
        threading.Timer(0.1, waiting.start).start()
        with pytest.raises((Closed, WorkerLost)):
            env.hang()
        with pytest.raises(Closed):
            env.step()
        waiting.join()
    with pytest.raises(Closed, match="this pool is closed"), pool.lease():
        pass
    assert pool.close() is None


@pytest.mark.broken_pool
def test_an_env_that_cannot_be_built_again_is_reported(tmp_path):
    with LeasePool(functools.partial(broken_after_first, str(tmp_path)), 1) as pool:
        with pytest.raises(WorkerLost), pool.lease() as env:
            env.die()
        for _ in range(2):
            with pytest.raises(FactoryError, match="raised FileExistsError"), pool.lease():
                pass
        os.rmdir(tmp_path / "built")
        assert pid_of(pool) > 0


def test_a_pool_that_is_dropped_ends(pool):
    one = LeasePool(World, 1)
    pid = pid_of(one)
    del one
    gc.collect()
    assert not psutil.pid_exists(pid)


# ---- many ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.broken_pool
def test_calls_that_never_return_cost_only_their_own_time():
    num_calls, num_envs, timeout_s = (960, 64, 1.0) if IS_FULL else (80, 8, 1.0)

    async def one(pool, number):
        async with pool.lease() as env:
            try:
                return await (env.hang() if number % 5 < 2 else env.echo(number))
            except WorkerTimeout:
                return None

    async def main(pool):
        return await asyncio.gather(*(one(pool, number) for number in range(num_calls)))

    with LeasePool(World, num_envs, timeout_s=timeout_s) as pool:
        answers = asyncio.run(main(pool))
    expected = [None if number % 5 < 2 else ((number,), {}) for number in range(num_calls)]
    assert answers == expected


def random_life(pool, rng, end_s):
    """Lease after lease, each of which ends in a random way."""

    def play(env):
        for _ in range(rng.randrange(3)):
            env.step()
        what = rng.choice(["return", "return", "return", "fail", "die", "hang", "leave", "kill"])
        if what == "hang":
            env.call("hang", timeout_s=0.01)
        elif what in ("die", "leave"):
            env.call(what)
        elif what == "kill":
            os.kill(env.step()[0], signal.SIGKILL)
            env.step()
        elif what != "return":
            env.fail(ValueError("v"))

    async def play_and_cancel():
        async with pool.lease() as env:
            await asyncio.wait_for(env.step(rng.choice([0, 0.02])), 0.01)

    num_leases = 0
    while time.monotonic() < end_s:
        num_leases += 1
        with contextlib.suppress(
            ZeroDivisionError, ValueError, Closed, EnvError, WorkerLost, WorkerTimeout, TimeoutError
        ):
            if rng.random() < 0.3:
                asyncio.run(play_and_cancel())
            else:
                with pool.lease() as env:
                    play(env)
    return num_leases


@pytest.mark.slow
@pytest.mark.broken_pool
def test_random_ends_leave_every_slot_usable():
    """`ENVHERD_FULL=1` makes it long: memory is then compared."""
    span_s = 300.0 if IS_FULL else 6.0
    with LeasePool(World, 4, timeout_s=20) as pool:
        rngs = [random.Random(seed) for seed in range(8)]
        counts = [0] * len(rngs)
        memory = []
        for _ in range(2):
            end_s = time.monotonic() + span_s / 2

            def live(index, end_s=end_s):
                counts[index] += random_life(pool, rngs[index], end_s)

            threads = [threading.Thread(target=live, args=(index,)) for index in range(len(rngs))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert len(all_pids(pool, 4)) == 4
            gc.collect()
            process = psutil.Process()
            memory.append((process.memory_info().rss, process.num_fds(), threading.active_count()))
        assert min(counts) > 1
        assert memory[1][0] - memory[0][0] < 20e6
        assert abs(memory[1][1] - memory[0][1]) < 4
        assert memory[1][2] == memory[0][2]
