"""Small batched simulators in torch that treat ended rows in different ways."""

from collections.abc import Callable
from typing import Any, ClassVar

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict

NUM_ROWS = 4


def recorded(
    make: Callable[..., Any], *args: Any, **kwargs: Any
) -> tuple[Callable[[], Any], list[Any]]:
    """Return a factory of a simulator, and the list to which it adds what it builds, without wrappers."""
    built: list[Any] = []

    def make_env() -> Any:
        env = make(*args, **kwargs)
        built.append(env.unwrapped)
        return env

    return make_env, built


def masked(rows: list[int]) -> TensorDict:
    """Return a request to reset some rows of one simulator."""
    return TensorDict(
        {
            "_reset": torch.tensor([row in rows for row in range(NUM_ROWS)]).view(
                1, -1, 1
            )
        },
        [1, NUM_ROWS],
    )


class Counter(gymnasium.Env[Any, Any]):
    """Rows that count to different lengths (3, 4, 5, ...) and never reset by themselves.

    Observations are `[B, 2]`: episode (counted from the seed), count. The reward is the sum of the action.
    """

    metadata = {"autoreset_mode": "DISABLED"}  # noqa: RUF012  # as Gymnasium has it
    action_width: ClassVar[int] = 2

    def __init__(self, num_envs: int = NUM_ROWS, device: str = "cpu") -> None:
        self.num_envs, self.device = num_envs, torch.device(device)
        self.single_action_space: Any = gymnasium.spaces.Box(
            -1, 1, (self.action_width,), np.float32
        )
        self.lengths = torch.arange(num_envs, device=device) + 3
        self.state = torch.zeros(num_envs, 2, device=device)
        self.num_steps = 0
        self.given: Any = None
        self.masks: list[Any] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        mask = (
            torch.ones(self.num_envs, dtype=torch.bool)
            if options is None
            else options["reset_mask"]
        )
        if seed is not None:
            self.state[:, 0] = seed % 97
        self._begin(mask)
        return self.state.clone(), {}

    def _begin(self, rows: torch.Tensor) -> None:
        self.state[rows, 0] += 1
        self.state[rows, 1] = 0

    def step(self, action: torch.Tensor) -> Any:
        self.given = action
        self.num_steps += 1
        self.state[:, 1] += 1
        truncated = self.state[:, 1] >= self.lengths
        reward = action.sum(-1)
        extras: dict[str, Any] = {"counts": self.state[:, 1].clone()}
        observation = self._end(truncated, extras)
        return observation, reward, torch.zeros_like(truncated), truncated, extras

    def _end(self, truncated: torch.Tensor, extras: dict[str, Any]) -> torch.Tensor:
        del truncated, extras
        return self.state.clone()


class SameStep(Counter):
    """Resets rows in the step in which they end, and publishes their last observations."""

    metadata = {"autoreset_mode": "SAME_STEP"}  # noqa: RUF012  # as Gymnasium has it

    def _end(self, truncated: torch.Tensor, extras: dict[str, Any]) -> torch.Tensor:
        if truncated.any():
            extras["final_obs"] = self.state.clone()
            self._begin(truncated)
        return self.state


class Silent(SameStep):
    """Does not declare when it resets."""

    metadata = {}  # noqa: RUF012  # as Gymnasium has it


class NextStep(Counter):
    """Declares that it resets in the next step."""

    metadata = {"autoreset_mode": "NEXT_STEP"}  # noqa: RUF012  # as Gymnasium has it


class Losing(SameStep):
    """Resets rows and publishes nothing."""

    def _end(self, truncated: torch.Tensor, extras: dict[str, Any]) -> torch.Tensor:
        observation = super()._end(truncated, extras)
        extras.pop("final_obs", None)
        return observation


class Aliasing(SameStep):
    """Publishes its observation buffer itself, which the reset overwrites."""

    def _end(self, truncated: torch.Tensor, extras: dict[str, Any]) -> torch.Tensor:
        observation = super()._end(truncated, extras)
        if truncated.any():
            extras["final_obs"] = self.state
        return observation


class Keeping(Counter):
    """Keeps its actions, and rewards the previous one as well."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[torch.Tensor] = []

    def step(self, action: torch.Tensor) -> Any:
        stepped = super().step(action)
        self.kept.append(action)
        earlier = (
            self.kept[-2].sum(-1) if len(self.kept) > 1 else torch.zeros(self.num_envs)
        )
        return stepped[0], stepped[1] + 10 * earlier, *stepped[2:]


class Indexed(Counter):
    """Takes indices that begin at 1."""

    def __init__(self) -> None:
        super().__init__()
        self.single_action_space = gymnasium.spaces.Discrete(5, start=1)

    def step(self, action: torch.Tensor) -> Any:
        assert action.dtype is torch.int64
        assert int(action.min()) >= 1
        return super().step(action.float().unsqueeze(-1))
