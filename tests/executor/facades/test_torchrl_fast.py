"""Plain steps of the TorchRL facade make TorchRL's batches directly from the slab; all others take the general way."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.extras import skip_without

skip_without("torchrl")

import pytest
import torch
from tensordict import TensorDictBase, assert_close
from torchrl.envs import (
    Compose,
    EnvBase,
    GymEnv,
    PendulumEnv,
    RewardSum,
    StepCounter,
    TransformedEnv,
)

from envherd.torchrl import ParallelEnv
from envherd.workers import native
from envherd.workers.protocol import Op
from tests.envs import torchrl_own as own

pytestmark = [
    pytest.mark.slow,
    pytest.mark.preloads(*own.PRELOADED),
    pytest.mark.skipif(native.load() is None, reason="needs the C extension"),
]


def cartpole() -> EnvBase:
    return GymEnv("CartPole-v1")


def transformed() -> EnvBase:
    return TransformedEnv(GymEnv("CartPole-v1"), Compose(StepCounter(7), RewardSum()))


def counting() -> EnvBase:
    return own.CountingEnv(max_steps=3)


@contextmanager
def started(
    make: Callable[[], EnvBase], *, is_fast: bool, **kwargs: Any
) -> Iterator[tuple[ParallelEnv, list[Op]]]:
    """Yield a started env, and the list of the steps that it has made in the fast way."""
    made: list[Op] = []
    with own.started(3, make, num_processes=2, **kwargs) as env:
        env.set_seed(5)
        env.reset()
        env.step(env.rand_action(env.reset()))
        shells: Any = env.__dict__["_shells"]
        compiled = shells.fast_steps
        assert set(compiled) == {Op.STEP, Op.STEP_RESET}

        def watched(op: Op, td: TensorDictBase) -> Any:
            if (pair := compiled[op](td)) is not None:
                made.append(op)
            return pair

        steps = {op: lambda td, op=op: watched(op, td) for op in compiled}
        shells.fast_steps = steps if is_fast else {}
        env.set_seed(5)
        yield env, made


@pytest.mark.parametrize(
    ("make", "device"), [(cartpole, None), (transformed, "cpu"), (counting, None)]
)
@pytest.mark.long
def test_both_ways_return_the_same(make: Callable[[], EnvBase], device: Any) -> None:
    with (
        started(make, is_fast=True, device=device) as (fast, made),
        started(make, is_fast=False, device=device) as (general, _),
    ):
        roots = [env.reset() for env in (fast, general)]
        draws = torch.Generator().manual_seed(3)
        for step in range(60):
            action = torch.stack(
                [fast.full_action_spec[fast.action_key].rand()[0] for _ in range(3)]
            )
            mask = torch.rand(3, generator=draws) < 0.7
            pairs = []
            for env, root in zip((fast, general), roots, strict=True):
                root.set(env.action_key, action.clone())
                if step % 7 == 3:
                    root.set("_step", mask)
                if step % 5 == 4:
                    td = env.step(root)
                    following = env.step_mdp(td)
                    pairs.append((td, env.maybe_reset(following)))
                else:
                    pairs.append(env.step_and_maybe_reset(root))
            for one, other in zip(*pairs, strict=True):
                assert_close(
                    one.exclude("_step"),
                    other.exclude("_step"),
                    rtol=0,
                    atol=0,
                    equal_nan=True,
                )
                assert one.device == other.device
                assert {*one.keys(include_nested=True)} == {
                    *other.keys(include_nested=True)
                }
            roots = [pair[1].exclude("_step") for pair in pairs]
        assert {*made} == {Op.STEP, Op.STEP_RESET}


def test_steps_that_are_not_plain_use_the_general_flow() -> None:
    with started(cartpole, is_fast=True) as (env, made):
        root = env.rand_action(env.reset())
        made.clear()
        with_next = root.clone()
        with_next["next"] = root.select("observation").clone()
        env.step(with_next)
        env.step(
            root.clone()
            .lock_()
            .unlock_()
            .set("_step", torch.tensor([True, False, True]))
        )
        env.step(root.clone().refine_names("time"))
        assert made == []
        other_dtype = root.clone()
        other_dtype["action"] = other_dtype["action"].to(torch.float32)
        assert env.step(other_dtype)["next", "observation"].shape == (3, 4)
        with pytest.raises(Exception, match="action"):
            env.step(root.exclude("action"))
        env.step(root)
        assert made == [Op.STEP]


def test_a_closed_env_and_a_moved_one_are_compiled_again() -> None:
    with started(cartpole, is_fast=True) as (env, _):
        env.close()
        parts = env.__dict__
        assert parts.get("_shells") is None
        td = env.step(env.rand_action(env.reset()))
        assert parts["_shells"].fast_steps
        assert td["next"].device is None
        with pytest.warns(UserWarning, match="re-seeding"):
            env.to("cpu")
        td = env.step(env.rand_action(env.reset()))
        assert td.device == td["next"].device == torch.device("cpu")


def test_the_caller_owns_what_a_fast_step_returns() -> None:
    with started(cartpole, is_fast=True) as (env, made):
        root, kept = env.reset(), []
        for _ in range(8):
            td, root = env.step_and_maybe_reset(env.rand_action(root))
            kept.append((td, td.clone()))
        assert made == [Op.STEP_RESET] * 8
        assert all((one == other).all() for one, other in kept)


def test_states_of_the_caller_reach_the_envs() -> None:
    """A torch-native env whose state is in the tensordict: steps are fast, and use what the caller passes."""
    with started(PendulumEnv, is_fast=True) as (env, made):
        root = env.rand_action(env.reset())
        root["th"] = torch.tensor([0.1, 0.2, 0.3])
        root["thdot"] = torch.zeros(3)
        made.clear()
        following = env.step(root.clone())["next", "th"]
        alone = [PendulumEnv().step(row)["next", "th"] for row in root.unbind(0)]
        assert made == [Op.STEP]
        assert torch.equal(following, torch.stack(alone))
