"""The TorchRL facade's `ParallelEnv` over real workers, compared with TorchRL's own classes."""

import copy
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

from tests.extras import skip_without

skip_without("torchrl")

import pytest
import torch
import torchrl.data
import torchrl.envs

# Keeps a failed import's traceback: not the frames of the test that first needs it.
import torchrl.envs.libs.utils
from tensordict import TensorDict, TensorDictBase, assert_close
from torchrl.envs import (
    Compose,
    DoubleToFloat,
    EnvBase,
    GymEnv,
    InitTracker,
    PendulumEnv,
    RewardSum,
    StepCounter,
    TransformedEnv,
    check_env_specs,
)

from envherd.executor.options import ExecutorOptions
from envherd.torchrl import BuildFailed, ParallelEnv
from envherd.workers.errors import EnvError, FactoryError
from tests.envs import torchrl_own as own
from tests.envs.torchrl_own import started

pytestmark = [pytest.mark.slow, pytest.mark.preloads(*own.PRELOADED)]


def cartpole() -> EnvBase:
    return GymEnv("CartPole-v1")


def counting() -> EnvBase:
    return TransformedEnv(own.CountingEnv(max_steps=3), StepCounter())


class Troubled(own.CountingEnv):
    """Raises on a wrong action, and dies on a worse one."""

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        if (action := int(tensordict["action"].sum())) == 5:
            raise ArithmeticError("five is too much")
        if action == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        return super()._step(tensordict)

    def fail(self) -> None:
        raise LookupError("as asked")

    def pid(self) -> int:
        return os.getpid()


#: Envs with a direct way.
DIRECT: dict[str, Callable[[], EnvBase]] = {
    "gym": cartpole,
    "pendulum": lambda: GymEnv("Pendulum-v1"),
    "transformed gym": lambda: TransformedEnv(
        GymEnv("Pendulum-v1"),
        Compose(StepCounter(9), RewardSum(), InitTracker(), DoubleToFloat()),
    ),
}
FAMILIES: dict[str, Callable[[], EnvBase]] = {
    **DIRECT,
    "transformed": counting,
    "nested, batched": lambda: own.NestedCountingEnv(max_steps=3),
    "unlike agents": own.HeterogeneousCountingEnv,
    "text": own.CountingEnvWithString,
    "dynamic": own.EnvWithDynamicSpec,
}


def types_of(td: TensorDictBase) -> dict[Any, Any]:
    return {
        key: value.dtype
        for key, value in td.items(include_nested=True, leaves_only=True)
    }


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_rollouts_are_torchrls_serial_ones(family: str) -> None:
    rollouts = []
    with (
        closing(torchrl.envs.SerialEnv(2, FAMILIES[family])) as theirs,
        started(2, FAMILIES[family]) as ours,
    ):
        # TorchRL's specs hold random examples.
        assert ours.specs == theirs.specs or family == "text"
        for env in (theirs, ours):
            assert env.set_seed(0) == torchrl.envs.SerialEnv.set_seed(theirs, 0)
            torch.manual_seed(0)
            rollouts.append(
                [
                    env.rollout(20, break_when_any_done=False),
                    env.rollout(
                        20, break_when_all_done=True, break_when_any_done=False
                    ),
                    env.rollout(8),
                ]
            )
        assert family not in DIRECT or "steps=direct" in repr(ours)
        check_env_specs(ours)
    for their, our in zip(*rollouts, strict=True):
        assert type(their) is type(our)
        assert_close(their, our, rtol=0, atol=0)
        assert family not in DIRECT or types_of(their) == types_of(our)


def test_no_env_is_built_here_and_threads_stay(tmp_path: Any) -> None:
    def make() -> EnvBase:
        (tmp_path / f"built-{os.getpid()}-{time.monotonic_ns()}").touch()
        return own.CountingEnv()

    num_threads = torch.get_num_threads()
    with started(3, make, num_processes=2) as env:
        assert isinstance(env, torchrl.envs.ParallelEnv)
        assert env.is_closed
        env.rollout(2)
        assert torch.get_num_threads() == num_threads
        pids = [name.split("-")[1] for name in os.listdir(tmp_path)]
        assert len(pids) == 3
        assert len(set(pids)) == 2
        assert str(os.getpid()) not in pids
    assert torch.get_num_threads() == num_threads


