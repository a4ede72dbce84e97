"""Every interleaving of a parent that waits for the first K answers with workers that count theirs.

The steps are those of `shm.sync` and of the parent's wait; each word is read or written separately. The model assumes
that a read does not overtake an earlier write, which the lock in between ensures.
"""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import pytest

from tests.oracles.exploring import explore


class State(NamedTuple):
    """The words, and the program counters of all sides.

    Attributes:
        replied, answered: of each worker.
        ring_at: the parent's requested number.
        tokens: rings that were not taken.
        parent: its step, and what it has read: total, the word that it reads next, target.
        workers: of each: its step, its sum so far, the word that it reads next.
    """

    replied: tuple[int, ...]
    answered: tuple[int, ...]
    ring_at: int
    tokens: int
    parent: tuple[str, int, int, int]
    workers: tuple[tuple[str, int, int], ...]


@dataclass(frozen=True)
class Protocol:
    """The order of steps, with options that break it.

    Attributes:
        worker: `count` an answer, `sum` all counts, and `compare` with what is asked for.
        answers: of each worker.
        total_first: whether the parent reads the counts before the answers.
        looks_again: whether the parent reads again after its request.
    """

    worker: tuple[str, ...] = ("reply", "count", "sum", "compare")
    answers: int = 2
    total_first: bool = True
    looks_again: bool = True


def explore_one(wanted: int, num_workers: int, ring_at: int, protocol: Protocol) -> int:
    """Visit all states; return how many there are.

    Raises:
        AssertionError: the parent sleeps although enough have answered, and no worker will wake it.
    """

    def moves(state: State) -> Iterable[State]:
        is_asleep = state.parent[0] == "sleep" and not state.tokens
        are_still = all(
            step in (protocol.worker[0], "end") for step, *_ in state.workers
        )
        assert not is_asleep or not are_still or sum(state.replied) < wanted, (
            f"never woken: {state}"
        )
        return itertools.chain(
            _by_workers(state, protocol), _by_parent(state, wanted, protocol)
        )

    zeros = (0,) * num_workers
    start = State(
        zeros,
        zeros,
        ring_at,
        0,
        ("drain", 0, 0, 0),
        ((protocol.worker[0], 0, 0),) * num_workers,
    )
    return explore(start, moves, lambda state: state.parent[0] == "end")


def _by_workers(state: State, protocol: Protocol) -> Iterator[State]:
    for i, (step, total, word) in enumerate(state.workers):
        if step == "end":
            continue
        after = state
        place = protocol.worker.index(step)
        own = (protocol.worker[(place + 1) % len(protocol.worker)], total, 0)
        if step == "reply":
            after = after._replace(replied=_plus_one(state.replied, i))
        elif step == "count":
            after = after._replace(answered=_plus_one(state.answered, i))
        elif step == "sum":
            own = _next_word(
                own[0], "sum", total + state.answered[word], word, len(state.answered)
            )
        elif total >= state.ring_at:
            after = after._replace(tokens=min(2, state.tokens + 1))
        if place == len(protocol.worker) - 1 and step != own[0]:
            own = (own[0] if after.replied[i] < protocol.answers else "end", 0, 0)
        yield after._replace(workers=(*state.workers[:i], own, *state.workers[i + 1 :]))


def _by_parent(state: State, wanted: int, protocol: Protocol) -> Iterator[State]:
    step, total, word, target = state.parent
    if step == "drain":
        yield state._replace(
            tokens=0, parent=("total" if protocol.total_first else "ready", 0, 0, 0)
        )
    elif step == "total":
        after = "ready" if protocol.total_first else "ask"
        now = _next_word(
            after, "total", total + state.answered[word], word, len(state.answered)
        )
        yield state._replace(parent=(*now, target))
    elif step == "ready":
        missing = wanted - sum(state.replied)
        after = "ask" if protocol.total_first else "total"
        yield state._replace(
            parent=("end", 0, 0, 0) if missing <= 0 else (after, total, 0, missing)
        )
    elif step == "ask":
        after, target = "again" if protocol.looks_again else "sleep", total + target
        yield state._replace(ring_at=target, parent=(after, 0, 0, target))
    elif step == "again":
        now = _next_word(
            "sleep", "again", total + state.answered[word], word, len(state.answered)
        )
        has_come = now[0] == "sleep" and now[1] >= target
        yield state._replace(parent=("drain", 0, 0, 0) if has_come else (*now, target))
    elif step == "sleep" and state.tokens:
        yield state._replace(tokens=state.tokens - 1, parent=("drain", 0, 0, 0))


def _next_word(
    after: str, step: str, total: int, word: int, num_words: int
) -> tuple[str, int, int]:
    """Return the state after adding a word to a sum: at the next word, or after the last one."""
    return (step, total, word + 1) if word + 1 < num_words else (after, total, 0)


def _plus_one(words: tuple[int, ...], i: int) -> tuple[int, ...]:
    return (*words[:i], words[i] + 1, *words[i + 1 :])


@pytest.mark.parametrize("ring_at", [0, 3, 100])
@pytest.mark.parametrize("wanted", [1, 2, 3, 4])
def test_wait_for_some_is_always_woken(wanted, ring_at):
    assert explore_one(wanted, 2, ring_at, Protocol()) > 100


def test_wait_for_some_of_three_workers_is_always_woken():
    assert explore_one(2, 3, 0, Protocol(answers=1)) > 1_000


@pytest.mark.parametrize(
    "wrong",
    [
        Protocol(worker=("reply", "sum", "count", "compare")),
        Protocol(worker=("count", "sum", "compare", "reply")),
        Protocol(total_first=False),
        Protocol(looks_again=False),
    ],
)
def test_the_model_finds_what_is_wrong(wrong):
    with pytest.raises(AssertionError, match="never woken"):  # noqa: PT012  # one of them finds it
        for wanted, ring_at in itertools.product((1, 2, 3, 4), (0, 100)):
            explore_one(wanted, 2, ring_at, wrong)
