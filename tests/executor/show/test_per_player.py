"""`PerPlayer`: policies by player and role, one call for each, their keys and their state in the batch."""

import functools
import re
from contextlib import closing

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictSequential
from torch import nn

from envherd import (
    AsyncCollector,
    Collector,
    ParallelEnv,
    PerPlayer,
    RandomPlayer,
    SerialEnv,
)
from tests.envs.team_env import NUM_ACTIONS, ROLES, Team
from tests.extras import needs

NUM_ENVS = 2


class Always:
    """A scripted player, which records its arguments."""

    def __init__(self, action):
        self.action, self.calls = action, []

    def __call__(self, rows):
        self.calls.append(rows.clone())
        return rows.set("action", torch.full(rows.batch_size, self.action))


class Counting(nn.Module):
    """A recurrent player: its state is its number of actions in the episode, and the player."""

    def __init__(self, scale=1.0):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(scale))

    def forward(self, rows):
        count = rows["count"]
        rows["next", "count"] = count + torch.stack(
            [self.weight.expand(rows.shape), rows["player"].float()], -1
        )
        return rows.set("action", count[..., 0].long() % NUM_ACTIONS).set(
            "value", count[..., :1] * self.weight
        )


@pytest.fixture(
    params=[SerialEnv, functools.partial(ParallelEnv, num_workers=2)],
    ids=["serial", "parallel"],
)
def env(request):
    with request.param(NUM_ENVS, Team, seed=0) as env:
        yield env


def actions_of(data):
    return data["agents", "action"]


def test_players_take_precedence_over_roles_and_roles_over_all_others(env):
    one, two, three = Always(1), Always(2), Always(3)
    policy = PerPlayer({"*": one, "gatherer": two, "agent_2": three}, env.spec)
    assert [(part.policy, part.players) for part in policy.parts] == [
        (one, (0,)),
        (two, (1,)),
        (three, (2,)),
    ]
    data = env.rollout(3, policy)
    assert (actions_of(data) == torch.tensor([1, 2, 3])).all()
    assert data["next", "agents", "reward"][0, 0].flatten().tolist() == [0.5, 2.0, 3.0]


def test_policy_is_called_once_for_all_its_players(env):
    mine, other = Always(1), Always(2)
    env.rollout(3, PerPlayer({0: mine, 2: mine, "*": other}, env.spec))
    assert len(mine.calls) == len(other.calls) == 3
    assert mine.calls[1]["observation", "place"].tolist() == [[1, 0], [1, 2]] * NUM_ENVS
    assert mine.calls[1]["player"].tolist() == [0, 2] * NUM_ENVS
    assert mine.calls[1]["done"].tolist() == [[False]] * 4
    assert other.calls[1]["observation", "place"].tolist() == [[1, 1]] * NUM_ENVS


def test_keys_of_a_policy_are_kept_with_zeros_for_the_others(env):
    class Valued(Always):
        def __call__(self, rows):
            return (
                super()
                .__call__(rows)
                .set(("extra", "value"), 1 + rows["player"][:, None].double())
            )

    data = env.rollout(2, PerPlayer({"gatherer": Valued(1), "*": Always(0)}, env.spec))
    assert data["agents", "extra", "value"].shape == (NUM_ENVS, 2, 3, 1)
    assert data["agents", "extra", "value"].dtype == torch.float64
    assert (
        data["agents", "extra", "value"].squeeze(-1) == torch.tensor([0.0, 2.0, 3.0])
    ).all()


@pytest.mark.parametrize(
    "other",
    [torch.tensor([0, 0]), torch.tensor([0.5])],
    ids=["shape", "floats"],
)
def test_keys_of_unlike_shapes_and_kinds_are_refused(env, other):
    def writing(value):
        return lambda rows: rows.set("action", rows["player"]).set(
            "value", value.expand(*rows.batch_size, -1)
        )

    policy = PerPlayer(
        {"hunter": writing(torch.tensor([0])), "*": writing(other)}, env.spec
    )
    with pytest.raises(
        ValueError,
        match=r"expected value of one shape and kind from all policies, got torch.int64 \[1\] and torch",
    ):
        policy(env.reset())


