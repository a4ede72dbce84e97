"""A stand-in for IsaacLab, which needs a GPU and Isaac Sim: its published interface over one-line physics.

It follows `isaaclab.envs.DirectRLEnv` and `ManagerBasedRLEnv` in all that an adapter can see: the order of things
in `step` (physics, counters, ends, rewards, resets of the rows that ended through `_reset_idx`, then observations),
tensors that are returned and written again in place, `extras` as one permanent dict, `reset_buf`, `reset_terminated`,
`reset_time_outs`, `episode_length_buf`, `common_step_counter`, `cfg.compute_final_obs`, `cfg.autoreset_mode`,
observation noise, `reset` of direct envs without and of manager-based ones with `env_ids`, observation groups with
histories, and one simulation context in a process. Written from IsaacLab's documentation and interface; none of its
code is here.
"""

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import gymnasium
import numpy as np
import torch

LIMIT = 1.0


@dataclass
class Cfg:
    """The settings that both kinds read."""

    num_envs: int = 4
    max_length: int = 7
    # None: of IsaacLab 2, which has no such setting.
    compute_final_obs: bool | None = None
    # Of IsaacLab 3, whose manager-based envs have DISABLED too.
    autoreset_mode: str = "SAME_STEP"
    # As IsaacLab 3 does for some simulators, without a call of `_reset_idx`.
    resets_by_mask: bool = False
    reuses_buffers: bool = True
    history_length: int = 0
    num_discrete: int = 0
    resets_too_many: bool = False
    # The size of the noise that direct envs add in their step.
    observation_noise_model: float = 0.0


class SimulationContext:
    """The simulator: one in a process."""

    _instance: ClassVar[Any] = None

    def __init__(self) -> None:
        if SimulationContext._instance is not None:
            raise RuntimeError(
                "Simulation context already exists. Cannot create a new one."
            )
        SimulationContext._instance = self

    def forward(self) -> None:
        """Nothing is deferred here."""

    @classmethod
    def clear_instance(cls) -> None:
        cls._instance = None


class Scene:
    """The rows: a place and a speed on a line."""

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self.place = torch.zeros(num_envs)
        self.speed = torch.zeros(num_envs)

    def reset(self, env_ids: torch.Tensor) -> None:
        self.place[env_ids] = torch.rand(len(env_ids)) * 0.6 - 0.3
        self.speed[env_ids] = torch.rand(len(env_ids)) * 0.2 - 0.1

    def write_data_to_sim(self) -> None:
        """Nothing is deferred here."""


