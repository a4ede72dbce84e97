"""`ExecutorOptions(episode_statistics=True)` in the TorchRL facade: return, length and time of each episode so far."""

import functools
import os
import signal
from collections.abc import Callable
from contextlib import closing
from typing import Any

from tests.extras import skip_without

skip_without("torchrl", "gymnasium")

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import (
    Binary,
    Categorical,
    Composite,
    LazyTensorStorage,
    ReplayBuffer,
    Unbounded,
)
from torchrl.envs import (
    Compose,
    DoubleToFloat,
    EnvBase,
    GymEnv,
    GymWrapper,
    RewardSum,
    StepCounter,
    TransformedEnv,
    check_env_specs,
)

from envherd import EpisodeLogger
from envherd import ParallelEnv as NativeParallelEnv
from envherd import SerialEnv as NativeSerialEnv
from envherd.executor.facades.torchrl.worker import HostedEnv, adapter_of
from envherd.executor.options import ExecutorOptions
from envherd.torchrl import ParallelEnv
from envherd.workers.errors import FactoryError
from tests.envs import torchrl_own as own
from tests.executor.facades.test_torchrl_use import Collector, policy

pytestmark = [
    pytest.mark.slow,
    pytest.mark.preloads(*own.PRELOADED),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]

ON = ExecutorOptions(episode_statistics=True)
herd = functools.partial(ParallelEnv, num_processes=1)


