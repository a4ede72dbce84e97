"""Doorbells: tokens, time-outs, and waking another process."""

import os
import time

import pytest

from envherd.shm.segment import Segment
from envherd.shm.sync import DOORBELL_BYTES, Doorbell


@pytest.fixture
def segment():
    segment = Segment.create(2 * DOORBELL_BYTES)
    yield segment
    segment.close()


def test_tokens_are_counted(segment):
    bell = Doorbell.create(segment.array(), 0)
    assert not bell.try_wait()
    bell.ring()
    bell.ring()
    assert bell.wait()
    assert bell.try_wait()
    assert not bell.try_wait()


def test_a_wait_ends_in_time(segment):
    bell = Doorbell.create(segment.array(), 0)
    began = time.monotonic()
    assert not bell.wait(0.05)
    assert 0.04 < time.monotonic() - began < 5


def test_an_attached_bell_is_the_same_bell(segment):
    buffer = segment.array()
    bell, other = Doorbell.create(buffer, DOORBELL_BYTES), Doorbell.attach(buffer, DOORBELL_BYTES)
    bell.ring()
    assert other.try_wait()
    assert not bell.try_wait()


def test_two_processes_wake_each_other(segment):
    buffer = segment.array()
    ping, pong = Doorbell.create(buffer, 0), Doorbell.create(buffer, DOORBELL_BYTES)
    child = os.fork()
    if child == 0:
        answered = all(ping.wait(10.0) and pong.ring() is None for _ in range(200))
        os._exit(0 if answered else 1)
    for _ in range(200):
        ping.ring()
        assert pong.wait(10.0)
    assert os.waitpid(child, 0)[1] == 0


def test_no_file_and_no_name(segment):
    before = set(os.listdir("/dev/shm")), len(os.listdir("/proc/self/fd"))
    Doorbell.create(segment.array(), 0)
    assert (set(os.listdir("/dev/shm")), len(os.listdir("/proc/self/fd"))) == before
