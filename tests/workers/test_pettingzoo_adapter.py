"""The PettingZoo adapter on real PettingZoo envs, compared with the same envs driven by hand, and on scripted ones."""

from contextlib import closing
from types import SimpleNamespace
from typing import Any

from tests.extras import needs, skip_without

skip_without("pettingzoo")

import numpy as np
import pettingzoo
import pygame
import pytest
import torch
from gymnasium import spaces
from mpe2 import simple_spread_v3
from pettingzoo.utils.conversions import turn_based_aec_to_parallel
from tensordict import TensorDict

from envherd.executor import SerialEnv
from envherd.shm.specs import Box, LeafSpec, MultiDiscrete
from envherd.workers.adapters.named import PettingZooFactory
from envherd.workers.adapters.pettingzoo.adapter import (
    PettingZooAdapter,
    groups_by_name,
)
from envherd.workers.errors import ResetNeeded
from tests.envs.pettingzoo_envs import LENGTH, PRESENT, Scripted, Village, outcome
from tests.workers.adapter_values import stored

TERMINATED, TRUNCATED, BOTH, ALIVE = (
    (True, False),
    (False, True),
    (True, True),
    (False, False),
)


class Driver:
    """An adapter, with its values by key after each call."""

    def __init__(self, env: Any) -> None:
        self.adapter = PettingZooAdapter(env)
        self.spec = self.adapter.spec

    def reset(self, seed: int | None = 0) -> dict[Any, Any]:
        values = stored(self.spec.observation, self.adapter.reset(seed))
        return values | stored(self.spec.done[3:], self.adapter.done_values())

    def step(self, actions: list[Any] | None = None) -> dict[Any, Any]:
        """Step; without actions, with the first legal one of each agent."""
        zeros = [np.zeros(leaf.shape, leaf.dtype) for leaf in self.spec.action]
        observation, reward, terminated, truncated = self.adapter.step(actions or zeros)
        assert (type(terminated), type(truncated)) == (bool, bool)
        values = stored(self.spec.observation, observation) | stored(
            self.spec.reward, reward
        )
        return (
            values
            | stored(self.spec.done[3:], self.adapter.done_values())
            | {"end": (terminated, truncated)}
        )


def flags(values: dict[Any, Any], group: str) -> list[tuple[bool, bool]]:
    """Return how the agents of a group have ended; `done` must agree."""
    terminated, truncated = (
        values[group, "terminated"][:, 0],
        values[group, "truncated"][:, 0],
    )
    np.testing.assert_array_equal(values[group, "done"][:, 0], terminated | truncated)
    return list(zip(terminated.tolist(), truncated.tolist(), strict=True))


@pytest.fixture(autouse=True)
def _sdl_is_left():
    """Close the descriptors of SDL, which each env of mpe2 1.0 opens as it is built."""
    yield
    pygame.quit()


# ---- agents that leave and come back --------------------------------------------------------


def test_masks_say_who_acts_and_only_they_are_given_actions():
    env = Village()
    driver = Driver(env)
    values = driver.reset()
    for present in PRESENT:
        for name, agents in driver.spec.metadata["group_map"].items():
            assert values[name, "mask"].tolist() == [
                agent in present for agent in agents
            ]
        values = driver.step()
    assert [tuple(actions) for actions in env.given] == list(PRESENT)
    assert not any(values[name, "mask"].any() for name in ("wolf", "sheep", "dog"))


def test_absent_agent_has_zeros_and_done_until_it_returns():
    driver = Driver(Village())
    begun = driver.reset()
    assert flags(begun, "sheep")[2] == ALIVE  # it comes later
    number = begun["sheep", "observation"][0, 0]
    rows = [driver.step() for _ in range(4)]
    sheep = [
        {key[1]: value[0] for key, value in row.items() if key[0] == "sheep"}
        for row in rows
    ]
    # Its last observation, with its last reward.
    assert sheep[1]["observation"].tolist() == [number, 2]
    assert (sheep[1]["reward"], sheep[1]["terminated"], sheep[1]["mask"]) == (
        3,
        True,
        False,
    )
    for away in sheep[2:3]:
        assert away["observation"].tolist() == [0, 0]
        assert (away["reward"], away["terminated"], away["truncated"]) == (
            0,
            True,
            False,
        )
    assert sheep[3]["observation"].tolist() == [number, 4]
    assert (sheep[3]["done"], sheep[3]["mask"]) == (False, True)


