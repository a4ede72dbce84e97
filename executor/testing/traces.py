"""Traces: the data of a batch for one seed and one sequence of actions, driven in different ways."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from envherd.executor.testing.batch import (
    Calls,
    ContractViolation,
    ExecutorBatch,
    Row,
    Stepped,
    demand,
    has_ended,
)
from envherd.shm.specs import EnvSpec
from envherd.workers.errors import ResetNeeded
from envherd.workers.random_values import draw, draw_masked, mask_key

#: `(spec, rng) -> values aligned with spec.action and then spec.state`
DrawAction = Callable[[EnvSpec, np.random.Generator], list[Any]]
#: `(batch, actions, step)`: makes a step.
Advance = Callable[[ExecutorBatch, list[list[Any]], int], Stepped]

NUM_ENVS = 2


@dataclass(frozen=True)
class TraceEvent:
    """One env's share of one step.

    Attributes:
        step, env_id: of the event.
        next: the row of the step.
        root: the env's root after it.
    """

    step: int
    env_id: int
    next: Row
    root: Row

    @property
    def done(self) -> np.ndarray:
        """Which parts of the env ended, bool `[*batch_shape, 1]`."""
        return self.next[("done",)]

    def __str__(self) -> str:
        return f"env {self.env_id}, step {self.step}"


class Shown(NamedTuple):
    """What an env has shown in a reset or a step.

    Attributes:
        env_id: of the env.
        where: in words.
        row: its values.
        is_end: they are the last ones of (part of) an episode.
    """

    env_id: int
    where: str
    row: Row
    is_end: bool = False


@dataclass(frozen=True)
class Trace:
    """The data of one run.

    Attributes:
        specs: of the envs.
        first: root rows after the first reset.
        events: by step, then by env.
        calls: of native envs, made by this run; None if they could not be counted.
    """

    specs: list[EnvSpec]
    first: list[Row]
    events: list[TraceEvent]
    calls: Calls | None

    @property
    def ends(self) -> list[TraceEvent]:
        """The events at which (part of) an env ended."""
        return [event for event in self.events if event.done.any()]

    def shown(self) -> Iterator[Shown]:
        """Yield all rows: of the first reset, and then of each event."""
        for env_id, row in enumerate(self.first):
            yield Shown(env_id, f"the first reset, env {env_id}", row)
        for event in self.events:
            is_end = bool(event.done.any())
            yield Shown(event.env_id, f"next, {event}", event.next, is_end)
            yield Shown(event.env_id, f"root, {event}", event.root)


def _draw_actions(
    drawn_by: DrawAction | None,
    specs: Sequence[EnvSpec],
    rngs: Sequence[np.random.Generator],
    roots: Sequence[Row],
) -> list[list[Any]]:
    """Return an action of each env; None as the function draws values from the specs, which action masks allow."""
    if drawn_by is not None:
        return [drawn_by(spec, rng) for spec, rng in zip(specs, rngs, strict=True)]
    return [
        _legal_values(spec, rng, root)
        for spec, rng, root in zip(specs, rngs, roots, strict=True)
    ]


def _legal_values(spec: EnvSpec, rng: np.random.Generator, root: Row) -> list[Any]:
    """Return values of one env's actions and states, aligned with `spec.action` and then `spec.state`."""
    keys = [mask_key(spec, leaf) for leaf in spec.action] + [None] * len(spec.state)
    return [
        draw(leaf, rng) if key is None else draw_masked(rng, root[key], leaf)
        for leaf, key in zip((*spec.action, *spec.state), keys, strict=True)
    ]


def drive(
    batch: ExecutorBatch,
    roots: list[Row],
    num_steps: int,
    *,
    advance: Advance,
    drawn_by: DrawAction | None,
    seed: int,
) -> Iterator[TraceEvent]:
    """Step a batch from its roots, with actions that depend on seed, env, step and masks; yield the events."""
    first = batch.env.options.first_env_id
    rngs = [np.random.default_rng([seed, first + i]) for i in range(len(roots))]
    for step in range(num_steps):
        actions = _draw_actions(drawn_by, batch.specs, rngs, roots)
        nexts, roots = advance(batch, actions, step)
        for env_id, rows in enumerate(zip(nexts, roots, strict=True)):
            yield TraceEvent(step, env_id, *rows)


