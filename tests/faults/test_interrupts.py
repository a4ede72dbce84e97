"""Ctrl-C at every line of the executor: afterwards no data are stale or silently skipped, and nothing hangs.

The same for errors at lines of a start, a restart and a close: afterwards nothing is left, and the owner continues.
"""

import ast
import contextlib
import errno
import functools
import gc
import itertools
import linecache
import os
import signal
import sys
import time
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDict

import envherd.executor
import envherd.shm
import envherd.workers.messages
from envherd.executor import (
    AsyncCollector,
    ExecutorOptions,
    ParallelEnv,
    ResetNeeded,
    SerialEnv,
    WorkerLost,
)
from envherd.executor.rollouts import storage
from envherd.executor.start.zygote import end_idle
from envherd.gymnasium import AsyncVectorEnv
from envherd.workers import native
from envherd.workers.testing import CountingEnv
from tests.conftest import Possessions
from tests.executor.calls import ones
from tests.gates import wait_for
from tests.scale import offset, scaled

pytestmark = [pytest.mark.long, pytest.mark.timeout(120)]

NUM_ENVS = 3
EXECUTOR = str(Path(envherd.executor.__file__).parent)
MESSAGES = envherd.workers.messages.__file__
GRAD_MODE = str(torch.no_grad.__init__.__code__.co_filename)
# Python drops exceptions raised in them.
FINALIZERS = ("_come_back", "take_back", "__del__")


@functools.cache
def is_interrupted(code: types.CodeType) -> bool:
    """Return whether the lines of a function are counted."""
    file = code.co_filename
    return (
        file.startswith(EXECUTOR) or file in (MESSAGES, GRAD_MODE)
    ) and code.co_name not in FINALIZERS


def is_finalizing(frame: types.FrameType | None) -> bool:
    """Return whether a frame runs because an object is collected: Python drops exceptions raised there, too."""
    while frame is not None:
        code = frame.f_code
        if code.co_name in FINALIZERS:
            return True
        # None if `close` calls it.
        if (
            code is weakref.finalize.__call__.__code__
            and frame.f_locals["_"] is not None
        ):
            return True
        frame = frame.f_back
    return False


@functools.cache
def without_signals(file: str) -> set[int]:
    """Return the lines of a file at which Python handles no signal: `try`, and the items of `with`.

    Such a line is traced again when the block is left. What is raised then, before the item's `__exit__`, keeps a lock
    locked, or an exception current.
    """
    found = set()
    for node in ast.walk(ast.parse(Path(file).read_text())):
        if isinstance(node, ast.Try | ast.With):
            found.add(node.lineno)
        if isinstance(node, ast.With):
            found.update(item.context_expr.lineno for item in node.items)
    return found


class Interrupt:
    """A trace function that raises KeyboardInterrupt at the n-th line."""

    def __init__(self, line: int) -> None:
        self.left = line
        self.where = ""

    def __call__(self, frame: Any, event: str, _: Any) -> Any:
        if not is_interrupted(frame.f_code):
            return None
        if event == "line" and not self.where:
            self.left -= 1
            if self.left <= 0:
                file, line = frame.f_code.co_filename, frame.f_lineno
                if line not in without_signals(file) and not is_finalizing(frame):
                    self.where = f"{Path(file).name}:{line}"
                    sys.settrace(None)
                    self.strike()
        return self

    def strike(self) -> None:
        """Interrupt the code that is traced."""
        raise KeyboardInterrupt


class InterruptIn(Interrupt):
    """Raises KeyboardInterrupt at the n-th line of some functions, or of a file."""

    def __init__(self, line: int, names: set[str], file: str = "") -> None:
        super().__init__(line)
        self._names, self._file = names, file

    def __call__(self, frame: Any, event: str, argument: Any) -> Any:
        code = frame.f_code
        if code.co_name not in self._names and code.co_filename != self._file:
            return None
        return super().__call__(frame, event, argument)


class SignalIn(InterruptIn):
    """Sends SIGINT there, which may be put off."""

    def strike(self) -> None:
        signal.raise_signal(signal.SIGINT)


def at_each(
    make: Callable[[int], Interrupt], stride: int = 1, *, first: int = 1, least: int = 0
) -> Iterator[Interrupt]:
    """Yield interrupts at each `stride`-th line, at `least` ones at least, until one has not come."""
    for line in itertools.count(first + offset(stride), stride):
        interrupt = make(line)
        yield interrupt
        if not interrupt.where:
            assert line >= first + least * stride, (
                "the call has fewer lines than expected"
            )
            return


