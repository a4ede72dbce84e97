"""Direct ways give bit for bit what TorchRL's own code gives, also between calls that go through TorchRL."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from tests.extras import needs, skip_without

skip_without("torchrl")

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.data import Unbounded
from torchrl.envs import (
    ActionDiscretizer,
    CatFrames,
    CatTensors,
    Compose,
    DMControlEnv,
    DoubleToFloat,
    EnvBase,
    FlattenObservation,
    FrameSkipTransform,
    GymEnv,
    GymWrapper,
    InitTracker,
    MeltingpotWrapper,
    ObservationNorm,
    PettingZooWrapper,
    RenameTransform,
    RewardClipping,
    RewardScaling,
    RewardSum,
    StepCounter,
    TensorDictPrimer,
    TimeMaxPool,
    ToTensorImage,
    TransformedEnv,
    VecNorm,
)
from torchrl.envs.utils import MarlGroupMapType

from envherd.executor.facades.torchrl.ways.direct import leaf_keys
from envherd.executor.facades.torchrl.worker import HostedAdapter, HostedEnv
from tests.envs import torchrl_own
from tests.envs.torchrl_direct_envs import Buffered, Keeper, Nested, Twice, herd

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning",
    "ignore::FutureWarning",
    # TorchRL 0.10 with NumPy 2.1.
    "ignore:In future, it will be an error for 'np.bool:DeprecationWarning",
)

Make = Callable[[], EnvBase]


def gym(name: str, *transforms: Any, **kwargs: Any) -> EnvBase:
    env = GymEnv(name, **kwargs)
    return TransformedEnv(env, Compose(*transforms)) if transforms else env


def swings(*transforms: Any, **kwargs: Any) -> EnvBase:
    """Return a pendulum whose episodes have nine steps."""
    return gym(PENDULUM, *transforms, max_episode_steps=9, **kwargs)


def melting_pot(name: str, *transforms: Any, **kwargs: Any) -> EnvBase:
    """Return a substrate whose episodes depend on the number of its resets and the actions alone."""
    from envherd.workers.adapters.meltingpot.adapter import Episodes
    from envherd.workers.adapters.meltingpot.factory import MeltingPotFactory

    cap = kwargs.pop("max_frames", None)
    env = MeltingpotWrapper(MeltingPotFactory(name, deterministic=True)(), **kwargs)
    episodes = Episodes(env._env)
    episodes.seed_next(7)
    if cap is not None:
        settings: Any = episodes._settings()
        settings["maxEpisodeLengthFrames"] = str(cap)
    return TransformedEnv(env, Compose(*transforms)) if transforms else env


def farm(
    *transforms: Any, dies: bool = True, masks: str = "", **kwargs: Any
) -> EnvBase:
    own = {
        name: kwargs.pop(name) for name in ("has_infos", "is_nested") if name in kwargs
    }
    env = PettingZooWrapper(
        herd(dies=dies, masks=masks, **own), use_mask=dies, **kwargs
    )
    return TransformedEnv(env, Compose(*transforms)) if transforms else env


def terminating() -> EnvBase:
    env = DMControlEnv("cartpole", "balance")
    env.task.get_termination = lambda physics: 0.0 if physics.time() > 0.1 else None
    return env


PENDULUM = "Pendulum-v1"
AGENTS = ("walker", "reward")
#: name -> (factory, number of steps at most), and False for envs that cannot be stepped after an end
DIRECT: dict[str, Any] = {
    "one-hot": (lambda: gym("CartPole-v1"), 60),
    "categorical": (lambda: gym("CartPole-v1", categorical_action_encoding=True), 60),
    "box": (lambda: swings(device="cpu"), 60),
    "pixels": (lambda: gym("CartPole-v1", from_pixels=True, max_episode_steps=5), 40),
    "pixels and state": (
        lambda: gym(
            "CartPole-v1", from_pixels=True, pixels_only=False, max_episode_steps=5
        ),
        40,
    ),
    "buffered": (lambda: GymWrapper(Buffered(), categorical_action_encoding=True), 60),
    **{
        f"nested, {kind}": (lambda kind=kind: GymWrapper(Nested(kind)), 60)
        for kind in ("float", "float32", "int")
    },
    **{
        f"nested, {kind}": (lambda kind=kind: GymWrapper(Nested(kind)), 60)
        for kind in ("zero", "array", "None")
    },
    "fast encoding": (lambda: (env := swings()).fast_encoding() or env, 60),
    "counters": (
        lambda: gym(
            PENDULUM, StepCounter(7), RewardSum(), InitTracker(), DoubleToFloat()
        ),
        60,
    ),
    "no transform": (lambda: TransformedEnv(GymEnv("CartPole-v1")), 60),
    "one transform": (lambda: TransformedEnv(GymEnv("CartPole-v1"), StepCounter()), 60),
    "scales": (
        lambda: swings(
            RewardScaling(0.5, 2.0), ObservationNorm(0.5, 2.0, in_keys=["observation"])
        ),
        60,
    ),
    "frames": (
        lambda: gym(
            PENDULUM, CatFrames(3, dim=-1, in_keys=["observation"]), StepCounter(9)
        ),
        60,
    ),
    "max pool": (
        lambda: gym(
            PENDULUM, TimeMaxPool(in_keys=["observation"], T=3), StepCounter(9)
        ),
        60,
    ),
    "norm": (
        lambda: gym(
            PENDULUM, VecNorm(in_keys=["observation", "reward"]), StepCounter(9)
        ),
        60,
    ),
    "images": (
        lambda: gym(
            "CartPole-v1",
            ToTensorImage(in_keys=["pixels"]),
            FlattenObservation(-3, -1, in_keys=["pixels"]),
            from_pixels=True,
            max_episode_steps=5,
        ),
        40,
    ),
    "discrete": (
        lambda: gym(PENDULUM, ActionDiscretizer(num_intervals=4), StepCounter(9)),
        60,
    ),
    "primer": (
        lambda: swings(
            InitTracker(), TensorDictPrimer(hidden=Unbounded((4,)), default_value=0.0)
        ),
        60,
    ),
    "renamed": (
        lambda: swings(
            RenameTransform(["observation"], ["seen"]), RewardClipping(-1, 0)
        ),
        60,
    ),
    "skips frames": (lambda: gym(PENDULUM, FrameSkipTransform(3), StepCounter(9)), 60),
    "function": (
        lambda: TransformedEnv(
            swings(), lambda td: td.set("observation", td["observation"] + 1)
        ),
        60,
    ),
    "keeper": (lambda: gym(PENDULUM, Keeper(), StepCounter(9)), 60),
    "keeper of buffers": (lambda: TransformedEnv(GymWrapper(Buffered()), Keeper()), 60),
    "twice": (lambda: gym(PENDULUM, Twice(), RewardSum(), StepCounter(9)), 60),
}
DM = {
    "dm_control": (lambda: DMControlEnv("cartpole", "swingup", time_limit=0.1), 60),
    "dm_control, terminates": (terminating, 60),
    "dm_control, transforms": (
        lambda: TransformedEnv(
            DMControlEnv("reacher", "easy"),
            Compose(
                CatTensors(["position", "velocity"], "observation"),
                DoubleToFloat(),
                StepCounter(9),
            ),
        ),
        60,
    ),
}
ZOO = {
    f"{masks or 'no masks'}, {has_infos=}, {is_nested=}, {kwargs}": (
        lambda masks=masks, has_infos=has_infos, is_nested=is_nested, kwargs=kwargs: (
            farm(masks=masks, has_infos=has_infos, is_nested=is_nested, **kwargs)
        ),
        60,
    )
    for masks in ("", "obs", "info")
    for has_infos, is_nested in ((True, False), (False, True))
    for kwargs in (
        {},
        {"done_on_any": False},
        {"done_on_any": False, "return_state": True, "categorical_actions": False},
    )
} | {
    "groups": (
        lambda: farm(
            dies=False,
            group_map={
                "b": ["walker_2", "walker_0"],
                "c": ["walker_1"],
                "a": ["bird_0"],
            },
        ),
        60,
        False,
    ),
    "transforms": (
        lambda: farm(
            StepCounter(8), RewardSum(in_keys=[AGENTS]), masks="obs", done_on_any=False
        ),
        60,
    ),
}
MASKS = torchrl_own.since((0, 13), "masks of agents that are gone")
COMMONS, PRISONERS = (
    "commons_harvest__open",
    "prisoners_dilemma_in_the_matrix__repeated",
)
SPLIT = {
    "b": ["player_3", "player_1"],
    "a": ["player_0", "player_2", "player_6"],
    "c": ["player_4"],
    "d": ["player_5"],
}
POTS = {
    "a real end": (lambda: melting_pot(COMMONS, max_frames=6), 40),
    "commons": (lambda: melting_pot(COMMONS, max_steps=9), 20),
    "inventories, one-hot": (
        lambda: melting_pot(PRISONERS, max_steps=9, categorical_actions=False),
        20,
    ),
    "groups": (lambda: melting_pot(COMMONS, group_map=SPLIT, max_steps=9), 20),
    "a group each": (
        lambda: melting_pot(
            COMMONS, group_map=MarlGroupMapType.ONE_GROUP_PER_AGENT, max_steps=9
        ),
        20,
    ),
    "transforms": (
        lambda: melting_pot(
            COMMONS, StepCounter(8), RewardSum(in_keys=[("agents", "reward")])
        ),
        20,
    ),
}


class Pair:
    """Two hosted envs of the same env: one with its direct way, one without."""

    def __init__(self, make: Make) -> None:
        self.adapters: list[Any] = []
        for _ in range(2):
            torch.manual_seed(0)
            hosted = HostedEnv(make())
            # Melting Pot.
            with contextlib.suppress(NotImplementedError), hosted.on_stage():
                hosted.seed(5, static=False)
            self.adapters.append(HostedAdapter(hosted))
        direct, usual = self.adapters
        assert direct.spec.metadata["way"] == "direct"
        usual.env.direct = None
        self.env = usual.env.env
        self.leaves = {
            "observation": direct.spec.observation,
            "reward": direct.spec.reward,
        }
        self.rng = np.random.default_rng(3)

    def both(self, act: Callable[[Any], Any]) -> tuple[Any, Any]:
        results = []
        for adapter in self.adapters:
            torch.manual_seed(int(self.rng.integers(1)))
            results.append(act(adapter))
        return results[0], results[1]

    def check(self, left: list[Any], right: list[Any], group: str) -> None:
        for leaf, *values in zip(self.leaves[group], left, right, strict=True):
            one, other = (np.asarray(value) for value in values)
            assert np.can_cast(one.dtype, leaf.dtype, "same_kind"), leaf
            one, other = (
                array.astype(leaf.dtype).reshape(leaf.shape) for array in (one, other)
            )
            assert one.tobytes() == other.tobytes(), (leaf.key, one, other)

    def reset(self) -> None:
        self.check(*self.both(lambda adapter: adapter.reset(None)), "observation")

    def inputs(self) -> list[np.ndarray]:
        """Return random actions, and states as they are."""
        random = self.env.full_action_spec.rand()
        root = self.adapters[1].env.root
        actions = set(leaf_keys(self.env)[0]) - set(self.env.state_keys)
        return [
            (random if key in actions else root).get(key).numpy()
            for key in leaf_keys(self.env)[0]
        ]

    def step(self) -> bool:
        """Step both; return whether they ended."""
        inputs = self.inputs()
        left, right = self.both(
            lambda adapter: adapter.step([array.copy() for array in inputs])
        )
        self.check(left[0], right[0], "observation")
        self.check(left[1], right[1], "reward")
        assert left[2:] == right[2:]
        return bool(left[2])

    def asked(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of both hosted envs by name; return the result of the usual one."""

        def call(adapter: Any) -> Any:
            with adapter.env.on_stage():
                copied = [
                    arg.clone() if isinstance(arg, TensorDict) else arg for arg in args
                ]
                return getattr(adapter.env, name)(*copied, **kwargs)

        left, right = self.both(call)
        self.same(left, right)
        return right

    def same(self, left: Any, right: Any) -> None:
        if not isinstance(right, TensorDict):
            return
        named = [
            dict(td.items(include_nested=True, leaves_only=True))
            for td in (left, right)
        ]
        assert named[0].keys() == named[1].keys()
        for key, value in named[1].items():
            assert named[0][key].dtype == value.dtype
            assert named[0][key].numpy().tobytes() == value.numpy().tobytes(), key

    def close(self) -> None:
        for adapter in self.adapters:
            adapter.close()


