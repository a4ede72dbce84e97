"""EnvPool: both APIs, sync and async, against plain pools of one env each."""

from tests.extras import skip_without

skip_without("envpool")

import numpy as np
import pytest
import torch

from envherd.executor import ExecutorOptions, SerialEnv

# Making its spaces, EnvPool has Gymnasium warn of a loss of precision.
pytestmark = pytest.mark.filterwarnings("ignore:.*precision lowered")

N = 3
APIS = ("gymnasium", "dm")


def pool(task="CartPole-v1", env_type="gymnasium", **config):
    import envpool  # which imports jax and more

    return envpool.make(
        task,
        env_type=env_type,
        **{"num_envs": N, "num_threads": 1, "max_episode_steps": 20, **config},
    )


def test_a_seed_set_again_gives_the_same_data():
    with SerialEnv(1, lambda: pool(max_episode_steps=5), seed=3) as env:
        env.set_seed(4)
        # Ends with all rows at their time limit.
        one = env.rollout(20, break_when_any_done=False)
        env.set_seed(4)
        assert (env.rollout(20, break_when_any_done=False) == one).all()


def test_a_pool_is_not_built_again_where_resets_carry_no_seeds():
    built = []
    options = ExecutorOptions(episode_seeds=False)
    with SerialEnv(
        1, lambda: built.append(pool(seed=9)) or built[-1], seed=0, options=options
    ) as env:
        here = env.reset()["observation"][0].numpy()
    assert np.array_equal(here, pool(seed=9).reset()[0])


@pytest.mark.parametrize("env_type", APIS)
def test_a_time_limit_is_a_truncation_and_a_fall_is_not(env_type):
    with SerialEnv(
        1, lambda: pool("Pendulum-v1", env_type, max_episode_steps=7), seed=0
    ) as env:
        data = env.rollout(14, break_when_any_done=False)["next"]
    assert data["truncated"][0, :, 0, 0].nonzero().flatten().tolist() == [6, 13]
    assert not data["terminated"].any()
    with SerialEnv(
        1, lambda: pool(env_type=env_type, max_episode_steps=500), seed=0
    ) as env:
        data = env.rollout(60, break_when_any_done=False)["next"]
    assert data["terminated"].any()
    assert not data["truncated"].any()


def test_infos_are_those_of_all_rows_after_a_partial_reset():
    with SerialEnv(
        1, pool, seed=0, options=ExecutorOptions(infos={"elapsed_step": np.int32})
    ) as env:
        td = env.step(env.rand_action(env.reset()))["next"]
        td = env.reset(
            td.clone().set("_reset", torch.tensor([[[False], [True], [False]]]))
        )
    assert td["info", "elapsed_step"].tolist() == [[1, 0, 1]]


def test_several_observations_have_their_own_names():
    with SerialEnv(1, lambda: pool("MiniGrid-Empty-5x5-v0", num_envs=2), seed=0) as env:
        td = env.rollout(3)
    assert {key: td[key].dtype for key in ("direction", "image", "mission")} == {
        "direction": torch.int64,
        "image": torch.uint8,
        "mission": torch.uint8,
    }
    assert td["image"].shape == (1, 3, 2, 7, 7, 3)
