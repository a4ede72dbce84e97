"""The report of a rollout: its returns, figures and table, and its JSON, which docs/reference/json.md documents."""

import json
import re
from dataclasses import replace
from pathlib import Path

from tests.extras import skip_without

skip_without("cli")

import numpy as np
import pytest
import torch
from rich.console import Console
from tensordict import TensorDict

from envherd.executor.cli.media import Returns
from envherd.executor.cli.rollout import SCHEMA, figures, table
from envherd.executor.guests.monitor import Statistics, WorkerStatistics
from envherd.shm.specs import EnvSpec, LeafSpec
from envherd.workers.testing import CountingEnv
from tests.envs.counting_envs import AgentsEnv, PairEnv

DOCS = Path(__file__).parents[3] / "docs" / "reference" / "json.md"
MIB = 1024**2

WORKERS = (
    WorkerStatistics(0, 111, (0, 1), 0, 1.0, 0.25, 10 * MIB, 14 * MIB, 1.0),
    WorkerStatistics(1, 222, (2,), 0, 3.0, 0.75, 20 * MIB, 26 * MIB, 3.0),
)
STATISTICS = Statistics(
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
)
REQUESTED = {
    "env": "python:herd:make",
    "num_envs": 3,
    "num_workers": 2,
    "seed": 7,
    "steps": 500,
}


def team(num_agents: int) -> Returns:
    """Return the returns of one episode of an env with some agents, whose reward is their number."""
    spec = EnvSpec((), (), reward=(LeafSpec(("agents", "reward"), (num_agents, 1)),))
    spec = replace(
        spec, metadata={"agent_names": [f"player_{i}" for i in range(num_agents)]}
    )
    returns = Returns(spec, 1)
    returns.add(
        following(
            np.arange(num_agents, dtype=float).reshape(1, -1, 1),
            key=("agents", "reward"),
            done=[True],
        )
    )
    return returns


def following(reward, *, done, interrupted=None, key=("reward",)) -> TensorDict:
    """Return the `next` of a step."""
    td = TensorDict({"done": torch.tensor(done)[..., None]}, [len(reward)])
    if interrupted is not None:
        td["interrupted"] = torch.tensor(interrupted)[..., None]
    return td.set(key, torch.from_numpy(np.asarray(reward)))


def found(statistics: Statistics = STATISTICS, num_agents: int = 2, **changes) -> dict:
    """Return figures."""
    returns = changes.pop("returns", None) or team(num_agents)
    counted = {
        "steps_done": 400,
        "collect_s": 2.0,
        "keep_s": 0.01,
        "interrupted": True,
        "error": None,
        **changes,
    }
    plain = figures(
        REQUESTED, counted, returns, statistics, {"uss": 100 * MIB, "pss": 110 * MIB}
    )
    return {**plain, "files": {"gif": "herd.gif"}}


def printed(plain: dict) -> str:
    """Return the table as plain text."""
    console = Console(width=120, color_system=None)
    with console.capture() as capture:
        console.print(table(plain))
    return capture.get()


@pytest.mark.parametrize(
    ("plain", "expected"),
    [
        (found(), (1200, 600.0, 1200.0)),
        (
            found(replace(STATISTICS, env_steps=0), steps_done=0, collect_s=0.0),
            (0, 0.0, 0.0),
        ),
    ],
    ids=["some", "nothing"],
)
def test_rates_count_complete_steps_only(plain, expected):
    assert (
        plain["env_steps"],
        plain["env_steps_per_s"],
        plain["agent_steps_per_s"],
    ) == expected


def test_table_says_everything():
    text = printed(found())
    for expected in (
        "python:herd:make",
        "600",
        "1,200",
        "400 of 500 (interrupted) x 3 envs in 2.00 s",
        "1 ended",
        "mean return",
        "player_0 0.00",
        "player_1 1.00",
        "herd.gif",
        "130.0 MiB",
        "150.0 MiB",
        "50%",
    ):
        assert expected in text, expected
    assert "env errors" not in text
    assert "draw and store" not in text


def test_table_tells_of_trouble():
    text = printed(
        found(
            replace(STATISTICS, env_errors=2, worker_losses=1),
            interrupted=False,
            error="lost",
            keep_s=1.5,
        )
    )
    assert re.search(r"env errors\s+│ 2", text)
    assert re.search(r"workers lost\s+│ 1", text)
    assert (
        "400 of 500 (failed) x 3 envs in 2.00 s, and 1.50 s to draw and store" in text
    )


def test_table_says_when_no_episode_has_ended():
    text = printed(found(returns=Returns(_spec(CountingEnv()), 3)))
    assert "return so far" in text
    assert "mean return" not in text


