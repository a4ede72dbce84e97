"""A model of doorbells, sequence numbers, supervision and restarts, small enough to explore all its states.

The order of both sides' steps is that of `workers.protocol`. Workers have one env each. A worker may die at any point,
also while it is rebuilt; a late one may be killed; an interrupt may end the parent's wait or its sending at any point.
Every step of either side is one transition, and all interleavings are explored.

Checked in every reachable state:
- an answer that the parent takes is the row of its command, carried out once (no stale, torn or repeated row);
- no worker carries out a command that is already answered (a lost step is never retried);
- without deaths and interrupts, the parent never sleeps unless a worker will wake it (no lost wake-up);
- the end is reachable from every state (no deadlock).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from envherd.workers.protocol import PARENT_STEPS, WORKER_STEPS
from tests.oracles.exploring import explore

DEAD, BUILDING = -1, -2


class Worker(NamedTuple):
    """One worker and its words; `at` is its next step of `WORKER_STEPS`, or DEAD, or BUILDING."""

    inputs: int = 0
    command: int = 0
    command_seq: int = 0
    reply_seq: int = 0
    row: int = 0
    runs: int = 0
    go: int = 0
    at: int = 0
    latest: int = 0
    number: int = 0
    is_lost: bool = False
    is_asked: bool = True


class State(NamedTuple):
    """The whole state; the workers are sorted, because they are interchangeable."""

    phase: str
    at: int
    step: int
    number: int
    tokens: int
    done: int
    deaths_left: int
    interrupts_left: int
    is_calm: bool
    is_recovering: bool
    workers: tuple[Worker, ...]


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """The protocol, with options that break it.

    Attributes:
        parent: order of the parent's steps.
        worker: order of a worker's steps.
        drains_first: whether the parent takes tokens before it compares numbers, when it waits slowly.
        starts_from_reply: whether a successor continues from the latest answer, or from the beginning.
        looks_around: whether the parent checks for deaths while it waits.
    """

    parent: tuple[str, ...] = PARENT_STEPS
    worker: tuple[str, ...] = WORKER_STEPS
    drains_first: bool = True
    starts_from_reply: bool = True
    looks_around: bool = True
    num_workers: int = 3
    num_steps: int = 3
    num_deaths: int = 1
    num_interrupts: int = 1

    def start(self) -> State:
        """Return the first state."""
        workers = (Worker(),) * self.num_workers
        return State(
            phase="send",
            at=0,
            step=1,
            number=1,
            tokens=0,
            done=0,
            deaths_left=self.num_deaths,
            interrupts_left=self.num_interrupts,
            is_calm=True,
            is_recovering=False,
            workers=workers,
        )

    # ---- the parent --------------------------------------------------------------------------

    def parent_moves(self, s: State) -> Iterator[State]:
        """Yield the states that a step of the parent leads to."""
        if s.phase == "send":
            yield self._send(s)
        elif s.phase == "fast":  # a token from each, and all the numbers
            if s.tokens >= self.num_workers and _is_idle(s):
                yield s._replace(phase="settle")
            elif s.done:
                yield s._replace(
                    done=s.done - 1, tokens=min(s.tokens + 1, self.num_workers)
                )
            else:
                yield s._replace(phase="drain")
        elif s.phase in ("drain", "compare", "sleep"):
            yield from self._wait_slowly(s)
        elif s.phase == "settle":
            yield self._settle(s)
        elif s.phase == "revive":
            yield from self._revive(s)
        if s.interrupts_left and s.phase in (
            "send",
            "fast",
            "drain",
            "compare",
            "sleep",
        ):
            woken = tuple(_wake_worker(w) for w in s.workers)
            yield s._replace(
                phase="drain",
                is_recovering=True,
                is_calm=False,
                interrupts_left=s.interrupts_left - 1,
                workers=woken,
            )

    def _send(self, s: State) -> State:
        what = self.parent[s.at]
        workers = tuple(
            _tell(w, what, s.number) if w.is_asked else w for w in s.workers
        )
        if s.at + 1 < len(self.parent):
            return s._replace(at=s.at + 1, workers=workers)
        is_for_all = all(w.is_asked for w in workers)
        return s._replace(
            phase="fast" if is_for_all else "drain", at=0, tokens=0, workers=workers
        )

    def _wait_slowly(self, s: State) -> Iterator[State]:
        order = ("drain", "compare") if self.drains_first else ("compare", "drain")
        if s.phase == "drain":
            yield s._replace(
                done=0, phase="compare" if order[0] == "drain" else "sleep"
            )
        elif s.phase == "sleep" and s.done:
            yield s._replace(done=s.done - 1, phase=order[0])
        elif s.phase == "sleep":
            yield from self._look_around(s)
        elif _is_idle(s):
            yield s._replace(phase="settle")
        else:
            yield s._replace(phase="sleep" if order[1] == "compare" else "drain")

    def _look_around(self, s: State) -> Iterator[State]:
        again = "drain" if self.drains_first else "compare"
        assert not s.is_calm or any(w.at > 0 or w.go for w in s.workers), (
            f"a lost wake-up: the parent sleeps, and so does everybody: {s}"
        )
        if not s.is_calm:  # while all is calm, wake-ups alone must be enough
            yield s._replace(phase=again)
        gone = [
            i
            for i, w in enumerate(s.workers)
            if w.at == DEAD and not w.is_lost and w.command_seq != w.reply_seq
        ]
        if gone and self.looks_around:
            workers = [
                w._replace(reply_seq=w.command_seq, is_lost=True) if i in gone else w
                for i, w in enumerate(s.workers)
            ]
            yield s._replace(phase=again, workers=tuple(workers))
        for i, w in enumerate(s.workers):
            # Late: killed, and waited for.
            if s.deaths_left and w.at >= 0 and w.command_seq != w.reply_seq:
                killed = w._replace(at=DEAD, reply_seq=w.command_seq, is_lost=True)
                workers = [*s.workers[:i], killed, *s.workers[i + 1 :]]
                yield s._replace(
                    phase=again,
                    is_calm=False,
                    deaths_left=s.deaths_left - 1,
                    workers=tuple(workers),
                )

    def _settle(self, s: State) -> State:
        """Take the answers; begin to replace lost workers, or continue with the next step."""
        for w in s.workers:
            assert (
                not w.is_asked
                or w.is_lost
                or s.is_recovering
                or (w.row, w.runs) == (s.number, 1)
            ), f"a stale or repeated row: expected that of command {s.number}, got {w}"
        if any(w.is_lost for w in s.workers):
            workers = tuple(
                w._replace(at=BUILDING, go=0, is_asked=True) if w.is_lost else
                w._replace(is_asked=False) for w in s.workers
            )  # fmt: skip
            return s._replace(phase="revive", is_recovering=False, workers=workers)
        workers = tuple(w._replace(is_asked=True, runs=0, row=0) for w in s.workers)
        step = s.step + 1
        phase = "send" if step <= self.num_steps else "over"
        return s._replace(
            phase=phase,
            at=0,
            step=step,
            number=s.number + 1,
            is_recovering=False,
            workers=workers,
        )

    def _revive(self, s: State) -> Iterator[State]:
        """Wait for successors (one that died during its build is replaced again), then reset them."""
        lost = [w for w in s.workers if w.is_lost]
        if any(w.at == DEAD for w in lost):
            workers = tuple(
                w._replace(at=BUILDING) if w.is_lost and w.at == DEAD else w
                for w in s.workers
            )
            yield s._replace(workers=workers)
        elif all(w.at >= 0 for w in lost):
            workers = tuple(w._replace(is_lost=False) for w in s.workers)
            yield s._replace(phase="send", at=0, number=s.number + 1, workers=workers)

    # ---- workers -----------------------------------------------------------------------------

    def worker_moves(self, s: State, i: int) -> Iterator[tuple[Worker, int]]:
        """Yield a worker after one of its steps, and the number of done tokens it rang."""
        w = s.workers[i]
        if w.at == DEAD:
            return
        if w.at == BUILDING:
            yield (
                w._replace(at=0, latest=w.reply_seq if self.starts_from_reply else 0),
                0,
            )
            return
        what, following = self.worker[w.at], (w.at + 1) % len(self.worker)
        if what == "go":
            if w.go:
                yield w._replace(go=w.go - 1, at=following), 0
        elif what == "command_seq":
            if w.command_seq == w.latest:
                yield w._replace(at=0), 0
            else:
                yield w._replace(number=w.command_seq, at=following), 0
        elif what == "rows":
            assert w.reply_seq != w.number or self.worker.index(
                "rows"
            ) >= self.worker.index("reply_seq"), (
                f"a command that has its answer is carried out: {w}"
            )
            is_whole = w.inputs == w.command == w.number
            yield (
                w._replace(
                    row=w.number if is_whole else -1, runs=w.runs + 1, at=following
                ),
                0,
            )
        elif what == "reply_seq":
            yield w._replace(reply_seq=w.number, latest=w.number, at=following), 0
        else:
            yield w._replace(at=following), int(what == "done")

    def explore(self) -> int:
        """Visit every state; return how many there are.

        Raises:
            AssertionError: see the module.
        """
        return explore(self.start(), self._sorted_moves, lambda s: s.phase == "over")

    def _sorted_moves(self, s: State) -> Iterator[State]:
        return (
            moved._replace(workers=tuple(sorted(moved.workers)))
            for moved in self.moves(s)
        )

    def moves(self, s: State) -> Iterator[State]:
        """Yield every state after one step of any side, or one death."""
        yield from self.parent_moves(s)
        for i, w in enumerate(s.workers):
            others = (s.workers[:i], s.workers[i + 1 :])
            for moved, rung in self.worker_moves(s, i):
                yield s._replace(
                    workers=(*others[0], moved, *others[1]), done=s.done + rung
                )
            if s.deaths_left and w.at != DEAD:
                workers = (*others[0], w._replace(at=DEAD), *others[1])
                yield s._replace(
                    workers=workers, deaths_left=s.deaths_left - 1, is_calm=False
                )


def _tell(w: Worker, what: str, number: int) -> Worker:
    if what == "go":
        return _wake_worker(w)
    return (
        w._replace(runs=0, command_seq=number)
        if what == "command_seq"
        else w._replace(**{what: number})  # type: ignore[arg-type]
    )


def _wake_worker(w: Worker) -> Worker:
    return w._replace(go=w.go + 1)


def _is_idle(s: State) -> bool:
    return all(w.command_seq == w.reply_seq for w in s.workers)
