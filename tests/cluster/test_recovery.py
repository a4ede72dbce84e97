"""When another place is looked for, for a share whose host is gone; with a clock that the test moves."""

import types

import pytest

from tests.extras import skip_without

skip_without("ray")

from envherd.executor import ExecutorOptions, WorkerLost
from envherd.executor.cluster import recovery as recovery_module
from envherd.executor.cluster.recovery import Recovery
from envherd.executor.pools import restarts


class Clock:
    """Stands for the module `time`."""

    now = 100.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class Fleet:
    """Finds a place at the second question; notes when it was asked to look for one."""

    def __init__(self, clock):
        self.clock, self.asked_at, self.num_asked = clock, [], 0

    def begin_move(self, _):
        self.asked_at.append(self.clock.now)
        self.num_asked = 0
        return True

    def finish_move(self, share):
        self.num_asked += 1
        if self.num_asked < 2:
            return None
        share.is_gone = False
        return True


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    for module in (recovery_module, restarts):
        monkeypatch.setattr(module, "time", clock)
    return clock


def test_a_share_that_is_lost_again_waits_longer_each_time_and_then_is_lost_for_good(clock):
    share = types.SimpleNamespace(share_id=0, worker_ids=range(2), is_moving=False, is_gone=True, built_ref=None)
    sent = []
    pool = types.SimpleNamespace(
        options=ExecutorOptions(max_restarts=3),
        lost={},
        post=types.SimpleNamespace(expect=lambda *_: None),
        send=lambda *call: sent.append(call),
    )
    fleet, loss = Fleet(clock), WorkerLost("the host is gone")
    recovery = Recovery(pool, fleet)
    began = []
    for number in range(3):
        share.is_gone, pool.lost = True, dict.fromkeys(share.worker_ids, loss)
        began.append(clock.now)
        recovery.begin(share, loss)
        assert (share.is_moving, pool.lost) == (True, {})
        recovery.hold(share, "act", "run", (number,), None)
        recovery.await_place(share)
        assert sent.pop() == (share, "act", "run", (number,), None), "what was kept is sent once there is a host"
        clock.now += 1.0
    waited = [at - start for at, start in zip(fleet.asked_at, began, strict=True)]
    assert waited[0] == 0
    assert 0.1 <= waited[1] < 0.2 <= waited[2] < 0.4, "within the pauses between questions"
    with pytest.raises(WorkerLost, match="the host is gone"):
        recovery.begin(share, loss)
