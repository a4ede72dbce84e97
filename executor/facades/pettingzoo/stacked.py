"""Present envs of other families whose agents are one stacked group (Melting Pot) as PettingZoo parallel envs.

Guarantees: agents, order and values are those of the env's batches; an agent observes what lies below its group.
All agents act in every step of an episode, and end with it.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from envherd.executor.facades.spaces import (
    Space,
    name_below,
    refuse_unknown,
    single_or_dict,
    space_of,
)
from envherd.shm.specs import EnvSpec, Key
from envherd.workers.adapters import find_adapter
from envherd.workers.adapters.base import Adapter
from envherd.workers.adapters.pettingzoo.adapter import AEC, as_parallel
from envherd.workers.adapters.registry import is_one_of
from envherd.workers.errors import ActionError, SpecError

try:
    from pettingzoo import ParallelEnv
except ModuleNotFoundError:  # the facade of RLlib does without
    ParallelEnv = object

_PARALLEL = "pettingzoo.utils.env.ParallelEnv"


def parallel_env(make_env: Callable[[], Any]) -> Any:
    """Build an env in this process and return it as a PettingZoo parallel env.

    Args:
        make_env: returns a PettingZoo env, or an env of another family whose agents are stacked in one group.

    Raises:
        SpecError: an env without agents, or with agents in several groups; an AEC env that cannot be made parallel.
        FactoryError: no env.
    """
    env = make_env()
    if is_one_of(env, _PARALLEL) or is_one_of(env, AEC):
        return as_parallel(env)
    make_adapter: Callable[[Any], Adapter] = find_adapter(env)
    return StackedParallelEnv(make_adapter(env))


class StackedParallelEnv(ParallelEnv):  # type: ignore[misc]  # mypy is not shown PettingZoo's types
    """A PettingZoo parallel env over an adapter whose agents are one group.

    An agent's observation is a dict by the names of its leaves, or the only leaf itself. Observations are copies.
    `state()` is the first leaf outside the group (Melting Pot: the view of the world, `RGB`).

    Args:
        adapter: of the env.

    Attributes:
        adapter: as passed.
        possible_agents: all agents, in the order in which they are stacked.
        agents: the same during an episode, else empty.

    Raises:
        SpecError: no group of agents, or several; an env that is a batch.
    """

    metadata: dict[str, Any]
    render_mode = "rgb_array"

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        spec = adapter.spec
        group, size = _only_group(spec)
        self.metadata = {
            "name": str(spec.metadata.get("name") or spec.family),
            "render_modes": ["rgb_array"],
            "is_parallelizable": True,
        }
        self.possible_agents = spec.agent_names(group, size)
        self.agents: list[str] = []
        self._observed = {
            name_below(leaf.key, (*group, "observation"), group): index
            for index, leaf in enumerate(spec.observation)
            if leaf.key[: len(group)] == group and not leaf.is_side
        }
        self._acted = {
            name_below(leaf.key, group): space_of(leaf, 1) for leaf in spec.action
        }
        self._state = next(
            (
                i
                for i, leaf in enumerate(spec.observation)
                if leaf.key[: len(group)] != group
            ),
            None,
        )
        seen = {
            name: space_of(spec.observation[index], 1)
            for name, index in self._observed.items()
        }
        self.observation_spaces = {
            agent: single_or_dict(seen) for agent in self.possible_agents
        }
        self.action_spaces = {
            agent: single_or_dict(self._acted) for agent in self.possible_agents
        }
        self._latest: list[Any] = []

    def observation_space(self, agent: str) -> Space:
        """Return an agent's observation space."""
        return self.observation_spaces[agent]

    def action_space(self, agent: str) -> Space:
        """Return an agent's action space."""
        return self.action_spaces[agent]

    def reset(
        self,
        seed: int | None = None,
        options: Mapping[str, Any] | None = None,  # noqa: ARG002  # see the docstring
    ) -> tuple[Any, Any]:
        """Start a new episode and return `(observations, infos)`, dicts by agent.

        Args:
            seed: of the episode; None leaves it to the env.
            options: not used: these envs have none. PettingZoo's own envs ignore what they do not know.
        """
        self.agents = []
        # No agent is there if this raises.
        self._latest = self.adapter.reset(seed)
        self.agents = list(self.possible_agents)
        return self._seen(), {agent: {} for agent in self.agents}

    def step(self, actions: Mapping[str, Any]) -> tuple[Any, Any, Any, Any, Any]:
        """Step once; return observations, rewards, terminations, truncations and infos, dicts by agent.

        Raises:
            ActionError: an agent has no action, or is unknown. The env was not stepped.
        """
        agents = self.possible_agents
        self._latest, rewards, terminated, truncated = self.adapter.step(
            self._stacked(actions)
        )
        paid = np.asarray(rewards[0]).reshape(len(agents), -1)
        if terminated or truncated:
            self.agents = []
        return (
            self._seen(),
            {agent: float(paid[i, 0]) for i, agent in enumerate(agents)},
            dict.fromkeys(agents, bool(terminated)),
            dict.fromkeys(agents, bool(truncated)),
            {agent: {} for agent in agents},
        )

    def state(self) -> np.ndarray:
        """Return a copy of the first leaf outside the group: in Melting Pot, the view of the world."""
        if self._state is None or not self._latest:
            raise NotImplementedError(
                "state() failed: expected an env that shows the world, and that was reset."
            )
        return np.array(self._latest[self._state])

    def render(self) -> np.ndarray | None:
        """Return a picture of the env now, uint8 `[H, W, 3]`, or None where the env cannot draw itself."""
        return self.adapter.render()

    def close(self) -> None:
        """Close the env."""
        self.agents = []
        self.adapter.close()

    def _seen(self) -> dict[str, Any]:
        leaves = {
            name: np.asarray(self._latest[index])
            for name, index in self._observed.items()
        }
        rows = [
            {name: leaf[i].copy() for name, leaf in leaves.items()}
            for i in range(len(self.possible_agents))
        ]
        seen = [next(iter(row.values())) for row in rows] if len(leaves) == 1 else rows
        return dict(zip(self.possible_agents, seen, strict=True))

    def _stacked(self, actions: Mapping[str, Any]) -> list[Any]:
        """Return the actions of all agents as the adapter takes them: one array for each leaf."""
        missing = [agent for agent in self.possible_agents if agent not in actions]
        if missing:
            raise ActionError(
                f"step failed: expected an action of each agent, got none of {missing[0]}. The env was not stepped."
            )
        refuse_unknown(actions, self.possible_agents)
        stacked = []
        leaves = self.adapter.spec.action
        for (name, space), leaf in zip(self._acted.items(), leaves, strict=True):
            dtype = np.dtype(leaf.dtype)
            array = np.asarray(
                [
                    actions[agent] if len(self._acted) == 1 else actions[agent][name]
                    for agent in self.possible_agents
                ]
            )
            # A cast would cut off fractions.
            if dtype.kind in "iu" and array.dtype.kind not in "iu":
                raise ActionError(
                    f"step failed: expected {dtype} actions, got {array.dtype}. The env was not stepped."
                )
            # A row holds indices; those of a space begin at its `start`.
            array = array - getattr(space, "start", 0)
            stacked.append(array.astype(dtype).reshape(leaf.shape))
        return stacked


def _only_group(spec: EnvSpec) -> tuple[Key, int]:
    if (
        len(spec.groups) != 1
        or spec.batch_shape
        or any(len(shape) != 1 for _, shape in spec.groups)
    ):
        raise SpecError(
            f"reading the env failed: expected agents stacked in one group, got batch shape {spec.batch_shape} and "
            f"groups {spec.groups}. Use envs of PettingZoo, or of Melting Pot."
        )
    ((group, (size,)),) = spec.groups
    return group, size
