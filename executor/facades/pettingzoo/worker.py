"""Run PettingZoo envs for the PettingZoo facade: a row has one part per agent, with the env's own values.

`PettingZooAdapter` groups and stacks agents for TensorDicts. This adapter keeps every agent's values separate, so
agents with different spaces need no groups.

Guarantees:
- rewards are float64; observations keep the dtype and shape of the agent's space, action masks included.
- an env gets the actions of the agents in `env.agents` only.
- an absent agent's part of a row is zeros; see `pettingzoo/adapter.py` for the flags.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import batch_space

from envherd.executor.facades.gymnasium.worker import NativeEnv, NativeFactory
from envherd.shm.specs import Binary, EnvSpec, Key, LeafSpec, done_leaves
from envherd.workers.adapters.common.tree import builder, flattener, leaf_specs
from envherd.workers.adapters.gymnasium.spaces import Space, native_tree
from envherd.workers.adapters.named import PettingZooFactory
from envherd.workers.adapters.pettingzoo.adapter import (
    ParallelAdapter,
    Place,
    acting_agents,
    possible_agents,
)
from envherd.workers.build import check_factory
from envherd.workers.sending.pickling import dumps

#: Keys of the rows: which agents act next, bool `[A]`; their rewards, float64 `[A]`; their flags.
ACTIVE: Key = ("active",)
REWARD: Key = ("reward",)
AGENTS: Key = ("agents",)


class HostedParallelEnv(NativeEnv):
    """A PettingZoo parallel env and the requests that its facade may make."""

    env: Any
    #: The env's methods that return an agent's spaces.
    _spaces_of = ("observation_space", "action_space")

    def spaces(self) -> tuple[spaces.Dict, spaces.Dict]:
        """Return the spaces of all agents, as dicts by agent in the order of `possible_agents`."""
        agents: list[Any] = possible_agents(self.env)

        def by_agent(space_of: Callable[[Any], Any]) -> spaces.Dict:
            # `spaces.Dict` sorts the keys of any other dict.
            return spaces.Dict(OrderedDict((one, space_of(one)) for one in agents))

        observed, acted = self._spaces_of
        return (
            by_agent(getattr(self.env, observed)),
            by_agent(getattr(self.env, acted)),
        )

    def ask(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
        """Return an attribute of the env, pickled; if it is a method, its result."""
        value = getattr(self.env, name)
        return dumps(value(*args, **kwargs) if callable(value) else value)

    def assign(self, attributes: Mapping[str, Any]) -> None:
        """Set attributes of the env, values by name."""
        for name, value in attributes.items():
            setattr(self.env, name, value)


class ParallelFactory(NativeFactory):
    """A picklable factory of `ParallelNativeAdapter`s over a user's factory of envs."""

    def __call__(self) -> "ParallelNativeAdapter":
        """Build the env."""
        # `rllib` does without PettingZoo.
        from envherd.executor.facades.pettingzoo.stacked import parallel_env

        return ParallelNativeAdapter(HostedParallelEnv(parallel_env(self.env_fn)))


class Seat(Place):
    """One agent's part of a row.

    Attributes:
        values: leaves of its latest observation, zeros where it has none.
    """

    def __init__(
        self,
        agent: Any,
        space: Space,
        reward: np.ndarray,
        flags: np.ndarray,
    ) -> None:
        super().__init__(agent, reward, flags)
        tree = native_tree(space, "")
        self._flatten = flattener(tree, None)
        self._absent = [
            # Values without a fixed shape travel as pickles.
            dumps(None) if leaf.is_side else np.zeros(leaf.shape, leaf.dtype)
            for leaf in leaf_specs(tree)
        ]
        self.values = self._absent

    def observe(self, observations: Mapping[Any, Any]) -> None:
        """Keep the leaves of the agent's observation, or zeros where it has none."""
        self.values = (
            self._flatten(observations[self.agent])
            if self.agent in observations
            else self._absent
        )


class ParallelNativeAdapter(ParallelAdapter):
    """One `HostedParallelEnv`; see the module.

    Raises:
        SpecError: an env without `possible_agents`.
    """

    env: HostedParallelEnv

    def __init__(self, env: HostedParallelEnv) -> None:
        observed, acted = env.spaces()
        size = len(observed)
        rewards = np.zeros(size)
        flags = np.zeros((3, size, 1), bool)
        super().__init__(
            env,
            env.env,
            {
                # Views: an agent writes its parts of the rows.
                agent: Seat(agent, space, rewards[i : i + 1], flags[:, i, 0])
                for i, (agent, space) in enumerate(observed.items())
            },
        )
        self._rewards = [rewards]
        self._done_values = list(flags)
        self._active = np.zeros(size, bool)
        action = native_tree(acted, "action", batch_space(acted, 1))
        self._build = builder(action)
        actions = leaf_specs(action)
        self.spec = EnvSpec(
            observation=(
                *leaf_specs(native_tree(observed, "observation")),
                LeafSpec(ACTIVE, (size,), "bool", Binary()),
            ),
            # Without a place in shared memory, all actions are given; see `NativeEnv.give`.
            action=() if any(leaf.is_side for leaf in actions) else actions,
            reward=(LeafSpec(REWARD, (size,), "float64"),),
            done=done_leaves(groups=((AGENTS, (size, 1)),)),
            groups=((AGENTS, (size,)),),
            family=self.family,
        )

    def _begin(self, seed: int | None, options: Mapping[str, Any] | None) -> Any:
        own = self.env.begin_reset(options)
        # Some envs take no options: they get them only from a caller that passes some.
        arguments = {} if own is None else {"options": own}
        return self._parallel.reset(seed=seed, **arguments)

    def _actions(self, action: list[Any], acting: list[Any]) -> dict[Any, Any]:
        given = self.env.next_action(self._build, action)
        return {agent: given[agent] for agent in acting}

    def _observe(self, *dicts: Mapping[Any, Any]) -> None:
        # Raises for agents that are not among the possible ones.
        for agent in (*dicts[0], *self._parallel.agents):
            self._seat(agent)
        for seat in self._seats.values():
            seat.observe(dicts[0])

    def _row(self) -> list[Any]:
        acting = acting_agents(self._parallel, self._turns)
        self._active[:] = [agent in acting for agent in self._seats]
        return [*self._observations(), self._active]

    def _observations(self) -> list[Any]:
        return [value for seat in self._seats.values() for value in seat.values]


class OneGroupFactory(NativeFactory):
    """Builds the user's env and declares that its agents are one group.

    Envs of other families are returned as they are.

    Raises:
        FactoryError: no function.
    """

    def __init__(self, make_env: Callable[[], Any]) -> None:
        check_factory(make_env)
        super().__init__(make_env)

    def __call__(self) -> Any:
        """Return the env."""
        env = self.env_fn()
        agents = getattr(env, "possible_agents", None)
        if agents:
            # The adapter of PettingZoo envs reads there how agents are grouped.
            env.envherd_options = PettingZooFactory(
                self.env_fn,
                group_map={"agents": list(agents)},
            )
        return env
