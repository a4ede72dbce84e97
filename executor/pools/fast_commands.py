"""Commands to all envs, compiled for one pool: what a step gives and waits for where nothing else happens.

Guarantees: the words are written in the order of `CommandWords.write_all`, and an answer counts as
`WorkerPool.wait_all` counts it: these are the specification. What takes longer, or comes with more than rows, is left
to `wait_all`. In C (`workers.native`) where that is there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any, NamedTuple, Protocol

import numpy as np

from envherd.executor.pools.command_words import CommandWords
from envherd.executor.pools.placement import Placement
from envherd.executor.pools.replies import Outcome
from envherd.shm.sync import Doorbell
from envherd.workers import native

#: Seconds without an answer after which the caller looks at the workers' pidfds.
LOOK_S = 0.01


class FastCommands(NamedTuple):
    """The two halves of a command to all envs.

    Attributes:
        absent: the workers that do not serve; while there is one, no command may be given in this way.
        give: gives all envs a command, a word of `workers.protocol.pack`, and wakes their workers.
        has_all: waits for the answers; returns False where `Pool.wait_all` must go on: no answer has come for a while,
            or there is more to know than rows.
    """

    absent: Sized
    give: Callable[[int], None]
    has_all: Callable[[], bool]


class NativeExchange(NamedTuple):
    """Steps of some envs in C: given, waited for and taken; see `protocol.fast_exchange`.

    Attributes:
        absent: as in `FastCommands`.
        must_look: returns whether the pool must look around first, which `Pool.wait_some` does.
        send: `(op, ids, actions)`: gives envs a step each; returns False if nothing was given or written.
        wait: `(ids, wanted)`: returns how many envs have answered; 0 where `Pool.wait_some` must go on.
        take: `(count, next, root, ids)`: takes their rows; returns how many were reset, or -1 if nothing was done.
        roots: `(ids, to)`: writes where envs are; returns False if nothing was written.
    """

    absent: Sized
    must_look: Callable[[], bool]
    send: Callable[[int, np.ndarray, np.ndarray], bool]
    wait: Callable[[np.ndarray | None, int], int]
    take: Callable[[int, np.ndarray, np.ndarray | None, np.ndarray], int]
    roots: Callable[[np.ndarray, np.ndarray], bool]


class Waiting(Protocol):
    """A pool, as far as `compile_has_all` uses it.

    Attributes:
        num_workers: each rings when it has answered for all its envs.
        outcome: what happened besides the rows.
        has_waited: `wait_all` need not wait for the tokens of these; it clears that.
    """

    num_workers: int
    outcome: Outcome
    has_waited: bool

    def place(self) -> None:
        """See where workers run, if it is time to."""
        ...


def compile_give(words: CommandWords, bells: Sequence[Doorbell]) -> Callable[[int], None]:
    """Return `FastCommands.give` over the words and the doorbells of a pool."""
    fill_command, fill_forfeited, fill_seq = words.command.fill, words.forfeited.fill, words.command_seq.fill
    rings = [bell.ring for bell in bells]

    def give(command: int) -> None:
        words.number = number = words.number + 1
        fill_command(command)
        fill_forfeited(0)
        fill_seq(number)
        for ring in rings:
            ring()

    return give


def compile_has_all(pool: Waiting, words: CommandWords, done: Doorbell, placement: Placement) -> Callable[[], bool]:
    """Return `FastCommands.has_all` over what a pool waits with."""
    replies, numbers, wait, num_workers = (
        words.reply_seq.tobytes,
        words.command_seq.tobytes,
        done.wait,
        pool.num_workers,
    )
    status, no_status, now = words.status.tobytes, bytes(words.status.nbytes), time.monotonic

    def has_all() -> bool:
        if now() >= placement.due:
            pool.place()
        num_tokens = 0
        while num_tokens < num_workers or replies() != numbers():
            if not wait(LOOK_S):
                pool.has_waited = True
                return False
            num_tokens += 1
        if status() == no_status and not pool.outcome:
            return True
        pool.has_waited = True
        return False

    return has_all


def native_caller(  # what a pool waits with
    words: CommandWords,
    bells: Sequence[Doorbell],
    done: Doorbell,
    tally: Mapping[str, np.ndarray],
    worker_of: np.ndarray,
    hailed: np.ndarray,
) -> Any:
    """Return the `Caller` of the C extension over the words and doorbells of a pool; None without the extension.

    Args:
        words: of its commands.
        bells: one of each worker.
        done: by which workers wake the caller.
        tally: the words of `shm.tally`.
        worker_of: int64 `[N]`.
        hailed: uint8 `[1]`, which ends a wait of `first` where it is not 0.
    """
    module = native.load()
    if module is None:
        return None
    own = {name: getattr(words, name) for name in ("command", "command_seq", "reply_seq", "status")}
    return module.Caller(
        {
            "words": own | {name: tally[name] for name in ("answered", "ring_at")},
            "forfeited": words.forfeited,
            "worker_of": worker_of,
            "hailed": hailed,
            "go": [bell.memory for bell in bells],
            "done": done.memory,
            "look_ns": int(LOOK_S * 1e9),
            **native.waiting_facts(),
        }
    )


def compile_natively(
    pool: Waiting, words: CommandWords, caller: Any, placement: Placement
) -> tuple[Callable[[int], None], Callable[[], bool]]:
    """Return what `compile_give` and `compile_has_all` return, in C."""
    give_all, wait, now = caller.give, caller.has_all, time.monotonic

    def give(command: int) -> None:
        words.number = number = words.number + 1
        give_all(number, command)

    def has_all() -> bool:
        if now() >= placement.due:
            pool.place()
        if wait() and not pool.outcome:
            return True
        pool.has_waited = True
        return False

    return give, has_all


def exchange_natively(
    words: CommandWords, caller: Any, absent: Sized, must_look: Callable[[], bool], facts: Mapping[str, Any]
) -> NativeExchange:
    """Return steps of some envs in C.

    Args:
        words: of the pool's commands.
        caller: what `native_caller` has returned.
        absent: see `NativeExchange`.
        must_look: see `NativeExchange`.
        facts: what the engine knows of the envs; see `protocol.fast_exchange`.
    """
    module = native.load()
    exchange = module.Exchange({"caller": caller, "caller_type": module.Caller, **facts})
    send_steps = exchange.send

    def send(op: int, ids: np.ndarray, actions: np.ndarray) -> bool:
        words.number = number = words.number + 1
        sent: bool = send_steps(number, op, ids, actions)
        return sent

    return NativeExchange(absent, must_look, send, exchange.wait, exchange.take, exchange.roots)
