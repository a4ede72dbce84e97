"""Batched torch simulators: one protocol for every way of handling ended rows, and no invented transitions."""

import contextlib
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from envherd.executor import ExecutorOptions, ParallelEnv, SerialEnv
from envherd.executor.testing import Contract
from envherd.workers.adapters.simulators.native import TorchNativeAdapter
from envherd.workers.errors import EnvError, FactoryError, ResetNeeded
from tests.contracts.batched_families import isaac_by_hand, reset_direct, reset_managed
from tests.contracts.family import Family
from tests.envs import batched_envs
from tests.envs import torch_simulators as simulators
from tests.envs.torch_simulators import masked, recorded
from tests.extras import needs
from tests.oracles import isaaclab_standin as isaac
from tests.oracles.driving import Driven
from tests.oracles.maniskill_standin import make_maniskill, make_maniskill_vector
from tests.oracles.plain_batches import PlainSimulator
from tests.oracles.plain_loops import Values
from tests.scale import scaled


@pytest.fixture(autouse=True)
def _one_simulator_after_another():
    yield
    isaac.forget_simulator()


def still(td: Any) -> Any:
    """Do nothing, as a policy."""
    return td.set("action", torch.zeros(*td.batch_size, 1))


#: What -> whether it is direct or managed, and its settings.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "direct": ("direct", {}),
    "direct that publishes": ("direct", {"compute_final_obs": True}),
    "direct with fresh tensors": (
        "direct",
        {"compute_final_obs": True, "reuses_buffers": False},
    ),
    "direct that resets by mask": (
        "direct",
        {"compute_final_obs": False, "resets_by_mask": True, "reuses_buffers": False},
    ),
    "wrapped": ("direct", {}),
    "managed": ("managed", {}),
    "managed that publishes": ("managed", {"compute_final_obs": True}),
    "managed that resets by mask": (
        "managed",
        {"compute_final_obs": False, "resets_by_mask": True, "reuses_buffers": False},
    ),
    "managed that never resets": (
        "managed",
        {
            "compute_final_obs": False,
            "autoreset_mode": "DISABLED",
            "reuses_buffers": False,
        },
    ),
    "managed with histories": ("managed", {"history_length": 3}),
    "managed with histories that publishes": (
        "managed",
        {"history_length": 3, "compute_final_obs": True},
    ),
}
RESET_ROWS = {"direct": reset_direct, "managed": reset_managed}


class WithHistory(PlainSimulator):
    """Observes the latest frames of each row, oldest first; those that IsaacLab publishes at an end lack the last."""

    length: int
    frames: list[np.ndarray]

    def _observe(self, values: Values) -> Values:
        return {**values, ("policy",): np.concatenate(self.frames, 1)}

    def reset(self, seed: int, mask: np.ndarray | None = None) -> Values:
        values = super().reset(seed, mask)
        now = values["policy",]
        before = self.frames if mask is not None else [now] * self.length
        is_new = np.ones((len(now), 1), bool) if mask is None else mask
        self.frames = [np.where(is_new, now, frame) for frame in before]
        return self._observe(values)

    def step(self, action: Any) -> Any:
        values, *rest = super().step(action)
        self.frames = [*self.frames[1:], values["policy",]]
        return self._observe(values), *rest


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_row_is_a_step_that_happened(case):
    """Beside a simulator that is driven by hand, and publishes its last observations."""
    kind, cfg = CASES[case]

    class ByHand(WithHistory):
        length = cfg.get("history_length", 1)

    family = Family(
        title=case,
        make_env=partial(
            batched_envs.isaac, "wrapped" if case == "wrapped" else kind, **cfg
        ),
        plain=partial(
            ByHand,
            partial(
                isaac_by_hand,
                kind,
                autoreset_mode=cfg.get("autoreset_mode", "SAME_STEP"),
            ),
            RESET_ROWS[kind],
            resets_itself="autoreset_mode" not in cfg,
        ),
    )
    with (
        SerialEnv(1, family.make_env, seed=3) as env,
        contextlib.closing(Driven(family, env, 3)) as driven,
    ):
        num_resets = driven.step_and_reset_at_random(
            scaled(60, full=640), np.random.default_rng(7)
        )
    assert num_resets > scaled(60, full=640)


