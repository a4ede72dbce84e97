"""Batched torch simulators: one protocol for every way of handling ended rows, and no invented transitions."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from envherd.executor import ExecutorOptions, ParallelEnv, SerialEnv
from envherd.executor.testing import Contract
from envherd.workers.adapters.simulators.native import IsaacLabAdapter, TorchNativeAdapter
from envherd.workers.errors import EnvError, FactoryError, ResetNeeded
from tests.envs import torch_simulators as simulators
from tests.extras import needs
from tests.oracles import isaaclab_standin as isaac
from tests.scale import scaled


@pytest.fixture(autouse=True)
def _one_simulator_after_another():
    yield
    isaac.forget_simulator()


def recorded(make: Any, **cfg: Any) -> tuple[Any, list[Any]]:
    """Return a factory of a simulator, and the list to which it adds what it builds."""
    built: list[Any] = []

    def make_env() -> Any:
        built.append(make(**cfg))
        return built[-1]

    return make_env, built


def actions_of(rng: np.random.Generator, num_rows: int) -> torch.Tensor:
    return torch.from_numpy(rng.normal(0, 1, (1, num_rows, 1)).astype(np.float32))


def still(td: Any) -> Any:
    """Do nothing, as a policy."""
    return td.set("action", torch.zeros(*td.batch_size, 1))


def masks_of(done: torch.Tensor, rng: np.random.Generator) -> list[torch.Tensor]:
    """Return reset masks that name all rows that ended between them, and others at random."""
    extra = torch.from_numpy(rng.random(done.shape) < 0.1) & torch.tensor(bool(rng.random() < 0.3))
    if rng.random() < 0.5:
        return [done | extra]
    part = done & torch.from_numpy(rng.random(done.shape) < 0.5)
    return [part, (done & ~part) | extra]


class Drive:
    """Steps and resets a stand-in through `SerialEnv`, and compares every row with the simulator's ledger."""

    def __init__(self, make: Any, **cfg: Any) -> None:
        make_env, self.built = recorded(make, **cfg)
        self.env = SerialEnv(1, make_env, seed=3)
        self.simulator = self.built[0].unwrapped
        self.num_rows = self.simulator.num_envs
        self.num_invalid = self.num_ends = self.num_forced = 0
        self.root = self.env.reset()
        self.history = [self.frames(self.root)] * max(1, self.simulator.cfg.history_length)

    def frames(self, td: Any) -> torch.Tensor:
        """Return the latest frame of the observation, `[B, 4]`."""
        return td["policy"][0, :, -4:].clone()

    def step(self, action: torch.Tensor) -> torch.Tensor:
        """Step, compare, and return the ended rows."""
        ledger = self.simulator.ledger
        before = self.frames(self.root)
        num_steps = len(ledger.steps)
        following = self.env.step(TensorDict({"action": action}, [1, self.num_rows]))["next"]
        assert len(ledger.steps) == num_steps + 1
        entry = ledger.steps[-1]
        after = self.frames(following)
        is_valid = (before == entry.before).all(1) & (after == entry.after).all(1)
        is_valid &= (action[0] == entry.action).all(1)
        self.num_invalid += int((~is_valid).sum())
        self.history = [*self.history[1:], after]
        assert torch.equal(following["policy"][0], torch.cat(self.history, 1))
        assert torch.equal(following["terminated"][0, :, 0], entry.after[:, 0].abs() > isaac.LIMIT)
        assert torch.equal(following["truncated"][0, :, 0], entry.length >= self.simulator.max_episode_length)
        assert torch.equal(following["reward"][0, :, 0], 1 - entry.after[:, 0].abs())
        done = following["done"][0, :, 0]
        self.num_ends += int(done.sum())
        self.root = following
        return done

    def reset(self, mask: torch.Tensor, done: torch.Tensor) -> torch.Tensor:
        """Reset the rows in a mask, compare all, and return which rows are done still."""
        before = {key: value.clone() for key, value in self.root.items(include_nested=True, leaves_only=True)}
        given = mask.clone()
        num_resets = len(self.simulator.ledger.resets)
        root = self.env.reset(TensorDict({"_reset": mask.view(1, -1, 1)}, [1, self.num_rows]))
        assert torch.equal(mask, given)
        for key in ("policy", "done", "terminated", "truncated"):
            assert torch.equal(root[key][0, ~mask], before[key][0, ~mask]), key
        frames = self.frames(root)
        assert (frames[mask, 3] == 0).all()
        self.history = [torch.where(mask[:, None], frames, frame) for frame in self.history]
        assert torch.equal(root["policy"][0], torch.cat(self.history, 1))
        assert torch.equal(root["done"][0, :, 0], done & ~mask)
        newly = sum(map(len, self.simulator.ledger.resets[num_resets:]))
        assert newly == (self.num_rows if mask.all() else int((mask & ~done).sum()))
        self.num_forced += newly
        self.root = root
        return done & ~mask

    def close(self) -> None:
        self.env.close()


