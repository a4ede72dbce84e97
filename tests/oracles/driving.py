"""The checks of the matrix: an executor against plain loops over the same envs, transition by transition."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from envherd.shm.specs import EnvSpec, Key, LeafSpec
from envherd.workers import seeding
from tests.contracts.family import Family
from tests.oracles.plain_loops import Plain, Values

Row = dict[Key, Any]


class Mirror:
    """One env of the executor, driven by hand with the same seeds and actions."""

    def __init__(
        self, plain: Plain, spec: EnvSpec, root_seed: int, env_id: int
    ) -> None:
        self._plain, self._spec, self._root_seed, self._env_id = (
            plain,
            spec,
            root_seed,
            env_id,
        )
        self._leaves = {leaf.key: leaf for leaf in (*spec.observation, *spec.reward)}
        self.episode = 0
        self.root: Values = {}
        self.done: np.ndarray = np.ones((*spec.batch_shape, 1), bool)
        self.num_rows = self.done.size

    def reset(self, mask: np.ndarray | None = None) -> None:
        """Start the next episode (of the rows in `mask`)."""
        seed = seeding.episode_seed(self._root_seed, self._env_id, self.episode)
        self.episode += 1
        inner = None if mask is None or mask.all() else mask
        self.root = _copied(self._plain.reset(seed, inner))
        self.done = np.zeros_like(self.done) if inner is None else self.done & ~inner

    def is_at(self, row: Mapping[Key, Any]) -> bool:
        """Return whether a root row equals this env's present root."""
        return self._agrees(self.root, row) and np.array_equal(row["done",], self.done)

    def makes(self, action: Row, following: Mapping[Key, Any]) -> bool:
        """Step this env, and return whether the result equals a `next` row exactly."""
        observation, reward, terminated, truncated = self._plain.step(action)
        self.root = _copied(observation)
        flags = [
            np.resize(np.asarray(flag, bool), self.done.shape)
            for flag in (terminated, truncated)
        ]
        self.done = flags[0] | flags[1]
        is_same = self._agrees(self.root, following) and self._agrees(reward, following)
        wanted = zip(
            (("terminated",), ("truncated",), ("done",)),
            (*flags, self.done),
            strict=True,
        )
        return is_same and all(
            np.array_equal(following[key], flag) for key, flag in wanted
        )

    def close(self) -> None:
        """Close the env."""
        self._plain.close()

    def _agrees(self, values: Values, row: Mapping[Key, Any]) -> bool:
        assert values
        return all(
            _equal(self._leaves[key], value, row[key])
            for key, value in values.items()
            if key in row
        )


