"""The facades over a cluster: the same program gives the same data as over worker processes of this machine."""

import functools

import gymnasium
import numpy as np
import pytest
import torch

from envherd.executor.cluster import RayParallelEnv
from envherd.workers.errors import FactoryError
from tests.extras import needs

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cluster"), pytest.mark.timeout(300)]

N = 3
ON_NODES = functools.partial(RayParallelEnv, num_nodes=2, resources_per_node={"CPU": 2})


class Ends(gymnasium.Env):
    """Episodes of two to five steps that terminate or are cut off, with infos, from the env's own generator."""

    def __init__(self, scale: float = 1.0) -> None:
        self.metadata = {"render_modes": [], "name": "ends"}
        self.observation_space = gymnasium.spaces.Box(-10, 10, (3,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(4)
        self.scale = scale

    def _observe(self) -> np.ndarray:
        return (self.np_random.uniform(-1, 1, 3) * self.scale).astype(np.float32)

    def reset(self, *, seed=None, options=None):
        """Draw how long the episode is."""
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(2, 6))
        return self._observe(), {"level": (options or {}).get("level", 0), "length": self.left}

    def step(self, action):
        """Count down."""
        self.left -= 1
        is_over = self.left == 0
        is_cut = is_over and bool(self.np_random.integers(2))
        return self._observe(), float(action), is_over and not is_cut, is_cut, {"left": self.left}

    def twice(self, number):
        """Answer a call."""
        return 2 * number


def same(one, other):
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            same(one[key], other[key])
    elif isinstance(one, (tuple, list)):
        assert len(one) == len(other)
        for mine, theirs in zip(one, other, strict=True):
            same(mine, theirs)
    elif isinstance(one, np.ndarray):
        assert one.dtype == other.dtype
        same(list(one), list(other)) if one.dtype == object else np.testing.assert_array_equal(one, other)
    else:
        assert one == other


@needs("sb3")
def test_sb3():
    from envherd.executor.facades.sb3 import vec_env as sb3

    said = []
    for kwargs in ({}, {"executor": ON_NODES}):
        env = sb3.SubprocVecEnv([Ends] * N, num_workers=1, **kwargs)
        try:
            env.seed(5)
            env.set_options({"level": 2})
            told = [env.reset(), list(env.reset_infos)]
            for number in range(20):
                told += [*env.step(np.full(N, number % 4)), list(env.reset_infos)]
            env.set_attr("scale", 0.0, indices=[2])
            told += [env.env_method("twice", 4), env.get_attr("scale"), env.env_is_wrapped(gymnasium.Wrapper)]
            told.append(env.step(np.zeros(N, int))[0])
            with pytest.raises(AttributeError):
                env.get_attr("nothing")
        finally:
            env.close()
        said.append(told)
    same(said[1], said[0])
    infos = [info for infos in said[0][5::5] for info in infos]
    assert {info.get("TimeLimit.truncated") for info in infos if "terminal_observation" in info} == {True, False}
    assert not said[0][-1][2].any(), "the attribute was set"


@pytest.mark.full
def test_gymnasium():
    from envherd.executor.facades.gymnasium import AsyncVectorEnv

    said = []
    for kwargs in ({}, {"executor": ON_NODES}):
        env = AsyncVectorEnv([Ends] * N, num_workers=1, autoreset_mode="SameStep", **kwargs)
        try:
            told = [env.observation_space, env.metadata, env.reset(seed=3, options={"level": 1})]
            told += [env.step(np.full(N, number % 4)) for number in range(20)]
            told.append(env.call("twice", 8))
            env.call_async("twice", 5)
            told.append(env.call_wait(timeout=60))
            env.set_attr("scale", [1.0, 2.0, 0.0])
            told += [env.get_attr("scale"), env.step(np.zeros(N, int)), env.reset(seed=[1, None, 2])]
        finally:
            env.close()
        said.append(told)
    same(said[1], said[0])
    assert sum(step[2].sum() for step in said[0][3:23]) > 2
    assert sum(step[3].sum() for step in said[0][3:23]) > 2


@needs("torchrl")
@pytest.mark.full
def test_torchrl():
    import torchrl.envs as libs

    from envherd.executor.facades.torchrl import ParallelEnv

    def make_env(scale):
        return libs.TransformedEnv(libs.GymWrapper(Ends(scale)), libs.StepCounter())

    kwargs = [{"scale": float(i)} for i in range(N)]
    data = []
    for more in ({}, {"executor": ON_NODES}):
        env = ParallelEnv(N, make_env, create_env_kwargs=kwargs, num_processes=1, **more)
        try:
            seed = env.set_seed(7)
            policy = functools.partial(_act, torch.Generator().manual_seed(0))
            rolled = env.rollout(25, policy, break_when_any_done=False)
            mask = torch.tensor([[True], [False], [True]])
            root = env.reset(env.rollout(2, policy)[:, -1].exclude("next").set("_reset", mask))
            data.append((seed, env.scale, rolled, root, len(env._workers), [one.is_alive() for one in env._workers]))
        finally:
            env.close()
    (seed, scale, rolled, root, *_), (their_seed, their_scale, theirs, their_root, count, alive) = data
    assert (their_seed, list(their_scale)) == (seed, list(scale))
    for one, other in ((rolled, theirs), (root, their_root)):
        assert set(one.keys(include_nested=True, leaves_only=True)) == set(
            other.keys(include_nested=True, leaves_only=True)
        )
        assert (one == other).all()
    assert rolled["next", "terminated"].any()
    assert rolled["next", "truncated"].any()
    assert (count, alive) == (2, [True, True])


def _act(generator, td):
    actions = torch.nn.functional.one_hot(torch.randint(4, td.batch_size, generator=generator), 4)
    return td.set("action", actions)


def test_what_cannot_cross_is_said():
    from envherd.executor.facades.gymnasium import AsyncVectorEnv

    held = (number for number in range(3))
    with pytest.raises(FactoryError, match="captured the variable `held`"):
        AsyncVectorEnv([lambda: held], executor=ON_NODES)