CASES = {
    "direct": (isaac.make_direct, {}),
    "direct that publishes": (isaac.make_direct, {"compute_final_obs": True}),
    "direct with fresh tensors": (isaac.make_direct, {"compute_final_obs": True, "reuses_buffers": False}),
    "direct that resets by mask": (
        isaac.make_direct,
        {"compute_final_obs": False, "resets_by_mask": True, "reuses_buffers": False},
    ),
    "wrapped": (isaac.make_wrapped, {}),
    "managed": (isaac.make_managed, {}),
    "managed that publishes": (isaac.make_managed, {"compute_final_obs": True}),
    "managed that resets by mask": (
        isaac.make_managed,
        {"compute_final_obs": False, "resets_by_mask": True, "reuses_buffers": False},
    ),
    "managed with histories": (isaac.make_managed, {"history_length": 3}),
    "managed with histories that publishes": (isaac.make_managed, {"history_length": 3, "compute_final_obs": True}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_row_is_a_step_that_happened(case):
    make, cfg = CASES[case]
    drive = Drive(make, num_envs=16, **cfg)
    rng = np.random.default_rng(7)
    num_steps = scaled(60, full=640)
    for _ in range(num_steps):
        done = drive.step(actions_of(rng, drive.num_rows))
        for mask in masks_of(done, rng):
            if mask.any():
                done = drive.reset(mask, done)
        assert not done.any()
    drive.close()
    assert drive.num_invalid == 0
    assert drive.num_ends > num_steps
    assert drive.num_forced > num_steps // 20
    assert drive.simulator.common_step_counter == num_steps


def test_rows_that_ended_stay_ended_until_they_are_reset():
    drive = Drive(isaac.make_direct, max_length=2)
    drive.step(torch.zeros(1, 4, 1))
    done = drive.step(torch.zeros(1, 4, 1))
    assert done.all()
    only = torch.tensor([True, False, False, True])
    done = drive.reset(only, done)
    assert done.tolist() == [False, True, True, False]
    with pytest.raises(ResetNeeded):
        drive.env.step(TensorDict({"action": torch.zeros(1, 4, 1)}, [1, 4]))
    assert drive.simulator.common_step_counter == 2
    drive.reset(~only, done)
    drive.step(torch.zeros(1, 4, 1))
    drive.close()


def test_last_observations_have_the_noise_of_the_step():
    with SerialEnv(1, recorded(isaac.make_direct, noise=1e-3, max_length=3)[0], seed=0) as env:
        final = env.rollout(3)["next", "policy"][0, -1]
    assert (final[:, 3] - 3).abs().max() < 1e-2
    assert (final[:, 3] != 3).all()


def test_a_reset_of_rows_that_never_ended_does_not_tell_of_itself():
    make_env, _ = recorded(isaac.make_direct, resets_too_many=True, max_length=50)
    with SerialEnv(1, make_env, seed=0) as env, pytest.raises(EnvError, match="neither terminated nor truncated"):
        env.rollout(40, policy=lambda td: td.set("action", torch.tensor([[[9.0], [0.0], [0.0], [0.0]]])))


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


@pytest.mark.parametrize("make", [simulators.Counter, simulators.SameStep])
def test_rows_are_reset_one_by_one(make):
    make_env, built = recorded(make)
    with SerialEnv(1, make_env, seed=0) as env:
        data = env.rollout(12, break_when_any_done=False)[0]
        assert built[0].num_steps == 12
    for row, length in enumerate((3, 4, 5, 6)):
        counts = data["next", "observation"][:, row, 1].tolist()
        assert counts == [1 + step % length for step in range(12)]
        assert data["next", "truncated"][:, row, 0].tolist() == [count == length for count in counts]
        episodes = data["observation"][:, row, 0]
        assert (episodes.diff()[1:] >= 0).all()
        assert data["observation"][:, row, 1].tolist() == [step % length for step in range(12)]


def test_a_simulator_that_resets_by_mask_is_given_the_mask():
    make_env, built = recorded(simulators.Counter)
    with SerialEnv(1, make_env) as env:
        env.reset()
        env.reset(TensorDict({"_reset": torch.tensor([[[True], [False], [True], [False]]])}, [1, 4]))
        assert built[0].masks[-1].tolist() == [True, False, True, False]


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
        mask = TensorDict({"_reset": torch.tensor([[[True], [False], [False], [False]]])}, [1, 4])
        with pytest.raises(EnvError, match="in the step in which they end"):
            env.reset(mask, options={"mass": 2})


# ---- which envs are torch simulators -------------------------------------------------------------


class Plain:
    """A simulator of no known class."""

    def __init__(self) -> None:
        self._inner = simulators.Counter()
        self.num_envs, self.single_action_space = 4, self._inner.single_action_space
        self.metadata, self.reset, self.step = self._inner.metadata, self._inner.reset, self._inner.step


@pytest.mark.parametrize("make", [simulators.Counter, isaac.make_direct, isaac.make_wrapped])
def test_simulators_are_known_by_themselves(make):
    with SerialEnv(1, make) as env:
        assert env.specs[0].family in ("torch", "isaaclab")
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

    with SerialEnv(1, lambda: GymEnv("CartPole-v1"), options=ExecutorOptions(env_type="torch")) as env:
        assert env.specs[0].family == "torchrl"


def test_infos_are_arrays():
    with SerialEnv(1, isaac.make_direct, options=ExecutorOptions(infos="plain"), seed=0) as env:
        env.reset()
        for _ in range(3):
            env.step(still(env.current()))
        info = env.infos()[0]
    assert set(info["log"]) == {"Episode_Reward/place"}


def test_adapters_are_of_their_family():
    adapter = IsaacLabAdapter(isaac.make_managed())
    assert (adapter.family, adapter.is_alone, adapter.takes_tensors) == ("isaaclab", True, True)
    assert {leaf.key for leaf in adapter.spec.observation} == {("policy",), ("critic", "place"), ("critic", "length")}
    adapter.close()
