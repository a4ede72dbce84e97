"""`evaluate`: whole episodes of each env's share, focal and background players, measures and their intervals."""

import functools
import json
import math
import re

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from envherd import (
    ExecutorOptions,
    MeltingPotFactory,
    ParallelEnv,
    PerPlayer,
    SerialEnv,
    evaluate,
)
from envherd.executor.cli.app import app
from envherd.executor.show.results import (
    EpisodeRecord,
    Evaluation,
    equality_of,
    interval_of,
)
from tests.envs.team_env import Team
from tests.executor.show.test_per_player import Always, Counting
from tests.extras import needs


@pytest.mark.parametrize(
    ("returns", "equality"),
    [
        ([1, 1, 1, 1], 1.0),
        ([4, 0, 0, 0], 0.25),
        ([1, 3], 0.75),
        ([0, 0], math.nan),
        ([-1, 5], math.nan),
    ],
)
def test_equality_is_one_minus_the_gini_coefficient(returns, equality):
    equal = [1.0] * len(returns)
    found = equality_of(np.array([returns, equal], float))
    assert found.tolist() == pytest.approx([equality, 1.0], nan_ok=True)


def test_intervals_hold_the_mean_and_grow_narrow_with_episodes():
    values = np.random.default_rng(1).normal(10, 2, 400)
    few, many = interval_of(values[:10]), interval_of(values)
    assert few.low < few.mean < few.high
    assert many.high - many.low == pytest.approx(2 * 1.96 * values.std() / 20, rel=0.1)
    assert many.high - many.low < few.high - few.low
    assert interval_of(np.array([3.0, math.nan])) == pytest.approx(
        (3.0, math.nan, math.nan, 1), nan_ok=True
    )


def test_players_get_what_their_policies_earn():
    found = evaluate(
        {"gatherer": Always(2), "hunter": Always(3)}, Team, 5, num_workers=1
    )
    assert found.returns.tolist() == [[4.5, 6.0, 6.0]] * 5
    assert found.lengths.tolist() == [3] * 5
    assert found.focal_per_capita.mean == pytest.approx(5.5)
    assert found.mean_return == found.focal_per_capita
    measures = "mean_return=5.50 [5.50, 5.50], length=3.00 [3.00, 3.00]"
    assert repr(found) == f"Evaluation('plain', 5 episodes, 0 failed, {measures})"
    assert found.collective == pytest.approx((16.5, 16.5, 16.5, 5))
    assert found.background_per_capita is None
    assert {key: one.mean for key, one in found.by_role.items()} == {
        ("hunter", True): 4.5,
        ("gatherer", True): 6.0,
    }
    assert found.equality.mean == pytest.approx(1 - (4 * 1.5) / (6 * 16.5))


def test_background_players_do_not_count_as_focal():
    found = evaluate(
        Always(1), Team, 2, background=Always(0), focal=["agent_0", 2], num_workers=1
    )
    assert found.is_focal == (True, False, True)
    assert found.focal_per_capita.mean == pytest.approx((1.5 + 3) / 2)
    assert found.background_per_capita.mean == 0
    assert found.by_role["gatherer", False].mean == 0
    assert found.by_role["gatherer", True].mean == 3
    assert found.mean_return.mean == pytest.approx((1.5 + 0 + 3) / 3)
    mixed = evaluate(
        {"*": Always(1)},
        Team,
        1,
        background={1: Always(2), "hunter": None},
        focal=(2,),
        num_workers=1,
    )
    assert mixed.returns[0, 1:].tolist() == [6, 3]


@needs("pettingzoo")
def test_one_policy_acts_for_several_groups_of_agents():
    from mpe2 import simple_tag_v3

    chased = ("adversary_0", "adversary_1", "adversary_2", "agent_0")
    found = evaluate(
        None, simple_tag_v3.parallel_env, episodes=2, max_steps=3, num_workers=1
    )
    assert (found.players, found.returns.shape, found.num_failed) == (chased, (2, 4), 0)

    def policy(td):
        assert td["adversary", "mask"].shape == (1, 3)
        return td.set(("adversary", "action"), torch.ones(1, 3).long()).set(
            ("agent", "action"), td["agent", "mask"].long()
        )

    with pytest.raises(TypeError, match=r"envs of several groups of agents, got dict"):
        evaluate({"adversary_0": None}, simple_tag_v3.parallel_env, episodes=1)
    found = evaluate(
        policy, simple_tag_v3.parallel_env, episodes=1, max_steps=3, num_workers=1
    )
    assert found.lengths.tolist() == [3]


@needs("pettingzoo")
@pytest.mark.parametrize(
    "policy",
    [
        None,
        lambda td: td.set("action", torch.full((len(td), 5), 0.5)),
        {
            "agent_0": None,
            "*": lambda td: td.set("action", torch.full((len(td), 5), 0.5)),
        },
    ],
)
def test_a_policy_acts_for_agents_with_continuous_actions(policy):
    from mpe2 import simple_spread_v3

    make_env = functools.partial(simple_spread_v3.parallel_env, continuous_actions=True)
    found = evaluate(
        policy,
        make_env,
        episodes=1,
        max_steps=3,
        num_workers=1,
    )
    assert found.returns.shape == (1, 3)