@contextlib.contextmanager
def tracing(interrupt: Interrupt) -> Iterator[None]:
    """Interrupt the block, and continue after it."""
    sys.settrace(interrupt)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            yield
    finally:
        sys.settrace(None)


def actions(value: int = 1) -> TensorDict:
    return TensorDict({"action": torch.full((NUM_ENVS,), value)}, [NUM_ENVS])


def only(*env_ids: int) -> TensorDict:
    mask = torch.zeros(NUM_ENVS, dtype=torch.bool)
    mask[list(env_ids)] = True
    return TensorDict({"_reset": mask}, [NUM_ENVS])


def send_and_receive(env: Any) -> None:
    value = torch.rand(NUM_ENVS)
    env.send(actions().set("value", value))
    assert env.recv()["value"].equal(value)


def go_on_with_the_first(env: Any) -> None:
    env.send(actions())
    env_ids = env.recv(2, with_root=False)["env_ids"]
    root = env.current(env_ids)
    env.send(root.set("action", torch.ones(2, dtype=torch.int64)), env_ids)
    env.recv()


def rebuild_sent(env: Any) -> None:
    env.send(actions())
    env.rebuild(1, factories=functools.partial(CountingEnv, 5))


#: name -> (what is interrupted, every how many lines)
CALLS: dict[str, tuple[Callable[[Any], Any], int]] = {
    "step": (lambda env: env.step(actions()), 1),
    "fused": (lambda env: env.step_and_maybe_reset(actions()), 1),
    "reset": (lambda env: env.reset(), 1),
    "reset of one": (lambda env: env.reset(only(1)), 1),
    "send and receive": (send_and_receive, 1),
    "the first that are ready": (go_on_with_the_first, 1),
    "question": (lambda env: env.call("echo", 5), 1),
    "new seed": (lambda env: env.set_seed(4), 1),
    "rebuild": (
        lambda env: env.rebuild([0, 2], factories=functools.partial(CountingEnv, 5)),
        1,
    ),
    "rebuild of sent envs": (rebuild_sent, 1),
    "rollout": (lambda env: env.rollout(3, ones, break_when_any_done=False), 5),
    "rollout that goes on": (
        lambda env: env.rollout(1, ones, auto_reset=False, break_when_any_done=False),
        1,
    ),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    "make",
    [SerialEnv, functools.partial(ParallelEnv, num_workers=2)],
    ids=["serial", "parallel"],
)
def test_interrupt_at_every_line(make, name):
    """`flight` 1 to 4 and 6 to 8, `exchange` 1 to 4, `worker_pool` 1, 3 and 4, `commands` 1, 2 and 4."""
    with make(
        NUM_ENVS,
        functools.partial(CountingEnv, 4),
        seed=0,
        options=ExecutorOptions(poison=True),
    ) as env:
        # Most lines are the same.
        interrupt_every_line(env, name, scaled(7, full=1))


@pytest.mark.parametrize("name", ["fused", "step"])
def test_at_every_line_of_views(name):
    options = ExecutorOptions(ring_frames=2)
    make_env = functools.partial(CountingEnv, 4)
    with ParallelEnv(
        NUM_ENVS, make_env, num_workers=1, copy=False, seed=0, options=options
    ) as env:
        interrupt_every_line(env, name, scaled(5, full=1))


def interrupt_every_line(env: Any, name: str, stride: int = 1) -> None:
    """Repeat a call, interrupted at a later line each time, and check the envs after each."""
    call, step = CALLS[name]
    env.reset()
    for interrupt in at_each(Interrupt, step * stride, least=scaled(2, full=10)):
        for env_id in _ended(env):
            env.reset(only(env_id))
        with tracing(interrupt):
            call(env)
        _check(env, f"interrupted at {interrupt.where}")


@pytest.mark.parametrize("in_background", [0, 1])
def test_at_every_line_of_an_asynchronous_collector(in_background):
    """An interrupted step is a gap in the step numbers: no step is duplicated, and no row joins two episodes."""
    seen: set[tuple[int, int]] = set()
    # The caller's own part is short there.
    stride = scaled(3, full=1) if in_background else scaled(15, full=5)
    with (
        ParallelEnv(
            NUM_ENVS, functools.partial(CountingEnv, 4), num_workers=2, seed=0
        ) as env,
        AsyncCollector(
            env, ones, frames_per_batch=6, in_background=in_background, close_env=False
        ) as collector,
    ):
        for interrupt in at_each(Interrupt, stride, least=5):
            batches = []
            with tracing(interrupt):
                batches.append(collector.collect())
            batches += [collector.collect(), collector.collect()]
            for data in batches:
                _check_rows(data, seen, f"interrupted at {interrupt.where}")


