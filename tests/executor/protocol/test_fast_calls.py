"""Calls in C and in Python have the same data, the same refusals and the same engine state afterwards.

`Pair` makes the same calls to two executors. C makes the plain ones of one; the general Python code makes all of the
other's, and in the setting "workers in Python" also calls its envs.
"""

import functools
import gc
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase

from envherd.executor import (
    Busy,
    Closed,
    EnvherdError,
    ExecutorOptions,
    ParallelEnv,
    ResetNeeded,
)
from envherd.executor.pools import commands
from envherd.executor.pools.worker_pool import WorkerPool
from envherd.executor.protocol.env_states import NEXT, Event, State
from envherd.executor.protocol.fast import compile_command
from envherd.executor.protocol.plain import Plain
from envherd.workers import native
from envherd.workers.protocol import Op
from envherd.workers.testing import CountingEnv
from tests.envs.counting_envs import AgentsEnv, FlagsEnv
from tests.executor.calls import begun
from tests.gates import Gate, wait_for
from tests.scale import scaled

pytestmark = pytest.mark.preloads()
needs_c = pytest.mark.skipif(
    native.load() is None, reason="the C extension was not built, or is switched off"
)

NUM_ENVS = 4


def settle(env):
    """Wait until no env owes an answer."""
    wait_for(lambda: env._pool.words.has_answered().all())


