"""The contract on envs that are known to be correct, through the executors with all pools."""

from functools import partial
from typing import Any

import pytest

from envherd.executor.testing import Contract, check_env_contract
from envherd.workers.testing import CountingEnv
from tests.contracts.executor_batch import BATCHES
from tests.envs.counting_envs import AgentsEnv, FlagsEnv, PairEnv, TextEnv
from tests.scale import scaled

ENVS: dict[str, Any] = {
    "counting": CountingEnv,
    "one_step_episodes": partial(CountingEnv, 1),
    "reused_buffers": partial(CountingEnv, size=5, reuses_buffers=True),
    "agents": AgentsEnv,
    "text": TextEnv,
    "batch_of_two": PairEnv,
    "switches": FlagsEnv,
}


#: `test_property` and `test_portable` compare processes with `SerialEnv`.
IN_PROCESSES = scaled(("counting", "batch_of_two"), full=tuple(ENVS))


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "batch"),
    [
        (env, batch)
        for env in ENVS
        for batch in BATCHES
        if batch == "serial" or env in IN_PROCESSES
    ],
)
def test_every_rule_holds(env: str, batch: str) -> None:
    report = Contract(ENVS[env], num_steps=40, make_batch=BATCHES[batch]).check_all()
    # It has no state.
    assert sorted(report.rules) == [1, 2, 3, 4, 5, 6, 7, 8] + [9] * (
        env != "batch_of_two"
    )
    assert report.num_ends > 4
    assert report.are_calls_counted


def test_check_env_contract_returns_a_report() -> None:
    assert check_env_contract(CountingEnv, num_steps=20, seed=3).num_steps == 20
