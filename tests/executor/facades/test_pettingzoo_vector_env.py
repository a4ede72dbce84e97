"""Batches of PettingZoo envs, as dicts by agent and rows by agent, with the envs' own values."""

import functools
import importlib
import os
import signal
import sys
from contextlib import closing

from tests.extras import needs, skip_without

skip_without("pettingzoo")

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.error import ClosedEnvironmentError
from gymnasium.vector import AutoresetMode

from envherd import ActionError, FactoryError, PerPlayer, ResetNeeded, evaluate
from envherd.executor import ExecutorOptions, MeltingPotFactory, ParallelEnv
from envherd.pettingzoo import (
    AgentRowsEnv,
    ParallelVectorEnv,
    concat_vec_envs_v1,
    parallel_env,
)
from tests.envs.counting_envs import AgentsEnv
from tests.envs.pettingzoo_envs import LENGTH, PRESENT, Scripted, Village

pytestmark = pytest.mark.slow

AGENTS = Village.possible_agents


class Flock(Village):
    """Only sheep, which have the same spaces; they leave and return."""

    possible_agents = ["sheep_0", "sheep_1", "sheep_2", "dog"]  # noqa: RUF012  # as its base class has them

    def __init__(self, length=LENGTH):
        super().__init__()
        self.length = length
        self.possible_agents = ["sheep_0", "sheep_1", "sheep_2"]

    def reset(self, seed=None, options=None):
        observations, infos = super().reset(seed, options)
        return self._ours(observations), self._ours(infos)

    def step(self, actions):
        self.agents.extend(
            agent for agent in PRESENT[self.num_steps] if agent not in self.agents
        )
        others = {
            agent: np.zeros(2, np.float32) if agent == "dog" else 0
            for agent in self.agents
        }
        return tuple(map(self._ours, super().step({**others, **actions})))

    def _ours(self, by_agent):
        self.agents = [agent for agent in self.agents if agent in self.possible_agents]
        return {
            agent: value
            for agent, value in by_agent.items()
            if agent in self.possible_agents
        }


class Dying(Village):
    """Kills its process where the dog bites."""

    def step(self, actions):
        if actions["dog"][0] > 0.9:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(actions)


class Raw:
    """The env's own data over episodes, reset according to a mode."""

    def __init__(self, env, seed):
        self.env = env
        self.observations, self.infos = env.reset(seed=seed)
        self.has_ended = False

    def reset(self):
        self.observations, self.infos = self.env.reset()
        self.has_ended = False

    def step(self, actions, mode):
        if self.has_ended and mode is AutoresetMode.NEXT_STEP:
            self.reset()
            return {}, {}, {}
        self.has_ended = False
        acting = list(self.env.agents)
        outcome = self.env.step({agent: actions[agent] for agent in acting})
        self.observations, rewards, terminations, truncations, self.infos = outcome
        self.has_ended = not self.env.agents
        if self.has_ended and mode is AutoresetMode.SAME_STEP:
            self.last = self.observations
            self.observations, self.infos = self.env.reset()
        return rewards, terminations, truncations


def draw(envs):
    return {agent: envs.action_space(agent).sample() for agent in envs.possible_agents}


class TakesNoOptions(Village):
    def reset(self, seed=None):
        return super().reset(seed=seed)


def test_an_env_needs_no_options_unless_they_are_passed():
    with ParallelVectorEnv([TakesNoOptions] * 2, num_workers=1) as envs:
        observations, _ = envs.reset(seed=0)
    shown = "ParallelVectorEnv(ParallelEnv(2 x pettingzoo, num_workers=1, closed))"
    assert (list(observations), repr(envs)) == (list(AGENTS), shown)


def test_statistics_of_episodes_have_a_return_for_each_agent():
    options = ExecutorOptions(episode_statistics=True)
    with ParallelVectorEnv([Village] * 2, num_workers=1, options=options) as envs:
        envs.reset(seed=0)
        total = np.zeros((2, len(AGENTS)))
        for _ in range(2 * LENGTH):
            _, rewards, *_, infos = envs.step(draw(envs))
            total += np.stack([rewards[agent] for agent in AGENTS], 1)
            if "episode" in infos:
                break
    assert infos["_episode"].all()
    assert infos["episode"]["l"].tolist() == [LENGTH] * 2
    np.testing.assert_allclose(infos["episode"]["r"], total, rtol=1e-6)


def of_env(values, env_id):
    if isinstance(values, dict):
        return {key: of_env(value, env_id) for key, value in values.items()}
    return values[env_id]


