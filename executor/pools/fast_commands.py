"""Commands in C (`workers.native`) for one pool: to all envs, and to some of them.

Guarantees: words are written in the order of `CommandWords.write` and `write_all`, and answers count as in
`WorkerPool.wait_some` and `wait_all`: these are the specification. The call that gives a command also counts it, so no
interrupt comes in between. Longer waits, and answers with more than rows, are left to Python.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any, NamedTuple

import numpy as np

from envherd.executor.pools.command_words import CommandWords
from envherd.shm.socket_bells import Bell
from envherd.workers import native

#: Seconds without an answer after which the caller checks the workers' pidfds.
LOOK_S = 0.01

#: `(command, draft, column) -> (draft, whether all envs have answered with rows)`; see `FastCommands.step`.
StepAll = Callable[[int, Callable[[int], Any] | None, int], tuple[Any, bool]]


class FastCommands(NamedTuple):
    """Commands to all envs, a call each.

    Attributes:
        absent: workers that do not serve; commands may be given only while it is empty.
        step: `(command, draft, column)`: gives all envs a command (a word from `workers.protocol.pack`), wakes their
            workers, calls `draft(column)` while they work (None: nothing), and waits for the answers. Returns the
            draft, and False if `Pool.wait_all` must continue: no answer has come for some time, or there are reports
            besides rows. The caller then sets `Pool.has_waited`.
    """

    absent: Sized
    step: StepAll


class NativeExchange(NamedTuple):
    """Steps of some envs in C: give commands, wait, and take rows; see `protocol.fast_exchange`.

    Attributes:
        absent: as in `FastCommands`.
        must_look: returns whether the pool must check its workers first, which `Pool.wait_some` does.
        send: `(op, ids, actions)`: gives each env a step; returns False if nothing was given or written.
        wait: `(ids, wanted)`: returns how many envs have answered; 0 if `Pool.wait_some` must continue.
        take: `(count, next, root, ids)`: copies their rows; returns how many were reset, or -1 if nothing was done.
        roots: `(ids, to)`: writes the envs' roots; returns False if nothing was written.
    """

    absent: Sized
    must_look: Callable[[], bool]
    send: Callable[[int, np.ndarray, np.ndarray], bool]
    wait: Callable[[np.ndarray | None, int], int]
    take: Callable[[int, np.ndarray, np.ndarray | None, np.ndarray], int]
    roots: Callable[[np.ndarray, np.ndarray], bool]


def native_caller(
    words: CommandWords, bells: Sequence[Bell], done: Bell, tally: Mapping[str, np.ndarray], worker_of: np.ndarray
) -> Any:
    """Return the `Caller` of the C extension over the words and doorbells of a pool; None without the extension.

    Args:
        words: of its commands.
        bells: one of each worker.
        done: the doorbell by which workers wake the caller.
        tally: the words of `shm.tally`.
        worker_of: int64 `[N]`.
    """
    module = native.load()
    if module is None:
        return None
    own = ("number", "command", "command_seq", "reply_seq", "status", "answers_lost")
    return module.Caller(
        {
            **{name: getattr(words, name) for name in own},
            **{name: tally[name] for name in ("answered", "ring_at")},
            "worker_of": worker_of,
            "go": [bell.memory for bell in bells],
            "done": done.memory,
            "look_ns": int(LOOK_S * 1e9),
            **native.waiting_facts(),
        }
    )


def exchange_natively(
    caller: Any, absent: Sized, must_look: Callable[[], bool], facts: Mapping[str, Any]
) -> NativeExchange:
    """Return steps of some envs in C.

    Args:
        caller: result of `native_caller`.
        absent: see `NativeExchange`.
        must_look: see `NativeExchange`.
        facts: of the engine; see `protocol.fast_exchange`.
    """
    module = native.load()
    exchange = module.Exchange({"caller": caller, "caller_type": module.Caller, **facts})
    return NativeExchange(absent, must_look, exchange.send, exchange.wait, exchange.take, exchange.roots)
