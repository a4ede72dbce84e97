"""Shared parts of the fuzzers: the oracle, which knows what the envs have done, and the running of cases.

A case is a function of one seed: it opens executors with random options, applies random operations, breaks workers on
purpose, and compares every row with the envs' diary (see `tests.oracles.fuzz_envs`).
"""

import faulthandler
import functools
import gc
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from envherd.workers.seeding import episode_seed
from tests.faults.matrix import _held, _left
from tests.oracles.fuzz_envs import FIELDS, RECORD, Kind, checksum

#: Number of episodes per root seed whose seeds are known.
_MANY = 400


class Row(NamedTuple):
    """One observation; see `FIELDS`."""

    env_id: int
    lane: int
    nonce: int
    episode: int
    t: int
    action: int
    seed: int
    level: int
    checksum: int

    @classmethod
    def of(cls, values: Any) -> "Row":
        """Return the row with some values, `[WIDTH]`."""
        return cls(*map(int, values))

    @property
    def key(self) -> tuple[int, int, int]:
        """Instance, episode and step: the name of the row."""
        return self.nonce, self.episode, self.t

    def __str__(self) -> str:
        return f"[env {self.env_id}.{self.lane} instance {self.nonce:x} episode {self.episode} t {self.t}]"


class Transition(NamedTuple):
    """One step of one row of one env, as handed out."""

    root: Row | None  # None: not in the batch
    action: int
    next: Row
    reward: float
    done: bool
    terminated: bool
    truncated: bool
    interrupted: bool


class Given(NamedTuple):
    """The arguments of a reset: a seed for each env (None: none), and the option `level`."""

    seeds: tuple[int | None, ...] | None = None
    levels: tuple[int, ...] | None = None


NOTHING = Given()
Place = tuple[int, int]


@functools.lru_cache(maxsize=64)
def _episodes(root_seed: int, env_id: int) -> dict[int, int]:
    return {
        episode_seed(root_seed, env_id, episode): episode for episode in range(_MANY)
    }


