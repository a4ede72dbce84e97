"""Envs driven by hand according to their own documentation, as the reference for the executor's data.

A `Plain` knows nothing of adapters. It returns the results of its env's resets and steps under the executor's keys;
missing keys are not compared.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from envherd.shm.specs import Key

Values = dict[Key, Any]
#: (observation, rewards, terminated, truncated)
Result = tuple[Values, Values, Any, Any]
MakeEnv = Callable[[], Any]


class Plain(Protocol):
    """One env, driven by hand."""

    def reset(self, seed: int, mask: np.ndarray | None = None) -> Values:
        """Start an episode from a seed (of the rows in `mask`, where the env is itself a batch)."""

    def step(self, action: Mapping[Key, np.ndarray]) -> Result:
        """Make one step with the executor's action, by key."""

    def close(self) -> None:
        """Close the env."""


class PlainGymnasium:
    """`gymnasium.Env`: `reset(seed=)`, five values."""

    def __init__(self, make_env: MakeEnv) -> None:
        self.env = make_env()

    def reset(self, seed: int | None, mask: np.ndarray | None = None) -> Values:
        observation, _ = self.env.reset(seed=seed)
        return self._observed(observation)

    def step(self, action: Mapping[Key, np.ndarray]) -> Result:
        observation, reward, terminated, truncated, _ = self.env.step(
            self._native(self.env.action_space, action)
        )
        return self._observed(observation), {("reward",): reward}, terminated, truncated

    def close(self) -> None:
        self.env.close()

    def _observed(self, observation: Any) -> Values:
        from gymnasium import spaces

        is_dict = isinstance(self.env.observation_space, spaces.Dict)
        return dict(_leaves(observation, () if is_dict else ("observation",)))

    def _native(
        self, space: Any, action: Mapping[Key, np.ndarray], key: Key = ("action",)
    ) -> Any:
        from gymnasium import spaces

        if isinstance(space, spaces.Tuple):
            return tuple(
                self._native(sub, action, (*key, str(i)))
                for i, sub in enumerate(space.spaces)
            )
        if isinstance(space, spaces.Dict):
            return {
                name: self._native(sub, action, (*key, name))
                for name, sub in space.spaces.items()
            }
        if isinstance(space, spaces.Discrete):
            return int(action[key]) + int(space.start)
        return action[key]


class PlainDmEnv:
    """dm_env, which takes seeds only when an env is built: a new env for every episode.

    Args:
        make_env: called with the seed.
    """

    def __init__(self, make_env: Callable[[int], Any]) -> None:
        self._make_env = make_env
        self.env: Any = None

    def reset(self, seed: int, mask: np.ndarray | None = None) -> Values:
        self.close()
        self.env = self._make_env(seed)
        return self._observed(self.env.reset().observation)

    def step(self, action: Mapping[Key, np.ndarray]) -> Result:
        spec = self.env.action_spec()
        native: Any = action.get(("action",))
        if native is None:
            native = {
                name: action["action", name].reshape(leaf.shape)
                for name, leaf in spec.items()
            }
        timestep = self.env.step(native)
        terminated = timestep.last() and timestep.discount == 0
        return (
            self._observed(timestep.observation),
            {("reward",): timestep.reward},
            terminated,
            timestep.last() and not terminated,
        )

    def close(self) -> None:
        if self.env is not None:
            self.env.close()

    def _observed(self, observation: Any) -> Values:
        return {(name,): value for name, value in observation.items()}


class PlainPettingZoo:
    """A parallel env whose agents all stay to the end and have equal spaces: one stacked group."""

    def __init__(self, make_env: MakeEnv, group: str) -> None:
        self.env, self.group = make_env(), group

    def reset(self, seed: int, mask: np.ndarray | None = None) -> Values:
        observations, _ = self.env.reset(seed=seed)
        return self._stacked("observation", observations)

    def step(self, action: Mapping[Key, np.ndarray]) -> Result:
        actions = dict(
            zip(
                self.env.possible_agents,
                action[self.group, "action"].reshape(-1).tolist(),
                strict=True,
            )
        )
        observations, rewards, terminations, truncations, _ = self.env.step(actions)
        has_ended, has_terminated = not self.env.agents, all(terminations.values())
        values = (
            self._stacked("observation", observations),
            self._stacked("reward", rewards),
        )
        assert any(truncations.values()) or not has_ended or has_terminated
        return *values, has_ended and has_terminated, has_ended and not has_terminated

    def close(self) -> None:
        self.env.close()

    def _stacked(self, name: str, by_agent: Mapping[str, Any]) -> Values:
        return {
            (self.group, name): np.stack(
                [by_agent[agent] for agent in self.env.possible_agents]
            )
        }


class PlainTorchRL:
    """A TorchRL env over a Gymnasium one."""

    def __init__(self, make_env: MakeEnv) -> None:
        self.env = make_env()
        self._root: Any = None

    def reset(self, seed: int, mask: np.ndarray | None = None) -> Values:
        self._root = self.env.reset(seed=seed)
        return _of_tensordict(self._root)

    def step(self, action: Mapping[Key, np.ndarray]) -> Result:
        import torch

        following = self.env.step(
            self._root.clone().set("action", torch.from_numpy(action["action",]))
        )["next"]
        self._root = following.exclude("reward")
        values = _of_tensordict(following)
        reward: Values = {("reward",): values.pop(("reward",))}
        return (
            values,
            reward,
            following["terminated"].numpy(),
            following["truncated"].numpy(),
        )

    def close(self) -> None:
        self.env.close()


class PlainMeltingPot:
    """A substrate, seeded through its episode builder; truncated after a number of steps."""

    def __init__(self, factory: Any, max_steps: int) -> None:
        from envherd.workers.adapters.meltingpot.adapter import Episodes

        self.env = factory()
        self._episodes = Episodes(self.env)
        self._max_steps, self._num_steps = max_steps, 0

    def reset(self, seed: int, mask: np.ndarray | None = None) -> Values:
        self._num_steps = 0
        self._episodes.seed_next(seed)
        return self._observed(self.env.reset().observation)

    def step(self, action: Mapping[Key, np.ndarray]) -> Result:
        timestep = self.env.step(action["agents", "action"].tolist())
        self._num_steps += 1
        is_cut = self._num_steps == self._max_steps and not timestep.last()
        rewards: Values = {("agents", "reward"): np.stack(timestep.reward)}
        return self._observed(timestep.observation), rewards, timestep.last(), is_cut

    def close(self) -> None:
        self.env.close()

    def _observed(self, observations: list[dict[str, Any]]) -> Values:
        views = ("RGB", "INVENTORY")
        values: Values = {
            ("agents", "observation", v): np.stack([seen[v] for seen in observations])
            for v in views
        }
        return {("RGB",): observations[0]["WORLD.RGB"], **values}


def _leaves(value: Any, key: Key) -> list[tuple[Key, Any]]:
    if isinstance(value, Mapping):
        return [
            leaf
            for name, item in value.items()
            for leaf in _leaves(item, (*key, str(name)))
        ]
    if isinstance(value, tuple):
        return [
            leaf
            for i, item in enumerate(value)
            for leaf in _leaves(item, (*key, str(i)))
        ]
    return [(key, value)]


def _of_tensordict(td: Any) -> Values:
    flat = td.flatten_keys("\0")
    is_flag = {"done", "terminated", "truncated", "action", "_reset"}
    return {
        tuple(k.split("\0")): v.numpy()
        for k, v in flat.items()
        if k.split("\0")[-1] not in is_flag
    }
