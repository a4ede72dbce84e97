"""The partial-reset contract as tests, for any env of any family.

    from envherd.executor.testing import check_env_contract

    check_env_contract(lambda: gymnasium.make("CartPole-v1"), num_steps=100)

`envherd.pytest_plugin` makes a test of each rule.

The rules:
    1   one reported transition is one `env.step`, and a step never resets
    2   a reset touches exactly the envs in its mask
    3   `next` holds the last observation of an episode; the root behind it, the reset's
    4   an env that has ended is not stepped
    5   `done` is `terminated | truncated`, everywhere
    6   the same seed and actions give the same data, bit for bit
    7   what was handed out is not changed by a later step or reset, nor is a caller's mask
    8   observations are within the bounds of their spaces, and rewards are finite
    9   an env that is saved and restored continues with the same data (only for envs that can be saved)
    10  envs that share a process have the data that they have alone, pictures included (only with `together=N`)
The contract fails if it saw no episode end: without one it has checked nothing.

It takes four traces with the same seed and actions (with resets fused into the step; with separate resets; in new envs
on two workers; with additional resets of one env) and compares them.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar, NamedTuple

from envherd.executor.testing.together import check_together
from envherd.executor.testing.traces import (
    NUM_ENVS,
    Advance,
    ContractViolation,
    DrawAction,
    ExecutorBatch,
    MakeBatch,
    MakeEnv,
    Trace,
    TraceEvent,
    check_done,
    check_values,
    compare,
    demand,
    disturbed,
    drive,
    equal,
    fused,
    in_this_process,
    in_workers,
    refused,
    same,
    separate,
    show_key,
    take_trace,
)


class NoEpisodeEnd(ContractViolation):
    """No episode ended, so nothing was checked."""


class _Twice(NamedTuple):
    """What the same actions have shown in two ways: traces, or rows."""

    first: Any
    again: Any


@dataclass(frozen=True)
class ContractReport:
    """What was checked.

    Attributes:
        rules: the numbers of the rules that held.
        num_steps: steps of each of the two envs.
        num_ends: episode ends that were seen.
        are_calls_counted: whether native calls could be counted for rule 1 (otherwise only the data were compared).
    """

    rules: tuple[int, ...]
    num_steps: int
    num_ends: int
    are_calls_counted: bool


@dataclass
class Contract:
    """The rules, checked on traces that are taken when they are first needed.

    Attributes:
        make_env: builds one env; called several times.
        num_steps: steps of each trace; several episodes should end within them.
        seed: root seed of envs and actions.
        actions: draws one env's action; None draws from the spec, what an action mask allows.
        is_deterministic: whether seeds determine the data; without that, rules 2, 6 and 9 are not checked, and rules 3
            and 7 in part.
        ends_where_it_starts: whether a last observation may equal the next episode's first one.
        make_batch: what runs the envs; None for a `SerialEnv`, and a `ParallelEnv` where there are two workers.
        together: envs that rule 10 puts into one process; below 2, the rule is not checked.
    """

    make_env: MakeEnv
    num_steps: int = 100
    seed: int = 0
    actions: DrawAction | None = None
    is_deterministic: bool = True
    ends_where_it_starts: bool = False
    make_batch: MakeBatch | None = None
    together: int = 0

    #: In this order because breaking a rule may also break later ones.
    RULES: ClassVar[tuple[int, ...]] = (1, 5, 6, 7, 3, 2, 4, 8, 9)
    #: Rule -> what holds.
    TITLES: ClassVar[dict[int, str]] = {
        1: "one transition is one env.step, and a step never resets",
        2: "a reset touches the envs in its mask, and no others",
        3: "an episode's last observation is delivered, and after it the first one of the next",
        4: "an env that has ended is not stepped",
        5: "done is terminated or truncated",
        6: "the same seed and actions give the same data",
        7: "what was handed out is not changed by a later step or reset",
        8: "observations are within the bounds of their spaces, and rewards are finite",
        9: "an env that is saved and restored continues with the same data",
        10: "envs in one process do not disturb each other",
    }
    #: The rules that are not checked if seeds do not determine the data.
    COMPARES: ClassVar[tuple[int, ...]] = (2, 6, 9)

    def check(self, rule: int) -> None:
        """Check one rule.

        Raises:
            ContractViolation: it is broken, or no episode ended.
        """
        checks: dict[int, Callable[[], None]] = {
            1: self._check_steps,
            2: self._check_masks,
            3: self._check_ends,
            4: self._check_refusal,
            5: self._check_flags,
            6: self._check_seeds,
            7: self._check_copies,
            8: self._check_values,
            9: self._check_saving,
            10: partial(
                check_together,
                self.make_env,
                num_envs=self.together,
                num_steps=self.num_steps,
                seed=self.seed,
                draw_action=self.actions,
            ),
        }
        checks[rule]()

    def check_all(self) -> ContractReport:
        """Check every rule; see `check`."""
        for rule in self.rules:
            self.check(rule)
        return ContractReport(
            self.rules,
            self.num_steps,
            self.num_ends,
            self._pair.first.calls is not None,
        )

    @property
    def rules(self) -> tuple[int, ...]:
        """The rules to check: `RULES`, without 9 if the env cannot be saved, and 10 if asked for."""
        found = tuple(rule for rule in self.RULES if rule != 9 or self._saving)
        return (*found, 10) if self.together > 1 else found

    @property
    def num_ends(self) -> int:
        """Ends of episodes that were seen."""
        return len(self._pair.first.ends)

    # ---- traces ------------------------------------------------------------------------------

    def _opened(self, *, num_workers: int) -> contextlib.closing[ExecutorBatch]:
        """Return a batch that is closed at the end of a `with`."""
        make = self.make_batch or (in_this_process if num_workers == 1 else in_workers)
        return contextlib.closing(make(self.make_env, NUM_ENVS, num_workers, self.seed))

    @cached_property
    def _pair(self) -> _Twice:
        """Traces of the same episodes, in the same envs: reset within the step, then by hand."""
        with self._opened(num_workers=1) as batch:
            within = self._take(batch, fused)
            batch.env.set_seed(self.seed)
            by_hand = self._take(batch, separate)
        self._demand_ends(within)
        return _Twice(within, by_hand)

    @cached_property
    def _spread(self) -> _Twice:
        """Traces of the same episodes in new envs over two workers; then with env 0 reset again and again."""
        with self._opened(num_workers=2) as batch:
            anew = self._take(batch, fused)
            batch.env.set_seed(self.seed)
            return _Twice(anew, self._take(batch, disturbed))

    @cached_property
    def _saving(self) -> _Twice | None:
        """The events of the same steps twice, from the same state; None if the envs cannot be saved."""
        how = self._how(fused)
        with self._opened(num_workers=1) as batch:
            begun = drive(batch, batch.reset(None), 1 + self.num_steps // 3, **how)
            roots = [event.root for event in [*begun][-NUM_ENVS:]]
            if (saved := batch.save()) is None:
                return None
            first = list(drive(batch, roots, self.num_steps, **how))
            batch.env.restore(saved)
            return _Twice(first, list(drive(batch, roots, self.num_steps, **how)))

    def _demand_ends(self, trace: Trace) -> None:
        if not trace.ends:
            raise NoEpisodeEnd(
                f"the contract failed: expected at least one episode end, saw none in {self.num_steps} steps of "
                f"{NUM_ENVS} envs. Nothing was proved: make more steps, cap the episodes, or give better actions."
            )

    def _take(self, batch: ExecutorBatch, advance: Advance) -> Trace:
        return take_trace(batch, self.num_steps, **self._how(advance))

    def _how(self, advance: Advance) -> dict[str, Any]:
        return {"advance": advance, "drawn_by": self.actions, "seed": self.seed}

    # ---- rules -------------------------------------------------------------------------------

    def _check_steps(self) -> None:
        num_steps = self.num_steps * NUM_ENVS
        for trace, how in zip(
            self._pair,
            ("step_and_maybe_reset", "step, then reset"),
            strict=True,
        ):
            num_resets = NUM_ENVS + len(trace.ends)
            if trace.calls is not None and any(
                spec.metadata.get("resets_itself") for spec in trace.specs
            ):
                # An env may have begun the episode by itself.
                num_resets = trace.calls.resets
            if trace.calls is not None and trace.calls != (num_steps, num_resets):
                raise ContractViolation(
                    f"rule 1 is broken: expected {num_steps} calls of env.step and {num_resets} of env.reset for "
                    f"{num_steps} transitions with {len(trace.ends)} ends ({how}), got {trace.calls.steps} and "
                    f"{trace.calls.resets}. The env, or its adapter, steps or resets by itself."
                )

    def _check_masks(self) -> None:
        apart = self._spread.again
        if self.is_deterministic:
            compare(
                2,
                self._pair.first,
                apart,
                "it changed when env 0 was reset. Do the envs share state (a class attribute, a global)?",
                env_ids=(1,),
            )

    def _check_ends(self) -> None:
        within, by_hand = self._pair
        for event in (*within.events, *by_hand.events):
            _check_root(event)
        if self.is_deterministic:
            for mine, theirs in zip(within.events, by_hand.events, strict=True):
                demand(
                    3,
                    mine.root,
                    theirs.root,
                    f"root, {mine}",
                    "step_and_maybe_reset gave another root than step and reset.",
                )
        if not self.ends_where_it_starts:
            _check_that_ends_differ(within)

    def _check_refusal(self) -> None:
        with self._opened(num_workers=1) as batch:
            self._demand_ends(self._take(batch, refused))

    def _check_flags(self) -> None:
        for trace in self._pair:
            for one in trace.shown():
                check_done(one.row, one.where)

    def _check_seeds(self) -> None:
        within, by_hand = self._pair
        if self.is_deterministic:
            why = (
                "new envs on two workers gave other data for the same seed and actions. Draw all randomness from "
                "reset's seed, and let envs of a process share nothing that changes."
            )
            compare(6, within, self._spread.first, why)
            compare(6, self._spread.first, within, why, of_ends=True)
            why = "the same envs, seeded again, gave other data: something of an earlier episode outlives the reset."
            compare(6, within, by_hand, why)

    def _check_copies(self) -> None:
        within, by_hand = self._pair
        if self.is_deterministic:
            compare(
                7,
                by_hand,
                within,
                "the reset has overwritten the last observation. Does the adapter hand out what the env changes?",
                of_ends=True,
            )
        assert self._spread  # taking the trace has checked that masks are unchanged

    def _check_values(self) -> None:
        trace = self._pair.first
        for one in trace.shown():
            check_values(one.row, trace.specs[one.env_id], one.where)

    def _check_saving(self) -> None:
        assert self._pair  # an episode has ended
        if self._saving is None or not self.is_deterministic:
            return
        why = "something that the env's future depends on is not in its state."
        for first, again in zip(*self._saving, strict=True):
            where = f"step {1 + first.step} after the restore, env {first.env_id}"
            demand(9, first.next, again.next, where, why)
            demand(9, first.root, again.root, where, why)


def _check_root(event: TraceEvent) -> None:
    """Require that a root equals the `next` before it, or, where (part of) the env ended, is no longer done."""
    for key, value in event.root.items():
        if not event.done.any():
            if not equal(value, event.next[key]):
                raise ContractViolation(
                    f"rule 3 is broken: {show_key(key)} of the root is not that of `next` ({event})."
                )
        elif (
            key in (("done",), ("terminated",), ("truncated",))
            and (value & event.done).any()
        ):
            raise ContractViolation(
                f"rule 3 is broken: {show_key(key)} of a root outlives a reset ({event})."
            )


def _check_that_ends_differ(trace: Trace) -> None:
    keys = [leaf.key for leaf in trace.specs[0].observation]
    ends = trace.ends
    is_constant = all(
        same(event.next, trace.first[event.env_id], keys) for event in trace.events
    )
    if (
        not is_constant
        and len(ends) > 1
        and all(same(event.next, event.root, keys) for event in ends)
    ):
        raise ContractViolation(
            f"rule 3 is broken: all {len(ends)} last observations equal the first ones of the next episodes. The "
            f"env seems to reset itself in `step`, which loses them. If its episodes really end where they start, "
            f"say ends_where_it_starts=True."
        )


def check_env_contract(make_env: MakeEnv, **options: Any) -> ContractReport:
    """Check that an env keeps the partial-reset contract; see the module for its rules.

    Args:
        make_env: builds one env, of any known family; called several times, in this process and in two workers.
        **options: `num_steps`, `seed`, `actions`, `is_deterministic`, `ends_where_it_starts`, `together`: see
            `Contract`.

    Returns:
        What was checked.

    Raises:
        ContractViolation: the first rule that is broken, or no episode ended.
        EnvError: the env raised, or broke its own spec.
        FactoryError: the factory raised, or cannot be sent to a worker.
    """
    return Contract(make_env, **options).check_all()