class Driving(gymnasium.Env[np.ndarray, np.ndarray]):
    """Takes two bounded floats and observes their sum so far; its episodes have 4 steps."""

    action_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def reset(
        self, *, seed: int | None = None, options: Any = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self._at, self._num_steps = self.np_random.random(2).astype(np.float32), 0
        return self._at, {}

    def step(
        self, action: np.ndarray
    ) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self._at, self._num_steps = self._at + action, self._num_steps + 1
        return self._at, float(action.sum()), self._num_steps == 4, False, {}


class Nested(gymnasium.Env[Any, Any]):
    """Takes a dict and observes a dict of random numbers; its episodes have up to 9 steps."""

    observation_space = spaces.Dict(
        a=spaces.Box(-9, 9, (2,), np.float32), b=spaces.Tuple((spaces.Discrete(5),))
    )
    action_space = spaces.Dict(
        x=spaces.Discrete(3), y=spaces.Box(-1, 1, (2,), np.float32)
    )
    num_steps = 0

    def _observe(self) -> dict[str, Any]:
        return {
            "a": self.np_random.random(2, np.float32),
            "b": (int(self.np_random.integers(5)),),
        }

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.num_steps = 0
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        self.num_steps += 1
        return (
            self._observe(),
            0.5,
            self.num_steps % 7 == int(action["x"]),
            self.num_steps == 9,
            {},
        )


class Held(CountingEnv):
    """Waits at a gate if its action is 3."""

    def __init__(self, gate: Gate) -> None:
        super().__init__(50)
        self._gate = gate

    def step(self, action: list[Any]) -> Any:
        if action[0] == 3:
            self._gate.pass_through()
        return super().step(action)


def held_pair(gate: Gate, *, copy: bool = True, **options: Any) -> Any:
    make = functools.partial(Held, gate)
    return ParallelEnv(
        2, make, num_workers=2, copy=copy, seed=0, options=ExecutorOptions(**options)
    )


def once_held(gate: Gate, call: str, deed: Callable[[], Any]) -> None:
    """Do a deed on another thread once an env waits at the gate and this thread is in the executor's `call`."""
    caller = threading.get_ident()

    def wait_and_do() -> None:
        gate.await_somebody()
        wait_for(
            lambda: (
                call
                in (
                    frame.name
                    for frame in traceback.extract_stack(sys._current_frames()[caller])
                )
            )
        )
        time.sleep(0.05)  # from there to the wait for answers
        deed()

    threading.Thread(target=wait_and_do).start()


ENVS: dict[str, Callable[[], Any]] = {
    "numbers": functools.partial(CountingEnv, 3),
    "pixels": functools.partial(CountingEnv, size=40),  # leaves with separate storages
    "agents": AgentsEnv,
    "switches": FlagsEnv,
    "floats": Driving,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "copies": {"num_workers": 2},
    "views": {
        "num_workers": 1,
        "copy": False,
        "options": ExecutorOptions(ring_frames=3),
    },
    "poisoned views": {
        "num_workers": 2,
        "copy": False,
        "options": ExecutorOptions(poison=True),
    },
    "on the cpu, any action": {
        "num_workers": 1,
        "device": "cpu",
        "options": ExecutorOptions(check_actions="off"),
    },
    "strict": {"num_workers": 1, "options": ExecutorOptions(check_actions="strict")},
    "finite": {"num_workers": 1, "options": ExecutorOptions(check_actions="finite")},
    "interrupted rows": {
        "num_workers": 2,
        "options": ExecutorOptions(on_worker_loss="restart"),
    },
    "views with interrupted rows": {
        "num_workers": 1,
        "copy": False,
        "options": ExecutorOptions(ring_frames=3, on_env_error="interrupt"),
    },
}


#: What calls with odd arguments raise.
REFUSALS = (EnvherdError, ValueError, TypeError, RuntimeError)


class Derived(TensorDict):
    """A subclass of TensorDict."""


def generalised(env: Any) -> Any:
    """Disable compiled steps, sends and receives of an executor."""
    env._engine.plain = Plain.never("this is a test")._replace(
        rows=env._engine.plain.rows
    )
    env.compile()
    env._engine.flights.native = env._engine.batches.groups[0].native = None
    return env


def state_of(env: Any) -> dict[str, Any]:
    """Return an executor's state of its envs and calls."""
    engine, positions, words = env._engine, env._engine.positions, env._pool.slab.words
    return {
        "states": engine.states.values.tolist(),
        "columns": positions.columns.tolist(),
        "step_columns": positions.step_columns.tolist(),
        "in_root": positions.in_root.tolist(),
        "column": positions.column,
        "is_mixed": positions.is_mixed,
        "is_in_ring": positions.where is positions.ring,
        "number": env._pool.words.number[0],
        "answers_lost": env._pool.words.answers_lost.tolist(),
        "outcome": bool(env._pool.outcome),
        "is_in_flight": engine.is_in_flight,
        "is_dirty": engine.is_dirty,
        "is_rolling": engine.is_rolling,
        "holder": [*engine.guard._holder],
        "errors": engine.flights.losses.num_errors.tolist(),
        **{
            name: words[name].tolist()
            for name in (
                "command_seq",
                "reply_seq",
                "status",
                "env_steps",
                "resets",
                "ends",
            )
        },
    }


def assert_same(one: Any, other: Any) -> None:
    if isinstance(one, LazyStackedTensorDict):  # of different tasks
        one, other = one.unbind(0), other.unbind(0)
    if isinstance(one, tuple):
        for mine, theirs in zip(one, other, strict=True):
            assert_same(mine, theirs)
        return
    assert type(one) is type(other)
    if one is None:
        return
    assert (one.batch_size, one.device, one.names) == (
        other.batch_size,
        other.device,
        other.names,
    )
    keys = set(one.keys(include_nested=True))
    assert keys == set(other.keys(include_nested=True))
    for key in keys:
        mine, theirs = one[key], other[key]
        if isinstance(mine, torch.Tensor):
            assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape), key
            # Also for NaN.
            assert (
                mine.detach().numpy().tobytes() == theirs.detach().numpy().tobytes()
            ), key
        elif not isinstance(mine, TensorDictBase):
            assert mine == theirs, key


def state_but_mixed(env: Any) -> dict[str, Any]:
    """Return the state of an executor without `is_mixed`, which C may set for a send that is then refused.

    It costs the next step of all envs a check.
    """
    state = state_of(env)
    del state["is_mixed"]
    return state


