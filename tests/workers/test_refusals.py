"""Envs that break the API of their family, and inputs that it does not have: one table, env and message.

Every row is an env that a user's factory returns, in a `SerialEnv`: it is refused as it is built, as it is reset, or in
a step. Libraries are imported by the makers of the envs.
"""

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.vector import AutoresetMode

from envherd.executor import (
    EnvError,
    ExecutorOptions,
    FactoryError,
    ResetNeeded,
    SerialEnv,
    SpecError,
)
from envherd.workers.adapters.common.tree import RESERVED_NAMES
from envherd.workers.adapters.gymnasium.vector import GymnasiumVectorAdapter
from envherd.workers.adapters.registry import find_adapter
from tests.envs import torch_simulators as simulators
from tests.envs.gymnasium_envs import Custom, Echo
from tests.envs.vector_envs import LoopVectorEnv
from tests.extras import needs, skip_without
from tests.oracles import isaaclab_standin as isaac
from tests.workers import test_gymnasium_vector as vectors
from tests.workers.test_gymnasium_adapter import Scripted, answering

Make = Callable[[], Any]


@pytest.fixture(autouse=True)
def _one_simulator_after_another():
    yield
    isaac.forget_simulator()


# ---- Gymnasium ---------------------------------------------------------------------------------------------------


class Lying(Echo):
    """Observes a value that is not in its space."""

    def __init__(self, space: spaces.Space, value: Any) -> None:
        super().__init__(space)
        self.value = value

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self.value, {}


def without(name: str) -> Any:
    env = Scripted()
    setattr(env, name, None)
    return env


def reserved(name: str) -> Any:
    return Echo(spaces.Dict({name: spaces.Discrete(2), "other": spaces.Discrete(2)}))


class OwnVector(CartPoleVectorEnv):
    """Gymnasium has others like it, which know no masks."""

    __module__ = "gymnasium.envs.somewhere"

    def step(self, action: Any) -> Any:
        return super().step(action)


class NoInfos(gymnasium.vector.VectorWrapper):
    """Leaves out its infos."""

    def step(self, actions: Any) -> Any:
        *values, _ = super().step(actions)
        return *values, {}


def declared(mode: AutoresetMode, *, says_mode: bool) -> Any:
    """Return the adapter of a vector env in SAME_STEP mode with another mode."""
    return GymnasiumVectorAdapter(
        LoopVectorEnv(2, AutoresetMode.SAME_STEP, says_mode=says_mode),
        autoreset_mode=mode,
    )


class FourValues(gymnasium.vector.VectorWrapper):
    """Steps as before Gymnasium 0.26."""

    def step(self, actions: Any) -> Any:
        return super().step(actions)[:4]


PAIR = spaces.Dict(a=spaces.Discrete(2), b=spaces.Discrete(2))
NO_FLAGS: list[Any] = [None, 2, -1, 0.5, float("nan"), 1j, np.int8(2), "False", "", {}]
NO_FLAGS += [np.array([True, False]), np.array([1, 0]), np.array([])]
FIVE = r"expected \(observation, reward, terminated, truncated, info\), "

# ---- dm_env ------------------------------------------------------------------------------------------------------


def dm_env_of(observation: Any = None, action: Any = None, **changes: Any) -> Any:
    """Return a scripted dm_env; `reset` and `answer` replace what it returns."""
    from tests.workers.test_dm_env_adapter import Scripted as ScriptedDmEnv

    env = ScriptedDmEnv(observation, action)
    for name, value in changes.items():
        setattr(env, name, value)
    return env


def dm_step(kind: str, *values: Any) -> Any:
    """Return an env whose steps return a time step made by a function of dm_env, or the value itself without one."""
    import dm_env

    answer = getattr(dm_env, kind)(*values) if kind else values[0]
    return dm_env_of(
        answer=answer, reset=lambda: dm_env.restart(np.zeros(2, np.float32))
    )


def dm_reserved(name: str) -> Any:
    from dm_env import specs

    return dm_env_of({name: specs.Array((), float), "other": specs.Array((), float)})


# ---- PettingZoo --------------------------------------------------------------------------------------------------


