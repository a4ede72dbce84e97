"""Placement: decisions from tables, and real workers that start on one processor."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from envherd.executor import ExecutorOptions, ParallelEnv
from envherd.executor.pools import placement
from envherd.executor.pools.placement import Topology, Usage, choose, read_topology, room_between
from envherd.workers import processes
from envherd.workers.processes import idle_s, move_to, place_of
from envherd.workers.protocol import pack_seat, unpack_seat
from envherd.workers.testing import CountingEnv

ALL = sorted(os.sched_getaffinity(0))
needs_two = pytest.mark.skipif(len(ALL) < 2, reason="one processor")

# Two sockets of two cores of two threads: 0 and 4 are one core, and so on; 2, 3, 6 and 7 are node 1.
BIG = Topology({cpu: cpu % 4 for cpu in range(8)}, {cpu: cpu % 4 // 2 for cpu in range(8)})
FLAT = Topology()


def moves(places, caller=None, *, cpus=2, allowed=None, room=None, topology=FLAT):
    everywhere = allowed or dict.fromkeys(places, range(cpus))
    return choose(places, caller, everywhere, dict.fromkeys(range(cpus), 1.0) if room is None else room, topology)


@pytest.mark.parametrize(
    ("places", "caller", "cpus", "expected"),
    [
        ({0: 0, 1: 1}, 0, 2, {}),  # apart; the caller has to share with one of them
        ({0: 1, 1: 1}, 0, 2, {0: 0}),  # a pair, and a processor with the caller alone
        ({0: 1, 1: 1}, None, 2, {0: 0}),
        ({0: 0, 1: 0}, 0, 2, {0: 1}),  # all three on one
        ({0: 1}, 1, 2, {0: 0}),  # one worker does not share with a busy caller
        ({0: 1}, None, 2, {}),  # nor does it matter where the caller sleeps
        ({0: 0, 1: 0, 2: 1}, 1, 2, {}),  # more workers than processors
        ({0: 0, 1: 0, 2: 1}, 1, 3, {0: 2}),
        ({0: 0, 1: 1, 2: 1}, 0, 3, {1: 2}),  # a pair first, then who shares with the caller
        ({0: 0, 1: 1, 2: 1}, 0, 4, {1: 2, 0: 3}),
        ({0: 3, 1: 3, 2: 3}, 0, 4, {0: 1, 1: 2}),  # the caller's only if there is no other
        ({}, 0, 2, {}),
        ({0: 5}, None, 1, {}),  # nowhere to go
    ],
)
def test_who_moves_where(places, caller, cpus, expected):
    assert moves(places, caller, cpus=cpus) == expected


def test_a_whole_core_is_better_than_a_shared_one_and_then_the_own_node():
    assert moves({0: 0, 1: 0}, cpus=8, topology=BIG) == {0: 1}
    assert moves({0: 0, 1: 0, 2: 1}, cpus=8, topology=BIG) == {0: 2}, "core 1 is taken; 2 is of the other node"
    assert moves({0: 0, 1: 0, 2: 1, 3: 2, 4: 3}, cpus=8, topology=BIG) == {0: 4}, "no core is left: of the own node"
    assert moves({0: 0, 1: 0}, 1, cpus=8, topology=BIG) == {0: 2}, "the caller's core is taken too"
    assert moves({0: 3, 1: 3}, cpus=8, topology=BIG) == {0: 2}


def test_affinity_is_respected():
    assert moves({0: 1, 1: 1}, 0, allowed={0: {1}, 1: {1}}) == {}
    assert moves({0: 1, 1: 1}, 0, allowed={0: {1}, 1: {0, 1}}) == {1: 0}
    assert moves({0: 1, 1: 1}, allowed={0: {1, 3}, 1: {1}}, room={0: 1.0, 3: 1.0}) == {0: 3}


def test_where_others_compute_nobody_is_sent():
    assert moves({0: 1, 1: 1}, 0, room={0: 0.4, 1: 1.0}) == {}
    assert moves({0: 1, 1: 1}, 0, cpus=3, room={0: 0.9, 1: 1.0, 2: 0.4}) == {0: 0}
    assert moves({0: 1, 1: 1}, 0, room={}) == {}, "nothing is known of it"


def test_room_is_what_others_leave():
    before, now = Usage(10.0, 5.0, {0: 100.0, 1: 50.0, 2: 7.0}), Usage(10.5, 5.4, {0: 100.05, 1: 50.0, 2: 7.5})
    assert room_between(before, now, 0) == pytest.approx({0: 0.9, 1: 0.0, 2: 1.0})
    assert room_between(before, now, None) == pytest.approx({0: 0.1, 1: 0.0, 2: 1.0})


def test_topology_is_read(tmp_path):
    for cpu in range(4):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 2},{cpu % 2 + 2}\n")
    (tmp_path / "sys/devices/system/cpu/cpu9").mkdir()  # offline: says nothing
    for node in range(2):
        (tmp_path / f"sys/devices/system/node/node{node}").mkdir(parents=True)
        (tmp_path / f"sys/devices/system/node/node{node}/cpulist").write_text(f"{node},{node + 2}\n")
    assert read_topology(tmp_path) == Topology({0: 0, 2: 0, 1: 1, 3: 1}, {0: 0, 2: 0, 1: 1, 3: 1})
    assert read_topology(tmp_path / "nothing") == Topology()


def test_seats_say_how_often_and_where():
    seat = pack_seat(pack_seat(0, 3), 0)
    assert unpack_seat(0) == (0, 0)
    assert unpack_seat(seat) == (2, 0)
    assert unpack_seat(pack_seat(seat, 700)) == (3, 700)


def test_the_kernel_says_where_processes_are():
    assert place_of("thread-self")[0]
    assert place_of("thread-self")[1] in ALL
    assert place_of(os.getpid())[1] in ALL
    assert place_of(0) == (False, -1)
    assert set(ALL) <= set(idle_s())


def test_a_move_leaves_no_pin(monkeypatch):
    asked = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: asked.append((pid, set(cpus))))
    move_to(ALL[-1])
    move_to(1 << 14)  # not allowed
    assert asked == [(0, {ALL[-1]}), (0, set(ALL))]


class _Confined(CountingEnv):
    """Takes some milliseconds a step; reports the worker's affinity at the start and now."""

    def __init__(self):
        super().__init__()
        self.confined = []
        self._get, confine = os.sched_getaffinity, os.sched_setaffinity

        def note(pid, cpus):
            self.confined.append(sorted(cpus))
            confine(pid, cpus)

        processes.os.sched_setaffinity = note

    def step(self, action):
        for _ in range(20_000):
            pass
        return super().step(action)

    def feel_free(self):
        processes.os.sched_getaffinity = lambda _pid: set(ALL)

    def answer(self):
        return self.confined, sorted(self._get(0))


