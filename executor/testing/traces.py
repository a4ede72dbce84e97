"""Traces: the data of a batch for one seed and one sequence of actions; the batch, and the comparison of rows."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from envherd.executor.batched import BatchedEnv
from envherd.executor.batches.hand_out import non_tensor
from envherd.executor.options import ExecutorOptions
from envherd.executor.parallel import ParallelEnv
from envherd.executor.serial import SerialEnv
from envherd.shm.specs import DONE_KEYS, Box, EnvSpec, Key
from envherd.workers.errors import EnvError, ResetNeeded
from envherd.workers.random_values import draw, draw_masked, mask_key

# ---- batch -------------------------------------------------------------------------------------
# The batch of envs that the contract drives, N envs in an executor; and the comparison of their rows.

#: One env's leaves: copies of arrays, and side-channel values.
Row = dict[Key, Any]
#: What a step has shown of all envs: the rows of the step, and the rows after it and after the resets that follow it.
Stepped = tuple[list[Row], list[Row]]

MakeEnv = Callable[[], Any]

_FINITE = (
    "Mend the env; in training, ExecutorOptions(check_finite=True) refuses such a step."
)


class Calls(NamedTuple):
    """How often native envs were stepped and reset."""

    steps: int
    resets: int


class ExecutorBatch:
    """The envs under test; the executor's counts stand for calls of the native envs, unless these are counted.

    Args:
        env: the executor.
        counts: what `count_native_calls` returned.

    Attributes:
        specs: one for each env.
    """

    def __init__(self, env: BatchedEnv, counts: Counter[str] | None = None) -> None:
        self.env = env
        self.specs: Sequence[EnvSpec] = env.specs
        self._counts = counts

    def reset(self, mask: np.ndarray | None) -> list[Row]:
        """Reset the envs in `mask` (bool `[N, *batch_shape, 1]`; None for all); return the roots of ALL envs."""
        td = (
            None
            if mask is None
            else TensorDict({"_reset": torch.from_numpy(mask)}, self.env.batch_size)
        )
        return self._rows(self.env.reset(td), "root")

    def step(
        self,
        actions: list[list[Any]],
        *,
        resets_ended: bool,
    ) -> Stepped:
        """Step all envs."""
        td: TensorDictBase = TensorDict({}, self.env.batch_size)
        for leaf, *values in zip(
            (*self.specs[0].action, *self.specs[0].state),
            *actions,
            strict=True,
        ):
            if leaf.is_side:
                td.set(leaf.key, non_tensor(values, td.batch_size))
            else:
                td.set(
                    leaf.key,
                    torch.from_numpy(
                        np.stack([np.asarray(value, leaf.dtype) for value in values])
                    ),
                )
        if resets_ended:
            td, root = self.env.step_and_maybe_reset(td)
        else:
            td = self.env.step(td)
            root = self.env.current()
        return self._rows(td["next"], "next"), self._rows(root, "root")

    def save(self) -> list[Any] | None:
        """Return the states of all envs, or None if they cannot be saved."""
        try:
            return self.env.save()
        except EnvError as error:
            if error.context["type_name"] != "NotImplementedError":
                raise
            return None

    def count_calls(self) -> Calls | None:
        """Return how often the native envs were stepped and reset so far.

        None if an env could not be watched, or its adapter calls it in other ways.
        """
        counts = self._counts
        if counts is None:
            words = self.env.engine.pool.slab.words
            return Calls(int(words["env_steps"].sum()), int(words["resets"].sum()))
        are_complete = counts["step"] and counts["reset"] and not counts["missed"]
        return Calls(counts["step"], counts["reset"]) if are_complete else None

    def close(self) -> None:
        """Close the envs."""
        self.env.close()

    def _rows(self, td: TensorDictBase, section: str) -> list[Row]:
        return [_row(td[i], spec, section) for i, spec in enumerate(self.specs)]


#: `(make_env, num_envs, num_workers, root seed) -> batch`
MakeBatch = Callable[[MakeEnv, int, int, int], ExecutorBatch]


def in_this_process(
    make_env: MakeEnv,
    num_envs: int,
    num_workers: int,  # noqa: ARG001  # there are no workers
    root_seed: int,
) -> ExecutorBatch:
    """Run envs in this process, and count the calls of the native ones."""
    env = SerialEnv(num_envs, make_env, seed=root_seed)
    return ExecutorBatch(env, count_native_calls(env))


def in_workers(
    make_env: MakeEnv,
    num_envs: int,
    num_workers: int,
    root_seed: int,
    options: ExecutorOptions | None = None,
) -> ExecutorBatch:
    """Run envs in worker processes."""
    return ExecutorBatch(
        ParallelEnv(
            num_envs,
            make_env,
            num_workers=num_workers,
            seed=root_seed,
            options=options,
        )
    )


def count_native_calls(env: SerialEnv) -> Counter[str]:
    """Count calls of the native envs from now on; return the counts of "step", "reset" and methods that are "missed".

    A method is missed if the env lets nothing replace it.
    """
    counts: Counter[str] = Counter()
    pool: Any = env.engine.pool
    for adapter in pool.adapters.values():
        for name in ("step", "reset"):
            try:
                method = getattr(adapter.env, name)
                setattr(adapter.env, name, _counted(counts, name, method))
            except (AttributeError, TypeError):
                counts["missed"] += 1
    return counts


def _counted(
    counts: Counter[str],
    name: str,
    method: Callable[..., Any],
) -> Callable[..., Any]:
    def counted(*args: Any, **kwargs: Any) -> Any:
        counts[name] += 1
        return method(*args, **kwargs)

    return counted


def _row(td: TensorDictBase, spec: EnvSpec, section: str) -> Row:
    return {
        leaf.key: td.get(leaf.key).tolist()
        if leaf.is_side
        else td.get(leaf.key).numpy().copy()
        for leaf in (
            *spec.observation,
            *spec.done,
            *(spec.reward if section == "next" else ()),
        )
    }


# ---- rows -----------------------------------------------------------------------------------------


class ContractViolation(AssertionError):
    """An env, or its executor, has broken a rule."""


def demand(rule: int, one: Row, other: Row, where: str, why: str) -> None:
    """Raise unless two rows are equal, bit for bit."""
    for key, value in one.items():
        if not equal(value, other[key]):
            raise ContractViolation(
                f"rule {rule} is broken: expected {show_key(key)} {show(value)}, got {show(other[key])} ({where}): "
                f"{why}"
            )


def check_done(row: Row, where: str) -> None:
    """Raise unless every `done` of a row is `terminated | truncated`."""
    for key in row:
        if key[-1] != "done" or not all(
            (*key[:-1], *last) in row for last in DONE_KEYS
        ):
            continue
        done = row[key]
        terminated = row[*key[:-1], "terminated"]
        truncated = row[*key[:-1], "truncated"]
        if not np.array_equal(done, terminated | truncated):
            raise ContractViolation(
                f"rule 5 is broken: expected {show_key(key)} to be terminated | truncated, got {show(done)} for "
                f"{show(terminated)} and {show(truncated)} ({where})."
            )


def check_values(row: Row, spec: EnvSpec, where: str) -> None:
    """Raise unless the observations of a row are within the bounds of their spaces, and its rewards are finite."""
    for leaf in spec.observation:
        if leaf.is_side:
            continue
        value = row[leaf.key]
        if (is_nan := np.not_equal(value, value)).any():
            raise _violation(leaf.key, "without NaN", value, is_nan, where, _FINITE)
        if not isinstance(leaf.domain, Box):
            continue
        outside = (value < leaf.domain.low) | (value > leaf.domain.high)
        if outside.any():
            raise _violation(
                leaf.key,
                f"in {leaf.domain}",
                value,
                outside,
                where,
                "Mend the env's observation_space, or clip its observations.",
            )
    for leaf in spec.reward:
        if leaf.key in row and (infinite := ~np.isfinite(row[leaf.key])).any():
            raise _violation(
                leaf.key,
                "finite",
                row[leaf.key],
                infinite,
                where,
                _FINITE,
            )


def _violation(
    key: Key,
    expected: str,
    value: Any,
    is_broken: Any,
    where: str,
    advice: str,
) -> ContractViolation:
    at = tuple(map(int, np.argwhere(is_broken)[0]))
    return ContractViolation(
        f"rule 8 is broken: expected {show_key(key)} {expected}, got {value[at]} at {at} ({where}). {advice}"
    )


def has_ended(row: Row) -> bool:
    """Return whether (part of) an env had ended."""
    return bool(row[("done",)].any())


def same(one: Row, other: Row, keys: list[Key]) -> bool:
    """Return whether two rows agree in some keys."""
    return all(equal(one[key], other[key]) for key in keys)


def equal(one: Any, other: Any) -> bool:
    """Return whether two values have the same bits; NaN equals NaN."""
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return (
            one.dtype == other.dtype
            and one.shape == other.shape
            and one.tobytes() == other.tobytes()
        )
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(
            equal(one[key], other[key]) for key in one
        )
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(np.all(one == other))


def show_key(key: Key) -> str:
    """Return a key for messages."""
    return "/".join(key)


def show(value: Any) -> str:
    """Return a value as a short text for messages."""
    text = " ".join(str(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."


# ---- traces ------------------------------------------------------------------------------------

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


def _draw_action(
    drawn_by: DrawAction | None,
    spec: EnvSpec,
    rng: np.random.Generator,
    root: Row,
) -> list[Any]:
    """Return one env's action; None as the function draws values from the spec, which action masks allow."""
    if drawn_by is not None:
        return drawn_by(spec, rng)
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
        actions = [
            _draw_action(drawn_by, *of)
            for of in zip(batch.specs, rngs, roots, strict=True)
        ]
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
        # An episode that ends in one of them alone differs there.
        is_end = mine.is_end or (of_ends and theirs.is_end)
        if mine.env_id in env_ids and is_end == of_ends:
            demand(rule, mine.row, theirs.row, mine.where, why)
