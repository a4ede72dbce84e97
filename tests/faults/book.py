"""A book of `SerialEnv`'s rows, in which every row of an executor whose workers are killed is looked up.

A row is identified by its env, its episode (every episode has a different seed) and its step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from envherd.executor import SerialEnv
from envherd.workers.testing import CountingEnv

NUM_ENVS, NUM_EPISODES = 5, 150
Row = tuple[int, int, int]


def action_of(row: list[int]) -> int:
    """Return the action for an observation, so that the same row always has the same successor."""
    return (row[0] + 3 * row[1]) % 5


class Book:
    """The episodes of `SerialEnv`, by their seeds."""

    def __init__(self, root_seed: int) -> None:
        self.episode_of: list[dict[int, int]] = [{} for _ in range(NUM_ENVS)]
        self.successor: dict[tuple[int, Row], tuple[Row, float, bool, bool]] = {}
        with SerialEnv(NUM_ENVS, CountingEnv, seed=root_seed) as env:
            for episode in range(NUM_EPISODES):
                root = env.reset()
                for env_id, row in enumerate(root["observation"].tolist()):
                    self.episode_of[env_id][row[0]] = episode
            env.set_seed(root_seed)
            self._follow(env)

    def _follow(self, env: Any, num_steps: int = 6 * 40) -> None:
        root = env.reset()
        for _ in range(num_steps):
            td, after = env.step_and_maybe_reset(act(root))
            now = td["next"]
            for env_id in range(NUM_ENVS):
                key = (env_id, tuple(root["observation"][env_id].tolist()))
                self.successor[key] = (
                    tuple(now["observation"][env_id].tolist()),
                    float(now["reward"][env_id]),
                    bool(now["terminated"][env_id]),
                    bool(now["truncated"][env_id]),
                )
            root = after


def act(td: Any) -> Any:
    rows = td["observation"].reshape(-1, 3).tolist()
    return td.set("action", torch.tensor([action_of(row) for row in rows]).view(td.batch_size))


class Checked:
    """An executor whose workers are killed; every row is looked up in the book."""

    def __init__(self, env: Any, book: Book) -> None:
        self.env = env
        self.book = book
        self.at: list[Any] = [None] * NUM_ENVS
        self.latest = [-1] * NUM_ENVS
        self.num_compared = self.num_interrupted = 0

    def begin(self, root: Any, env_ids: Any = range(NUM_ENVS)) -> None:
        """Check roots: each equals its env's last row, or begins a later episode than any before."""
        for env_id, row, done in zip(
            env_ids, root["observation"].tolist(), root["done"].flatten().tolist(), strict=True
        ):
            if row != self.at[env_id] and not done:
                assert row[1:] == [0, -1], f"env {env_id} was at {self.at[env_id]} and is at {row}"
                episode = self.book.episode_of[env_id][row[0]]
                assert episode > self.latest[env_id], f"env {env_id} repeats episode {episode}"
                self.latest[env_id] = episode
            self.at[env_id] = row

    def follow(self, td: Any, env_id: int) -> None:
        """Take one transition."""
        before, now = td["observation"].tolist(), td["next"]
        assert before == self.at[env_id], f"env {env_id} was at {self.at[env_id]}, the row says {before}"
        after = now["observation"].tolist()
        got = (tuple(after), float(now["reward"]), bool(now["terminated"]), bool(now["truncated"]))
        if now["interrupted"].item():
            assert got == (tuple(before), 0.0, False, True), (
                f"env {env_id} was interrupted after {before} and says {got}"
            )
            self.num_interrupted += 1
        else:
            expected = self.book.successor.get((env_id, tuple(before)))
            if expected is None:
                assert after == [before[0], before[1] + 1, action_of(before)]
            else:
                assert got == expected, f"env {env_id} after {before}: expected {expected}, got {got}"
                self.num_compared += 1
        self.at[env_id] = after

    def play(self, deed: str) -> None:
        """Apply one operation while all envs are alive."""
        env = self.env
        root = env.current()
        ended = [i for i in range(NUM_ENVS) if env._engine.states.needs_reset[i]]
        if ended or deed == "reset":
            mask = torch.zeros(NUM_ENVS, dtype=torch.bool)
            mask[ended or [0, NUM_ENVS - 1]] = True
            root = env.reset(TensorDict({"_reset": mask}, [NUM_ENVS]))
        self.begin(root)
        if root["done"].any():
            return  # other envs of a worker that died in that reset: the next operation resets them
        getattr(self, "_" + deed)(root)

    def _reset(self, _: Any) -> None: ...

    def _fused(self, root: Any) -> None:
        for _ in range(4):
            td, after = self.env.step_and_maybe_reset(act(root))
            self._take(td)
            self.begin(after)
            root = after

    def _step(self, root: Any) -> None:
        self._take(self.env.step(act(root)))

    def _take(self, td: Any) -> None:
        for env_id in range(NUM_ENVS):
            self.follow(td[env_id], env_id)

    def _rollout(self, root: Any) -> None:
        data = self.env.rollout(8, act, auto_reset=False, break_when_any_done=False)
        for time in range(8):
            if time:
                self.begin(data[:, time])
            self._take(data[:, time])
        self.begin(self.env.current())

    def _sent(self, root: Any) -> None:
        self.env.send(act(root))
        left = np.full(NUM_ENVS, 3)
        while left.any():
            td = self.env.recv(1)
            env_id = int(td["env_ids"])
            self.follow(td[0], env_id)
            left[env_id] -= 1
            now = self.env.current([env_id])
            if self.env._engine.states.needs_reset[env_id]:
                left[env_id] = 0  # another env of a lost worker, after its answer had arrived
                self.at[env_id] = now["observation"][0].tolist()
                continue
            self.begin(now, [env_id])
            if left[env_id]:
                self.env.send(act(now), [env_id])
