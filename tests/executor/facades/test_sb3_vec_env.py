"""The SB3 facade's guarantees other than transitions: seeds, options, attributes, pictures, faults, ownership."""

import functools
import itertools
from contextlib import closing
from dataclasses import replace

from tests.extras import needs, skip_without

skip_without("sb3")

import gymnasium
import numpy as np
import pytest
import stable_baselines3.common.vec_env
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import VecEnv

from envherd.executor import Busy, ExecutorOptions
from envherd.executor.facades.sb3.rows import num_agents
from envherd.sb3 import SubprocVecEnv, installed
from envherd.workers.adapters.named import NamedFactory
from envherd.workers.errors import ActionError, ResetNeeded, SpecError
from tests.envs.counting_envs import AgentsEnv
from tests.envs.gymnasium_envs import Precise
from tests.envs.sb3_envs import (
    DyingEnv,
    FailingEnv,
    SampledEnv,
    SharingEnv,
    Tagged,
    make_cartpole,
    make_tagged,
    return_it,
)

TWO_WORKERS = functools.partial(SubprocVecEnv, num_workers=2)
ZEROS = np.zeros(3, np.int64)


@pytest.fixture
def sampled():
    with closing(
        TWO_WORKERS([SampledEnv, functools.partial(SampledEnv, length=3), make_tagged])
    ) as env:
        yield env


def test_in_a_block_sb3_has_this_class():
    theirs = stable_baselines3.common.vec_env.SubprocVecEnv
    make = functools.partial(make_vec_env, make_cartpole, n_envs=2)
    with installed():
        ours = stable_baselines3.common.vec_env.SubprocVecEnv
    with closing(make(vec_env_cls=ours)) as env:
        assert type(env) is SubprocVecEnv
        assert repr(env).startswith("SubprocVecEnv(ParallelEnv(2 x gymnasium, ")
    assert stable_baselines3.common.vec_env.SubprocVecEnv is theirs


def test_seeds_and_options_are_for_the_next_reset_alone(sampled):
    assert sampled.seed(7) == [7, 8, 9]
    sampled.set_options([{"a": 1}, {}, {"b": [2]}])
    assert sampled.get_attr("given") == [[], [], []]
    sampled.reset()
    sampled.reset()
    sampled.set_options({"c": 3})
    sampled.reset()
    first = [(7, {"a": 1}), (8, None), (9, {"b": [2]})]
    expected = [[one, (None, None), (None, {"c": 3})] for one in first]
    assert sampled.get_attr("given") == expected
    assert [info["episode"] for info in sampled.reset_infos] == [2, 2, 2]


def test_attributes_and_methods_with_indices(sampled):
    assert sampled.get_attr("length") == [5, 3, 5]
    assert sampled.get_attr("length", 1) == [3]
    assert sampled.get_attr("length", [-1, 0, 1]) == [5, 5, 3]
    assert sampled.has_attr("length")
    assert not sampled.has_attr("no_such")
    with pytest.raises(AttributeError, match="no_such"):
        sampled.get_attr("no_such")
    sampled.set_attr("colour", [1, 2, 3], indices=[0, 2])
    # The attribute of the outermost wrapper, Tagged.
    assert sampled.get_attr("colour") == [[1, 2, 3], 0, [1, 2, 3]]
    sampled.set_attr("colour", 4, 0)
    assert sampled.env_method("add", 1, indices=[1, 0], other=2) == [3, 7]
    assert sampled.env_method("add", 1, indices=-1) == [1]
    assert sampled.env_is_wrapped(Tagged) == [False, False, True]
    assert sampled.env_is_wrapped(Tagged, [2, 0]) == [True, False]
    assert sampled.env_is_wrapped(gymnasium.Wrapper, -1) == [True]
    assert sampled.env_is_wrapped(SampledEnv) == [False, False, False]
    with pytest.raises(IndexError):
        sampled.get_attr("length", 3)


def test_pictures_are_tiled(sampled):
    sampled.env_method("set_wrapper_attr", "colour", 9, indices=[1])
    picture = sampled.render()
    assert picture.shape == (4, 6, 3)
    assert picture[:2, 3:].tolist() == np.full((2, 3, 3), 9).tolist()
    assert len(sampled.get_images()) == 3
    assert sampled.metadata["render_modes"] is not None
    with pytest.warns(UserWarning, match="render mode"):
        assert sampled.render("ansi") is None


def test_without_pictures_there_is_a_warning():
    with (
        closing(TWO_WORKERS([functools.partial(SampledEnv, render_mode=None)])) as env,
        pytest.warns(UserWarning, match="render mode is None"),
    ):
        assert env.get_images() == [None]


