"""Doorbells: tokens, time-outs, and waking another process."""

import os
import shutil
import subprocess
import sys
import time

import pytest

from envherd.shm import sync
from envherd.shm.segment import Segment
from envherd.shm.sync import DOORBELL_BYTES, Doorbell
from tests.conftest import gained_shm_names, shm_names


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
    bell, other = (
        Doorbell.create(buffer, DOORBELL_BYTES),
        Doorbell(buffer, DOORBELL_BYTES),
    )
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
    before = shm_names(), len(os.listdir("/proc/self/fd"))
    Doorbell.create(segment.array(), 0)
    assert len(os.listdir("/proc/self/fd")) == before[1]
    assert not gained_shm_names(before[0])


#: The wall clock is an hour ahead whenever this program reads it: as if it were set back right after each reading.
_LYING_CLOCK = """
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t clock, struct timespec *now)
{
    int result = (int)syscall(SYS_clock_gettime, clock, now);
    if (clock == CLOCK_REALTIME)
        now->tv_sec += 3600;
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
    struct timespec precise;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return 0;
}
"""
#: Waits in Python and in C, each in a fork: imports take longer than the rest.
_WAITS = """
import functools, os
from envherd import ParallelEnv
from envherd.workers import native
from tests.envs.breaking_envs import FaultyEnv
for switch in ("0", "1"):
    if pid := os.fork():
        os.waitpid(pid, 0)
        continue
    os.environ["ENVHERD_NATIVE"] = switch
    assert native.load() is None or switch == "1"
    with ParallelEnv(1, functools.partial(FaultyEnv, "sleep", step=1)) as env:
        env.send(env.rand_action(env.reset()))
        try:
            env.recv(timeout_s=0.1)
        except TimeoutError:
            print("in time", flush=True)
        env._pool.crew.workers[0].kill()
        try:
            env.recv()
        except RuntimeError as error:
            print(type(error).__name__, flush=True)
    break
"""


@pytest.mark.long
@pytest.mark.broken_pool
@pytest.mark.skipif(
    sync._clockwait is None, reason="the C library has no sem_clockwait"
)
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_clock_set_back_delays_no_time_limit_or_notice_of_death(
    tmp_path,
):
    source, library = tmp_path / "clock.c", tmp_path / "clock.so"
    source.write_text(_LYING_CLOCK)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    done = subprocess.run(
        [sys.executable, "-c", _WAITS],
        env={**os.environ, "LD_PRELOAD": str(library)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.stdout == "in time\nWorkerLost\n" * 2, done.stderr


@pytest.mark.parametrize("keeps", [True, False])
def test_keeping_the_order_waits_for_nothing(monkeypatch, keeps):
    monkeypatch.setattr(sync, "KEEPS_ORDER", keeps)
    for _ in range(3):
        sync.keep_order()
