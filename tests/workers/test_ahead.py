"""Two workers of one env: which one takes a command, and when a prepared episode is used. No processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

from envherd.shm.segment import Segment
from envherd.shm.slab import Slab, plan_slab
from envherd.shm.sync import DOORBELL_BYTES, Doorbell
from envherd.workers.messages import Prepare
from envherd.workers.options import BlockOptions
from envherd.workers.process.ahead import AheadBlock, AheadLoop, pack_turn, unpack_turn
from envherd.workers.protocol import RING, Flag, Op, Status, pack
from envherd.workers.seeding import episode_seed
from envherd.workers.testing import CountingEnv
from envherd.workers.testing.envs import PlainAdapter

ROOT_SEED = 3


@pytest.mark.parametrize("worker_id", [0, 1, 2**24 - 1])
@pytest.mark.parametrize("episode", [None, 0, 7, 2**38])
def test_a_turn_crosses(worker_id, episode):
    assert unpack_turn(pack_turn(worker_id, episode)) == (worker_id, episode)


class Table:
    """One of two instances of an env, in worker `worker_id`, with a slab's words and doorbells; no other side."""

    def __init__(self, slab: Any, worker_id: int, buffer: Any) -> None:
        self.env = CountingEnv(3)
        self.reports: list[dict[str, Any]] = []
        options = BlockOptions(reset_ahead=True)
        adapter = PlainAdapter(self.env)
        self.block = AheadBlock(worker_id, {0: adapter}, ROOT_SEED, self.reports.append, options)
        self.block.attach(slab)
        bells = Doorbell.create(buffer, 0), Doorbell.create(buffer, DOORBELL_BYTES)
        self.loop = AheadLoop(self.block, slab, bells, lambda: True, lambda: None)
        self.words = slab.words

    def command(self, op: Op) -> None:
        self.words["command"][0] = pack(op, RING, 0)
        self.words["command_seq"][0] += 1

    def is_idle(self) -> bool:
        return bool(self.words["command_seq"][0] == self.words["reply_seq"][0])


@pytest.fixture
def tables():
    segment = Segment.create(2 * DOORBELL_BYTES)
    plan = plan_slab([CountingEnv().spec], num_workers=2, num_ring=2)
    slab = Slab(plan, np.zeros(plan.nbytes, np.uint8))
    yield [Table(slab, worker_id, segment.array()) for worker_id in (0, 1)]
    segment.close()


class TestLoop:
    def test_a_stray_token_does_not_have_a_spare_take_a_command(self, tables):
        server, spare = tables
        server.words["turn"][0] = pack_turn(0, None)
        server.command(Op.RESET)
        spare.loop._scan()
        assert (spare.env.episode, server.is_idle()) == (-1, False)
        server.loop._scan()
        assert (server.env.episode, server.is_idle()) == (0, True)

    def test_who_comes_to_serve_does_not_repeat_what_was_done(self, tables):
        server, spare = tables
        server.words["turn"][0] = pack_turn(0, None)
        server.command(Op.RESET)
        server.loop._scan()
        server.words["turn"][0] = pack_turn(1, None)
        spare.loop._scan()
        assert spare.env.episode == -1

    def test_an_episode_is_prepared_once_and_taken(self, tables):
        server, spare = tables
        server.words["turn"][0] = pack_turn(0, 1)
        server.command(Op.RESET)
        for _ in range(3):
            server.loop._scan()
            spare.loop._scan()
        assert (spare.env.episode, spare.env.seed) == (0, episode_seed(ROOT_SEED, 0, 1))
        assert server.words["ready"].tolist() == [0, 2]
        server.words["turn"][0] = pack_turn(1, 2)
        server.command(Op.RESET)
        server.loop._scan()
        spare.loop._scan()
        assert (spare.env.episode, server.env.episode) == (0, 1)
        assert server.env.seed == episode_seed(ROOT_SEED, 0, 2)
        assert server.words["ready"].tolist() == [3, 0]
        assert server.words["resets"][0] == 2

    def test_the_number_is_read_before_the_turn(self, tables, monkeypatch):
        notes: list[str] = []

        class Watched:
            def __init__(self, name: str, real: Any) -> None:
                self.name, self.real = name, real

            def __getitem__(self, index: int) -> Any:
                notes.append(self.name)
                return self.real[index]

        for name in ("command_seq", "turn"):
            monkeypatch.setitem(tables[1].loop._words, name, Watched(name, tables[1].loop._words[name]))
        tables[1].loop._scan()
        assert notes == ["command_seq", "turn"]


class TestBlock:
    def reset(self, table: Table, flags: int = 0) -> Status:
        return Status(table.block.execute(0, pack(Op.RESET, RING, 0, flags)))

    def test_a_seed_or_options_of_the_callers_own_are_not_those_prepared_for(self, tables):
        table = tables[0]
        for extras in ({"seed": 5, "has_seed": True}, {"options": {"level": 1}}):
            table.block.reset_ahead(0)
            before = table.env.episode
            table.block.prepare(Prepare(env_id=0, **extras))
            assert self.reset(table, Flag.PREPARED) == Status.OK
            assert table.env.episode == before + 1
            assert table.words["ready"][0] == 0
            table.words["episode"][0] = 0

    def test_another_episode_another_root_seed_or_a_change_throws_it_away(self, tables):
        table = tables[0]
        for change in (
            lambda: table.words["episode"].__setitem__(0, 1),
            lambda: table.block.seed(ROOT_SEED + 1),
            table.block.forget_ahead,
        ):
            table.words["episode"][0] = 0
            table.block.reset_ahead(0)
            before = table.env.episode
            change()
            assert self.reset(table) == Status.OK
            assert table.env.episode == before + 1
            table.block.seed(ROOT_SEED)

    def test_what_it_raised_is_told_once_when_it_is_asked_for(self, tables, monkeypatch):
        table = tables[0]
        with monkeypatch.context() as patched:
            patched.setattr(table.env, "reset", lambda *_: 1 / 0)
            table.block.reset_ahead(0)
        assert table.reports == []
        assert self.reset(table) == Status.FAILED
        assert (table.reports[0]["type_name"], table.reports[0]["phase"]) == ("ZeroDivisionError", "reset")
        assert self.reset(table) == Status.OK
        assert table.words["episode"][0] == 2


