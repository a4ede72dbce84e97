"""Torch simulators under the executor: the env gets the caller's own tensor, or a copy of its row in the slab."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict, TensorDictBase

from envherd.executor import Busy, ExecutorOptions, ParallelEnv, SerialEnv
from envherd.workers.errors import ActionError, EnvError, ResetNeeded
from tests.envs import torch_simulators as simulators
from tests.envs.torch_simulators import recorded

pytestmark = pytest.mark.preloads()


def batch_of(action: torch.Tensor) -> TensorDict:
    return TensorDict({"action": action}, action.shape[:2])


def test_the_env_is_given_the_callers_own_tensor_through_every_door():
    make_env, built = recorded(simulators.Counter)
    with SerialEnv(1, make_env, seed=0) as env:
        env.reset()
        action = torch.rand(1, 4, 2)
        env.step_and_maybe_reset(batch_of(action))
        assert built[0].given.data_ptr() == action.data_ptr()
        lone = torch.rand(1, 4, 2)
        env.send(batch_of(lone), env_ids=[0])
        received = env.recv()
        assert built[0].given.data_ptr() == lone.data_ptr()
        assert torch.equal(received["action"], lone)
        assert received["env_ids"].tolist() == [[0] * 4]
        env.send(received.set("action", lone))
        received = env.recv()
        assert received["env_ids"].tolist() == [[0] * 4]
        assert env.current(received["env_ids"]).batch_size == (1, 4)
        given = []

        def policy(td: Any) -> Any:
            given.append(torch.rand(1, 4, 2))
            return td.set("action", given[-1])

        data = env.rollout(2, policy)
        assert built[0].given.data_ptr() == given[-1].data_ptr()
        assert torch.equal(data["action"], torch.stack(given, 1))


def test_actions_that_do_not_fit_are_converted_or_refused():
    make_env, built = recorded(simulators.Counter)
    with SerialEnv(1, make_env, seed=0) as env:
        env.reset()
        env.step(batch_of(torch.full((1, 4, 2), 0.5, dtype=torch.float64)))
        assert built[0].given.dtype is torch.float32
        env.step(batch_of(torch.ones(1, 4, 2, requires_grad=True)))
        assert not built[0].given.requires_grad
        for wrong, message in (
            (torch.full((1, 4, 2), 1.5), r"expected \[-1.0, 1.0\], got 1.5"),
            (torch.full((1, 4, 2), float("nan")), "got nan"),
            (torch.zeros(1, 4, 3), r"shape \(1, 4, 2\)"),
            (torch.zeros(1, 4, 2, dtype=torch.complex64), "complex64"),
            (torch.zeros(1, 4, 2, device="meta"), "meta device"),
        ):
            with pytest.raises(ActionError, match=message):
                env.step(batch_of(wrong))
        assert built[0].num_steps == 2


def test_indices_begin_where_the_env_begins_them():
    with SerialEnv(1, simulators.Indexed, seed=0) as env:
        assert set(env.rollout(3)["action"].unique().tolist()) <= set(range(5))


@pytest.mark.slow
@pytest.mark.parametrize(
    "make", [SerialEnv, partial(ParallelEnv, num_workers=2)], ids=["serial", "parallel"]
)
def test_a_simulator_may_keep_the_actions_of_a_slab(make):
    with make(2, simulators.Keeping, seed=0) as env:
        env.reset()
        rewards = [
            env.step(batch_of(torch.full((2, 4, 2), value)))["next", "reward"]
            for value in (0.1, 0.2, 0.3)
        ]
    for reward, expected in zip(rewards, (0.2, 0.4 + 2, 0.6 + 4), strict=True):
        assert reward.flatten().tolist() == pytest.approx([expected] * 8)


def test_the_callers_generators_are_left_alone():
    from tests.oracles import isaaclab_standin as isaac

    np.random.seed(5)
    torch.manual_seed(5)
    expected = np.random.rand(), torch.rand(())
    np.random.seed(5)
    torch.manual_seed(5)
    try:
        with SerialEnv(1, isaac.make_direct, seed=0) as env:
            env.rollout(10, break_when_any_done=False)
    finally:
        isaac.forget_simulator()
    assert (np.random.rand(), torch.rand(())) == expected


def test_a_faulty_step_loses_one_env_alone():
    def make_env(broken: bool) -> Any:  # noqa: FBT001
        simulator = simulators.Counter()
        if broken:
            simulator.step = lambda _action: (_ for _ in ()).throw(  # type: ignore[assignment, method-assign]
                ValueError("it broke")
            )
        return simulator

    with SerialEnv(
        2, make_env, env_kwargs=[{"broken": False}, {"broken": True}], seed=0
    ) as env:
        env.reset()
        with pytest.raises(EnvError, match="it broke") as caught:
            env.step(batch_of(torch.rand(2, 4, 2)))
        assert caught.value.env_ids == (1,)


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU: torch finds none here"
)
def test_on_a_gpu_actions_stay_where_they_are():
    make_env, built = recorded(simulators.Counter, 4, "cuda:0")
    with SerialEnv(
        1,
        make_env,
        seed=0,
        device="cuda:0",
        options=ExecutorOptions(check_actions="off"),
    ) as env:
        env.reset()
        action = torch.rand(1, 4, 2, device="cuda:0")
        following = env.step(batch_of(action))["next"]
        assert built[0].given.data_ptr() == action.data_ptr()
        assert following["observation"].device == torch.device("cuda:0")
        assert torch.equal(following["observation"][0], built[0].state)


@pytest.fixture
def through_slab(monkeypatch):
    """Return a function: executors that are made after its call have the rows of simulators in a slab."""
    return lambda: monkeypatch.setattr(
        "envherd.executor.serial.is_simulator", lambda _pool: False
    )


def traced(make_env: Any, **settings: Any) -> Iterator[tuple[TensorDictBase, str]]:
    """Yield the data of an executor from every method, for the same seed, and the name of the method."""
    options = ExecutorOptions(check_finite=True, ring_frames=2)
    with SerialEnv(1, make_env, seed=3, options=options, **settings) as env:
        yield env.current(), "current before a reset"
        yield env.reset(), "reset"
        for _ in range(9):
            td, root = env.step_and_maybe_reset(env.rand_action())
            own = root.clone()  # a root may share the leaves of `next`
            yield td, "step_and_maybe_reset"
            yield own, "step_and_maybe_reset"
            yield env.current(), "current"
        for _ in range(6):
            td = env.step(env.rand_action())
            mask = td["next", "done"].clone()
            # It can reset rows that have not ended.
            mask[0, 0] |= make_env is simulators.Counter
            yield td, "step"
            half = torch.zeros_like(mask)
            half[:, ::2] = mask[:, ::2]
            yield (
                env.reset(TensorDict({"_reset": half}, env.batch_size)),
                "reset of rows",
            )
            yield (
                env.reset(TensorDict({"_reset": mask & ~half}, env.batch_size)),
                "reset of rows",
            )
        for _ in range(5):
            env.send(env.rand_action(env.current()), env_ids=[0])
            yield env.recv(), "recv"
            yield env.current(), "current"
        yield env.rollout(8, break_when_any_done=False), "rollout"
        yield env.rollout(8, auto_reset=False), "rollout until an end"
        yield env.current(), "current"


def write_everywhere(td: TensorDictBase) -> None:
    """Write to every tensor of a batch, by torch and by numpy."""
    for key in td.keys(include_nested=True, leaves_only=True):
        td[key].zero_()
        td[key].numpy()[...] = 1


@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("make_env", [simulators.Counter, simulators.SameStep])
def test_rows_equal_those_of_a_slab_after_any_writes_of_the_caller(
    make_env, writes, through_slab
):
    expected, kept = [], []
    for td, name in traced(make_env):
        expected.append((td.clone(), name))
        if writes:
            write_everywhere(td)
        else:
            kept.append(td)
    for td, (before, name) in zip(kept, expected, strict=False):
        assert (td == before).all(), name
    through_slab()
    for (td, name), (other, _) in zip(expected, traced(make_env), strict=True):
        keys = set(td.keys(include_nested=True, leaves_only=True))
        assert keys == set(other.keys(include_nested=True, leaves_only=True)), name
        for key in keys:
            assert torch.equal(td[key], other[key]), (name, key)


def test_without_copies_a_step_holds_the_tensors_of_the_simulator():
    make_env, built = recorded(simulators.SameStep)
    with SerialEnv(1, make_env, seed=0, copy=False) as env:
        env.reset()
        following = env.step(batch_of(torch.rand(1, 4, 2)))["next"]
        assert following["observation"].data_ptr() == built[0].state.data_ptr()
        for _ in range(2):
            td, root = env.step_and_maybe_reset(batch_of(torch.rand(1, 4, 2)))
        assert td["next", "done"][0, 0].all()
        assert td["next", "observation"][0, 0, 1] == 3
        assert root["observation"][0, 0, 1] == 0


class Breaking(simulators.SameStep):
    """Overwrites its tensors, and then raises, in step 3."""

    error: type[BaseException] = ValueError

    def step(self, action: torch.Tensor) -> Any:
        if self.num_steps == 2:
            self.state.fill_(77)
            raise self.error("it broke")
        return super().step(action)


class Interrupted(Breaking):
    """The same, as by Ctrl-C."""

    error = KeyboardInterrupt


@pytest.mark.parametrize("make_env", [Breaking, Interrupted])
def test_after_a_failure_the_root_is_the_last_true_observation(make_env):
    make_env, built = recorded(make_env)
    with SerialEnv(1, make_env, seed=0) as env:
        env.reset()
        env.step(batch_of(torch.rand(1, 4, 2)))
        before = env.step(batch_of(torch.rand(1, 4, 2)))["next", "observation"].clone()
        with pytest.raises((EnvError, KeyboardInterrupt), match="it broke") as caught:
            env.step(batch_of(torch.rand(1, 4, 2)))
        root = env.current()
        assert torch.equal(root["observation"], before)
        assert root["truncated"].all()
        if isinstance(caught.value, EnvError):
            partial = caught.value.partial
            assert torch.equal(partial["observation"], before)
            assert not partial["reward"].any()
        with pytest.raises(ResetNeeded):
            env.step(batch_of(torch.rand(1, 4, 2)))
        built[0].num_steps = 10
        one = TensorDict(
            {"_reset": torch.tensor([[True, False, False, False]])}, [1, 4]
        )
        assert not env.reset(one)["done"].any(), "all rows are reset"
        env.step(batch_of(torch.rand(1, 4, 2)))


def test_a_simulator_between_send_and_recv():
    with SerialEnv(1, simulators.Counter, seed=0) as env:
        env.send(env.rand_action(env.reset()))
        with pytest.raises(
            Busy, match=r"envs \[0\] still owe an answer. recv\(\) them first"
        ):
            env.reset()
        assert env.get("num_envs") == [4]
        assert env.recv()["next", "observation"].shape == (1, 4, 2)