class Pair:
    """Two executors with the same calls, of which C makes those of one; see the module.

    Attributes:
        state: what is compared after every call, besides the results.
        results: of all calls.
        batches: the latest that each received, for the next `current` and `send`.
        held: batches of each that the caller keeps, with a copy.
    """

    def __init__(
        self, fast: Any, general: Any, state: Callable[[Any], Any] | None = None
    ) -> None:
        self.envs = fast, general
        self._state = state
        self.num_envs = fast.num_envs

    def play(self, seed: int, deeds: list[tuple[str, int]]) -> None:
        is_of_all = STEPS.issuperset(deed for deed, _ in deeds)
        self.state = self._state or (state_of if is_of_all else state_but_mixed)
        self.results: list[list[Any]] = [[], []]
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
        for side, env in enumerate(self.envs):
            settle(env)
            rng = np.random.default_rng(number)
            try:
                result = getattr(self, "_" + deed)(env, side, rng)
            except REFUSALS as error:  # the other must give the same
                result = type(error), str(error)
            self.results[side].append(result)
            if (
                deed in ("recv", "current")
                and isinstance(result, TensorDict)
                and rng.random() < 0.5
            ):
                self.held[side].append((result, result.clone()))
        # Views are also unchanged.
        for one, other in zip(*(results[-2:] for results in self.results), strict=True):
            if is_refusal(one) or is_refusal(other):
                assert one == other
            else:
                assert_same(one, other)
        for env in self.envs:
            settle(env)
        assert self.state(self.envs[0]) == self.state(self.envs[1])

    # ---- arguments

    def _action(
        self, env: Any, rng: np.random.Generator, count: int | None = None
    ) -> TensorDict:
        count = self.num_envs if count is None else count
        td = TensorDict({}, [count])
        for leaf in env.action_spec:
            if leaf.dtype == "float32":
                values = rng.random((count, *leaf.shape), np.float32)
            else:
                values = rng.integers(0, 2, (count, *leaf.shape)).astype(leaf.dtype)
            td.set(leaf.key, torch.from_numpy(values))
        return td

    def _ids(self, env: Any, side: int, rng: np.random.Generator) -> Any:
        """Draw env ids, of the envs received last or of others, in one of the accepted forms."""
        batch = self.batches[side]
        if batch is not None and "env_ids" in batch and rng.random() < 0.5:
            return batch["env_ids"]
        ids = rng.permutation(self.num_envs)[: rng.integers(1, self.num_envs + 1)]
        ways = [
            lambda: ids,
            lambda: torch.from_numpy(ids),
            ids.tolist,
            lambda: ids.astype(np.int32),
            lambda: np.isin(np.arange(self.num_envs), ids),
            lambda: np.array([ids[0], ids[0]]),
            lambda: np.array([self.num_envs]),
            lambda: ids.reshape(1, -1),
            lambda: None,
        ]
        return ways[
            min(int(rng.integers(16)), 8)
            if rng.random() < 0.5
            else int(rng.integers(2))
        ]()

    def _odd(self, env: Any, rng: np.random.Generator) -> TensorDict:
        """Draw an odd batch, which may be legal."""
        td, key, count = (
            self._action(env, rng),
            env.action_spec[0].key,
            torch.arange(self.num_envs).float(),
        )
        value = td[key]
        changed: list[Callable[[], Any]] = [
            lambda: value.to(torch.int32),
            lambda: value.to(torch.float64),
            lambda: torch.stack([value, value], -1)[..., 0],
            lambda: value + 100,
            lambda: -value - 1,
            lambda: value.float().requires_grad_(),
            lambda: torch.nn.Parameter(value.float()),
            lambda: value * torch.nan,
            lambda: value.float() * torch.nan,
            lambda: value.unsqueeze(-1),
            lambda: value.to("meta"),
        ]
        batches: list[Callable[[], Any]] = [
            *(lambda change=change: td.set(key, change()) for change in changed),
            lambda: Derived(td.to_dict(), [self.num_envs]),
            td.lock_,
            lambda: td.refine_names("env"),
            lambda: td.to("cpu"),
            lambda: td.set(("next", "hidden"), count),
            lambda: td.set("hidden", count),
            lambda: td.set("next", env.current()),
            lambda: td.clone().auto_batch_size_(),
            lambda: td[:2],
            lambda: TensorDict({}, [self.num_envs]),
            lambda: TensorDict({}, []),
            lambda: torch.stack([*td.unbind(0)]),
            lambda: TensorDict.lazy_stack([*td.unbind(0)]),
            lambda: (
                td.clone().requires_grad_()
                if env.action_spec[0].dtype == "float32"
                else td
            ),
        ]
        odd: TensorDict = batches[rng.integers(len(batches))]()
        return odd

    def _revive(self, env: Any, side: int = 0, rng: Any = None) -> None:
        mask = torch.from_numpy(env._engine.states.needs_reset)
        if mask.any():
            env.reset(TensorDict({"_reset": mask}, [self.num_envs]))

    def _seed(self, env: Any, side: int, rng: np.random.Generator) -> None:
        env.set_seed(int(rng.integers(2**31)))

    def _load(self, env: Any, side: int, rng: np.random.Generator) -> Any:
        env.load_state_dict(env.state_dict())
        return env.current()

    # ---- steps of all envs

    def _fused(self, env: Any, side: int, rng: np.random.Generator) -> Any:
        return env.step_and_maybe_reset(self._action(env, rng))

    def _step(self, env: Any, side: int, rng: np.random.Generator) -> Any:
        self._revive(env)
        return env.step(self._action(env, rng))

    def _step_where_ended(self, env: Any, side: int, rng: np.random.Generator) -> Any:
        return env.step(self._action(env, rng))

    def _step_with_resets(self, env: Any, side: int, rng: np.random.Generator) -> Any:
        """Reset the envs that have ended, and some others, while the rest step, as the Gymnasium facade does."""
        engine, action = env._engine, self._action(env, rng)
        resets = np.flatnonzero(
            engine.states.needs_reset | (rng.random(self.num_envs) < 0.3)
        )
        op, is_parked = (Op.STEP, Op.STEP_RESET)[rng.integers(2)], bool(rng.integers(2))
        write_inputs = functools.partial(engine.write_inputs, action)
        with engine.guard:
            flight = compile_command(engine, op)(
                write_inputs=write_inputs, resets=resets, is_parked=is_parked
            )
            if not flight.has_landed:
                flight.land()
        ended = torch.zeros(self.num_envs, dtype=torch.bool)
        ended[[] if flight.ended is None else flight.ended] = True
        flags = {"ended": ended, "fresh": torch.from_numpy(flight.fresh)}
        after = engine.batches.next_of(
            engine.all_ids, np.full(self.num_envs, flight.at)
        )
        # For those that were reset.
        unwritten = [leaf.key for spec in engine.specs for leaf in spec.observation]
        return env.current().update(flags).set("next", after.exclude(*unwritten))

    def _step_oddly(self, env: Any, side: int, rng: np.random.Generator) -> Any:
        self._revive(env)
        return (env.step, env.step_and_maybe_reset)[rng.integers(2)](
            self._odd(env, rng)
        )

    def _reset(self, env: Any, side: int, rng: np.random.Generator) -> Any:
        return env.reset(
            TensorDict(
                {"_reset": torch.from_numpy(rng.random(self.num_envs) < 0.5)},
                [self.num_envs],
            )
        )

    def _rollout(self, env: Any, side: int, rng: np.random.Generator) -> Any:
        num_steps, auto_reset, breaks = (
            int(rng.integers(1, 6)),
            bool(rng.integers(2)),
            bool(rng.integers(2)),
        )
        policy = lambda td: td.update(self._action(env, rng))  # noqa: E731
        return env.rollout(
            num_steps, policy, auto_reset=auto_reset, break_when_any_done=breaks
        )

    def _step_in_a_rollout(self, env: Any, side: int, rng: np.random.Generator) -> Any:
        return env.rollout(
            2, lambda td: env.step_and_maybe_reset(td.update(self._action(env, rng)))[0]
        )

    def _exchange(self, env: Any, side: int, rng: np.random.Generator) -> Any:
        """Send some, and receive them after a refused step of all."""
        self._revive(env)
        env_ids = rng.permutation(self.num_envs)[: rng.integers(1, self.num_envs + 1)]
        env.send(self._action(env, rng)[: len(env_ids)], env_ids)
        with pytest.raises(Busy):
            env.step_and_maybe_reset(self._action(env, rng))
        return env.recv(env_ids=env_ids)

    # ---- steps of some envs

    def _send(self, env: Any, side: int, rng: np.random.Generator) -> None:
        ids = self._ids(env, side, rng)
        td = self._action(
            env, rng, self.num_envs if ids is None else len(env._exchange.as_ids(ids))
        )
        if rng.random() < 0.3 and isinstance(ids, torch.Tensor):
            td, ids = td.set("env_ids", ids), None
        env.send(td, ids, maybe_reset=bool(rng.random() < 0.7))

    def _send_oddly(self, env: Any, side: int, rng: np.random.Generator) -> None:
        env.send(self._odd(env, rng))

    def _recv(self, env: Any, side: int, rng: np.random.Generator) -> Any:
        count = int(env._engine.states.under_way.sum())
        kwargs: dict[str, Any] = {}
        if rng.random() < 0.6:
            kwargs["min_envs"] = int(
                rng.integers(0 if rng.random() < 0.1 else 1, max(2, count + 1))
            )
        if rng.random() < 0.3:
            kwargs["max_envs"] = int(rng.integers(1, self.num_envs + 1))
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
        values = (
            [] if batch is None else batch.values(include_nested=True, leaves_only=True)
        )
        leaves = [leaf for leaf in values if leaf.dtype != torch.bool]
        self.held[side] = []  # it may be one of these
        self.results[side].clear()
        if leaves:
            leaves[rng.integers(len(leaves))].zero_()

    def _drop(self, env: Any, side: int, rng: np.random.Generator) -> None:
        self.held[side] = []