@pytest.mark.parametrize(
    ("number", "root"), [(0, TRUNCATED), (1, TRUNCATED), (2, TRUNCATED)]
)
def test_a_village_ends_as_its_agents_do(number, root):
    driver = Driver(Village())
    seed = next(
        seed
        for seed in range(100)
        if np.random.default_rng(seed).integers(100) % 3 == number
    )
    driver.reset(seed)
    *before, last = [driver.step() for _ in range(LENGTH)]
    assert [row["end"] for row in before] == [ALIVE] * (LENGTH - 1)
    assert last["end"] == root  # sheep_1 was truncated before: never all terminated
    at_end = {0: TERMINATED, 1: TRUNCATED}.get(number, TRUNCATED)
    assert flags(last, "sheep") == [at_end, TRUNCATED, at_end]
    assert flags(last, "dog") == [TERMINATED if number == 2 else at_end]
    with pytest.raises(ResetNeeded):
        driver.step()


#: How the two agents ended in the last step -> how the episode did.
ENDS = [
    ((TERMINATED, TERMINATED), TERMINATED),
    ((TRUNCATED, TRUNCATED), TRUNCATED),
    ((TERMINATED, TRUNCATED), TRUNCATED),
    ((BOTH, TERMINATED), TERMINATED),
    ((BOTH, TRUNCATED), TRUNCATED),
    ((BOTH, BOTH), BOTH),
]
PAIR = ("a_0", "a_1")


@pytest.mark.parametrize(
    ("reported", "ends", "root", "agents"),
    [
        *((ends, ends, root, agents) for ends, root in ENDS for agents in (PAIR, ())),
        ((ALIVE, ALIVE), (TERMINATED, TERMINATED), TERMINATED, ()),
        (((1, 0.0), (np.array(0), 1)), (TERMINATED, TRUNCATED), TRUNCATED, ()),
    ],
)
def test_how_an_episode_ends(reported, ends, root, agents):
    """Some envs leave agents that are done in their list. Agents that are gone without a word have terminated."""
    answer = outcome(dict(zip(PAIR, reported, strict=True)))
    driver = Driver(Scripted(answers=[(list(agents), answer)]))
    driver.reset()
    values = driver.step()
    assert values["end"] == root
    assert flags(values, "a") == list(ends)


@pytest.mark.parametrize(("place", "end"), [(2, TRUNCATED), (3, TERMINATED)])
def test_agent_flags_terminated_and_truncated_are_independent(place, end):
    values = list(outcome({"a_0": BOTH, "a_1": BOTH}))
    values[place] = {}
    driver = Driver(Scripted(answers=[([], tuple(values))]))
    driver.reset()
    assert flags(driver.step(), "a") == [end, end]


def test_an_agent_gone_without_a_word_has_terminated():
    driver = Driver(
        Scripted(
            answers=[
                (["a_1"], outcome({"a_0": None, "a_1": ALIVE}, seen=["a_1"])),
                ([], outcome({"a_1": TERMINATED})),
            ]
        )
    )
    driver.reset()
    values = driver.step()
    assert (flags(values, "a"), values["end"]) == ([TERMINATED, ALIVE], ALIVE)
    assert values["a", "reward"][:, 0].tolist() == [0, 1]
    assert driver.step()["end"] == TERMINATED


# ---- spaces, groups and masks ---------------------------------------------------------------


def test_each_group_has_its_own_spaces():
    spec = Driver(Village()).spec
    leaves = {
        leaf.key: (leaf.shape, leaf.dtype)
        for leaf in spec.leaves()
        if leaf.key[-1] not in ("done", "terminated")
    }
    assert leaves == {
        ("wolf", "observation", "observation"): ((1, 3), "float32"),
        ("wolf", "action_mask"): ((1, 4), "bool"),
        ("wolf", "mask"): ((1,), "bool"),
        ("wolf", "info", "energy"): ((1,), "float32"),
        ("wolf", "action"): ((1,), "int64"),
        ("wolf", "reward"): ((1, 1), "float32"),
        ("wolf", "truncated"): ((1, 1), "bool"),
        ("sheep", "observation"): ((3, 2), "float64"),
        ("sheep", "action_mask"): ((3, 3), "bool"),
        ("sheep", "mask"): ((3,), "bool"),
        ("sheep", "action"): ((3,), "int64"),
        ("sheep", "reward"): ((3, 1), "float32"),
        ("sheep", "truncated"): ((3, 1), "bool"),
        ("dog", "observation", "place"): ((1, 1), "float32"),
        ("dog", "observation", "flock"): ((1,), "int64"),
        ("dog", "mask"): ((1,), "bool"),
        ("dog", "info", "energy"): ((1,), "float32"),
        ("dog", "action"): ((1, 2), "float32"),
        ("dog", "reward"): ((1, 1), "float32"),
        ("dog", "truncated"): ((1, 1), "bool"),
        ("truncated",): ((1,), "bool"),
    }
    assert spec.groups == ((("wolf",), (1,)), (("sheep",), (3,)), (("dog",), (1,)))
    assert spec.metadata["group_map"]["sheep"] == ["sheep_0", "sheep_1", "sheep_2"]
    assert spec.metadata["agent_count"] == 5


