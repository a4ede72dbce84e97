"""Random kills while data are collected: every surviving row equals that of `SerialEnv`, bit for bit.

A row is identified by its env, its episode (every episode has a different seed) and its step; a book holds the rows of
`SerialEnv` for the same actions. A lost worker leaves only interrupted rows, which hold the last true observation. The
episode counters continue, so nothing is replayed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from envherd.executor import ExecutorOptions, ParallelEnv
from envherd.workers.testing import CountingEnv
from tests.faults.book import NUM_ENVS, Book, Checked, act
from tests.scale import scaled

pytestmark = [pytest.mark.slow, pytest.mark.broken_pool, pytest.mark.timeout(280)]

NUM_WORKERS = 3
EXAMPLES = scaled(4, full=60)
OPTIONS = ExecutorOptions(on_worker_loss="restart", max_restarts=10_000, step_timeout_s=30.0, reset_timeout_s=30.0)

DEEDS = st.tuples(
    st.sampled_from(["fused", "step", "sent", "rollout", "reset"]),
    st.floats(0.0, 0.004),
    st.lists(st.integers(0, NUM_WORKERS - 1), max_size=2),
)


def kill_later(env: Any, after_s: float, worker_ids: list[int]) -> threading.Timer:
    """Kill workers after a delay, at any point of their work."""
    pids = [env._pool.pid_of(worker_id) for worker_id in worker_ids]

    def kill() -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    timer = threading.Timer(after_s, kill)
    timer.start()
    return timer


def test_every_surviving_row_is_the_serial_one():
    book = Book(root_seed=3)
    with ParallelEnv(NUM_ENVS, CountingEnv, num_workers=NUM_WORKERS, seed=3, options=OPTIONS) as env:
        total = [0, 0, 0]

        @settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.too_slow])
        @given(deeds=st.lists(DEEDS, min_size=3, max_size=8))
        def rows_agree(deeds):
            checked = Checked(env, book)
            checked.begin(env.reset(seed=3))
            for deed, after_s, victims in deeds:
                timer = kill_later(env, after_s, victims)
                checked.play(deed)
                timer.join()
            total[0] += checked.num_compared
            total[1] += checked.num_interrupted
            total[2] = env.statistics().worker_losses

        rows_agree()
        for victim in range(NUM_WORKERS):  # and at least these, whatever was drawn
            checked = Checked(env, book)
            checked.begin(env.reset(seed=3))
            kill_later(env, 0.0, [victim]).join()
            for deed in ("fused", "sent", "rollout"):
                checked.play(deed)
            total[0] += checked.num_compared
            total[1] += checked.num_interrupted
        td, _ = env.step_and_maybe_reset(act(env.reset()))
        checked.at = td["observation"].tolist()
        checked._take(td)
        with pytest.raises(AssertionError, match="the row says"):  # a row that comes twice would be seen
            checked._take(td)
    assert total[0] > 200
    assert total[1] >= 2 * NUM_WORKERS - 2
    assert total[2] >= NUM_WORKERS - 1