def is_refusal(result: Any) -> bool:
    return isinstance(result, tuple) and isinstance(result[0], type)


#: Calls after which all of the state is the same.
STEPS = {
    *("fused", "step", "step_with_resets", "step_where_ended", "step_oddly"),
    *("reset", "rollout", "exchange", "step_in_a_rollout"),
}
EXCHANGES = [
    *(*["send"] * 5, *["recv"] * 4, *["current"] * 3),
    *("send_oddly", "write", "drop", "fused", "reset", "revive", "rollout"),
]
NUMBERS = st.integers(0, 2**32 - 1)  # from which the arguments of a call are drawn
DEEDS = st.one_of(
    st.lists(
        st.tuples(st.sampled_from(["fused", "fused", *sorted(STEPS)]), NUMBERS),
        min_size=1,
        max_size=12,
    ),
    st.lists(st.tuples(st.sampled_from(EXCHANGES), NUMBERS), min_size=1, max_size=20),
)
CYCLE = ("send", "recv", "current", "write", "current")


def of_both(make_env: Any, setting: dict[str, Any], **options: Any) -> Any:
    return ParallelEnv(NUM_ENVS, make_env, seed=0, **setting | options)


@pytest.mark.sampled(3)
@needs_c
@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "setting"),
    [
        (name, setting)
        for name in ENVS
        for setting in SETTINGS
        if name in ("numbers", "floats")
        or setting in scaled(("copies", "views"), full=tuple(SETTINGS)[:4])
    ],
)
def test_every_call_in_c_does_what_it_does_in_python(name, setting, monkeypatch):
    # On a slow machine Python would make most receives.
    monkeypatch.setattr(WorkerPool, "must_look", lambda _: False)
    make, kwargs = ENVS[name], SETTINGS[setting]
    with of_both(make, kwargs) as fast, of_both(make, kwargs) as general:
        pair = Pair(fast, generalised(general))
        play_all(pair)