def test_returned_arrays_are_copies(sampled):
    kept = [(sampled.reset(), None)]
    for _ in range(9):
        obs, rewards, dones, infos = sampled.step(ZEROS)
        kept.append((obs, [obs.copy(), rewards, rewards.copy(), dones, infos]))
        infos[0]["mine"] = True
        rewards += 0  # writable
        dones &= True
    for obs, others in kept[1:]:
        np.testing.assert_array_equal(obs, others[0])
        np.testing.assert_array_equal(others[1], others[2])
    assert not any(
        np.shares_memory(one, other)
        for (one, _), (other, _) in itertools.pairwise(kept)
    )
    assert "mine" not in sampled.step(ZEROS)[3][0]


def test_a_step_calls_the_halves_of_a_subclass():
    halves = {
        "step_async": lambda self, actions: None,
        "step_wait": lambda self: "mine",
    }
    assert (
        type("Halves", (SubprocVecEnv,), halves)([SampledEnv], num_workers=1).step(
            ZEROS[:1]
        )
        == "mine"
    )


def test_a_step_in_two_halves(sampled):
    sampled.reset()
    sampled.step_async(ZEROS)
    with pytest.raises(Busy, match="step_wait"):
        sampled.get_attr("length")
    sampled.reset()  # the pending step is dropped
    sampled.step(ZEROS)
    assert sampled.get_attr("num_steps") == [1, 1, 1]


def test_fractions_are_no_discrete_actions():
    with closing(TWO_WORKERS([SampledEnv] * 2)) as env:
        env.reset()
        env.step(np.ones(2))  # whole numbers are, whatever their dtype
        with pytest.raises(ActionError, match=r"0\.5"):
            env.step(np.array([0.5, 1.0]))


class CountsEnv(Precise):
    """Takes int32, so int64 values of SB3 or a script may not fit."""

    action_space = gymnasium.spaces.Box(-100, 100, (1,), np.int32)


def test_integers_that_do_not_fit_are_refused_and_do_not_wrap_around():
    with closing(TWO_WORKERS([CountsEnv, CountsEnv])) as env:
        env.reset()
        with pytest.raises(ActionError, match=str(2**32 + 5)):
            env.step(np.array([[1], [2**32 + 5]]))
        assert env.step(np.array([[1], [-7]]))[1].tolist() == [1.0, -7.0]


#: Functions to create envs, and actions of another shape than one for each row.
OTHER_SHAPES = {
    "as many as there are envs of one kind": (
        [
            functools.partial(SampledEnv, space)
            for space in ("discrete", "discrete from 3")
        ],
        (1,),
    ),
    "by env and agent": ([AgentsEnv] * 2, (2, 3)),
}


@pytest.mark.parametrize("name", OTHER_SHAPES)
def test_actions_of_another_shape_are_refused(name):
    env_fns, shape = OTHER_SHAPES[name]
    with closing(TWO_WORKERS(env_fns)) as env:
        env.reset()
        with pytest.raises(ActionError, match=r"step failed: expected .*actions"):
            env.step(np.zeros(shape, np.int64))


@pytest.mark.parametrize(
    "differs",
    [
        {"batch_shape": (2,)},
        {"groups": ((("a",), (2, 3)),)},
        {"groups": ((("a",), (2,)), (("b",), (1,)))},
    ],
)
def test_envs_that_have_no_rows_are_refused(differs):
    with pytest.raises(
        ValueError, match="expected one env or one group of equal agents"
    ):
        num_agents(replace(AgentsEnv().spec, **differs))


def test_errors_name_sb3s_calls():
    with closing(TWO_WORKERS([FailingEnv] * 2)) as env:
        with pytest.raises(
            RuntimeError,
            match=r"^step_wait failed: .* Call step_async\(actions\) first",
        ):
            env.step_wait()
        env.reset()
        env.step_async(ZEROS[:2])
        with pytest.raises(
            Busy, match=r"^step_async failed: .* Call step_wait\(\) first"
        ):
            env.step_async(ZEROS[:2])
        env.step_wait()
        env.step(ZEROS[:2])
        with pytest.raises(LookupError):
            env.step(ZEROS[:2])
        with pytest.raises(
            ResetNeeded,
            match=r"^step failed: .*\[0, 1\].* Call reset\(\)\. No env was stepped\.$",
        ):
            env.step(ZEROS[:2])
        env.reset()
        with pytest.raises(
            IndexError, match=r"^get_attr failed: expected indices below 2, got 2\.$"
        ):
            env.get_attr("length", indices=[0, 2])
        for call in (
            lambda: env.get_attr("nowhere"),
            lambda: env.env_method("nowhere"),
        ):
            with pytest.raises(
                AttributeError,
                match=r"^(get_attr|env_method) nowhere failed: the env raised",
            ):
                call()
        for actions in ([None, None], ["a", "b"], [[1], [1, 2]]):
            with pytest.raises(
                ActionError,
                match=r"^step failed: expected actions .* No env was stepped\.$",
            ):
                env.step(actions)


