"""The commands between parent and worker, as tables; no I/O here.

A command is two words per env: `command` (packed by `pack`) and then `command_seq`. The worker does
what it says, writes its rows, `status`, and last `reply_seq = command_seq`. A process compares the two numbers to see
whether an answer is there; doorbells only tell it when to look.

    op            env.step  env.reset           `next` written at   `root` written at
    STEP          1         0                   column              storage: column + 1
    STEP_RESET    1         1 if it then ended  column              column (+ 1 in a storage)
    RESET         0         1                   -                   column

This order keeps rows and wake-ups from being lost. One test explores all interleavings (also with deaths and
interrupts), another checks that the code keeps the order:

    parent        inputs, command, command_seq, then rings go; takes done tokens, or looks around every 10 ms
    worker        takes go, reads command_seq, writes rows, status, reply_seq, then rings done

`target` is 0 for the slab's ring, else the number of a rollout storage. In the ring only a reset writes a root
(otherwise the new root IS the `next` of that column); in a storage every step writes one.
"""

import functools
from collections.abc import Collection, Mapping
from enum import IntEnum, IntFlag
from typing import Any, NamedTuple, TypeVar

import numpy as np

# ---- state tables ------------------------------------------------------------------------------
# Tables of states: what follows a state at each event, as bytes for code that must be quick, and as text.
#
# A table is a mapping `state -> event -> state` of two `IntEnum`. A pair that it lacks cannot occur, or is a command
# that is refused.

State = TypeVar("State", bound=IntEnum)
Event = TypeVar("Event", bound=IntEnum)

#: What `table_as_bytes` has where nothing can follow.
IMPOSSIBLE = -1


def table_as_bytes(follows: Mapping[State, Mapping[Event, State]]) -> np.ndarray:
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


def table_as_text(
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


# ---- protocol ----------------------------------------------------------------------------------


class Op(IntEnum):
    """What to do with an env."""

    STEP = 1
    STEP_RESET = 2
    RESET = 3


#: The ops as ints, for arrays. On an enum member numpy looks up missing attributes, which runs Python code: that
#: takes ten times as long, and numpy swallows an exception of a signal handler there.
STEP = int(Op.STEP)
STEP_RESET = int(Op.STEP_RESET)
RESET = int(Op.RESET)


class Status(IntEnum):
    """How a command ended."""

    OK = 0
    FAILED = 1
    """The env raised; a `Fault` message is on the socket."""
    SIDE = 2
    """Done, and something for the parent (side values, a notice) is on the socket."""


class Flag(IntFlag):
    """How to answer."""

    EACH = 1
    """Count the answer, and ring the done doorbell if enough have been counted (`shm.sync`); without it, ring once for
    all commands found together."""
    PREPARED = 2
    """The seed and options of this RESET were sent ahead of it. A RESET without it drops what was sent ahead of a
    command that was refused or broken off."""


#: The steps of both sides for a command, in order.
PARENT_STEPS = ("inputs", "command", "command_seq", "go")
WORKER_STEPS = ("go", "command_seq", "rows", "status", "reply_seq", "done")

RING = 0
"""Target number of the slab's own ring of frames."""

LEAVE = 1 << 62
"""Number of the latest message once the pool is closed: the worker finishes one env's command, and begins no other."""

#: Widths of the parts of a command word; the rest is the column.
OP_BITS = 4
FLAG_BITS = 4
TARGET_BITS = 24
#: `Flag.EACH` in a command word.
EACH = Flag.EACH << OP_BITS


def pack(op: Any, target: int, column: Any, flags: int = 0) -> Any:
    """Return the command word for an op on a column of a target; of int arrays, an int array."""
    return (
        op
        | flags << OP_BITS
        | target << (OP_BITS + FLAG_BITS)
        | column << (OP_BITS + FLAG_BITS + TARGET_BITS)
    )


def pack_each(
    op: Op | np.ndarray,
    target: int,
    columns: np.ndarray | int,
    flags: int,
    num_frames: int,
) -> Any:
    """Return `pack`'s word, or those for different columns, int64 `[k]`; from a table for a ring."""
    # The last one first: it settles the usual case.
    if columns.__class__ is not int and target == RING and isinstance(op, Op):
        return _ring_words(op, flags, num_frames)[columns]
    return pack(op, target, columns, flags)


@functools.cache
def _ring_words(op: int, flags: int, num_frames: int) -> np.ndarray:
    words = np.asarray(pack(int(op), RING, np.arange(num_frames), int(flags)))
    words.setflags(write=False)
    return words


# With a cache, because the same few commands repeat.
@functools.lru_cache(4096)
def unpack(command: int) -> tuple[int, int, int, int]:
    """Return `(op, target, column, flags)` of a command word."""
    op = command & (1 << OP_BITS) - 1
    command >>= OP_BITS
    flags = command & (1 << FLAG_BITS) - 1
    command >>= FLAG_BITS
    return op, command & (1 << TARGET_BITS) - 1, command >> TARGET_BITS, flags


def pack_phase(op: int, env_id: int) -> int:
    """Return the phase word for an op in progress on an env (0 means idle)."""
    return op | (env_id + 1) << OP_BITS


#: The phase of a worker that has nothing to do.
IDLE = "idle"


class Phase(NamedTuple):
    """What a worker is doing: "step", "reset" or "idle", and the env; None if that is unknown."""

    name: str
    env_id: int | None


def describe_phase(phase: int) -> Phase:
    """Return the phase of a phase word."""
    if phase == 0:
        return Phase(IDLE, None)
    op = phase & (1 << OP_BITS) - 1
    return Phase("reset" if op == Op.RESET else "step", (phase >> OP_BITS) - 1)