class Driven:
    """An executor's batch, and a mirror for each of its envs."""

    def __init__(self, family: Family, env: Any, root_seed: int) -> None:
        assert family.plain is not None
        self.env, self.spec = env, env.spec
        self.mirrors = [
            Mirror(family.plain(), env.spec, root_seed, i) for i in range(env.num_envs)
        ]

    def close(self) -> None:
        """Close the mirrors."""
        for mirror in self.mirrors:
            mirror.close()

    def roll(self, num_steps: int) -> tuple[int, int]:
        """Collect a rollout; return the number of its transitions, and of those that no env has made from that root.

        A step of an env with several rows counts as that many transitions; if one is wrong, all are.
        """
        data = self.env.rollout(num_steps, break_when_any_done=False)
        num_invalid = 0
        for env_id, mirror in enumerate(self.mirrors):
            rows = data[env_id]
            parts = (
                _rows(rows, self.spec, "root"),
                _rows(rows, self.spec, "action"),
                _rows(rows["next"], self.spec, "next"),
            )
            mirror.reset()
            for step, (root, action, following) in enumerate(zip(*parts, strict=True)):
                was_there = mirror.is_at(root)
                was_made = mirror.makes(action, following)
                num_invalid += 0 if was_there and was_made else mirror.num_rows
                # The next rollout begins by resetting all envs.
                if mirror.done.any() and step + 1 < data.shape[1]:
                    mirror.reset(mirror.done)
        return data.numel(), num_invalid

    def step_and_reset_at_random(self, num_steps: int, rng: np.random.Generator) -> int:
        """Step by hand; reset ended envs and random others by two masks, then none; return how many were reset."""
        env, num_resets = self.env, 0
        self._check_roots(self._reset_all())
        for _ in range(num_steps):
            td = env.step(env.rand_action(env.current()))
            self._check_step(td, range(env.num_envs))
            mask = np.stack([mirror.done for mirror in self.mirrors])
            mask |= rng.random(mask.shape) < rng.choice([0.0, 0.2, 0.5])
            first = mask & (rng.random(mask.shape) < rng.choice([0.5, 1.0]))
            for part in (first, mask & ~first):
                root = env.reset(
                    TensorDict(
                        {"_reset": torch.from_numpy(part.copy())}, env.batch_size
                    )
                )
                for mirror, rows in zip(self.mirrors, part, strict=True):
                    if rows.any():
                        num_resets += int(rows.sum())
                        mirror.reset(rows)
                self._check_roots(root)
        return num_resets

    def step_fused(self, num_steps: int) -> int:
        """Step and reset in one round trip; return the transitions."""
        env = self.env
        root = self._reset_all()
        for _ in range(num_steps):
            self._check_roots(root)
            td, root = env.step_and_maybe_reset(env.rand_action(root))
            self._check_step(td, range(env.num_envs))
            self._reset_ended(range(env.num_envs))
        return num_steps * env.batch_size.numel()

    def exchange(self, num_transitions: int) -> int:
        """Send envs and receive them one by one as they become ready; return the number of transitions."""
        env, count = self.env, 0
        self._reset_all()
        env.send(env.rand_action(env.current()))
        while count < num_transitions:
            td = env.recv(1)
            ids = _ids_of(td).tolist()
            self._check_roots(td, ids)
            self._check_step(td, ids)
            self._reset_ended(ids)
            count += td.numel()
            root = env.current(ids)
            self._check_roots(root, ids)
            env.send(_random(env, root), ids)
        env.recv()
        return count

    def _reset_all(self) -> TensorDictBase:
        for mirror in self.mirrors:
            mirror.reset()
        root: TensorDictBase = self.env.reset()
        return root

    def _check_roots(self, td: TensorDictBase, env_ids: Any = None) -> None:
        ids = range(self.env.num_envs) if env_ids is None else env_ids
        for env_id, row in zip(ids, _rows(td, self.spec, "root"), strict=True):
            assert self.mirrors[env_id].is_at(row), (
                f"env {env_id} is not where a plain loop over it is"
            )

    def _check_step(self, td: TensorDictBase, env_ids: Any) -> None:
        actions, nexts = (
            _rows(td, self.spec, "action"),
            _rows(td["next"], self.spec, "next"),
        )
        for env_id, action, following in zip(env_ids, actions, nexts, strict=True):
            assert self.mirrors[env_id].makes(action, following), (
                f"env {env_id} did not make this step in a plain loop"
            )

    def _reset_ended(self, env_ids: Any) -> None:
        for env_id in env_ids:
            if self.mirrors[env_id].done.any():
                self.mirrors[env_id].reset(self.mirrors[env_id].done)


def _random(env: Any, root: TensorDictBase) -> TensorDictBase:
    """Return a root with random actions for its envs, drawn for a whole batch."""
    whole = env.rand_action(env.current() if root.shape[0] == env.num_envs else None)
    for leaf in env.action_spec:
        root.set(leaf.key, whole[leaf.key][_ids_of(root)])
    return root


def _ids_of(td: TensorDictBase) -> torch.Tensor:
    """Return the env ids of a batch `[k]`; each row of an env that is a batch has the id."""
    return td["env_ids"].reshape(td.shape[0], -1)[:, 0]


def _leaves_of(spec: EnvSpec, part: str) -> tuple[LeafSpec, ...]:
    if part == "action":
        return spec.action
    rewards = spec.reward if part == "next" else ()
    return (*spec.observation, *spec.done[:3], *rewards)


def _rows(td: TensorDictBase, spec: EnvSpec, part: str) -> list[Row]:
    arrays = {
        leaf.key: _plain(td.get(leaf.key), leaf) for leaf in _leaves_of(spec, part)
    }
    return [
        {key: array[i] for key, array in arrays.items()} for i in range(td.shape[0])
    ]


def _plain(value: Any, leaf: LeafSpec) -> Any:
    return value.tolist() if leaf.is_side else value.numpy()


def _copied(values: Values) -> Values:
    return {
        key: np.array(value) if isinstance(value, np.ndarray) else value
        for key, value in values.items()
    }


def _equal(leaf: LeafSpec, value: Any, stored: Any) -> bool:
    if leaf.is_side:
        return bool(value == stored)
    array = np.asarray(value)
    if array.size != math.prod(leaf.shape):
        return False
    return (
        array.reshape(leaf.shape).astype(leaf.dtype).tobytes()
        == np.ascontiguousarray(stored).tobytes()
    )
