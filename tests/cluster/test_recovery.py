"""The search of another place for a share whose host is gone, with a simulated clock."""

import pytest

from tests.extras import skip_without

skip_without("ray")

from envherd.executor import ExecutorOptions, WorkerLost
from envherd.executor.cluster import fleet as fleet_module
from envherd.executor.cluster import remote_share
from envherd.executor.cluster.fleet import Fleet
from envherd.executor.cluster.orders import Report, Share
from envherd.executor.cluster.remote_share import RemoteShare, State
from envherd.executor.pools import restarts
from envherd.workers import registries

REPORT = Report(node_id="ab12", hostname="far", pid=1, cores=2, memory_bytes=0, versions={})


class Clock:
    """Replaces the module `time`."""

    now = 100.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class Place:
    """A place that is found at the second query, unless there is none; records the times of searches."""

    is_there = has_room = True

    def __init__(self, clock):
        self.clock, self.asked_at, self.num_asked, self.called, self.num_ended = clock, [], 0, [], 0

    def begin_move(self):
        self.asked_at.append(self.clock.now)
        self.num_asked = 0
        return self.has_room

    def finish_move(self):
        self.num_asked += 1
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
    for module in (fleet_module, remote_share, restarts):
        monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def fleet(clock, monkeypatch):
    """A serving fleet of one share with two workers; `lost` holds its reported losses."""
    monkeypatch.setattr(fleet_module, "Connection", lambda _: None)
    options = ExecutorOptions(max_restarts=3)
    fleet = Fleet(None, 30.0, options)
    plan = Share(
        first_env_id=0,
        first_worker_id=0,
        factories=(b"",) * 2,
        env_kwargs=({},) * 2,
        num_workers=2,
        root_seed=0,
        preload=(),
        options=options,
        registered=registries.collect(),
    )
    fleet.shares.append(RemoteShare(0, plan, Place(clock), REPORT, 30.0))
    fleet.shares[0].build()
    fleet.lost = []
    fleet.on_loss = lambda _, error: fleet.lost.append(error)
    return fleet


def test_a_share_that_is_lost_again_waits_longer_each_time_and_then_is_lost_for_good(clock, fleet):
    (share,), loss = fleet.shares, WorkerLost("the host is gone")
    began = []
    for number in range(3):
        fleet.lose(share, loss)
        fleet.lose(share, loss)
        assert fleet.lost == [loss] * (number + 1), "a host is lost once"
        assert share.home.num_ended == number + 1
        began.append(clock.now)
        fleet.begin_move(share)
        assert share.state is (State.PAUSED if number else State.SEARCHING)
        share.home.called.clear()
        fleet.send(share, "run", (number,), None)
        assert not share.home.called
        fleet.await_host(share)
        assert share.home.called == ["start_host", "build", "run"], "what was kept is sent once there is a host"
        assert (share.state, share.held) == (State.BUILDING, [])
        clock.now += 1.0
    waited = [at - start for at, start in zip(share.home.asked_at, began, strict=True)]
    assert waited[0] == 0
    assert 0.1 <= waited[1] < 0.2 <= waited[2] < 0.4, "within the pauses between questions"
    fleet.lose(share, loss)
    with pytest.raises(WorkerLost, match=r"the host is gone It is not replaced: ExecutorOptions\.max_restarts=3"):
        fleet.begin_move(share)
    assert share.is_out


def test_a_search_that_finds_nothing_is_raised_once_and_then_tried_again(fleet):
    (share,) = fleet.shares
    fleet.lose(share, WorkerLost("the host is gone"))
    share.home.is_there = False
    fleet.begin_move(share)
    fleet.send(share, "run", (), None)
    with pytest.raises(WorkerLost, match=r"the host is gone It was not replaced: no living node has room"):
        fleet.await_host(share)
    assert (share.state, share.held, len(fleet.lost)) == (State.REFUSED, [], 2)
    with pytest.raises(WorkerLost, match="no living node has room"):
        fleet.begin_move(share)
    share.home.is_there = True
    fleet.begin_move(share)
    fleet.await_host(share)
    assert share.state is State.BUILDING


def test_no_place_is_looked_for_where_no_node_is_large_enough(fleet):
    (share,) = fleet.shares
    fleet.lose(share, WorkerLost("the host is gone"))
    share.home.has_room = False
    with pytest.raises(WorkerLost, match="no living node has room"):
        fleet.begin_move(share)
    assert share.is_out
