"""The explorer of the models: it visits every state that can be reached."""

from collections import deque
from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

S = TypeVar("S", bound=Hashable)


def explore(
    start: S, moves: Callable[[S], Iterable[S]], is_end: Callable[[S], bool]
) -> int:
    """Visit every state; return how many there are.

    Args:
        start: the first state.
        moves: state -> those after one step of any side; raises AssertionError if the state must not be reachable.
        is_end: whether the model has reached its end, which must be possible from every state.

    Raises:
        AssertionError: of `moves`; or a state from which no end can be reached.
    """
    befores: dict[S, list[S]] = {start: []}
    queue = deque([start])
    while queue:
        state = queue.popleft()
        for moved in moves(state):
            if moved not in befores:
                befores[moved] = []
                queue.append(moved)
            befores[moved].append(state)
    reached = set(filter(is_end, befores))
    queue.extend(reached)
    while queue:
        for state in befores[queue.popleft()]:
            if state not in reached:
                reached.add(state)
                queue.append(state)
    stuck = befores.keys() - reached
    assert not stuck, f"a deadlock: the end cannot be reached from {next(iter(stuck))}"
    return len(befores)