def test_at_lines_of_the_first_batch_of_a_collector():
    """A row may be full before the collector has seen a whole transition."""
    for interrupt in at_each(Interrupt, scaled(67, full=11), least=5):
        env = SerialEnv(NUM_ENVS, functools.partial(CountingEnv, 4), seed=0)
        with AsyncCollector(
            env, ones, frames_per_batch=2, layout="flat", max_batch=2
        ) as collector:
            with tracing(interrupt):
                collector.collect()
            steps = {
                tuple(map(int, step))
                for _ in range(3)
                for step in _numbers(collector.collect())
            }
            assert len(steps) == 6, f"interrupted at {interrupt.where}"


def _numbers(data: Any) -> list[Any]:
    """Return (env, number of the step) of every transition of a flat batch."""
    return list(zip(data["env_ids"].flatten(), data["step"].flatten(), strict=True))


def _check_rows(data: Any, seen: set[tuple[int, int]], when: str) -> None:
    """Check rows `[B, T]` of a `CountingEnv`, and that none of its steps was seen before."""
    before, after = data["observation"], data["next", "observation"]
    assert data.shape == (3, 2), when
    # A row in place of a step whose answer was lost.
    is_lost = data["policy_version"] == -1
    assert torch.equal(after[..., 0], before[..., 0]), when
    assert torch.equal(after[..., 1], before[..., 1] + ~is_lost), when
    assert data["next", "truncated"][is_lost].all(), when
    assert not data["next", "reward"][is_lost].any(), when
    is_done = data["next", "done"][:, :-1, 0]
    assert ((before[:, 1:] == after[:, :-1]).all(-1) | is_done).all(), when
    assert ((data["step"].diff(dim=1) == 1) | is_done).all(), when
    steps = set(
        zip(
            data["env_ids"].flatten().tolist(),
            data["step"].flatten().tolist(),
            strict=True,
        )
    )
    assert len(steps) == 6, when
    assert not steps & seen, when
    seen |= steps


@pytest.mark.broken_pool
def test_an_interrupt_while_a_successor_is_put_into_service():
    """An abandoned successor must not have answered: the next one's envs are new (`supervisor` 6)."""
    options = ExecutorOptions(on_worker_loss="restart")
    names = {"_to_serving", "attach", "await_frame"}
    for interrupt in at_each(
        lambda line: SignalIn(line, names), stride=scaled(8, full=2), least=2
    ):
        with ParallelEnv(
            NUM_ENVS,
            functools.partial(CountingEnv, 9),
            num_workers=3,
            seed=0,
            options=options,
        ) as env:
            env.reset()
            os.kill(env._pool.pid_of(1), signal.SIGKILL)
            env.send(actions())
            with tracing(interrupt):
                env.recv()
            if env._engine.states.under_way.any():
                # For a successor that was given up, and answers nevertheless.
                time.sleep(0.01)
                env.recv()
            after = env.step(actions())["next"]
            assert (
                after["observation"][:, 1].tolist() == env.get("num_steps") == [2, 1, 2]
            ), interrupt.where


@pytest.mark.parametrize("num_forks", [0, 1])
def test_an_interrupt_while_the_memory_of_rollouts_is_lent_or_dropped(num_forks):
    """No memory is lent twice, and workers map no more of it than before."""
    places = {"attach_storage", "detach_storage", "mail"}
    file, stride = storage.__file__, scaled(47, full=1)
    with ParallelEnv(
        NUM_ENVS, functools.partial(CountingEnv, 99), num_workers=2, seed=0
    ) as env:
        for interrupt in at_each(
            lambda line: InterruptIn(line, places, file),
            stride,
            first=1 + 5 * num_forks,
            least=3,
        ):
            dropped = [env.rollout(num_steps, ones) for num_steps in (1, 2)]
            for _ in range(2 * num_forks):
                storage._count_fork()
            dropped.clear()
            with tracing(interrupt):
                dropped.extend(
                    env.rollout(num_steps, ones) for num_steps in (2, 3, 4, 5)
                )
            dropped.clear()
            held = [env.rollout(num_steps, ones) for num_steps in (2, 3, 2, 3, 2)]
            copies = [data.clone() for data in held]
            env.rollout(2, ones)
            assert all(
                (data == copy).all() for data, copy in zip(held, copies, strict=True)
            ), interrupt.where
            for worker_id in range(2):
                maps = Path(f"/proc/{env._pool.pid_of(worker_id)}/maps").read_text()
                assert maps.count("envherd-rollout") <= storage._MAX_ATTACHED, (
                    interrupt.where
                )
            assert len(env._pool.crew.equipment._storages) <= storage._MAX_ATTACHED


