"""RoboHive's `MujocoEnv` over our own model, because RoboHive's models need separately downloaded meshes.

RoboHive 0.7 names Gymnasium 0.29 and MuJoCo 3.1, and runs with newer ones: `pip install --no-deps robohive
sk-video`, and also gitpython, termcolor and flatten_dict.
"""

from __future__ import annotations

import os
import tempfile
from collections import OrderedDict
from typing import Any
from unittest import mock

import gymnasium
import numpy as np

_exists = os.path.exists
# RoboHive asks for the folder of its meshes when it is imported.
with mock.patch("os.path.exists", lambda path: str(path).endswith("simhive") or _exists(path)):
    from robohive.envs.env_base import MujocoEnv

_MODEL = """
<mujoco>
  <option timestep="0.01"/>
  <worldbody>
    <body>
      <joint name="rail" type="slide" axis="1 0 0" range="-1 1" limited="true"/>
      <geom size="0.1" mass="1"/>
    </body>
  </worldbody>
  <actuator>
    <motor joint="rail" gear="20" ctrlrange="-1 1" ctrllimited="true"/>
  </actuator>
</mujoco>
"""
MAX_STEPS = 50
LIMIT = 0.6


class Cart(MujocoEnv):
    """A cart that is to stay in the middle of a rail; an episode ends near an end of the rail."""

    def __init__(self) -> None:
        gymnasium.utils.EzPickle.__init__(self)
        with tempfile.NamedTemporaryFile("w", suffix=".xml") as file:
            file.write(_MODEL)
            file.flush()
            super().__init__(model_path=file.name, env_credits="")
        self._setup(obs_keys=["qpos", "qvel"], weighted_reward_keys={"near": 1.0}, frame_skip=2)

    def get_obs_dict(self, sim: Any) -> dict[str, np.ndarray]:
        return {"time": np.array([sim.data.time]), "qpos": sim.data.qpos.copy(), "qvel": sim.data.qvel.copy()}

    def get_reward_dict(self, obs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        away = np.abs(obs["qpos"]).sum(axis=-1)
        rewards = {"near": 1 - away, "sparse": 1 - away, "dense": 1 - away}
        return OrderedDict(**rewards, solved=away < 0.01, done=away > LIMIT)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if seed is not None:
            self.seed(seed)
        return super().reset(reset_qpos=self.np_random.uniform(-0.3, 0.3, 1))


def make_cart() -> gymnasium.Env[Any, Any]:
    """Build it, with a limit of `MAX_STEPS`."""
    return gymnasium.wrappers.TimeLimit(Cart(), MAX_STEPS)