def assert_equal(ours, theirs):
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            assert_equal(ours[key], value)
    else:
        assert np.asarray(ours).dtype == np.asarray(theirs).dtype
        assert np.array_equal(ours, theirs)


def check_observations(envs, observations, raws):
    for i, raw in enumerate(raws):
        for agent in AGENTS:
            assert envs.active[agent][i] == (agent in raw.env.agents)
            own = of_env(observations[agent], i)
            if agent in raw.observations:
                assert_equal(own, raw.observations[agent])
            else:
                for value in own.values() if isinstance(own, dict) else [own]:
                    assert not np.any(value)


def check_outcome(outcome, i, expected):
    """Compare the rewards and flags of one env, and return how many agents were absent."""
    _, rewards, terminations, truncations, _ = outcome
    for agent in AGENTS:
        assert (rewards[agent].dtype, rewards[agent].shape) == (np.float64, (3,))
        assert terminations[agent].dtype == truncations[agent].dtype == bool
        assert rewards[agent][i] == expected[0].get(agent, 0.0)
        for flags, theirs in zip(
            (terminations, truncations), expected[1:], strict=True
        ):
            if agent in theirs:
                assert flags[agent][i] == theirs[agent]
    return len(AGENTS) - len(expected[0])


@pytest.mark.parametrize(
    ("mode", "start_method"),
    [
        *((mode, "zygote") for mode in AutoresetMode),
        (AutoresetMode.SAME_STEP, "portable"),
    ],
)
def test_agents_get_what_their_envs_give(mode, start_method):
    options = ExecutorOptions(start_method=start_method)
    with ParallelVectorEnv(
        [Village] * 3, num_workers=2, autoreset_mode=mode, options=options
    ) as envs:
        assert envs.possible_agents == AGENTS
        assert envs.observation_space("sheep_0") == spaces.Box(
            0, 100, (3, 2), np.float64
        )
        assert envs.single_action_space("sheep_0") == spaces.Discrete(3, start=1)
        assert envs.num_agents == envs.max_num_agents == 5
        for agent in AGENTS:
            envs.action_space(agent).seed(7)
        observations, _ = envs.reset(seed=5)
        raws = [Raw(Village(), 5 + i) for i in range(3)]
        num_ends = num_absent = 0
        for _ in range(3 * LENGTH):
            check_observations(envs, observations, raws)
            actions = draw(envs)
            outcome = envs.step(actions)
            observations, infos = outcome[0], outcome[-1]
            for i, raw in enumerate(raws):
                num_absent += check_outcome(
                    outcome, i, raw.step(of_env(actions, i), mode)
                )
                num_ends += raw.has_ended
                if raw.has_ended and mode is AutoresetMode.SAME_STEP:
                    assert_equal(
                        {agent: infos["final_obs"][i][agent] for agent in raw.last},
                        raw.last,
                    )
                for agent, info in raw.infos.items():
                    assert (infos[agent]["energy"][i], infos[agent]["name"][i]) == (
                        info["energy"],
                        agent,
                    )
            ended = np.array([raw.has_ended for raw in raws])
            if mode is AutoresetMode.DISABLED and ended.any():
                with pytest.raises(ResetNeeded):
                    envs.step(actions)
                observations, _ = envs.reset(options={"reset_mask": ended})
                for raw in raws:
                    raw.reset()
        assert num_ends >= 6
        assert num_absent > 9


def test_actions_may_be_tensors_and_lists_and_absent_agents_need_none():
    with ParallelVectorEnv([Village] * 2, num_workers=1) as envs:
        envs.reset()
        actions = {
            "wolf_0": torch.tensor([1, 2], dtype=torch.int32),
            "sheep_0": [1, 2],
            "sheep_1": np.array([[3], [1]]),
            "dog": torch.tensor([[0.5, 0.0], [0.25, 0.0]], dtype=torch.float64),
        }
        _, rewards, *_ = envs.step(actions)
        assert rewards["wolf_0"].tolist() == [2.0, 3.0]
        assert rewards["dog"].tolist() == [1.5, 1.25]
        for wrong, message in (
            (
                {"dog": np.zeros((3, 2))},
                r"expected actions of dog of shape \(2, 2\), got \(3, 2\)",
            ),
            (
                {"sheep_0": [0.5, 1]},
                "expected int64 actions of sheep_0, got float64 0.5",
            ),
        ):
            with pytest.raises(ActionError, match=message):
                envs.step({**actions, **wrong})
        with pytest.raises(ActionError, match="none of sheep_1"):
            envs.step(
                {
                    agent: action
                    for agent, action in actions.items()
                    if agent != "sheep_1"
                }
            )
        assert [len(given) for given in envs.get_attr("given")] == [1, 1]


