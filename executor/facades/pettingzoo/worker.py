"""Run PettingZoo envs for the PettingZoo facade: a row has one part per agent, with the env's own values.

`PettingZooAdapter` groups and stacks agents for TensorDicts. This adapter keeps every agent's values separate, so
agents with different spaces need no groups.

Guarantees:
- rewards are float64; observations keep the dtype and shape of the agent's space, action masks included.
- an env gets the actions of the agents in `env.agents` only.
- an absent agent's part of a row is zeros; see `pettingzoo.ends` for the flags.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import batch_space

from envherd.executor.facades.gymnasium.worker import NativeEnv, NativeFactory
from envherd.shm.specs import Binary, EnvSpec, Key, LeafSpec, done_leaves
from envherd.workers.adapters.base import Adapter, StepValues
from envherd.workers.adapters.common.scalars import as_float
from envherd.workers.adapters.common.tree import builder, flattener, leaf_specs
from envherd.workers.adapters.gymnasium.spaces import Space, native_tree
from envherd.workers.adapters.pettingzoo.adapter import (
    acting_agents,
    checked_reset,
    checked_step,
    possible_agents,
    turn_based,
)
from envherd.workers.adapters.pettingzoo.ends import end_episode, note_end
from envherd.workers.errors import ResetNeeded, SpecError
from envherd.workers.pickling import dumps

#: Keys of the rows: which agents act next, bool `[A]`; their rewards, float64 `[A]`; their flags.
ACTIVE: Key = ("active",)
REWARD: Key = ("reward",)
AGENTS: Key = ("agents",)


class ParallelGuest(NativeEnv):
    """A PettingZoo parallel env and the requests that its facade may make."""

    env: Any

    def __init__(self, env: Any) -> None:
        super().__init__(env, keeps_final=False)

    def spaces(self) -> tuple[spaces.Dict, spaces.Dict]:
        """Return the spaces of all agents, as dicts by agent in the order of `possible_agents`."""
        agents: list[Any] = possible_agents(self.env)
        observed = spaces.Dict(OrderedDict((agent, self.env.observation_space(agent)) for agent in agents))
        return observed, spaces.Dict(OrderedDict((agent, self.env.action_space(agent)) for agent in agents))

    def describe(self) -> bytes:
        """Return `(observation spaces, action spaces, metadata, render mode)`, pickled."""
        metadata = dict(getattr(self.env, "metadata", None) or {})
        return dumps((*self.spaces(), metadata, getattr(self.env, "render_mode", None)))

    def ask(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
        """Return an attribute of the env, pickled; if it is a method, its result."""
        value = getattr(self.env, name)
        return dumps(value(*args, **kwargs) if callable(value) else value)

    def assign(self, name_and_value: tuple[str, Any]) -> None:
        """Set an attribute of the env."""
        setattr(self.env, *name_and_value)


class ParallelFactory(NativeFactory):
    """A picklable factory of `ParallelNativeAdapter`s over a user's factory of envs."""

    def __call__(self) -> ParallelNativeAdapter:
        """Build the env."""
        from envherd.executor.facades.pettingzoo.stacked import parallel_env  # `rllib` does without PettingZoo

        return ParallelNativeAdapter(ParallelGuest(parallel_env(self.env_fn)))


class Seat:
    """One agent's part of a row.

    Attributes:
        agent: as the env calls it.
    """

    def __init__(self, agent: Any, space: Space, terminated: np.ndarray, truncated: np.ndarray) -> None:
        self.agent = agent
        self._terminated, self._truncated = terminated, truncated  # VIEWS, of one element each
        tree = native_tree(space, "")
        self._flatten = flattener(tree, None)
        self._absent = [dumps(None) if leaf.is_side else np.zeros(leaf.shape, leaf.dtype) for leaf in leaf_specs(tree)]

    @property
    def end(self) -> tuple[bool, bool]:
        """Whether the agent has terminated, and whether it was truncated."""
        return bool(self._terminated[0]), bool(self._truncated[0])

    @end.setter
    def end(self, flags: tuple[bool, bool]) -> None:
        self._terminated[0], self._truncated[0] = flags

    def add(self, observations: Mapping[Any, Any], values: list[Any]) -> None:
        """Append the leaves of the agent's observation, or zeros where it has none."""
        if self.agent in observations:
            values += self._flatten(observations[self.agent])
        else:
            values += self._absent


