"""The real executor over simulated workers: whatever happens, its states, positions and rows are those of the envs."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from envherd.executor import Busy
from envherd.executor.protocol.env_states import FOLLOWS, Event, State
from envherd.workers import native
from envherd.workers.errors import EnvherdError
from tests.executor.calls import only
from tests.faults.test_interrupts import Interrupt, InterruptIn, at_each, tracing
from tests.oracles.executor_model import Explorer
from tests.oracles.simulated import (
    GOES_ON,
    Fate,
    Scripted,
    SimulatedPortablePool,
    simulated,
)
from tests.oracles.state_trace import StateTrace
from tests.scale import scaled, seed

pytestmark = [pytest.mark.slow, pytest.mark.broken_pool, pytest.mark.timeout(240)]

RESTARTS = {"on_worker_loss": "restart", "max_restarts": 10_000}
SETTINGS: dict[str, dict[str, Any]] = {
    "raise": {"blocks": [[0], [1]]},
    "restart": {"blocks": [[0], [1]], **RESTARTS},
    "pairs": {"blocks": [[0, 1], [2]], "ring_frames": 2, "poison": True},
    "pairs that restart": {"blocks": [[0, 1], [2]], "ring_frames": 2, **RESTARTS},
    "interrupt": {"blocks": [[0], [1]], **RESTARTS, "on_env_error": "interrupt"},
    "pairs that interrupt": {
        "blocks": [[0, 1], [2]],
        "on_env_error": "interrupt",
        "max_restarts": 10_000,
    },
    "portable": {"blocks": [[0], [1]], "pool": SimulatedPortablePool},
    "portable that restarts": {
        "blocks": [[0], [1]],
        "pool": SimulatedPortablePool,
        **RESTARTS,
    },
}
COMMANDS = (Event.STEP, Event.STEP_RESET, Event.RESET)
FAILURES = (Event.FAILS, Event.IS_LOST, Event.IS_BROKEN_OFF)
#: Entries of the table that an exploration meets.
MET = {
    *(
        (state, event)
        for state in State
        for event in FOLLOWS[state]
        if event in (*COMMANDS, Event.ANSWERED)
    ),
    *(
        (state, event)
        for state in (State.STEPPING, State.STEP_RESETTING, State.RESETTING)
        for event in FAILURES
    ),
    (State.STEPPING, Event.ENDS),
}
MET_IN_C = {
    *((State.RUNNING, event) for event in (Event.STEP, Event.STEP_RESET)),
    *((State.STEPPING, event) for event in (Event.ANSWERED, Event.ENDS)),
    (State.STEP_RESETTING, Event.ANSWERED),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", SETTINGS)
def test_random_walks_keep_the_executor_model(name, monkeypatch):
    trace = StateTrace(monkeypatch)
    make = functools.partial(simulated, monkeypatch, **SETTINGS[name])
    explorer = Explorer(make, seed())
    for _ in range(20):
        explorer.explore(scaled(8, full=800), 60)
        missing = MET - {(state, event) for state, event, _ in trace.steps}
        num_broken_off = min(explorer.num_interrupted, explorer.num_refused)
        has_enough = len(explorer.tries) > 150 and num_broken_off > 100
        if has_enough and not missing and explorer.num_repeated > 2:
            break
    assert has_enough
    assert explorer.num_repeated > 2
    assert not missing, missing
    in_c = {(before, event) for before, event, _ in trace.in_c}
    steps_in_c = native.load() is not None and not any(
        word in name for word in ("restart", "portable", "interrupt")
    )
    assert not steps_in_c or in_c >= MET_IN_C
    assert not in_c or (native.load() is not None and "portable" not in name)


def interrupted(call: Callable[[], Any], interrupt: Interrupt) -> bool:
    """Make a call; return whether it was interrupted."""
    with contextlib.suppress(EnvherdError, ValueError), tracing(interrupt):
        call()
    return bool(interrupt.where)


def actions(num_envs: int) -> TensorDict:
    return TensorDict({"action": torch.full((num_envs,), GOES_ON)}, [num_envs])


@pytest.mark.parametrize(
    ("options", "make", "stride"),
    [
        ({}, Interrupt, scaled(19, full=1)),
        (
            RESTARTS,
            functools.partial(
                InterruptIn,
                names={"replace", "mark_lost", "_set_flags", "_move_latest"},
            ),
            1,
        ),
    ],
)
def test_an_interrupt_while_a_loss_is_noticed_in_another_envs_reset(
    options, make, stride, monkeypatch
):
    """All envs of the lost worker need a reset, and their rows say so (`losses` 2).

    A worker that may be replaced can be found dead while the interrupt is got over: the next command finds it, too.
    """
    for interrupt in at_each(make, stride):
        with contextlib.closing(
            simulated(monkeypatch, [[0, 1], [2]], **options)
        ) as env:
            env.reset()
            env._pool.crew.workers[0].kill()
            interrupted(lambda: env.reset(only(env, 1)), interrupt)  # at once
            done = env.current()["done"].flatten().tolist()
            assert done == env._engine.states.needs_reset.tolist(), interrupt.where
            assert options or all(done[:2]) or not env._pool.lost, interrupt.where


def test_an_interrupt_while_the_second_of_two_lost_workers_is_replaced(monkeypatch):
    """The rows of the first one's envs say that they need a reset (`losses` 2, 3)."""
    names, num_hit = {"_begin_restarts"}, 0
    for interrupt in at_each(lambda line: InterruptIn(line, names), least=1):
        with contextlib.closing(
            simulated(monkeypatch, [[0, 1], [2, 3]], **RESTARTS)
        ) as env:
            env.reset()
            for worker_id in (0, 1):
                env._pool.crew.workers[worker_id].kill()
            rows = TensorDict({"_reset": torch.arange(4) % 2 == 1}, [4])
            num_hit += interrupted(functools.partial(env.reset, rows), interrupt)
            done = env.current()["done"].flatten().tolist()
            assert done == env._engine.states.needs_reset.tolist(), interrupt.where
    assert num_hit > 5


