"""How agents and episodes end, from the flags of a PettingZoo step.

An agent's flags keep their values while it is away and are cleared when it returns. An agent that leaves without a flag
counts as terminated. The episode is over when no agent is left. It is terminated if all agents that have ended were
terminated, else truncated. Then all agents are done, also those that never took part.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol

from envherd.workers.adapters.common.scalars import as_flag
from envherd.workers.adapters.pettingzoo.spaces import Agent


class Ending(Protocol):
    """An object that records how an agent has ended.

    Attributes:
        agent: as the env calls it.
        end: whether it has terminated, and whether it was truncated.
    """

    agent: Agent
    end: tuple[bool, bool]


def note_end(seat: Ending, terminated: Any, truncated: Any, *, is_present: bool, has_acted: bool) -> None:
    """Record how an agent has ended.

    Args:
        seat: of the agent.
        terminated: the env's flag; None if it has none for this agent.
        truncated: likewise.
        is_present: whether it is one of `env.agents` now.
        has_acted: whether it was one of them before the step.
    """
    if terminated is not None or truncated is not None:
        seat.end = (
            terminated is not None and as_flag(terminated, f"terminations[{seat.agent!r}]"),
            truncated is not None and as_flag(truncated, f"truncations[{seat.agent!r}]"),
        )
    elif is_present:
        seat.end = (False, False)
    elif has_acted:
        seat.end = (True, False)


def end_episode(seats: Mapping[Agent, Ending], agents: Collection[Agent]) -> tuple[bool, bool]:
    """Return whether the episode has terminated, and whether it was truncated; if so, all agents are done.

    Args:
        seats: of all agents.
        agents: those that are present now.
    """
    if not all(any(seats[agent].end) for agent in agents):
        return False, False
    ends = [seat.end for seat in seats.values() if any(seat.end)]
    terminated = all(end[0] for end in ends)
    truncated = not terminated or (bool(ends) and all(end[1] for end in ends))
    for seat in seats.values():
        if not any(seat.end):
            seat.end = (terminated, truncated)
    return terminated, truncated
