"""ManiSkill's interface: rows are reset by `options["env_idx"]`, and none is reset twice."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from envherd.executor import SerialEnv
from envherd.workers.errors import EnvError
from tests.envs import torch_simulators as simulators
from tests.envs.torch_simulators import masked, recorded
from tests.oracles.maniskill_standin import make_maniskill, make_maniskill_vector


@pytest.mark.parametrize(
    "make", [make_maniskill, partial(make_maniskill_vector, auto_reset=False)]
)
def test_rows_are_reset_by_their_ids(make):
    make_env, built = recorded(make)
    with SerialEnv(1, make_env, seed=0) as env:
        assert env.specs[0].family == "maniskill"
        assert env.specs[0].metadata["resets_itself"] is False
        env.reset()
        td = env.step(env.rand_action(env.current()))["next"]
        root = env.reset(masked([1, 3]))
        ids = built[0].resets[-1]["env_idx"]
        assert (ids.tolist(), ids.dtype) == ([1, 3], torch.int64)
        assert torch.equal(root["observation"][0, [0, 2]], td["observation"][0, [0, 2]])
        assert (root["observation"][0, [1, 3]] != td["observation"][0, [1, 3]]).all()
        assert built[0].elapsed_steps.tolist() == [1, 0, 1, 0]


def test_callers_reset_options_are_kept_with_env_ids():
    make_env, built = recorded(make_maniskill)
    options = {"difficulty": 3}
    with SerialEnv(1, make_env, seed=0) as env:
        env.reset(options=options)
        env.reset(masked([0]), options=options)
        assert [sorted(given) for given in built[0].resets[-2:]] == [
            ["difficulty"],
            ["difficulty", "env_idx"],
        ]
        with pytest.raises(EnvError, match="partial reset and reconfigure"):
            env.reset(masked([0]), options={"reconfigure": True})
    assert options == {"difficulty": 3}


def test_any_simulator_whose_reset_says_so_is_given_ids():
    class Indexed(simulators.Counter):
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            ids = (options or {}).get("env_idx", torch.arange(self.num_envs))
            self.masks.append(ids.tolist())
            self._begin(ids)
            return self.state.clone(), {}

    class Further(Indexed):
        def reset(self, **kwargs: Any) -> Any:
            return super().reset(**kwargs)

    built: list[Any] = []
    with SerialEnv(1, lambda: built.append(Further()) or built[-1], seed=0) as env:
        data = env.rollout(12, break_when_any_done=False)
    assert built[0].masks[2:5] == [[0], [1], [2]]
    for row, length in enumerate((3, 4, 5, 6)):
        assert data["observation"][0, :, row, 1].tolist() == [
            step % length for step in range(12)
        ]


def test_rows_make_one_picture():
    with SerialEnv(1, partial(make_maniskill, render_mode="rgb_array"), seed=0) as env:
        env.rollout(2)
        (picture,) = env.render()
    assert picture.dtype == np.uint8
    assert picture.shape == (16, 32, 3)