def test_action_masks_of_observations_and_infos_have_one_place():
    driver = Driver(Village())
    values = driver.reset()
    assert values["wolf", "action_mask"].tolist() == [[True, True, False, True]]
    assert values["sheep", "action_mask"].tolist() == [
        [False, True, True],
        [False, True, True],
        [True, True, True],
    ]
    values = driver.step()
    assert values["wolf", "action_mask"].tolist() == [[True, True, True, False]]
    driver.step()
    values = driver.step()  # sheep_1 has just left, so its mask is all True
    assert values["sheep", "action_mask"].all()


def test_infos_that_a_whole_group_has_become_leaves():
    driver = Driver(Village())
    driver.reset()
    values = driver.step()
    assert values["wolf", "info", "energy"].tolist() == [9]
    assert driver.adapter.info["dog"] == {"energy": 9.0, "name": "dog"}


@pytest.mark.parametrize(
    "odd", [None, "text", b"1", [[1], [1, 2]], {"energy": 1.0}, object()]
)
def test_infos_that_are_no_numbers_are_no_leaves(odd):
    env = Scripted(["a_0"])
    env.first = {"a_0": env.zero("a_0")}, {"a_0": {"energy": 1, "odd": odd, 3: 4.0}}
    spec = Driver(env).spec
    assert [leaf.key for leaf in spec.observation if "info" in leaf.key] == [
        ("a", "info", "energy")
    ]


@pytest.mark.parametrize(
    ("metadata", "name"),
    [({"name": "village"}, "village"), ({}, "Scripted"), (None, "Scripted")],
)
def test_an_env_has_the_name_of_its_metadata_or_of_its_class(metadata, name):
    env = Scripted()
    env.metadata = metadata
    assert Driver(env).spec.metadata["env_id"] == name


def test_agents_of_unlike_shapes_become_groups_of_their_own():
    unlike = {
        "a_1": (spaces.Box(-1, 1, (5,), np.float32), spaces.MultiDiscrete([2, 3]))
    }
    spec = Driver(Scripted(["a_0", "a_1", "b_0", "b_1"], unlike)).spec
    assert spec.metadata["group_map"] == {
        "a_0": ["a_0"],
        "a_1": ["a_1"],
        "b": ["b_0", "b_1"],
    }
    assert (
        LeafSpec(("a_1", "action"), (1, 2), "int64", MultiDiscrete(((2, 3),)))
        in spec.action
    )


def test_agents_that_differ_in_bounds_and_numbers_stay_together():
    env = Scripted(
        spaces_={
            "a_0": (spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(3)),
            "a_1": (spaces.Box(-2, 1, (2,), np.float32), spaces.Discrete(5, start=2)),
        },
        answers=[([], outcome({"a_0": TERMINATED, "a_1": TERMINATED}))],
    )
    driver = Driver(env)
    (action,) = driver.spec.action
    assert action == LeafSpec(
        ("a", "action"), (2,), "int64", MultiDiscrete((3, 5), (0, 2))
    )
    box = driver.spec.observation[0].domain
    assert isinstance(box, Box)
    assert (box.low.tolist(), box.high.tolist()) == ([[-1, -1], [-2, -2]], 1)
    driver.reset()
    driver.step([np.array([2, 4])])
    assert env.given == [{"a_0": 2, "a_1": 6}]
    assert {type(action) for action in env.given[0].values()} == {np.int64}


def test_nested_actions_are_put_together_for_each_agent():
    nested = spaces.Dict(
        {
            "move": spaces.MultiDiscrete([2, 3], start=[1, 0]),
            "push": spaces.Box(0, 1, (), np.float32),
        }
    )
    box = spaces.Box(-1, 1, (2,), np.float32)
    env = Scripted(
        spaces_=dict.fromkeys(("a_0", "a_1"), (box, nested)),
        answers=[([], outcome({"a_0": TERMINATED, "a_1": TERMINATED}))],
    )
    driver = Driver(env)
    assert [(leaf.key, leaf.shape) for leaf in driver.spec.action] == [
        (("a", "action", "move"), (2, 2)),
        (("a", "action", "push"), (2, 1)),
    ]
    driver.reset()
    driver.step([np.array([[1, 2], [0, 1]]), np.array([[0.25], [0.5]], np.float32)])
    assert all(nested.contains(action) for action in env.given[0].values())
    assert env.given[0]["a_0"]["move"].tolist() == [2, 2]
    assert float(env.given[0]["a_1"]["push"]) == 0.5


def test_a_group_map_groups_agents_as_it_says():
    group_map = {"x": ["agent_2", "agent_0"], "y": ["agent_1"]}
    driver = Driver(PettingZooFactory("mpe2.simple_spread_v3", group_map=group_map)())
    seen, _ = simple_spread_v3.parallel_env().reset(seed=3)
    values = driver.reset(3)
    np.testing.assert_array_equal(
        values["x", "observation"], [seen["agent_2"], seen["agent_0"]]
    )
    np.testing.assert_array_equal(values["y", "observation"], [seen["agent_1"]])


