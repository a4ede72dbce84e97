"""The TorchRL adapter on real TorchRL envs, compared with the same envs driven by TorchRL alone."""

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tests.extras import needs, skip_without

skip_without("torchrl")

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDictBase
from torchrl.data import (
    Binary,
    Bounded,
    Categorical,
    Choice,
    Composite,
    MultiCategorical,
    MultiOneHot,
    NonTensor,
    OneHot,
    Unbounded,
)
from torchrl.envs import (
    DMControlEnv,
    EnvBase,
    GymEnv,
    PendulumEnv,
    StepCounter,
    TransformedEnv,
)

from envherd.shm import specs
from envherd.shm.specs import DONE_KEYS, LeafSpec
from envherd.workers import plain
from envherd.workers.adapters import find_adapter
from envherd.workers.adapters.torchrl.adapter import TorchRLAdapter
from envherd.workers.adapters.torchrl.specs import Member, place_leaves
from envherd.workers.errors import ResetNeeded, SpecError
from tests.envs import torchrl_envs, torchrl_own
from tests.envs.torchrl_envs import EXTRAS, SAME_DATA, Typed, UnlikeActions
from tests.workers.adapter_values import stored

NUM_STEPS = 30


@dataclass
class Moment:
    """The values after a reset (no reward) or a step: `{key: value}`, and the episode's flags."""

    values: dict[Any, Any]
    done: np.ndarray
    is_reset: bool


def at(td: TensorDictBase, key: tuple[str, ...]) -> Any:
    """Return TorchRL's value of one of our leaves, as numpy or plain data."""
    node: Any = td
    for name in key:
        if name.isdigit():
            dim = (
                node.stack_dim
                if isinstance(node, LazyStackedTensorDict)
                else node.batch_dims - 1
            )
            node = node.unbind(dim)[int(name)]
        else:
            node = node.get(name)
    if isinstance(node, torch.Tensor):
        return node.numpy().copy()
    return node.tolist() if hasattr(node, "tolist") else node


def seed_all(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)


def reset_torchrl(env: EnvBase, seed: int) -> TensorDictBase:
    """Reset an env as the adapter's documentation describes."""
    seed_all(seed)
    base = env.base_env if isinstance(env, TransformedEnv) else env
    if isinstance(base, GymEnv):
        return env.reset(seed=seed)
    if isinstance(base, DMControlEnv):
        base._env.task._random = np.random.RandomState(seed)
        return env.reset()
    with suppress(NotImplementedError):
        env.set_seed(seed)
    return env.reset()


def play_torchrl(
    env: EnvBase, adapter: TorchRLAdapter, actions: list[TensorDictBase]
) -> list[Moment]:
    """Play with `env.step` and `env.step_mdp`; the adapter only names the leaves."""
    spec = adapter.spec

    def moment(td: TensorDictBase, *, is_reset: bool) -> Moment:
        leaves = (*spec.observation, *spec.done[3:], *(() if is_reset else spec.reward))
        ends = [at(td, key) for key in DONE_KEYS if td.get(key, None) is not None]
        ends = ends or [at(td, leaf.key) for leaf in spec.done[3:] if len(leaf.key) > 1]
        flat = [
            end.reshape(*spec.batch_shape, -1).any(-1, keepdims=True) for end in ends
        ]
        return Moment(
            {leaf.key: at(td, leaf.key) for leaf in leaves},
            np.logical_or.reduce(flat),
            is_reset,
        )

    seed = 7
    root = reset_torchrl(env, seed)
    moments = [moment(root, is_reset=True)]
    for action in actions:
        stepped = env.step(root.update(action.clone()))
        moments.append(moment(stepped["next"], is_reset=False))
        root = env.step_mdp(stepped)
        if moments[-1].done.any():
            seed += 1
            if moments[-1].done.all():
                root = reset_torchrl(env, seed)
            else:
                env.any_done(root)
                root = env.reset(root, select_reset_only=True)
            moments.append(moment(root, is_reset=True))
    return moments


