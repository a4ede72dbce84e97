"""Which worker rings, and when."""

import multiprocessing
from multiprocessing import shared_memory

import numpy as np
import pytest

from envherd.shm.sync import DOORBELL_BYTES, Counter, Doorbell, Tally

NUM_COUNTS = 20_000


def sides(words, num_workers):
    memory = {name: array.data for name, array in words.items()}
    return Tally(words), [
        Counter(memory, worker_id) for worker_id in range(num_workers)
    ]


def words_of(num_workers):
    return {name: np.zeros(num_workers, np.int64) for name in ("answered", "ring_at")}


def test_the_last_of_those_expected_rings():
    tally, (first, second) = sides(words_of(2), 2)
    assert tally.expect(3)
    assert [first.add(), second.add(), first.add()] == [False, False, True]
    assert tally.total() == 3


def test_every_answer_rings_while_none_is_expected():
    tally, (first, second) = sides(words_of(2), 2)
    assert first.add()
    assert tally.expect(tally.total() + 1)
    assert second.add()
    assert first.add()


def test_expect_returns_false_for_answers_already_counted():
    tally, (first, second) = sides(words_of(2), 2)
    assert tally.expect(2)
    first.add(), second.add()
    assert not tally.expect(2)
    assert not tally.expect(1)
    assert tally.expect(3)


@pytest.mark.slow
def test_no_count_is_missed_between_processes():
    """Two workers count as fast as they can; the parent asks for a ring every few counts, and gets it each time."""
    num_bytes = 2 * 16 + DOORBELL_BYTES
    memory = shared_memory.SharedMemory(create=True, size=num_bytes)
    tally, bell, workers = _start_counting(memory.buf)
    wanted = 0
    try:
        while wanted < 2 * NUM_COUNTS:
            wanted = min(tally.total() + 3, 2 * NUM_COUNTS)
            while tally.expect(wanted):
                assert bell.wait(20.0), (
                    f"no ring at {wanted}, {tally.total()} are counted"
                )
        for worker in workers:
            worker.join(20.0)
            assert worker.exitcode == 0
    finally:
        for worker in workers:
            worker.kill()
        del tally, bell
        memory.close()
        memory.unlink()


def _start_counting(buffer):
    raw = np.frombuffer(buffer, np.uint8)
    words = {"answered": raw[:16].view(np.int64), "ring_at": raw[16:32].view(np.int64)}
    bell = Doorbell.create(raw, 32)
    context = multiprocessing.get_context("fork")
    workers = [
        context.Process(target=_count, args=(words, bell, worker_id))
        for worker_id in range(2)
    ]
    for worker in workers:
        worker.start()
    return Tally(words), bell, workers


def _count(words, bell, worker_id):
    counter = Counter({name: array.data for name, array in words.items()}, worker_id)
    for _ in range(NUM_COUNTS):
        if counter.add():
            bell.ring()