# ---- seeds, options, state, pictures --------------------------------------------------------


def test_seed_and_options_reach_the_env_and_options_are_its_own():
    env = Scripted()
    adapter = PettingZooAdapter(env)
    options = {"options": {"level": [1]}}
    adapter.reset(5, options)
    assert env.resets == [
        {"seed": None, "options": None},
        {"seed": 5, "options": {"level": [1]}},
    ]
    env.resets[1]["options"]["level"].append(2)
    assert options == {"options": {"level": [1]}}


def test_a_state_without_a_space_is_as_it_looks():
    driver = Driver(PettingZooFactory(Village, return_state=True)())
    assert LeafSpec(("state",), (2,), "float32") in driver.spec.observation
    driver.reset()
    assert driver.step()["state",][1] == 1


def test_pictures_are_drawn_where_the_env_was_made_for_it():
    with closing(
        PettingZooAdapter(
            PettingZooFactory("mpe2.simple_spread_v3", render_mode="rgb_array")()
        )
    ) as adapter:
        adapter.reset(0)
        frame = adapter.render()
        assert (frame.dtype, frame.ndim, frame.shape[2]) == (np.uint8, 3, 3)
    assert PettingZooAdapter(Village()).render() is None


# ---- AEC envs -------------------------------------------------------------------------------


def test_an_aec_env_that_can_be_parallel_is():
    aec, parallel = (
        Driver(simple_spread_v3.env(max_cycles=3)),
        Driver(simple_spread_v3.parallel_env(max_cycles=3)),
    )
    assert aec.spec == parallel.spec
    for rows in (
        (aec.reset(2), parallel.reset(2)),
        *((aec.step(), parallel.step()) for _ in range(3)),
    ):
        for key, value in rows[0].items():
            np.testing.assert_array_equal(value, rows[1][key], str(key))


@pytest.mark.skipif(
    not hasattr(pettingzoo, "make"), reason="PettingZoo before 1.26 has no registry"
)
def test_in_turns_only_one_agent_acts_and_knows_what_it_may_do():
    driver = Driver(
        turn_based_aec_to_parallel(pettingzoo.make("aec", "classic/tictactoe-v3"))
    )
    rng = np.random.default_rng(1)
    values, end, num_steps = driver.reset(), ALIVE, 0
    while end == ALIVE:
        mask = values["player", "mask"]
        assert mask.tolist() == [num_steps % 2 == 0, num_steps % 2 == 1]
        legal = values["player", "action_mask"]
        assert legal[1 - mask.argmax()].all()
        assert legal[mask.argmax()].sum() == 9 - num_steps
        actions = [rng.choice(np.flatnonzero(row)) for row in legal]
        values = driver.step([np.array(actions)])
        num_steps, end = num_steps + 1, values["end"]
    assert end == TERMINATED
    assert 5 <= num_steps <= 9
    assert values["player", "reward"].sum() == 0


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


#: Of a test that runs TorchRL's wrapper, and envs in Box2D.
of_torchrl = pytest.mark.filterwarnings(
    "ignore:PettingZoo in TorchRL is tested:UserWarning",
    "ignore:builtin type .* has no __module__ attribute:DeprecationWarning",
)


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


@of_torchrl
@pytest.mark.slow
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


@of_torchrl
@pytest.mark.slow
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


@of_torchrl
@pytest.mark.slow
@pytest.mark.parametrize("case", MARKED)
def test_values_are_those_of_torchrl(case):
    compare(CASES[case], num_steps=30, max_cycles=12)


@of_torchrl
@pytest.mark.slow
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
    with (
        closing(PettingZooAdapter(factory(**env_kwargs))) as adapter,
        closing(
            torchrl_env(factory(**env_kwargs), return_state=factory.return_state)
        ) as theirs,
    ):
        td, num_away, num_ends = TensorDict(), 0, 0
        torch.manual_seed(0)
        spec = adapter.spec
        assert_equal(
            stored(spec.observation, adapter.reset(5)), theirs.reset(seed=5), []
        )
        for step in range(num_steps):
            # Held for a while: walkers fall.
            td = theirs.rand_action(TensorDict()) if step % 20 == 0 else td
            observation, reward, terminated, truncated = adapter.step(
                [td[leaf.key].numpy() for leaf in spec.action]
            )
            expected = theirs.step(td)["next"]
            values = stored(spec.observation, observation) | stored(spec.reward, reward)
            flags = stored(spec.done[3:], adapter.done_values())
            away = [
                group for (group,), _ in spec.groups if not values[group, "mask"].all()
            ]
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
