"""The contract detects violations: for every rule an env, or a runner, that breaks it."""

import os
from dataclasses import replace
from functools import partial
from multiprocessing import current_process
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest

from envherd.executor.protocol.env_states import Event
from envherd.executor.testing import (
    Contract,
    ContractViolation,
    ExecutorBatch,
    check_env_contract,
    in_this_process,
)
from envherd.shm.specs import Box, EnvSpec, LeafSpec
from envherd.workers.errors import EnvError
from envherd.workers.testing import CountingEnv, PlainAdapter
from tests.contracts.families import nested_spaces
from tests.envs.breaking_envs import FaultyEnv
from tests.envs.counting_envs import GlobalRandomEnv


class StepsTwice(CountingEnv):
    def step(self, action: list[Any]) -> Any:
        values = super().step(action)
        return self.step(action) if self.num_steps == 1 else values


class ResetsItself(CountingEnv):
    """Like Gymnasium's vector envs in SAME_STEP mode: the last observation is the next episode's first."""

    def step(self, action: list[Any]) -> Any:
        observation, *others = super().step(action)
        return (self.reset(self.seed) if any(others[1:]) else observation, *others)

    def _observe(self, action: int) -> list[Any]:
        return [values[-2:].repeat([1, 2]) for values in super()._observe(action)]


class SharesState(CountingEnv):
    total: ClassVar[np.ndarray] = np.zeros(1, np.int64)

    def reset(self, *args: Any) -> list[Any]:
        np.add(self.total, 1, out=self.total)
        return super().reset(*args)

    def _observe(self, action: int) -> list[Any]:
        return [values + self.total[0] for values in super()._observe(action)]


class Remembers(CountingEnv):
    """Its observations depend on the number of earlier episodes."""

    def _observe(self, action: int) -> list[Any]:
        return [values + self.episode for values in super()._observe(action)]


class OverwritesText(CountingEnv):
    """Returns a list over the side channel, and changes it later."""

    def __init__(self) -> None:
        super().__init__()
        leaf = LeafSpec(("log",), dtype="", is_side=True)
        self.spec = EnvSpec(
            observation=(*self.spec.observation, leaf),
            action=self.spec.action,
            family="plain",
        )
        self._log: list[int] = []

    def _observe(self, action: int) -> list[Any]:
        self._log[:] = [*self._log, action] if self.num_steps else []
        return [*super()._observe(action), self._log]

    def state_dict(self) -> Any:
        return {**super().state_dict(), "log": list(self._log)}

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        self._log[:] = state["log"]


class LeavesItsSpace(CountingEnv):
    def __init__(self) -> None:
        super().__init__(size=2)
        first, counts = self.spec.observation
        bounded = replace(counts, domain=Box(np.array(0), np.array(1)))
        self.spec = replace(self.spec, observation=(first, bounded))


class Diverges(CountingEnv):
    """Observes or pays what is no number from its second step on."""

    def __init__(self, *, observed: float = 1.0, paid: float = 1.0) -> None:
        super().__init__()
        self.extra, self.paid = LeafSpec(("speed",), (2,), "float32"), paid
        self.spec = replace(self.spec, observation=(*self.spec.observation, self.extra))
        self.observed = observed

    def _observe(self, action: int) -> list[Any]:
        speed = np.array([0, self.observed if self.num_steps > 1 else 0], np.float32)
        return [*super()._observe(action), speed]

    def step(self, action: list[Any]) -> Any:
        observation, reward, *ends = super().step(action)
        return (observation, [self.paid] if self.num_steps > 1 else reward, *ends)


class DependsOnTheProcess(CountingEnv):
    """Its pid stands for what differs between processes, such as the order of a set of texts."""

    def step(self, action: list[Any]) -> Any:
        observation, _, *ends = super().step(action)
        return (observation, [os.getpid() % 1000], *ends)


class EndsByTheProcess(CountingEnv):
    """Its rows differ by nothing but the ends of episodes."""

    def __init__(self) -> None:
        super().__init__(10 if "worker" in current_process().name else 5)

    def step(self, action: list[Any]) -> Any:
        observation, _, *ends = super().step(action)
        return ([0 * values for values in observation], [0.0], *ends)

    def reset(self, *args: Any) -> list[Any]:
        return [0 * values for values in super().reset(*args)]


class IgnoresMasks(ExecutorBatch):
    def reset(self, mask: Any) -> Any:
        return super().reset(None)


class WritesMasks(ExecutorBatch):
    def reset(self, mask: Any) -> Any:
        rows = super().reset(mask)
        if mask is not None:
            mask[:] = False
        return rows


class LosesEnds(ExecutorBatch):
    """Returns the reset observation as the last one."""

    def step(self, actions: Any, *, resets_ended: bool) -> Any:
        nexts, roots = super().step(actions, resets_ended=resets_ended)
        for row, root in zip(nexts, roots, strict=True):
            if row[("done",)].any() and resets_ended:
                row[("observation",)] = root[("observation",)]
        return nexts, roots


class ForgetsToReset(ExecutorBatch):
    def step(self, actions: Any, *, resets_ended: bool) -> Any:
        nexts, roots = super().step(actions, resets_ended=resets_ended)
        return nexts, nexts if resets_ended else roots


class InventsDone(ExecutorBatch):
    def step(self, actions: Any, *, resets_ended: bool) -> Any:
        nexts, roots = super().step(actions, resets_ended=resets_ended)
        for row in nexts:
            row[("terminated",)] &= False
        return nexts, roots