def play_all(pair: Pair) -> None:
    pair.play(
        5,
        [
            ("fused", 1),
            *(("step_oddly", number) for number in range(80)),
            ("fused", 2),
            ("step", 3),
        ],
    )
    pair.play(7, [("fused", number) for number in range(12)])
    pair.play(
        5,
        [
            (deed, number + 10 * turn)
            for turn in range(8)
            for number, deed in enumerate(CYCLE)
        ],
    )
    pair.play(6, [("send_oddly", number) for number in range(40)])
    deeds = ("send", "recv", "reset", "current")
    pair.play(
        8,
        [
            (deed, number + 10 * turn)
            for turn in range(25)
            for number, deed in enumerate(deeds)
        ],
    )

    @settings(
        max_examples=scaled(12, full=150),
        suppress_health_check=[HealthCheck.too_slow],
        deadline=None,
    )
    @given(seed=st.integers(0, 2**31), deeds=DEEDS)
    def agree(seed, deeds):
        pair.play(seed, deeds)

    agree()


@needs_c
@pytest.mark.long
def test_envs_that_workers_call_in_c_do_what_they_do_in_python():
    options = ExecutorOptions(env_vars={native.SWITCH: "0"})
    with (
        of_both(Nested, SETTINGS["copies"]) as fast,
        of_both(Nested, SETTINGS["copies"], options=options) as general,
    ):
        assert "calls of the envs in Python" not in fast.statistics().path
        assert (
            f"calls of the envs in Python, because {native.SWITCH}=0"
            in general.statistics().path
        )
        play_all(Pair(fast, generalised(general)))
        assert fast.statistics().episodes == general.statistics().episodes > 0


