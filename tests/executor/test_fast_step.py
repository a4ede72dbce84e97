"""The compiled step and the general one have the same data, the same refusals and the same engine state afterwards."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from envherd.executor import (
    Busy,
    Closed,
    EnvError,
    ExecutorOptions,
    ParallelEnv,
    ResetNeeded,
    WorkerLost,
    WorkerTimeout,
)
from envherd.executor.pools import fast_commands
from envherd.executor.protocol.plain import Plain
from envherd.workers import native
from envherd.workers.testing import AgentsEnv, CountingEnv, FlagsEnv
from tests.gates import Gate, wait_for
from tests.scale import scaled

pytestmark = pytest.mark.preloads()

NUM_ENVS = 3


class Driving(gymnasium.Env[np.ndarray, np.ndarray]):
    """Takes two bounded floats and observes their sum so far; its episodes have 4 steps."""

    action_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self._at, self._num_steps = self.np_random.random(2).astype(np.float32), 0
        return self._at, {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self._at, self._num_steps = self._at + action, self._num_steps + 1
        return self._at, float(action.sum()), self._num_steps == 4, False, {}


class Slow(CountingEnv):
    """Slow if its action is 3; raises if it is 2."""

    time_s = 0.05

    def step(self, action: list[Any]) -> Any:
        if action[0] == 3:
            time.sleep(self.time_s)
        if action[0] == 2:
            raise RuntimeError("two")
        return super().step(action)


class Stuck(Slow):
    """Takes much longer than the deadline of its test, which the other env meets even on a busy machine."""

    time_s = 60.0


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
    return ParallelEnv(2, make, num_workers=2, copy=copy, seed=0, options=ExecutorOptions(**options))


def once_held(gate: Gate, call: str, deed: Callable[[], Any]) -> None:
    """Do a deed on another thread once an env waits at the gate and this thread is in the executor's `call`."""
    caller = threading.get_ident()

    def wait_and_do() -> None:
        gate.await_somebody()
        wait_for(lambda: call in (frame.name for frame in traceback.extract_stack(sys._current_frames()[caller])))
        time.sleep(0.05)  # from there to the wait for answers
        deed()

    threading.Thread(target=wait_and_do).start()


ENVS: dict[str, Callable[[], Any]] = {
    "numbers": CountingEnv,
    "pixels": functools.partial(CountingEnv, size=6),
    "agents": AgentsEnv,
    "switches": FlagsEnv,
    "floats": Driving,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "copies": {"num_workers": 2},
    "views": {"num_workers": 1, "copy": False, "options": ExecutorOptions(ring_frames=3)},
    "poisoned views": {"num_workers": 2, "copy": False, "options": ExecutorOptions(poison=True)},
    "on the cpu, any action": {"num_workers": 1, "device": "cpu", "options": ExecutorOptions(check_actions="off")},
}


class Derived(TensorDict):
    """A subclass of TensorDict."""


def generalised(env: Any) -> Any:
    """Disable compiled steps, sends and receives of an executor."""
    env._engine.plain = Plain.never("this is a test")._replace(rows=env._engine.plain.rows)
    env.compile()
    return env


def state_of(env: Any) -> dict[str, Any]:
    """Return an executor's state of its envs and calls."""
    engine, positions, words = env._engine, env._engine.positions, env._pool.slab.words
    return {
        "states": engine.states.values.tolist(),
        "columns": positions.columns.tolist(),
        "in_root": positions.in_root.tolist(),
        "column": positions.column,
        "is_mixed": positions._is_mixed,
        "is_in_ring": positions.where is positions.ring,
        "number": env._pool.number,
        "answers_lost": env._pool.answers_lost.tolist(),
        "outcome": bool(env._pool.outcome),
        "is_in_flight": engine.is_in_flight,
        "is_dirty": engine.is_dirty,
        "is_rolling": engine.is_rolling,
        "holder": [*engine.guard._holder],
        "errors": engine.flights.num_errors,
        **{
            name: words[name].tolist() for name in ("command_seq", "reply_seq", "status", "env_steps", "resets", "ends")
        },
    }


