"""Each executor reports which calls C makes, and why not the others; the report is true."""

import functools
import json
import os
from typing import Any

import numpy as np
import pytest
import tensordict

from envherd.executor import ExecutorOptions, ParallelEnv, SerialEnv
from envherd.executor.guests.monitor import plates
from envherd.executor.pools import worker_pool
from envherd.executor.protocol import plain
from envherd.shm import segment
from envherd.shm.specs import EnvSpec, LeafSpec
from envherd.workers import native
from envherd.workers.block.block import Block
from envherd.workers.testing import CountingEnv
from tests.envs import torch_simulators
from tests.envs.counting_envs import AgentsEnv, PairEnv, TextEnv
from tests.executor.protocol.test_fast_calls import Driving, Nested, needs_c
from tests.extras import needs

pytestmark = pytest.mark.preloads()

CALLS = "steps in C; calls of the envs in Python, because "
SEND = "steps in C; send in Python, because "
ROWS = "each env is a batch of rows"
PIXELS = functools.partial(CountingEnv, size=4)


class Telling(CountingEnv):
    """Observes a number of type float that is no array."""

    def __init__(self) -> None:
        super().__init__()
        number = LeafSpec(("number",), (), "float32")
        self.spec = EnvSpec(
            observation=(*self.spec.observation, number),
            action=self.spec.action,
            family="plain",
        )

    def _observe(self, action: int) -> list[Any]:
        return [*super()._observe(action), 0.5]


class Watched(CountingEnv):
    """Takes no action."""

    def __init__(self) -> None:
        super().__init__()
        self.spec = EnvSpec(
            observation=self.spec.observation, action=(), family="plain"
        )

    def step(self, action: list[Any]) -> Any:
        return super().step([0, *action])


class Lively(Driving):
    """Has infos."""

    def reset(self, **kwargs: Any) -> Any:
        return super().reset(**kwargs)[0], {"lives": 3}

    def step(self, action: np.ndarray) -> Any:
        return *super().step(action)[:4], {"lives": 3}


def made(kind: Any, make_env: Any, device: str | None = None, **options: Any) -> Any:
    return kind(
        2,
        make_env,
        num_workers=1,
        seed=0,
        device=device,
        options=ExecutorOptions(**options),
    )