def test_envs_are_asked_and_set():
    with ParallelVectorEnv([Village] * 2, num_workers=2) as envs:
        envs.reset(seed=3, options={"wolves": 2})
        assert envs.get_attr("options") == ({"wolves": 2},) * 2
        assert envs.state().shape == (2, 2)
        envs.set_attr("place", [1.0, 2.0])
        assert envs.call("_see", "dog")[1]["place"] == 2.0
        assert envs.render() == (None, None)


@pytest.mark.broken_pool
def test_a_lost_worker_truncates_all_agents():
    options = ExecutorOptions(on_worker_loss="restart")
    with ParallelVectorEnv([Dying] * 2, num_workers=2, options=options) as envs:
        envs.reset(seed=0)
        actions = draw(envs)
        actions["dog"][:] = [[0.0, 0.0], [1.0, 0.0]]
        _, rewards, terminations, truncations, infos = envs.step(actions)
        assert infos["interrupted"].tolist() == [False, True]
        for agent in AGENTS:
            assert truncations[agent].tolist() == [False, True]
            assert not terminations[agent].any()
            assert rewards[agent][1] == 0
        assert infos["final_obs"][1]["dog"]["flock"] == 2  # where it was
        actions["dog"][:] = 0
        envs.step(actions)
        assert envs.get_attr("num_steps") == (2, 1)


def test_rows_by_agent_are_those_of_the_agents():
    make_envs = [Flock] * 2
    with (
        ParallelVectorEnv(make_envs, num_workers=1) as dicts,
        closing(AgentRowsEnv(make_envs, num_workers=1)) as rows,
    ):
        assert rows.num_envs == 6
        assert (
            rows.observation_space
            == rows.single_observation_space
            == spaces.Box(0, 100, (2,), np.float64)
        )
        by_agent, _ = dicts.reset(seed=4)
        by_row, infos = rows.reset(seed=4)
        assert infos[0]["name"] == "sheep_0"
        assert infos[2] == {}
        rng = np.random.default_rng(0)
        num_left = num_ends = 0
        for _ in range(2 * LENGTH):
            for i, agent in enumerate(dicts.possible_agents):
                assert np.array_equal(by_row[i::3], by_agent[agent])
            actions = rng.integers(1, 4, 6)
            was_active = dicts.active
            by_agent, rewards, terminations, truncations, _ = dicts.step(
                {agent: actions[i::3] for i, agent in enumerate(dicts.possible_agents)}
            )
            by_row, paid, terminated, truncated, infos = rows.step(actions)
            assert paid.dtype == np.float32
            is_over = np.all(
                [terminations[a] | truncations[a] for a in dicts.possible_agents],
                axis=0,
            )
            for i, agent in enumerate(dicts.possible_agents):
                assert paid[i::3].tolist() == rewards[agent].tolist()
                counts = was_active[agent] | is_over
                assert (
                    terminated[i::3].tolist() == (terminations[agent] & counts).tolist()
                )
                assert (
                    truncated[i::3].tolist() == (truncations[agent] & counts).tolist()
                )
                assert all(
                    ("terminal_observation" in info) == is_over[0] for info in infos
                )
                num_left += int((terminated | truncated)[i::3].sum())
            num_ends += int(is_over.sum())
        assert num_ends == 8
        assert num_left > 3 * num_ends  # some left before the end
        with pytest.raises(ValueError, match="expected 6 actions"):
            rows.step(actions[:5])


def numbered():
    """Return an env of agents that are numbers, for two steps; infos have entries of agents, and others."""
    infos = [
        {
            0: {"own": count},
            1: {"own": 10 + count},
            "all": {"clock": count},
            "weather": 7,
        }
        for count in range(3)
    ]
    seen = dict.fromkeys([0, 1], np.zeros(2, np.float32))
    paid = dict.fromkeys(seen, 1.0)
    stay = dict.fromkeys(seen, False)
    leave = dict.fromkeys(seen, True)
    answers = [
        ([0, 1], (seen, paid, stay, stay, infos[1])),
        ([], (seen, paid, leave, stay, infos[2])),
    ]
    return Scripted([0, 1], answers=answers, first=(seen, infos[0]))


