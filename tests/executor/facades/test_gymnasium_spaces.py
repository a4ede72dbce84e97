"""Spaces, calls, `make_vec` and wrappers of the Gymnasium facade."""

import contextlib
import functools
import time
from collections import OrderedDict

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, Tuple
from gymnasium.utils.env_checker import data_equivalence
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_differing_spaces
from gymnasium.wrappers import vector as wrappers

from envherd.gymnasium import (
    AsyncVectorEnv,
    installed,
    make_vec,
)
from tests.envs.gymnasium_envs import (
    MAKES,
    SPACES,
    Custom,
    Echo,
    Failing,
    Slow,
    WithActions,
)
from tests.extras import needs
from tests.gymnasium_versions import HAS_LIMIT, NOT_BATCHED, TAXI

TWO_WORKERS = functools.partial(AsyncVectorEnv, num_workers=2)


@pytest.mark.sampled(2)
# Gymnasium's warning about its own scalars.
@pytest.mark.filterwarnings("ignore:.*Casting input:UserWarning")
@pytest.mark.parametrize("name", SPACES)
def test_values_of_every_space_go_there_and_back(name):
    kwargs = {"shared_memory": name != "custom"}
    make_envs = [functools.partial(Echo, SPACES[name])] * 2
    with (
        contextlib.closing(TWO_WORKERS(make_envs, **kwargs)) as envs,
        contextlib.closing(gymnasium.vector.SyncVectorEnv(make_envs)) as theirs,
    ):
        assert envs.observation_space == envs.action_space == theirs.action_space
        observations, _ = envs.reset(seed=0)
        assert observations in envs.observation_space
        envs.action_space.seed(1)
        theirs.reset()
        for _ in range(3):
            actions = envs.action_space.sample()
            observations = envs.step(actions)[0]
            assert data_equivalence(observations, theirs.step(actions)[0], exact=True)


def order(value):
    """Return the keys of nested dicts, in their order."""
    if isinstance(value, dict):
        return [(key, order(inner)) for key, inner in value.items()]
    return [order(inner) for inner in value] if isinstance(value, tuple) else None


class Ordered(gymnasium.Env):
    """Dicts whose keys are not sorted; keeps the order of those of its action."""

    _inner = Dict(OrderedDict([("y", Box(-1, 1, ())), ("c", Discrete(2))]))
    observation_space = action_space = Dict(
        OrderedDict(
            [
                ("z", Tuple((_inner, Discrete(3), Tuple((_inner,))))),
                ("a", _inner),
                ("m", MultiBinary(2)),
            ]
        )
    )
    seen = None

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        self.seen = order(action)
        return self.observation_space.sample(), 0.0, True, False, {}


def reordered(value):
    if isinstance(value, dict):
        return {key: reordered(value[key]) for key in reversed(list(value))}
    return tuple(map(reordered, value)) if isinstance(value, tuple) else value


@pytest.mark.parametrize(
    "change", [lambda value: value, reordered], ids=["as sampled", "reversed"]
)
def test_keys_have_gymnasiums_order(change):
    with (
        contextlib.closing(
            TWO_WORKERS([Ordered] * 2, autoreset_mode="SameStep")
        ) as envs,
        contextlib.closing(
            gymnasium.vector.SyncVectorEnv([Ordered] * 2, autoreset_mode="SameStep")
        ) as theirs,
    ):
        assert order(envs.reset()[0]) == order(theirs.reset()[0])
        actions = change(theirs.action_space.sample())
        ours, expected = envs.step(actions), theirs.step(actions)
        assert envs.get_attr("seen") == theirs.get_attr("seen")
        assert order(ours[0]) == order(expected[0])
        assert order(ours[4]["final_obs"][0]) == order(expected[4]["final_obs"][0])


def test_a_custom_space_is_refused_with_shared_memory():
    with pytest.raises(ValueError, match="shared_memory=False"):
        AsyncVectorEnv([functools.partial(Echo, Custom())])