def assert_same(one: Any, other: Any) -> None:
    if isinstance(one, tuple):
        for mine, theirs in zip(one, other, strict=True):
            assert_same(mine, theirs)
        return
    assert type(one) is type(other)
    if one is None:
        return
    assert (one.batch_size, one.device, one.names) == (other.batch_size, other.device, other.names)
    keys = set(one.keys(include_nested=True))
    assert keys == set(other.keys(include_nested=True))
    for key in keys:
        mine, theirs = one[key], other[key]
        if isinstance(mine, torch.Tensor):
            assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape), key
            assert mine.detach().numpy().tobytes() == theirs.detach().numpy().tobytes(), key  # also for NaN


class Pair:
    """Two executors with the same calls; only one makes compiled steps."""

    def __init__(self, fast: Any, general: Any) -> None:
        self.envs = fast, general
        self.held: list[list[Any]] = [[], []]

    def play(self, seed: int, deeds: list[tuple[str, int]]) -> None:
        self.held = [[], []]
        self._both(lambda env: env.reset(seed=seed))
        for deed, number in deeds:
            self._both(partial(self._do, deed, number))

    def _do(self, deed: str, number: int, env: Any) -> Any:
        return getattr(self, "_" + deed)(env, np.random.default_rng(number))

    def _both(self, do: Callable[[Any], Any]) -> None:
        results: list[Any] = []
        for env, held in zip(self.envs, self.held, strict=True):
            try:
                results.append(do(env))
            except Exception as error:  # any refusal: the other must give the same
                results.append((type(error), str(error)))
            held.append(results[-1])
        one, other = results
        if isinstance(one, tuple) and isinstance(one[0], type):
            assert one == other
        else:
            for mine, theirs in zip(*(held[-2:] for held in self.held), strict=True):  # views are also unchanged
                if not (isinstance(mine, tuple) and isinstance(mine[0], type)):
                    assert_same(mine, theirs)
        assert state_of(self.envs[0]) == state_of(self.envs[1])

    def _action(self, env: Any, rng: np.random.Generator) -> TensorDict:
        leaf = env.action_spec[0]
        if leaf.dtype == "float32":
            values = rng.random((NUM_ENVS, *leaf.shape), np.float32)
        else:
            values = rng.integers(0, 2, (NUM_ENVS, *leaf.shape)).astype(leaf.dtype)
        return TensorDict({}, [NUM_ENVS]).set(leaf.key, torch.from_numpy(values))

    def _revived(self, env: Any) -> None:
        mask = torch.from_numpy(env._engine.states.needs_reset)
        if mask.any():
            env.reset(TensorDict({"_reset": mask}, [NUM_ENVS]))

    def _fused(self, env: Any, rng: np.random.Generator) -> Any:
        return env.step_and_maybe_reset(self._action(env, rng))

    def _step(self, env: Any, rng: np.random.Generator) -> Any:
        self._revived(env)
        return env.step(self._action(env, rng))

    def _step_where_ended(self, env: Any, rng: np.random.Generator) -> Any:
        return env.step(self._action(env, rng))

    def _odd_actions(self, env: Any, rng: np.random.Generator) -> Any:
        self._revived(env)
        td, key = self._action(env, rng), env.action_spec[0].key
        value = td[key]
        odd = [
            lambda: value.to(torch.int32),
            lambda: value.to(torch.float64),
            lambda: torch.stack([value, value], -1)[..., 0],
            lambda: value + 100,
            lambda: -value - 1,
            lambda: value.float().requires_grad_(),
            lambda: torch.nn.Parameter(value.float()),
            lambda: value * torch.nan,
            lambda: value.unsqueeze(-1),
            lambda: value.to("meta"),
            lambda: None,
        ]
        made = odd[rng.integers(len(odd))]()
        td = td.set(key, made) if made is not None and made.shape[:1] == (NUM_ENVS,) else TensorDict({}, [NUM_ENVS])
        return env.step_and_maybe_reset(td)

    def _odd_callers(self, env: Any, rng: np.random.Generator) -> Any:
        self._revived(env)
        td, own = self._action(env, rng), torch.arange(NUM_ENVS).float()
        odd = [
            lambda: Derived(td.to_dict(), [NUM_ENVS]),
            td.lock_,
            lambda: td.refine_names("env"),
            lambda: td.to("cpu"),
            lambda: td.set(("next", "hidden"), own),
            lambda: td.set("hidden", own),
            lambda: td.set("next", env.current()),
            lambda: td.clone().auto_batch_size_(),
            lambda: td[:2],
            lambda: TensorDict({}, []),
            lambda: torch.stack([*td.unbind(0)]),
            lambda: TensorDict.lazy_stack([*td.unbind(0)]),
            lambda: td.clone().requires_grad_() if env.action_spec[0].dtype == "float32" else td,
        ]
        return (env.step, env.step_and_maybe_reset)[rng.integers(2)](odd[rng.integers(len(odd))]())

    def _reset(self, env: Any, rng: np.random.Generator) -> Any:
        return env.reset(TensorDict({"_reset": torch.from_numpy(rng.random(NUM_ENVS) < 0.5)}, [NUM_ENVS]))

    def _exchange(self, env: Any, rng: np.random.Generator) -> Any:
        self._revived(env)
        env_ids = rng.permutation(NUM_ENVS)[: rng.integers(1, NUM_ENVS + 1)]
        env.send(self._action(env, rng)[: len(env_ids)], env_ids)
        with contextlib.suppress(Busy):
            env.step_and_maybe_reset(self._action(env, rng))
        return env.recv(env_ids=env_ids)

    def _rollout(self, env: Any, rng: np.random.Generator) -> Any:
        return env.rollout(
            int(rng.integers(1, 6)),
            lambda td: td.update(self._action(env, rng)),
            auto_reset=bool(rng.integers(2)),
            break_when_any_done=bool(rng.integers(2)),
        )

    def _step_in_a_rollout(self, env: Any, rng: np.random.Generator) -> Any:
        return env.rollout(2, lambda td: env.step_and_maybe_reset(td.update(self._action(env, rng)))[0])

    def _ask(self, env: Any, rng: np.random.Generator) -> None:
        env.call("reset", 4 + int(rng.integers(3)))  # its result depends on the family; it must not affect a step