def compare(make: Make, num_steps: int, steps_on: bool = True) -> None:  # noqa: FBT001, FBT002
    """Step both over ends of episodes, with calls by name between steps, until there were four ends and a step.

    The third end is stepped on, where the env allows that; resets come after the others.
    """
    with contextlib.closing(Pair(make)) as pair:
        pair.reset()
        num_ends = 0
        for i in range(num_steps):
            has_ended = pair.step()
            num_ends += has_ended
            if has_ended and not (steps_on and num_ends % 4 == 3):
                pair.reset()
            if i % 40 == 7:
                pair.asked("current")
                row = TensorDict(dict(zip(*_named(pair), strict=True)), [])
                pair.asked("step", row, is_whole=False)
                pair.asked("step_and_maybe_reset", row)
            if i % 40 == 16:
                pair.asked("reset", None, {})
            if i > 17 and num_ends >= 4 + has_ended:
                break
        assert num_ends, "no episode has ended"
        pair.asked("current")


def _named(pair: Pair) -> tuple[list[Any], list[torch.Tensor]]:
    return leaf_keys(pair.env)[0], [
        torch.from_numpy(array.copy()) for array in pair.inputs()
    ]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", DIRECT)
def test_gymnasium(case: str) -> None:
    compare(*DIRECT[case])


