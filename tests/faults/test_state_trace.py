"""What happens to the states of envs in random programs in this process: each change is an entry of the table.

`test_executor_model` has it for workers, and for C.
"""

import contextlib
import random
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from envherd.executor import SerialEnv
from envherd.executor.protocol.env_states import Event, State
from envherd.workers.errors import EnvherdError
from tests.oracles.simulated import ENDS, GOES_ON, RAISES, RESET_RAISES, Scripted
from tests.oracles.state_trace import StateTrace
from tests.scale import scaled

NUM_ENVS = 4
ACTIONS = (GOES_ON,) * 8 + (ENDS,) * 3 + (RAISES, RESET_RAISES)


class Restorable(Scripted):
    """Has a state."""

    def state_dict(self) -> dict[str, Any]:
        return {"latest": self.latest, "is_in_episode": self.is_in_episode}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.latest, self.is_in_episode = state["latest"], state["is_in_episode"]


@pytest.mark.slow
def test_every_change_is_in_the_table(monkeypatch):
    trace, rng = StateTrace(monkeypatch), random.Random(0)

    def act(td: Any) -> Any:
        return td.set("action", torch.tensor(rng.choices(ACTIONS, k=len(td))))

    def some() -> list[int]:
        return rng.sample(range(NUM_ENVS), rng.randint(1, NUM_ENVS))

    def send() -> None:
        env_ids = some()
        env.send(
            act(TensorDict({}, [len(env_ids)])), env_ids, maybe_reset=rng.random() < 0.7
        )

    def reset_some() -> None:
        mask = torch.zeros(NUM_ENVS, dtype=torch.bool)
        mask[some()] = True
        env.reset(TensorDict({"_reset": mask}, [NUM_ENVS]))

    with SerialEnv(NUM_ENVS, lambda: Restorable(0), seed=0) as env:
        calls = [
            lambda: env.step(act(TensorDict({}, [NUM_ENVS]))),
            lambda: env.step_and_maybe_reset(act(TensorDict({}, [NUM_ENVS]))),
            send,
            lambda: env.current(env.recv(rng.randint(1, NUM_ENVS))["env_ids"]),
        ] * 3 + [
            env.reset,
            reset_some,
            lambda: env.rollout(3, act, auto_reset=rng.random() < 0.5),
            lambda: env.load_state_dict(env.state_dict()),
        ]
        for _ in range(scaled(300, full=3000)):
            with contextlib.suppress(EnvherdError, ValueError):
                rng.choice(calls)()
    events = {event for _, event, _ in trace.steps}
    assert events >= {
        Event.STEP,
        Event.STEP_RESET,
        Event.RESET,
        Event.ANSWERED,
        Event.ENDS,
        Event.FAILS,
        Event.IS_OVER,
    }


def test_trace_finds_an_unreported_state_change(monkeypatch):
    StateTrace(monkeypatch)
    with SerialEnv(2, lambda: Scripted(0)) as env:
        env.reset()
        env._engine.states.values[1] = State.ENDED
        with pytest.raises(AssertionError, match="states were changed"):
            env.reset()