#: One call, and a number from which its arguments are drawn.
DEEDS = st.tuples(
    st.sampled_from(
        [*["fused"] * 3, "step", "step_where_ended", "odd_actions", "odd_callers", "reset", "exchange", "rollout"]
    ),
    st.integers(0, 2**32 - 1),
)


@contextlib.contextmanager
def pair_of(name: str, setting: str) -> Iterator[Pair]:
    with (
        ParallelEnv(NUM_ENVS, ENVS[name], seed=0, **SETTINGS[setting]) as fast,
        ParallelEnv(NUM_ENVS, ENVS[name], seed=0, **SETTINGS[setting]) as general,
    ):
        yield Pair(fast, generalised(general))


needs_c = pytest.mark.skipif(native.load() is None, reason="the C extension was not built, or is switched off")


@needs_c
@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", ENVS)
def test_it_does_what_the_general_step_does(name, setting):
    with pair_of(name, setting) as pair:

        @settings(max_examples=scaled(15, full=150), suppress_health_check=[HealthCheck.too_slow], deadline=None)
        @given(seed=st.integers(0, 2**31), deeds=st.lists(DEEDS, min_size=1, max_size=12))
        def agree(seed, deeds):
            pair.play(seed, deeds)

        agree()
        for deed in ("odd_actions", "odd_callers"):
            pair.play(5, [("fused", 1), *((deed, number) for number in range(40)), ("fused", 2), ("step", 3)])
        pair.play(7, [("fused", number) for number in range(12)])