def test_observation_spaces_that_differ_need_a_mode_and_equal_actions():
    spaces = [Box(0, high, (2,)) for high in (1, 2)]
    for mode in ("same", "different"):
        with pytest.raises(
            RuntimeError,
            match=r"observation_mode='different'|action space different",
        ):
            TWO_WORKERS(
                [functools.partial(Echo, space) for space in spaces],
                observation_mode=mode,
            )


def test_observation_spaces_may_differ_in_their_bounds():
    spaces = [Box(0, high, (2,)) for high in (1, 2)]
    for mode in (
        "different",
        (Box(0, np.array([[1, 1], [2, 2]])), Box(0, 1, (2,))),
    ):
        with contextlib.closing(
            TWO_WORKERS(
                [functools.partial(WithActions, space) for space in spaces],
                observation_mode=mode,
            )
        ) as envs:
            assert envs.observation_space == batch_differing_spaces(spaces)
            assert envs.single_observation_space == spaces[0]
            assert envs.reset()[0].shape == (2, 2)


def test_observations_of_different_shapes_are_refused():
    spaces = [Box(0, 1, (size,)) for size in (1, 2)]
    pair = (Box(0, 1, (2, 1)), spaces[0])
    for mode, kind in (
        ("same", RuntimeError),
        ("different", NOT_BATCHED),
        (pair, RuntimeError),
    ):
        with pytest.raises(kind):
            TWO_WORKERS(
                [functools.partial(WithActions, space) for space in spaces],
                observation_mode=mode,
            )


def test_an_observation_mode_that_there_is_not():
    with pytest.raises(ValueError, match="Invalid `observation_mode`"):
        TWO_WORKERS([Failing], observation_mode="any")
    with pytest.raises(TypeError, match="to be Spaces"):
        TWO_WORKERS([Failing], observation_mode=(Box(0, 1), "same"))


@needs("box2d")
def test_calls_and_attributes():
    # Gymnasium 1.1 itself writes the mode of its vector envs into that of the env's class.
    metadata = dict(gymnasium.make("CartPole-v1").metadata)
    with contextlib.closing(
        TWO_WORKERS(
            [functools.partial(gymnasium.make, "CartPole-v1", render_mode="rgb_array")]
            * 2
        )
    ) as envs:
        envs.reset(seed=5)
        assert envs.render_mode == "rgb_array"
        assert envs.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
        assert [frame.shape for frame in envs.render()] == [(400, 600, 3)] * 2
        assert envs.call("gravity") == (9.8, 9.8)
        envs.set_attr("gravity", [1.0, 2.0])
        assert envs.get_attr("gravity") == (1.0, 2.0)
        envs.set_attr("gravity", 3.0)
        assert envs.get_attr("gravity") == (3.0, 3.0)
        assert envs.np_random_seed == (5, 6)
        assert [type(one).__name__ for one in envs.np_random] == ["Generator"] * 2
        assert envs.call("has_wrapper_attr", "gravity") == (True, True)
        with pytest.raises(ValueError, match="Got `1` values for 2"):
            envs.set_attr("gravity", [1.0])
        with pytest.raises(ValueError, match="num_envs=2"):
            envs.reset(seed=[1])
        assert gymnasium.make("CartPole-v1").metadata == metadata


def test_reset_masks_that_cannot_be():
    with contextlib.closing(TWO_WORKERS([Failing] * 2)) as envs:
        envs.reset()
        for mask, kind, expected_text in (
            ([True, False], TypeError, "must be a numpy array"),
            (np.array([True]), ValueError, r"must have shape `\(2,\)`, got \(1,\)"),
            (np.array([1, 0]), TypeError, "must have `dtype=np.bool_`"),
            (np.array([False, False]), ValueError, "at least one True"),
        ):
            with pytest.raises(kind, match=expected_text):
                envs.reset(options={"reset_mask": mask})


class Pausing(Slow):
    pause = 0.05


@pytest.mark.slow
@pytest.mark.parametrize("limit", [1, np.int64(2)])
def test_max_concurrency_limits_the_envs_that_step_at_one_time(limit):
    theirs = (
        [functools.partial(gymnasium.vector.AsyncVectorEnv, shared_memory=False)]
        if HAS_LIMIT
        else []
    )
    for vector_env in (*theirs, functools.partial(AsyncVectorEnv, num_workers=4)):
        with contextlib.closing(
            vector_env([Pausing] * 4, max_concurrency=limit)
        ) as envs:
            envs.reset()
            begin = time.monotonic()
            envs.step(np.zeros(4, np.int64))
            assert time.monotonic() - begin >= 4 * Pausing.pause / limit


