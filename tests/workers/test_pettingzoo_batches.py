"""PettingZoo envs through the executor, compared with TorchRL's wrapper of the same envs."""

from types import SimpleNamespace
from typing import Any

from tests.extras import needs, skip_without

skip_without("pettingzoo")

import numpy as np
import pettingzoo
import pytest
import torch
from pettingzoo.utils.conversions import turn_based_aec_to_parallel
from tensordict import TensorDict

from envherd.executor import SerialEnv
from envherd.workers.adapters.named import PettingZooFactory
from envherd.workers.adapters.pettingzoo.adapter import PettingZooAdapter
from envherd.workers.adapters.pettingzoo.groups import groups_by_name
from tests.envs.pettingzoo_envs import Village
from tests.workers.adapter_values import stored


def test_arguments_reach_the_env_and_unlike_ones_each_their_own():
    factory = PettingZooFactory("mpe2.simple_spread_v3")
    with SerialEnv(2, factory, env_kwargs={"N": 5, "max_cycles": 2}, seed=0) as env:
        data = env.rollout(3)
    assert data["agent", "observation"].shape[:3] == (2, 2, 5)
    assert data.get("agent").batch_size == (2, 2, 5)


@pytest.mark.skipif(
    not hasattr(pettingzoo, "make"), reason="PettingZoo before 1.26 has no registry"
)
def test_random_players_take_turns_and_make_legal_moves():
    with SerialEnv(1, tictactoe, seed=0) as env:
        data = env.rollout(60, break_when_any_done=False)[0]
    ends = data["next", "done"].flatten().nonzero().flatten().tolist()
    lengths = np.diff([-1, *ends])
    assert len(ends) > 5
    assert lengths.min() >= 5, "an illegal move would have ended a game at once"
    assert lengths.max() <= 9
    assert (data["player", "mask"].sum(-1) == 1).all()
    assert (
        data["next", "player", "mask"].sum(-1) == (~data["next", "done"]).flatten()
    ).all()


def tictactoe() -> Any:
    return turn_based_aec_to_parallel(pettingzoo.make("aec", "classic/tictactoe-v3"))


# ---- beside TorchRL -------------------------------------------------------------------------

CASES = {
    "spread": PettingZooFactory("mpe2.simple_spread_v3", return_state=True),
    "tag": PettingZooFactory("mpe2.simple_tag_v3", return_state=True),
    "adversary": PettingZooFactory("mpe2.simple_adversary_v3", return_state=True),
    "world_comm": PettingZooFactory("mpe2.simple_world_comm_v3", return_state=True),
    "speaker_listener": PettingZooFactory(
        "mpe2.simple_speaker_listener_v4", return_state=True
    ),
    "multiwalker": PettingZooFactory("sisl/multiwalker-v9", return_state=True),
}
MARKED = [
    pytest.param(case, marks=needs("box2d")) if case == "multiwalker" else case
    for case in CASES
]


def torchrl_env(env: Any, *, return_state: bool = True) -> Any:
    """Return TorchRL's wrapper, configured to continue until no agent is left, like envherd."""
    from torchrl.envs.libs.pettingzoo import PettingZooWrapper

    return PettingZooWrapper(
        env, return_state=return_state, use_mask=True, done_on_any=False
    )


def outline(data: Any) -> dict[Any, tuple[Any, torch.dtype]]:
    """Return `{key: (shape behind the batch and time, dtype)}`."""
    return {
        key: (value.shape[data.ndim :], value.dtype)
        for key, value in data.items(include_nested=True, leaves_only=True)
    }


def marked(test: Any) -> Any:
    """Mark a test that runs TorchRL's wrapper, and envs in Box2D."""
    test = pytest.mark.filterwarnings(
        "ignore:PettingZoo in TorchRL is tested:UserWarning"
    )(test)
    test = pytest.mark.filterwarnings(
        "ignore:builtin type .* has no __module__ attribute:DeprecationWarning"
    )(test)
    return pytest.mark.slow(test)


