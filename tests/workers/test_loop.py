"""A worker's loop over a real slab and real doorbells, in this thread: the effects of a token and their order."""

from typing import Any

import pytest

from envherd.shm.slab import NUM_BINS
from envherd.workers.process import loop as loop_module
from envherd.workers.protocol import Flag, Op
from envherd.workers.testing import CountingEnv
from envherd.workers.testing.envs import PlainAdapter
from tests.oracles.native_sides import Side


@pytest.fixture
def worker() -> Side:
    return Side([PlainAdapter(CountingEnv(50)) for _ in range(3)], "python")


def test_only_its_own_envs_are_served(worker):
    worker.command(Op.RESET, [0, 1, 2, 3])
    worker.serve()
    assert worker.owing() == [0]
    assert worker.executed == [1, 2, 3]
    assert [env.episode for env in worker.envs] == [0, 0, 0]


def test_the_order_of_a_number_and_of_what_it_announces_is_kept(worker, monkeypatch):
    seen = []
    monkeypatch.setattr(
        loop_module,
        "keep_order",
        lambda: seen.append((worker.owing(), list(worker.executed))),
    )
    worker.command(Op.RESET, [1, 2])
    worker.serve()
    assert seen == [([1, 2], []), ([1, 2], [1]), ([2], [1, 2])]


@pytest.mark.parametrize(
    ("env_ids", "flags", "num_tokens"), [([1, 2], 0, 3), ([3, 1, 2], Flag.EACH, 1)]
)
def test_commands_are_carried_out_once_in_the_order_in_which_they_were_sent(
    worker, env_ids, flags, num_tokens
):
    """However many tokens come; commands to all are in the order of the ids."""
    worker.command(Op.RESET, env_ids, flags=flags)
    worker.serve(num_tokens=num_tokens)
    assert worker.executed == env_ids


def test_a_worker_that_must_leave_begins_no_other_command(worker):
    worker.command(Op.RESET, [1])
    worker.send(None)
    assert not worker.serve(num_tokens=2)
    assert worker.executed == []
    assert worker.owing() == [1]
    assert worker.num_rings() == 0


def scan_while(worker: Side, message: Any) -> None:
    """Have the worker look for a command; the parent writes a message while it looks."""

    class Late(dict[Any, Any]):
        def __iter__(self) -> Any:
            worker.send(message)
            return super().__iter__()

    worker.loop._latest = Late(worker.loop._latest)
    worker.command(Op.RESET, [1])
    worker.loop._scan()


def test_close_between_a_command_and_its_execution_ends_the_loop_at_once(worker):
    scan_while(worker, None)
    assert worker.executed == []
    assert worker.loop._is_leaving


def test_mail_for_a_command_is_read_before_the_command(worker):
    order: list[str] = []
    scan_while(worker, lambda: order.append(f"mail, {len(worker.executed)} executed"))
    assert order == ["mail, 0 executed"]
    assert worker.executed == [1]


def test_every_message_is_read_once_and_in_its_order(worker):
    seen: list[int] = []
    worker.send(*(lambda number=number: seen.append(number) for number in range(3)))
    worker.serve(num_tokens=2)
    assert seen == [0, 1, 2]


def test_command_to_all_rings_once_and_sends_ring_at_the_expected_count(
    worker,
):
    worker.command(Op.RESET, [1, 2, 3])
    worker.serve()
    assert worker.num_rings() == 1
    for ring_at, expected in ((0, 3), (6, 1), (7, 0)):
        worker.words["answered"][1] = 3
        worker.words["ring_at"][1] = ring_at
        worker.command(Op.STEP, [1, 2, 3], flags=Flag.EACH)
        worker.serve()
        assert (worker.num_rings(), worker.words["answered"][1]) == (expected, 6)


def test_worker_words_have_phase_start_and_busy_time(worker, monkeypatch):
    ticks = iter(range(100, 10**6, 100))
    monkeypatch.setattr(loop_module.time, "perf_counter_ns", lambda: next(ticks))
    seen: list[tuple[int, int]] = []

    def execute(env_id: int, command: int, _weight: int) -> int:
        status = worker.block.execute(env_id, command)
        seen.append((int(worker.words["phase"][1]), int(worker.words["since_ns"][1])))
        return status

    worker.loop._execute_timed = execute
    worker.command(Op.RESET, [1])
    worker.words["busy_ns"][1] = 5
    worker.serve()
    assert [(phase != 0, since) for phase, since in seen] == [(True, 100)]
    assert worker.words["phase"][1] == 0
    assert worker.words["since_ns"].tolist() == [0, 200]
    assert worker.words["busy_ns"].tolist() == [0, 105]


def test_scan_times_one_env_for_all_and_takes_turns(worker, monkeypatch):
    ticks = iter(range(0, 10**9, 1000))
    monkeypatch.setattr(loop_module.time, "perf_counter_ns", lambda: next(ticks))
    timed: list[int] = []
    execute_timed = worker.loop._execute_timed
    worker.loop._execute_timed = lambda env_id, *more: (
        timed.append(env_id),
        execute_timed(env_id, *more),
    )[1]
    worker.command(Op.RESET, [1, 2, 3])
    worker.loop._scan()
    assert worker.words["reset_ns"].tolist() == [0, 3000]
    assert worker.words["step_bins"].sum() == 0
    for _ in range(3):
        worker.command(Op.STEP, [1, 2, 3])
        worker.loop._scan()
    assert sorted(timed[1:]) == [1, 2, 3]
    assert worker.words["reset_ns"].tolist() == [0, 3000]
    bins = worker.words["step_bins"].reshape(2, NUM_BINS)
    assert bins[0].sum() == 0
    assert bins[1].sum() == bins[1].max() == 3


def test_loop_tidies_every_64_wakes(worker):
    worker.serve(num_tokens=3 * loop_module.TIDY_EVERY)
    assert worker.num_tidied == 3