def expected_counts(data, players, scale=1.0):
    """Return `count` as it must be: it begins at 0 in each episode."""
    steps = data["agents", "observation", "place"][..., players, 0]
    return torch.stack([steps * scale, steps * torch.tensor(players)], -1)


@pytest.mark.parametrize("players", [[0, 1, 2], [1, 2], [0, 2]])
def test_state_is_of_each_player_and_begins_with_the_episode(env, players):
    policies = {player: Counting() for player in players[:1]}
    policies |= dict.fromkeys(players, policies[players[0]]) | {"*": Always(0)}
    policy = PerPlayer(policies, env.spec)
    primer = policy.primer(NUM_ENVS, count=torch.zeros(2))
    assert primer["agents", "count"].shape == (NUM_ENVS, 3, 2)
    batches = list(
        Collector(
            env,
            policy,
            frames_per_batch=8,
            total_frames=24,
            primer=primer,
            close_env=False,
        )
    )
    assert sum(int(data["next", "done"].sum()) for data in batches) > 4
    for data in batches:
        assert torch.equal(
            data["agents", "count"][..., players, :], expected_counts(data, players)
        )
        others = [player for player in range(3) if player not in players]
        assert not data["agents", "count"][..., others, :].any()


def test_shared_and_separate_parameters(env):
    shared, left, right = Counting(1.0), Counting(2.0), Counting(3.0)
    together = PerPlayer({"*": shared}, env.spec)
    apart = PerPlayer({"hunter": left, "gatherer": right}, env.spec)
    assert len(list(together.parameters())) == 1
    assert list(apart.parameters()) == [left.weight, right.weight]
    data = env.rollout(3, apart, primer=apart.primer(NUM_ENVS, count=torch.zeros(2)))
    parts = list(apart.split(data))
    assert [part.policy for part, _ in parts] == [left, right]
    hunters, gatherers = (rows for _, rows in parts)
    assert hunters.batch_size == (NUM_ENVS, 3, 1)
    assert gatherers.batch_size == (NUM_ENVS, 3, 2)
    assert torch.equal(gatherers["count"], expected_counts(data, [1, 2], 3.0))
    assert torch.equal(
        gatherers["next", "reward"], data["next", "agents", "reward"][:, :, 1:]
    )
    assert gatherers["next", "done"].shape == (NUM_ENVS, 3, 2, 1)
    assert gatherers["next", "done"][:, -1].all()
    (right(gatherers.clone())["value"] ** 2).sum().backward()
    assert right.weight.grad is not None
    assert left.weight.grad is None


def test_random_players_draw_legal_actions(env):
    policy = PerPlayer({"hunter": Always(0), "gatherer": None}, env.spec)
    torch.manual_seed(0)
    drawn = torch.cat([actions_of(env.rollout(3, policy))[..., 1:] for _ in range(20)])
    assert drawn.unique().tolist() == list(range(NUM_ACTIONS))
    rows = TensorDict({"action_mask": torch.tensor([[False, True, False]] * 9)}, [9])
    assert (RandomPlayer(3)(rows)["action"] == 1).all()


@pytest.mark.parametrize("layout", ["rows", "flat"])
def test_the_asynchronous_collector_has_the_same_rows(layout):
    def collect(env, collector, **how):
        policy = PerPlayer({"hunter": Always(1), "gatherer": Counting()}, env.spec)
        primer = policy.primer(NUM_ENVS, count=torch.zeros(2))
        return next(
            iter(collector(env, policy, frames_per_batch=20, primer=primer, **how))
        )

    with ParallelEnv(
        NUM_ENVS, functools.partial(Team, 0), num_workers=2, seed=1
    ) as env:
        data = collect(env, AsyncCollector, layout=layout)
    assert data["next", "done"].any()
    assert torch.equal(
        data["agents", "count"][..., 1:, :], expected_counts(data, [1, 2])
    )
    assert (actions_of(data)[..., 0] == 1).all()
    assert torch.equal(
        actions_of(data)[..., 1:],
        data["agents", "count"][..., 1:, 0].long() % NUM_ACTIONS,
    )