@marked
@pytest.mark.parametrize("case", MARKED)
def test_keys_shapes_and_dtypes_are_those_of_torchrl(case):
    expected = torchrl_env(CASES[case]()).rollout(3)
    with SerialEnv(2, CASES[case], seed=0) as env:
        data = env.rollout(3)
        groups = dict(env.specs[0].groups)
    assert outline(data) == outline(expected)
    for (group,), shape in groups.items():
        assert data[group].batch_size == (2, 3, *shape)
        assert expected[group].batch_size == (3, *shape)


@marked
def test_keys_with_masks_and_infos_are_those_of_torchrl():
    """TorchRL can neither reset a village with absent agents nor read text in infos."""

    class Small(Village):
        possible_agents = Village.possible_agents[:3]

        def _tell(self, agent: str) -> dict[str, Any]:
            return {
                key: value
                for key, value in super()._tell(agent).items()
                if key != "name"
            }

        def reset(self, seed: int | None = None, options: Any = None) -> Any:
            observations, infos = super().reset(seed, options)
            self.agents.remove("dog")
            return {agent: observations[agent] for agent in self.agents}, infos

    expected = torchrl_env(Small(), return_state=False).reset()
    with SerialEnv(1, Small, seed=0) as env:
        assert outline(env.reset()) == outline(expected)


@marked
@pytest.mark.parametrize("case", MARKED)
def test_values_are_those_of_torchrl(case):
    compare(CASES[case], num_steps=30, max_cycles=12)


@marked
@needs("box2d")
def test_walkers_that_fall_and_stay_away_are_as_in_torchrl():
    """TorchRL marks an absent agent both terminated and truncated; only that differs."""
    # Has no state when a walker is gone.
    factory = PettingZooFactory("sisl/multiwalker-v9")
    kwargs = {
        "terminate_on_fall": False,
        "remove_on_fall": True,
        "position_noise": 0,
        "angle_noise": 0,
    }
    assert compare(factory, num_steps=150, max_cycles=100, **kwargs) > 0


def compare(factory: PettingZooFactory, num_steps: int, **env_kwargs: Any) -> int:
    """Step the same env here and in TorchRL's wrapper; return in how many rows an agent was away."""
    adapter = PettingZooAdapter(factory(**env_kwargs))
    theirs = torchrl_env(factory(**env_kwargs), return_state=factory.return_state)
    td, num_away, num_ends = TensorDict(), 0, 0
    torch.manual_seed(0)
    spec = adapter.spec
    assert_equal(stored(spec.observation, adapter.reset(5)), theirs.reset(seed=5), [])
    for step in range(num_steps):
        # Held for a while: walkers fall.
        td = theirs.rand_action(TensorDict()) if step % 20 == 0 else td
        observation, reward, terminated, truncated = adapter.step(
            [td[leaf.key].numpy() for leaf in spec.action]
        )
        expected = theirs.step(td)["next"]
        values = stored(spec.observation, observation) | stored(spec.reward, reward)
        flags = stored(spec.done[3:], adapter.done_values())
        away = [group for (group,), _ in spec.groups if not values[group, "mask"].all()]
        assert_equal(
            values | flags,
            expected,
            [(g, key) for g in away for key in ("terminated", "truncated")],
        )
        assert bool(expected["done"]) == (terminated or truncated)
        num_away += bool(away) and not (terminated or truncated)
        if terminated or truncated:
            num_ends += 1
            assert_equal(
                stored(spec.observation, adapter.reset(6)), theirs.reset(seed=6), []
            )
    assert num_ends > 0
    adapter.close()
    theirs.close()
    return num_away


def assert_equal(mine: dict[Any, Any], theirs: Any, but_for: list[Any]) -> None:
    for key, value in mine.items():
        if key not in but_for:
            np.testing.assert_array_equal(value, theirs[key].numpy(), str(key))


NAMES = [
    ["agent_0", "agent_1"],
    ["adversary_0", "agent_0", "adversary_1"],
    ["first", "second"],
    ["red_team_0", "red_team_1", "blue_team_0"],
    ["a_b", "a_c", "_3", "7", "a_-1"],
]


@pytest.mark.slow
@pytest.mark.parametrize("names", NAMES)
def test_groups_are_named_as_torchrl_names_them(names):
    from torchrl.envs.libs.pettingzoo import PettingZooWrapper

    assert groups_by_name(names) == PettingZooWrapper._get_default_group_map(
        SimpleNamespace(parallel=True), names
    )