@needs("dm-control")
@pytest.mark.parametrize("case", DM)
def test_dm_control(case: str) -> None:
    compare(*DM[case])


@needs("dm-control")
@pytest.mark.full
def test_dm_control_that_draws() -> None:
    """In a separate process, because dm_control selects its OpenGL backend when it is imported."""
    environ = os.environ | {"MUJOCO_GL": "egl"}
    script = [sys.executable, "-m", "tests.workers.torchrl_pixels"]
    done = subprocess.run(
        script, env=environ, capture_output=True, text=True, check=False, timeout=200
    )
    if "no OpenGL" in done.stdout:
        pytest.skip("no EGL on this machine")
    assert done.stdout.split() == ["pixels", "pixels,position,velocity"], done.stderr[
        -2000:
    ]


@pytest.mark.sampled(2)
@needs("pettingzoo")
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case, marks=MASKS if case.startswith(("obs", "info", "transforms")) else ()
        )
        for case in ZOO
    ],
)
def test_pettingzoo(case: str) -> None:
    compare(*ZOO[case])


@pytest.mark.sampled(2)
@needs("meltingpot")
@pytest.mark.parametrize("case", POTS)
def test_melting_pot(case: str) -> None:
    compare(*POTS[case])


class Other(GymEnv):
    """A subclass, which may do anything."""