# ---- which calls are made in C -----------------------------------------------------------------------


def actions(*values: int) -> TensorDict:
    return TensorDict({"action": torch.tensor(values)}, [len(values)])


def slow_pair(*, copy: bool = True) -> Any:
    make = functools.partial(CountingEnv, 50)
    return ParallelEnv(2, make, num_workers=2, copy=copy, seed=0)


def be_patient(patch: pytest.MonkeyPatch, wait_s: float = 30.0) -> None:
    """Let calls in C wait for slow answers themselves, even on a busy machine; before compiling, which copies it."""
    patch.setattr(commands, "LOOK_S", wait_s)


def refuse(*_: Any, **__: Any) -> None:
    raise AssertionError("this was Python's")


@pytest.fixture(scope="module", params=["copies", "views"])
def shared(request):
    with pytest.MonkeyPatch.context() as patch:
        be_patient(patch)
        env = slow_pair(copy=request.param == "copies")
    with env:
        yield env


@pytest.fixture
def env(shared, monkeypatch):
    be_patient(monkeypatch)
    if shared._engine.states.under_way.any():
        shared.recv()
    shared.reset(seed=0)
    return shared


@needs_c
@pytest.mark.parametrize("copy", [True, False])
def test_plain_steps_and_rollouts_are_made_in_c(copy, monkeypatch):
    be_patient(monkeypatch)
    with slow_pair(copy=copy) as env:
        root = env.reset()
        monkeypatch.setattr(env._engine, "step_all", refuse)
        monkeypatch.setattr(env._engine.flights, "land", refuse)
        for count in range(1, 9):
            td, root = env.step_and_maybe_reset(
                root.set("action", torch.tensor([0, 1]))
            )
            assert td["next", "observation"][:, 1:].tolist() == [[count, 0], [count, 1]]
            assert (
                root["observation"].data_ptr() == td["next", "observation"].data_ptr()
            )
        data = env.rollout(
            5, lambda td: td.set("action", torch.tensor([0, 1])), auto_reset=False
        )
        assert data["next", "observation"][1, :, 1].tolist() == [9, 10, 11, 12, 13]
        with pytest.raises(AssertionError, match="this was Python's"):
            env.step(td)  # which has a `next`


# ---- delays, losses and interrupts -------------------------------------------------------------------


class Rang(Exception):
    """Raised by a signal handler."""


#: Makes the handler of SIGALRM run on the main thread.
RING = functools.partial(os.kill, os.getpid(), signal.SIGALRM)

#: A step of all envs, with copies and with views; a receive of those that were sent.
CALLS = ["step", "step with views", "recv"]


@pytest.fixture(params=CALLS)
def waiting(request, tmp_path, monkeypatch):
    """Return an executor, a function that sends its envs to a gate (if the call is `recv`), and the call."""
    be_patient(monkeypatch, 1.0)  # also if another thread closes the executor
    call = request.param.partition(" ")[0]
    with begun(
        held_pair(
            Gate(tmp_path), copy="views" not in request.param, close_timeout_s=0.0
        )
    ) as env:
        if call == "recv":
            env.send(actions(3, 3))
        yield (
            env,
            call,
            (lambda: env.recv(env_ids=[0, 1]))
            if call == "recv"
            else (lambda: env.step(actions(3, 3))),
        )