@pytest.fixture
def _looking(monkeypatch):
    """Check in every wait, despite other load on this machine."""
    monkeypatch.setattr(placement, "_EVERY_S", 0.0)
    monkeypatch.setattr(placement, "_SOON_S", 0.0)
    monkeypatch.setattr(placement, "_COST", 0)
    monkeypatch.setattr(placement, "_ROOM", 0.0)


def step_on(env, until, most=300):
    root = env.reset()
    for _ in range(most):
        _, root = env.step_and_maybe_reset(env.rand_action(root))
        if until():
            return True
    return False


@needs_two
@pytest.mark.slow
@pytest.mark.usefixtures("_looking")
def test_workers_that_were_put_on_one_processor_are_taken_apart_and_stay_free(monkeypatch):
    """They are pinned to it, so the kernel cannot separate them first; their affinity is made to look unrestricted."""
    with ParallelEnv(2, _Confined, num_workers=2, seed=0) as env:
        pids = [worker.pid for worker in env.statistics().workers]
        env.call("feel_free")
        monkeypatch.setattr(placement, "_affinity", lambda _pid: set(ALL))
        for pid in pids:
            os.sched_setaffinity(pid, {ALL[0]})
        assert step_on(env, lambda: any(confined for confined, _ in env.call("answer")))
        told = env.statistics().workers
        for worker, (confined, allowed) in zip(told, env.call("answer"), strict=True):
            assert all(there != ALL[0] for (there,) in confined[::2])
            assert all(after == ALL for after in confined[1::2])
            assert allowed == (ALL if confined else [ALL[0]]), "who has moved is free"
            assert worker.cpu in allowed
            if confined:
                assert worker.moves > 0
                assert worker.stacked_share > 0


@needs_two
@pytest.mark.slow
@pytest.mark.usefixtures("_looking")
def test_an_affinity_that_was_asked_for_is_left_alone():
    options = ExecutorOptions(affinity=(ALL[-1],))
    with ParallelEnv(2, _Confined, num_workers=2, seed=0, options=options) as env:
        assert not step_on(env, lambda: sum(one.moves for one in env.statistics().workers), most=30)
        assert env.engine.pool.slab.words["looks"].sum() > 0
        assert [allowed for _, allowed in env.call("answer")] == [[ALL[-1]]] * 2
        assert {worker.cpu for worker in env.statistics().workers} == {ALL[-1]}


@pytest.mark.slow
def test_a_yield_of_the_caller_reaches_its_workers():
    """If sessions are scheduling groups, a yield would not reach workers in a separate session."""
    with ParallelEnv(2, CountingEnv, num_workers=2, seed=0) as env:
        pids = [worker.pid for worker in env.statistics().workers]
        assert {os.getsid(pid) for pid in pids} == {os.getsid(0)}
        assert len({os.getpgid(pid) for pid in [*pids, 0]}) == 3, "but groups of their own: Ctrl-C does not reach them"
        own = Path("/proc/self/autogroup")
        if own.exists():
            assert {Path(f"/proc/{pid}/autogroup").read_text() for pid in pids} == {own.read_text()}


class _Printing(CountingEnv):
    """Writes to its terminal, and reports whether that terminal could stop it."""

    def terminal(self):
        os.write(1, b"printed ")
        try:
            os.close(os.open("/dev/tty", os.O_RDWR))
        except OSError:
            return "none"
        return "opened"


_IN_TERMINAL = """
import fcntl, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from envherd.executor import ExecutorOptions, ParallelEnv
from tests.executor.test_placement import _Printing
with ParallelEnv(1, _Printing, seed=0, options=ExecutorOptions(worker_output="inherit")) as env:
    env.reset()
    print("terminal:", *env.call("terminal"), flush=True)
"""


@pytest.mark.slow
def test_workers_have_no_terminal_that_could_stop_them():
    """They are in the caller's session, but not in the foreground of its terminal."""
    ours, theirs = os.openpty()
    flags = termios.tcgetattr(theirs)
    flags[3] |= termios.TOSTOP  # who writes from the background is stopped
    termios.tcsetattr(theirs, termios.TCSANOW, flags)
    with subprocess.Popen(
        [sys.executable, "-c", _IN_TERMINAL], stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    ) as process:
        os.close(theirs)
        written = b""
        with contextlib.suppress(OSError):  # EIO: the other side has closed it
            while data := os.read(ours, 4096):
                written += data
    os.close(ours)
    assert written.split() == [b"printed", b"terminal:", b"none"], written.decode()
    assert process.returncode == 0
