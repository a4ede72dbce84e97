"""Pictures of envs: their world view, what they draw, or what one of their agents observes."""

from __future__ import annotations

from typing import Any

import numpy as np
from tensordict import TensorDictBase

from envherd.executor.batched import BatchedEnv
from envherd.shm.specs import EnvSpec, Key


class MediaError(RuntimeError):
    """A picture could not be made: a package is missing, or no env gave a frame."""


class Camera:
    """Takes the pictures of an executor's envs.

    Args:
        env: the executor.
        agent: whose observation is shown; None for the world view, or what the env draws.

    Attributes:
        key: of the pictures in a batch; empty where the env draws them.

    Raises:
        MediaError: agents of these envs observe no pictures, or there are fewer of them.
    """

    def __init__(self, env: BatchedEnv, agent: int | None = None) -> None:
        self._env, self._agent = env, agent
        found = env.spec.metadata.get("frame_key") if agent is None else _agents_key(env.spec, agent)
        self.key: Any = tuple(found) if isinstance(found, list) else found
        self._has_looked = False

    def look(self, td: TensorDictBase, env_ids: list[int] | None = None) -> list[np.ndarray | None]:
        """Return a picture of each env as a batch `[N]` shows it, uint8 `[H, W, 3]`; None where an env has none.

        Args:
            td: the batch.
            env_ids: of these envs alone.

        Raises:
            MediaError: no env has one.
        """
        if self.key:
            rows = range(len(td)) if env_ids is None else env_ids
            seen: list[Any] = [td[row][self.key].numpy(force=True) for row in rows]  # they may differ in shape
        else:
            seen = self._env.ask("render", env_ids)
        if not self._has_looked and all(frame is None for frame in seen):
            raise MediaError(f"drawing failed: {self._env.spec.family} envs like these have no picture of themselves.")
        self._has_looked = True
        return seen if self._agent is None else [frame[self._agent] for frame in seen]


def _agents_key(spec: EnvSpec, agent: int) -> Key:
    for group, shape in spec.groups:
        for leaf in spec.observation:
            is_picture = leaf.dtype == "uint8" and len(leaf.shape) == len(shape) + 3 and leaf.shape[-1] == 3
            if leaf.key[: len(group)] == group and is_picture:
                if agent >= shape[-1]:
                    raise MediaError(f"drawing failed: expected an agent in 0..{shape[-1] - 1}, got {agent}.")
                return leaf.key
    raise MediaError(f"drawing failed: expected an env whose agents observe pictures, got {spec.family} without.")
