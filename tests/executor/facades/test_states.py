"""The calls of vector envs follow the printed table, in any order, also after calls that have raised."""

import random
from typing import Any

import numpy as np
import pytest
from gymnasium.error import (
    AlreadyPendingCallError,
    ClosedEnvironmentError,
    NoAsyncCallError,
)

from envherd.executor import Busy, Closed, EnvError, ResetNeeded
from envherd.executor.facades import states
from envherd.executor.facades.states import FOLLOWS, AsyncState
from envherd.gymnasium import AsyncVectorEnv
from envherd.sb3 import SubprocVecEnv
from tests.envs.sb3_envs import FailingEnv
from tests.scale import scaled

pytestmark = pytest.mark.filterwarnings("ignore:.*Calling `close` while waiting")

#: Call -> what happens in it.
CALLS = {
    **dict.fromkeys(("reset", "step", "call"), ("begin", "land")),
    **{
        f"{name}_async": ("begin", f"{name}_async")
        for name in ("reset", "step", "call")
    },
    **{f"{name}_wait": (f"{name}_wait", "land") for name in ("reset", "step", "call")},
}
ARGUMENTS: dict[str, Any] = {
    **dict.fromkeys(("step", "step_async"), (np.zeros(2, np.int64),)),
    **dict.fromkeys(("call", "call_async"), ("render_mode",)),
}
#: Facade, its calls, and what it raises for what the table refuses.
FACADES: dict[str, Any] = {
    "gymnasium": (
        AsyncVectorEnv,
        [*CALLS],
        (AlreadyPendingCallError, NoAsyncCallError, ClosedEnvironmentError),
    ),
    "sb3": (
        SubprocVecEnv,
        ["reset", "step", "step_async", "step_wait"],
        (Busy, RuntimeError, Closed),
    ),
}


def _after(state: Any, call: str) -> Any:
    """Return the state after a call; None if the table refuses it."""
    for event in CALLS[call]:
        state = FOLLOWS[event].get(state)
    return state


@pytest.mark.parametrize("name", FACADES)
@pytest.mark.parametrize("seed", range(scaled(3, 40)))
def test_calls_in_any_order_follow_the_table(name: str, seed: int) -> None:
    make, calls, refusals = FACADES[name]
    rng = random.Random(seed)
    env = make([FailingEnv] * 2, num_workers=1)
    env.reset()
    for _ in range(60):
        call, before = rng.choice(calls), env._state
        if (name, call, before) == ("sb3", "reset", AsyncState.WAITING_STEP):
            before = AsyncState.BEGUN  # it drops the step
        expected = _after(before, call)
        try:
            getattr(env, call)(*ARGUMENTS.get(call, ()))
        except (ResetNeeded, EnvError):
            expected = expected and AsyncState.BEGUN
        except refusals:
            assert expected is None
        assert env._state is (expected or before)
    env.close()
    with pytest.raises(refusals):
        env.reset()


def test_the_printed_table_is_the_table() -> None:
    head, *rows = (
        line.replace("*", "").split()
        for line in states.__doc__.splitlines()
        if line.startswith("    ")
    )
    of_states = [AsyncState(name) for name in head[2:]]
    for event, *cells in rows:
        following = [FOLLOWS[event].get(state) for state in of_states]
        assert cells == ["-" if state is None else state.value for state in following]
    assert [row[0] for row in rows] == [*FOLLOWS]