def test_table_cuts_many_agents_and_json_has_all():
    many = found(num_agents=20)
    text = printed(many)
    assert "player_15 15.00" in text
    assert "player_16" not in text
    assert "and 4 more" in text
    assert len(many["mean_return"]) == 20


def test_json_has_exactly_the_documented_keys():
    plain = json.loads(json.dumps(found()))
    page = DOCS.read_text().partition("## `envherd size")[0]
    documented = set(re.findall(r"^\| `([a-z0-9_.\[\]]+)` \|", page, re.MULTILINE))
    keys = set(plain) - {"workers", "memory", "files"}
    keys |= {f"workers[].{key}" for key in plain["workers"][0]}
    keys |= {f"memory.{key}" for key in plain["memory"]}
    keys |= {f"files.{key}" for key in ("out", "gif", "png", "mp4")}
    assert documented == keys
    assert plain["schema"] == SCHEMA


def test_json_values_are_the_figures():
    plain = found()
    assert plain["workers"][1] == {
        "worker_id": 1,
        "pid": 222,
        "env_ids": (2,),
        "busy_share": 0.75,
        "uss_bytes": 20 * MIB,
        "pss_bytes": 26 * MIB,
    }
    assert plain["memory"]["workers_uss_bytes"] == 30 * MIB
    assert plain["mean_return"] == {"player_0": 0.0, "player_1": 1.0}
    assert (plain["interrupted"], plain["error"]) == (True, None)


def test_returns_are_means_over_the_episodes_that_ended():
    returns = Returns(_spec(CountingEnv()), 2)
    for rewards, done in [
        ((1, 10), (0, 0)),
        ((2, 20), (1, 0)),
        ((4, 40), (0, 0)),
        ((8, 80), (1, 1)),
    ]:
        returns.add(
            following(
                np.array(rewards, np.float32)[:, None], done=[bool(one) for one in done]
            )
        )
    assert returns.num_episodes == 3
    assert returns.means() == {"agent": ((1 + 2) + (4 + 8) + (10 + 20 + 40 + 80)) / 3}


def test_episodes_that_were_broken_off_do_not_count():
    returns = Returns(_spec(CountingEnv()), 2)
    returns.add(following([[5.0], [7.0]], done=[True, True], interrupted=[False, True]))
    returns.add(following([[1.0], [1.0]], done=[True, True]))
    assert returns.num_episodes == 3
    assert returns.means() == {"agent": pytest.approx((5 + 1 + 1) / 3)}


def test_without_an_end_returns_are_those_so_far():
    returns = Returns(EnvSpec((), (), reward=(LeafSpec(("reward",), (2,)),)), 2)
    assert returns.add(
        following([[1.0, 2.0], [3.0, 6.0]], done=[False, False])
    ).tolist() == [[1, 2], [3, 6]]
    assert returns.means() == {"agent_0": 2.0, "agent_1": 4.0}


def _spec(env: object) -> EnvSpec:
    spec = env.spec  # type: ignore[attr-defined]  # every PlainEnv has a spec
    assert isinstance(spec, EnvSpec)
    return spec


@pytest.mark.parametrize(
    ("spec", "agents", "rows"),
    [
        (_spec(CountingEnv()), ("agent",), 4),
        (_spec(AgentsEnv()), ("agent_0", "agent_1", "agent_2"), 4),
        (_spec(PairEnv()), ("agent",), 8),
        (
            EnvSpec((), (), reward=(LeafSpec(("reward",), (2,)),)),
            ("agent_0", "agent_1"),
            4,
        ),
        (
            EnvSpec(
                (),
                (),
                reward=(
                    LeafSpec(("cats", "reward"), (2, 1)),
                    LeafSpec(("dogs", "reward"), (1, 1)),
                ),
            ),
            ("cats_0", "cats_1", "dogs"),
            4,
        ),
        (
            EnvSpec(
                (),
                (),
                reward=(LeafSpec(("g", "reward"), (2, 1)),),
                metadata={"agent_names": ["ann", "bob"]},
            ),
            ("ann", "bob"),
            4,
        ),
        (
            EnvSpec(
                (),
                (),
                reward=(
                    LeafSpec(("cats", "reward"), (2, 1)),
                    LeafSpec(("dogs", "reward"), (1, 1)),
                ),
                groups=((("cats",), (2,)), (("dogs",), (1,))),
                metadata={"agent_names": ["ann", "bob"], "group_map": {"cats": [1, 2]}},
            ),
            ("1", "2", "dogs_0"),
            4,
        ),
    ],
)
def test_agents_are_named_by_the_spec(spec, agents, rows):
    returns = Returns(spec, 4)
    assert returns.agents == list(agents)
    assert len(returns.running) == rows
