"""One process for each pool: its measurements, and pools that fail, hang or do not end."""

import os
import time

import pytest

from benchmarks.bounds import CONTENDERS, IDEAL, SERIAL
from benchmarks.pools import Contender, Job, Pool
from benchmarks.runner import PoolError, Runner
from benchmarks.work import SteadyFactory, compute

BOUNDS = {one.name: one for one in CONTENDERS}
JOB = Job(make_env=SteadyFactory(), num_envs=4, num_workers=2, episode=20)
pytestmark = pytest.mark.slow


def burning(_job: Job) -> Pool:
    """Count one step for each 20,000 iterations."""

    def step() -> int:
        compute(20_000)
        return 1

    return Pool(step, lambda: None)


def refusing(_job: Job) -> Pool:
    raise LookupError("no such env")


def hanging(_job: Job) -> Pool:
    calls = iter(range(10))

    def step() -> int:
        if next(calls) >= 3:
            time.sleep(60)
        return 1

    return Pool(step, lambda: time.sleep(60))


def failing(_job: Job) -> Pool:
    calls = iter([1, 1, 1])
    return Pool(lambda: next(calls), lambda: None)


def dying(_job: Job) -> Pool:
    os.write(2, b"the last words\n")
    os._exit(3)


@pytest.fixture
def started():
    """Start runners, and stop them all at the end."""
    runners: list[Runner] = []

    def start(build, job: Job = JOB) -> Runner:
        runner = Runner(
            build
            if isinstance(build, Contender)
            else Contender(name="it", build=build),
            job,
        )
        runners.append(runner)
        runner.start(20.0)
        return runner

    yield start
    for runner in runners:
        runner.stop()


@pytest.mark.quiet
def test_a_slot_counts_steps_and_time(started):
    slot = started(burning).run(0.2, 20.0)
    assert slot.steps == slot.num_calls > 5
    assert slot.wall_ns > 0.2e9
    # The pool is one thread that never sleeps: what it did not run, it waited for a processor (or its machine did).
    assert 0.2 * slot.wall_ns < slot.run_ns + slot.delay_ns < 1.15 * slot.wall_ns
    assert slot.parent_run_ns == slot.run_ns
    assert slot.cpu_us == pytest.approx(slot.run_ns / slot.steps / 1e3)
    assert slot.batch_us[0] <= slot.batch_us[50] <= slot.batch_us[100]


@pytest.mark.parametrize(("name", "num_processes"), [(SERIAL, 0), (IDEAL, 2)])
def test_the_bounds_run(started, name, num_processes):
    slot = started(BOUNDS[name]).run(0.0, 20.0)
    assert slot.num_calls == JOB.episode, "a slot lasts until it has these calls"
    assert slot.steps > 0
    assert slot.num_processes == num_processes


@pytest.mark.quiet
def test_free_running_processes_stop_outside_their_slots(started):
    runner = started(BOUNDS[IDEAL])
    slot = runner.run(0.2, 20.0)
    idle = runner.ask(cpu_while_asleep, 0.3, 20.0)
    assert slot.run_ns > 5e6
    assert idle["run_ns"] < 1e6


def cpu_while_asleep(_pool: Pool, seconds: float) -> dict[str, int]:
    """Return the processor use of an idle pool."""
    from benchmarks.accounting import started_by, usage_of

    pids = started_by(os.getpid())
    before = usage_of(pids)
    time.sleep(seconds)
    return {"run_ns": usage_of(pids).since(before).run_ns}


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (refusing, "LookupError: no such env$"),
        (dying, "its process ended. the last words"),
    ],
)
def test_a_pool_that_cannot_be_built_says_why(started, build, message):
    with pytest.raises(PoolError, match=rf"^build: {message}"):
        started(build)


def test_a_pool_that_raises_says_what(started):
    runner = started(failing)
    with pytest.raises(PoolError, match=r"^step: StopIteration"):
        runner.run(0.1, 20.0)


def test_a_pool_that_hangs_is_killed(started):
    runner = started(hanging)
    began = time.monotonic()
    with pytest.raises(PoolError, match=r"^step: no answer within 0 s"):
        runner.run(0.01, 0.3)
    runner.stop()
    assert time.monotonic() - began < 30.0, "it sleeps for 60 s"
