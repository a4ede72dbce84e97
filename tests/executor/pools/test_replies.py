"""A pool's reports besides rows are handed out once, and only for the requested envs."""

import numpy as np
import pytest

from envherd.executor.pools.commands import Outcome
from envherd.workers.errors import WorkerLost

NAMES = ("faults", "side", "infos")


def reported():
    """Return an outcome of a pool of four envs with reports of all kinds."""
    outcome = Outcome()
    for env_id in range(4):
        for kind in ("fault", "side", "infos"):
            outcome.take({"kind": kind, "env_id": env_id})
    outcome.losses[1] = WorkerLost("lost")
    return outcome


def about(outcome):
    """Return which envs each kind of report is about."""
    return [sorted(getattr(outcome, name)) for name in NAMES]


@pytest.mark.parametrize("asked", [[], [2], [3, 0], [0, 1, 2, 3]])
def test_reports_are_returned_for_the_given_envs_and_losses_always(asked):
    outcome = reported()
    given = outcome.hand_out(np.array(asked, np.int64))
    assert about(given) == [sorted(asked)] * 3
    assert about(outcome) == [[i for i in range(4) if i not in asked]] * 3
    assert (list(given.losses), outcome.losses) == ([1], {})


def test_later_reports_do_not_change_returned_ones():
    outcome = reported()
    given = outcome.hand_out(np.arange(4))
    outcome.take({"kind": "infos", "env_id": 0, "is_new": True})
    outcome.losses[3] = WorkerLost("lost")
    assert list(given.losses) == [1]
    assert "is_new" not in given.infos[0]