def _ended(env: Any) -> list[int]:
    return env.current()["done"].flatten().nonzero().flatten().tolist()


def _check(env: Any, where: str) -> None:
    """Require that every transition follows from the previous row, after resets of rows that need one."""
    began = time.monotonic()
    assert torch.is_grad_enabled(), (
        f"{where}: the caller's losses would have no gradient"
    )
    # Its own answer, and not an earlier one.
    assert env.call("echo", 7) == [[[7], {}]] * NUM_ENVS, where
    if env._engine.states.under_way.any():
        td = env.recv()
        # The reward is 0 in a row that stands for that of an env which was rebuilt.
        assert torch.equal(
            td["next", "observation"][:, 1],
            td["observation"][:, 1] + (td["next", "reward"][:, 0] > 0),
        ), where
    root = env.current()
    assert (root["observation"] < 2**62).all(), (
        f"{where}: {root['observation']} is of a poisoned frame"
    )
    for value in (2, 3):
        try:
            td, after = env.step_and_maybe_reset(actions(value))
        except ResetNeeded as error:
            unmarked = {*error.env_ids} - {*_ended(env)}
            if unmarked:
                pytest.fail(
                    f"{where}: the rows of envs {unmarked} do not say that they must be reset"
                )
            before = root["observation"].clone()
            root = env.reset(only(*error.env_ids))
            before[list(error.env_ids), 1:] = torch.tensor([0, -1])
            assert torch.equal(root["observation"][:, 1:], before[:, 1:]), where
            td, after = env.step_and_maybe_reset(actions(value))
        expected = root["observation"] + torch.tensor([0, 1, 0])
        expected[:, 2] = value
        expected = torch.where(td["next", "reward"] > 0, expected, root["observation"])
        assert torch.equal(td["next", "observation"], expected), where
        root = after
    assert time.monotonic() - began < 20, where


#: Raised in turn: a limit on files, no memory, Ctrl-C.
FAILURES = (
    functools.partial(OSError, errno.EMFILE, "on purpose"),
    MemoryError,
    KeyboardInterrupt,
)
PARTS = (EXECUTOR, MESSAGES, str(Path(envherd.shm.__file__).parent))
# The only file whose lines no failure reaches: it defers signals.
DEFERRING = "interrupts.py"


class Failure:
    """A trace function that notes the lines that are reached, and raises an error at one of them."""

    def __init__(
        self,
        place: tuple[str, int] | None = None,
        kind: Callable[[], BaseException] = MemoryError,
    ) -> None:
        self.place, self._kind = place, kind
        self.places: dict[tuple[str, int], None] = {}

    def __call__(self, frame: Any, event: str, _: Any) -> Any:
        place = frame.f_code.co_filename, frame.f_lineno
        if not place[0].startswith(PARTS) or place[0].endswith(DEFERRING):
            return None
        is_new = event == "line" and place not in self.places
        if (
            is_new
            # A name stays if the system refuses to remove it.
            and linecache.getline(*place).strip() not in ("try:", "self.unlink()")
            and not is_finalizing(frame)
        ):
            self.places[place] = None
            if place == self.place:
                sys.settrace(None)
                raise self._kind()  # made here: one that is kept would keep the frames
        return self


def fail(make: Callable[[], Any], when: str, failure: Failure) -> None:
    """Start, restart or close an executor under the trace function; require that nothing is left in the end."""
    before = Possessions()
    env: Any = None
    if when != "start":
        env = make()
        env.reset()
    if when == "restart":
        os.kill(env._pool.pid_of(1), signal.SIGKILL)
    sys.settrace(failure)
    try:
        if when == "start":
            env = make()
        elif when == "restart":
            env.step(actions()[:2])
        else:
            env.close()
    except (OSError, MemoryError, KeyboardInterrupt, WorkerLost):
        assert failure.place is not None
    finally:
        sys.settrace(None)
    if env is not None:
        if when != "close":
            with contextlib.suppress(WorkerLost):  # of the worker that was killed
                env.reset()
            env.reset()
            assert env.step(actions()[:2])["next", "observation"][:, 1].tolist() == [
                1,
                1,
            ]
        env.close()
        del env
    gc.collect()
    end_idle()
    try:
        wait_for(lambda: not before.gained())
    except AssertionError:
        pytest.fail(f"{failure.place}: left {before.gained()}")