class Walk(gymnasium.Env):
    """Ends after 3, 4, 5, ... steps in turn; its rewards are no float32 numbers."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(3)

    def __init__(self, first: int = 3) -> None:
        self.length, self.steps = first, 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        # TorchRL's wrapper resets before the first episode.
        self.length, self.steps = self.length + (self.steps > 0), 0
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.steps += 1
        is_over = self.steps == self.length
        return (
            np.full(2, 0.1, np.float32),
            0.1 * (1 + int(action)),
            is_over and self.steps % 2 == 0,
            is_over,
            {},
        )


class Team(EnvBase):
    """Two agents, each with a separate end (after 2 and 3 steps) and reset; a reward of the whole team at the root."""

    def __init__(self, rewards: tuple[str, ...] = ("reward",)) -> None:
        super().__init__()
        self.rewards = rewards
        flag = Categorical(2, dtype=torch.bool, shape=(2, 1))
        self.observation_spec = self._group(count=Unbounded((2, 1), dtype=torch.int64))
        self.action_spec = self._group(action=Binary(1, shape=(2, 1)))
        reward = self._group(**{name: Unbounded((2, 1)) for name in rewards})
        self.reward_spec = Composite(
            {**dict(reward.items()), "shared": Unbounded((1,), dtype=torch.float64)}
        )
        self.done_spec = self._group(done=flag, terminated=flag.clone())
        self.count = torch.zeros(2, 1, dtype=torch.int64)

    @staticmethod
    def _group(**leaves: Any) -> Composite:
        return Composite(agents=Composite(leaves, shape=(2,)))

    def _reset(
        self, tensordict: TensorDictBase | None = None, **_: Any
    ) -> TensorDictBase:
        mask = (
            None if tensordict is None else tensordict.get(("agents", "_reset"), None)
        )
        self.count[... if mask is None else mask] = 0
        return self._row()

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.count += 1
        row = self._row().set("shared", torch.tensor([0.5], dtype=torch.float64))
        for name in self.rewards:
            row["agents", name] = torch.tensor([[1.0], [10.0]])
        return row

    def _row(self) -> TensorDictBase:
        done = self.count >= torch.tensor([[2], [3]])
        each = {"count": self.count.clone(), "done": done, "terminated": done.clone()}
        return TensorDict({"agents": TensorDict(each, [2])}, [])

    def _set_seed(self, seed: int | None) -> None:
        torch.manual_seed(seed)


class Paid(own.CountingEnv):
    """Pays more with every step."""

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        if int(tensordict["action"].sum()) == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        row = super()._step(tensordict)
        return row.set("reward", self.count * 0.25)


def paid(max_steps: int = 3) -> EnvBase:
    return Paid(max_steps=max_steps)


def walk(first: int = 3) -> EnvBase:
    return GymWrapper(Walk(first), categorical_action_encoding=True)


def rows_that_reset_themselves() -> EnvBase:
    mode = {"autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP}
    return GymWrapper(
        gymnasium.make_vec(
            "CartPole-v1", 3, vectorization_mode="sync", vector_kwargs=mode
        )
    )


FAMILIES: dict[str, Callable[[], EnvBase]] = {
    "gym": functools.partial(GymEnv, "CartPole-v1"),
    "transformed": lambda: TransformedEnv(
        GymEnv("CartPole-v1"), Compose(DoubleToFloat(), StepCounter())
    ),
    "counting": paid,
    "text": lambda: own.CountingEnvWithString(max_steps=3),
    "batched": lambda: Paid(max_steps=3, batch_size=[2]),
    "vector env": rows_that_reset_themselves,
}


def step(
    env: Any, root: TensorDictBase, *actions: int
) -> tuple[TensorDictBase, TensorDictBase]:
    """Step all envs, and reset those that have ended."""
    dtype = env.full_action_spec["action"].dtype
    stepped, root = env.step_and_maybe_reset(
        root.set("action", torch.tensor(actions, dtype=dtype).unsqueeze(-1))
    )
    return stepped, root


def plain(td: TensorDictBase, *key: str) -> list[Any]:
    return td[key].flatten().tolist()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_episode_statistics_equal_torchrls_transforms(family: str) -> None:
    with closing(
        TransformedEnv(
            herd(2, FAMILIES[family], options=ON),
            Compose(RewardSum(), StepCounter(step_count_key="steps")),
        )
    ) as counted:
        if family != "text":
            check_env_specs(counted)
        counted.set_seed(0)
        torch.manual_seed(0)
        data = counted.rollout(60, break_when_any_done=False)
    for td in (data, data["next"]):
        torch.testing.assert_close(td["episode", "return"], td["episode_reward"])
        assert (td["episode", "length"] == td["steps"]).all()
    assert data["next", "done"].sum() > 2
    assert (data["next", "episode", "time"] > data["episode", "time"]).all()
    assert not data["episode", "time"][data["episode", "length"] == 0].any()
    dtypes = [
        data["next", "episode", name].dtype for name in ("return", "length", "time")
    ]
    assert dtypes == [torch.float32, torch.int64, torch.float32]


def test_episode_statistics_equal_the_executors() -> None:
    with (
        NativeParallelEnv(
            2, [Walk, functools.partial(Walk, 4)], num_workers=1, options=ON, seed=0
        ) as native,
        closing(herd(2, [walk, functools.partial(walk, 4)], options=ON)) as env,
    ):
        env.set_seed(0)
        both: tuple[Any, ...] = (native, env)
        roots, ends = [native.reset(), env.reset()], 0
        for i in range(40):
            for td in roots:
                td["action"] = torch.tensor([i % 3, (i + 1) % 3])
            (one, roots[0]), (other, roots[1]) = (
                each.step_and_maybe_reset(td)
                for each, td in zip(both, roots, strict=True)
            )
            for mine, theirs in ((other["next"], one["next"]), (roots[1], roots[0])):
                assert mine["episode"].keys() == theirs["episode"].keys()
                for name, value in mine["episode"].items():
                    assert value.dtype == theirs["episode", name].dtype
                torch.testing.assert_close(
                    mine["episode", "return"], theirs["episode", "return"]
                )
                assert (mine["episode", "length"] == theirs["episode", "length"]).all()
                assert mine["episode"].batch_size == theirs["episode"].batch_size
            assert (
                other["next", "episode", "return"] == one["next", "episode", "return"]
            ).all()  # no TorchRL rounds the rewards to float32
            assert (one["next", "done"] == other["next", "done"]).all()
            ends += int(one["next", "done"].sum())
    assert ends > 8


def test_agents_have_returns_of_their_own() -> None:
    with closing(herd(2, Team, options=ON)) as env:
        check_env_specs(env)
        assert env.observation_spec["agents", "episode", "return"].shape == (2, 2, 1)
        data = env.rollout(7, break_when_any_done=False)["next"]
    assert data["agents", "episode"].batch_size == data["agents"].batch_size
    first, second = data["agents", "episode", "return"][0, ..., 0].unbind(-1)
    assert first.tolist() == [1, 2, 1, 2, 1, 2, 1]
    assert second.tolist() == [10, 20, 30, 10, 20, 30, 10]
    # Since any agent was reset.
    assert plain(data[0], "episode", "length") == [1, 2, 1, 1, 1, 2, 1]
    assert plain(data[0], "episode", "shared_return") == [0.5, 1, 0.5, 0.5, 0.5, 1, 0.5]
    assert data["episode", "shared_return"].dtype == torch.float64


def test_groups_are_those_of_the_executor() -> None:
    make = functools.partial(Team, ("reward", "bonus"))
    with (
        NativeSerialEnv(1, make, options=ON, seed=0) as native,
        closing(herd(1, make, options=ON)) as env,
    ):
        one, other = native.rollout(2)["next"], env.rollout(2)["next"]
    for group in ((), ("agents",)):
        assert one[(*group, "episode")].keys() == other[(*group, "episode")].keys()
        for name in set(one[(*group, "episode")].keys()) - {"time"}:
            assert (
                one[(*group, "episode", name)] == other[(*group, "episode", name)]
            ).all()
            assert (
                one[(*group, "episode", name)].shape
                == other[(*group, "episode", name)].shape
            )


def test_masks_select_what_starts_again() -> None:
    with closing(
        ParallelEnv(3, functools.partial(paid, 9), num_processes=2, options=ON)
    ) as env:
        root = env.reset()
        for _ in range(2):
            _, root = step(env, root, 1, 1, 1)
        root = env.reset(root.set("_reset", torch.tensor([[False], [True], [False]])))
        assert plain(root, "episode", "length") == [2, 0, 2]
        assert plain(root, "episode", "return") == [0.75, 0, 0.75]
        root["_step"] = torch.tensor([True, True, False])
        root["action"] = torch.ones(3, 1, dtype=torch.int8)
        following = env.step(root)["next"]
        assert plain(following, "episode", "length") == [3, 1, 2]
        assert plain(following, "episode", "return") == [1.5, 0.25, 0.75]


@pytest.mark.broken_pool
def test_a_worker_that_is_replaced_starts_at_0() -> None:
    options = ExecutorOptions(
        episode_statistics=True, on_worker_loss="restart", check_actions="off"
    )
    with closing(ParallelEnv(2, functools.partial(paid, 9), options=options)) as env:
        root = env.reset()
        for _ in range(3):
            _, root = step(env, root, 1, 1)
        stepped, root = step(env, root, 6, 1)
        # The lost row repeats what was acted on.
        assert plain(stepped["next"], "episode", "length") == [3, 4]
        assert plain(root, "episode", "length") == [0, 4]
        stepped, _ = step(env, root, 1, 1)
        assert plain(stepped["next"], "episode", "length") == [1, 5]
        assert plain(stepped["next"], "episode", "return") == [0.25, 3.75]


@pytest.fixture(scope="module")
def buffer() -> ReplayBuffer:
    """Of the module, because its counters keep a segment of Python's multiprocessing open until the process ends."""
    return ReplayBuffer(storage=LazyTensorStorage(20), batch_size=8)