def test_an_open_executor_is_used_and_stays_open():
    options = ExecutorOptions(episode_statistics=True)
    with ParallelEnv(2, Team, num_workers=1, seed=3, options=options) as env:
        policy = PerPlayer({"hunter": Always(1), "*": Counting()}, env.spec)
        found = evaluate(policy, env, 4, primer={"count": torch.zeros(2)})
        assert found.returns.tolist() == [[1.5, 3.0, 3.0]] * 4
        assert found.seed == 3
        env.reset()
        with pytest.raises(
            ValueError, match="expected no num_workers or options with an executor"
        ):
            evaluate(None, env, 1, num_workers=2, options=options)
    with SerialEnv(2, Team, seed=3) as env:
        assert (
            evaluate(
                policy, env, 3, primer={"count": torch.zeros(2)}, max_steps=2
            ).lengths.tolist()
            == [2] * 3
        )


def test_an_episode_that_may_never_end_is_named(monkeypatch, caplog):
    monkeypatch.setattr("envherd.executor.show.playing._LONG_S", 0.0)
    evaluate(None, functools.partial(Team, 9), 2, num_workers=1)
    evaluate(None, functools.partial(Team, 9), 1, num_workers=1, max_steps=7)
    (message,) = caplog.messages
    assert re.match(
        r"evaluate: episode 0 of 'env' has not ended in 0 s and 1 steps\. .* max_steps=",
        message,
    )


def test_it_leaves_torchs_generator_alone():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    evaluate(None, Team, 1, num_workers=1)
    assert torch.rand(1) == expected


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"background": Always(0)}, "got some, and all agents are focal. Pass focal="),
        ({"focal": [0]}, "got none. Pass background="),
        (
            {"focal": [7]},
            "expected focal agents among ['agent_0', 'agent_1', 'agent_2'], got [7]",
        ),
        ({"episodes": 0}, "episodes"),
        (
            {"max_steps": 2.5},
            "evaluate failed: expected max_steps as an int of at least 1 or None, got float 2.5",
        ),
        (
            {"seed": -1},
            "evaluate failed: expected seed as an int of at least 0, got -1",
        ),
        (
            {"policies": 3},
            "PerPlayer failed: expected a callable or None for a policy, got 3",
        ),
        ({"options": {"poison": True}}, "options failed: expected an ExecutorOptions"),
        (
            {"primer": 3},
            "evaluate failed: expected primer as a dict of tensors by key or None, got 3",
        ),
    ],
)
def test_wrong_arguments_are_refused(how, message):
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        evaluate(
            **{
                "policies": Always(1),
                "env": Team,
                "episodes": 1,
                "num_workers": 1,
                **how,
            }
        )


def test_results_become_json():
    played = EpisodeRecord(episode=0, seed=1, length=5, returns=(-1.0, 2.0))
    one = Evaluation(
        env="pond",
        players=("a", "b"),
        roles=("x", "y"),
        is_focal=(True, True),
        seed=1,
        episodes=(played,),
    )
    plain = json.loads(json.dumps(one.to_dict()))
    assert plain["equality"] == {
        "mean": None,
        "low": None,
        "high": None,
        "num_episodes": 0,
    }
    mean = {"mean": -1.0, "low": None, "high": None, "num_episodes": 1}
    assert plain["by_player"][0] == {"player": "a", "role": "x", "focal": True, **mean}


def ones(_env):
    return Always(1)


def test_the_command_writes_what_it_found(tmp_path):
    path = tmp_path / "found.json"
    name, here = "python:tests.envs.team_env:Team", f"{__name__}:ones"
    command = [
        "evaluate",
        name,
        "--policy",
        here,
        "--background",
        "random",
        "--focal",
        "0,agent_2",
        "--episodes",
        "2",
    ]
    done = CliRunner().invoke(
        app,
        [
            *command,
            "--workers",
            "1",
            "--env-kwargs",
            '{"length": 2}',
            "--json",
            str(path),
        ],
        env={"COLUMNS": "40"},  # names are longer than that
    )
    assert done.exit_code == 0, done.output
    assert re.search(r"focal return .* 1\.50 ", done.output), done.output
    found = json.loads(path.read_text())
    assert found["focal_per_capita"]["mean"] == 1.5
    assert [one["focal"] for one in found["by_player"]] == [True, False, True]
    assert found["lengths"] == [2, 2]


@needs("meltingpot")
@pytest.mark.slow
def test_a_scenario_is_played_with_policies_in_its_bots_places():
    name = "prisoners_dilemma_in_the_matrix__repeated_0"
    mine, other = Always(0), Always(1)
    found = evaluate(mine, name, 1, background=other, num_workers=1, max_steps=5)
    assert found.is_focal == (True, False)
    assert found.env == name
    assert found.returns.shape == (1, 2)
    assert mine.calls[0]["player"].tolist() == [0]
    assert other.calls[0]["player"].tolist() == [1]
    assert found.roles == MeltingPotFactory(name).scenario_config.roles


@needs("meltingpot")
@pytest.mark.slow
def test_roles_of_a_substrate_are_in_the_spec():
    roles = ("bach_fan", "stravinsky_fan", "bach_fan")
    make_env = MeltingPotFactory(
        "bach_or_stravinsky_in_the_matrix__arena",
        roles,
        keys=("INVENTORY",),
        max_steps=3,
    )
    found = evaluate(
        {"bach_fan": Always(0), "stravinsky_fan": None}, make_env, 1, num_workers=1
    )
    assert found.roles == roles
    assert found.lengths.tolist() == [3]
    assert set(found.by_role) == {("bach_fan", True), ("stravinsky_fan", True)}
