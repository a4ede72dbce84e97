"""An env that takes RLlib's context, in a module that does not import RLlib."""

from __future__ import annotations

import sys
from typing import Any

import gymnasium
import numpy as np


class Lonely(gymnasium.Env):
    """Shows its context, and whether its process has imported RLlib."""

    observation_space = gymnasium.spaces.Box(0, 1, (1,))
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, context: Any) -> None:
        self.own = context
        self.context = {**context, "worker_index": context.worker_index}

    def knows_rllib(self) -> bool:
        return "ray.rllib" in sys.modules

    def overridden(self) -> dict[str, Any]:
        """Call a method of the context."""
        context = self.own.copy_with_overrides(worker_index=4)
        return {**context, "worker_index": context.worker_index}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.zeros(1, np.float32), 0.0, False, False, {}


def make_lonely(context: Any) -> Lonely:
    return Lonely(context)