def test_rows_that_ended_stay_ended_until_they_are_reset():
    make_env, built = recorded(isaac.make_direct, max_length=2)
    with SerialEnv(1, make_env, seed=3) as env:
        env.reset()
        for _ in range(2):
            env.step(still(env.current()))
        root = env.reset(masked([0, 3]))
        assert root["done"].flatten().tolist() == [False, True, True, False]
        with pytest.raises(ResetNeeded):
            env.step(still(root))
        assert built[0].common_step_counter == 2
        env.step(still(env.reset(masked([1, 2]))))


def test_last_observations_have_the_noise_of_the_step():
    with SerialEnv(
        1,
        recorded(isaac.make_direct, observation_noise_model=1e-3, max_length=3)[0],
        seed=0,
    ) as env:
        final = env.rollout(3)["next", "policy"][0, -1]
    assert (final[:, 3] - 3).abs().max() < 1e-2
    assert (final[:, 3] != 3).all()


def test_a_reset_of_rows_that_never_ended_does_not_tell_of_itself():
    make_env, _ = recorded(isaac.make_direct, resets_too_many=True, max_length=50)
    with (
        SerialEnv(1, make_env, seed=0) as env,
        pytest.raises(EnvError, match="neither terminated nor truncated"),
    ):
        env.rollout(
            40,
            policy=lambda td: td.set(
                "action", torch.tensor([[[9.0], [0.0], [0.0], [0.0]]])
            ),
        )


# ---- one simulator in a process ------------------------------------------------------------------


@pytest.mark.slow
def test_simulators_in_workers_of_their_own_give_the_same_data():
    with SerialEnv(1, isaac.make_direct, seed=5) as env:
        alone = env.rollout(30, still, break_when_any_done=False)
    with ParallelEnv(2, isaac.make_direct, num_workers=2, seed=5) as env:
        both = env.rollout(30, still, break_when_any_done=False)
    for key in alone.keys(include_nested=True, leaves_only=True):
        assert torch.equal(alone[key], both[:1][key]), key
    assert not torch.equal(both["policy"][0], both["policy"][1])


def test_discrete_actions_reach_the_simulator_as_it_samples_them():
    make_env, built = recorded(isaac.make_direct, num_discrete=3)
    with SerialEnv(1, make_env, seed=0) as env:
        assert env.rollout(3)["action"].shape == (1, 3, 4)
        assert built[0].given.shape == (4, 1)
        assert built[0].given.dtype is torch.int64


# ---- simulators of other makes -------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("make", [simulators.Counter, simulators.SameStep])
def test_every_rule_holds(make):
    assert Contract(make, num_steps=20).check_all().num_ends > 1


def test_a_factory_may_declare_what_the_simulator_does_not_say():
    def make_env() -> Any:
        return TorchNativeAdapter(simulators.Silent(), resets="same_step")

    with SerialEnv(1, make_env, seed=0) as env:
        data = env.rollout(6, break_when_any_done=False)[0]
    assert data["next", "observation"][2, 0, 1] == 3
    assert data["observation"][3, 0, 1] == 0
    assert data["observation"][3, 0, 0] == data["next", "observation"][2, 0, 0] + 1


def test_a_reset_with_options_of_rows_that_are_reset_already_is_refused():
    with SerialEnv(1, simulators.SameStep, seed=0) as env:
        env.rollout(3)
        with pytest.raises(EnvError, match="in the step in which they end"):
            env.reset(masked([0]), options={"mass": 2})


# ---- which envs are torch simulators -------------------------------------------------------------


class Plain:
    """A simulator of no known class."""

    def __init__(self) -> None:
        self._inner = simulators.Counter()
        self.num_envs, self.single_action_space = 4, self._inner.single_action_space
        self.metadata, self.reset, self.step = (
            self._inner.metadata,
            self._inner.reset,
            self._inner.step,
        )


@pytest.mark.parametrize(
    ("make", "family"),
    [
        (simulators.Counter, "torch"),
        (isaac.make_direct, "isaaclab"),
        (isaac.make_managed, "isaaclab"),
        (isaac.make_wrapped, "isaaclab"),
    ],
)
def test_simulators_are_known_by_themselves(make, family):
    with SerialEnv(1, make) as env:
        assert env.specs[0].family == family
        assert env.batch_size == (1, 4)


