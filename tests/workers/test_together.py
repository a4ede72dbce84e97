"""Rule 10: envs that share a process have the data that they have alone."""

import random
from typing import ClassVar

import gymnasium
import numpy as np
import pytest

from envherd.executor.testing import Contract, ContractViolation, check_env_contract
from envherd.workers.testing import CountingEnv, PlainAdapter

CANVAS = np.zeros((4, 4, 3), np.uint8)


class Walk(gymnasium.Env):
    """A well-behaved env that draws a picture."""

    observation_space = gymnasium.spaces.Box(-100, 100, (2,))
    action_space = gymnasium.spaces.Discrete(2)
    render_mode = "rgb_array"

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.observe(), {}

    def step(self, action):
        self.steps += 1
        return self.observe(), float(action), False, self.steps == 7, {}

    def observe(self):
        self.place = self.np_random.uniform(-1, 1, 2).astype("float32")
        return self.place

    def render(self):
        return np.full((4, 4, 3), self.place[0] * 100 + 100, np.uint8)


class ClassAttribute(Walk):
    count: ClassVar[int] = 0

    def observe(self):
        ClassAttribute.count += 1
        return np.full(2, self.count % 90, np.float32)


class GlobalGenerator(Walk):
    def observe(self):
        return np.full(2, random.random(), np.float32)


class OneCanvas(Walk):
    """All envs draw to one canvas; a picture is that of the env that has drawn last."""

    def observe(self):
        place = super().observe()
        CANVAS[:] = int(place[0] * 100 + 100)
        return place

    def render(self):
        return CANVAS


class Unseeded(Walk):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=None, options=options)


@pytest.mark.parametrize(
    ("make_env", "match"),
    [
        (ClassAttribute, r"expected observation .*: with 2 envs .*alone=True"),
        (GlobalGenerator, r"expected observation .*: with 2 envs .*isolate_rng=True"),
        (OneCanvas, r"expected picture .* \(the first reset, env 0\): .*GL context"),
        (Unseeded, r"nothing was proved: the seed does not determine the env"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_state_shared_by_envs_is_named_with_the_remedy(make_env, match):
    with pytest.raises(ContractViolation, match=f"(?s)rule 10 is broken: .*{match}"):
        Contract(make_env, num_steps=20, together=2, is_deterministic=False).check(10)


def test_envs_that_share_nothing_pass():
    report = check_env_contract(Walk, num_steps=20, together=2)
    assert report.rules[-1] == 10
    assert 10 not in check_env_contract(Walk, num_steps=20).rules


def test_the_end_of_a_process_is_reported():
    def make_env():
        import os

        os._exit(5)

    with pytest.raises(ContractViolation, match=r"rule 10 is broken: .*exit code 5"):
        Contract(make_env, together=2).check(10)


class Lonely(PlainAdapter):
    is_alone = True


def test_envs_that_workers_refuse_to_put_together_pass():
    Contract(lambda: Lonely(CountingEnv()), num_steps=5, together=2).check(10)