def play_adapter(
    adapter: TorchRLAdapter,
    actions: list[TensorDictBase],
    state: Callable[[LeafSpec, dict], Any],
) -> list[Moment]:
    """Play with the adapter, while other code draws from torch's generator."""
    spec = adapter.spec
    seed = 7

    def reset(mask: np.ndarray | None) -> Moment:
        if mask is None:
            random.seed(seed)
        torch.rand(3)
        values = stored(spec.observation, adapter.reset(seed, None, mask))
        values |= stored(spec.done[3:], adapter.done_values())
        return Moment(values, np.zeros((*spec.batch_shape, 1), bool), is_reset=True)

    moments = [reset(None)]
    for action in actions:
        torch.rand(2)
        given = [value_of(leaf, at(action, leaf.key)) for leaf in spec.action]
        given += [state(leaf, moments[-1].values) for leaf in spec.state]
        observation, reward, terminated, truncated = adapter.step(given)
        values = stored(spec.observation, observation) | stored(spec.reward, reward)
        values |= stored(spec.done[3:], adapter.done_values())
        done = np.asarray(terminated | truncated).reshape(*spec.batch_shape, 1)
        moments.append(Moment(values, done, is_reset=False))
        if done.any():
            seed += 1
            moments.append(reset(None if done.all() else done))
    return moments


def value_of(leaf: LeafSpec, value: Any) -> Any:
    """Return an input in the form in which the worker's block passes it to an adapter."""
    return (
        int(value)
        if not leaf.is_side and leaf.shape == () and leaf.dtype == "int64"
        else value
    )


def assert_same(ours: list[Moment], theirs: list[Moment]) -> None:
    assert len(ours) == len(theirs)
    for index, (mine, their) in enumerate(zip(ours, theirs, strict=True)):
        assert mine.is_reset == their.is_reset
        assert np.array_equal(mine.done, their.done) or mine.is_reset, (
            index,
            mine.done,
            their.done,
        )
        assert mine.values.keys() == their.values.keys()
        for key, value in mine.values.items():
            expected = their.values[key]
            if isinstance(expected, np.ndarray):
                assert (value.dtype, value.shape) == (expected.dtype, expected.shape), (
                    key
                )
                assert value.tobytes() == expected.tobytes(), (
                    index,
                    key,
                    value,
                    expected,
                )
            else:
                assert value == expected, (index, key)


def drawn_actions(env: EnvBase) -> list[TensorDictBase]:
    torch.manual_seed(99)
    return [env.full_action_spec.rand() for _ in range(NUM_STEPS)]


each = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[needs(EXTRAS[name])] if name in EXTRAS else [])
        for name in SAME_DATA
    ],
)


@pytest.mark.sampled(2)
@pytest.mark.slow
@each
def test_same_data_as_torchrl(name):
    """If the env keeps its state, and if it is given the state of its root."""
    env = SAME_DATA[name]()
    assert find_adapter(env) is TorchRLAdapter
    adapter, other = TorchRLAdapter(env), TorchRLAdapter(SAME_DATA[name]())
    check_spec(adapter.spec, other.spec)
    actions = drawn_actions(adapter.env)
    theirs = play_torchrl(SAME_DATA[name](), adapter, actions)
    ours = play_adapter(adapter, actions, lambda *_: None)
    assert sum(moment.is_reset for moment in ours) > 1, "no episode ended"
    assert_same(ours, theirs)
    if other.spec.state:
        assert_same(
            play_adapter(other, actions, lambda leaf, root: root.get(leaf.key)), theirs
        )


def check_spec(spec, other):
    """Check that a spec is that of another instance after it has crossed, and its order."""
    assert type(spec).from_plain(plain.decode(plain.encode(spec.to_plain()))) == other
    assert [leaf.key for leaf in spec.done[:3]] == list(DONE_KEYS)
    assert {leaf.shape for leaf in spec.done[:3]} == {(*spec.batch_shape, 1)}
    for group in (
        spec.observation,
        spec.action,
        spec.reward,
        spec.done[3:],
        spec.state,
    ):
        keys = [leaf.key for leaf in group]
        assert keys == sorted(keys, key=lambda key: (len(key), key))