def test_names_without_a_spec():
    policy = PerPlayer({"hunter": Always(1), "*": Always(2)}, roles=ROLES)
    root = TensorDict(
        {"agents": TensorDict({"observation": torch.zeros(5, 3, 1)}, [5, 3])}, [5]
    )
    assert actions_of(policy(root)).tolist() == [[1, 2, 2]] * 5


@pytest.mark.parametrize(
    ("policies", "how", "error", "message"),
    [
        (
            {"hunter": Always(1)},
            {"roles": ROLES},
            ValueError,
            "got none for agent_1 (role 'gatherer')",
        ),
        (
            {"farmer": None, "*": None},
            {"roles": ROLES},
            ValueError,
            "'gatherer', 'hunter'] and '*', got 'farmer'",
        ),
        ({3: None, "*": None}, {"roles": ROLES}, ValueError, "got 3"),
        (
            {"*": None},
            {"roles": ROLES},
            ValueError,
            "expected the spec of the envs where a policy is None",
        ),
        (
            {"*": None},
            {},
            ValueError,
            "expected the spec of the envs or roles, got neither",
        ),
        (
            [Always(1)],
            {"roles": ROLES},
            TypeError,
            "got a list. Write {'*': policy}",
        ),
    ],
)
def test_impossible_arguments_are_refused(policies, how, error, message):
    with pytest.raises(error, match=re.escape(message)):
        PerPlayer(policies, **how)


@needs("pettingzoo")
def test_each_group_of_a_pettingzoo_env_has_the_names_of_its_agents():
    from mpe2 import simple_tag_v3

    with SerialEnv(2, simple_tag_v3.parallel_env, seed=0) as env:
        chasers = PerPlayer({"adversary_1": Always(1), "*": Always(2)}, env.spec)
        policy = TensorDictSequential(
            chasers, PerPlayer({"agent_0": Always(3)}, env.spec, group="agent")
        )
        data = env.rollout(3, policy)
        assert data["adversary", "action"].tolist() == [[[2, 1, 2]] * 3] * 2
        assert data["agent", "action"].tolist() == [[[3]] * 3] * 2


def test_a_policy_of_another_number_of_players_is_refused(env):
    policy = PerPlayer({"*": Always(1)}, roles=("a", "b"))
    with pytest.raises(
        ValueError, match=r"expected a group of batch size \[2, 2\], got \[2, 3\]"
    ):
        env.rollout(1, policy)


@needs("torchrl")
@pytest.mark.slow
def test_it_acts_in_torchrls_own_rollout_over_the_facade():
    from torchrl.envs import TransformedEnv
    from torchrl.envs.libs.pettingzoo import PettingZooWrapper

    from envherd.torchrl import ParallelEnv as TorchRLParallelEnv

    def make_env():
        from mpe2 import simple_spread_v3

        return PettingZooWrapper(
            simple_spread_v3.parallel_env(max_cycles=5), categorical_actions=True
        )

    one, two = Always(1), Always(2)
    with closing(TransformedEnv(TorchRLParallelEnv(2, make_env))) as env:
        data = env.rollout(
            4, PerPlayer({0: one, "*": two}, roles=["agent"] * 3, group="agent")
        )
    assert (data["agent", "action"] == torch.tensor([1, 2, 2])).all()
    assert one.calls[0].batch_size == (2,)
    assert two.calls[0].batch_size == (4,)
