"""The TorchRL adapter: partial resets, seeds, refusals, options, pictures and state, on real TorchRL envs."""

from functools import partial
from typing import Any

from tests.extras import needs, skip_without

skip_without("torchrl")

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from torchrl.data import Composite, Unbounded
from torchrl.envs import (
    Compose,
    EnvBase,
    GymEnv,
    GymWrapper,
    ObservationNorm,
    ParallelEnv,
    PendulumEnv,
    SerialEnv,
    StepCounter,
    TransformedEnv,
)

from envherd.executor.testing import check_env_contract
from envherd.workers import plain
from envherd.workers.adapters.torchrl.adapter import TorchRLAdapter
from envherd.workers.errors import FactoryError
from tests.envs import torchrl_envs, torchrl_own
from tests.workers.adapter_values import stored


class CountedResets(gymnasium.Wrapper):
    """Notes how it was reset."""

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        self.asked: list[dict[str, Any]] = []

    def reset(self, *, seed=None, options=None):
        self.asked.append({"seed": seed, "options": options})
        return super().reset(seed=seed, options=options)


def observed(adapter: TorchRLAdapter, values: list[Any]) -> dict[Any, Any]:
    return stored(adapter.spec.observation, values)


def vector_env(mode: AutoresetMode) -> EnvBase:
    env = gymnasium.make_vec(
        "CartPole-v1",
        3,
        vectorization_mode="sync",
        vector_kwargs={"autoreset_mode": mode},
    )
    return GymWrapper(env, categorical_action_encoding=True)


# ---- partial resets --------------------------------------------------------------------------------------------


def test_masks_of_all_rows_and_of_none():
    adapter = TorchRLAdapter(torchrl_envs.Seeded())
    adapter.reset(1, None, np.array([[True], [False], [False]]))
    adapter.step([np.ones((3, 1), np.int8)])
    unchanged = observed(adapter, adapter.reset(2, None, np.zeros((3, 1), bool)))
    assert unchanged["count",].tolist() == [[1], [1], [1]]
    assert unchanged["text",] == ["at 1", "at 1", "at 1"]
    fresh = observed(adapter, adapter.reset(3, None, np.ones((3, 1), bool)))
    assert fresh["count",].tolist() == [[0], [0], [0]]
    assert adapter.env.seeds == [1, 3], (
        "the first reset is of all rows; a mask of none resets and seeds nothing"
    )


@pytest.mark.parametrize("shape", [(3,), (2, 2)])
def test_the_contract_holds_for_text_in_rows(shape):
    check_env_contract(partial(torchrl_envs.Seeded, shape), num_steps=12)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [AutoresetMode.DISABLED, AutoresetMode.SAME_STEP])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_vector_envs_keep_their_last_observations(mode):
    adapter, by_hand = (
        TorchRLAdapter(vector_env(mode)),
        [gymnasium.make("CartPole-v1") for _ in range(3)],
    )
    assert adapter.spec.batch_shape == (3,)
    expected = np.stack(
        [env.reset(seed=11 + row)[0] for row, env in enumerate(by_hand)]
    )
    assert np.array_equal(
        observed(adapter, adapter.reset(11))["observation",], expected
    )
    terminated = np.zeros((3, 1), bool)
    while not terminated.any():
        # The second one falls over.
        action = np.array([int(expected[0, 2] > 0), 1, int(expected[2, 2] > 0)])
        observation, _, terminated, truncated = adapter.step([action])
        expected = np.stack(
            [env.step(a)[0] for env, a in zip(by_hand, action.tolist(), strict=True)]
        )
        assert np.array_equal(observed(adapter, observation)["observation",], expected)
    assert (terminated.tolist(), truncated.any()) == ([[False], [True], [False]], False)
    rows = observed(adapter, adapter.reset(12, None, terminated))["observation",]
    assert np.array_equal(rows[[0, 2]], expected[[0, 2]])
    assert np.abs(rows[1]).max() <= 0.05 < np.abs(expected[1]).max()


# ---- seeds -----------------------------------------------------------------------------------------------------


def test_a_gym_env_is_reset_once_with_the_seed_and_the_options():
    inner = CountedResets(gymnasium.make("CartPole-v1").unwrapped)
    adapter = TorchRLAdapter(TransformedEnv(GymWrapper(inner), StepCounter()))
    inner.asked.clear()
    options = {"options": {"low": 0.01, "high": 0.02}}
    values = observed(adapter, adapter.reset(5, options))["observation",]
    assert inner.asked == [{"seed": 5, "options": {"low": 0.01, "high": 0.02}}]
    assert ((values >= 0.01) & (values <= 0.02)).all()
    assert options == {"options": {"low": 0.01, "high": 0.02}}
    adapter.reset(None)
    adapter.reset(6, {"seed": 9})
    assert [asked["seed"] for asked in inner.asked] == [5, None, 9]


@pytest.mark.parametrize(
    "make", [torchrl_envs.Noisy, PendulumEnv, torchrl_own.StateLessCountingEnv]
)
def test_torchs_global_generator_is_swapped_around_env_calls(make):
    adapter, other = TorchRLAdapter(make()), TorchRLAdapter(torchrl_envs.Noisy())
    action = [np.zeros(leaf.shape, leaf.dtype) for leaf in adapter.spec.action] + [
        None
    ] * len(adapter.spec.state)

    def play(seed: int, disturb: Any) -> list[bytes]:
        shown = [observed(adapter, adapter.reset(seed))]
        for _ in range(2):
            disturb()
            shown.append(observed(adapter, adapter.step(action)[0]))
        return [array.tobytes() for row in shown for array in row.values()]

    before = torch.get_rng_state()
    quiet = play(3, lambda: None)
    assert torch.equal(before, torch.get_rng_state())
    assert quiet == play(
        3, lambda: (torch.rand(5), torch.manual_seed(0), other.reset(8))
    )
    assert quiet != play(4, lambda: None)