def take_trace(batch: ExecutorBatch, num_steps: int, **how: Any) -> Trace:
    """Reset a batch and step it.

    Args:
        batch: to step.
        num_steps: of each env.
        **how: `advance`, `drawn_by` and `seed` of `drive`.
    """
    before = batch.count_calls() or Calls(0, 0)
    first = batch.reset(None)
    events = list(drive(batch, first, num_steps, **how))
    after = batch.count_calls()
    calls = None
    if after is not None:
        calls = Calls(after.steps - before.steps, after.resets - before.resets)
    return Trace(list(batch.specs), first, events, calls)


def fused(
    batch: ExecutorBatch,
    actions: list[list[Any]],
    step: int,  # noqa: ARG001  # see `Advance`
) -> Stepped:
    """Step, and reset within the same command."""
    return batch.step(actions, resets_ended=True)


def separate(
    batch: ExecutorBatch,
    actions: list[list[Any]],
    step: int,  # noqa: ARG001
) -> Stepped:
    """Step, then reset what ended."""
    nexts, roots = batch.step(actions, resets_ended=False)
    if any(map(has_ended, nexts)):
        roots = batch.reset(np.stack([row[("done",)] for row in nexts]))
    return nexts, roots


def disturbed(
    batch: ExecutorBatch,
    actions: list[list[Any]],
    step: int,
) -> Stepped:
    """Step and reset ended envs; every third time also reset no env, then env 0, and check the other rows."""
    nexts, roots = separate(batch, actions, step)
    if step % 3 != 0:
        return nexts, roots
    where = f"step {step}"
    before = batch.count_calls()
    mask = np.zeros((NUM_ENVS, *nexts[0][("done",)].shape), bool)
    untouched = batch.reset(mask)
    for env_id, row in enumerate(untouched):
        demand(
            2,
            roots[env_id],
            row,
            f"env {env_id}, {where}",
            "a reset of nobody changed it.",
        )
    if batch.count_calls() != before:
        raise ContractViolation(
            f"rule 2 is broken: a reset with an all-False mask has reset an env ({where})."
        )
    mask[0] = True
    given = mask.copy()
    roots = batch.reset(mask)
    if not np.array_equal(mask, given):
        raise ContractViolation(
            f"rule 7 is broken: a reset changed the mask that it was given ({where})."
        )
    demand(
        2,
        untouched[1],
        roots[1],
        f"env 1, {where}",
        "it changed when env 0 was reset.",
    )
    return nexts, roots


def refused(
    batch: ExecutorBatch,
    actions: list[list[Any]],
    step: int,
) -> Stepped:
    """Step; where an env has ended, require that the next step is refused, and reset what ended."""
    nexts, roots = batch.step(actions, resets_ended=False)
    if ended := tuple(i for i, row in enumerate(nexts) if has_ended(row)):
        _check_refusal(batch, actions, ended, f"step {step}")
        roots = batch.reset(np.stack([row[("done",)] for row in nexts]))
    return nexts, roots


def _check_refusal(
    batch: ExecutorBatch,
    actions: list[Any],
    ended: tuple[int, ...],
    where: str,
) -> None:
    calls = batch.count_calls()
    try:
        batch.step(actions, resets_ended=False)
    except ResetNeeded as error:
        named = error.env_ids
    else:
        raise ContractViolation(
            f"rule 4 is broken: envs {ended} had ended and were stepped ({where})."
        )
    if named != ended:
        raise ContractViolation(
            f"rule 4 is broken: expected ResetNeeded for envs {ended}, got it for {named} ({where})."
        )
    if batch.count_calls() != calls:
        raise ContractViolation(
            f"rule 4 is broken: a refused step has stepped an env ({where})."
        )


def compare(
    rule: int,
    one: Trace,
    other: Trace,
    why: str,
    *,
    env_ids: tuple[int, ...] = (0, 1),
    of_ends: bool = False,
) -> None:
    """Require that two traces have the same data for some envs.

    Args:
        rule: that is checked.
        one: the expected trace.
        other: the trace that was got.
        why: the end of the message.
        env_ids: of the envs.
        of_ends: compare only the last rows of episodes; otherwise, all but these.
    """
    for mine, theirs in zip(one.shown(), other.shown(), strict=True):
        if mine.env_id in env_ids and mine.is_end == of_ends:
            demand(rule, mine.row, theirs.row, mine.where, why)
