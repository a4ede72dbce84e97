"""Sends and receives in C and in Python have the same data, the same refusals and the same engine state afterwards."""

from __future__ import annotations

import functools
import gc
import os
import signal
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from envherd.executor import Busy, Closed, EnvError, ExecutorOptions, ParallelEnv, SerialEnv, WorkerLost
from envherd.executor.pools import fast_commands
from envherd.executor.pools.worker_pool import WorkerPool
from envherd.executor.protocol import fast_exchange
from envherd.executor.protocol.env_states import NEXT, Event, State
from envherd.executor.protocol.exchange import Exchange
from envherd.workers import native
from envherd.workers.testing import AgentsEnv, CountingEnv, FlagsEnv
from tests.executor.test_fast_step import (
    RING,
    Derived,
    Driving,
    Rang,
    Slow,
    assert_same,
    generalised,
    held_pair,
    once_held,
    state_of,
)
from tests.gates import Gate, wait_for
from tests.scale import scaled

pytestmark = [
    pytest.mark.preloads(),
    pytest.mark.skipif(native.load() is None, reason="the C extension was not built, or is switched off"),
]

NUM_ENVS = 4
ENVS: dict[str, Any] = {
    "numbers": functools.partial(CountingEnv, 3),
    "pixels": functools.partial(CountingEnv, size=40),  # leaves with separate storages
    "agents": AgentsEnv,
    "switches": FlagsEnv,
    "floats": Driving,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "two workers": {"num_workers": 2},
    "views of a ring of three": {"num_workers": 1, "copy": False, "options": ExecutorOptions(ring_frames=3)},
    "on the cpu, any action": {"num_workers": 1, "device": "cpu", "options": ExecutorOptions(check_actions="off")},
    "strict": {"num_workers": 1, "options": ExecutorOptions(check_actions="strict")},
}