def test_errors_name_this_class_and_its_calls():
    with closing(
        ParallelVectorEnv([numbered] * 2, num_workers=1, autoreset_mode="Disabled")
    ) as envs:
        actions = dict.fromkeys([0, 1], np.zeros(2, np.int64))
        envs.reset()
        with pytest.raises(
            ActionError, match="expected a dict of actions by agent, got ndarray"
        ):
            envs.step(np.zeros(2))
        with pytest.raises(ActionError, match="expected actions of 0, 1, got one of 2"):
            envs.step({**actions, 2: actions[0]})
        for _ in range(2):
            envs.step(actions)
        with pytest.raises(
            ResetNeeded,
            match=r"Call reset\(\), or reset\(options={'reset_mask': mask}\)",
        ):
            envs.step(actions)
        with pytest.raises(AttributeError, match=r"^call nowhere failed"):
            envs.call("nowhere")
    with pytest.raises(ClosedEnvironmentError, match=r"`ParallelVectorEnv`"):
        envs.step(actions)


def test_infos_of_agents_and_of_none():
    with ParallelVectorEnv([numbered] * 2, num_workers=1) as dicts:
        _, infos = dicts.reset()
        assert infos[1]["own"].tolist() == [10, 10]
        assert infos["all"]["clock"].tolist() == [0, 0]
        assert infos["_all"].all()
        *_, infos = dicts.step(dict.fromkeys([0, 1], np.zeros(2, np.int64)))
        assert infos["all"]["clock"].tolist() == [1, 1]
        assert infos["weather"].tolist() == [7, 7]


@needs("sb3")
@pytest.mark.parametrize("base_class", ["gymnasium", "stable_baselines3"])
def test_rows_have_the_infos_of_their_agents(base_class):
    with closing(
        concat_vec_envs_v1(numbered, 2, num_cpus=1, base_class=base_class)
    ) as rows:
        rows.reset()
        infos = rows.step(np.zeros(4, np.int64))[-1]
        assert [info["own"] for info in infos] == [1, 11, 1, 11]
        assert not any({"all", "clock", "weather"} & info.keys() for info in infos)


def test_rows_need_like_agents():
    with pytest.raises(RuntimeError, match="not equivalent"):
        ParallelVectorEnv([Village, Flock], num_workers=1)
    with pytest.raises(ValueError, match="pad_observations"):
        AgentRowsEnv([Village], num_workers=1)
    with pytest.raises(FactoryError, match="expected a callable"):
        concat_vec_envs_v1(Flock(), 2)
    with pytest.raises(ValueError, match="base_class"):
        concat_vec_envs_v1(Flock, 2, base_class="stable_baselines")


def make_spread(render_mode=None):
    from mpe2 import simple_spread_v3

    return simple_spread_v3.parallel_env(max_cycles=5, render_mode=render_mode)


@needs("dev")
@pytest.mark.filterwarnings("ignore")
def test_rows_are_those_of_supersuit():
    import supersuit

    with (
        closing(
            supersuit.concat_vec_envs_v1(
                supersuit.pettingzoo_env_to_vec_env_v1(make_spread()), 2
            )
        ) as theirs,
        closing(concat_vec_envs_v1(make_spread, 2, num_cpus=2)) as ours,
    ):
        assert (ours.num_envs, ours.observation_space, ours.action_space) == (
            theirs.num_envs,
            theirs.observation_space,
            theirs.action_space,
        )
        observations, infos = ours.reset(seed=3)
        expected, their_infos = theirs.reset(seed=3)
        assert np.array_equal(observations, expected)
        assert infos == their_infos
        num_ends = 0
        for step in range(5):
            actions = np.arange(6) * (step + 1) % 5
            observations, *rest, infos = ours.step(actions)
            expected, *their_rest, their_infos = theirs.step(actions)
            for mine, other in zip(rest, their_rest, strict=True):
                assert np.array_equal(mine, other)
            for mine, other in zip(infos, their_infos, strict=True):
                assert mine.keys() == other.keys()
                if "terminal_observation" in mine:
                    assert np.array_equal(
                        mine["terminal_observation"], other["terminal_observation"]
                    )
                    num_ends += 1
            # An env that resets itself without a seed begins another episode.
            if not num_ends:
                assert np.array_equal(observations, expected)
        assert num_ends == 6