@pytest.mark.broken_pool
@pytest.mark.usefixtures("own_helper")
@pytest.mark.timeout(scaled(300, full=3 * 3600))
@pytest.mark.parametrize("start_method", ["zygote", "portable"])
# Freed between its creation and its owner.
@pytest.mark.filterwarnings("ignore:Exception ignored in. <socket")
@pytest.mark.parametrize("when", ["start", "restart", "close"])
def test_a_failure_at_any_line(when, start_method):
    options = ExecutorOptions(
        start_method=start_method, on_worker_loss="restart", close_timeout_s=2.0
    )
    make = functools.partial(
        ParallelEnv,
        2,
        functools.partial(CountingEnv, 9),
        num_workers=2,
        options=options,
    )
    noted = Failure()
    fail(make, when, noted)
    places = list(noted.places)
    assert len(places) > 100
    stride = scaled(len(places) // 5, full=1)
    for number, place in enumerate(places[offset(stride) :: stride]):
        fail(make, when, Failure(place, FAILURES[number % 3]))


class Sign(gymnasium.Env[Any, Any]):
    """Observes its episode and step as a number, and as a text, which does not pass through the slab."""

    observation_space = gymnasium.spaces.Dict(
        number=gymnasium.spaces.Box(0, 1e9, (1,), np.float64),
        sign=gymnasium.spaces.Text(20),
    )
    action_space = gymnasium.spaces.Discrete(2)
    number = 0

    def _observe(self) -> dict[str, Any]:
        return {"number": np.array([float(self.number)]), "sign": str(self.number)}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.number = self.number // 100 * 100 + 100
        return self._observe(), {}

    def step(self, action: int) -> Any:
        self.number += 1
        return (
            self._observe(),
            0.0,
            self.number % 100 == 3,
            False,
            {f"after {action}": self.number},
        )


@pytest.mark.parametrize(
    "name", ["fused", "step", "reset", "send and receive", "rollout"]
)
def test_numbers_and_texts_of_a_root_are_of_the_same_step(name):
    """`flight` 5."""
    call, stride = CALLS[name]
    with SerialEnv(NUM_ENVS, Sign, seed=0) as env:
        for interrupt in at_each(Interrupt, scaled(17 * stride, full=stride), least=3):
            env.reset()
            env.step_and_maybe_reset(actions())
            with tracing(interrupt):
                call(env)
            with contextlib.suppress(ValueError):  # none were sent
                env.recv()
            root = env.current()
            assert [*map(str, root["number"][:, 0].int().tolist())] == root["sign"], (
                interrupt.where
            )


def test_infos_after_an_interrupt_are_of_the_latest_step():
    """The facade keeps what copies the infos of the present schemas."""
    with contextlib.closing(AsyncVectorEnv([Sign] * NUM_ENVS, num_workers=1)) as env:
        for interrupt in at_each(lambda line: InterruptIn(line, {"_infos"}), least=9):
            env.reset()
            env.step(np.zeros(NUM_ENVS, np.int64))
            with tracing(interrupt):
                env.step(np.ones(NUM_ENVS, np.int64))
            env.reset()
            infos = env.step(np.ones(NUM_ENVS, np.int64))[-1]
            assert [*infos] == ["after 1", "_after 1"], interrupt.where


@pytest.mark.skipif(
    native.load() is None, reason="the C extension was not built, or is switched off"
)
def test_an_interrupt_before_a_landing_leaves_rows_in_their_columns(monkeypatch):
    """`flight` 4."""

    def interrupted(target: object) -> None:
        raise KeyboardInterrupt

    with SerialEnv(2, CountingEnv) as env:
        env.send(env.rand_action(env.reset())[:1], [0])
        env.recv()
        flights: Any = env.engine.flights
        monkeypatch.setattr(
            flights,
            "native",
            types.SimpleNamespace(give=flights.native.give, land=interrupted),
        )
        with pytest.raises(KeyboardInterrupt):
            env.step(env.rand_action().lock_())  # which is not made in one call of C
        assert env.engine.positions.is_mixed
