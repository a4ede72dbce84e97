"""Tables of states: what follows a state at each event, as bytes for code that must be quick, and as text.

A table is a mapping `state -> event -> state` of two `IntEnum`. A pair that it lacks cannot occur, or is a command that
is refused.
"""

from collections.abc import Collection, Mapping
from enum import IntEnum
from typing import TypeVar

import numpy as np

State = TypeVar("State", bound=IntEnum)
Event = TypeVar("Event", bound=IntEnum)

#: What `as_bytes` has where nothing can follow.
IMPOSSIBLE = -1


def as_bytes(follows: Mapping[State, Mapping[Event, State]]) -> np.ndarray:
    """Return a table as int8 `[event, state]`, the state that follows; `IMPOSSIBLE` for pairs that it lacks."""
    # Members of an `IntEnum` from 0 on, so the largest one tells their number.
    table = np.full(
        (1 + max(max(row, default=0) for row in follows.values()), len(follows)),
        IMPOSSIBLE,
        np.int8,
    )
    for state, row in follows.items():
        for event, following in row.items():
            table[event, state] = following
    return table


def as_text(
    follows: Mapping[State, Mapping[Event, State]],
    events: type[Event],
    commands: Collection[Event],
    refused_with: Mapping[State, type[Exception]],
) -> str:
    """Return a table as text: a line per state and event.

    Args:
        follows: the table.
        events: in the order of the lines.
        commands: which are refused where the table lacks them.
        refused_with: state -> the exception that refuses them.
    """
    lines = []
    for state, row in follows.items():
        for event in events:
            if event in row:
                lines.append(f"{state.name:15} {event.name:15} {row[event].name}")
            elif event in commands:
                lines.append(
                    f"{state.name:15} {event.name:15} refused: {refused_with[state].__name__}"
                )
    return "\n".join(lines)