def zoo(*args: Any, **kwargs: Any) -> Any:
    from tests.envs.pettingzoo_envs import Scripted as ScriptedZoo

    return ScriptedZoo(*args, **kwargs)


def zoo_step(
    change: Callable[[Any], Any], agents: Any = ("a_0", "a_1"), **ends: Any
) -> Any:
    """Return an env of two agents whose first step returns a changed answer; `ends` are the agents' flags."""
    from tests.envs.pettingzoo_envs import outcome

    alive = dict.fromkeys(("a_0", "a_1"), (False, False))
    return zoo(answers=[(list(agents), change(outcome(alive | ends)))])


def grouped(env: str | Make, **group_map: list[str]) -> Any:
    from envherd.workers.adapters.named import PettingZooFactory

    return PettingZooFactory(
        f"mpe2.simple_{env}_v3" if isinstance(env, str) else env, group_map=group_map
    )()


def unnamed_agents() -> Any:
    env = zoo()
    del env.possible_agents
    return env


def no_seed() -> Any:
    env = zoo()
    env.reset = lambda seed, options: dict[str, Any]()[f"seed {seed}"]
    return env


def short_masks() -> Any:
    """Return an env whose masks are too short from its second reset on: the first tells the adapter their shapes."""
    from tests.envs.pettingzoo_envs import Village

    env: Any = Village()
    tell, reset = env._tell, env.reset

    def tell_less(agent: str) -> dict[str, Any]:
        return (
            {**tell(agent), "action_mask": np.ones(2, np.int8)}
            if "sheep" in agent
            else tell(agent)
        )

    def reset_once(*args: Any, **kwargs: Any) -> Any:
        given = reset(*args, **kwargs)
        env._tell = tell_less
        return given

    env.reset = reset_once
    return env


def tictactoe() -> Any:
    import pettingzoo

    return pettingzoo.make("aec", "classic/tictactoe-v3")


def with_entry(place: int, agent: str, value: Any) -> Callable[[Any], Any]:
    """Replace the value of an agent in one of the five dicts of a step."""
    return lambda answer: (
        *answer[:place],
        {**answer[place], agent: value},
        *answer[place + 1 :],
    )


def unlike_masks() -> Any:
    """Return an env of two agents whose spaces differ in the size of the action mask."""
    masks = {
        "a_0": spaces.Box(0, 1, (2,), np.int8),
        "a_1": spaces.Box(0, 1, (3,), np.int8),
    }
    seen = spaces.Box(-9, 9, (2,), np.float32)
    own = {
        agent: spaces.Dict(observation=seen, action_mask=mask)
        for agent, mask in masks.items()
    }
    return zoo(
        own, {agent: (space, spaces.Discrete(2)) for agent, space in own.items()}
    )


# ---- others ------------------------------------------------------------------------------------------------------


def envpool_of(**config: Any) -> Any:
    from tests.workers.test_envpool import pool

    return pool(**config)


def vmas_balance() -> Any:
    import vmas

    return vmas.make_env("balance", num_envs=2)


def next_step_of_torchrl() -> Any:
    from tests.workers.test_torchrl_protocol import vector_env

    env = vector_env(AutoresetMode.DISABLED)
    # If gym is also installed, TorchRL may accept it.
    env._env.autoreset_mode = AutoresetMode.NEXT_STEP
    return env


class OwnHistory:
    """A history of observations that is not IsaacLab's."""

    _buffer = buffer = torch.zeros(4, 3)

    def reset(self, batch_ids: Any) -> None:
        """Keep the values."""

    def append(self, data: Any) -> None:
        """Keep the values."""


def managed_with_own_history() -> Any:
    env = isaac.make_managed(history_length=3)
    env.observation_manager._group_obs_term_history_buffer["policy"]["state"] = (
        OwnHistory()
    )
    return env


def unlike_players() -> Any:
    from tests.workers.test_meltingpot import _raw

    env = _raw()
    specs = env.observation_spec()
    del specs[1]["INVENTORY"]
    env.observation_spec = MethodType(lambda _: specs, env)
    return env


def atari() -> Any:
    skip_without("atari")
    return vectors.atari(AutoresetMode.NEXT_STEP, batch_size=1)