class Refusing(SampledEnv):
    """Refuses some options; its steps break its space."""

    def reset(self, *, seed=None, options=None):
        if options:
            raise PermissionError("these options")
        return super().reset(seed=seed)

    def step(self, action):
        return np.zeros(7, np.float32), 0.0, False, False, {}


def test_exception_of_a_reset_keeps_its_type():
    with closing(TWO_WORKERS([Refusing] * 2)) as env:
        env.set_options({"is_refused": True})
        with pytest.raises(PermissionError, match="these options"):
            env.reset()
        env.set_options()
        env.reset()
        # Not the earlier exception.
        with pytest.raises(ValueError, match="writing observation failed"):
            env.step(ZEROS[:2])


def test_no_envs_are_refused():
    with pytest.raises(
        ValueError,
        match="SubprocVecEnv failed: expected at least one function, got an empty list",
    ):
        SubprocVecEnv([])


def test_a_refused_vec_env_leaves_no_workers():
    # Its frames hold the vec env; the fixture of all tests looks for processes.
    with pytest.raises(SpecError, match="env 0 and env 1") as refused:
        TWO_WORKERS([SampledEnv, functools.partial(SampledEnv, "image")])
    assert refused


def test_envs_of_one_worker_do_not_share_what_their_functions_captured():
    with closing(
        SubprocVecEnv([functools.partial(SharingEnv, [])] * 2, num_workers=1)
    ) as env:
        assert [env.env_method("note", what) for what in (1, 2)] == [
            [[1], [1]],
            [[1, 2], [1, 2]],
        ]


def test_an_env_made_elsewhere_is_copied_to_its_worker():
    here = SampledEnv()
    with closing(
        SubprocVecEnv([functools.partial(return_it, here)] * 2, num_workers=1)
    ) as env:
        env.reset()
        env.set_attr("colour", 3, indices=1)
        assert env.get_attr("colour") == [0, 3]
        assert here.colour == 0


@needs("dm-control")
def test_envs_of_other_families_are_rows_too():
    with closing(
        TWO_WORKERS([NamedFactory("dm_control", "cartpole/swingup")] * 2)
    ) as env:
        assert isinstance(env.observation_space, gymnasium.spaces.Dict)
        assert env.action_space == gymnasium.spaces.Box(-1, 1, (1,), np.float64)
        first = env.reset()
        obs, rewards, dones, _ = env.step(np.ones((2, 1)))
        assert {key: values.shape for key, values in obs.items()} == {
            "position": (2, 3),
            "velocity": (2, 2),
        }
        assert not np.array_equal(first["velocity"], obs["velocity"])
        assert rewards.dtype == np.float32
        assert not dones.any()


@pytest.mark.slow
@pytest.mark.parametrize("start_method", [None, "forkserver", "spawn", "fork"])
def test_start_methods(start_method):
    with closing(
        SubprocVecEnv([make_cartpole] * 2, start_method, num_workers=2)
    ) as env:
        assert isinstance(env, VecEnv)
        assert env.reset().shape == (2, 4)


def test_start_method_that_there_is_not():
    with pytest.raises(ValueError, match="cannot find context for 'illegal_method'"):
        SubprocVecEnv([make_cartpole], start_method="illegal_method")


@pytest.mark.long
@pytest.mark.usefixtures("own_helper")
@pytest.mark.parametrize(
    ("make_env", "is_wrapped", "asked", "expected"),
    [
        (
            SampledEnv,
            False,
            ("stable_baselines3", "torch", "tensorflow", "gymnasium"),
            ["gymnasium"],
        ),
        (
            lambda: Monitor(SampledEnv()),
            True,
            ("stable_baselines3", "tensorflow"),
            ["stable_baselines3"],
        ),
    ],
    ids=["without", "with"],
)
def test_workers_import_stable_baselines3_for_their_env_alone_and_no_tensorflow(
    make_env, is_wrapped, asked, expected
):
    with closing(
        SubprocVecEnv([make_env], options=ExecutorOptions(stall_log_s=60))
    ) as env:
        assert env.env_is_wrapped(Monitor) == [is_wrapped]
        assert env.env_method("loaded", *asked) == [expected]


@pytest.mark.slow
@pytest.mark.broken_pool
def test_a_lost_worker_is_replaced_and_its_rows_are_cut_off():
    with closing(
        SubprocVecEnv(
            [DyingEnv] * 2,
            num_workers=2,
            options=ExecutorOptions(on_worker_loss="restart"),
        )
    ) as env:
        env.reset()
        last, *_ = env.step(np.array([1, 1]))
        _, rewards, dones, infos = env.step(np.array([1, 6]))
        assert dones.tolist() == [False, True]
        assert rewards[1] == 0
        assert infos[1]["TimeLimit.truncated"]
        assert infos[1]["interrupted"]
        np.testing.assert_array_equal(infos[1]["terminal_observation"], last[1])
        env.step(np.array([1, 1]))