def actions(*values: int) -> TensorDict:
    return TensorDict({"action": torch.tensor(values)}, [len(values)])


def slow_pair(*, copy: bool = True, **options: Any) -> Any:
    return ParallelEnv(2, functools.partial(Slow, 50), num_workers=2, copy=copy, options=ExecutorOptions(**options))


def be_patient(patch: pytest.MonkeyPatch) -> None:
    """Let compiled steps wait for slow answers themselves, even on a busy machine."""
    patch.setattr(fast_commands, "LOOK_S", 30.0)


@pytest.fixture(scope="module", params=["copies", "views"])
def shared(request):
    with pytest.MonkeyPatch.context() as patch:
        be_patient(patch)  # before compiling: C copies the constants
        env = slow_pair(copy=request.param == "copies")
    with env:
        yield env


@pytest.fixture
def env(shared, monkeypatch):
    be_patient(monkeypatch)
    shared.reset(seed=0)
    return shared


def refuse(*_: Any, **__: Any) -> None:
    raise AssertionError("this was the general step")


@needs_c
def test_a_plain_step_is_the_compiled_one(env, monkeypatch):
    monkeypatch.setattr(env._engine, "step_all", refuse)
    monkeypatch.setattr(env._engine.flights, "land", refuse)
    root = env.current()
    for count in itertools.count(1):
        td, root = env.step_and_maybe_reset(root.set("action", torch.tensor([0, 1])))
        assert td["next", "observation"][:, 1:].tolist() == [[count, 0], [count, 1]]
        assert root["observation"].data_ptr() == td["next", "observation"].data_ptr()
        if count == 8:
            break
    with pytest.raises(AssertionError, match="general"):
        env.step(td)  # which has a `next`


@needs_c
def test_rollouts_give_the_compiled_command(monkeypatch):
    be_patient(monkeypatch)
    with slow_pair() as env:
        env.reset()
        monkeypatch.setattr(env._engine.flights, "land", refuse)
        data = env.rollout(5, lambda td: td.set("action", torch.tensor([0, 1])), auto_reset=False)
        assert data["next", "observation"][1, :, 1].tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("slow", [(3, 0), (0, 3), (3, 3)])
def test_answers_that_take_long_are_waited_for(env, slow):
    for count in (1, 2):
        td = env.step(actions(*slow))
        assert td["next", "observation"][:, 1:].tolist() == [[count, slow[0]], [count, slow[1]]]
    assert env.step_and_maybe_reset(actions(0, 1))[1]["observation"][:, 1].tolist() == [3, 3]
    assert not env._pool.has_waited


def test_what_an_env_raises_is_raised_with_the_rows_of_the_others(env):
    with pytest.raises(EnvError, match="two") as caught:
        env.step_and_maybe_reset(actions(1, 2))
    assert caught.value.partial["observation"][0, 1:].tolist() == [1, 1]
    with pytest.raises(ResetNeeded) as refused:
        env.step(actions(0, 0))
    assert refused.value.env_ids == (1,)
    assert env.reset(TensorDict({"_reset": torch.tensor([False, True])}, [2]))["observation"][:, 1].tolist() == [1, 0]
    assert env.step(actions(0, 0))["next", "observation"][:, 1].tolist() == [2, 1]


@pytest.mark.broken_pool
@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_lost_worker_is_noticed(when, tmp_path):
    gate = Gate(tmp_path)
    with held_pair(gate) as env:
        env.reset()
        kill = functools.partial(os.kill, env._pool.pid_of(1), signal.SIGKILL)
        if when == "before":
            kill()
        else:
            once_held(gate, "step", kill)
        with pytest.raises(WorkerLost):
            env.step(actions(0, 3))
        assert_goes_on_without_env_1(env, WorkerLost)