def test_given_state_wins_over_the_env_s_own():
    adapter = TorchRLAdapter(PendulumEnv())
    adapter.reset(0)
    given: dict[Any, Any] = {("th",): np.float32(0.5), ("thdot",): np.float32(-1.0)}
    values = [given.get(leaf.key) for leaf in adapter.spec.state]
    ours = stored(
        adapter.spec.observation, adapter.step([np.ones(1, np.float32), *values])[0]
    )
    env = PendulumEnv()
    root = env.reset().update(
        {"th": torch.tensor(0.5), "thdot": torch.tensor(-1.0), "action": torch.ones(1)}
    )
    theirs = env.step(root)["next"]
    assert ours["th",] == theirs["th"].item()
    assert ours["thdot",] == theirs["thdot"].item()


def test_state_has_no_bounds():
    spec = TorchRLAdapter(PendulumEnv()).spec
    assert {str(leaf.domain) for leaf in spec.state} == {"any"}
    assert (
        str(next(leaf for leaf in spec.observation if leaf.key == ("thdot",)).domain)
        == "[-8.0, 8.0]"
    )


def test_a_single_env_that_ended_undecidedly_is_truncated():
    adapter = TorchRLAdapter(torchrl_envs.Stalled())
    adapter.reset(0)
    ends = [adapter.step([np.zeros(1, np.float32)])[2:] for _ in range(3)]
    assert ends == [(False, False), (False, False), (False, True)]


@pytest.mark.parametrize(("at_root", "ends_at"), [(True, 3), (False, 3)])
def test_root_done_prevails_and_nested_ones_count_without_it(at_root, ends_at):
    adapter = TorchRLAdapter(
        torchrl_own.MockNestedResetEnv(num_steps=3, done_at_root=at_root)
    )
    assert ("agent_1", "done") in [leaf.key for leaf in adapter.spec.done[3:]]
    adapter.reset(None)
    ends = []
    for _ in range(3):
        *_, terminated, truncated = adapter.step([None] * len(adapter.spec.action))
        ends.append(terminated or truncated)
    assert ends == [step == ends_at for step in (1, 2, 3)]
    assert (
        stored(adapter.spec.done[3:], adapter.done_values())["agent_1", "done"].item()
        is True
    )


def test_step_before_reset_and_missing_leaf_are_named():
    adapter = TorchRLAdapter(torchrl_envs.Forgetful())
    with pytest.raises(ResetNeeded, match="expected a reset first"):
        adapter.step([np.zeros(1, np.float32)])
    adapter.reset(0)
    with pytest.raises(
        SpecError,
        match=r"reading extra failed: expected extra: float32 \(2,\) in any, got nothing",
    ):
        adapter.step([np.zeros(1, np.float32)])


def test_step_returns_views_and_leaves_torch_s_modes_alone():
    threads = torch.get_num_threads()
    adapter = TorchRLAdapter(TransformedEnv(GymEnv("CartPole-v1"), StepCounter()))
    adapter.reset(0)
    observation, reward, terminated, truncated = adapter.step([np.array([1, 0]), None])
    (ours,) = [value for value in observation if value.shape == (4,)]
    assert np.shares_memory(ours, adapter._latest["observation"].numpy())
    assert [type(reward[0]), terminated, truncated] == [float, False, False]
    assert (torch.is_grad_enabled(), torch.get_num_threads()) == (True, threads)


# ---- TorchRL's specs as ours: encodings, dtypes, stacks, side leaves -----------------------------

STEPS = torch.tensor([0.0, 1.0])


def box(low, high, dtype) -> specs.Box:
    return specs.Box(np.array(low, dtype), np.array(high, dtype))


def leaf_of(spec, **more):
    (placed,) = place_leaves(Composite(x=spec, **more))
    return placed.spec


