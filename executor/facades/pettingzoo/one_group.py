"""A factory that puts all agents of a PettingZoo env into one group, for facades with one row per agent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from envherd.workers.adapters.named import PettingZooFactory
from envherd.workers.build import check_factory, describe, modules_of


class OneGroupFactory:
    """Builds the user's env and declares that its agents are one group.

    Envs of other families are returned as they are.

    Raises:
        FactoryError: no function.
    """

    def __init__(self, make_env: Callable[[], Any]) -> None:
        check_factory(make_env)
        self._make_env = make_env
        self.preload = tuple(modules_of(make_env))
        self.__qualname__ = describe(make_env)  # for messages

    def __call__(self) -> Any:
        """Return the env."""
        env = self._make_env()
        agents = getattr(env, "possible_agents", None)
        if agents:
            env.envherd_options = PettingZooFactory(self._make_env, group_map={"agents": list(agents)})
        return env