def assert_goes_on_without_env_1(env: Any, loss: type[Exception]) -> None:
    with pytest.raises((ResetNeeded, loss)):
        env.step(actions(0, 0))
    with pytest.raises(loss):
        env.reset()
    env.reset(TensorDict({"_reset": torch.tensor([True, False])}, [2]))
    env.send(actions(1), [0])
    assert env.recv()["next", "observation"][:, 1:].tolist() == [[1, 1]]


@pytest.mark.broken_pool
def test_a_worker_that_is_late_is_given_up():
    options = ExecutorOptions(step_timeout_s=2.0)
    with ParallelEnv(2, functools.partial(Stuck, 50), num_workers=2, options=options) as env:
        env.reset()
        with pytest.raises(WorkerTimeout):
            env.step(actions(0, 3))
        assert_goes_on_without_env_1(env, WorkerTimeout)


class Rang(Exception):
    """Raised by a signal handler."""


#: Makes the handler of SIGALRM run on the main thread.
RING = functools.partial(os.kill, os.getpid(), signal.SIGALRM)


@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("other", ["a handler", "a thread"])
def test_a_call_inside_it_is_refused(copy, other, tmp_path, monkeypatch):
    be_patient(monkeypatch)
    gate, found = Gate(tmp_path), []

    def call(*_):
        try:
            env.step(actions(0, 0))
        except Busy as error:
            found.append(error)
        finally:
            gate.open()

    before = signal.signal(signal.SIGALRM, call)
    try:
        with held_pair(gate, copy=copy) as env:
            env.reset()
            once_held(gate, "step", RING if other == "a handler" else call)
            assert env.step(actions(3, 3))["next", "observation"][:, 1].tolist() == [1, 1]
            assert len(found) == 1
            assert env.step(actions(0, 0))["next", "observation"][:, 1].tolist() == [2, 2]
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("copy", [True, False])
def test_a_handler_that_raises_in_it_leaves_envs_that_need_a_reset(copy, tmp_path, monkeypatch):
    def ring(*_: object) -> None:
        raise Rang

    be_patient(monkeypatch)
    gate, before = Gate(tmp_path), signal.signal(signal.SIGALRM, ring)
    try:
        with held_pair(gate, copy=copy) as env:
            env.reset()
            once_held(gate, "step", RING)
            with pytest.raises(Rang):
                env.step(actions(3, 3))
            gate.open()
            with pytest.raises(ResetNeeded):
                env.step(actions(0, 0))
            env.reset()
            assert env.step(actions(0, 0))["next", "observation"][:, 1].tolist() == [1, 1]
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.broken_pool
def test_an_executor_that_is_closed_meanwhile_says_so(tmp_path):
    gate = Gate(tmp_path)
    with held_pair(gate, close_timeout_s=0.0) as env:
        env.reset()
        once_held(gate, "step", env.close)
        with pytest.raises(Closed, match="while it waited"):
            env.step(actions(3, 3))
        with pytest.raises(Closed, match="is closed"):
            env.step(actions(0, 0))


def test_a_fork_of_the_process_is_refused(env):
    env.step(actions(0, 0))
    pid = os.fork()
    if not pid:
        try:
            env.step(actions(0, 0))
        except Closed:
            os._exit(7)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert env.step(actions(0, 0))["next", "observation"][:, 1].tolist() == [2, 2]


@pytest.mark.parametrize(
    "options",
    [ExecutorOptions(infos="plain"), ExecutorOptions(recycle_after=3), ExecutorOptions(on_worker_loss="restart")],
    ids=["infos", "recycling", "restarts"],
)
def test_an_executor_that_has_more_to_do_makes_no_compiled_step(options):
    with ParallelEnv(2, CountingEnv, num_workers=1, options=options) as env:
        env.reset()
        assert env._fast_step(actions(0, 0)) is None
        assert env._fast_step_reset(actions(0, 0)) is None
