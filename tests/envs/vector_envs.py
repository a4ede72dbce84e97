"""Vector envs with self-checking data: every transition shows whether it happened."""

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

SPACE = gym.spaces.Box(-np.inf, np.inf, (4,), np.float32)


class TellingEnv(gym.Env):
    """Observes (number of the episode, its length, step, sum of actions); terminates or is truncated."""

    observation_space = SPACE
    action_space = gym.spaces.Discrete(5)

    def __init__(self, *, reuses_buffer: bool = False, offset: int = 0):
        self.reuses_buffer = reuses_buffer
        self.episode = offset
        self.options: list = []
        self.buffer = np.zeros(4, np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.options.append(options)
        self.episode += 1
        self.length = int(self.np_random.integers(2, 10))
        self.t = self.total = 0
        return self._observation(), {}

    def step(self, action):
        self.t += 1
        self.total += int(action)
        is_over = self.t >= self.length
        return (
            self._observation(),
            float(action) + self.t,
            is_over and self.length % 2 == 0,
            is_over,
            {"t": self.t},
        )

    def _observation(self):
        if not self.reuses_buffer:
            self.buffer = np.zeros(4, np.float32)
        self.buffer[:] = self.episode, self.length, self.t, self.total
        return self.buffer


def invalid_transitions(data) -> int:
    """Count the transitions of a rollout `[N, T, n]` of `TellingEnv`s that did not happen or have a wrong end."""
    here, there = data["observation"].numpy(), data["next", "observation"].numpy()
    actions, reward = data["action"].numpy(), data["next", "reward"].numpy()[..., 0]
    ended = here.dtype.type(0) < (there[..., 2] >= there[..., 1])
    terminated = ended & (there[..., 1] % 2 == 0)
    is_valid = (
        (here[..., :2] == there[..., :2]).all(-1)
        & (there[..., 2] == here[..., 2] + 1)
        & (there[..., 3] == here[..., 3] + actions)
        & (reward == actions + there[..., 2])
        & (data["next", "done"].numpy()[..., 0] == ended)
        & (data["next", "truncated"].numpy()[..., 0] == ended)
        & (data["next", "terminated"].numpy()[..., 0] == terminated)
        & (here[..., 2] < here[..., 1])
    )
    wrong = int((~is_valid).sum())
    before, after = there[:, :-1], here[:, 1:]
    goes_on = (before == after).all(-1)
    begins = (
        (after[..., 0] == before[..., 0] + 1)
        & (after[..., 2] == 0)
        & (after[..., 3] == 0)
    )
    return wrong + int((~np.where(ended[:, :-1], begins, goes_on)).sum())


class LoopVectorEnv(VectorEnv):
    """A vector env by hand: one array for all observations, written in place, and no copies of it.

    Args:
        num_envs: rows.
        mode: its autoreset mode.
        says_mode: whether its metadata declare the mode.
        knows_masks: whether it accepts `reset_mask`.
        loses_ends: in SAME_STEP mode, hand over the array in which the next episode has begun.
        make_row: makes the env of a row, which observes four numbers.
    """

    def __init__(
        self,
        num_envs=3,
        mode=AutoresetMode.NEXT_STEP,
        *,
        says_mode=True,
        knows_masks=True,
        loses_ends=False,
        make_row=TellingEnv,
    ):
        self.num_envs, self.mode = num_envs, mode
        self.metadata = {"autoreset_mode": mode} if says_mode else {}
        self.knows_masks, self.loses_ends = knows_masks, loses_ends
        self.envs = [make_row() for _ in range(num_envs)]
        self.single_observation_space, self.single_action_space = (
            SPACE,
            self.envs[0].action_space,
        )
        self.observation_space = gym.vector.utils.batch_space(SPACE, num_envs)
        self.action_space = gym.vector.utils.batch_space(
            self.single_action_space, num_envs
        )
        self.rows = np.zeros((num_envs, 4), np.float32)
        self.owes_reset = np.zeros(num_envs, bool)

    def reset(self, *, seed=None, options=None):
        mask = (options or {}).get("reset_mask") if self.knows_masks else None
        rows = range(self.num_envs) if mask is None else np.flatnonzero(mask)
        for row in rows:
            self.rows[row], _ = self.envs[row].reset(
                seed=None if seed is None else seed + int(row)
            )
            self.owes_reset[row] = False
        return self.rows, {}

    def step(self, actions):
        reward, flags, infos = (
            np.zeros(self.num_envs),
            np.zeros((2, self.num_envs), bool),
            {},
        )
        for row, env in enumerate(self.envs):
            if self.owes_reset[row] and self.mode == AutoresetMode.NEXT_STEP:
                self.rows[row], _ = env.reset()
                self.owes_reset[row] = False
                continue
            assert not self.owes_reset[row], "a row that ended was stepped"
            self.rows[row], reward[row], flags[0, row], flags[1, row], _ = env.step(
                actions[row]
            )
            if not flags[:, row].any():
                continue
            if self.mode == AutoresetMode.SAME_STEP:
                final = infos.setdefault(
                    "final_obs",
                    self.rows if self.loses_ends else np.zeros_like(self.rows),
                )
                final[row] = self.rows[row]
                self.rows[row], _ = env.reset()
            else:
                self.owes_reset[row] = True
        return self.rows, reward, flags[0], flags[1], infos