@pytest.mark.parametrize(
    ("spec", "shape", "dtype", "domain"),
    [
        (Unbounded((2, 3)), (2, 3), "float32", specs.Unbounded()),
        (Unbounded((1,), dtype=torch.int16), (1,), "int16", specs.Unbounded()),
        (Unbounded((1,), dtype=torch.bool), (1,), "bool", specs.Binary()),
        (Bounded(-1.0, 2.0, (3,)), (3,), "float32", box(-1, 2, np.float32)),
        (
            Bounded(0, 255, (8, 8, 3), dtype=torch.uint8),
            (8, 8, 3),
            "uint8",
            box(0, 255, np.uint8),
        ),
        (Bounded(STEPS, STEPS + 2), (2,), "float32", box([0, 1], [2, 3], np.float32)),
        (Bounded(0, 1, (0, 2)), (0, 2), "float32", specs.Unbounded()),
        (OneHot(4), (4,), "bool", specs.OneHot(4)),
        (OneHot(4, shape=(2, 4), dtype=torch.int64), (2, 4), "int64", specs.OneHot(4)),
        (Categorical(5), (), "int64", specs.Discrete(5)),
        (
            Categorical(5, shape=(2,), dtype=torch.int32),
            (2,),
            "int32",
            specs.Discrete(5),
        ),
        (Categorical(2, shape=(1,), dtype=torch.bool), (1,), "bool", specs.Binary()),
        (Categorical(-1), (), "int64", specs.Unbounded()),
        (MultiCategorical([3, 4]), (2,), "int64", specs.MultiDiscrete((3, 4))),
        (
            MultiCategorical([3, 4]).expand(2, 2),
            (2, 2),
            "int64",
            specs.MultiDiscrete(((3, 4), (3, 4))),
        ),
        (MultiOneHot([2, 3]), (5,), "bool", specs.Binary()),
        (Binary(3), (3,), "int8", specs.Binary()),
        (
            Choice([Bounded(0, 1, (2,)), Bounded(1, 2, (2,))]),
            (2,),
            "float32",
            specs.Unbounded(),
        ),
    ],
    ids=lambda value: type(value).__name__ if hasattr(value, "is_in") else None,
)
def test_the_encoding_that_the_env_declares_is_kept(spec, shape, dtype, domain):
    assert leaf_of(spec) == specs.LeafSpec(("x",), shape, dtype, domain)


def test_bounds_that_are_the_same_everywhere_are_stored_once():
    domain = leaf_of(Bounded(0, 255, (64, 64, 3), dtype=torch.uint8)).domain
    assert (domain.low.shape, domain.high.shape) == ((), ())


@pytest.mark.parametrize(
    ("spec", "tensor_dtype"),
    [
        (NonTensor(()), ""),
        (Unbounded((3, -1, 2)), "float32"),
        (Choice([NonTensor(())]), ""),
    ],
)
def test_leaves_without_fixed_shape_become_side_values(spec, tensor_dtype):
    (placed,) = place_leaves(Composite(x=spec))
    assert (placed.spec.is_side, placed.spec.dtype, placed.tensor_dtype) == (
        True,
        "",
        tensor_dtype,
    )


@pytest.mark.parametrize(
    ("observation", "reward", "message"),
    [
        *(
            (
                Unbounded((2,), dtype=dtype),
                None,
                rf"that numpy has too, got {dtype} \(added\). Append DTypeCast",
            )
            for dtype in (torch.bfloat16, torch.float8_e4m3fn)
        ),
        (
            Unbounded((2,)),
            Unbounded((-1, 1)),
            "expected rewards and done flags of fixed shape, got reward: side channel",
        ),
    ],
    ids=["bfloat16", "float8", "reward"],
)
def test_dtypes_that_numpy_lacks_and_rewards_without_a_fixed_shape_are_refused(
    observation, reward, message
):
    with pytest.raises(SpecError, match=message):
        TorchRLAdapter(Typed(observation, reward))