# ---- all that can come of turns, numbers and tokens ----------------------------------------------


class Side(NamedTuple):
    """One of the two workers: its tokens, what it has read since it took one, and what it has prepared for."""

    tokens: int = 0
    at: str = "asleep"
    number: int = 0
    turn: tuple[int, int] = (0, 0)
    latest: int = 0


class State(NamedTuple):
    at: int = 0  # of the parent's program
    turn: tuple[int, int] = (0, 0)  # serving worker, serial
    number: int = 0
    reply: int = 0
    done: tuple[tuple[int, int], ...] = ()  # (command, worker)
    strays: int = 2
    sides: tuple[Side, Side] = (Side(), Side())


class Violation(AssertionError):
    pass


#: The worker of each command: each command but the first step of an episode is a reset that hands the env over.
SERVERS = (0, 1, 1, 0, 1)


def program(order: tuple[str, ...]) -> list[tuple[str, int]]:
    """Return the parent's steps."""
    return [(step, command) for command in range(1, len(SERVERS) + 1) for step in (*order, "wait")]


def moves(s: State, steps: list[tuple[str, int]], read: tuple[str, ...], *, by_reply: bool) -> Iterator[State]:
    if s.at < len(steps):
        yield from _parent_moves(s, *steps[s.at])
    for i, side in enumerate(s.sides):
        if s.strays:
            yield _with(s._replace(strays=s.strays - 1), i, tokens=side.tokens + 1)
        if side.at == "asleep" and side.tokens:
            yield _with(s, i, tokens=side.tokens - 1, at=read[0])
        elif side.at in read:
            following = (*read, "act")[read.index(side.at) + 1]
            value = {"number": s.number, "turn": s.turn}[side.at]
            yield _with(s, i, at=following, **{side.at: value})
        elif side.at == "act":
            yield _act(s, i, by_reply=by_reply)


def _parent_moves(s: State, step: str, command: int) -> Iterator[State]:
    server = SERVERS[command - 1]
    after = s._replace(at=s.at + 1)
    if step == "turn":
        yield after._replace(turn=(server, command))
    elif step == "number":
        yield after._replace(number=command)
    elif step == "go":
        yield _with(after, server, tokens=s.sides[server].tokens + 1)
    elif s.reply == command:
        yield after


def _act(s: State, i: int, *, by_reply: bool) -> State:
    side = s.sides[i]
    is_done = side.number <= s.reply if by_reply else side.number == side.latest
    if side.turn[0] != i or is_done:
        return _with(s, i, at="asleep")
    if any(command == side.number for command, _ in s.done):
        raise Violation(f"command {side.number} was carried out twice: {s}")
    if SERVERS[side.number - 1] != i:
        raise Violation(f"command {side.number} was taken by the spare: {s}")
    acted = s._replace(reply=side.number, done=(*s.done, (side.number, i)))
    return _with(acted, i, at="asleep", latest=side.number)


def _with(s: State, i: int, **changes: Any) -> State:
    sides = list(s.sides)
    sides[i] = sides[i]._replace(**changes)
    return s._replace(sides=(sides[0], sides[1]))


def explore(order: tuple[str, ...], read: tuple[str, ...], *, by_reply: bool = True) -> int:
    """Explore all interleavings; return the number of states. Raises `Violation`."""
    steps = program(order)
    start = State(turn=(0, 0))
    seen, waiting = {start}, [start]
    while waiting:
        state = waiting.pop()
        following = list(moves(state, steps, read, by_reply=by_reply))
        if state.at < len(steps) and not following:
            raise Violation(f"a wake-up was lost: {state}")
        for one in following:
            if one not in seen:
                seen.add(one)
                waiting.append(one)
    return len(seen)


RIGHT = ("turn", "number", "go")


def test_every_command_is_carried_out_once_by_who_serves():
    assert explore(RIGHT, ("number", "turn")) > 1000


@pytest.mark.parametrize(
    ("order", "read", "by_reply", "seen"),
    [
        (RIGHT, ("turn", "number"), True, "taken by the spare"),
        (("number", "turn", "go"), ("number", "turn"), True, "taken by the spare"),
        (("turn", "go", "number"), ("number", "turn"), True, "lost"),
        (RIGHT, ("number", "turn"), False, "twice"),
    ],
    ids=["the turn is read first", "the turn is written last", "go before the number", "a worker trusts its own count"],
)
def test_the_model_sees_what_is_wrong(order, read, by_reply, seen):
    with pytest.raises(Violation, match=seen):
        explore(order, read, by_reply=by_reply)
