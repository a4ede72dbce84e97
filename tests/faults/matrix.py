"""The matrix fault x state of the protocol as a table, and the driver of one cell.

Every cell breaks one env of three in a state, and reports what the caller saw and after how long, whether the other
envs continued, and what was left after `close`. `tools.faults_page` writes `docs/reports/faults.md` from that.
"""

import contextlib
import functools
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from envherd.executor import (
    EnvError,
    ExecutorOptions,
    FactoryError,
    ParallelEnv,
    ResetNeeded,
    WorkerLost,
    WorkerTimeout,
)
from envherd.executor.protocol.env_states import FOLLOWS, Event, State
from envherd.executor.start.zygote import end_idle
from envherd.workers.testing import CountingEnv
from tests.conftest import command, descendants, shm_names
from tests.envs.breaking_envs import (
    BAD_OBSERVATIONS,
    DEATHS,
    EXCEPTIONS,
    HANGS,
    FaultyEnv,
)
from tests.executor.calls import only

NUM_ENVS, VICTIM = 3, 1
#: Numbers of envs in the victim's worker and in the other one.
NEIGHBOUR, BYSTANDER = 0, 2
DEADLINE_S = 1.0

#: State -> where the env breaks ("" for a signal from outside), and its meaning.
STATES: dict[str, tuple[str, str]] = {
    "build": ("construct", "in the factory"),
    "idle": ("", "between two calls; the next step notices it"),
    "step": ("step", "in `step_and_maybe_reset`"),
    "reset": ("reset", "in a `reset` of all envs"),
    "sent": ("step", "between `send` and `recv`"),
    "rollout": ("step", "in a `rollout`"),
    "render": ("render", "in a request: `render`, `call`, `get`"),
    "rebuild": ("construct", "in the new factory of a `rebuild`"),
    "close": ("close", "in `close`"),
}

#: Signals that arrive from outside while the worker is idle.
FROM_OUTSIDE = {
    "segfault": signal.SIGSEGV,
    "abort": signal.SIGABRT,
    "kill": signal.SIGKILL,
    "term": signal.SIGTERM,
    "stop": signal.SIGSTOP,
}

_ENDS = {
    **{name: death.outcome for name, death in DEATHS.items()},
    "term": "SIGTERM(-15)",
}
FAULTS = (*EXCEPTIONS, *BAD_OBSERVATIONS, *_ENDS, *HANGS, "stop")


@dataclass(frozen=True)
class Cell:
    """One cell of the matrix: a fault in a state, under a policy and a start method.

    The policy is one of `on_worker_loss`; "interrupt" is one of `on_env_error`.
    """

    fault: str
    state: str
    policy: str = "raise"
    start_method: str = "zygote"

    @property
    def name(self) -> str:
        """Its name in tests and recordings."""
        return f"{self.fault}-{self.state}-{self.policy}-{self.start_method}"

    @property
    def kind(self) -> str:
        """Whether the env "raises", or the worker "ends" or "hangs"."""
        if self.fault in EXCEPTIONS or self.fault in BAD_OBSERVATIONS:
            return "raises"
        return "ends" if self.fault in _ENDS else "hangs"

    @property
    def is_mended(self) -> bool:
        """Whether nothing is raised: the envs' rows are interrupted."""
        mending = "interrupt" if self.kind == "raises" else "restart"
        return self.policy == mending and self.state not in ("render", "rebuild")

    @property
    def is_possible(self) -> bool:
        """Whether the cell is possible: an idle env cannot raise, and only steps and resets return observations."""
        if self.state == "idle":
            return self.fault in FROM_OUTSIDE
        if self.fault in BAD_OBSERVATIONS:
            return self.state in ("step", "reset", "sent", "rollout")
        return True


def _all_cells() -> list[Cell]:
    cells = [Cell(fault, state) for fault in FAULTS for state in STATES]
    mending = [state for state in STATES if state not in ("build", "close")]
    cells += [
        Cell(fault, state, "restart")
        for fault in (*_ENDS, *HANGS, "stop")
        for state in mending
    ]
    cells += [
        Cell(fault, state, "interrupt")
        for fault in (*EXCEPTIONS, *BAD_OBSERVATIONS)
        for state in mending
    ]
    # the start method affects how workers end, not what envs raise
    cells += [
        Cell(fault, state, "raise", "spawn")
        for fault in ("segfault", "kill", "gil")
        for state in STATES
    ]
    cells += [
        replace(cell, start_method="portable")
        for cell in cells
        if cell.start_method == "zygote"
    ]
    return [cell for cell in cells if cell.is_possible]