class Pair:
    """Two executors with the same calls; only one sends and receives in C.

    Attributes:
        batches: the latest of each, for the next `current` and `send`.
        held: batches of each that the caller keeps, with a copy.
    """

    def __init__(self, fast: Any, general: Any) -> None:
        self.envs = fast, general

    def play(self, seed: int, deeds: list[tuple[str, int]]) -> None:
        self.batches: list[Any] = [None, None]
        self.held: list[list[tuple[Any, Any]]] = [[], []]
        for side, env in enumerate(self.envs):
            if env._engine.states.under_way.any():
                env.recv()
            env.reset(seed=seed)
            self.batches[side] = env.current()
        for deed, number in deeds:
            self._do(deed, number)
        for held in self.held:
            for td, copy in held:
                assert_same(td, copy)

    def _do(self, deed: str, number: int) -> None:
        found: list[Any] = []
        for side, env in enumerate(self.envs):
            wait_for(env._pool.is_idle)
            rng = np.random.default_rng(number)
            try:
                result = getattr(self, "_" + deed)(env, side, rng)
            except Exception as error:  # any refusal: the other must give the same
                result = type(error), str(error)
            found.append(result)
            if isinstance(result, TensorDict) and rng.random() < 0.5:
                self.held[side].append((result, result.clone()))
        if isinstance(found[0], tuple):
            assert found[0] == found[1]
        else:
            assert_same(*found)
            assert found[0] is None or order_of(found[0]) == order_of(found[1])
        for env in self.envs:
            wait_for(env._pool.is_idle)
        assert comparable(self.envs[0]) == comparable(self.envs[1])

    def _action(self, env: Any, rng: np.random.Generator, count: int) -> tuple[Any, torch.Tensor]:
        leaf = env.action_spec[0]
        if leaf.dtype == "float32":
            values = rng.random((count, *leaf.shape), np.float32)
        else:
            values = rng.integers(0, 2, (count, *leaf.shape)).astype(leaf.dtype)
        return leaf.key, torch.from_numpy(values)

    def _ids(self, env: Any, side: int, rng: np.random.Generator) -> Any:
        """Draw env ids, of the envs received last or of others, in one of the accepted forms."""
        batch = self.batches[side]
        if batch is not None and "env_ids" in batch and rng.random() < 0.5:
            return batch["env_ids"]
        ids = rng.permutation(NUM_ENVS)[: rng.integers(1, NUM_ENVS + 1)]
        ways = [
            lambda: ids,
            lambda: torch.from_numpy(ids),
            ids.tolist,
            lambda: ids.astype(np.int32),
            lambda: np.isin(np.arange(NUM_ENVS), ids),
            lambda: np.array([ids[0], ids[0]]),
            lambda: np.array([NUM_ENVS]),
            lambda: ids.reshape(1, -1),
            lambda: None,
        ]
        return ways[min(int(rng.integers(16)), 8) if rng.random() < 0.5 else int(rng.integers(2))]()

    def _revive(self, env: Any, side: int, rng: np.random.Generator) -> None:
        mask = torch.from_numpy(env._engine.states.needs_reset)
        if mask.any():
            env.reset(TensorDict({"_reset": mask}, [NUM_ENVS]))

    def _send(self, env: Any, side: int, rng: np.random.Generator) -> None:
        ids = self._ids(env, side, rng)
        count = NUM_ENVS if ids is None else len(env._exchange.as_ids(ids))
        td = TensorDict({}, [count])
        td.set(*self._action(env, rng, count))
        if rng.random() < 0.3 and isinstance(ids, torch.Tensor):
            td, ids = td.set("env_ids", ids), None
        env.send(td, ids, maybe_reset=bool(rng.random() < 0.7))

    def _send_oddly(self, env: Any, side: int, rng: np.random.Generator) -> None:
        key, value = self._action(env, rng, NUM_ENVS)
        td = TensorDict({}, [NUM_ENVS]).set(key, value)
        odd = [
            lambda: td.set(key, value.to(torch.float64)),
            lambda: td.set(key, value + 100),
            lambda: td.set(key, -value - 1),
            lambda: td.set(key, value.float() * torch.nan),
            lambda: td.set(key, value.float().requires_grad_()),
            lambda: td.set(key, torch.stack([value, value], -1)[..., 0]),
            lambda: td.set(key, value.unsqueeze(-1)),
            lambda: td.set(key, value.to("meta")),
            lambda: TensorDict({}, [NUM_ENVS]),
            lambda: TensorDict({}, []),
            lambda: td[:2],
            td.lock_,
            lambda: td.refine_names("env"),
            lambda: td.to("cpu"),
            lambda: td.set("hidden", torch.zeros(NUM_ENVS)),
            lambda: Derived(td.to_dict(), [NUM_ENVS]),
            lambda: torch.stack([*td.unbind(0)]),
        ]
        env.send(odd[rng.integers(len(odd))]())

    def _recv(self, env: Any, side: int, rng: np.random.Generator) -> Any:
        count = int(env._engine.states.under_way.sum())
        kwargs: dict[str, Any] = {}
        if rng.random() < 0.6:
            kwargs["min_envs"] = int(rng.integers(0 if rng.random() < 0.1 else 1, max(2, count + 1)))
        if rng.random() < 0.3:
            kwargs["max_envs"] = int(rng.integers(1, NUM_ENVS + 1))
        if rng.random() < 0.2:
            kwargs["timeout_s"] = 5.0
        if rng.random() < 0.3:
            kwargs["env_ids"] = self._ids(env, side, rng)
        batch = env.recv(**kwargs, with_root=bool(rng.random() < 0.5))
        self.batches[side] = batch
        return batch

    def _current(self, env: Any, side: int, rng: np.random.Generator) -> Any:
        return env.current(self._ids(env, side, rng))

    def _write(self, env: Any, side: int, rng: np.random.Generator) -> None:
        """Write to a batch in place: it is the caller's own."""
        batch = self.batches[side]
        leaves = (
            []
            if batch is None
            else [leaf for leaf in batch.values(include_nested=True, leaves_only=True) if leaf.dtype != torch.bool]
        )
        self.held[side] = []  # it may be one of these
        if leaves:
            leaves[rng.integers(len(leaves))].zero_()

    def _drop(self, env: Any, side: int, rng: np.random.Generator) -> None:
        self.held[side] = []

    def _step(self, env: Any, side: int, rng: np.random.Generator) -> Any:
        td = TensorDict({}, [NUM_ENVS])
        td.set(*self._action(env, rng, NUM_ENVS))
        return env.step_and_maybe_reset(td)[0].clone()

    def _reset(self, env: Any, side: int, rng: np.random.Generator) -> Any:
        return env.reset(TensorDict({"_reset": torch.from_numpy(rng.random(NUM_ENVS) < 0.5)}, [NUM_ENVS]))

    def _rollout(self, env: Any, side: int, rng: np.random.Generator) -> Any:
        return env.rollout(2, lambda td: td.set(*self._action(env, rng, NUM_ENVS)), auto_reset=False)


