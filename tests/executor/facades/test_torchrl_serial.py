"""The TorchRL facade's `SerialEnv`, compared with TorchRL's own: the data path that both facades share."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator

from tests.extras import skip_without

skip_without("torchrl")

import pytest
import torch
import torchrl.envs
from tensordict import TensorDict, TensorDictBase, assert_close
from torchrl.envs import EnvBase, GymEnv, PendulumEnv, StepCounter, TransformedEnv, check_env_specs

from envherd.executor.facades.torchrl import SerialEnv
from envherd.workers.errors import FactoryError
from tests import torchrl_own as own

FAMILIES: dict[str, Callable[[], EnvBase]] = {
    "counting": own.CountingEnv,
    "nested": own.NestedCountingEnv,
    "several keys": own.MultiKeyCountingEnv,
    "unlike agents": own.HeterogeneousCountingEnv,
    "text": own.CountingEnvWithString,
    "dynamic": own.EnvWithDynamicSpec,
    "tensorclass": own.EnvWithTensorClass,
    "transformed": lambda: TransformedEnv(own.CountingEnv(), StepCounter(4)),
}


class Counter(own.CountingEnv):
    """Counts its resets and keeps their arguments."""

    def __init__(self, max_steps: int = 3, start_val: int = 0) -> None:
        super().__init__(max_steps=max_steps, start_val=start_val)
        self.given: list[dict[str, int]] = []

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: int) -> TensorDictBase:
        self.given.append(kwargs)
        return super()._reset(tensordict)


@pytest.fixture
def env() -> Iterator[SerialEnv]:
    env = SerialEnv(3, Counter)
    yield env
    env.close(raise_if_closed=False)


def step(env: EnvBase, td: TensorDictBase) -> TensorDictBase:
    td["action"] = torch.ones(3, 1, dtype=env.action_spec.dtype)
    return env.step(td)


@pytest.mark.parametrize("family", FAMILIES)
def test_rollouts_are_torchrls_own(family: str) -> None:
    rollouts = []
    for cls in (torchrl.envs.SerialEnv, SerialEnv):
        env = cls(2, FAMILIES[family])
        env.set_seed(0)
        torch.manual_seed(0)
        rollouts.append(env.rollout(9, break_when_any_done=False))
        check_env_specs(env)
        env.close()
    theirs, ours = rollouts
    assert type(theirs) is type(ours)
    assert_close(theirs, ours)


def test_isinstance_and_specs(env: SerialEnv) -> None:
    theirs = torchrl.envs.SerialEnv(3, Counter)
    assert isinstance(env, torchrl.envs.SerialEnv)
    assert env.specs == theirs.specs
    assert env.batch_size == theirs.batch_size == (3,)
    assert env.is_closed


def test_never_started_envs_close_as_torchrls(env: SerialEnv) -> None:
    with pytest.raises(RuntimeError, match="trying to close a closed environment"):
        env.close()
    env.start()
    with pytest.raises(RuntimeError, match="not closed"):
        env.start()
    env.close()
    assert env.is_closed
    env.reset()  # starts again
    assert not env.is_closed


def test_a_mask_alone_gives_the_rows_as_they_are(env: SerialEnv) -> None:
    td = env.reset()
    td = env.step_mdp(step(env, td))
    td = env.step_mdp(step(env, td))
    mask = torch.tensor([[True], [False], [False]])
    out = env.reset(TensorDict({"_reset": mask}, [3]))
    assert out["observation"].flatten().tolist() == [0, 2, 2]
    assert out.get("_reset", None) is None


def test_masks_may_be_flat_and_empty_ones_touch_nothing(env: SerialEnv) -> None:
    td = env.step_mdp(step(env, env.reset()))
    num_resets = [len(given) for given in env.given]
    out = env.reset(TensorDict({"_reset": torch.zeros(3, dtype=torch.bool)}, [3]))
    assert out["observation"].flatten().tolist() == [1, 1, 1]
    assert [len(given) for given in env.given] == num_resets
    out = env.reset(td.set("_reset", torch.tensor([False, True, False])))
    assert out is td
    assert out["observation"].flatten().tolist() == [1, 0, 1]


def test_reset_arguments_reach_their_envs_and_are_left_alone(env: SerialEnv) -> None:
    listed = [{"level": i} for i in range(3)]
    before = copy.deepcopy(listed)
    env.reset(list_of_kwargs=listed, speed=7)
    assert listed == before
    assert [given[-1] for given in env.given] == [{"level": i, "speed": 7} for i in range(3)]


def test_step_masks(env: SerialEnv) -> None:
    theirs = torchrl.envs.SerialEnv(3, Counter)
    for mask in ([True, True, True], [False, True, True], [False, False, False]):
        results = []
        for one in (theirs, env):
            td = one.reset()
            td = one.step_mdp(step(one, td))
            if one is theirs and not any(mask) and own.VERSION < (0, 13):  # fails for a misspelt name in EnvBase.step
                continue
            results.append(step(one, td.set("_step", torch.tensor(mask))))
        if len(results) == 1:
            assert results[0]["next", "observation"].flatten().tolist() == [1, 1, 1]
            continue
        assert_close(*results)
        assert set(map(str, results[0].keys())) == set(map(str, results[1].keys()))


def test_seed_chain_is_torchrls() -> None:
    env = SerialEnv(3, lambda: GymEnv("CartPole-v1"))
    assert env.set_seed(0) == 2309840538
    assert env.set_seed(5, static_seed=True) == 5
    env.close()


def test_state_dicts_have_torchrls_keys() -> None:
    env = SerialEnv(2, lambda: TransformedEnv(own.CountingEnv(), StepCounter()))
    state = env.state_dict()
    assert list(state) == ["worker0", "worker1"]
    env.load_state_dict(state)
    env.load_state_dict(state["worker0"])  # the state of one env, loaded into all
    env.close()


def test_attributes_are_lists_at_once_and_hasattr_is_honest(env: SerialEnv) -> None:
    assert not hasattr(env, "max_steps")
    with pytest.raises(RuntimeError):  # as in TorchRL
        env.max_steps  # noqa: B018
    env.start()
    assert env.given == [[], [], []]
    assert len(env.given) == 3
    assert not hasattr(env, "no_such_thing")
    assert list(env.max_steps) == env.max_steps()


def test_views_are_live(env: SerialEnv) -> None:
    env.reset()
    view = env[1:]
    assert view.num_workers == 2
    assert isinstance(view, SerialEnv)
    td = view.reset()
    td["action"] = torch.ones(2, 1, dtype=env.action_spec.dtype)
    view.step(td)
    assert env.reset(TensorDict({"_reset": torch.zeros(3, 1, dtype=torch.bool)}, [3]))["observation"].sum() == 2
    view.close()
    assert not env.is_closed
    with pytest.raises(NotImplementedError):
        env[torch.tensor([True, False, True])]
    with pytest.raises(IndexError):
        env[3]
    other = env[-1]
    env.close()
    with pytest.raises(RuntimeError, match="closed"):
        other.reset()


def test_gradients_pass() -> None:
    env = SerialEnv(2, PendulumEnv, share_individual_td=True)
    td = env.reset()
    action = td["action"] = torch.zeros(2, 1, requires_grad=True)
    env.step(td)["next", "reward"].sum().backward()
    assert action.grad is not None
    env.close()


@own.since((0, 13), "reset to a given state (PendulumEnv refuses it)")
def test_state_given_to_reset_is_honoured() -> None:
    env = SerialEnv(2, PendulumEnv)
    td = env.reset()
    state = td.select("th", "thdot", "params").clone()
    state["th"] = torch.tensor([0.5, -0.5])
    assert env.reset(state, set_state=True)["th"].tolist() == [0.5, -0.5]
    env.close()


def test_unknown_next_entries_are_kept(env: SerialEnv) -> None:
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


def test_never_started_envs_can_be_pickled() -> None:
    env = SerialEnv(2, lambda: own.CountingEnv(max_steps=3))
    again = copy.deepcopy(env)
    assert again.rollout(2).shape == (2, 2)
    again.close()
    loaded = pickle.loads(pickle.dumps(env))
    assert loaded.specs == env.specs
    env.close(raise_if_closed=False)


def test_same_env_twice_is_copied() -> None:
    inner = own.CountingEnv()
    env = SerialEnv(2, lambda: inner)
    env.reset()
    assert env._envs[0] is inner
    assert env._envs[1] is not inner
    env.close()


def test_instances_are_refused() -> None:
    with pytest.raises(FactoryError, match="lambda: CountingEnv"):
        SerialEnv(2, own.CountingEnv())


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"create_env_fn": [own.CountingEnv]}, RuntimeError, "len\\(create_env_fn\\) and num_workers mismatch"),
        ({"create_env_kwargs": [{}]}, RuntimeError, "len\\(create_env_kwargs\\) and num_workers mismatch"),
        ({"pin_memory": True}, ValueError, "deprecated"),
        ({"allow_step_when_done": True}, ValueError, "deprecated"),
        ({"shared_memory": True, "memmap": True}, RuntimeError, "mutually exclusive"),
        ({"mp_start_method": "fork"}, TypeError, "mp_start_method"),
    ],
)
def test_constructor_refuses_what_torchrls_does(arguments: dict, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        SerialEnv(2, **{"create_env_fn": own.CountingEnv, **arguments})


def test_dynamic_and_stacked_rollouts() -> None:
    env = SerialEnv(2, [own.CountingEnv, lambda: own.CountingEnv(max_steps=2)])
    assert env.rollout(5, break_when_any_done=False).shape == (2, 5)
    assert env.rollout(20, break_when_any_done=False, break_when_all_done=True).shape[0] == 2
    with pytest.raises(TypeError):
        env.rollout(3, break_when_any_done=True, break_when_all_done=True)
    td = env.reset()
    assert env.rollout(2, auto_reset=False, tensordict=td).shape == (2, 2)
    env.close()