class ParallelNativeAdapter(Adapter):
    """One `ParallelGuest`; see the module.

    Raises:
        SpecError: an env without `possible_agents`.
    """

    family: ClassVar[str] = "pettingzoo"

    env: ParallelGuest

    def __init__(self, env: ParallelGuest) -> None:
        self.env = env
        self.info: Mapping[str, Any] = {}
        observed, acted = env.spaces()
        agents = list(observed)
        size = len(agents)
        self._turns = turn_based(env.env)
        self._rewards = np.zeros(size)
        self._active = np.zeros(size, bool)
        self._flags = np.zeros((3, size, 1), bool)  # done, terminated, truncated
        self._seats: dict[Any, Seat] = {
            agent: Seat(agent, observed[agent], self._flags[1, i], self._flags[2, i]) for i, agent in enumerate(agents)
        }
        action = native_tree(acted, "action", batch_space(acted, 1))
        self._build = builder(action)
        self._needs_reset = True
        can_act = not any(leaf.is_side for leaf in leaf_specs(action))
        self.spec = EnvSpec(
            observation=(
                *leaf_specs(native_tree(observed, "observation")),
                LeafSpec(ACTIVE, (size,), "bool", Binary()),
            ),
            action=leaf_specs(action) if can_act else (),
            reward=(LeafSpec(REWARD, (size,), "float64"),),
            done=done_leaves(groups=((AGENTS, (size, 1)),)),
            groups=((AGENTS, (size,)),),
            family=self.family,
        )

    def reset(
        self,
        seed: int | None,
        options: Mapping[str, Any] | None = None,
        mask: np.ndarray | None = None,  # noqa: ARG002  # never set: the env is no batch
    ) -> list[Any]:
        """Start a new episode; see `Adapter.reset`. `options` is None, or `{"options": what the env gets}`."""
        own = self.env.begin_reset(options)
        self._needs_reset = True
        arguments = {"seed": seed, "options": own} if own is not None else {"seed": seed}
        observations, self.info = checked_reset(self.env.env.reset(**arguments))
        if not self.env.env.agents:
            raise SpecError("reset failed: expected a PettingZoo env with agents, got one that has none. Fix the env.")
        self._flags[...] = False
        self._needs_reset = False
        return self._row(observations)

    def step(self, action: list[Any]) -> StepValues:
        """Make one transition; see `Adapter.step`.

        Raises:
            ResetNeeded: no agent is left, or no episode has begun; the env was not touched.
            SpecError: the env returned no five dicts, or named an unknown agent.
        """
        guest, env = self.env, self.env.env
        given = guest.take_raw_action() if guest.has_raw_action else self._build(action)
        if self._needs_reset:
            raise ResetNeeded("step failed: expected an episode under way, got a PettingZoo env that needs a reset.")
        acting = list(env.agents)
        observations, rewards, terminations, truncations, self.info = checked_step(
            env.step({agent: given[agent] for agent in acting})
        )
        present = env.agents
        for i, (agent, seat) in enumerate(self._seats.items()):
            self._rewards[i] = as_float(rewards[agent], f"reward of {agent}") if agent in rewards else 0.0
            flags = terminations.get(agent), truncations.get(agent)
            note_end(seat, *flags, is_present=agent in present, has_acted=agent in acting)
        self._check_names(observations)
        terminated, truncated = end_episode(self._seats, present)
        self._flags[0] = self._flags[1] | self._flags[2]
        self._needs_reset = terminated or truncated
        return self._row(observations), [self._rewards], terminated, truncated

    def done_values(self) -> list[Any]:
        """Return done, terminated and truncated of the agents, bool `[A, 1]`."""
        return list(self._flags)

    def render(self) -> Any:
        """Return what `env.render()` draws, if its render mode is "rgb_array", else None."""
        return self.env.env.render() if getattr(self.env.env, "render_mode", None) == "rgb_array" else None

    def _row(self, observations: Mapping[Any, Any]) -> list[Any]:
        values: list[Any] = []
        for seat in self._seats.values():
            seat.add(observations, values)
        acting = acting_agents(self.env.env, self._turns)
        for i, agent in enumerate(self._seats):
            self._active[i] = agent in acting
        values.append(self._active)
        return values

    def _check_names(self, observations: Mapping[Any, Any]) -> None:
        for agent in (*observations, *self.env.env.agents):
            if agent not in self._seats:
                raise SpecError(
                    f"reading observations failed: expected agents among {', '.join(map(str, self._seats))}, "
                    f"got {agent!r}. Name all agents that may ever appear in env.possible_agents."
                )
