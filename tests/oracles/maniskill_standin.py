"""A stand-in for ManiSkill, which needs SAPIEN: its published interface over one-line physics.

It follows `mani_skill.envs.sapien_env.BaseEnv` as far as an adapter can see: `num_envs`, `device`,
    `single_action_space`,
`reset(seed, options)` that resets the rows `options["env_idx"]` and returns observations of all, a main generator
seeded once, from which resets draw their seeds, `elapsed_steps`, ends by `info["success"]` and `info["fail"]`, and a
`truncated` that is always False; `TimeLimitWrapper`, which `gymnasium.make` puts around it and which truncates;
`ManiSkillVectorEnv`, which resets rows in the step in which they end and hands over `final_observation`. Written from
that interface; none of its code is here.
"""

from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import VectorEnv

NUM_ROWS = 4


class BaseEnv(gymnasium.Env[Any, Any]):
    """Rows on a line that are pushed to 1; those that leave to the other side have failed."""

    def __init__(
        self, num_envs: int = NUM_ROWS, render_mode: str | None = None
    ) -> None:
        self.render_mode = render_mode
        self.num_envs, self.device = num_envs, torch.device("cpu")
        self.single_action_space: Any = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
        self.elapsed_steps = torch.zeros(num_envs, dtype=torch.int32)
        self._place, self._speed = torch.zeros(num_envs), torch.zeros(num_envs)
        # ManiSkill resets itself once with this seed, to make its spaces.
        self._main_rng = np.random.RandomState(2022)
        self.resets: list[Any] = []

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        options = {} if options is None else options
        self.resets.append(dict(options))
        ids = (
            options["env_idx"]
            if "env_idx" in options
            else torch.arange(self.num_envs, device=self.device)
        )
        if options.get("reconfigure") and len(ids) != self.num_envs:
            raise RuntimeError(
                "Cannot do a partial reset and reconfigure the environment."
            )
        if seed is not None:
            self._main_rng = np.random.RandomState(seed)
        with torch.random.fork_rng():
            torch.manual_seed(int(self._main_rng.randint(2**31)))
            self._place[ids] = torch.rand(len(ids)) * 0.6 - 0.3
            self._speed[ids] = torch.rand(len(ids)) * 0.2 - 0.1
        self.elapsed_steps[ids] = 0
        return self._observe(), {
            "elapsed_steps": self.elapsed_steps,
            "reconfigure": False,
        }

    def step(self, action: torch.Tensor) -> Any:
        self._speed += action[:, 0] * 0.05
        self._place += self._speed
        self.elapsed_steps += 1
        info = {
            "elapsed_steps": self.elapsed_steps,
            "success": self._place > 1,
            "fail": self._place < -1,
        }
        reward = 1 - (1 - self._place).abs()
        never = torch.zeros(self.num_envs, dtype=torch.bool)
        return self._observe(), reward, info["success"] | info["fail"], never, info

    def render(self) -> Any:
        pictures = torch.zeros(self.num_envs, 8, 16, 3, dtype=torch.uint8)
        for row, place in enumerate(self._place.tolist()):
            pictures[row, :, min(15, max(0, int(8 + 7 * place)))] = 255
        return pictures

    def _observe(self) -> torch.Tensor:
        return torch.stack((self._place, self._speed), 1)


class TimeLimitWrapper(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Truncates rows after a number of steps."""

    def __init__(self, env: Any, max_episode_steps: int) -> None:
        super().__init__(env)
        self._max_episode_steps = max_episode_steps

    def step(self, action: Any) -> Any:
        observation, reward, terminated, _, info = self.env.step(action)
        simulator: Any = self.env.unwrapped
        return (
            observation,
            reward,
            terminated,
            simulator.elapsed_steps >= self._max_episode_steps,
            info,
        )


class ManiSkillVectorEnv(VectorEnv[Any, Any, Any]):
    """Wraps one of them as a Gymnasium vector env."""

    def __init__(self, env: Any, *, auto_reset: bool = True) -> None:
        self._env, self.auto_reset = env, auto_reset
        self.num_envs = self.unwrapped.num_envs
        self.single_action_space = self.unwrapped.single_action_space

    @property
    def unwrapped(self) -> Any:
        return self._env.unwrapped

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self._env.reset(seed=seed, options=options)

    def step(self, actions: Any) -> Any:
        observation, reward, terminated, truncated, infos = self._env.step(actions)
        ended = terminated | truncated
        if ended.any() and self.auto_reset:
            final = observation.clone()
            observation, infos = self.reset(
                options={"env_idx": torch.arange(self.num_envs)[ended]}
            )
            infos["final_observation"] = final
            infos["_final_observation"] = ended
        return observation, reward, terminated, truncated, infos


# Adapters are found by these names, without ManiSkill being imported.
BaseEnv.__module__ = "mani_skill.envs.sapien_env"
TimeLimitWrapper.__module__ = "mani_skill.utils.registration"
ManiSkillVectorEnv.__module__ = "mani_skill.vector.wrappers.gymnasium"


def make_maniskill(num_envs: int = NUM_ROWS, render_mode: str | None = None) -> Any:
    """Return what `gymnasium.make(ID, num_envs=...)` returns, with a short time limit."""
    return TimeLimitWrapper(BaseEnv(num_envs, render_mode), 12)


def make_maniskill_vector(num_envs: int = NUM_ROWS, *, auto_reset: bool = True) -> Any:
    """Return the same as a vector env."""
    return ManiSkillVectorEnv(make_maniskill(num_envs), auto_reset=auto_reset)
