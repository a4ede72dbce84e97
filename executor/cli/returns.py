"""Returns of the agents of a batch of envs, summed while a command steps them."""

import numpy as np
from tensordict import TensorDictBase

from envherd.shm.specs import EnvSpec


class Returns:
    """Sums rewards; one column per agent, one row per env (or per row of envs that are batches).

    Args:
        spec: of each env.
        num_envs: N.

    Attributes:
        agents: names of the columns.
        running: float64 `[rows, agents]`, returns of the current episodes.
        num_episodes: number of episodes that ended, without those that the loss of a worker interrupted.
    """

    def __init__(self, spec: EnvSpec, num_envs: int) -> None:
        self.agents = spec.reward_names()
        self.running = np.zeros(
            (num_envs * int(np.prod(spec.batch_shape, dtype=int)), len(self.agents))
        )
        self.num_episodes = 0
        self._total = np.zeros(len(self.agents))
        self._keys = [leaf.key for leaf in spec.reward]

    def add(self, following: TensorDictBase) -> np.ndarray:
        """Count one step of all envs.

        Args:
            following: `next` of the step.

        Returns:
            float64 `[rows, agents]`, the returns of the episodes, this step included.
        """
        rows = len(self.running)
        rewards = [
            following[key].numpy(force=True).reshape(rows, -1) for key in self._keys
        ]
        returns = self.running + np.concatenate(rewards, axis=1)
        ended = following["done"].numpy(force=True).reshape(rows)
        counted = ended
        if (interrupted := following.get("interrupted", None)) is not None:
            counted = ended & ~interrupted.numpy(force=True).reshape(rows)
        self._total += returns[counted].sum(axis=0)
        self.num_episodes += int(counted.sum())
        self.running = np.where(ended[:, None], 0.0, returns)
        return returns

    def means(self) -> dict[str, float]:
        """Return the mean return of each agent over the episodes that ended; if none did, over the unfinished ones."""
        means = (
            self._total / self.num_episodes
            if self.num_episodes
            else self.running.mean(axis=0)
        )
        return dict(zip(self.agents, means.tolist(), strict=True))
