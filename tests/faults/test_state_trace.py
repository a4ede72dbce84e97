"""What happens to the states of envs in random programs: each change is an entry of the table, also in C."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from envherd.executor import ExecutorOptions, ParallelEnv, SerialEnv
from envherd.executor.protocol.env_states import Event, State
from envherd.workers import native
from envherd.workers.errors import EnvherdError
from tests.faults.simulated import ENDS, GOES_ON, RAISES, RESET_RAISES, Scripted
from tests.faults.state_trace import StateTrace
from tests.scale import scaled

pytestmark = [pytest.mark.slow, pytest.mark.broken_pool, pytest.mark.timeout(120)]

NUM_ENVS = 4
ACTIONS = (GOES_ON,) * 8 + (ENDS,) * 3 + (RAISES, RESET_RAISES)
MAKES: dict[str, tuple[Any, dict[str, Any]]] = {
    "raise": (ParallelEnv, {}),
    "restart": (ParallelEnv, {"on_worker_loss": "restart", "max_restarts": 10_000}),
    "serial": (SerialEnv, {}),
}


class Program:
    """Random calls of one executor; refusals and losses are part of it."""

    def __init__(self, env: Any, rng: random.Random) -> None:
        self._env, self._rng = env, rng
        self._calls = [
            *[self._step, self._fused, self._send, self._receive] * 3,
            *[self._reset, self._reset_some, self._rollout, self._load],
        ]

    def run(self, num_calls: int, kill_share: float) -> None:
        for _ in range(num_calls):
            if self._rng.random() < kill_share:
                self._kill()
            with contextlib.suppress(EnvherdError, ValueError):
                self._rng.choice(self._calls)()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._env._pool.pid_of(self._rng.randrange(2)), signal.SIGKILL)

    def _act(self, td: Any) -> Any:
        return td.set("action", torch.tensor(self._rng.choices(ACTIONS, k=len(td))))

    def _ids(self) -> np.ndarray:
        return np.array(self._rng.sample(range(NUM_ENVS), self._rng.randint(1, NUM_ENVS)))

    def _step(self) -> None:
        self._env.step(self._act(TensorDict({}, [NUM_ENVS])))

    def _fused(self) -> None:
        self._env.step_and_maybe_reset(self._act(TensorDict({}, [NUM_ENVS])))

    def _send(self) -> None:
        env_ids = self._ids()
        batch = self._act(TensorDict({}, [len(env_ids)]))
        self._env.send(batch, env_ids, maybe_reset=self._rng.random() < 0.7)

    def _receive(self) -> None:
        self._env.current(self._env.recv(self._rng.randint(1, NUM_ENVS))["env_ids"])

    def _reset(self) -> None:
        self._env.reset()

    def _reset_some(self) -> None:
        mask = torch.zeros(NUM_ENVS, dtype=torch.bool)
        mask[self._ids()] = True
        self._env.reset(TensorDict({"_reset": mask}, [NUM_ENVS]))

    def _rollout(self) -> None:
        self._env.rollout(3, self._act, auto_reset=self._rng.random() < 0.5)

    def _load(self) -> None:
        self._env.load_state_dict(self._env.state_dict())


class Restorable(Scripted):
    """Has a state."""

    def state_dict(self) -> dict[str, Any]:
        return {"latest": self.latest, "is_in_episode": self.is_in_episode}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.latest, self.is_in_episode = state["latest"], state["is_in_episode"]


@pytest.mark.parametrize("name", MAKES)
def test_every_change_is_in_the_table(name, monkeypatch):
    make, options = MAKES[name]
    trace, rng = StateTrace(monkeypatch), random.Random(name)
    with make(NUM_ENVS, Restorable, num_workers=2, seed=0, options=ExecutorOptions(**options)) as env:
        program = Program(env, rng)
        program.run(scaled(300, full=3000), 0.1 if name == "restart" else 0.0)
        if name == "raise":
            program.run(20, 0.2)
    events = {event for _, event, _ in trace.steps}
    assert events >= {Event.STEP, Event.STEP_RESET, Event.RESET, Event.ANSWERED, Event.ENDS, Event.FAILS, Event.IS_OVER}
    assert name == "serial" or Event.IS_LOST in events
    has_c = name == "raise" and native.load() is not None
    assert (
        trace.in_c
        >= {
            (State.RUNNING, Event.STEP, State.STEPPING),
            (State.RUNNING, Event.STEP_RESET, State.STEP_RESETTING),
            (State.STEPPING, Event.ANSWERED, State.RUNNING),
            (State.STEPPING, Event.ENDS, State.ENDED),
            (State.STEP_RESETTING, Event.ANSWERED, State.RUNNING),
        }
        if has_c
        else not trace.in_c
    )


def test_a_change_that_nobody_reports_is_noticed(monkeypatch):
    StateTrace(monkeypatch)
    with SerialEnv(2, Scripted) as env:
        env.reset()
        env._engine.states.values[1] = State.ENDED
        with pytest.raises(AssertionError, match="states were changed"):
            env.reset()