class Oracle:
    """Tracks each row's position, the envs' diary, and the data handed out.

    Attributes:
        at: (env, lane) -> its latest row; None if unknown after a broken-off call.
        ended: (env, lane) -> whether its episode has ended.
        root_seed: in use; None if unknown.
        checks_seeds: whether the executor seeds the episodes.
    """

    def __init__(
        self, folder: str, places: list[Place], *, checks_seeds: bool = True
    ) -> None:
        self._path = Path(folder, "diary")
        self._path.touch()
        self._read = 0
        self.made: dict[tuple[int, int, int], tuple[int, int, int, int, int]] = {}
        self.resets: dict[Place, int] = {}
        self.steps: dict[Place, int] = {}
        self.begun: set[tuple[int, int]] = set()
        self.handed_out: set[tuple[int, int, int]] = set()
        self.at: dict[Place, Row | None] = dict.fromkeys(places)
        self.ended: dict[Place, bool] = dict.fromkeys(places, True)
        self.root_seed: int | None = None
        self.checks_seeds = checks_seeds
        self._latest: dict[Place, int] = {}
        self.num_transitions = self.num_interrupted = 0

    # ---- the diary ---------------------------------------------------------------------------

    def read_diary(self) -> None:
        """Read new records."""
        with self._path.open("rb") as file:
            file.seek(self._read)
            data = file.read()
        whole = len(data) // RECORD.itemsize * RECORD.itemsize
        self._read += whole
        for kind, lane, env_id, episode, t, action, nonce, seed in np.frombuffer(
            data[:whole], RECORD
        ).tolist():
            place = (env_id, lane)
            assert kind != Kind.WRONG, (
                f"env {env_id}.{lane} instance {nonce:x} was stepped (episode {episode}, t {t}) "
                f"{'without a reset' if episode < 0 else 'after its end'}"
            )
            if kind == Kind.BUILD:
                continue
            counts = self.resets if kind == Kind.RESET else self.steps
            counts[place] = counts.get(place, 0) + 1
            self.made[nonce, episode, t] = (kind, env_id, lane, action, seed)

    def _check_made(self, row: Row, what: str) -> None:
        assert row.checksum == checksum(row[:-1]), (
            f"{what}: torn row {dict(zip(FIELDS, row, strict=True))}"
        )
        made = self.made.get(row.key)
        expected = (row.env_id, row.lane, row.action, row.seed)
        assert (made or ())[1:] == expected, (
            f"{what}: {row} {tuple(row)} was never made (the diary has {made})"
        )

    # ---- rows --------------------------------------------------------------------------------

    def forget(self, places: Any) -> None:
        """Mark some rows' positions as unknown."""
        for place in places:
            self.at[place] = None

    def root(
        self,
        place: Place,
        row: Row,
        *,
        done: bool,
        given: Given = NOTHING,
        may_end: bool = False,
        may_begin: bool = False,
    ) -> None:
        """Check a root that was handed out.

        Args:
            place: of the expected row.
            row: the root.
            done: likewise.
            given: arguments of the reset that has made it.
            may_end: it may say that the episode has ended: its worker was lost.
            may_begin: it may begin an episode though none has ended, likewise.
        """
        if not any(row) and self.at[place] is None:
            self.ended[place] = True  # never reset
            return
        assert (row.env_id, row.lane) == place, f"root of {place}: got a row of {row}"
        self._check_made(row, f"root of {place}")
        before = self.at[place]
        if before is not None and row == before:
            assert done == self.ended[place] or (done and may_end), (
                f"root of {place}: {row} done={done}, it was {self.ended[place]}"
            )
        elif before is None:
            # After a broken-off call it continues, or must be reset.
            self.begun.add(row.key[:2])
        else:
            is_due = self.ended[place] or may_begin
            assert is_due, (
                f"root of {place}: was at {before}, which had not ended, and is at {row}"
            )
            self.begin(place, row, given)
            assert not done, f"root of {place}: {row} begins an episode with done=True"
        self.at[place], self.ended[place] = row, done

    def begin(self, place: Place, row: Row, given: Given = NOTHING) -> None:
        """Check the first row of an episode."""
        what = f"first row of {place}"
        assert (row.env_id, row.lane) == place, f"{what}: got a row of {row}"
        self._check_made(row, what)
        assert (row.t, row.action) == (0, -1), (
            f"{what}: expected t 0, got {row} (it was at {self.at[place]})"
        )
        assert row.key[:2] not in self.begun, (
            f"{what}: {row} had begun before (it was at {self.at[place]})"
        )
        self.begun.add(row.key[:2])
        env_id, lane = place
        level = 0 if given.levels is None else given.levels[env_id]
        assert row.level == level, f"{what}: expected level {level}, got {row.level}"
        seed = None if given.seeds is None else given.seeds[env_id]
        assert seed is None or row.seed == seed + lane, (
            f"{what}: expected seed {seed + lane}, got {row.seed}"
        )
        if (
            seed is None
            and self.checks_seeds
            and self.root_seed is not None
            and given.seeds is None
        ):
            episode = _episodes(self.root_seed, env_id).get(row.seed - lane)
            assert episode is not None, (
                f"{what}: seed {row.seed} is none of root seed {self.root_seed}"
            )
            assert episode > self._latest.get(place, -1), (
                f"{what}: repeats episode {episode} of root seed {self.root_seed}"
            )
            self._latest[place] = episode
        self.at[place], self.ended[place] = row, False

    def reseeded(self, root_seed: int | None) -> None:
        """Record a new root seed; None if unknown after a broken-off call."""
        self.root_seed = root_seed
        self._latest = {}

    def load(
        self,
        at: dict[Place, Row | None],
        ended: dict[Place, bool],
        root_seed: int,
        episodes: Sequence[int],
    ) -> None:
        """Record that a state of all envs was loaded: they repeat what they did after it was saved.

        Args:
            at: where they were.
            ended: whether they had ended.
            root_seed: of their next episodes.
            episodes: which episode the next reset of each env begins.
        """
        self.at, self.ended = dict(at), dict(ended)
        self.root_seed, self._latest = (
            root_seed,
            {place: episodes[place[0]] - 1 for place in at},
        )
        latest = {row.key[:2]: row.t for row in at.values() if row is not None}
        self.handed_out = {
            key for key in self.handed_out if key[2] <= latest.get(key[:2], key[2])
        }

    def follow(self, place: Place, one: Transition) -> None:
        """Check a transition that was handed out."""
        before, after = self.at[place], one.next
        what = f"step of {place}"
        if one.root is not None:
            assert before is None or one.root == before, (
                f"{what}: was at {before}, the root says {one.root}"
            )
            if before is None:
                self._check_made(one.root, f"root of {what}")
                self.begun.add(one.root.key[:2])
            before = one.root
        assert self.at[place] is None or not self.ended[place], (
            f"{what}: stepped after its end, from {before} to {after}"
        )
        assert one.done == (one.terminated or one.truncated), (
            f"{what}: done {one.done}, terminated {one.terminated}, truncated {one.truncated}"
        )
        self._check_made(after, what)
        if one.interrupted:
            self.num_interrupted += 1
            says = one.reward, one.terminated, one.truncated
            assert before in (None, after), (
                f"{what}: interrupted after {before} and says {one}"
            )
            assert says == (0, False, True), f"{what}: interrupted and says {one}"
        else:
            self._follow_step(place, before, one, what)
        self.at[place], self.ended[place] = after, one.done

    def _follow_step(
        self, place: Place, before: Row | None, one: Transition, what: str
    ) -> None:
        after = one.next
        assert (after.env_id, after.lane) == place, f"{what}: got a row of {after}"
        assert before is None or after[:5] == (*before[:4], before.t + 1), (
            f"{what}: from {before} to {after}"
        )
        assert after.key not in self.handed_out, (
            f"{what}: {after} was handed out before"
        )
        self.handed_out.add(after.key)
        assert after.action == one.action, (
            f"{what}: action {one.action}, the env got {after.action}: {after}"
        )
        kind = self.made[after.key][0]
        assert (one.terminated, one.truncated) == (
            kind == Kind.TERMINATED,
            kind == Kind.TRUNCATED,
        ), (
            f"{what}: {after} terminated {one.terminated}, truncated {one.truncated}: it was {kind!r}"
        )
        assert one.reward == after.t + after.action / 8, (
            f"{what}: reward {one.reward}, expected that of {after}"
        )
        self.num_transitions += 1


