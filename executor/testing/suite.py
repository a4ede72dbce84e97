"""The contract as a class of pytest tests."""

from __future__ import annotations

import unittest
from typing import Any, ClassVar

import numpy as np

from envherd.executor.testing.batch import MakeBatch
from envherd.executor.testing.contract import Contract
from envherd.shm.specs import EnvSpec
from envherd.workers.random_values import draw


class PartialResetContract:
    """The contract as pytest tests: subclass it (the name starting with `Test`) and define `make_env`.

    Attributes:
        num_steps, seed, is_deterministic, ends_where_it_starts, make_batch: see `Contract`.
    """

    num_steps: ClassVar[int] = 100
    seed: ClassVar[int] = 0
    is_deterministic: ClassVar[bool] = True
    ends_where_it_starts: ClassVar[bool] = False
    make_batch: ClassVar[MakeBatch | None] = None

    _contract: ClassVar[Contract | None] = None

    def make_env(self) -> Any:
        """Build one env."""
        raise NotImplementedError(f"{type(self).__name__} must define make_env(self)")

    def draw_action(self, spec: EnvSpec, rng: np.random.Generator) -> list[Any]:
        """Return one env's action, values aligned with `spec.action` and `spec.state`; override to end episodes.

        If it is not overridden, actions are also those that the env's action mask allows.
        """
        return [draw(leaf, rng) for leaf in (*spec.action, *spec.state)]

    def test_rule_1_one_step_is_one_transition(self) -> None:
        """A step is one `env.step`, and never a reset."""
        self._check(1)

    def test_rule_2_a_reset_touches_its_own_envs(self) -> None:
        """A reset touches exactly the envs in its mask."""
        self._check(2)

    def test_rule_3_the_last_observation_is_kept(self) -> None:
        """`next` ends an episode, and the root behind it begins one."""
        self._check(3)

    def test_rule_4_an_ended_env_is_not_stepped(self) -> None:
        """Checked where an executor runs the envs."""
        self._check(4)

    def test_rule_5_done_is_terminated_or_truncated(self) -> None:
        """The three flags agree."""
        self._check(5)

    def test_rule_6_seeds_decide(self) -> None:
        """The same seed and actions give the same data."""
        if not self.is_deterministic:
            raise unittest.SkipTest("is_deterministic is False")
        self._check(6)

    def test_rule_7_what_was_handed_out_stays(self) -> None:
        """No later step or reset changes it."""
        self._check(7)

    def test_rule_8_observations_and_rewards_are_within_bounds(self) -> None:
        """The bounds of the observation space; rewards are finite."""
        self._check(8)

    def test_rule_9_what_is_restored_continues(self) -> None:
        """Only for envs that can be saved."""
        self._check(9)

    def _check(self, rule: int) -> None:
        cls = type(self)
        if "_contract" not in cls.__dict__:
            cls._contract = Contract(
                self.make_env,
                num_steps=self.num_steps,
                seed=self.seed,
                actions=None
                if cls.draw_action is PartialResetContract.draw_action
                else self.draw_action,
                is_deterministic=self.is_deterministic,
                ends_where_it_starts=self.ends_where_it_starts,
                make_batch=cls.make_batch,
            )
        assert cls._contract is not None
        cls._contract.check(rule)
