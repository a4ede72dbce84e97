"""The search of another place for a host that is gone, with a simulated clock."""

import numpy as np
import pytest

from tests.extras import skip_without

skip_without("ray")

from envherd.executor import ExecutorOptions, WorkerLost
from envherd.executor.cluster import hosts as hosts_module
from envherd.executor.cluster.hosts import Call, Host, Hosts
from envherd.executor.cluster.messages import Report, Share
from envherd.executor.pools import restarts

REPORT = Report(node_id="ab12", hostname="far", pid=1, cores=2, memory_bytes=0, versions={})


class Clock:
    """Replaces the module `time`."""

    now = 100.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class Place:
    """A place that is found at the second query, unless there is none; records the times of first queries."""

    is_there = has_room = True

    def __init__(self, clock):
        self.clock, self.asked_at, self.num_asked, self.called, self.num_ended = clock, [], 0, [], 0

    def begin_move(self, _):
        self.num_asked = 0
        return self.has_room

    def finish_move(self):
        self.num_asked += 1
        if self.num_asked == 1:
            self.asked_at.append(self.clock.now)
        return self.is_there if self.num_asked == 2 else None

    def start_host(self):
        self.called.append("start_host")

    def call(self, method, *_):
        self.called.append(method)
        return object()

    def end_host(self):
        self.num_ended += 1


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    for module in (hosts_module, restarts):
        monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def hosts(clock, monkeypatch):
    """One host with two workers, that has an order to answer; `answers` holds what was answered."""
    monkeypatch.setattr(hosts_module, "Connection", lambda _: None)
    options = ExecutorOptions(max_restarts=3, on_worker_loss="restart")
    hosts = Hosts(None, 30.0, options)
    share = Share(
        first_env_id=0,
        first_worker_id=0,
        factories=(b"",) * 2,
        env_kwargs=({},) * 2,
        num_workers=2,
        root_seed=0,
        preload=(),
        options=options,
        registered=b"",
    )
    hosts.all.append(Host(0, share, Place(clock), REPORT))
    hosts.host_of = np.zeros(2, np.int64)
    hosts.all[0].is_building, hosts._is_up = False, True
    hosts.answers = []
    order(hosts)
    return hosts


def order(hosts):
    host = hosts.all[0]
    return hosts.post(Call(host, "run", (), lambda _, answer: hosts.answers.append(answer), host.env_ids))


def search(hosts, clock):
    """Search as a call that waits does, until the host has a place or none."""
    while hosts.all[0].is_searching:
        hosts._search()
        clock.sleep(0.05)


def test_a_host_that_is_lost_again_waits_longer_each_time_and_then_is_lost_for_good(clock, hosts):
    (host,), loss, began = hosts.all, WorkerLost("the host is gone"), []
    for number in range(3):
        host.place.called.clear()
        began.append(clock.now)
        hosts._lose(host, loss)
        search(hosts, clock)
        assert host.place.num_ended == number + 1
        assert host.place.called == ["start_host", "build", "run"], "its successor gets the order"
        del host.calls[0]
        clock.now += 1.0
    waited = [at - start for at, start in zip(host.place.asked_at, began, strict=True)]
    assert waited[0] == 0
    assert 0.09 < waited[1] < 0.19 < waited[2] < 0.4, "within the pauses between queries"
    assert hosts.tally[0] == 6, "two workers, three times"
    hosts._lose(host, loss)
    assert "the host is gone It is not replaced: ExecutorOptions.max_restarts=3" in str(hosts.answers[0])
    with pytest.raises(WorkerLost, match="max_restarts=3"):
        hosts.refuse_lost(host.env_ids)


def test_a_search_that_finds_nothing_is_raised_once_and_then_tried_again(clock, hosts):
    (host,) = hosts.all
    host.place.is_there = False
    hosts._lose(host, WorkerLost("the host is gone"))
    search(hosts, clock)
    assert "the host is gone It was not replaced: no living node has room" in str(hosts.answers[0])
    assert not host.calls
    host.place.is_there = True
    hosts.refuse_lost(host.env_ids)
    order(hosts)
    search(hosts, clock)
    assert (len(hosts.answers), host.loss, len(host.calls)) == (1, None, 2)


def test_no_place_is_looked_for_where_no_node_is_large_enough(hosts):
    (host,) = hosts.all
    host.place.has_room = False
    hosts._lose(host, WorkerLost("the host is gone"))
    assert "no living node has room" in str(hosts.answers[0])
    with pytest.raises(WorkerLost, match="no living node has room"):
        hosts.refuse_lost(host.env_ids)