class StepsTheEnded(ExecutorBatch):
    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.env.engine.allow_steps()

    def step(self, actions: Any, *, resets_ended: bool) -> Any:
        self.env.engine.states.move(self.env.engine.all_ids, Event.IS_ALLOWED)
        return super().step(actions, resets_ended=resets_ended)


class ForgetsItsSteps(CountingEnv):
    def state_dict(self) -> Any:
        return {**super().state_dict(), "num_steps": 0}


VIOLATIONS = [
    (
        1,
        StepsTwice,
        None,
        r"expected 80 calls of env\.step and \d+ of env\.reset for 80 transitions",
    ),
    (1, ResetsItself, None, "The env, or its adapter, steps or resets by itself"),
    (2, CountingEnv, IgnoresMasks, "a reset of nobody changed it"),
    (2, SharesState, None, "Do the envs share state"),
    (3, ResetsItself, None, "The env seems to reset itself in `step`"),
    (3, CountingEnv, ForgetsToReset, "done of a root outlives a reset"),
    (4, CountingEnv, StepsTheEnded, "had ended and were stepped"),
    (5, CountingEnv, InventsDone, "expected done to be terminated | truncated"),
    (6, DependsOnTheProcess, None, "new envs on two workers gave other data"),
    (6, EndsByTheProcess, None, r"expected done .* env 0, step 4"),
    (6, GlobalRandomEnv, None, "Draw all randomness from reset's seed"),
    (6, Remembers, None, "something of an earlier episode outlives the reset"),
    (7, CountingEnv, LosesEnds, "the reset has overwritten the last observation"),
    (
        8,
        LeavesItsSpace,
        None,
        r"expected .* in \[0, 1\], got 2 at \(0, 0\) \(next, env 0, step 1\)",
    ),
    (
        8,
        partial(Diverges, observed=np.nan),
        None,
        r"expected speed without NaN, got nan at \(1,\) \(next, env 0, step",
    ),
    (
        8,
        partial(Diverges, paid=np.nan),
        None,
        r"expected reward finite, got nan at \(0,\) \(next, env 0, step 1",
    ),
    (
        8,
        partial(Diverges, paid=-np.inf),
        None,
        r"expected reward finite, got -inf at \(0,\) .*check_finite=True",
    ),
    (
        9,
        ForgetsItsSteps,
        None,
        r"something that the env's future depends on is not in its state",
    ),
    (7, CountingEnv, WritesMasks, "a reset changed the mask that it was given"),
]


@pytest.mark.parametrize(("rule", "env", "batch", "message"), VIOLATIONS)
def test_found(rule: int, env: Any, batch: Any, message: str) -> None:
    make_batch = None if batch is None else lambda *of: batch(in_this_process(*of).env)
    with pytest.raises(ContractViolation, match=f"rule {rule} is broken.*{message}"):
        Contract(env, num_steps=40, make_batch=make_batch).check(rule)


@pytest.mark.parametrize("rule", Contract.RULES)
def test_contract_fails_without_an_episode_end(rule: int) -> None:
    contract = Contract(partial(CountingEnv, 1000), num_steps=10)
    with pytest.raises(
        ContractViolation,
        match="expected at least one episode end, saw none in 10 steps of 2 envs",
    ):
        contract.check(rule)


class Masked(gymnasium.Env):
    """Allows every second action alone, as its mask says, and refuses the others."""

    observation_space = gymnasium.spaces.Dict(
        action_mask=gymnasium.spaces.Box(0, 1, (6,), np.int8),
        place=gymnasium.spaces.Box(0, 99, (1,)),
    )
    action_space = gymnasium.spaces.Discrete(6)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.place = float(self.np_random.integers(10))
        self.num_steps = 0
        return self.seen(), {}

    def step(self, action: Any) -> Any:
        assert self.seen()["action_mask"][action], "an illegal action"
        self.place += 1 + action
        self.num_steps += 1
        return self.seen(), 0.0, self.num_steps == 5, False, {}

    def seen(self) -> dict[str, np.ndarray]:
        legal = (np.arange(6) + int(self.place)) % 2
        return {
            "action_mask": legal.astype(np.int8),
            "place": np.array([self.place], np.float32),
        }


@pytest.mark.slow
def test_actions_are_those_that_a_mask_allows_also_in_other_processes() -> None:
    check_env_contract(Masked, num_steps=20, together=2)


def test_an_unbounded_observation_may_be_infinite() -> None:
    check_env_contract(partial(Diverges, observed=np.inf), num_steps=20)


def test_a_side_value_is_copied_before_the_reset() -> None:
    check_env_contract(OverwritesText, num_steps=20)


def test_rows_of_a_vector_env_have_side_values() -> None:
    check_env_contract(
        lambda: gymnasium.vector.SyncVectorEnv([nested_spaces] * 3), num_steps=20
    )


def test_an_env_that_breaks_its_spec_is_named() -> None:
    with pytest.raises(
        EnvError,
        match=r"observation expected|writing observation failed: expected int64 \(3,\), got int64 \(2,\)",
    ):
        check_env_contract(lambda: FaultyEnv("wrong_shape", length=5))


def test_an_adapter_that_returns_too_few_values_is_named() -> None:
    class Forgetful(CountingEnv):
        def _observe(self, action: int) -> list[Any]:
            return []

    assert PlainAdapter(Forgetful()).spec.observation
    with pytest.raises(
        EnvError, match="writing observation failed: expected 1 values, got 0"
    ):
        check_env_contract(Forgetful)


def test_an_undetermined_env_is_held_to_the_other_rules() -> None:
    assert check_env_contract(
        GlobalRandomEnv, num_steps=30, is_deterministic=False
    ).num_ends