@pytest.mark.parametrize("in_c", [True, False])
@pytest.mark.long
def test_two_interrupts_while_envs_are_sent(monkeypatch, in_c):
    """Without C, nobody knows for a moment whether an env was given its step: it needs a reset, and its row says so.

    `flight` 1 to 3, `commands` 1.
    """
    if not in_c:
        monkeypatch.setattr(native, "find", lambda: (None, "this is a test"))
    names, num_in_doubt = {"_submit", "submit", "write"}, 0
    stride = scaled(47, full=7)
    for line in range(1, 100):
        for second in at_each(Interrupt, stride, first=1 + line % stride):
            with contextlib.closing(
                simulated(monkeypatch, [[0], [1]], **RESTARTS)
            ) as env:
                env.reset()
                # At once.
                was_hit = interrupted(
                    lambda: env.send(actions(2)), InterruptIn(line, names)
                )
                interrupted(env.current, second)
                with contextlib.suppress(Busy):  # some are sent
                    done = env.current()["done"].flatten().tolist()
                    assert done == env._engine.states.needs_reset.tolist(), (
                        line,
                        second.where,
                    )
                    num_in_doubt += any(done)
        if not was_hit:
            break
    assert bool(num_in_doubt) is (native.load() is None)


@pytest.mark.long
def test_two_interrupts_while_the_answers_of_a_lost_worker_are_lost(monkeypatch):
    """Its successor does not carry out what was given to it (`supervisor` 1 to 3, `commands` 3)."""
    names = {"declare_lost", "lose_answers_of", "lose_answers"}
    stride = scaled(151, full=1)
    for line in range(1, 100):
        for second in at_each(Interrupt, stride, first=1 + line % stride):
            with contextlib.closing(
                simulated(monkeypatch, [[0], [1]], **RESTARTS)
            ) as env:
                env.reset()
                env._pool.fates = {0: Fate.DIES_BEFORE, 1: Fate.LATE}
                env.send(actions(2))
                was_hit = interrupted(env.recv, InterruptIn(line, names))
                interrupted(lambda: env.recv(env_ids=[1]), second)  # at once
                if env._engine.states.under_way.any():
                    # An InternalError, if the successor had a command to step.
                    env.recv()
        if not was_hit:
            break
    assert line > 5