# ---- cases -------------------------------------------------------------------------------------

#: Seconds that any one operation may take (more on a busy machine); then the process ends with its threads' stacks.
HANG_S = float(os.environ.get("ENVHERD_FUZZ_HANG_S", "30"))


class Watch:
    """Prints every operation, ends the process when one hangs, and checks for leaks."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._before: Any = None

    def begin(self, what: str) -> None:
        """Print the next operation; it has `HANG_S` seconds from now."""
        self.note(what)
        faulthandler.dump_traceback_later(HANG_S, exit=True)

    def note(self, what: str) -> None:
        """Say something."""
        print(f"{time.monotonic() - self._began:8.3f} {what}", flush=True)

    def stop(self) -> None:
        """No longer watch."""
        faulthandler.cancel_dump_traceback_later()

    def look(self) -> None:
        """Record this process's resources before a case."""
        resource_tracker.ensure_running()  # it lives as long as the process
        self._before = _held()

    def check_leftovers(self) -> None:
        """Require that this process holds no more resources than before; end a helper that is kept."""
        gc.collect()
        gained = _left(self._before)
        assert not gained, f"left behind: {gained}"


Run = Callable[[int, str, Watch, int], None]


def run_case(run: Run, seed: int, variant: str, num_operations: int) -> int:
    """Run one case in this process; return its exit code."""
    watch = Watch()
    watch.look()
    try:
        run(seed, variant, watch, num_operations)
    except BaseException:
        watch.stop()
        traceback.print_exc(file=sys.stdout)
        watch.note("FAILED")
        return 1
    watch.stop()
    watch.note("passed")
    return 0