@pytest.fixture
def on_alarm():
    """Return a function that sets the handler of SIGALRM for the test."""
    before = signal.getsignal(signal.SIGALRM)
    yield lambda handler: signal.signal(signal.SIGALRM, handler)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.broken_pool
def test_recv_returns_rows_of_a_worker_lost_after_its_answer(tmp_path):
    with begun(held_pair(Gate(tmp_path))) as env:
        env.send(actions(0, 0))
        settle(env)
        os.kill(env._pool.pid_of(1), signal.SIGKILL)
        assert env.recv()["env_ids"].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ("a handler", "it was made inside another call of this executor"),
        ("a thread", "another thread is using this executor"),
    ],
)
def test_calls_during_a_call_are_refused(other, words, waiting, on_alarm, tmp_path):
    env, name, call = waiting
    gate, found = Gate(tmp_path), []

    def intrude(*_):
        for deed in (
            env.recv,
            env.current,
            lambda: env.send(actions(0, 0)),
            lambda: env.step(actions(0, 0)),
        ):
            try:
                deed()
            except Busy as error:
                found.append(str(error))
        gate.open()

    on_alarm(intrude)
    once_held(gate, name, RING if other == "a handler" else intrude)
    assert call()["next", "observation"][:, 1].tolist() == [1, 1]
    assert len(found) == 4
    assert all(words in message for message in found)
    assert env.step(actions(0, 0))["next", "observation"][:, 1].tolist() == [2, 2]


def test_handler_that_raises_in_step_needs_reset_and_in_recv_loses_nothing(
    waiting, on_alarm, tmp_path
):
    env, name, call = waiting
    gate = Gate(tmp_path)

    def ring(*_: object) -> None:
        raise Rang

    on_alarm(ring)
    once_held(gate, name, RING)
    with pytest.raises(Rang):
        call()
    gate.open()
    if name == "recv":
        assert call()["next", "observation"][:, 1:].tolist() == [[1, 3], [1, 3]]
        return
    with pytest.raises(ResetNeeded):
        env.step(actions(0, 0))
    env.reset()
    assert env.step(actions(0, 0))["next", "observation"][:, 1].tolist() == [1, 1]


@pytest.mark.broken_pool
def test_an_executor_that_is_closed_during_a_call_raises_closed(waiting, tmp_path):
    env, name, call = waiting
    once_held(Gate(tmp_path), name, env.close)
    with pytest.raises(Closed, match="while it waited"):
        call()
    for deed in (
        env.recv,
        env.current,
        lambda: env.send(actions(0, 0)),
        lambda: env.step(actions(0, 0)),
    ):
        with pytest.raises(Closed, match="is closed"):
            deed()


# ---- the exchange in C -------------------------------------------------------------------------------


@needs_c
def test_sends_and_receives_leak_nothing(env):
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
    # Memory that is kept is made when it is first needed.
    while len(grown) < 5 and (not grown or grown[-1] >= 150):
        gc.collect()
        before = sys.getallocatedblocks()
        cycle(300)
        gc.collect()
        grown.append(sys.getallocatedblocks() - before)
    assert grown[-1] < 150, grown


@pytest.fixture
def facts(env):
    caller = env._pool._caller
    return {"caller": caller, "caller_type": type(caller), **env._engine.facts()}