def with_reader() -> EnvBase:
    env = GymEnv(PENDULUM)
    env.set_info_dict_reader(lambda _info, td: td)
    return env


def replaced() -> EnvBase:
    env = GymEnv(PENDULUM)
    env.__dict__["_step"] = env._step
    return env


def checking() -> EnvBase:
    env = GymEnv(PENDULUM)
    env.run_type_checks = True
    return env


REFUSED: dict[str, tuple[Make, str]] = {
    "subclass": (lambda: Other(PENDULUM), "Other has no direct way"),
    "info reader": (with_reader, "GymEnv: it reads infos"),
    "type checks": (checking, "GymEnv: it checks types"),
    "frame skip": (lambda: gym(PENDULUM, frame_skip=2), "GymEnv: it skips frames"),
    "replaced": (replaced, "GymEnv: a method of the instance was replaced"),
    "inside": (
        lambda: TransformedEnv(Other(PENDULUM), StepCounter()),
        "around Other has no direct way",
    ),
    "nested": (
        lambda: TransformedEnv(
            gym(PENDULUM, RewardSum()), StepCounter(9), auto_unwrap=False
        ),
        "around a TransformedEnv",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unusual_envs_keep_torchrls_code(case: str) -> None:
    make, reason = REFUSED[case]
    with contextlib.closing(HostedEnv(make())) as hosted:
        way = HostedAdapter(hosted).spec.metadata["way"]
        assert way.startswith("TorchRL's own code, because ")
        assert reason in way
        assert hosted.direct is None


def noisy(env: Any) -> Any:
    return gymnasium.wrappers.TransformReward(
        env, lambda reward: float(reward) + torch.rand(()).item()
    )


@pytest.mark.parametrize(
    ("make", "is_stepped_in_c"),
    [
        (lambda: gymnasium.make("CartPole-v1"), True),
        (
            lambda: gymnasium.wrappers.RecordEpisodeStatistics(
                gymnasium.make("CartPole-v1")
            ),
            True,
        ),
        (lambda: noisy(gymnasium.make("CartPole-v1")), False),
        pytest.param(
            lambda: DMControlEnv("cartpole", "balance"), True, marks=needs("dm-control")
        ),
        pytest.param(terminating, False, marks=needs("dm-control")),
    ],
    ids=["gym", "gym statistics", "gym noise", "dm_control", "dm_control that ends"],
)
def test_envs_that_may_draw_from_torch_keep_their_own_generator(
    make: Callable[[], Any], is_stepped_in_c: Any
) -> None:
    """C, which does not exchange the states of torch's generator, steps only those that cannot."""
    env = make()
    with contextlib.closing(
        HostedAdapter(HostedEnv(env if isinstance(env, EnvBase) else GymWrapper(env)))
    ) as adapter:
        assert (adapter.env_call() is not None) == is_stepped_in_c
