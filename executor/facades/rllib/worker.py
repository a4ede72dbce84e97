"""Run multi-agent envs, whose agents may enter and leave at any step, for RLlib's env runners.

Guarantees:
- an env gets only the actions of agents that had an observation in the previous row and have not ended.
- a row records which of the env's dicts had an entry for each agent (`PRESENT`), so the facade can rebuild the dicts.
- the episode ends when the env's `__all__` says so.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from envherd.executor.facades.pettingzoo.worker import (
    HostedParallelEnv,
    ParallelFactory,
    ParallelNativeAdapter,
)
from envherd.shm.specs import Key, LeafSpec
from envherd.workers.adapters.registry import is_one_of
from envherd.workers.errors import SpecError

#: Key of the rows: uint8 `[A]`, the bits of the dicts of the latest step or reset that had an entry for the agent.
PRESENT: Key = ("present",)
OBSERVED = 1
REWARDED = 2
TERMINATED = 4
TRUNCATED = 8
#: In the order of the dicts that `step` returns.
_BITS = (OBSERVED, REWARDED, TERMINATED, TRUNCATED)

#: The entry of RLlib's flags for the whole episode.
ALL = "__all__"

_RLLIB = "ray.rllib.env.multi_agent_env.MultiAgentEnv"


class Context(dict[str, Any]):
    """RLlib's `EnvContext` in a worker that has not imported RLlib, which takes seconds; its methods import it."""

    def __getattr__(self, name: str) -> Any:
        # Copying and pickling look for special methods; RLlib is not imported for them.
        if name.startswith("__"):
            raise AttributeError(name)
        from ray.rllib.env.env_context import EnvContext

        return getattr(EnvContext, name).__get__(self)


def with_context(
    make_env: Callable[[Any], Any],
    entries: Mapping[str, Any],
    attributes: Mapping[str, Any],
) -> Any:
    """Build an env that takes RLlib's context: an `EnvContext` if importing `make_env` has imported RLlib."""
    rllib = sys.modules.get("ray.rllib.env.env_context")
    context = (
        Context(entries)
        if rllib is None
        else rllib.EnvContext(dict(entries), attributes["worker_index"])
    )
    # RLlib's context has entries and, for the index of the runner and the like, attributes.
    vars(context).update(attributes)
    return make_env(context)


class HostedAgentsEnv(HostedParallelEnv):
    """A `MultiAgentEnv` of RLlib, and the requests that its facade may make."""

    _spaces_of = ("get_observation_space", "get_action_space")


class MultiAgentFactory(ParallelFactory):
    """A picklable factory of `MultiAgentAdapter`s over a user's factory of envs.

    The user's factory returns a `MultiAgentEnv` of RLlib, or an env that `parallel_env` of PettingZoo's facade accepts.
    """

    def __call__(self) -> MultiAgentAdapter:
        """Build the env."""
        env = self.env_fn()
        if is_one_of(env, _RLLIB):
            return MultiAgentAdapter(HostedAgentsEnv(env))
        # Only with PettingZoo.
        from envherd.executor.facades.pettingzoo.stacked import parallel_env

        # `parallel_env` takes a factory, and this env is built already.
        made: Any = _ParallelAgents(parallel_env(lambda: env))
        return MultiAgentAdapter(HostedParallelEnv(made))


class _ParallelAgents:
    """A PettingZoo parallel env whose `step` returns what that of RLlib's `MultiAgentEnv` does."""

    def __init__(self, env: Any) -> None:
        self.env = env

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)

    def step(self, actions: Mapping[Any, Any]) -> tuple[Any, ...]:
        observations, rewards, terminations, truncations, infos = self.env.step(actions)
        is_over = not self.env.agents
        has_terminated = is_over and all(
            terminations.get(agent, True) for agent in self.env.possible_agents
        )
        return (
            observations,
            rewards,
            {**terminations, ALL: has_terminated},
            {**truncations, ALL: is_over and not has_terminated},
            infos,
        )


class MultiAgentAdapter(ParallelNativeAdapter):
    """One env that gives RLlib's dicts; see the module.

    Raises:
        SpecError: an env without `possible_agents`.
    """

    family: ClassVar[str] = "rllib"
    _needs_agents = False  # they may enter later

    def __init__(self, env: HostedParallelEnv) -> None:
        super().__init__(env)
        self._present = np.zeros(len(self._seats), np.uint8)
        leaf = LeafSpec(PRESENT, self._present.shape, "uint8")
        self.spec = replace(self.spec, observation=(*self.spec.observation, leaf))

    def _acting(self) -> list[Any]:
        return [
            agent for agent, acts in zip(self._seats, self._active, strict=True) if acts
        ]

    def _observe(self, *dicts: Mapping[Any, Any]) -> None:
        if dicts[1:] and ALL not in dicts[2] and ALL not in dicts[3]:
            raise SpecError(
                f"step failed: expected {ALL!r} among the flags of a multi-agent env, got none. Add it."
            )
        for agent in {
            agent: None for entries in dicts for agent in entries if agent != ALL
        }:
            self._seat(agent)
        self.info = self.info if any(self.info.values()) else {}
        for i, (agent, seat) in enumerate(self._seats.items()):
            seat.observe(dicts[0])
            self._present[i] = sum(
                bit
                for bit, entries in zip(_BITS, dicts, strict=False)
                if agent in entries
            )

    def _note_ends(
        self,
        terminations: Mapping[Any, Any],
        truncations: Mapping[Any, Any],
        acting: Collection[Any],  # noqa: ARG002  # all that ended say so
    ) -> tuple[bool, bool]:
        for agent, seat in self._seats.items():
            seat.end(
                terminated=bool(terminations.get(agent, False)),
                truncated=bool(truncations.get(agent, False)),
            )
        return bool(terminations.get(ALL, False)), bool(truncations.get(ALL, False))

    def _row(self) -> list[Any]:
        for i, seat in enumerate(self._seats.values()):
            self._active[i] = (
                self._present[i] & OBSERVED
                and not seat.has_ended
                and not self._needs_reset
            )
        return [*self._observations(), self._active, self._present]