def test_rows_of_unlike_specs_are_refused():
    rows = torch.stack([Composite(x=Unbounded((2,))), Composite(x=Unbounded((3,)))], 0)
    with pytest.raises(SpecError, match="expected rows of equal specs"):
        place_leaves(rows)


def test_agents_that_differ_come_apart_leaf_by_leaf():
    spec = TorchRLAdapter(SAME_DATA["unlike agents"]()).spec
    leaves = {leaf.key: leaf for leaf in spec.observation}
    assert leaves["lazy", "camera"].shape == (3, 7, 7, 3)  # equal for all agents
    assert [leaves["lazy", str(i), "vector"].shape for i in range(3)] == [
        (3,),
        (2,),
        (2,),
    ]
    assert ("lazy", "vector") not in leaves
    assert [(leaf.key, leaf.shape) for leaf in spec.action] == [
        (("lazy", str(i), "action"), (3 - (i > 0),)) for i in range(3)
    ]
    # `lazy` holds separate agents, so it has no batch of agents.
    assert spec.groups == ()
    assert [leaf.shape for leaf in spec.reward] == [(3, 1)]


def test_actions_that_differ_do_not_touch_observations_that_agree():
    adapter = TorchRLAdapter(UnlikeActions())
    assert [str(leaf) for leaf in adapter.spec.action] == [
        "agents/0/action: int64 (2,) in one-hot of 2",
        "agents/1/action: int64 (3,) in one-hot of 3",
    ]
    assert [leaf.shape for leaf in adapter.spec.observation] == [(1,), (2, 3)]
    assert adapter.spec.groups == ()


@pytest.mark.parametrize(
    ("members", "domain"),
    [
        ((Categorical(3), Categorical(5)), specs.MultiDiscrete((3, 5))),
        ((Categorical(3), Categorical(3)), specs.Discrete(3)),
        (
            (MultiCategorical([2, 3]), MultiCategorical([4, 3])),
            specs.MultiDiscrete(((2, 3), (4, 3))),
        ),
        (
            (Bounded(0, 1, (2,)), Bounded(0, 2, (2,))),
            box(0, [[1, 1], [2, 2]], np.float32),
        ),
        (
            (Bounded(0, 1, (2,)), Unbounded((2,))),
            box([[0, 0], [-np.inf, -np.inf]], [[1, 1], [np.inf, np.inf]], np.float32),
        ),
    ],
)
def test_members_of_equal_shape_stay_dense_with_a_domain_for_each(members, domain):
    extra = [Unbounded((1,)), Unbounded((2,))]  # keeps the stack heterogeneous
    stack = torch.stack(
        [Composite(x=x, extra=e) for x, e in zip(members, extra, strict=True)], 0
    )
    placed = {leaf.spec.key: leaf for leaf in place_leaves(Composite(agents=stack))}
    assert placed["agents", "x"].spec.domain == domain
    assert placed["agents", "x"].spec.shape == (2, *members[0].shape)
    assert placed["agents", "1", "extra"].path == ("agents", Member(1, 0), "extra")


def test_nested_tensordicts_with_their_own_batch_shape_are_groups():
    assert TorchRLAdapter(SAME_DATA["several groups, batch"]()).spec.groups == (
        (("nested_1",), (2, 3)),
        (("nested_2",), (2, 2)),
    )
    assert TorchRLAdapter(SAME_DATA["several done groups"]()).spec.groups == ()


def test_done_keys_beyond_the_three_at_the_root_follow_them():
    keys = [
        leaf.key
        for leaf in TorchRLAdapter(SAME_DATA["several done groups"]()).spec.done
    ]
    # The env had none before.
    at_root = [("env_done",)] if torchrl_own.VERSION >= (0, 13) else []
    nested = keys[3 + len(at_root) :]
    assert keys == [*specs.DONE_KEYS, *at_root, *nested]
    assert {key[-1] for key in nested} == {"done", "terminated"}
    assert {len(key) for key in nested} == {3}