@pytest.mark.parametrize(
    ("make", "is_seedable"),
    [
        (partial(GymEnv, "CartPole-v1"), True),
        (PendulumEnv, True),
        (torchrl_own.EnvThatDoesNothing, False),  # its _set_seed has no body
    ],
)
def test_metadata_says_whether_an_env_can_be_seeded(make, is_seedable):
    assert TorchRLAdapter(make()).spec.metadata["seedable"] is is_seedable


# ---- Melting Pot -----------------------------------------------------------------------------------------------


@needs("meltingpot")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # TensorFlow's and JAX's own, at import
def test_a_meltingpot_env_has_its_groups_world_picture_and_end():
    from torchrl.envs import MeltingpotEnv

    env = MeltingpotEnv("prisoners_dilemma_in_the_matrix__repeated", max_steps=4)
    adapter = TorchRLAdapter(TransformedEnv(env, StepCounter()))
    spec = adapter.spec
    assert spec.groups == ((("agents",), (2,)),)
    assert spec.metadata["seedable"] is False
    assert spec.metadata["group_map"] == {"agents": ["player_0", "player_1"]}
    assert [(leaf.key, leaf.shape, str(leaf.domain)) for leaf in spec.action] == [
        (("agents", "action"), (2,), "0..7")
    ]
    seen = observed(adapter, adapter.reset(0))
    assert np.array_equal(adapter.render(), seen["RGB",])
    for step in range(1, 5):
        *_, terminated, truncated = adapter.step([np.array([1, 3]), None])
        assert (terminated, truncated) == (step == 4, False)
    adapter.close()


# ---- refusals --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrap",
    [lambda env: env, lambda env: TransformedEnv(env, StepCounter())],
    ids=["bare", "transformed"],
)
@pytest.mark.parametrize("batched", [ParallelEnv, SerialEnv])
def test_batched_envs_are_refused_before_they_start(batched, wrap):
    env = wrap(batched(2, PendulumEnv))
    with pytest.raises(
        FactoryError,
        match=f"got a torchrl {batched.__name__}, which runs several. Give the factory of one",
    ):
        TorchRLAdapter(env)
    assert env.is_closed


@needs("vmas")
def test_vmas_envs_of_a_process_draw_from_states_of_their_own():
    def trace(*others):
        adapter = TorchRLAdapter(torchrl_envs.SAME_DATA["vmas"]())
        seen = [adapter.reset(1)]
        for other in others:
            other.reset(2)
        return [*seen[0], *adapter.reset(None)]

    among = trace(TorchRLAdapter(torchrl_envs.SAME_DATA["vmas"]()))
    assert all(map(np.array_equal, trace(), among))


# ---- state, pictures, closing ----------------------------------------------------------------------------------


def test_state_dict_is_plain_and_comes_back():
    def make(loc: float) -> TorchRLAdapter:
        norm = ObservationNorm(
            torch.full((4,), loc), torch.ones(4), in_keys=["observation"]
        )
        return TorchRLAdapter(
            TransformedEnv(GymEnv("CartPole-v1"), Compose(norm, StepCounter()))
        )

    one, other = make(1.0), make(5.0)
    before = [
        observed(adapter, adapter.reset(2))["observation",] for adapter in (one, other)
    ]
    assert not np.array_equal(*before)
    state = plain.decode(plain.encode(one.state_dict()))
    assert [type(value) for value in state.values()].count(np.ndarray) == len(state) > 0
    other.load_state_dict(state)
    assert np.array_equal(before[0], observed(other, other.reset(2))["observation",])


@needs("box2d")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # pygame's own
def test_pictures():
    drawn = TorchRLAdapter(GymEnv("CartPole-v1", render_mode="rgb_array"))
    drawn.reset(0)
    picture = drawn.render()
    assert (picture.dtype, picture.shape) == (np.uint8, (400, 600, 3))
    assert len(np.unique(picture)) > 2
    assert TorchRLAdapter(PendulumEnv()).render() is None
    pixels = TorchRLAdapter(GymEnv("CartPole-v1", from_pixels=True))
    shown = observed(pixels, pixels.reset(0))["pixels",]
    assert np.array_equal(
        pixels.render(), shown if shown.shape[-1] == 3 else shown.transpose(1, 2, 0)
    )


def test_close_closes_the_env_inside(monkeypatch):
    env = gymnasium.make("CartPole-v1").unwrapped
    closed = []
    monkeypatch.setattr(env, "close", lambda: closed.append(True))
    TorchRLAdapter(TransformedEnv(GymWrapper(env), StepCounter())).close()
    assert closed == [True]


def test_unused_composites_are_no_leaves():
    env = torchrl_envs.Typed(
        Composite(inner=Composite(value=Unbounded((2,))), nothing=Composite())
    )
    assert [leaf.key for leaf in TorchRLAdapter(env).spec.observation] == [
        ("count",),
        ("added", "inner", "value"),
    ]