def order_of(td: TensorDict) -> list[Any]:
    return [*td.keys(include_nested=True)]


def comparable(env: Any) -> dict[str, Any]:
    """Return the state of an executor except the number of commands, because C does not give some of them.

    For such a command `is_mixed` may be set unnecessarily, which costs the next step of all envs a check.
    """
    state = state_of(env)
    positions = env._engine.positions
    order = np.argsort(state.pop("command_seq"), kind="stable").tolist()
    del state["number"], state["reply_seq"], state["is_mixed"]
    return state | {"order": order, "step_columns": positions.step_columns.tolist()}


DEEDS = st.tuples(
    st.sampled_from(
        [
            *["send"] * 5,
            *["recv"] * 4,
            *["current"] * 3,
            *("send_oddly", "write", "drop", "step", "reset", "revive", "rollout"),
        ]
    ),
    st.integers(0, 2**32 - 1),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "setting"),
    [
        (name, setting)
        for name in ENVS
        for setting in SETTINGS
        if setting == "two workers" or name in ("numbers", "floats")
    ],
)
def test_it_does_what_python_does(name, setting):
    with (
        ParallelEnv(NUM_ENVS, ENVS[name], seed=0, **SETTINGS[setting]) as fast,
        ParallelEnv(NUM_ENVS, ENVS[name], seed=0, **SETTINGS[setting]) as general,
    ):
        pair = Pair(fast, generalised(general))

        @settings(max_examples=scaled(8, full=150), suppress_health_check=[HealthCheck.too_slow], deadline=None)
        @given(seed=st.integers(0, 2**31), deeds=st.lists(DEEDS, min_size=1, max_size=20))
        def agree(seed, deeds):
            pair.play(seed, deeds)

        agree()
        cycle = [("send", 1), ("recv", 2), ("current", 3), ("write", 4), ("current", 5)]
        pair.play(5, [(deed, number + 10 * turn) for turn in range(8) for deed, number in cycle])
        pair.play(6, [("send_oddly", number) for number in range(20)])


def actions(*values: int) -> TensorDict:
    return TensorDict({"action": torch.tensor(values)}, [len(values)])


def slow_pair(**options: Any) -> Any:
    return ParallelEnv(2, functools.partial(Slow, 50), num_workers=2, seed=0, options=ExecutorOptions(**options))


@pytest.fixture
def env():
    with slow_pair() as env:
        env.reset(seed=0)
        yield env