def test_make_vec():
    with installed():
        inside = gymnasium.make_vec(
            "CartPole-v1", 2, "async", vector_kwargs={"num_workers": 1}
        )
        assert gymnasium.vector.async_vector_env.AsyncVectorEnv is AsyncVectorEnv
    assert isinstance(inside, AsyncVectorEnv)
    assert gymnasium.vector.AsyncVectorEnv is not AsyncVectorEnv
    for envs in (
        inside,
        make_vec("CartPole-v1", 2),
        make_vec("CartPole-v1", 2, "sync", max_episode_steps=3),
    ):
        assert str(envs) == f"{type(envs).__name__}(CartPole-v1, num_envs=2)"
        assert envs.spec.id == "CartPole-v1"
        envs.reset(seed=1)
        envs.close()


@pytest.mark.slow
@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_gymnasiums_vector_wrappers_give_what_they_give_over_its_own(mode):
    def wrap(envs):
        envs = wrappers.NormalizeReward(wrappers.RecordEpisodeStatistics(envs))
        # NormalizeObservation refuses SAME_STEP.
        if mode is not AutoresetMode.SAME_STEP:
            envs = wrappers.NormalizeObservation(envs)
        return wrappers.RescaleAction(
            wrappers.ClipReward(envs, -1, 1), np.float32(-0.5), np.float32(0.5)
        )

    with (
        contextlib.closing(
            wrap(TWO_WORKERS([MAKES["pendulum"]] * 2, autoreset_mode=mode))
        ) as ours,
        contextlib.closing(
            wrap(
                gymnasium.vector.SyncVectorEnv(
                    [MAKES["pendulum"]] * 2, autoreset_mode=mode
                )
            )
        ) as theirs,
    ):
        ours.action_space.seed(3)
        assert data_equivalence(ours.reset(seed=1), theirs.reset(seed=1), exact=True)
        num_episodes = 0
        for _ in range(20):
            actions = ours.action_space.sample()
            our, their = ours.step(actions), theirs.step(actions)
            assert data_equivalence(our[:4], their[:4], exact=True)
            num_episodes += our[4].get("_episode", np.zeros(2, bool)).sum()
        assert num_episodes >= 4


def test_gymnasium_makes_lists_of_infos():
    makes = [functools.partial(gymnasium.make, TAXI)] * 2
    with (
        contextlib.closing(wrappers.DictInfoToList(TWO_WORKERS(makes))) as ours,
        contextlib.closing(
            wrappers.DictInfoToList(gymnasium.vector.SyncVectorEnv(makes))
        ) as theirs,
    ):
        assert data_equivalence(ours.reset(seed=1), theirs.reset(seed=1))
        our, their = (envs.step(np.zeros(2, np.int64)) for envs in (ours, theirs))
        assert data_equivalence(our, their)
        assert len(our[4]) == 2
        assert "prob" in our[4][1]


def test_objects_defined_in_the_script_return_as_themselves():
    class Local(Echo):
        def __init__(self):
            super().__init__(SPACES["small"])

        def step(self, action):
            return *super().step(action)[:4], {"class": type(self)}

    with contextlib.closing(TWO_WORKERS([Local] * 2)) as envs:
        envs.reset()
        infos = envs.step(envs.action_space.sample())[4]
        assert list(infos["class"]) == [Local, Local]
        assert [type(env) for env in envs.get_attr("unwrapped")] == [Local, Local]


@pytest.mark.slow
def test_workers_may_be_chosen_by_measuring_an_env(monkeypatch):
    monkeypatch.setattr("envherd.executor.sizing.recommending.AUTO_BUDGET_S", 0.3)
    with contextlib.closing(AsyncVectorEnv([Failing] * 3, num_workers="auto")) as envs:
        envs.reset(seed=0)
        assert 1 <= envs.executor.num_workers <= 3