def test_an_env_that_raises_is_alone_in_it() -> None:
    with started(2, Troubled, num_processes=1) as env:
        td = env.reset()
        td["action"] = torch.tensor([[5], [1]], dtype=env.action_spec.dtype)
        with pytest.raises(EnvError, match="five is too much") as caught:
            env.step(td)
        assert "in _step" in str(caught.value.__cause__)
        td = env.reset(TensorDict({"_reset": torch.tensor([[True], [False]])}, [2]))
        assert td["observation"].tolist() == [[0], [1]]
        with pytest.raises(EnvError, match="as asked"):
            env.fail()
        with pytest.raises(AttributeError, match="misspelt"):
            env.misspelt()
        assert not hasattr(env, "misspelt")
        with pytest.raises(EnvError):  # it refuses the seed None; the worker lives
            env.set_seed(None)
        env.rollout(2)


@pytest.mark.broken_pool
def test_the_row_of_a_lost_env_repeats_what_was_acted_on() -> None:
    options = ExecutorOptions(on_worker_loss="restart", check_actions="off")
    with started(2, Troubled, options=options) as env:
        td = env.reset()
        td["action"] = torch.tensor([[1], [1]], dtype=env.action_spec.dtype)
        env.step_and_maybe_reset(td)
        td = env.reset()
        td["action"] = torch.tensor([[6], [1]], dtype=env.action_spec.dtype)
        stepped, _ = env.step_and_maybe_reset(td)
        assert stepped["observation"].flatten().tolist() == [0, 0]
        # Not a row of the previous episode.
        assert stepped["next", "observation"].flatten().tolist() == [0, 1]


def test_steps_after_other_commands_are_never_stale() -> None:
    with started(2, counting) as env:
        td = env.reset()
        action = torch.ones(2, 1, dtype=env.action_spec.dtype)
        td = env.step_mdp(env.step(td.set("action", action)))
        env.load_state_dict(env.state_dict())
        assert list(env.state_dict()) == ["worker0", "worker1"]
        stepped = env.step(td.set("action", action))
        assert stepped["next", "observation"].tolist() == [[2], [2]]


def test_attributes() -> None:
    with started(2, Troubled) as env:
        with pytest.raises(RuntimeError):
            env.max_steps  # noqa: B018
        env.start()
        assert list(env.max_steps) == [5, 5]
        assert len(set(env.pid())) == 2
        assert env.batch_locked
        assert list(env.max_steps) == env.max_steps()
        assert not hasattr(env, "no_such_thing")
    with started(2, cartpole) as env:
        env.start()
        assert [entry == "CartPole-v1" for entry in env.spec.id] == [True, True]


def test_lifecycle_and_pickling() -> None:
    with started(3, counting) as env:
        env.update_kwargs({})
        with closing(copy.deepcopy(env)) as again:
            with pytest.raises(RuntimeError, match="closed environment"):
                env.close()
            env.start()
            with pytest.raises(RuntimeError, match="not closed"):
                env.start()
            with pytest.raises(NotImplementedError, match="masks `_step` and `_reset`"):
                env[0]
            with pytest.raises(NotImplementedError, match="snapshot writeback"):
                env[0] = counting()
            with pytest.raises(NotImplementedError, match="to the constructor"):
                env.configure_parallel(use_buffers=True)
            env.close()
            assert env.rollout(2).shape == (3, 2)
            assert again.rollout(2).shape == (3, 2)


def test_an_env_with_a_lambda_can_be_pickled() -> None:
    env = ParallelEnv(2, lambda: own.CountingEnv(max_steps=3))
    with closing(pickle.loads(pickle.dumps(env))) as again:
        assert again.rollout(2).shape == (2, 2)


def test_different_tasks_and_kwargs() -> None:
    with started(
        2,
        own.CountingEnv,
        create_env_kwargs=[{"max_steps": 2}, {"max_steps": 4}],
    ) as env:
        env.start()
        assert list(env.max_steps) == [2, 4]
        env.close()
        env.update_kwargs([{"max_steps": 9}, {"max_steps": 9}])
        env.start()
        assert list(env.max_steps) == [9, 9]
    with started(
        2, [lambda: GymEnv("Pendulum-v1"), lambda: GymEnv("MountainCarContinuous-v0")]
    ) as env:
        td = env.reset()
        assert td[0]["observation"].shape == (3,)
        assert td[1]["observation"].shape == (2,)
        assert env.rollout(3)[1]["next", "observation"].shape == (3, 2)
    # TorchRL itself refuses; nothing is left behind.
    with pytest.raises(RuntimeError, match="Stacking specs"):
        ParallelEnv(2, [cartpole, PendulumEnv])