@needs("dev", "sb3")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("render_mode", [None, "rgb_array"])
@pytest.mark.parametrize("base_class", ["gymnasium", "stable_baselines3"])
def test_rows_have_the_attributes_of_supersuits(base_class, render_mode):
    import supersuit

    make = functools.partial(make_spread, render_mode)
    one = supersuit.pettingzoo_env_to_vec_env_v1(make())
    with (
        closing(supersuit.concat_vec_envs_v1(one, 2, base_class=base_class)) as theirs,
        closing(concat_vec_envs_v1(make, 2, num_cpus=1, base_class=base_class)) as ours,
    ):
        metadata = {
            key: value
            for key, value in ours.unwrapped.metadata.items()
            if key != "autoreset_mode"
        }
        assert metadata == theirs.unwrapped.metadata
        assert metadata["name"] == "simple_spread_v3"
        assert ours.metadata == ours.unwrapped.metadata
        assert ours.render_mode == theirs.render_mode == render_mode
        assert ours.env_is_wrapped(gymnasium.Wrapper) == theirs.env_is_wrapped(
            gymnasium.Wrapper
        )


@needs("meltingpot")
@pytest.mark.filterwarnings("ignore")  # of what PettingZoo's own test imports
def test_melting_pot_is_a_parallel_env():
    from pettingzoo.test import parallel_api_test

    make_env = MeltingPotFactory(
        "prisoners_dilemma_in_the_matrix__repeated",
        keys=("RGB", "INVENTORY"),
        max_steps=8,
    )
    with closing(parallel_env(make_env)) as env:
        parallel_api_test(env, num_cycles=30)
        assert env.possible_agents == ["player_0", "player_1"]
        assert env.observation_space("player_0")["RGB"] == spaces.Box(
            0, 255, (40, 40, 3), np.uint8
        )
        assert env.state().ndim == 3
        with pytest.raises(ActionError, match="none of player_1"):
            env.reset(), env.step({"player_0": 0})


@needs("meltingpot")
def test_melting_pot_gives_agents_the_rows_of_its_batches():
    make_env = MeltingPotFactory(
        "prisoners_dilemma_in_the_matrix__repeated", deterministic=True, max_steps=4
    )
    with (
        ParallelVectorEnv([make_env] * 2, num_workers=1) as envs,
        ParallelEnv(2, make_env, num_workers=1) as ours,
    ):
        observations, _ = envs.reset(seed=[8, 9])
        root = ours.reset(seed=[8, 9])
        for step in range(4):
            for i, agent in enumerate(envs.possible_agents):
                for name, values in observations[agent].items():
                    assert np.array_equal(
                        values, root["agents", "observation", name][:, i]
                    ), name
            actions = {
                agent: np.array([1, 2 + i])
                for i, agent in enumerate(envs.possible_agents)
            }
            root["agents", "action"] = torch.tensor([[1, 1], [2, 3]])
            following = ours.step(root)["next"]
            observations, rewards, terminations, truncations, infos = envs.step(actions)
            for i, agent in enumerate(envs.possible_agents):
                assert np.array_equal(
                    rewards[agent], following["agents", "reward"][:, i, 0]
                )
                assert truncations[agent].all() == (step == 3)
                assert not terminations[agent].any()
            root = following
        last = infos["final_obs"][1]["player_1"]["RGB"]
        assert np.array_equal(last, following["agents", "observation", "RGB"][1, 1])


@needs("meltingpot")
@pytest.mark.filterwarnings("ignore")
def test_deterministic_substrates_pass_pettingzoos_seed_test():
    from pettingzoo.test import parallel_seed_test

    factory = MeltingPotFactory(
        "commons_harvest__open", keys=("RGB",), deterministic=True
    )
    parallel_seed_test(functools.partial(parallel_env, factory), num_cycles=20)


def test_stacked_agents_need_no_pettingzoo(monkeypatch):
    name = "envherd.executor.facades.pettingzoo.stacked"
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "pettingzoo", None)
    with closing(importlib.import_module(name).parallel_env(AgentsEnv)) as env:
        observations, _ = env.reset(seed=0)
        assert list(observations) == env.possible_agents == env.agents
        with pytest.raises(ActionError, match="got one of nobody"):
            env.step(dict.fromkeys([*env.agents, "nobody"], 0))


def test_agents_without_names_have_the_same_ones_everywhere():
    env = parallel_env(AgentsEnv)
    spec = AgentsEnv().spec
    assert (
        env.possible_agents
        == spec.reward_names()
        == list(PerPlayer({"*": print}, spec).names)
    )
    assert (
        tuple(env.possible_agents)
        == evaluate(None, AgentsEnv, 1, num_workers=1).players
    )