def assert_true(env: Any, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """Compare the report with the calls of the general code that steps, sends and receives cause."""
    calls: list[str] = []

    def watch(owner: Any, name: str) -> None:
        method = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return method(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    watch(env._engine, "step_all")
    for name in ("send", "wait_for"):
        watch(env._engine.flights, name)
    root = env.reset()
    for _ in range(3):
        _, root = env.step_and_maybe_reset(env.rand_action(root))
    assert calls.count("step_all") == (0 if path.startswith("steps in C") else 3)
    is_plain = path.startswith("steps in C") and "send and recv in Python" not in path
    seen: set[bool] = set()
    for with_root in (True, False) * 9:
        calls.clear()
        env.send(env.rand_action())
        assert calls.count("send") == (not is_plain or "send in Python" in path)
        env.recv(with_root=with_root)
        if is_plain != ("wait_for" in calls):
            assert is_plain == (env._exchange.fast is not None)
            seen.add(with_root)
            continue
        assert is_plain  # a check of the workers was due, which the general code makes
    assert seen == {True, False}


@needs_c
@pytest.mark.parametrize(
    ("make_env", "options", "path"),
    [
        (CountingEnv, {}, "steps in C"),
        (Driving, {"check_actions": "finite"}, "steps in C"),
        (CountingEnv, {"device": "cpu"}, "steps in C"),
        (CountingEnv, {"infos": "plain"}, "steps in C"),
        (CountingEnv, {"infos": "pickle"}, "steps in C"),
        (CountingEnv, {"recycle_after": 3}, "steps in Python, because recycle_after=3"),
        (
            CountingEnv,
            {"max_worker_memory": 2**40},
            f"steps in Python, because max_worker_memory={2**40}",
        ),
        (
            CountingEnv,
            {"on_worker_loss": "restart"},
            "steps in C; send and recv in Python, because on_worker_loss='restart'",
        ),
        (CountingEnv, {"device": "meta"}, "steps in Python, because device='meta'"),
        (
            CountingEnv,
            {"on_worker_loss": "restart", "recycle_after": 3},
            "steps in Python, because recycle_after=3",
        ),
        (
            [CountingEnv, PIXELS],
            {},
            "steps in Python, because the envs have 2 different specs",
        ),
        (
            TextEnv,
            {},
            "steps in Python, because values without a fixed shape: [('text',)]",
        ),
        (CountingEnv, {"check_finite": True}, CALLS + "check_finite=True"),
        (CountingEnv, {"isolate_rng": True}, CALLS + "isolate_rng=True"),
        (CountingEnv, {"env_threads": True}, CALLS + "env_threads=True"),
        (
            CountingEnv,
            {"env_vars": {"ENVHERD_NATIVE": "0"}, "start_method": "spawn"},
            CALLS + "ENVHERD_NATIVE=0",
        ),
        (AgentsEnv, {}, CALLS + "agents have done flags"),
        (
            Telling,
            {},
            CALLS + "neither an int64 nor an array with values: [('number',)]",
        ),
        (
            Nested,
            {},
            f"{SEND}the inputs are not one array: [('action', 'x'), ('action', 'y')]",
        ),
        (
            Lively,
            {"infos": {"lives": 3}, "check_actions": "off"},
            f"{CALLS}neither an int64 nor an array with values: [('info', '_lives')] and infos={{'lives': 3}}",
        ),
        (Driving, {"check_actions": "strict"}, SEND + "check_actions='strict'"),
        (PairEnv, {}, f"{CALLS}{ROWS}; send and recv in Python, because {ROWS}"),
        (
            Watched,
            {},
            f"{CALLS}the envs take no action; send in Python, because the inputs are not one array: []",
        ),
        (
            torch_simulators.Counter,
            {"check_actions": "off"},
            f"{CALLS}the envs take tensors and {ROWS}; send and recv in Python, because {ROWS}",
        ),
    ],
    ids=str,
)
def test_an_executor_reports_what_c_does(make_env, options, path, monkeypatch):
    with made(ParallelEnv, make_env, **options) as env:
        assert env.statistics().path == path
        assert (
            f"num_workers={env.num_workers}, {path.partition(';')[0].replace(', because', ':')})"
            in repr(env)
        )
        (plate,) = (one for one in plates() if one.pid == os.getpid())
        assert plate.content["path"].strip() == path
        if options.get("device") != "meta":  # which has no values
            assert_true(env, monkeypatch, path)
    assert repr(env).endswith(", closed)")


IN_PROCESS = "send and recv in Python, because the envs run in this process"


@needs_c
@pytest.mark.parametrize(
    ("make_env", "options", "path"),
    [
        (CountingEnv, {}, f"steps in C; {IN_PROCESS}"),
        # There are no workers to replace.
        (CountingEnv, {"recycle_after": 3}, f"steps in C; {IN_PROCESS}"),
        (CountingEnv, {"infos": "plain"}, f"steps in C; {IN_PROCESS}"),
        (
            CountingEnv,
            {"check_finite": True},
            f"{CALLS}check_finite=True; {IN_PROCESS}",
        ),
        (
            CountingEnv,
            {"isolate_rng": True},
            f"{CALLS}isolate_rng=True; {IN_PROCESS}",
        ),
    ],
    ids=str,
)
def test_the_loop_in_c_calls_the_envs_where_the_report_has_it(
    make_env, options, path, monkeypatch
):
    with monkeypatch.context() as patch:
        calls: list[int] = []
        execute = Block.execute
        patch.setattr(
            Block, "execute", lambda *args: [calls.append(args[1]), execute(*args)][1]
        )
        with made(SerialEnv, functools.partial(make_env, 50), **options) as env:
            assert env.statistics().path == path
            root = env.reset()
            for _ in range(3):
                before = len(calls)
                _, root = env.step_and_maybe_reset(env.rand_action(root))
            assert len(calls) - before == (
                2 if "calls of the envs in Python" in path else 0
            )
            assert_true(env, patch, path)


def test_a_torch_simulator_in_this_process_is_not_stepped_in_c():
    with SerialEnv(1, torch_simulators.Counter, seed=0) as env:
        assert (
            env.statistics().path
            == "steps in Python, because a torch simulator runs in this process"
        )
        assert "steps in Python: a torch simulator runs in this process" in repr(env)


@pytest.mark.parametrize(
    ("switch", "module", "why"),
    [
        ("0", native.MODULE, "ENVHERD_NATIVE=0"),
        ("1", "_no_such_module", "the C extension is not built"),
        (
            "1",
            "math",
            "the C extension was built from other sources; run: python setup.py build_ext --inplace",
        ),
    ],
)
@pytest.mark.parametrize("kind", [ParallelEnv, SerialEnv])
def test_without_the_extension_the_report_names_the_cause(
    kind, switch, module, why, monkeypatch
):
    with monkeypatch.context() as patch:
        patch.setenv(native.SWITCH, switch)
        patch.setattr(native, "MODULE", module)
        native.find.cache_clear()
        try:
            with made(kind, CountingEnv) as env:
                # Workers may have another.
                assert env.statistics().path.startswith(
                    f"steps in Python, because {why}"
                )
                assert_true(env, patch, env.statistics().path)
        finally:
            patch.undo()
            native.find.cache_clear()


@needs_c
def test_an_unknown_tensordict_is_named(monkeypatch):
    monkeypatch.setattr(plain, "IS_AS_EXPECTED", False)
    path = f"steps in Python, because tensordict {tensordict.__version__} is not known"
    with made(ParallelEnv, CountingEnv) as env:
        assert env.statistics().path == path
        assert_true(env, monkeypatch, path)


@needs_c
@pytest.mark.parametrize(
    ("options", "num_begun"),
    [({}, 0), ({"infos": "plain"}, 0), ({"recycle_after": 9}, 3)],
)
def test_rollouts_are_made_as_steps_are(options, num_begun, monkeypatch):
    begun: list[Any] = []
    with made(ParallelEnv, functools.partial(CountingEnv, 50), **options) as env:
        env.reset()
        flights, begin = env._engine.flights, env._engine.flights.begin
        monkeypatch.setattr(
            flights,
            "begin",
            lambda *args, **kwargs: [begun.append(args), begin(*args, **kwargs)][1],
        )
        env.rollout(3, auto_reset=False)
    assert len(begun) == num_begun


def test_a_long_text_is_cut_on_the_nameplate():
    with made(ParallelEnv, CountingEnv) as env:
        for text, shown in (('"\\é' * 999, ('"\\?' * 86)[:256]), ("x", "x"), ("", "")):
            env._pool.show_path(text)
            (plate,) = (one for one in plates() if one.pid == os.getpid())
            assert plate.content["path"].strip() == shown
            (found,) = (
                one
                for one in segment.find_plates(worker_pool.PLATE_LABEL)
                if one.pid == os.getpid()
            )
            assert found.content["env"] == "plain"


@needs("cli")
@pytest.mark.slow
def test_top_shows_it():
    from typer.testing import CliRunner

    from envherd.executor.cli.app import app

    runner, own = (
        CliRunner(),
        ["top", "--once", "--interval", "0.1", "--pid", str(os.getpid())],
    )
    with made(ParallelEnv, CountingEnv, recycle_after=9) as env:
        path = env.statistics().path
        assert path in runner.invoke(app, own, env={"COLUMNS": "200"}).output
        (shown,) = json.loads(runner.invoke(app, [*own, "--json"]).stdout)["executors"]
        assert shown["path"] == path