class Bounded(own.CountingEnv):
    """Declares how far it counts at most."""

    def __init__(self, high: int) -> None:
        super().__init__(max_steps=3)
        spec = self.observation_spec["observation"]
        self.observation_spec["observation"] = torchrl.data.Bounded(
            0, high, spec.shape, dtype=spec.dtype
        )


def test_tasks_that_differ_in_their_bounds_alone_are_torchrls() -> None:
    tasks = [lambda: Bounded(5), lambda: Bounded(9)]
    rollouts = []
    with closing(torchrl.envs.SerialEnv(2, tasks)) as theirs, started(2, tasks) as ours:
        for env in (theirs, ours):
            torch.manual_seed(0)
            rollouts.append(env.rollout(8, break_when_any_done=False))
    assert rollouts[0]["next", "done"].any()
    assert type(rollouts[0]) is type(rollouts[1])
    assert_close(*rollouts)


@own.since((0, 13), "reset to a given state (PendulumEnv refuses it)")
def test_state_given_to_reset_is_honoured() -> None:
    with started(2, PendulumEnv) as env:
        td = env.reset()
        state = td.select("th", "thdot", "params").clone()
        state["th"] = torch.tensor([0.5, -0.5])
        assert env.reset(state, set_state=True)["th"].tolist() == [0.5, -0.5]


def test_values_that_are_no_factory_are_refused_at_once() -> None:
    with pytest.raises(FactoryError, match="lambda: CountingEnv"):
        ParallelEnv(2, own.CountingEnv())
    arguments: list[dict[str, Any]] = [
        {"create_env_fn": [own.CountingEnv]},
        {"create_env_kwargs": [{}]},
    ]
    for argument in arguments:
        with pytest.raises(RuntimeError, match="and num_workers mismatch"):
            ParallelEnv(2, **{"create_env_fn": own.CountingEnv, **argument})
    lock = __import__("threading").Lock()
    with pytest.raises(FactoryError, match="lock"):
        ParallelEnv(2, lambda: lock and own.CountingEnv())


def test_factories_that_fail_say_why() -> None:
    def fail() -> EnvBase:
        raise ValueError("no such level")

    with pytest.raises(BuildFailed, match="no such level") as caught:
        ParallelEnv(2, fail)
    assert isinstance(caught.value, RuntimeError)
    assert isinstance(caught.value, ValueError)  # the type that the factory raised
    assert isinstance(pickle.loads(pickle.dumps(caught.value)), ValueError)
    with pytest.raises(FactoryError, match="expected a TorchRL env"):
        ParallelEnv(2, dict)


def test_a_step_before_the_first_reset_is_the_envs_affair() -> None:
    row = TensorDict({"action": torch.ones(2, 1, dtype=torch.int8)}, [2])
    with started(2, own.CountingEnv) as env:
        assert env.step(row)["next", "observation"].flatten().tolist() == [1, 1]


def test_a_string_is_refused_with_an_example_that_is_accepted() -> None:
    with pytest.raises(
        FactoryError, match=r"make_env=lambda: GymEnv\(.CartPole-v1.\)"
    ) as caught:
        ParallelEnv(2, "CartPole-v1")  # type: ignore[arg-type]
    assert "gymnasium.make" not in str(caught.value)


@pytest.mark.full
def test_constructor_arguments() -> None:
    with started(
        1, own.CountingEnv, serial_for_single=True, metadata_from_workers=True
    ) as env:
        assert type(env) is ParallelEnv
    with pytest.raises(TypeError, match="'num_worker'"):
        ParallelEnv(2, own.CountingEnv, num_worker=2)
    with started(
        2,
        create_env_fn=own.CountingEnv,
        mp_start_method="fork",
        num_threads=3,
        num_sub_threads=2,
        non_blocking=True,
        daemon=True,
        use_buffers=False,
        consolidate=False,
        auto_wrap_envs=False,
        shutdown_timeout=3.0,
        device="cpu",
    ) as env:
        assert env.rollout(3).device == torch.device("cpu")
    with closing(ParallelEnv.make_parallel(own.CountingEnv, num_envs=2)) as made:
        assert made.rollout(2).shape == (2, 2)


