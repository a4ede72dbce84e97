"""Running an executor as a training loop would, with random actions: synchronously, first-K, or in two groups."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from tensordict import TensorDictBase

from envherd.executor.batched import BatchedEnv
from envherd.executor.sizing.modes import Mode

#: Batches of random actions that are drawn beforehand and used in turn.
_NUM_DRAWN = 16


class Driver:
    """Steps an executor in one of the modes.

    Args:
        env: just made.
        mode: see `modes.Mode`.
        policy_s: seconds to wait before each batch of actions, as for a policy on a GPU.
    """

    def __init__(self, env: BatchedEnv, mode: Mode, policy_s: float = 0.0) -> None:
        self._env = env
        self._policy_s = policy_s
        self._keys = [leaf.key for leaf in (*env.action_spec, *env.spec.state)]
        self._root = env.reset()
        self._has_masks = any(leaf.key[-1] == "action_mask" for leaf in env.observation_spec)
        self._drawn = [env.rand_action().select(*self._keys) for _ in range(_NUM_DRAWN)]
        self._turn = 0
        self._half = max(1, env.num_envs // 2)
        self._groups = [np.arange(env.num_envs)[start::2] for start in (0, 1)]  # each has envs of every worker
        self._batch: Callable[[], int] = self._step
        self._has_groups = False
        self._begin(mode)

    def _begin(self, mode: Mode) -> None:
        self._has_groups = mode == "two-groups"
        self._batch = self._step if mode == "sync" or self._env.num_envs < 2 else self._exchange
        if self._batch == self._exchange:
            self._env.send(self._act(self._root, None))

    def run(self, seconds: float, least: int = 1, episode_steps: int = 1) -> tuple[int, float]:
        """Go on for so long; return `(env-steps, seconds)`.

        Args:
            seconds: at least.
            least: batches at least.
            episode_steps: of envs whose episodes all have as many: whole episodes are run, since those that begin
                together are reset together, and a span with one reset more or less says nothing.
        """
        count, steps, whole = 0, 0, episode_steps * self._env.num_envs if episode_steps > 1 else 1
        began = time.perf_counter()
        while count < least or time.perf_counter() - began < seconds or steps % whole:
            steps += self._batch()
            count += 1
        return steps, time.perf_counter() - began

    def run_some(self, env_ids: np.ndarray, seconds: float, least: int = 1) -> tuple[int, float]:
        """Step some of the envs, synchronously, while the others rest; see `run`. In mode "sync" only."""
        count = 0
        began = time.perf_counter()
        while count < least or time.perf_counter() - began < seconds:
            self._env.send(self._act(self._env.current(env_ids), env_ids), env_ids)
            self._env.recv(env_ids=env_ids, with_root=False)
            count += 1
        spent_s = time.perf_counter() - began
        self._root = self._env.current()
        return count * len(env_ids), spent_s

    def switch(self, mode: Mode) -> None:
        """Go on in another mode, from where the envs are."""
        if self._batch == self._exchange:
            self._env.recv(with_root=False)
            self._root = self._env.current()
        self._begin(mode)

    def restart(self) -> None:
        """Reset all envs, and go on from there: episodes that begin together end together."""
        self.finish()
        self._root = self._env.reset()
        if self._batch == self._exchange:
            self._env.send(self._act(self._root, None))

    def finish(self) -> None:
        """Receive what is still out."""
        if self._batch == self._exchange:
            self._env.recv(with_root=False)

    def _act(self, td: TensorDictBase, env_ids: Any) -> TensorDictBase:
        """Set actions, after the policy's time."""
        if self._policy_s:
            time.sleep(self._policy_s)
        if self._has_masks:
            return self._env.rand_action(td)
        drawn = self._drawn[self._turn % _NUM_DRAWN]
        self._turn += 1
        return td.update(drawn if env_ids is None else drawn[env_ids])

    def _step(self) -> int:
        _, self._root = self._env.step_and_maybe_reset(self._act(self._root, None))
        return self._env.num_envs

    def _exchange(self) -> int:
        env = self._env
        if self._has_groups:
            group = self._groups[0]
            self._groups.reverse()
            received = env.recv(env_ids=group, with_root=False)
        else:
            received = env.recv(min_envs=self._half, with_root=False)
        env_ids: Any = received["env_ids"]
        root = env.current(env_ids)
        env.send(self._act(root, env_ids), env_ids)
        return len(env_ids)


def median_batch_s(driver: Driver, span_s: float, least: int) -> float:
    """Return the median seconds of a batch."""
    times: list[float] = []
    end = time.perf_counter() + span_s
    while len(times) < least or time.perf_counter() < end:
        times.append(driver.run(0.0)[1])
    return float(np.median(times))
