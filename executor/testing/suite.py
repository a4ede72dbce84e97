"""The contract as a class of pytest tests."""

import unittest
from typing import Any, ClassVar

import numpy as np

from envherd.executor.testing.batch import MakeBatch
from envherd.executor.testing.contract import Contract
from envherd.shm.specs import EnvSpec
from envherd.workers.random_values import draw


class PartialResetContract:
    """The contract as pytest tests, one for each rule: subclass it as `Test...`, and define `make_env`.

    Attributes:
        num_steps: see `Contract`.
        seed: see `Contract`.
        is_deterministic: see `Contract`.
        ends_where_it_starts: see `Contract`.
        make_batch: see `Contract`.
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

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Make a test of each rule; pytest calls this."""
        if "rule" in metafunc.fixturenames:
            metafunc.parametrize(
                "rule",
                sorted(Contract.RULES),
                ids=[f"rule_{n}: {Contract.TITLES[n]}" for n in sorted(Contract.RULES)],
            )

    def test_rule(self, rule: int) -> None:
        """Check one rule."""
        if rule == 6 and not self.is_deterministic:
            raise unittest.SkipTest("is_deterministic is False")
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