def test_seeded_rollouts_do_not_depend_on_the_number_of_processes() -> None:
    rollouts = []
    for num_processes in (1, 2):
        with started(
            3,
            lambda: TransformedEnv(PendulumEnv(), StepCounter()),
            num_processes=num_processes,
        ) as env:
            env.set_seed(3)
            torch.manual_seed(0)
            rollouts.append(env.rollout(4))
    assert_close(*rollouts)
    assert rollouts[0]["th"][:, 0].unique().numel() == 3


# ---- masks and arguments ----------------------------------------------------------------------


class Counter(own.CountingEnv):
    """Counts its resets and keeps their arguments."""

    def __init__(self, max_steps: int = 3, start_val: int = 0) -> None:
        super().__init__(max_steps=max_steps, start_val=start_val)
        self.given: list[dict[str, int]] = []

    def _reset(
        self, tensordict: TensorDictBase | None = None, **kwargs: int
    ) -> TensorDictBase:
        self.given.append(kwargs)
        return super()._reset(tensordict)


@pytest.fixture
def env() -> Iterator[ParallelEnv]:
    env = ParallelEnv(3, Counter, num_processes=1)
    yield env
    env.close(raise_if_closed=False)


def step(env: EnvBase, td: TensorDictBase) -> TensorDictBase:
    td["action"] = torch.ones(3, 1, dtype=env.action_spec.dtype)
    return env.step(td)


def test_a_mask_alone_gives_the_rows_as_they_are(env: ParallelEnv) -> None:
    td = env.reset()
    td = env.step_mdp(step(env, td))
    td = env.step_mdp(step(env, td))
    mask = torch.tensor([[True], [False], [False]])
    out = env.reset(TensorDict({"_reset": mask}, [3]))
    assert out["observation"].flatten().tolist() == [0, 2, 2]
    assert out.get("_reset", None) is None


def test_masks_may_be_flat_and_empty_ones_touch_nothing(env: ParallelEnv) -> None:
    td = env.step_mdp(step(env, env.reset()))
    num_resets = [len(given) for given in env.given]
    out = env.reset(TensorDict({"_reset": torch.zeros(3, dtype=torch.bool)}, [3]))
    assert out["observation"].flatten().tolist() == [1, 1, 1]
    assert [len(given) for given in env.given] == num_resets
    out = env.reset(td.set("_reset", torch.tensor([False, True, False])))
    assert out is td
    assert out["observation"].flatten().tolist() == [1, 0, 1]


def test_reset_arguments_reach_their_envs_and_are_left_alone(env: ParallelEnv) -> None:
    listed = [{"level": i} for i in range(3)]
    before = copy.deepcopy(listed)
    env.reset(list_of_kwargs=listed, speed=7)
    assert listed == before
    assert [given[-1] for given in env.given] == [
        {"level": i, "speed": 7} for i in range(3)
    ]


def test_step_masks(env: ParallelEnv) -> None:
    theirs = torchrl.envs.SerialEnv(3, Counter)
    for mask in ([True, True, True], [False, True, True], [False, False, False]):
        results = []
        for one in (theirs, env):
            td = one.reset()
            td = one.step_mdp(step(one, td))
            # Fails for a misspelt name in EnvBase.step.
            if one is theirs and not any(mask) and own.VERSION < (0, 13):
                continue
            results.append(step(one, td.set("_step", torch.tensor(mask))))
        if len(results) == 1:
            assert results[0]["next", "observation"].flatten().tolist() == [1, 1, 1]
            continue
        assert_close(*results)
        assert set(map(str, results[0].keys())) == set(map(str, results[1].keys()))


def test_unknown_next_entries_are_kept(env: ParallelEnv) -> None:
    theirs = torchrl.envs.SerialEnv(3, Counter)
    results = []
    for one in (theirs, env):
        td = one.reset()
        td["next"] = TensorDict({"hidden": torch.arange(3.0).unsqueeze(-1)}, [3])
        td["action"] = torch.ones(3, 1, dtype=env.action_spec.dtype)
        results.append(one.step_and_maybe_reset(td))
    assert results[1][0]["next", "hidden"].flatten().tolist() == [0, 1, 2]
    for their, our in zip(*results, strict=True):
        assert_close(their, our)
    td = env.reset()
    td["next"] = TensorDict({}, [3])
    td["action"] = torch.ones(3, 1, dtype=env.action_spec.dtype)
    assert env.step(td)["next", "observation"].tolist() == [[1]] * 3
