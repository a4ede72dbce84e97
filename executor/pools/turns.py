"""Turns: which of an env's two workers serves it, and which episode each of them begins.

A turn is a word of the slab (see `workers.process.ahead`), which both workers read. The word is written before the
attributes here, so after an interrupt `read_again` can update these.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from envherd.workers.process.ahead import pack_turn, unpack_turn


class Turns:
    """The turns of all envs; env `e` has the workers `e` and `N + e`.

    Args:
        words: of the slab.
        worker_of: int `[N]`, kept up to date: the worker that serves each env.
        serving: the same as a list.

    Attributes:
        was_handed: bool `[N]`, whether the latest reset has gone to the other worker.
        is_stale: bool `[N]`, whether the next reset is not the one that was prepared.
        is_changed: bool `[N]`, whether instances may have changed since they were built.
        episodes: by worker id, number of episodes begun since it was started.
        num_ahead: resets whose episode was ready when it was requested.
        num_missed: all other resets.
    """

    def __init__(self, words: Mapping[str, np.ndarray], worker_of: np.ndarray, serving: list[int]) -> None:
        self._words, self._worker_of, self._serving = words, worker_of, serving
        self._num_envs = num_envs = len(serving)
        self.was_handed = np.zeros(num_envs, bool)
        self.is_stale = np.ones(num_envs, bool)
        self.is_changed = np.zeros(num_envs, bool)
        self.episodes = [0] * (2 * num_envs)
        self.num_ahead = self.num_missed = 0
        self.forget_episodes()

    def server_of(self, env_id: int) -> int:
        """Return the worker that serves an env."""
        return self._serving[env_id]

    def spare_of(self, env_id: int) -> int:
        """Return the other worker of an env."""
        server = self._serving[env_id]
        return server + self._num_envs if server < self._num_envs else server - self._num_envs

    def is_spare(self, worker_id: int) -> bool:
        """Return whether a worker serves no env."""
        return self._serving[worker_id % self._num_envs] != worker_id

    def begin_episode(self, env_id: int, *, is_handed: bool) -> None:
        """Give the next episode of an env to one of its workers; the other prepares the one after it.

        Args:
            env_id: of an env that owes no answer.
            is_handed: whether its spare begins the episode, and serves the env from then on.
        """
        episode = int(self._words["episode"][env_id])
        self.was_handed[env_id] = is_handed
        server = self.spare_of(env_id) if is_handed else self._serving[env_id]
        if self._words["ready"][server] == episode + 1:
            self.num_ahead += 1
        else:
            self.num_missed += 1
        self.is_stale[env_id] = False
        self.episodes[server] += 1
        self._words["turn"][env_id] = pack_turn(server, episode + 1)
        self.note_server(env_id, server)

    def give_back(self, env_id: int) -> None:
        """Return a handed-over episode to the worker that served before."""
        other = self.spare_of(env_id)
        _, episode = unpack_turn(int(self._words["turn"][env_id]))
        assert episode is not None
        self._words["episode"][env_id] = episode - 1  # the other worker may have counted it
        self._words["turn"][env_id] = pack_turn(other, episode)
        self.note_server(env_id, other)

    def swap(self, env_id: int) -> None:
        """Make an env's spare serve it, and prepare no episode."""
        spare = self.spare_of(env_id)
        self._words["turn"][env_id] = pack_turn(spare, None)
        self.note_server(env_id, spare)

    def forget_episodes(self) -> None:
        """Prepare no episode before the next one has begun."""
        self.is_stale[:] = True
        for env_id, server in enumerate(self._serving):
            self._words["turn"][env_id] = pack_turn(server, None)

    def note_replaced(self, worker_id: int) -> None:
        """Note that a worker has a successor, which has begun no episode."""
        self._words["ready"][worker_id] = self.episodes[worker_id] = 0

    def note_server(self, env_id: int, worker_id: int) -> None:
        """Note which worker an env's turn names."""
        self._worker_of[env_id] = self._serving[env_id] = worker_id

    def read_again(self) -> None:
        """Read the serving workers from the turns again: an interrupt may have come after a turn was written."""
        for env_id, turn in enumerate(self._words["turn"].tolist()):
            self.note_server(env_id, unpack_turn(turn)[0])
