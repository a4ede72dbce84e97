"""IsaacLab's own env classes over one-line physics, without Isaac Sim (see `isaacsim_stub`).

Rows are positions on a line, pushed by the action; an episode ends beyond `LIMIT` or after `MAX_LENGTH` steps. The
env's `ledger` records every step and reset.
"""

from tests.oracles import isaacsim_stub

isaacsim_stub.with_isaaclab()

import warnings
from typing import Any

import torch

warnings.simplefilter("ignore")  # IsaacLab uses deprecated APIs, also during its import
from isaaclab.envs import (
    DirectRLEnv,
    DirectRLEnvCfg,
    ManagerBasedRLEnv,
    ManagerBasedRLEnvCfg,
    mdp,
)
from isaaclab.managers import (
    ActionTerm,
    ActionTermCfg,
    EventTermCfg,
    ObservationGroupCfg,
    ObservationTermCfg,
    RewardTermCfg,
    TerminationTermCfg,
)
from isaaclab.scene import InteractiveSceneCfg
from isaaclab.sim import SimulationCfg
from isaaclab.utils import configclass

LIMIT = 1.0
MAX_LENGTH = 7
_DT = 0.01


class Line:
    """Places and speeds of all rows, and what happened to them."""

    def __init__(self, num_envs: int, device: str) -> None:
        self.place = torch.zeros(num_envs, device=device)
        self.speed = torch.zeros(num_envs, device=device)
        #: For each step, the state after it; for each reset, its rows.
        self.steps: list[torch.Tensor] = []
        self.resets: list[list[int]] = []

    def push(self, force: torch.Tensor) -> None:
        self.speed += 0.05 * force
        self.place += self.speed
        self.steps.append(self.state())

    def state(self) -> torch.Tensor:
        """Return a new `[B, 2]`: place, speed."""
        return torch.stack([self.place, self.speed], 1)

    def put(self, env_ids: torch.Tensor) -> None:
        self.resets.append(env_ids.tolist())
        self.place[env_ids] = torch.rand(len(env_ids)) * 0.6 - 0.3
        self.speed[env_ids] = torch.rand(len(env_ids)) * 0.2 - 0.1

    def is_out(self) -> torch.Tensor:
        return self.place.abs() > LIMIT


@configclass
class DirectCfg(DirectRLEnvCfg):
    """Of four rows."""

    sim: SimulationCfg = SimulationCfg(dt=_DT, device="cpu", save_logs_to_file=False)
    scene: InteractiveSceneCfg = InteractiveSceneCfg(num_envs=4, env_spacing=1.0)
    decimation: int = 1
    episode_length_s: float = MAX_LENGTH * _DT
    observation_space: int = 2
    state_space: int = 0
    action_space: int = 1


class Direct(DirectRLEnv):
    """The direct workflow."""

    def _setup_scene(self) -> None:
        self.line = Line(self.num_envs, self.device)

    def _pre_physics_step(self, actions: torch.Tensor) -> None:
        self.actions = actions.clone()

    def _apply_action(self) -> None:
        self.line.push(self.actions[:, 0])

    def _get_observations(self) -> dict[str, torch.Tensor]:
        return {"policy": self.line.state()}

    def _get_rewards(self) -> torch.Tensor:
        return 1.0 - self.line.place.abs()

    def _get_dones(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.line.is_out(), self.episode_length_buf >= self.max_episode_length

    def _reset_idx(self, env_ids: Any) -> None:
        super()._reset_idx(env_ids)
        self.line.put(env_ids)


class Push(ActionTerm):
    """One force."""

    def __init__(self, cfg: Any, env: Any) -> None:
        super().__init__(cfg, env)
        env.line = Line(self.num_envs, self.device)
        self._raw = torch.zeros(self.num_envs, 1, device=self.device)

    @property
    def action_dim(self) -> int:
        return 1

    @property
    def raw_actions(self) -> torch.Tensor:
        return self._raw

    @property
    def processed_actions(self) -> torch.Tensor:
        return self._raw

    def process_actions(self, actions: torch.Tensor) -> None:
        self._raw[:] = actions

    def apply_actions(self) -> None:
        self._env.line.push(self._raw[:, 0])


@configclass
class PushCfg(ActionTermCfg):
    """Of no asset: the scene is empty, and has a terrain that is None."""

    class_type: type = Push
    asset_name: str = "terrain"


@configclass
class ActionsCfg:
    """The one action."""

    push: PushCfg = PushCfg()


def state(env: Any) -> torch.Tensor:
    return env.line.state()


def put(env: Any, env_ids: torch.Tensor) -> None:
    env.line.put(env_ids)


@configclass
class PolicyCfg(ObservationGroupCfg):
    """One term."""

    state: ObservationTermCfg = ObservationTermCfg(func=state)


@configclass
class ObservationsCfg:
    """The one group."""

    policy: PolicyCfg = PolicyCfg()


@configclass
class RewardsCfg:
    """A reward near the origin."""

    near: RewardTermCfg = RewardTermCfg(
        func=lambda env: 1.0 - env.line.place.abs(), weight=1.0 / _DT
    )


@configclass
class TerminationsCfg:
    """IsaacLab's own time limit, and one of place."""

    late: TerminationTermCfg = TerminationTermCfg(func=mdp.time_out, time_out=True)
    out: TerminationTermCfg = TerminationTermCfg(func=lambda env: env.line.is_out())


@configclass
class EventsCfg:
    """Rows are put somewhere at a reset."""

    put: EventTermCfg = EventTermCfg(func=put, mode="reset")


@configclass
class ManagedCfg(ManagerBasedRLEnvCfg):
    """Of four rows."""

    sim: SimulationCfg = SimulationCfg(dt=_DT, device="cpu", save_logs_to_file=False)
    scene: InteractiveSceneCfg = InteractiveSceneCfg(num_envs=4, env_spacing=1.0)
    decimation: int = 1
    episode_length_s: float = MAX_LENGTH * _DT
    actions: ActionsCfg = ActionsCfg()
    observations: ObservationsCfg = ObservationsCfg()
    rewards: RewardsCfg = RewardsCfg()
    terminations: TerminationsCfg = TerminationsCfg()
    events: EventsCfg = EventsCfg()


def make_direct() -> Direct:
    return Direct(DirectCfg())


def make_managed() -> ManagerBasedRLEnv:
    return ManagerBasedRLEnv(ManagedCfg())
