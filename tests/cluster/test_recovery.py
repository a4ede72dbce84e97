"""Losses of hosts and their successors, with a simulated clock and without Ray."""

from types import SimpleNamespace

import numpy as np
import pytest

from tests.extras import skip_without

skip_without("ray")

import ray

from envherd.executor import ExecutorOptions, WorkerLost
from envherd.executor.cluster import hosts as hosts_module
from envherd.executor.cluster.hosts import Hosts
from envherd.executor.cluster.messages import Report
from envherd.executor.pools import restarts
from envherd.executor.pools.blueprint import draw
from envherd.workers.build import Builder
from envherd.workers.protocol import RESET, RING, STEP, Op
from envherd.workers.testing import CountingEnv

REPORT = Report(node_id="ab12", hostname="far", pid=1, cores=2, memory_bytes=0, versions={})
NOTHING = object()


class Clock:
    """Replaces the module `time`; moves on at each wait."""

    now = 100.0

    def monotonic(self):
        return self.now

    def perf_counter_ns(self):
        return int(self.now * 1e9)


class Ref:
    """Replaces Ray's reference of an answer."""

    def __init__(self, answer):
        self.answer = answer


class Place:
    """Replaces a host and its place: `answers` has what each method returns; NOTHING never comes."""

    def __init__(self, specs):
        self.called, self.num_ended, self.has_node = [], 0, True
        self.answers = {"build": (specs, REPORT), "ping": None, "run": NOTHING, "close": None}

    def start_host(self):
        self.called.append("start_host")

    def call(self, method, *_):
        self.called.append(method)
        return Ref(self.answers[method])

    def is_there(self):
        return self.has_node

    def end_host(self):
        self.num_ended += 1


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    for module in (hosts_module, restarts):
        monkeypatch.setattr(module, "time", clock)

    def wait(refs, num_returns=1, timeout=None):
        ready = [ref for ref in refs if ref.answer is not NOTHING]
        clock.now += timeout if len(ready) < num_returns else 0.01
        return ready, []

    stub = SimpleNamespace(wait=wait, get=lambda ref: ref.answer, exceptions=ray.exceptions, is_initialized=bool)
    monkeypatch.setattr(hosts_module, "ray", stub)
    return clock


@pytest.fixture
def hosts(clock, monkeypatch):
    """Two hosts with two workers each; those of the first are to answer a command."""
    spec = Builder(None, None, episode_statistics=False).adopt(CountingEnv, {}).spec
    places = [Place([spec] * 2) for _ in range(2)]
    monkeypatch.setattr(hosts_module, "Connection", lambda _: None)
    monkeypatch.setattr(hosts_module, "living_nodes", lambda: [{"CPU": 2.0}] * 2)
    monkeypatch.setattr(hosts_module, "reserve", lambda *_: places)
    monkeypatch.setattr(hosts_module, "start_hosts", lambda _: [REPORT] * 2)
    monkeypatch.setattr(hosts_module, "versions", dict)
    options = ExecutorOptions(max_restarts=3, on_worker_loss="restart")
    hosts = Hosts(None, (30.0, 60.0), options)
    hosts.start(draw([CountingEnv] * 4, None, 1, 0, options), (None, None), None, None, ("SPREAD", None))
    hosts.submit(np.arange(2), Op.RESET, RING, np.zeros(2, np.int64))
    return hosts


def lose_and_restart(hosts):
    """Lose the first host as flights find out, and begin what they begin; return the loss."""
    host = hosts.all[0]
    hosts._lose(host, WorkerLost("the host is gone", worker_id=0))
    losses = hosts.outcome.hand_out(np.zeros(0, np.int64)).losses
    assert [*losses] == [0, 1], "of both workers"
    for worker_id in losses:
        hosts.begin_restart(worker_id)


def test_a_host_that_is_lost_repeatedly_is_finally_not_replaced(hosts):
    host, place = hosts.all[0], hosts.all[0].place
    assert place.called == ["build", "run"]
    for number in range(1, 4):
        place.called.clear()
        lose_and_restart(hosts)
        assert place.num_ended == number
        assert not len(hosts.outstanding())
        assert hosts.words.answers_lost.tolist() == [number == 1] * 2 + [False] * 2
        hosts.submit_later(np.arange(2), Op.RESET, RING, np.zeros(2, np.int64))
        hosts.words.answers_lost[:] = False
        assert place.called == ["start_host", "build", "run"], "once for both workers, and its commands follow"
        assert (host.loss, hosts.lost, host.share.generation) == (None, {}, number)
        hosts.words.reply_seq[:2] = hosts.words.command_seq[:2]
        host.is_building = False
    assert host.tally[0] == hosts.num_losses == 6
    with pytest.raises(WorkerLost, match=r"the host is gone It is not replaced: ExecutorOptions\.max_restarts=3"):
        lose_and_restart(hosts)


def test_a_share_for_which_there_is_no_room_is_raised_once_and_then_tried_again(clock, hosts):
    host, place = hosts.all[0], hosts.all[0].place
    place.answers |= {"build": NOTHING, "ping": NOTHING}
    place.has_node = False
    lose_and_restart(hosts)
    hosts.submit_later(np.arange(2), Op.RESET, RING, np.zeros(2, np.int64))
    began = clock.now
    assert hosts.wait_some(np.arange(2), 2, None).tolist() == [0, 1]
    assert 60 < clock.now - began < 65
    assert hosts.words.answers_lost[:2].all()
    with pytest.raises(WorkerLost, match="no living node has had room for its share for 60 s"):
        hosts.begin_restart(0)
    place.answers |= {"build": ([hosts.specs[0]] * 2, REPORT), "ping": None}
    hosts.submit(np.arange(2), Op.RESET, RING, np.zeros(2, np.int64))
    assert {*hosts.outcome.losses} == {0, 1}, "answered by the loss"
    hosts.begin_restart(0)
    hosts.submit_later(np.arange(2), Op.RESET, RING, np.zeros(2, np.int64))
    assert not len(hosts.wait_some(np.arange(2), 1, 0.5, kill_late=False))
    assert (host.loss, host.is_building) == (None, False)


@pytest.mark.parametrize("is_other_busy", [False, True])
def test_a_silent_host_is_found_also_while_another_one_answers(clock, hosts, is_other_busy):
    silent, busy = hosts.all
    silent.place.answers["ping"] = NOTHING
    began = clock.now
    while silent.loss is None:
        assert clock.now - began < 40
        if is_other_busy:  # it never keeps the caller waiting
            busy.place.answers["run"] = WorkerLost("one", worker_id=2, env_ids=(2,))
            hosts.submit(np.array([2]), STEP, RING, np.zeros(1, np.int64))
        hosts.wait_some(np.array([0, 2]) if is_other_busy else np.array([0]), 1, 0.0, kill_late=is_other_busy)
        clock.now += 0.5
    assert "it gave no sign of life for 30 s" in str(silent.loss)
    assert clock.now - began > 30


def test_a_command_that_was_written_and_not_sent_is_sent_later(hosts):
    place = hosts.all[1].place
    place.called.clear()
    hosts._ops[2:], hosts._columns[2:] = RESET, 0
    hosts.words.write(np.array([2, 3]), np.array([RESET, RESET]))  # an interrupt comes here
    assert place.called == []
    hosts.wake_workers()
    hosts.wake_workers()
    assert place.called == ["run"]
