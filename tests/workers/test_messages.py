"""Channels deliver complete frames and descriptors, for any split by the socket and any interrupt."""

import os
import signal
import socket
import threading

import numpy as np
import pytest

import envherd.workers.messages
from envherd.shm.interrupts import ignoring_refusals
from envherd.workers.messages import (
    Ask,
    Channel,
    Close,
    DetachStorage,
    WorkerChannel,
    uninterrupted,
)
from tests.gates import is_interrupted


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair()
    ours, theirs = Channel(ours), WorkerChannel(theirs)
    yield ours, theirs
    ours.close()
    theirs.close()


def test_messages_arrive_in_order(ends):
    parent, worker = ends
    sent = [
        Ask(what="call", env_ids=(1,), name="f", args=(2,), kwargs={"x": 3}),
        DetachStorage(target=4),
        Close(),
    ]
    for message in sent:
        parent.queue_message(message)
    assert parent.flush_nowait()
    assert [worker.receive_message()[0] for _ in sent] == sent
    assert worker.number == parent.num_queued == len(sent)


def test_each_message_keeps_its_own_descriptors(ends):
    parent, worker = ends
    pipes = [os.pipe() for _ in range(3)]
    for number, (read, _) in enumerate(pipes):
        parent.queue_message(
            DetachStorage(target=number), [read] if number != 1 else []
        )
        os.close(read)
    parent.flush_nowait()
    got = [worker.receive_message() for _ in pipes]
    assert [len(fds) for _, fds in got] == [1, 0, 1]
    os.write(pipes[2][1], b"y")
    assert os.read(got[2][1][0], 1) == b"y"
    for fd in [*(write for _, write in pipes), *(fd for _, fds in got for fd in fds)]:
        os.close(fd)


@pytest.mark.parametrize("is_sent", [True, False])
def test_copies_of_descriptors_are_closed_though_a_frame_refers_to_them(ends, is_sent):
    parent, _ = ends
    before = os.listdir("/proc/self/fd")
    parent.queue_message(Close(), [0, 1])
    held = parent._unsent[0]  # as the frame of a call that was interrupted
    assert len(os.listdir("/proc/self/fd")) == len(before) + 2
    if is_sent:
        parent.flush_nowait()
        assert len(os.listdir("/proc/self/fd")) == len(before)
    parent.close()
    assert len(os.listdir("/proc/self/fd")) == len(before) - 1  # the socket
    del held


def test_a_large_answer_comes_whole(ends):
    parent, worker = ends
    big = np.arange(1 << 20)
    sender = threading.Thread(target=worker.send_plain, args=({"big": big},))
    sender.start()
    frames = []
    while not frames:
        frames = parent.drain_nowait()
    sender.join()
    np.testing.assert_array_equal(frames[0]["big"], big)


def test_one_byte_at_a_time(ends):
    parent, worker = ends
    worker.send_plain({"a": [1, "two"]})
    data = parent.sock.recv(1 << 16)
    for position in range(len(data)):
        worker.sock.send(data[position : position + 1])
        frames = parent.drain_nowait()
        assert bool(frames) == (position == len(data) - 1)
    assert frames == [{"a": [1, "two"]}]


def test_descriptors_that_came_with_the_end_of_a_large_message_are_closed(ends):
    """A worker that the helper forks for one request closes those of the next one, which another thread has made."""
    parent, worker = ends
    before = os.listdir("/proc/self/fd")
    parent.queue_message(Ask(what="call", env_ids=(), args=(bytes(1 << 17),)), [0])
    parent.queue_message(Close(), [0, 0])
    assert parent.flush_nowait()
    os.close(worker.receive_message()[1][0])
    worker.close()
    assert len(os.listdir("/proc/self/fd")) == len(before) - 1  # the socket


def test_drain_of_an_empty_socket_returns_no_frame(ends):
    assert ends[0].drain_nowait() == []


def test_the_end_is_an_end(ends):
    parent, worker = ends
    parent.close()
    with pytest.raises(EOFError):
        worker.receive_message()


CHANNEL = envherd.workers.messages.__file__


def test_an_interrupt_at_any_bytecode_sends_every_message_once(ends):
    parent, worker = ends
    read, write = os.pipe()
    number, sent = 1, []

    def send():
        parent.queue_message(DetachStorage(target=number), [read])
        parent.flush_nowait()

    while is_interrupted(send, number, CHANNEL):
        number += 1
        parent.queue_message(Close())
        assert parent.flush_nowait()
        while not isinstance((received := worker.receive_message())[0], Close):
            assert received[0] == DetachStorage(target=number - 1)
            assert len(received[1]) == 1
            os.close(received[1][0])
            sent.append(received[0].target)
        assert worker.number == parent.num_queued
    assert sent == sorted(set(sent))  # none twice
    # Some were interrupted before they were queued, some after.
    assert 0 < len(sent) < number
    os.close(read)
    os.close(write)


def test_an_interrupt_at_any_bytecode_loses_no_frame(ends):
    parent, worker = ends
    number, taken = 1, []

    def take():
        frames = parent.drain_nowait()
        while frames:
            if not taken or taken[-1] is not frames[0]:
                taken.append(frames[0])
            del frames[0]

    was_interrupted = True
    while was_interrupted:
        worker.send_plain({"n": 2 * number})
        was_interrupted = is_interrupted(take, number, CHANNEL)
        worker.send_plain({"n": 2 * number + 1})
        take()
        number += 1
    assert [frame["n"] for frame in taken] == list(range(2, 2 * number))


def test_only_errors_of_the_operating_system_are_ignored():
    with ignoring_refusals():
        os.close(-1)
    for error in (
        TimeoutError("alarm"),
        OSError("of a signal handler"),
        ValueError("other"),
    ):
        with pytest.raises(type(error), match=str(error)), ignoring_refusals():
            raise error


def interrupted_block(number, reached):
    with uninterrupted():
        os.kill(os.getpid(), number)
        for _ in range(20_000):
            pass
        reached.append(number)


def test_handlers_that_raise_are_put_off():
    class Late(Exception):
        pass

    def raise_late(*_):
        raise Late

    before = signal.signal(signal.SIGALRM, raise_late)
    idle = threading.Event()
    # Another thread that may receive the process's signals.
    other = threading.Thread(target=idle.wait)
    other.start()
    reached = []
    try:
        for number in (signal.SIGINT, signal.SIGALRM):
            with pytest.raises((Late, KeyboardInterrupt)):
                interrupted_block(number, reached)
        assert reached == [signal.SIGINT, signal.SIGALRM]
        assert signal.getsignal(signal.SIGALRM) is raise_late
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        idle.set()
        other.join()
        signal.signal(signal.SIGALRM, before)