CELLS = _all_cells()
#: Cells of an ordinary run: each fault, and each kind of fault in each state with each policy, about once. What envs
#: raise in factories, resets and steps is in `test_env_raises`.
QUICK = {
    Cell("unpicklable", "rollout"),
    Cell("unprintable", "render"),
    Cell("value_error", "sent"),
    Cell("value_error", "step"),
    Cell("value_error", "close"),
    Cell("segfault", "build"),
    Cell("kill", "idle"),
    Cell("exit", "step"),
    Cell("exit_0", "step"),
    Cell("segfault", "step"),
    Cell("abort", "step"),
    Cell("exit", "reset"),
    Cell("kill", "sent", "raise"),
    Cell("kill", "step", "raise", "spawn"),
    Cell("term", "rollout"),
    Cell("kill", "render"),
    Cell("kill", "rebuild"),
    Cell("gil", "rebuild"),
    Cell("value_error", "rebuild", "interrupt"),
    Cell("segfault", "rebuild", "restart"),
    Cell("unprintable", "rebuild", "raise", "portable"),
    Cell("gil", "build"),
    Cell("stop", "step"),
    Cell("gil", "step"),
    Cell("spin", "step"),
    Cell("sleep", "reset"),
    Cell("stop", "close"),
    Cell("gil", "close"),
    Cell("value_error", "step", "interrupt"),
    Cell("unprintable", "reset", "interrupt"),
    Cell("system_exit", "sent", "interrupt"),
    Cell("ragged", "rollout", "interrupt"),
    Cell("value_error", "render", "interrupt"),
    Cell("abort", "idle", "restart"),
    Cell("segfault", "step", "restart"),
    Cell("kill", "reset", "restart"),
    Cell("exit", "sent", "restart"),
    Cell("kill", "rollout", "restart"),
    Cell("gil", "step", "restart"),
    Cell("gil", "reset", "restart"),
    Cell("gil", "sent", "restart"),
    Cell("segfault", "build", "raise", "portable"),
    Cell("value_error", "step", "raise", "portable"),
    Cell("sleep", "step", "raise", "portable"),
    Cell("kill", "sent", "raise", "portable"),
    Cell("kill", "step", "restart", "portable"),
    Cell("gil", "step", "restart", "portable"),
}


@dataclass
class Finding:
    """The result of a cell.

    Attributes:
        seen: what the caller saw.
        seconds: from the call (or signal) to that.
        others: outcome of the other envs.
        left: what was left after `close`.
    """

    seen: str
    seconds: float
    others: str
    left: str


def drive(cell: Cell, flag: Path) -> Finding:
    """Break an env according to the cell; raise AssertionError if a promise is broken."""
    before = _held()
    at = STATES[cell.state][0]
    breaking = functools.partial(
        FaultyEnv,
        cell.fault,
        at=at,
        episode=1 if cell.state == "reset" else 0,
        flag=str(flag),
    )
    envs: list[Callable[[], Any]] = [
        functools.partial(CountingEnv, 1_000_000)
    ] * NUM_ENVS
    envs[VICTIM] = breaking if at and cell.state != "rebuild" else envs[VICTIM]
    options = ExecutorOptions(
        start_method=cell.start_method,  # type: ignore[arg-type]
        on_worker_loss="raise" if cell.policy == "interrupt" else cell.policy,  # type: ignore[arg-type]
        on_env_error="interrupt" if cell.policy == "interrupt" else "raise",
        step_timeout_s=DEADLINE_S if cell.kind == "hangs" else 30.0,
        reset_timeout_s=DEADLINE_S * 3 if cell.kind == "hangs" else 30.0,
        build_timeout_s=(4.0 if cell.start_method == "zygote" else 12.0)
        if cell.kind == "hangs" and cell.state in ("build", "rebuild")
        else 60.0,
        close_timeout_s=DEADLINE_S if cell.state == "close" else 5.0,
    )
    make = functools.partial(
        ParallelEnv, NUM_ENVS, envs, num_workers=2, seed=0, options=options
    )
    if cell.state == "build":
        seen, seconds = _catch(make)
        _demand(cell, seen)
        others = "no executor"
    else:
        with make() as env:
            seen, seconds, others = _break_and_go_on(cell, env, breaking)
            began = time.monotonic()
            env.close()
            closing = time.monotonic() - began
        if cell.state == "close":
            seen, seconds = (
                "nothing" if cell.kind != "raises" else "a warning in the log",
                closing,
            )
        assert closing < 15, f"close took {closing:.1f} s"
    left = _left(before)
    assert not left, left
    return Finding(_brief(seen), seconds, others, "nothing")