def test_collectors_and_replay_buffers_keep_them(buffer: ReplayBuffer) -> None:
    collector = Collector(
        herd(2, paid, options=ON), policy(), frames_per_batch=10, total_frames=20
    )
    logger = EpisodeLogger()
    for data in collector:
        buffer.extend(data.reshape(-1))
        logger.add(data)
    collector.shutdown()
    assert (logger.num_episodes, logger.mean_length, logger.mean_return) == (4, 4, 2.5)
    sample = buffer[:]
    assert plain(sample[:10], "next", "episode", "length") == [1, 2, 3, 4, 1] * 2
    assert set(
        plain(sample[sample["next", "done"].flatten()], "next", "episode", "return")
    ) == {2.5}


def test_the_env_is_the_one_that_the_factory_built() -> None:
    def make() -> EnvBase:
        return TransformedEnv(
            own.CountingEnv(max_steps=3), Compose(StepCounter(), RewardSum())
        )

    with closing(herd(2, make, options=ON)) as env, closing(herd(2, make)) as usual:
        env.rollout(3)
        usual.rollout(3)
        assert str(env.state_dict()) == str(usual.state_dict())
        env.load_state_dict(usual.state_dict())
        assert list(env.max_steps) == list(usual.max_steps)
        assert set(env.observation_keys) - set(usual.observation_keys) == {
            ("episode", "return"),
            ("episode", "length"),
            ("episode", "time"),
        }


class Own(TransformedEnv):
    """A class without a direct way."""


MAKERS = {
    "direct": walk,
    "transformed": lambda: TransformedEnv(walk()),
    "through TorchRL": lambda: Own(walk()),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_steps_with_and_without_tensordicts_share_an_episode(
    make: Callable[[], EnvBase],
) -> None:
    with closing(HostedEnv(make(), has_statistics=True)) as hosted:
        adapter = adapter_of(hosted)
        assert (hosted.direct is None) == isinstance(hosted.built, Own)
        place = [leaf.key for leaf in adapter.spec.observation].index(
            ("observation:episode/length",)
        )
        adapter.reset(0)
        assert [adapter.step([1])[0][place].item() for _ in range(2)] == [1, 2]
        with hosted.on_stage():
            assert plain(
                hosted.step(TensorDict(action=torch.tensor(1)), is_whole=False),
                "episode",
                "length",
            ) == [3]
            root = hosted.reset(None, {})
        assert plain(root, "episode", "length") == [0]
        assert adapter.step([1])[0][place].item() == 1
        with hosted.on_stage():
            assert plain(hosted.current(), "episode", "length") == [1]
        assert adapter.reset(0)[place].item() == 0


def test_an_env_that_has_such_an_observation_is_refused() -> None:
    class Taken(own.CountingEnv):
        def __init__(self) -> None:
            super().__init__()
            self.observation_spec["episode"] = Composite(length=Unbounded((1,)))

    expected = "episode_statistics failed: expected an env without an observation named 'episode'"
    with pytest.raises(FactoryError, match=expected):
        ParallelEnv(2, Taken, options=ON)