class _BatchedEnv(gymnasium.Env[Any, Any]):
    """The base of both kinds."""

    device = "cpu"

    def __init__(self, cfg: Cfg | None = None) -> None:
        self.cfg = cfg = cfg or Cfg()
        if cfg.compute_final_obs is not None:  # of IsaacLab 3
            self.metadata = {
                **self.metadata,
                "autoreset_mode": gymnasium.vector.AutoresetMode[cfg.autoreset_mode],
            }
        self.sim = SimulationContext()
        self.scene = Scene(cfg.num_envs)
        self.extras: dict[str, Any] = {}
        self.common_step_counter = 0
        self.episode_length_buf = torch.zeros(cfg.num_envs, dtype=torch.long)
        self.reset_terminated = torch.zeros(cfg.num_envs, dtype=torch.bool)
        self.reset_time_outs = torch.zeros_like(self.reset_terminated)
        self.reward_buf = torch.zeros(cfg.num_envs)
        self.previous_actions = self.actions = torch.zeros(cfg.num_envs, 1)
        if cfg.num_discrete:
            self.single_action_space: Any = gymnasium.spaces.Discrete(cfg.num_discrete)
        else:
            self.single_action_space = gymnasium.spaces.Box(
                -math.inf, math.inf, (1,), np.float32
            )

    @property
    def num_envs(self) -> int:
        return self.scene.num_envs

    def seed(self, seed: int = -1) -> int:
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        return seed

    def _advance(self, action: torch.Tensor) -> None:
        if tuple(action.shape) != (self.num_envs, 1):
            raise ValueError(
                f"expected actions of shape {(self.num_envs, 1)}, got {tuple(action.shape)}"
            )
        self.given = action
        self.previous_actions = self.actions
        self.actions = action.clone()
        force = self.actions[:, 0].float() * 0.05
        self.scene.speed += (
            force + (self.actions - self.previous_actions)[:, 0].float() * 0.01
        )
        self.scene.place += self.scene.speed
        self.episode_length_buf += 1
        self.common_step_counter += 1
        self.reset_terminated[:] = self.scene.place.abs() > LIMIT
        self.reset_time_outs[:] = self.episode_length_buf >= self.cfg.max_length
        self.reset_buf = self.reset_terminated | self.reset_time_outs
        self.reward_buf[:] = 1.0 - self.scene.place.abs()

    def state(self) -> torch.Tensor:
        """Return `[B, 4]`: place, speed, 0, steps made in the episode."""
        place = self.scene.place
        return torch.stack(
            (
                place,
                self.scene.speed,
                torch.zeros_like(place),
                self.episode_length_buf.float(),
            ),
            1,
        )

    def ids_to_reset(self) -> torch.Tensor:
        resets = (
            self.reset_buf
            if self.cfg.autoreset_mode == "SAME_STEP"
            else torch.zeros_like(self.reset_buf)
        )
        ids = resets.nonzero(as_tuple=False).squeeze(-1)
        if self.cfg.resets_too_many and len(ids):
            return torch.arange(self.num_envs)
        return ids

    def _reset_idx(self, env_ids: torch.Tensor) -> None:
        self._reset_rows(env_ids)

    def _reset_rows(self, env_ids: torch.Tensor) -> None:
        self.scene.reset(env_ids)
        self.actions = self.actions.clone()
        self.actions[env_ids] = 0
        self.episode_length_buf[env_ids] = 0
        self.extras["log"] = {"Episode_Reward/place": self.scene.place[env_ids].mean()}

    def close(self) -> None:
        self.sim.clear_instance()


