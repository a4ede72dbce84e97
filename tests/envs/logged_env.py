"""An env that keeps what it gets; this module imports little, because workers import it."""

import gymnasium
import numpy as np


class Logged(gymnasium.Env):
    """Keeps the bytes of the actions that it gets in an episode, which has five steps."""

    def __init__(self, kind: str = "index") -> None:
        box = gymnasium.spaces.Box(-1, 1, (3,), np.float32)
        index = gymnasium.spaces.Discrete(5)
        both = gymnasium.spaces.Dict(
            push=box, turn=index, pair=gymnasium.spaces.MultiDiscrete([3, 4])
        )
        self.action_space = {"index": index, "box": box, "dict": both}[kind]
        self.observation_space = gymnasium.spaces.Box(0, 9, (2,), np.float32)
        self.log: list[bytes] = []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.log = []
        return np.zeros(2, np.float32), {}

    def step(self, action):
        parts = (
            [action[key] for key in self.action_space]
            if isinstance(action, dict)
            else [action]
        )
        self.log.append(b"".join(np.asarray(part).tobytes() for part in parts))
        return np.full(2, len(self.log), np.float32), 0.0, len(self.log) == 5, False, {}

    def logged(self):
        return list(self.log)