class OldReset(Scripted):
    """An env of Gymnasium by its class, whose `reset` returns the observation alone."""

    def reset(self, **_: Any) -> Any:
        return super().reset()[0]


class OldEnv:
    """An env of the API before Gymnasium, of any class."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self) -> Any: ...

    def step(self, action: int) -> Any: ...


# ---- the table ---------------------------------------------------------------------------------------------------

TORCH = {"options": ExecutorOptions(env_type="torch")}
#: What -> (how the env is made, the message, and arguments of `SerialEnv` besides one env).
BUILT: dict[str, tuple[Any, ...]] = {
    **{
        f"gymnasium: no {name}": (
            partial(without, name),
            f"reading {name} failed.*got builtins.NoneType",
        )
        for name in ("observation_space", "action_space")
    },
    **{
        f"gymnasium: {name} at the root": (
            partial(reserved, name),
            f"got '{name}' at the root. Rename it",
        )
        for name in RESERVED_NAMES
    },
    "vector: two resets of a row": (
        partial(vectors.async_, AutoresetMode.NEXT_STEP, shared_memory=False),
        r"resets a row again.*DISABLED",
    ),
    "vector: a wrapper without masks": (
        lambda: gymnasium.wrappers.vector.NormalizeObservation(
            vectors.sync(AutoresetMode.NEXT_STEP)
        ),
        "NormalizeObservation",
    ),
    "vector: an env without masks": (
        partial(OwnVector, 3),
        r"OwnVector.*vectorization_mode='sync'",
    ),
    "vector: no mode": (
        partial(LoopVectorEnv, 2, AutoresetMode.SAME_STEP, says_mode=False),
        r"autoreset_mode.*guessing loses observations.*GymnasiumVectorAdapter",
    ),
    "vector: two modes": (
        partial(declared, AutoresetMode.DISABLED, says_mode=True),
        "SameStep and Disabled",
    ),
    "atari: some rows at a time": (atari, "batch_size 1 of 2"),
    "vmas: an env of its own": (vmas_balance, r"torchrl\.envs\.VmasWrapper\(env\)"),
    "old gym: its class": (OldEnv, r"shimmy\.GymV21CompatibilityV0\(env=env\)"),
    **{
        f"dm_env: {name} at the root": (
            partial(dm_reserved, name),
            f"got '{name}' at the root",
        )
        for name in ("reward", "next")
    },
    "dm_env: no spec": (
        partial(dm_env_of, action=3),
        r"reading the spec of action failed.*got builtins.int",
    ),
    "envpool: several players": (
        partial(envpool_of, max_num_players=2),
        "max_num_players=2",
    ),
    "pettingzoo: an agent in no group": (
        partial(grouped, "spread", x=["agent_0", "agent_1"]),
        "'agent_2' in none",
    ),
    "pettingzoo: an agent in two groups": (
        partial(grouped, "spread", x=["agent_0", "agent_1", "agent_2"], y=["agent_1"]),
        "'agent_1' twice",
    ),
    "pettingzoo: another agent in a group": (
        partial(grouped, "spread", x=["agent_0", "agent_1", "agent_2", "agent_3"]),
        "'agent_3' which the env does not have",
    ),
    "pettingzoo: a group named reward": (
        partial(grouped, "spread", reward=["agent_0", "agent_1", "agent_2"]),
        "got 'reward'",
    ),
    "pettingzoo: a group of unlike agents": (
        partial(
            grouped, "tag", all=["adversary_0", "adversary_1", "adversary_2", "agent_0"]
        ),
        "expected agents of one group to have the same keys, shapes and dtypes",
    ),
    **{
        f"pettingzoo: an agent named {name}": (
            partial(zoo, [name]),
            "expected names of groups",
        )
        for name in ("reward", "next_0", "state")
    },
    "pettingzoo: text": (
        partial(zoo, ["a_0"], {"a_0": (spaces.Text(4), spaces.Discrete(2))}),
        "a_0 failed: expected values of a fixed shape",
    ),
    "pettingzoo: unlike masks in a group": (
        partial(grouped, unlike_masks, a=["a_0", "a_1"]),
        "different action masks",
    ),
    "pettingzoo: an old reset": (
        partial(zoo, first={"a_0": np.zeros(2, np.float32)}),
        r"PettingZoo before 1\.23 returned observations alone",
    ),
    "pettingzoo: no names": (
        unnamed_agents,
        "expected possible_agents, got none from Scripted",
    ),
    "pettingzoo: a reset that raises": (
        no_seed,
        r"KeyError: 'seed None' \(in the env's reset\(seed=None, options=None\), .*\) \(env 0, phase build\)",
    ),
    "pettingzoo: turns": (tictactoe, r"turn_based_aec_to_parallel\(env\)"),
    "torch: no mode": (simulators.Silent, r"says when it resets.*resets='never'"),
    "torch: next step": (simulators.NextStep, "NEXT_STEP.*DISABLED"),
    "torch: one row": (partial(gymnasium.make, "CartPole-v1"), "num_envs", TORCH),
    "isaaclab: several agents": (
        isaac.DirectMARLEnv,
        "with one agent, got DirectMARLEnv with several",
    ),
    "isaaclab: several agents as one": (
        isaac.multi_agent_to_single_agent,
        "with one agent, got DirectRLEnv with several",
    ),
    "isaaclab: two simulators": (
        isaac.make_direct,
        r"one simulator in a process.*num_workers",
        {"num_envs": 2},
    ),
    "torchrl: next step": (
        next_step_of_torchrl,
        r"NEXT_STEP. Build it with autoreset_mode=AutoresetMode.DISABLED",
    ),
    "meltingpot: unlike players": (
        unlike_players,
        "player_0 and player_1 differing in INVENTORY",
    ),
}
#: What -> (how the env is made, the message, and arguments of `reset`).
RESET: dict[str, tuple[Any, ...]] = {
    **{
        f"gymnasium: returns {first!r}": (
            partial(Scripted, first=first),
            r"expected \(observation, info dict\), got .*before 0\.26",
        )
        for first in (
            np.zeros(2),
            (np.zeros(2),),
            [np.zeros(2), {}],
            (np.zeros(2), None),
            None,
        )
    },
    "gymnasium: a keyword": (Scripted, r"got `level`.*reset\(options=", {"level": 3}),
    "gymnasium: a key less": (
        partial(Lying, PAIR, {"a": 0}),
        r"reading observation failed: expected a dict with 'a', 'b', got one without 'b'",
    ),
    "gymnasium: a key more": (
        partial(Lying, PAIR, {"a": 0, "b": 1, "c": 2}),
        r"got one that has 'c' too",
    ),
    "gymnasium: no dict": (partial(Lying, PAIR, 3), "got int"),
    "gymnasium: a nested key less": (
        partial(Lying, spaces.Dict(x=PAIR, y=spaces.Text(3)), {"x": {"b": 1}, "y": ""}),
        r"reading observation\['x'\].*without 'a'",
    ),
    "gymnasium: a tuple too short": (
        partial(Lying, spaces.Tuple((PAIR, PAIR)), ({"a": 0, "b": 1},)),
        "expected a tuple of 2, got tuple of 1",
    ),
    "gymnasium: a tuple too long": (
        partial(
            Lying, spaces.Tuple((spaces.Discrete(2), spaces.Discrete(2))), (1, 2, 3)
        ),
        "expected a tuple of 2, got tuple of 3",
    ),
    "gymnasium: no plain data": (
        partial(Lying, spaces.Dict(odd=Custom()), {"odd": ["red", object()]}),
        r"reading odd\[1\] failed.*got a builtins.object",
    ),
    "vector: a mask among the options": (
        partial(vectors.sync, AutoresetMode.DISABLED),
        "got a reset_mask among the options",
        {"options": {"reset_mask": np.ones(3, bool)}},
    ),
    "dm_env: no time step": (
        partial(dm_env_of, reset=lambda: (np.zeros(2), {})),
        r"reset failed: expected a dm_env.TimeStep, got tuple",
    ),
    "dm_env: options": (
        dm_env_of,
        "expected no keyword for a dm_env env, got `options`",
        {"options": {"a": 1}},
    ),
    "envpool: options": (
        envpool_of,
        "no options for EnvPool, got `options`",
        {"options": {"a": 1}},
    ),
    "pettingzoo: a keyword": (
        zoo,
        "expected no keyword but `options` for a PettingZoo env, got `level`",
        {"level": 1},
    ),
    "pettingzoo: short masks": (
        short_masks,
        r"the action mask of sheep_0 failed: expected flags of shape \(3,\)",
    ),
}
#: What -> (how the env is made, the message).
STEPPED: dict[str, tuple[Make, str]] = {
    **{
        f"gymnasium: reward {reward!r}": (
            partial(answering, reward=reward),
            f"expected one number as the reward, {got}",
        )
        for reward, got in (
            (None, "got None"),
            ("1.0", "got '1.0'"),
            (np.zeros(2), r"got ndarray of float64 \(2,\)"),
            (np.array([]), r"got ndarray of float64 \(0,\)"),
            ({"a": 1}, "got dict"),
            ([1, [2]], "got list"),
        )
    },
    **{
        f"gymnasium: {name} {flag!r}": (
            partial(answering, **{name: flag}),
            f"expected a bool as `{name}`",
        )
        for name in ("terminated", "truncated")
        for flag in NO_FLAGS
    },
    "gymnasium: four values": (
        partial(Scripted, (np.zeros(2), 0.0, False, {})),
        FIVE
        + r"got 4 values \(ndarray, float, bool, dict\).*before 0\.26.*shimmy\.GymV21CompatibilityV0",
    ),
    "gymnasium: three values": (
        partial(Scripted, (np.zeros(2), 0.0, False)),
        f"{FIVE}got 3 values",
    ),
    "gymnasium: six values": (
        partial(Scripted, (1, 2, 3, 4, 5, 6)),
        f"{FIVE}got 6 values",
    ),
    "gymnasium: nothing": (Scripted, f"{FIVE}got NoneType"),
    "gymnasium: an observation": (partial(Scripted, np.zeros(2)), f"{FIVE}got ndarray"),
    "vector: four values": (
        lambda: FourValues(vectors.sync(AutoresetMode.DISABLED)),
        r"expected \(observations, rewards, terminations, truncations, infos\), got tuple",
    ),
    "vector: another mode": (
        partial(declared, AutoresetMode.NEXT_STEP, says_mode=False),
        "it is in SAME_STEP mode",
    ),
    "vector: lost observations": (
        partial(LoopVectorEnv, 3, AutoresetMode.SAME_STEP, loses_ends=True),
        r"it reuses its buffer.*DISABLED",
    ),
    "vector: no last observations": (
        lambda: NoInfos(LoopVectorEnv(2, AutoresetMode.SAME_STEP)),
        "its last observation is lost",
    ),
    "vector: all rows are reset": (
        partial(LoopVectorEnv, 3, AutoresetMode.NEXT_STEP, knows_masks=False),
        r"rows \[.*\] and no others.*does not know",
    ),
    "dm_env: no reward": (
        partial(dm_step, "transition", None, np.zeros(2)),
        "one number as the reward, got None",
    ),
    "dm_env: two rewards": (
        partial(dm_step, "transition", np.zeros(2), np.zeros(2)),
        "one number as the reward",
    ),
    "dm_env: no discount": (
        partial(dm_step, "truncation", 0.0, np.zeros(2), None),
        "expected a discount with the last step",
    ),
    "dm_env: four values": (
        partial(dm_step, "", (np.zeros(2), 0.0, False, {})),
        "expected a dm_env.TimeStep, got tuple",
    ),
    "pettingzoo: four values": (
        partial(zoo_step, lambda answer: answer[:4]),
        r"expected \(observations, rewards, .*got 4 values \(dict, dict, dict, dict\)",
    ),
    "pettingzoo: nothing": (partial(zoo_step, lambda _: None), "got NoneType"),
    "pettingzoo: an observation less": (
        partial(zoo_step, lambda answer: ({"a_0": answer[0]["a_0"]}, *answer[1:])),
        "got none of a_1",
    ),
    "pettingzoo: another agent": (
        partial(zoo_step, lambda answer: answer, b_7=(False, False)),
        "expected agents among a_0, a_1, got 'b_7'",
    ),
    "pettingzoo: an agent that was not named": (
        partial(zoo_step, lambda answer: answer, ["a_0", "a_1", "b_7"]),
        "Name all agents that may ever appear",
    ),
    **{
        f"pettingzoo: observation {value!r}": (
            partial(zoo_step, with_entry(0, "a_1", value)),
            r"a_1/observation failed: expected float32 \(2,\), got",
        )
        for value in (np.ones(3, np.float32), 1.0)
    },
    "pettingzoo: no reward": (
        partial(zoo_step, with_entry(1, "a_1", "x")),
        "expected one number as the reward of a_1",
    ),
    "pettingzoo: no flag": (
        partial(zoo_step, with_entry(2, "a_0", 2)),
        "expected a bool as `terminations",
    ),
    "pettingzoo: no flag of a truncation": (
        partial(zoo_step, with_entry(3, "a_0", 2)),
        "expected a bool as `truncations",
    ),
    "old gym: a class of gymnasium": (
        partial(OldReset, None),
        r"shimmy\.GymV21CompatibilityV0",
    ),
    "torch: no last observations": (simulators.Losing, r"final_obs.*compute_final_obs"),
    "torch: its own buffer": (simulators.Aliasing, "view of its observation buffer"),
    "isaaclab: another history": (
        managed_with_own_history,
        r"expected IsaacLab's CircularBuffer, got a OwnHistory",
    ),
    "isaaclab: a history and masks": (
        partial(
            isaac.make_managed,
            compute_final_obs=False,
            resets_by_mask=True,
            history_length=3,
            max_length=1,
        ),
        "They are lost: .*observations with a history need resets by _reset_idx",
    ),
    "isaaclab: its own buffer and masks": (
        partial(
            isaac.make_direct,
            compute_final_obs=False,
            resets_by_mask=True,
            max_length=1,
        ),
        "view of its observation buffer",
    ),
}
#: What -> how the env of several rows is made. The executor refuses such steps before the adapter.
NOT_RESET: dict[str, Make] = {
    "vector: rows before their reset": partial(vectors.sync, AutoresetMode.DISABLED),
    "envpool: rows before their reset": envpool_of,
}
#: First word of a row -> the extra that it needs.
EXTRAS = {"dm_env": "dm-control"}
EXTRAS |= {
    family: family
    for family in ("atari", "envpool", "meltingpot", "pettingzoo", "torchrl", "vmas")
}


def each(table: dict[str, Any]) -> pytest.MarkDecorator:
    """Return the mark that runs a test for every row of a table."""
    extras = {
        name: EXTRAS.get(name, EXTRAS.get(name.partition(":")[0])) for name in table
    }
    return pytest.mark.parametrize(
        "name",
        [
            pytest.param(name, marks=[needs(extra)] if extra else [])
            for name, extra in extras.items()
        ],
    )


@pytest.mark.filterwarnings("ignore")  # the libraries' own
@each(BUILT)
def test_refused_as_it_is_built(name: str) -> None:
    make_env, message, *more = BUILT[name]
    with pytest.raises((FactoryError, SpecError), match=message):
        SerialEnv(**{"num_envs": 1, "make_env": make_env, **(more[0] if more else {})})


@pytest.mark.filterwarnings("ignore")
@each(RESET)
def test_refused_as_it_is_reset(name: str) -> None:
    make_env, message, *arguments = RESET[name]
    with SerialEnv(1, make_env, seed=0) as env, pytest.raises(EnvError, match=message):
        env.reset(**(arguments[0] if arguments else {}))


@pytest.mark.filterwarnings("ignore")
@each(STEPPED)
def test_refused_in_a_step(name: str) -> None:
    make_env, message = STEPPED[name]
    with SerialEnv(1, make_env, seed=0) as env, pytest.raises(EnvError, match=message):
        env.rollout(10, break_when_any_done=False)


@pytest.mark.filterwarnings("ignore")
@each(NOT_RESET)
def test_an_adapter_refuses_to_step_rows_that_were_not_reset(name: str) -> None:
    env = NOT_RESET[name]()
    make: Any = find_adapter(env)
    adapter = make(env)
    with pytest.raises(
        ResetNeeded, match=r"expected running rows, got rows \[0, 1, 2\]"
    ):
        adapter.step([np.zeros(3, np.int64)])
    adapter.close()
