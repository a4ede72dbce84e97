"""The dm_env adapter on real dm_control and dmlab2d envs, compared with the same envs driven by hand."""

import os
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

from tests.extras import needs, skip_without

skip_without("dm-control")

import dm_env
import numpy as np
import pytest
from dm_env import specs

from envherd.shm.specs import Binary, Box, Discrete, EnvSpec, LeafSpec, Unbounded
from envherd.workers import plain
from envherd.workers.adapters.dm_env.adapter import DmEnvAdapter
from envherd.workers.errors import ResetNeeded
from tests.workers.adapter_values import drawn, stored


class Scripted(dm_env.Environment):
    """An env of given specs that answers with given time steps."""

    def __init__(
        self, observation: Any = None, action: Any = None, reward: Any = None
    ) -> None:
        self._observation_spec = observation or specs.Array((2,), np.float32)
        self._action_spec = action or specs.DiscreteArray(3)
        self._reward_spec = reward or super().reward_spec()
        self.actions: list[Any] = []
        self.answer: Any = dm_env.transition(0.0, np.zeros(2, np.float32))

    def reset(self):
        return dm_env.restart(self.answer.observation)

    def step(self, action):
        self.actions.append(action)
        return self.answer

    def observation_spec(self):
        return self._observation_spec

    def action_spec(self):
        return self._action_spec

    def reward_spec(self):
        return self._reward_spec


def scripted(
    reward: Any = 0.0, discount: Any = 1.0, step_type: Any = dm_env.StepType.MID
) -> DmEnvAdapter:
    """Return an adapter of an env with one answer."""
    env = Scripted()
    env.answer = dm_env.TimeStep(step_type, reward, discount, np.zeros(2, np.float32))
    return DmEnvAdapter(env)


@pytest.fixture(scope="module")
def suite():
    """Return dm_control's suite; where there is no display its import warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from dm_control import suite
    return suite


def lab(
    level: str = "chase_eat",
    names: tuple[str, ...] = ("WORLD.RGB",),
    seed: int | None = None,
    **settings: Any,
) -> Any:
    """Return a raw dmlab2d env of a bundled level."""
    skip_without("meltingpot")  # which brings dmlab2d
    import dmlab2d
    from dmlab2d import runfiles_helper

    native = dmlab2d.Lab2d(
        runfiles_helper.find(),
        {"levelName": level} | {k: str(v) for k, v in settings.items()},
    )
    return dmlab2d.Environment(native, list(names), seed=seed)


# --- dm_control ---


def test_spec_of_dm_control(suite):
    spec = DmEnvAdapter(suite.load("cartpole", "balance")).spec
    assert spec.observation == (
        LeafSpec(("position",), (3,), "float64"),
        LeafSpec(("velocity",), (2,), "float64"),
    )
    assert spec.action == (
        LeafSpec(("action",), (1,), "float64", Box(np.array(-1.0), np.array(1.0))),
    )
    assert spec.reward == (LeafSpec(("reward",), (1,), "float64"),)
    assert spec.metadata == {
        "env_id": "dm_control.suite.cartpole.Balance",
        "render_fps": pytest.approx(100),
    }
    assert EnvSpec.from_plain(plain.decode(plain.encode(spec.to_plain()))) == spec


@pytest.mark.slow
def test_seeds_composer_envs(suite):
    from dm_control import manipulation

    adapter = DmEnvAdapter(manipulation.load("reach_site_features"))
    first = adapter.reset(7)
    assert not np.array_equal(first[0], adapter.reset(8)[0])
    assert all(map(np.array_equal, first, adapter.reset(7)))
    assert ("jaco_arm/joints_pos",) in [leaf.key for leaf in adapter.spec.observation]


def test_stepping_on_after_the_end_is_refused(suite):
    adapter = DmEnvAdapter(
        suite.load("cartpole", "balance", task_kwargs={"time_limit": 0.05})
    )
    adapter.reset(0)
    while not any(adapter.step([np.zeros(1)])[2:]):
        pass
    with pytest.raises(ResetNeeded, match="the first one of a new episode"):
        adapter.step([np.zeros(1)])
    adapter.reset(0)
    assert adapter.step([np.zeros(1)])[2:] == (False, False)


@needs("torchrl")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("domain", "task"),
    [("cartpole", "balance"), ("finger", "turn_hard"), ("ball_in_cup", "catch")],
)
def test_keys_shapes_and_dtypes_are_those_of_torchrl(suite, domain, task):
    from torchrl import envs as torchrl_envs

    theirs = torchrl_envs.DMControlWrapper(suite.load(domain, task))
    ours = DmEnvAdapter(suite.load(domain, task)).spec
    for group in ("observation", "action", "reward"):
        expected = (
            theirs.input_spec["full_action_spec"]
            if group == "action"
            else theirs.output_spec[f"full_{group}_spec"]
        )
        leaves = {
            (key,): (tuple(leaf.shape), str(leaf.dtype).removeprefix("torch."))
            for key, leaf in expected.items()
        }
        assert {
            leaf.key: (leaf.shape, leaf.dtype) for leaf in getattr(ours, group)
        } == leaves


RENDER = """
    from dm_control import suite
    from envherd.workers.adapters.dm_env.adapter import DmEnvAdapter

    env = suite.load("cartpole", "balance")
    adapter = DmEnvAdapter(env)
    adapter.reset(0)
    {before}
    picture = adapter.render()
    seen = None if picture is None else (picture.shape, picture.dtype.name, bool(picture.any()))
    print(seen, adapter.render() is None)