@needs_c
@pytest.mark.parametrize(
    ("name", "wrong", "error"),
    [
        ("follows", NEXT[0], ValueError),
        ("follows", NEXT.astype("i4"), ValueError),
        ("ends", len(NEXT), ValueError),
        ("answered", -1, ValueError),
        ("caller", None, TypeError),
        ("caller", {}, TypeError),
        ("states", np.zeros(3, np.int8), ValueError),
        ("in_root", np.zeros(2, np.int8), ValueError),
        ("ops", np.zeros(1, np.int64), ValueError),
        ("at", np.zeros(2, np.int32), ValueError),
        ("next", None, (TypeError, SystemError)),
        ("next", lambda arrays: [array[:, :1] for array in arrays], ValueError),
        ("root", lambda arrays: [array[:1] for array in arrays], ValueError),
        (
            "root",
            lambda arrays: [np.repeat(array, 2, -1)[..., ::2] for array in arrays],
            ValueError,
        ),
        ("root", lambda arrays: [array.astype("f8") for array in arrays], ValueError),
        ("root_in_next", lambda places: [99] * len(places), ValueError),
        ("root_in_next", [0], ValueError),
        ("done", -1, ValueError),
        ("root_done", 9, ValueError),
        ("inputs", [np.zeros((1, 2))], ValueError),
        ("action", np.zeros(2, np.int32), ValueError),
        ("num_columns", 0, ValueError),
    ],
)
def test_memory_that_does_not_fit_is_refused(env, facts, name, wrong, error):
    kind, states = native.load().Exchange, env._engine.states.values
    kind(facts)
    with pytest.raises(KeyError):
        kind({key: value for key, value in facts.items() if key != name})
    before = sys.getrefcount(states)
    with pytest.raises(error):
        kind({**facts, name: wrong(facts[name]) if callable(wrong) else wrong})
    assert sys.getrefcount(states) <= before


@needs_c
def test_c_moves_states_by_the_table_that_it_is_given(env, facts):
    def exchange(event: Event, state: State, after: int) -> Any:
        follows = NEXT.copy()
        follows[event, state] = after
        return native.load().Exchange({**facts, "follows": follows})

    def take(exchange: Any) -> int:
        assert exchange.wait(None, 2) in (0, 2)
        taken: int = exchange.take(
            2, np.zeros(4096, np.uint8), None, np.zeros(2, np.int64)
        )
        return taken

    before = state_of(env)
    assert (
        exchange(Event.STEP, State.RUNNING, -1).send(
            Event.STEP, np.arange(2), np.array([0, 1])
        )
        is False
    )
    assert state_of(env) == before
    env.send(actions(0, 1))
    settle(env)
    states = env._engine.states.values
    # An env without one of these entries is not under way, or not taken.
    for event in (Event.ANSWERED, Event.ENDS):
        assert take(exchange(event, State.STEP_RESETTING, -1)) == -1
        assert states.tolist() == [State.STEP_RESETTING] * 2
    assert take(exchange(Event.ANSWERED, State.STEP_RESETTING, State.ENDED)) == 0
    assert states.tolist() == [State.ENDED] * 2


@needs_c
def test_c_refuses_what_is_not_plain(env, facts):
    exchange, before = native.load().Exchange(facts), state_of(env)
    ids, two = np.arange(2), np.array([0, 1])
    for args in (
        (3, ids, two),
        (1, np.array([0, 0]), two),
        (1, np.array([0, 2]), two),
        (1, ids, two[:1]),
        (1, ids, np.array([[0, 1]])),
        (1, ids, two.astype(np.int32)),
        (1, ids, two.astype(np.uint64)),
        (1, ids, np.array([0, 5])),
        (1, ids, np.array([-1, 0])),
        (1, ids, None),
        (1, None, two),
    ):
        assert exchange.send(*args) is False, args
    room = np.zeros(4096, np.uint8)
    assert [
        exchange.wait(*args)
        for args in ((None, -1), (None, 1), (ids, 1), (np.array([7]), 1))
    ] == [0] * 4
    assert exchange.take(1, room, None, np.zeros(1, np.int64)) == -1
    assert exchange.roots(np.array([5]), room) is False
    assert exchange.roots(ids, room[:3]) is False
    assert state_of(env) == before
    env.send(actions(0, 1))
    settle(env)
    assert exchange.wait(np.array([1, 1]), 1) == 0
    assert exchange.wait(None, 3) == 0
    assert exchange.wait(np.array([1, 0]), 2) == 2
    found = np.zeros(2, np.int64)
    assert (
        exchange.take(3, room, None, found) == exchange.take(0, room, None, found) == -1
    )
    assert (
        exchange.take(2, room[:60], None, found)
        == exchange.take(2, room, None, found[:1])
        == -1
    )
    assert exchange.take(2, room, room[:8].copy(), found) == -1
    assert exchange.take(2, room, None, found) == 0
    assert found.tolist() == [1, 0]
    assert exchange.take(2, room, None, found) == -1