@pytest.fixture
def in_c(monkeypatch):
    """Make sends and receives in Python fail."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("this was Python's")

    for name in ("send", "recv", "recall"):
        monkeypatch.setattr(Exchange, name, refuse)
    monkeypatch.setattr(WorkerPool, "_must_look", lambda _: False)
    monkeypatch.setattr(fast_commands, "LOOK_S", 30.0)


@pytest.mark.parametrize("with_root", [True, False])
def test_a_plain_cycle_is_made_in_c(in_c, with_root):
    """Also when episodes end: each env observes its number of steps since the latest end."""
    with ParallelEnv(4, functools.partial(CountingEnv, 3), num_workers=2, seed=0) as env:
        root = env.reset()
        env.send(root.set("action", torch.tensor([0, 1, 2, 3])))
        counts, num_ends = [0] * 4, 0
        for _ in range(24):
            td = env.recv(2, with_root=with_root)
            assert ("action" in td, "observation" in td) == (with_root, with_root)
            env_ids = td["env_ids"]
            root = env.current(env_ids)
            for row, env_id in enumerate(env_ids.tolist()):
                if with_root:
                    assert td["observation"][row, 1] == counts[env_id]
                    assert td["action"][row] == env_id
                counts[env_id] += 1
                assert td["next", "observation"][row, 1:].tolist() == [counts[env_id], env_id]
                if td["next", "done"][row]:
                    counts[env_id], num_ends = 0, num_ends + 1
                assert root["observation"][row, 1] == counts[env_id]
            env.send(root.set("action", env_ids))
        assert sorted(env.recv()["env_ids"].tolist()) == [0, 1, 2, 3]
        assert num_ends > 10


def test_actions_of_agents_are_sent_in_c_too(in_c):
    with ParallelEnv(4, AgentsEnv, num_workers=2, seed=0) as env:
        env.reset()
        given = torch.arange(4)[:, None] % torch.tensor([1, 2, 3])
        env.send(TensorDict({"agents": TensorDict({"action": given}, [4, 3])}, [4]))
        for _ in range(8):
            td = env.recv(2)
            env_ids = td["env_ids"]
            assert torch.equal(td["agents", "action"], given[env_ids])
            steps = td["next", "agents", "observation"][..., 1:2].float()
            assert torch.equal(td["next", "agents", "reward"], steps + given[env_ids][..., None])
            env.send(env.current(env_ids).set(("agents", "action"), given[env_ids]))


def test_a_root_shares_what_was_received_and_is_read_anew_once_that_was_written_to(env):
    env.send(actions(0, 1))
    td = env.recv()
    root = env.current(td["env_ids"])
    assert root["observation"].data_ptr() == td["next", "observation"].data_ptr()
    td["next", "observation"].zero_()
    assert env.current(td["env_ids"])["observation"][:, 1].tolist() == [1, 1]
    env.send(actions(1, 0), td["env_ids"])
    received = env.recv()
    assert received["next", "observation"][:, 1].tolist() == [2, 2]
    assert td["next", "observation"].count_nonzero() == 0


def test_memory_is_used_again_once_nobody_holds_it(in_c, env):
    places, held = set(), []
    for _ in range(20):
        env.send(actions(0, 1))
        places.add(env.recv(with_root=False)["next", "observation"].data_ptr())
    assert len(places) <= 3
    for _ in range(5):
        env.send(actions(0, 1))
        held.append(env.recv(with_root=False)["next"])
    assert [td["observation"][0, 1].item() for td in held] == [21, 22, 23, 24, 25]


def test_what_an_env_raises_is_raised_and_the_other_is_still_sent(env):
    env.send(actions(0, 2))
    with pytest.raises(EnvError, match="two"):
        env.recv()
    assert env.recv()["env_ids"].tolist() == [0]
    env.reset(TensorDict({"_reset": torch.tensor([False, True])}, [2]))
    env.send(actions(0, 0))
    assert env.recv(env_ids=[1, 0])["next", "observation"][:, 1].tolist() == [1, 2]


@pytest.mark.broken_pool
@pytest.mark.parametrize("when", ["before", "meanwhile", "after"])
def test_a_lost_worker_is_noticed(when, tmp_path):
    gate = Gate(tmp_path)
    with held_pair(gate) as env:
        env.reset()
        pid = env._pool.pid_of(1)
        if when == "before":
            os.kill(pid, signal.SIGKILL)
            wait_for(lambda: not env._pool.is_alive(1))
        env.send(actions(0, 0 if when == "after" else 3))
        if when == "after":
            wait_for(env._pool.is_idle)
            os.kill(pid, signal.SIGKILL)
            assert env.recv()["env_ids"].tolist() == [0, 1]  # all had answered
            return
        if when == "meanwhile":
            once_held(gate, "recv", functools.partial(os.kill, pid, signal.SIGKILL))
        with pytest.raises(WorkerLost):
            env.recv()
        assert env.recv()["env_ids"].tolist() == [0]
        env.send(actions(1), [0])
        assert env.recv()["next", "observation"][:, 1:].tolist() == [[2, 1]]


@pytest.mark.parametrize("other", ["a handler", "a thread"])
def test_a_call_inside_it_is_refused(other, tmp_path):
    gate, found = Gate(tmp_path), []

    def call(*_):
        for deed in (env.recv, env.current, lambda: env.send(actions(0, 0))):
            try:
                deed()
            except Busy as error:
                found.append(error)
        gate.open()

    before = signal.signal(signal.SIGALRM, call)
    try:
        with held_pair(gate) as env:
            env.reset()
            env.send(actions(3, 3))
            once_held(gate, "recv", RING if other == "a handler" else call)
            assert env.recv(env_ids=[0, 1])["next", "observation"][:, 1].tolist() == [1, 1]
            assert len(found) == 3
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_handler_that_raises_in_it_loses_nothing(tmp_path):
    def ring(*_: object) -> None:
        raise Rang

    gate, before = Gate(tmp_path), signal.signal(signal.SIGALRM, ring)
    try:
        with held_pair(gate) as env:
            env.reset()
            env.send(actions(3, 3))
            once_held(gate, "recv", RING)
            with pytest.raises(Rang):
                env.recv()
            gate.open()
            assert env.recv(env_ids=[0, 1])["next", "observation"][:, 1:].tolist() == [[1, 3], [1, 3]]
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.broken_pool
def test_an_executor_that_is_closed_meanwhile_says_so(tmp_path):
    gate = Gate(tmp_path)
    with held_pair(gate, close_timeout_s=0.0) as env:
        env.reset()
        env.send(actions(3, 3))
        once_held(gate, "recv", env.close)
        with pytest.raises(Closed):
            env.recv()
        for deed in (env.recv, env.current, lambda: env.send(actions(0, 0))):
            with pytest.raises(Closed, match="is closed"):
                deed()


@pytest.mark.parametrize("make", [SerialEnv, functools.partial(ParallelEnv, num_workers=2)])
def test_a_state_that_was_loaded_is_where_the_envs_are(make):
    """The roots are not those of the envs received before."""
    with make(2, functools.partial(CountingEnv, 9), seed=0) as env:
        root = env.reset()
        state = env.state_dict()
        env.send(root.set("action", torch.tensor([0, 1])))
        env_ids = env.recv(env_ids=[0, 1])["env_ids"]
        env.load_state_dict(state)
        assert_same(env.current(env_ids).exclude("env_ids"), root.exclude("action"))


@pytest.mark.parametrize(
    "options",
    [ExecutorOptions(infos="plain"), ExecutorOptions(recycle_after=3), ExecutorOptions(on_worker_loss="restart")],
    ids=["infos", "recycling", "restarts"],
)
def test_an_executor_that_has_more_to_do_sends_in_python(options):
    with ParallelEnv(2, CountingEnv, num_workers=1, options=options) as env:
        env.reset()
        assert env._fast_exchange is None


def test_it_leaks_nothing(env):
    def cycle(num_turns: int) -> None:
        for _ in range(num_turns):
            env.send(actions(0, 1))
            env_ids = env.recv(1)["env_ids"]
            env.current(env_ids)
            env.send(actions(1), env_ids)
            env.recv(1)
            env.recv()

    cycle(60)
    grown = []
    while len(grown) < 5 and (not grown or grown[-1] >= 150):  # memory that is kept is made when it is first needed
        gc.collect()
        before = sys.getallocatedblocks()
        cycle(300)
        gc.collect()
        grown.append(sys.getallocatedblocks() - before)
    assert grown[-1] < 150, grown


def facts_of(env: Any) -> dict[str, Any]:
    caller = env._pool._caller
    return {"caller": caller, "caller_type": type(caller), **fast_exchange.facts_of(env._engine)}


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda facts: facts.pop("follows"), KeyError),
        (lambda facts: facts.update(follows=NEXT[0]), ValueError),
        (lambda facts: facts.update(follows=NEXT.astype("i4")), ValueError),
        (lambda facts: facts.update(ends=len(NEXT)), ValueError),
        (lambda facts: facts.update(answered=-1), ValueError),
        (lambda facts: facts.update(caller=None), TypeError),
        (lambda facts: facts.update(caller=facts), TypeError),
        (lambda facts: facts.update(states=np.zeros(3, np.int8)), ValueError),
        (lambda facts: facts.update(in_root=np.zeros(2, np.int64)), ValueError),
        (lambda facts: facts.update(ops=np.zeros(1, np.int64)), ValueError),
        (lambda facts: facts.update(at=np.zeros(2, np.int32)), ValueError),
        (lambda facts: facts.update(next=None), (TypeError, SystemError)),
        (lambda facts: facts.update(next=[array[:, :1] for array in facts["next"]]), ValueError),
        (lambda facts: facts.update(root=[array[:1] for array in facts["root"]]), ValueError),
        (lambda facts: facts.update(root=[np.repeat(array, 2, -1)[..., ::2] for array in facts["root"]]), ValueError),
        (lambda facts: facts.update(root=[array.astype("f8") for array in facts["root"]]), ValueError),
        (lambda facts: facts.update(root_in_next=[99] * len(facts["root"])), ValueError),
        (lambda facts: facts.update(root_in_next=[0]), ValueError),
        (lambda facts: facts.update(done=-1), ValueError),
        (lambda facts: facts.update(root_done=9), ValueError),
        (lambda facts: facts.update(inputs=[np.zeros((1, 2))]), ValueError),
        (lambda facts: facts.update(action=np.zeros(2, np.int32)), ValueError),
        (lambda facts: facts.update(num_columns=0), ValueError),
    ],
)
def test_memory_that_does_not_fit_is_refused(env, change, error):
    facts, kind = facts_of(env), native.load().Exchange
    kind(facts)
    before = sys.getrefcount(facts["states"])
    change(facts)
    with pytest.raises(error):
        kind(facts)
    facts["states"] = env._engine.states.values
    after = sys.getrefcount(facts["states"])
    assert after <= before


def test_c_moves_states_by_the_table_that_it_is_given(env):
    follows, facts = NEXT.copy(), facts_of(env)
    follows[Event.STEP, State.RUNNING] = -1
    exchange = native.load().Exchange({**facts, "follows": follows})
    before = state_of(env)
    assert exchange.send(1, Event.STEP, np.arange(2), np.array([0, 1])) is False
    assert state_of(env) == before
    env.send(actions(0, 1))
    wait_for(env._pool.is_idle)
    states = env._engine.states.values
    for event in (Event.ANSWERED, Event.ENDS):  # an env without one of these entries is not under way, or not taken
        follows = NEXT.copy()
        follows[event, State.STEP_RESETTING] = -1
        other = native.load().Exchange({**facts, "follows": follows})
        other.wait(None, 2)
        assert other.take(2, np.zeros(4096, np.uint8), None, np.zeros(2, np.int64)) == -1
        assert states.tolist() == [State.STEP_RESETTING] * 2
    follows = NEXT.copy()
    follows[Event.ANSWERED, State.STEP_RESETTING] = State.ENDED
    other = native.load().Exchange({**facts, "follows": follows})
    assert other.wait(None, 2) == 2
    assert other.take(2, np.zeros(4096, np.uint8), None, np.zeros(2, np.int64)) == 0
    assert states.tolist() == [State.ENDED] * 2


def test_what_is_not_plain_is_refused_by_c(env):
    exchange, before = native.load().Exchange(facts_of(env)), state_of(env)
    ids, two = np.arange(2), np.array([0, 1])
    for args in (
        (1, 3, ids, two),
        (1, 1, np.array([0, 0]), two),
        (1, 1, np.array([0, 2]), two),
        (1, 1, ids, two[:1]),
        (1, 1, ids, np.array([[0, 1]])),
        (1, 1, ids, two.astype(np.int32)),
        (1, 1, ids, two.astype(np.uint64)),
        (1, 1, ids, np.array([0, 5])),
        (1, 1, ids, np.array([-1, 0])),
        (1, 1, ids, None),
        (1, 1, None, two),
    ):
        assert exchange.send(*args) is False, args
    room = np.zeros(4096, np.uint8)
    assert [exchange.wait(*args) for args in ((None, -1), (None, 1), (ids, 1), (np.array([7]), 1))] == [0] * 4
    assert exchange.take(1, room, None, np.zeros(1, np.int64)) == -1
    assert exchange.roots(np.array([5]), room) is False
    assert exchange.roots(ids, room[:3]) is False
    assert state_of(env) == before
    env.send(actions(0, 1))
    wait_for(env._pool.is_idle)
    assert exchange.wait(np.array([1, 1]), 1) == 0
    assert exchange.wait(None, 3) == 0
    assert exchange.wait(np.array([1, 0]), 2) == 2
    found = np.zeros(2, np.int64)
    assert exchange.take(3, room, None, found) == exchange.take(0, room, None, found) == -1
    assert exchange.take(2, room[:60], None, found) == exchange.take(2, room, None, found[:1]) == -1
    assert exchange.take(2, room, room[:8].copy(), found) == -1
    assert exchange.take(2, room, None, found) == 0
    assert found.tolist() == [1, 0]
    assert exchange.take(2, room, None, found) == -1
