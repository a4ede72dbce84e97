"""The engine of a batch over hosts: that of one machine, over a pool of hosts.

What differs: a host handles the exceptions and losses of its workers, so errors and interrupted rows arrive ready-made;
remote rollouts move envs without commands of the driver; statistics are the hosts'.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from envherd.executor.cluster.hosts import Host, Hosts
from envherd.executor.cluster.messages import Answer
from envherd.executor.monitor.statistics import Statistics, num_agents
from envherd.executor.protocol.engine import Engine
from envherd.executor.protocol.env_states import Event, State
from envherd.executor.protocol.flight import Flight, Flights
from envherd.workers.errors import EnvherdError

_NOBODY = np.zeros(0, np.int64)
#: State of an env on its host -> what has happened to it, if it was given no command.
_PLACED = {State.NEEDS_RESET: Event.IS_BROKEN_OFF, State.RUNNING: Event.IS_ALLOWED, State.ENDED: Event.IS_OVER}


class HostFlights(Flights):
    """Commands for envs on hosts."""

    pool: Hosts  # type: ignore[assignment]  # what is used of a `Pool`

    def fault_error(self, faults: Mapping[int, Any], *, is_interrupted: bool) -> EnvherdError:  # noqa: ARG002
        """Return the error that the host of the first env has made."""
        error: EnvherdError = faults[min(faults)]["error"]
        return error

    def _forget_interrupted(self, flight: Flight) -> None:
        super()._forget_interrupted(flight)
        self._note_interrupted(flight.ids)

    def take_news(self, env_ids: np.ndarray) -> None:
        """Record the side values and infos of sent envs, and which of their rows a host has interrupted."""
        super().take_news(env_ids)
        self._note_interrupted(env_ids)

    def _note_interrupted(self, env_ids: np.ndarray) -> None:
        self.positions.interrupted[env_ids] |= self.pool.interrupted[env_ids]

    def settle(self, host: Host) -> EnvherdError | None:
        """Record losses outside a command, and begin to replace a lost host; return the loss to raise, or None."""
        losses = self.pool.outcome.hand_out(_NOBODY).losses
        if host.loss is not None:
            losses |= dict.fromkeys(host.worker_ids, host.loss)
        return self.losses.replace(losses, _NOBODY)


class ClusterEngine(Engine):
    """The engine of a `RayParallelEnv`; see the module."""

    pool: Hosts  # type: ignore[assignment]  # what is used of a `Pool`
    flights: HostFlights
    flights_type = HostFlights

    def restore(self, env_ids: np.ndarray, roots: Sequence[Mapping[str, Any]] | None, ended: np.ndarray | None) -> None:
        """Note that envs have been restored, here and on the hosts."""
        self.pool.restore(env_ids, roots, ended)
        super().restore(env_ids, roots, ended)

    def place(self, host: Host, answer: Answer) -> None:
        """Note where all envs of a host are, after something other than a command."""
        env_ids, self.received = host.env_ids, None
        columns = self.positions.columns.copy()
        columns[env_ids] = self.positions.reset_columns(env_ids)
        self.pool.take_rows(host, answer, columns)
        self.positions.were_reset(env_ids, columns[env_ids])
        self.side.note_values({host.first + i: frame for i, frame in answer.side.items()})
        for value, event in _PLACED.items():
            self.states.move(env_ids[answer.states == value], event)

    def statistics(self) -> Statistics:
        """Return the statistics so far; a lost host has no workers in them."""
        workers = self.pool.workers()
        words, tally = self.pool.slab.words, sum(host.tally for host in self.pool.all) + np.zeros(4, np.int64)
        steps = words["env_steps"].tolist()
        return Statistics(
            env_steps=sum(steps),
            agent_steps=sum(count * num_agents(spec) for count, spec in zip(steps, self.specs, strict=True)),
            resets=int(words["resets"].sum()),
            episodes=int(words["ends"].sum()),
            worker_losses=int(tally[0]),
            interrupted=int(tally[1]) + self.flights.losses.num_interrupted,
            env_errors=int(tally[2]),
            recycled=int(tally[3]),
            steps_per_env=tuple(steps),
            resets_per_env=tuple(words["resets"].tolist()),
            wall_s=time.monotonic() - self.ready_at,
            workers=tuple(workers),
            path=str(self.plain),
        )