def test_env_type_torch_takes_anything_that_has_rows():
    with pytest.raises(FactoryError, match="known family"):
        SerialEnv(1, Plain)
    with SerialEnv(1, Plain, options=ExecutorOptions(env_type="torch"), seed=0) as env:
        assert env.rollout(3)["next", "observation"].shape == (1, 3, 4, 2)


def test_env_type_numpy_is_for_envs_that_take_arrays():
    with pytest.raises(FactoryError, match="takes torch tensors"):
        SerialEnv(1, isaac.make_direct, options=ExecutorOptions(env_type="numpy"))
    isaac.forget_simulator()

    class Arrays(gymnasium.Env[Any, Any]):
        num_envs, device = 3, "cpu"
        observation_space = action_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            return np.zeros(2, np.float32), {}

        def step(self, action: Any) -> Any:
            assert type(action) is np.ndarray
            return action, 0.0, False, False, {}

    with SerialEnv(1, Arrays, options=ExecutorOptions(env_type="numpy"), seed=0) as env:
        assert env.batch_size == (1,)
        env.rollout(2)


@needs("torchrl")
def test_env_type_torch_leaves_torchrl_to_its_own_adapter():
    from torchrl.envs import GymEnv

    with SerialEnv(
        1, lambda: GymEnv("CartPole-v1"), options=ExecutorOptions(env_type="torch")
    ) as env:
        assert env.specs[0].family == "torchrl"


def test_infos_are_arrays():
    with SerialEnv(
        1, isaac.make_direct, options=ExecutorOptions(infos="plain"), seed=0
    ) as env:
        env.reset()
        for _ in range(3):
            env.step(still(env.current()))
        info = env.infos()[0]
    assert set(info["log"]) == {"Episode_Reward/place"}


# ---- ManiSkill's interface: rows are reset by `options["env_idx"]`, none twice -------------------


@pytest.mark.parametrize(
    "make", [make_maniskill, partial(make_maniskill_vector, auto_reset=False)]
)
def test_rows_are_reset_by_their_ids(make):
    make_env, built = recorded(make)
    with SerialEnv(1, make_env, seed=0) as env:
        assert env.specs[0].family == "maniskill"
        assert env.specs[0].metadata["resets_itself"] is False
        env.reset()
        td = env.step(env.rand_action(env.current()))["next"]
        root = env.reset(masked([1, 3]))
        ids = built[0].resets[-1]["env_idx"]
        assert (ids.tolist(), ids.dtype) == ([1, 3], torch.int64)
        assert torch.equal(root["observation"][0, [0, 2]], td["observation"][0, [0, 2]])
        assert (root["observation"][0, [1, 3]] != td["observation"][0, [1, 3]]).all()
        assert built[0].elapsed_steps.tolist() == [1, 0, 1, 0]


def test_callers_reset_options_are_kept_with_env_ids():
    make_env, built = recorded(make_maniskill)
    options = {"difficulty": 3}
    with SerialEnv(1, make_env, seed=0) as env:
        env.reset(options=options)
        env.reset(masked([0]), options=options)
        assert [sorted(given) for given in built[0].resets[-2:]] == [
            ["difficulty"],
            ["difficulty", "env_idx"],
        ]
        with pytest.raises(EnvError, match="partial reset and reconfigure"):
            env.reset(masked([0]), options={"reconfigure": True})
    assert options == {"difficulty": 3}


def test_any_simulator_whose_reset_says_so_is_given_ids():
    class Indexed(simulators.Counter):
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            ids = (options or {}).get("env_idx", torch.arange(self.num_envs))
            self.masks.append(ids.tolist())
            self._begin(ids)
            return self.state.clone(), {}

    class Further(Indexed):
        def reset(self, **kwargs: Any) -> Any:
            return super().reset(**kwargs)

    built: list[Any] = []
    with SerialEnv(1, lambda: built.append(Further()) or built[-1], seed=0) as env:
        data = env.rollout(12, break_when_any_done=False)
    assert built[0].masks[2:5] == [[0], [1], [2]]
    for row, length in enumerate((3, 4, 5, 6)):
        assert data["observation"][0, :, row, 1].tolist() == [
            step % length for step in range(12)
        ]


def test_rows_make_one_picture():
    with SerialEnv(1, partial(make_maniskill, render_mode="rgb_array"), seed=0) as env:
        env.rollout(2)
        (picture,) = env.render()
    assert picture.dtype == np.uint8
    assert picture.shape == (16, 32, 3)
