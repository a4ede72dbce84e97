"""Channels carry whole frames, whatever pieces the socket makes of them, and descriptors beside them."""

import os
import socket
import threading

import numpy as np
import pytest

from envherd.workers.messages import Ask, Channel, Close, DetachStorage


@pytest.fixture
def ends():
    ours, theirs = (Channel(sock) for sock in socket.socketpair())
    yield ours, theirs
    ours.close()
    theirs.close()


def test_messages_arrive_in_order(ends):
    parent, worker = ends
    sent = [Ask(what="call", env_ids=(1,), name="f", args=(2,), kwargs={"x": 3}), DetachStorage(target=4), Close()]
    for message in sent:
        parent.send_message(message)
    assert [worker.receive_message()[0] for _ in sent] == sent


def test_descriptors_ride_along(ends):
    parent, worker = ends
    read, write = os.pipe()
    parent.send_message(Close(), [read])
    os.close(read)
    _, fds = worker.receive_message()
    os.write(write, b"x")
    assert os.read(fds[0], 1) == b"x"
    for fd in (write, *fds):
        os.close(fd)


def test_each_message_keeps_its_own_descriptors(ends):
    parent, worker = ends
    pipes = [os.pipe() for _ in range(3)]
    for number, (read, _) in enumerate(pipes):
        parent.send_message(DetachStorage(target=number), [read] if number != 1 else [])
        os.close(read)
    got = [worker.receive_message() for _ in pipes]
    assert [len(fds) for _, fds in got] == [1, 0, 1]
    os.write(pipes[2][1], b"y")
    assert os.read(got[2][1][0], 1) == b"y"
    for fd in [*(write for _, write in pipes), *(fd for _, fds in got for fd in fds)]:
        os.close(fd)


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


def test_nothing_there_is_no_frame(ends):
    assert ends[0].drain_nowait() == []


def test_the_end_is_an_end(ends):
    parent, worker = ends
    parent.close()
    with pytest.raises(EOFError):
        worker.receive_message()