class DirectRLEnv(_BatchedEnv):
    """Observations from `_get_observations`, noise added by the step; `reset` knows no `env_ids`."""

    def __init__(self, cfg: Cfg | None = None) -> None:
        super().__init__(cfg)
        self._buffer = torch.zeros(self.num_envs, 4)

    def _observation_noise_model(self, data: torch.Tensor) -> torch.Tensor:
        return data + self.cfg.observation_noise_model * torch.randn_like(data)

    def _get_observations(self) -> dict[str, torch.Tensor]:
        if self.cfg.reuses_buffers:
            self._buffer[:] = self.state()
            return {"policy": self._buffer, "critic": self._buffer[:, :2]}
        return {"policy": self.state(), "critic": self.state()[:, :2]}

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            self.seed(seed)
        self._reset_idx(torch.arange(self.num_envs, dtype=torch.int32))
        self.scene.write_data_to_sim()
        self.sim.forward()
        return self._get_observations(), self.extras

    def step(self, action: torch.Tensor) -> Any:
        self._advance(action)
        ids = self.ids_to_reset().int()
        if len(ids) > 0:
            if self.cfg.compute_final_obs:
                self.extras["final_obs"] = self._noised(self._get_observations())
            (self._reset_rows if self.cfg.resets_by_mask else self._reset_idx)(ids)
        self.obs_buf = self._noised(self._get_observations())
        return (
            self.obs_buf,
            self.reward_buf,
            self.reset_terminated,
            self.reset_time_outs,
            self.extras,
        )

    def _noised(self, observations: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if self.cfg.observation_noise_model:
            observations["policy"] = self._observation_noise_model(
                observations["policy"]
            )
        return observations


class CircularBuffer:
    """The latest values of one observation term: oldest first, filled with the first one after a reset."""

    def __init__(self, max_len: int, batch_size: int) -> None:
        self.max_length = max_len
        self._num_pushes = torch.zeros(batch_size, dtype=torch.long)
        self._buffer: Any = None

    @property
    def buffer(self) -> torch.Tensor:
        return self._buffer.transpose(0, 1)

    def reset(self, batch_ids: torch.Tensor) -> None:
        self._num_pushes[batch_ids] = 0
        if self._buffer is not None:
            self._buffer[:, batch_ids] = 0.0

    def append(self, data: torch.Tensor) -> None:
        if self._buffer is None:
            self._buffer = data.new_zeros((self.max_length, *data.shape))
        self._buffer[:-1] = self._buffer[1:].clone()
        self._buffer[-1] = data
        is_first = self._num_pushes == 0
        self._buffer[:, is_first] = data[is_first]
        self._num_pushes += 1


class ObservationManager:
    """Two groups: `policy`, one tensor with a history if the cfg says so, and `critic`, a dict of terms."""

    def __init__(self, env: Any) -> None:
        self._env = env
        length = env.cfg.history_length
        histories = {"state": CircularBuffer(length, env.num_envs)} if length else {}
        self._group_obs_term_history_buffer = {"policy": histories, "critic": {}}

    def compute(self, update_history: bool = False) -> dict[str, Any]:  # noqa: FBT001, FBT002  # as IsaacLab has it
        state = self._env.state()
        history = self._group_obs_term_history_buffer["policy"].get("state")
        policy = state
        if history is not None:
            if update_history or history._buffer is None:
                history.append(state)
            policy = history.buffer.reshape(self._env.num_envs, -1)
        length = (
            self._env.episode_length_buf
            if self._env.cfg.reuses_buffers
            else self._env.episode_length_buf.clone()
        )
        return {
            "policy": policy,
            "critic": {"place": state[:, :1].clone(), "length": length},
        }

    def reset(self, env_ids: torch.Tensor) -> None:
        for history in self._group_obs_term_history_buffer["policy"].values():
            history.reset(env_ids)


class ManagerBasedRLEnv(_BatchedEnv):
    """Observations from a manager, with histories; `reset` takes `env_ids`."""

    def __init__(self, cfg: Cfg | None = None) -> None:
        super().__init__(cfg)
        self.observation_manager = ObservationManager(self)

    def reset(
        self, seed: int | None = None, env_ids: Any = None, options: Any = None
    ) -> Any:
        if env_ids is None:
            env_ids = torch.arange(self.num_envs)
        if seed is not None:
            self.seed(seed)
        self._reset_idx(env_ids)
        self.scene.write_data_to_sim()
        self.sim.forward()
        self.obs_buf = self.observation_manager.compute(update_history=True)
        return self.obs_buf, self.extras

    def _reset_rows(self, env_ids: torch.Tensor) -> None:
        self.observation_manager.reset(env_ids)
        super()._reset_rows(env_ids)

    def step(self, action: torch.Tensor) -> Any:
        self._advance(action)
        ids = self.ids_to_reset()
        if len(ids) > 0:
            if self.cfg.compute_final_obs:
                self.extras["final_obs"] = self.observation_manager.compute()
            (self._reset_rows if self.cfg.resets_by_mask else self._reset_idx)(ids)
        self.obs_buf = self.observation_manager.compute(update_history=True)
        return (
            self.obs_buf,
            self.reward_buf,
            self.reset_terminated,
            self.reset_time_outs,
            self.extras,
        )


class DirectMARLEnv(_BatchedEnv):
    """Several agents, which are not served."""

    possible_agents: ClassVar[list[str]] = ["cart", "pole"]


def multi_agent_to_single_agent() -> Any:
    """Return what IsaacLab's function of this name makes of several agents."""
    converted = make_direct()
    converted.env = SimpleNamespace(possible_agents=DirectMARLEnv.possible_agents)
    return converted


# Adapters are found by these names, without IsaacLab being imported.
for _cls, _module in (
    (DirectRLEnv, "direct_rl_env"),
    (ManagerBasedRLEnv, "manager_based_rl_env"),
    (DirectMARLEnv, "direct_marl_env"),
):
    _cls.__module__ = f"isaaclab.envs.{_module}"


def make_direct(**cfg: Any) -> Any:
    return DirectRLEnv(Cfg(**cfg))


def make_managed(**cfg: Any) -> Any:
    return ManagerBasedRLEnv(Cfg(**cfg))


def make_wrapped(**cfg: Any) -> Any:
    """Return the direct env as `gymnasium.make` wraps it."""
    return gymnasium.wrappers.OrderEnforcing(DirectRLEnv(Cfg(**cfg)))


def forget_simulator() -> None:
    """Let another simulator be built in this process."""
    SimulationContext.clear_instance()