def _break_and_go_on(
    cell: Cell, env: Any, breaking: Callable[[], Any]
) -> tuple[Any, float, str]:
    env.reset()
    for _ in range(1 if cell.state in ("step", "idle", "sent") else 0):
        env.step_and_maybe_reset(actions())
    if cell.state == "close":
        return None, 0.0, "closed too"
    pids = env.call("pid")
    if cell.state == "idle":
        os.kill(pids[VICTIM], FROM_OUTSIDE[cell.fault])
    call = functools.partial(env.rebuild, [VICTIM], factories=breaking)
    seen, seconds = _catch(
        call if cell.state == "rebuild" else functools.partial(CALLS[cell.state], env)
    )
    _check_states(cell, env)
    if cell.is_mended:
        assert seen is None, f"expected rows marked interrupted, got {seen!r}"
        counted, is_lost = env.statistics(), cell.kind != "raises"
        assert (counted.worker_losses, counted.errors_per_env) == (
            is_lost,
            (0, not is_lost, 0),
        )
        assert [worker.generation for worker in counted.workers] == [is_lost, 0]
        if cell.state != "reset":
            # Of those sent, the neighbour may have been faster.
            assert counted.interrupted in (1, 2)
        seen = "rows `interrupted`" if cell.state != "reset" else "nothing: reset again"
        _step_on(env, [0, 1, 2])
        return seen, seconds, "go on, all"
    _demand(cell, seen)
    if cell.kind == "raises":
        assert (env.call("pid"), env.statistics().env_errors) == (
            pids,
            int(cell.state not in ("render", "rebuild")),
        )
    if cell.kind == "raises" or cell.policy == "restart":
        others = _step_on(
            env, [NEIGHBOUR, BYSTANDER] if cell.kind == "raises" else [BYSTANDER]
        )
        env.reset()
        _step_on(env, [0, 1, 2])
        return seen, seconds, f"{others}; all after a reset"
    others = _step_on(env, [BYSTANDER])
    with contextlib.suppress(WorkerLost, WorkerTimeout, ResetNeeded):
        env.reset()
        raise AssertionError("a lost worker was reset")
    return seen, seconds, others


def _step_on(env: Any, env_ids: list[int]) -> str:
    """Step some envs twice, and require that each row follows from the previous one; return how they continued."""
    outcome_text = "go on"
    while env._engine.states.under_way.any():
        env.recv(1)
    ended = [i for i in env_ids if env._engine.states.needs_reset[i]]
    if ended:
        outcome_text = "go on after a reset"
        env.reset(only(env, *ended))
    for _ in range(2):
        counts = {i: int(env.current([i])["observation"][0, 1]) for i in env_ids}
        env.send(actions(len(env_ids)), env_ids)
        td = env.recv()
        _check_rows(td)
        assert not _interrupted(td).any()
        for env_id, row in zip(
            td["env_ids"].tolist(), td["next", "observation"].tolist(), strict=True
        ):
            assert row[1:] == [counts[env_id] + 1, 1], (
                f"env {env_id} went from {counts[env_id]} to {row}"
            )
    return outcome_text


#: State -> the command that the envs have in it, if they have one.
COMMANDS = {
    "idle": Event.STEP_RESET,
    "step": Event.STEP_RESET,
    "reset": Event.RESET,
    "sent": Event.STEP_RESET,
    "rollout": Event.STEP_RESET,
}


def _check_states(cell: Cell, env: Any) -> None:
    """Require the states that the table of `env_states` gives for the command and what then happened to each env."""
    command = COMMANDS.get(cell.state)
    is_given: list[Event] = [] if command is None else [command]
    undisturbed = [*is_given, Event.ANSWERED] if is_given else []
    broken = [*is_given, Event.FAILS if cell.kind == "raises" else Event.IS_LOST]
    if cell.is_mended and is_given:
        broken += [Event.RESET, Event.ANSWERED]  # by the successor
    events = {
        NEIGHBOUR: undisturbed if cell.kind == "raises" else broken,
        VICTIM: broken,
        BYSTANDER: undisturbed,
    }
    if not is_given and (cell.kind == "raises" or cell.policy == "restart"):
        events = dict.fromkeys(events, undisturbed)  # the next command takes up a loss
    if cell.state == "rebuild":
        events[VICTIM] = [Event.IS_CUT, *events[VICTIM]]
    # Some may have answered before the loss, or were not given the command.
    if cell.state in ("sent", "idle"):
        events = {VICTIM: broken}
    for env_id, happened in events.items():
        expected = functools.reduce(
            lambda state, event: FOLLOWS[state][event], happened, State.RUNNING
        )
        now = State(int(env._engine.states.values[env_id]))
        assert now is expected, (
            f"env {env_id}: expected {expected.name}, got {now.name}"
        )


def _interrupted(data: Any) -> Any:
    return data["next"].get("interrupted", torch.zeros_like(data["next", "done"]))