def test_an_interrupt_before_a_successor_gets_the_reset_of_a_sent_env(monkeypatch):
    """The successor may serve by the time at which the next call tells it (`losses` 1, `worker_pool` 1).

    Its instance is reset, wherever in the command it was (`commands` 2).
    """
    for interrupt in at_each(
        functools.partial(
            InterruptIn, names={"cut_off_sent", "submit_later", "complete", "write"}
        ),
        least=1,
    ):
        with contextlib.closing(simulated(monkeypatch, [[0], [1]], **RESTARTS)) as env:
            env.reset()
            env._pool.fates = {1: Fate.DIES_BEFORE}
            env.send(actions(1), [1])
            interrupted(env.recv, interrupt)
            # The caller looks at the workers: it puts the successor into service, which looks for commands.
            for _ in range(2):
                env._pool.fates = {0: Fate.LATE}
                env.reset(only(env, 0))
            if env._engine.states.under_way.any():
                assert env.recv()["next", "interrupted"].all(), interrupt.where
            assert (
                env._engine.states.needs_reset[1] or env._pool.envs[1].is_in_episode
            ), interrupt.where


def test_an_interrupt_while_a_worker_is_replaced_leaves_no_row_of_it(monkeypatch):
    """Also an env that had answered gets an interrupted row: its successor would be stepped without a reset.

    `losses` 1 and 3, `supervisor` 4.
    """
    for interrupt in at_each(
        functools.partial(
            InterruptIn, names={"replace", "_begin_restarts", "begin_restart"}
        ),
        least=15,
    ):
        with contextlib.closing(
            simulated(monkeypatch, [[0, 1], [2]], **RESTARTS)
        ) as env:
            env.reset()
            env.send(actions(1), [0])
            env._pool.fates = {0: Fate.DIES_BEFORE}
            env.send(actions(1), [1])
            interrupted(lambda: env.recv(env_ids=[1]), interrupt)
            assert env.recv()["next", "interrupted"].all(), interrupt.where


@pytest.mark.parametrize("in_c", [True, False])
def test_envs_of_a_lost_worker_keep_their_place_in_the_order(monkeypatch, in_c):
    """Also after a second loss; and later ones have the places of their own sends (`worker_pool` 2)."""
    if not in_c:
        monkeypatch.setattr(native, "find", lambda: (None, "this is a test"))
    with contextlib.closing(simulated(monkeypatch, [[0], [1], [2]], **RESTARTS)) as env:
        env.reset()
        for order in ([1, 0, 2], [2, 1, 0]):
            env._pool.fates = dict.fromkeys(range(3), Fate.LATE) | {
                order[0]: Fate.DIES_BEFORE
            }
            for env_id in order:
                env.send(actions(1), [env_id])
            assert env.recv()["env_ids"].tolist() == order
            env.reset()


def test_a_sent_env_that_was_rebuilt_gives_no_row_after_the_loss_of_another_is_raised(
    monkeypatch,
):
    """Its answer is lost by the rebuild, and a loss that `recv` raises does not change that (`flight` 7)."""
    with contextlib.closing(simulated(monkeypatch, [[0], [1]])) as env:
        env.reset()
        env._pool.fates = {0: Fate.DIES_BEFORE}
        env.send(actions(2))
        env.rebuild([1], factories=functools.partial(Scripted, 1))
        interrupted(env.recv, Interrupt(10_000))  # the loss is raised
        assert env.recv()["next", "truncated"].tolist() == [[True]]


def test_a_successor_that_has_just_come_into_service_is_not_late(monkeypatch):
    """The limit of a wait that began before it does not count."""
    with contextlib.closing(simulated(monkeypatch, [[0], [1]], **RESTARTS)) as env:
        env.reset()
        env._pool.crew.workers[0].kill()
        env.step(actions(2))
        env.reset()
        env._pool.supervisor.give_up_late([0], 5.0)
        assert not env._pool.lost


@pytest.mark.parametrize("num_steps", range(1, 4))
def test_an_interrupt_while_a_row_is_moved_out_of_the_next_column(
    num_steps, monkeypatch
):
    """A step of all overwrites the column in which an env is that was not stepped lately (`flight` 4)."""
    names = {"_keep_latest", "_move_latest", "_put_root"}
    for interrupt in at_each(lambda line: InterruptIn(line, names), least=1):
        with contextlib.closing(simulated(monkeypatch, [[0], [1]])) as env:
            env.reset()
            env.step(actions(2))
            for _ in range(num_steps):
                env.send(actions(1), [0])
                env.recv()
            interrupted(lambda: env.step(actions(2)), interrupt)  # at once
            rows, needs_reset = (
                env.current()["observation"].flatten().tolist(),
                env._engine.states.needs_reset,
            )
            for row, scripted, is_lost in zip(
                rows, env._pool.envs, needs_reset, strict=True
            ):
                assert is_lost or row == scripted.latest, interrupt.where
