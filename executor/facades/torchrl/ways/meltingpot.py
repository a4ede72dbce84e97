"""The direct way of `MeltingpotEnv` and `MeltingpotWrapper`. `direct.py` has its rules.

Observations of the agents are read as our own Melting Pot adapter reads them, at each step directly from dmlab2d if
the substrate is as Melting Pot builds it (see "fast step" in `meltingpot/adapter.py`). The count of steps for
`max_steps` stays in the TorchRL env.
"""

from collections.abc import Callable
from itertools import chain, product
from typing import Any, NamedTuple

import numpy as np
from torchrl.envs import EnvBase

from envherd.executor.facades.torchrl.ways.direct import (
    FLAGS,
    DirectWay,
    TdKey,
    action_reader,
    numpy_dtype,
    require,
)
from envherd.workers.adapters.base import StepValues
from envherd.workers.adapters.meltingpot.adapter import Views
from envherd.workers.adapters.torchrl.private_api import wrapped_env

_WORLD = "WORLD."


class DirectMeltingPot(DirectWay):
    """Steps one substrate."""

    reuses_buffers = True

    def __init__(
        self,
        env: EnvBase,
        inputs: list[TdKey],
        observed: list[TdKey],
        rewards: list[TdKey],
    ) -> None:
        super().__init__(env, inputs, observed, rewards)
        names = {name: i for i, name in enumerate(env.agent_names)}
        rows = {
            group: [names[agent] for agent in agents]
            for group, agents in env.group_map.items()
        }
        require(
            sorted(chain.from_iterable(rows.values())) == list(range(len(names))),
            "agents are left out",
        )
        require(
            {*inputs, *rewards} == {*product(rows, ("action", "reward"))},
            f"it has the inputs {inputs} and the rewards {rewards}",
        )
        require(
            observed[-2:] == ["done", "terminated"],
            f"its observation and done leaves are {observed}",
        )
        self._readers = [action_reader(env.full_action_spec[key]) for key in inputs]
        self._acting = [np.array(rows[key[0]]) for key in inputs]
        worlds = [key for key in observed[:-2] if isinstance(key, str)]
        seen = [key for key in observed[:-2] if not isinstance(key, str)]
        specs = {key: env.full_observation_spec[key] for key in seen}
        # Of the last group; those of the others must be alike.
        spec_of = {key[-1]: spec for key, spec in specs.items()}
        require(
            {*seen} == {*product(rows, ["observation"], spec_of)}, f"it observes {seen}"
        )
        require(
            all(
                spec.shape[1:] == spec_of[key[-1]].shape[1:]
                and spec.dtype == spec_of[key[-1]].dtype
                for key, spec in specs.items()
            ),
            "agents of its groups see unlike things",
        )
        stacks = {
            name: np.zeros((len(names), *spec.shape[1:]), numpy_dtype(spec))
            for name, spec in spec_of.items()
        }
        self._native = wrapped_env(env)
        self._views = Views(
            self._native,
            stacks,
            [_WORLD + key for key in worlds],
            len(names),
        )
        self._rows_of = {
            group: _rows_reader(members, len(names)) for group, members in rows.items()
        }
        self._seen = [
            _Seen(None, _WORLD + key) if key in worlds else _Seen(key[0], key[2])
            for key in observed[:-2]
        ]
        self._actions = np.zeros(len(names), np.int64)
        self._of_env = vars(env)

    def step(self, action: list[Any]) -> StepValues:
        for read, members, value in zip(
            self._readers,
            self._acting,
            action,
            strict=True,
        ):
            self._actions[members] = read(value)
        has_ended = self._views.step(self._actions, list)
        own = self._of_env
        own["num_cycles"] += 1
        if own["max_steps"] is not None and own["num_cycles"] >= own["max_steps"]:
            has_ended = True
        reward = self._views.reward
        return (
            self._values(has_ended=has_ended),
            [self._rows_of[key[0]](reward) for key in self.rewards],
            has_ended,
            False,
        )

    def reset(self) -> list[Any]:
        self._of_env["num_cycles"] = 0
        self._views.forget()
        self._views.take(self._native.reset())
        return self._values(has_ended=False)

    def _values(self, *, has_ended: bool) -> list[Any]:
        views = self._views
        values = [
            views.worlds[name]
            if group is None
            else self._rows_of[group](views.players[name])
            for group, name in self._seen
        ]
        values += (FLAGS[has_ended], FLAGS[has_ended])
        self.latest = values
        self.is_ahead = True
        return values


class _Seen(NamedTuple):
    """An observation: its name in the substrate, and the group that sees it; None for a view of the world."""

    group: str | None
    name: str


def _rows_reader(members: list[int], num_players: int) -> Callable[[Any], Any]:
    """Return what takes the rows of a group's agents from an array, or from a tuple of rows, of all agents."""
    if members == list(range(num_players)):
        return lambda value: value
    return lambda value: (
        tuple(value[i] for i in members) if value.__class__ is tuple else value[members]
    )