def _check_rows(data: Any) -> None:
    """Require that each row follows from the row before it, or is interrupted and repeats that row."""
    before, after = data["observation"], data["next", "observation"]
    is_cut = _interrupted(data)
    expected = torch.stack(
        [before[..., 0], before[..., 1] + 1, torch.ones_like(before[..., 2])], -1
    )
    assert torch.equal(after, torch.where(is_cut, before, expected))
    assert torch.equal(data["next", "truncated"], is_cut)
    assert torch.equal(data["next", "done"], is_cut)
    assert not data["next", "reward"][is_cut].any()
    assert not is_cut[data.get("env_ids", torch.arange(NUM_ENVS)) == BYSTANDER].any()


def _step(env: Any) -> None:
    data, root = env.step_and_maybe_reset(env.current().update(actions()))
    _check_rows(data)
    assert torch.equal(root["observation"][:, 1:2] == 0, _interrupted(data))


def _send_and_receive(env: Any) -> None:
    env.send(actions())
    while env._engine.states.under_way.any():
        data = env.recv(1)
        _check_rows(data)
        if _interrupted(data).any():
            now = env.current(data["env_ids"])
            # It must be reset, or its successor was.
            assert now["done"].all() or not now["observation"][:, 1].any()


def _roll(env: Any) -> None:
    data = env.rollout(
        4,
        lambda td: td.set("action", torch.ones(NUM_ENVS, dtype=torch.int64)),
        break_when_any_done=False,
    )
    _check_rows(data)
    # Then begins an episode.
    assert torch.equal(data["observation"][:, 1:, 1:2] == 0, _interrupted(data)[:, :-1])


CALLS: dict[str, Callable[[Any], Any]] = {
    "idle": _step,
    "step": _step,
    "reset": lambda env: env.reset(),
    "sent": _send_and_receive,
    "rollout": _roll,
    "render": lambda env: env.render(),
}


def actions(count: int = NUM_ENVS) -> TensorDict:
    """Return a batch of ones."""
    return TensorDict({"action": torch.ones(count, dtype=torch.int64)}, [count])


def _catch(call: Callable[[], Any]) -> tuple[Any, float]:
    began = time.monotonic()
    try:
        call()
    except (EnvError, FactoryError, WorkerLost, WorkerTimeout) as error:
        return error, time.monotonic() - began
    return None, time.monotonic() - began


def _demand(cell: Cell, seen: Any) -> None:
    """Require the expected exception, with env, worker, pid and signal, and the rows of the other envs."""
    expected: Any = {"raises": EnvError, "ends": WorkerLost, "hangs": WorkerTimeout}[
        cell.kind
    ]
    if cell.state in ("build", "rebuild") and cell.kind == "raises":
        expected = FactoryError
    assert isinstance(seen, expected), f"expected {expected.__name__}, got {seen!r}"
    is_alone = cell.kind == "raises"
    assert (
        seen.env_ids == (VICTIM,)
        if is_alone
        else {VICTIM} <= {*seen.env_ids} <= {NEIGHBOUR, VICTIM}
    )
    assert (seen.context["pid"] > 0, seen.context["worker_id"]) == (True, 0)
    if cell.state in ("build", "step", "reset", "rebuild"):
        assert seen.context["phase"] == cell.state
    if cell.state == "step":
        assert seen.partial["observation"][:, 1].tolist() == [
            2 if is_alone else 1,
            1,
            2,
        ]
    if cell.kind == "ends":
        assert _ENDS[cell.fault] + (
            " while idle" if cell.state == "idle" else ""
        ) in str(seen)
    if cell.kind == "hangs":
        assert "gave no answer within" in str(seen)
        stack = "did not answer" if cell.fault == "stop" else "breaking_envs.py"
        assert stack in str(seen)
    if cell.fault in EXCEPTIONS or (cell.fault, cell.state) == ("segfault", "step"):
        assert "breaking_envs.py" in f"{seen} {seen.__cause__}"


def _brief(seen: Any) -> str:
    if isinstance(seen, WorkerLost):
        return "`WorkerLost` " + next(
            (end for end in _ENDS.values() if end in str(seen)), ""
        )
    return f"`{type(seen).__name__}`" if isinstance(seen, Exception) else str(seen)


def _held() -> tuple[set[str], set[str], set[str]]:
    """Return this process's descendants, descriptors and its names in /dev/shm."""
    return (
        {str(pid) for pid in descendants()},
        set(os.listdir("/proc/self/fd")),
        shm_names(),
    )


def _left(before: tuple[set[str], set[str], set[str]]) -> list[str]:
    """Return resources that were gained since `before`, after a short time for ending ones; end a kept helper."""
    end_idle()
    end = time.monotonic() + 8
    while True:
        now = _held()
        found = [
            f"{kind} {name}"
            for kind, a, b in zip(("process", "fd", "shm"), before, now)  # noqa: B905
            for name in b - a
        ]
        if not found or time.monotonic() > end:
            return [
                f"{one}: {command(one.split()[1])[:200]}"
                if one.startswith("process")
                else one
                for one in found
            ]
        time.sleep(0.02)