"""


def run_apart(backend: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """Render in a separate process: dm_control selects its OpenGL backend at import."""
    script = textwrap.dedent(RENDER).format(before=before)
    environ = os.environ | {"MUJOCO_GL": backend}
    return subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env=environ,
        check=False,
        timeout=100,
    )


@pytest.mark.slow
def test_render_is_none_without_opengl(suite):
    done = run_apart("disable")
    assert done.stdout == "None True\n", done.stderr
    assert done.stderr.count("rendering is off for this env") == 1


@pytest.mark.slow
def test_render_draws_where_there_is_opengl(suite):
    done = run_apart("egl", "env.physics.render(camera_id=0); print('EGL')")
    if not done.stdout.startswith("EGL"):
        pytest.skip("no EGL on this machine")
    assert done.stdout == "EGL\n((240, 320, 3), 'uint8', True) False\n", done.stderr


# --- dmlab2d ---


def test_spec_of_dmlab2d():
    spec = DmEnvAdapter(
        lab(names=("WORLD.STEPS", "WORLD.TEXT", "WORLD.LAYER", "WORLD.RGB"))
    ).spec
    assert spec.observation == (
        LeafSpec(("WORLD.STEPS",), (1,), "int32"),
        LeafSpec(("WORLD.TEXT",), dtype="", is_side=True),
        LeafSpec(("WORLD.LAYER",), (9, 9, 3), "int32"),
        LeafSpec(("WORLD.RGB",), (144, 144, 3), "uint8"),
    )
    assert spec.action == (
        LeafSpec(("action", "MOVE"), (1,), "int32", Box(np.array(0), np.array(4))),
    )
    assert spec.reward == (LeafSpec(("reward",), (1,), "float64"),)


@pytest.mark.parametrize(("frame_cap", "is_capped"), [(5, True), (3000, False)])
def test_values_are_dmlab2ds_and_any_end_terminates(frame_cap, is_capped):
    names = ("WORLD.RGB", "WORLD.STEPS", "WORLD.TEXT")
    raw = lab(names=names, seed=2, episodeLengthFrames=frame_cap)
    adapter = DmEnvAdapter(lab(names=names, episodeLengthFrames=frame_cap))
    expected, rng = raw.reset(), np.random.default_rng(0)
    observation, terminated = adapter.reset(2), False
    while not terminated:
        values = stored(adapter.spec.observation, observation)
        np.testing.assert_array_equal(
            values["WORLD.RGB",], expected.observation["WORLD.RGB"]
        )
        assert values["WORLD.STEPS",] == [expected.observation["WORLD.STEPS"]]
        assert values["WORLD.TEXT",] == expected.observation["WORLD.TEXT"].item()
        np.testing.assert_array_equal(
            adapter.render(), expected.observation["WORLD.RGB"]
        )
        action = drawn(adapter.spec.action[0], rng)
        expected = raw.step({"MOVE": int(action[0])})
        observation, reward, terminated, truncated = adapter.step([action])
        assert stored(adapter.spec.reward, reward)["reward",] == [expected.reward]
        assert (terminated, truncated) == (expected.last(), False)
    assert (values["WORLD.STEPS",][0] == frame_cap - 1) == is_capped


def test_render_of_dmlab2d_needs_no_observation():
    adapter = DmEnvAdapter(lab(names=("WORLD.STEPS",)))
    adapter.reset(0)
    assert adapter.render().shape == (144, 144, 3)
    no_view = DmEnvAdapter(lab("examples/level_api", ("VIEW1",)))
    no_view.reset(0)
    assert no_view.render() is None


def test_actions_of_dmlab2d_by_name():
    adapter = DmEnvAdapter(lab("examples/level_api", ("VIEW3", "VIEW5"), steps=3))
    spec = adapter.spec
    assert [(leaf.key[1], leaf.dtype, leaf.is_side) for leaf in spec.action] == [
        ("REWARD_ACT", "int32", False),
        ("OBSERVATION_ACT", "float64", False),
        ("LOG_EVENT", "", True),
    ]
    adapter.reset(0)
    observation, reward, *flags = adapter.step(
        [np.array([3], np.int32), np.array([2.0]), "text"]
    )
    assert stored(spec.observation, observation)["VIEW3",].tolist() == [3, 4, 5]
    assert (reward, flags) == ([3.0], [False, False])


DYNAMIC_LEVEL = """
    local tensor = require 'system.tensor'
    local api = {_n = 1}
    function api:init(kwargs) end
    function api:observationSpec()
      return {{name = 'POINTS', type = 'tensor.DoubleTensor', shape = {0, 2}}}
    end
    function api:observation(index) return tensor.DoubleTensor(self._n, 2):fill(self._n) end
    function api:discreteActionSpec() return {{name = 'ACT', min = 0, max = 1}} end
    function api:discreteActions(actions) end
    function api:start(episode, seed) self._n = 1 end
    function api:advance(steps) self._n = self._n + 1 return steps < 5, 1 end
    return api
