"""The report of a rollout: its returns, figures and table, and its JSON, which docs/cli.md documents."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

from tests.extras import skip_without

skip_without("cli")

import numpy as np
import pytest
from rich.console import Console

from envherd.executor.cli.figures import SCHEMA, Figures, table
from envherd.executor.cli.returns import ReturnMeter, ReturnSummary
from envherd.executor.monitor.statistics import Statistics, WorkerStatistics
from envherd.shm.specs import EnvSpec, LeafSpec
from envherd.workers.testing import AgentsEnv, CountingEnv, PairEnv

DOCS = Path(__file__).parents[2] / "docs" / "cli.md"
MIB = 1024**2

WORKERS = (
    WorkerStatistics(0, 111, (0, 1), 0, 1.0, 0.25, 10 * MIB, 14 * MIB, 1.0),
    WorkerStatistics(1, 222, (2,), 0, 3.0, 0.75, 20 * MIB, 26 * MIB, 3.0),
)
FIGURES = Figures(
    env="python:herd:make",
    num_envs=3,
    num_workers=2,
    seed=7,
    steps=500,
    steps_done=400,
    collect_s=2.0,
    keep_s=0.01,
    is_interrupted=True,
    returns=ReturnSummary(5, {"player_0": 1.5, "player_1": -2.25}, is_partial=False),
    statistics=Statistics(
        env_steps=1203,
        agent_steps=2406,
        resets=8,
        episodes=5,
        env_errors=0,
        worker_losses=0,
        interrupted=0,
        steps_per_env=(401, 401, 401),
        resets_per_env=(3, 3, 2),
        wall_s=4.0,
        workers=WORKERS,
    ),
    parent_uss_bytes=100 * MIB,
    parent_pss_bytes=110 * MIB,
    files={"gif": "herd.gif"},
)


def printed(figures: Figures) -> str:
    """Return the table as plain text."""
    console = Console(width=120, color_system=None)
    with console.capture() as capture:
        console.print(table(figures))
    return capture.get()


def test_rates_count_complete_steps_only():
    assert FIGURES.env_steps == 1200
    assert FIGURES.env_steps_per_s == 600.0
    assert FIGURES.agent_steps_per_s == 1200.0


def test_rates_of_nothing_are_zero():
    nothing = replace(FIGURES, steps_done=0, collect_s=0.0, statistics=replace(FIGURES.statistics, env_steps=0))
    assert (nothing.env_steps_per_s, nothing.agent_steps_per_s) == (0.0, 0.0)


def test_table_says_everything():
    text = printed(FIGURES)
    for expected in (
        "python:herd:make",
        "600",
        "1,200",
        "400 of 500 (interrupted) x 3 envs in 2.00 s",
        "5 ended",
        "mean return",
        "player_0 1.50",
        "player_1 -2.25",
        "herd.gif",
        "130 MiB",
        "150 MiB",
        "50%",
    ):
        assert expected in text, expected
    assert "env errors" not in text
    assert "draw and store" not in text


def test_table_tells_of_trouble():
    trouble = replace(FIGURES.statistics, env_errors=2, worker_losses=1)
    failed = replace(FIGURES, is_interrupted=False, statistics=trouble, keep_s=1.5)
    text = printed(failed)
    assert re.search(r"env errors\s+│ 2", text)
    assert re.search(r"workers lost\s+│ 1", text)
    assert "400 of 500 (failed) x 3 envs in 2.00 s, and 1.50 s to draw and store" in text


def test_table_says_when_no_episode_has_ended():
    text = printed(replace(FIGURES, returns=ReturnSummary(0, {"agent": 3.0}, is_partial=True)))
    assert "return so far" in text
    assert "mean return" not in text


def test_many_agents_are_cut_in_the_table_and_all_there_in_the_json():
    many = replace(FIGURES, returns=ReturnSummary(1, {f"player_{i}": float(i) for i in range(20)}, is_partial=False))
    text = printed(many)
    assert "player_15 15.00" in text
    assert "player_16" not in text
    assert "and 4 more" in text
    assert len(many.to_plain()["mean_return"]) == 20


def test_json_has_exactly_the_documented_keys():
    plain = json.loads(json.dumps(FIGURES.to_plain()))
    documented = set(re.findall(r"^\| `([a-z_.\[\]]+)` \|", DOCS.read_text(), re.MULTILINE))
    keys = set(plain) - {"workers", "memory", "files"}
    keys |= {f"workers[].{key}" for key in plain["workers"][0]}
    keys |= {f"memory.{key}" for key in plain["memory"]}
    keys |= {f"files.{key}" for key in ("out", "gif", "png")}
    assert documented == keys
    assert plain["schema"] == SCHEMA


def test_json_values_are_the_figures():
    plain = FIGURES.to_plain()
    assert (plain["env_steps"], plain["env_steps_per_s"], plain["episodes"]) == (1200, 600.0, 5)
    assert plain["workers"][1] == {
        "worker_id": 1,
        "pid": 222,
        "env_ids": [2],
        "busy_share": 0.75,
        "uss_bytes": 20 * MIB,
        "pss_bytes": 26 * MIB,
    }
    assert plain["memory"]["workers_uss_bytes"] == 30 * MIB
    assert plain["mean_return"] == {"player_0": 1.5, "player_1": -2.25}
    assert (plain["interrupted"], plain["error"]) == (True, None)


def test_returns_are_means_over_the_episodes_that_ended():
    meter = ReturnMeter(("agent",), num_rows=2)
    for rewards, done in [((1, 10), (0, 0)), ((2, 20), (1, 0)), ((4, 40), (0, 0)), ((8, 80), (1, 1))]:
        meter.add([np.array(rewards, np.float32)[:, None]], np.array(done, bool)[:, None])
    summary = meter.summary()
    assert summary == ReturnSummary(3, {"agent": ((1 + 2) + (4 + 8) + (10 + 20 + 40 + 80)) / 3}, is_partial=False)


def test_episodes_that_were_broken_off_do_not_count():
    meter = ReturnMeter(("agent",), num_rows=2)
    ended = np.array([[True], [True]])
    meter.add([np.array([[5.0], [7.0]])], ended, np.array([False, True]))
    meter.add([np.array([[1.0], [1.0]])], ended)
    assert meter.num_episodes == 3
    assert meter.summary().per_agent == {"agent": pytest.approx((5 + 1 + 1) / 3)}


def test_without_an_end_returns_are_those_so_far():
    meter = ReturnMeter(("a", "b"), num_rows=2)
    meter.add([np.array([[[1.0], [2.0]], [[3.0], [6.0]]])], np.zeros((2, 1), bool))
    assert meter.summary() == ReturnSummary(0, {"a": 2.0, "b": 4.0}, is_partial=True)


def test_returns_do_not_keep_the_arrays_they_were_given():
    meter = ReturnMeter(("agent",), num_rows=1)
    reward = np.ones((1, 1))
    meter.add([reward], np.zeros((1, 1), bool))
    reward[:] = 100.0
    meter.add([reward], np.ones((1, 1), bool))
    assert meter.summary().per_agent == {"agent": 101.0}


def _spec(env: object) -> EnvSpec:
    spec = env.spec  # type: ignore[attr-defined]  # every PlainEnv has a spec
    assert isinstance(spec, EnvSpec)
    return spec


@pytest.mark.parametrize(
    ("spec", "agents", "rows"),
    [
        (_spec(CountingEnv()), ("agent",), 4),
        (_spec(AgentsEnv()), ("agents_0", "agents_1", "agents_2"), 4),
        (_spec(PairEnv()), ("agent",), 8),
        (EnvSpec((), (), reward=(LeafSpec(("reward",), (2,)),)), ("agent_0", "agent_1"), 4),
        (
            EnvSpec((), (), reward=(LeafSpec(("cats", "reward"), (2, 1)), LeafSpec(("dogs", "reward"), (1, 1)))),
            ("cats_0", "cats_1", "dogs"),
            4,
        ),
        (
            EnvSpec((), (), reward=(LeafSpec(("g", "reward"), (2, 1)),), metadata={"agent_names": ["ann", "bob"]}),
            ("ann", "bob"),
            4,
        ),
    ],
)
def test_agents_are_named_by_the_spec(spec, agents, rows):
    meter = ReturnMeter.for_spec(spec, num_envs=4)
    assert meter.agents == agents
    assert meter.num_rows == rows