"""


def test_dynamic_shapes_of_dmlab2d_go_aside(tmp_path: Path):
    (tmp_path / "growing").mkdir()
    (tmp_path / "growing" / "init.lua").write_text(textwrap.dedent(DYNAMIC_LEVEL))
    adapter = DmEnvAdapter(lab("growing", ("POINTS",), levelDirectory=tmp_path))
    assert adapter.spec.observation == (LeafSpec(("POINTS",), dtype="", is_side=True),)
    assert adapter.reset(0)[0].shape == (1, 2)
    np.testing.assert_array_equal(
        adapter.step([np.zeros(1, np.int32)])[0][0], np.full((2, 2), 2.0)
    )


# --- any dm_env ---


@pytest.mark.parametrize(
    ("spec", "leaf"),
    [
        (
            specs.Array((2, 3), np.float32),
            LeafSpec(("observation",), (2, 3), "float32"),
        ),
        (specs.Array((), np.int64), LeafSpec(("observation",), (1,), "int64")),
        (specs.Array((0,), np.float32), LeafSpec(("observation",), (0,), "float32")),
        (specs.Array((2,), bool), LeafSpec(("observation",), (2,), "bool", Binary())),
        (
            specs.BoundedArray((2,), np.uint8, 0, [3, 4]),
            LeafSpec(
                ("observation",), (2,), "uint8", Box(np.array(0), np.array([3, 4]))
            ),
        ),
        (
            specs.BoundedArray((2,), np.float64, -np.inf, np.inf),
            LeafSpec(("observation",), (2,), "float64", Unbounded()),
        ),
        (specs.DiscreteArray(4), LeafSpec(("observation",), (), "int32", Discrete(4))),
        (specs.StringArray(()), LeafSpec(("observation",), dtype="", is_side=True)),
    ],
)
def test_observation_specs(spec, leaf):
    assert DmEnvAdapter(Scripted(spec)).spec.observation == (leaf,)


def test_nested_specs():
    array = specs.Array((), np.float32)
    env = Scripted(
        {"a": array, "b": {"c": [array, array]}, 3: array},
        [specs.DiscreteArray(3), {"x": specs.BoundedArray((2,), np.float32, -1, 1)}],
        {"me": array, "you": specs.Array((2,), np.float32)},
    )
    adapter = DmEnvAdapter(env)
    assert [leaf.key for leaf in adapter.spec.observation] == [
        ("a",),
        ("b", "c", "0"),
        ("b", "c", "1"),
        ("3",),
    ]
    assert [leaf.key for leaf in adapter.spec.action] == [
        ("action", "0"),
        ("action", "1", "x"),
    ]
    assert [(leaf.key, leaf.shape) for leaf in adapter.spec.reward] == [
        (("reward", "me"), (1,)),
        (("reward", "you"), (2,)),
    ]
    observation = {"a": np.float32(1), "b": {"c": [np.array(2.0), 3.0]}, 3: 4}
    env.answer = dm_env.transition(
        {"me": np.array(0.5), "you": np.ones(2)}, observation
    )
    pair = np.array([0.5, -0.5], np.float32)
    values, reward, *_ = adapter.step([2, pair])
    assert [
        float(value[0]) for value in stored(adapter.spec.observation, values).values()
    ] == [1, 2, 3, 4]
    assert [
        value.tolist() for value in stored(adapter.spec.reward, reward).values()
    ] == [[0.5], [1, 1]]
    assert (env.actions[0][0], env.actions[0][1]["x"] is pair) == (2, True)
    assert type(env.actions[0][0]) is np.int32


def test_list_at_the_root_goes_below_observation():
    spec = DmEnvAdapter(Scripted([specs.Array((2,), np.float32)] * 2)).spec
    assert [leaf.key for leaf in spec.observation] == [
        ("observation", "0"),
        ("observation", "1"),
    ]


@pytest.mark.parametrize(
    ("discount", "flags"),
    [
        (0.0, (True, False)),
        (np.float32(0), (True, False)),
        (1.0, (False, True)),
        (0.97, (False, True)),
        (np.array(1.0), (False, True)),
    ],
)
def test_discount_tells_the_kind_of_ending(discount, flags):
    assert (
        scripted(discount=discount, step_type=dm_env.StepType.LAST).step([0])[2:]
        == flags
    )
    assert scripted(discount=discount).step([0])[2:] == (False, False)


@pytest.mark.parametrize(
    "reward", [1, True, np.float32(1), np.array(1.0), np.array([1.0])]
)
def test_rewards_become_floats(reward):
    adapter = scripted(reward)
    assert stored(adapter.spec.reward, adapter.step([0])[1])["reward",].tolist() == [
        1.0
    ]


@pytest.mark.parametrize("make", [np.random.RandomState, np.random.default_rng])
def test_seeds_every_generator_in_place(make):
    class Drawing(Scripted):
        def __init__(self, inner: Any = None) -> None:
            super().__init__()
            self._rng = make(0)
            self._env = inner

        def reset(self):
            numbers = self._rng.normal(size=2)
            return dm_env.restart(
                numbers
                if self._env is None
                else self._env.reset().observation - numbers
            )

    env = Drawing(Drawing())
    generator, adapter = env._rng, DmEnvAdapter(env)
    first = adapter.reset(3)[0]
    assert env._rng is generator
    np.testing.assert_array_equal(adapter.reset(3)[0], first)
    assert not np.array_equal(adapter.reset(4)[0], first)
    assert not np.array_equal(adapter.reset(None)[0], adapter.reset(None)[0])
    assert first.any(), "the two generators got the same seed"


def test_an_env_without_a_generator_ignores_the_seed():
    assert len(scripted().reset(3)) == 1
