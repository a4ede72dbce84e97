"""Memory of batches is reused only when no reference of any kind is left."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from envherd import AsyncCollector, Collector, ExecutorOptions, ParallelEnv, SerialEnv
from envherd.executor.batches import memory as batch_memory
from envherd.executor.batches.memory import ReusedMemory
from envherd.workers.testing import CountingEnv

SHAPES = [
    ((5,), np.float32),
    ((2, 1), np.bool_),
    ((40, 40), np.int32),
    ((3,), np.int64),
]


def split(buffer: np.ndarray) -> list[np.ndarray]:
    arrays, at = [], 0
    for shape, dtype in SHAPES:
        array: np.ndarray = np.ndarray(shape, dtype, buffer, at)
        arrays.append(array)
        at += (array.nbytes + 7) // 8 * 8
    return arrays


NBYTES = sum(
    (int(np.prod(shape)) * np.dtype(dtype).itemsize + 7) // 8 * 8
    for shape, dtype in SHAPES
)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(value)
        return weight * value.double().sum()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (value,) = ctx.saved_tensors
        return gradients[0] * value.double().sum(), None


def saved(leaf: torch.Tensor) -> Any:
    return Square.apply(torch.ones((), dtype=torch.double, requires_grad=True), leaf)


#: Ways to hold a leaf -> how to read it then.
HOLDS: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "tensor": (lambda leaf: leaf, lambda held: held),
    "row": (lambda leaf: leaf[:1], lambda held: held),
    "transposed": (
        lambda leaf: leaf.t() if leaf.ndim == 2 else leaf,
        lambda held: held,
    ),
    "numpy": (lambda leaf: leaf.numpy(), torch.from_numpy),
    "row of numpy": (lambda leaf: leaf.numpy()[1:], torch.from_numpy),
    "dlpack": (torch._C._to_dlpack, None),
    "detached": (lambda leaf: leaf.detach(), lambda held: held),
    "data": (lambda leaf: leaf.data, lambda held: held),
    "parameter": (
        lambda leaf: torch.nn.Parameter(leaf, requires_grad=False),
        lambda held: held.data,
    ),
    "storage": (
        lambda leaf: (
            leaf.untyped_storage(),
            leaf.dtype,
            leaf.storage_offset(),
            leaf.shape,
        ),
        None,
    ),
    "autograd": (saved, lambda held: held.grad_fn.saved_tensors[0]),
    "shared": (lambda leaf: leaf.share_memory_(), lambda held: held),
    "tensordict": (lambda leaf: TensorDict({"a": leaf}, []), lambda held: held["a"]),
    "memory": (
        lambda leaf: memoryview(leaf.numpy()),
        lambda held: torch.from_numpy(np.asarray(held)),
    ),
}


def read(kind: str, held: Any) -> torch.Tensor:
    if kind == "storage":
        storage, dtype, offset, shape = held
        whole = torch.empty(0, dtype=dtype).set_(storage)
        return whole[offset : offset + shape.numel()].reshape(shape)
    value: torch.Tensor = HOLDS[kind][1](held)
    return value


def fill(buffer: np.ndarray, number: int) -> None:
    for array in split(buffer):
        array[...] = number % 2 if array.dtype == bool else number


@settings(max_examples=100)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from([None, None, *HOLDS]),
            st.integers(0, len(SHAPES) - 1),
            st.integers(0, 6),
        ),
        min_size=5,
        max_size=40,
    )
)
def test_held_memory_is_never_written_to(steps):
    memory = ReusedMemory(NBYTES, split)
    held: list[tuple[str, Any, torch.Tensor]] = []
    for number, (kind, index, dropped) in enumerate(steps, 1):
        buffer, leaves = memory.take()
        fill(buffer, number)
        if kind == "dlpack":
            held.append(
                (
                    "tensor",
                    torch.utils.dlpack.from_dlpack(HOLDS[kind][0](leaves[index])),
                    leaves[index].clone(),
                )
            )
        elif kind is not None:
            value = HOLDS[kind][0](leaves[index])
            held.append((kind, value, read(kind, value).clone()))
        for (shape, dtype), leaf in zip(SHAPES, leaves, strict=True):
            expected = torch.from_numpy(
                np.full(shape, number % 2 if dtype is np.bool_ else number, dtype)
            )
            assert torch.equal(leaf, expected)
            assert not leaf.requires_grad
            assert leaf.is_contiguous()
        del leaves, leaf, buffer
        if dropped < len(held):
            del held[dropped]
        for kind_held, value, expected in held:
            assert torch.equal(read(kind_held, value), expected), kind_held


@pytest.mark.skipif(
    batch_memory._use_count is None, reason="this version of torch does not count"
)
def test_memory_is_reused_once_no_batch_holds_it():
    memory = ReusedMemory(NBYTES, split)
    first = {memory.take()[1][0].data_ptr() for _ in range(20)}
    assert len(first) == batch_memory.ReusedMemory.NUM_BLOCKS
    kept = [memory.take()[1] for _ in range(5)]
    assert len({leaves[0].data_ptr() for leaves in kept}) == 5
    del kept
    assert {memory.take()[1][0].data_ptr() for _ in range(20)} == first


@pytest.mark.skipif(
    batch_memory._use_count is None, reason="this version of torch does not count"
)
def test_memory_moved_to_shared_memory_is_not_reused():
    memory = ReusedMemory(NBYTES, split)
    moved = {
        memory.take()[1][index % 4].share_memory_().data_ptr() for index in range(6)
    }
    later = [memory.take() for _ in range(3)]
    for number, (buffer, leaves) in enumerate(later):
        fill(buffer, number)
        assert int(leaves[3][0]) == number
    assert not moved & {leaf.data_ptr() for _, leaves in later for leaf in leaves}


def test_changes_of_a_tensor_end_with_it():
    memory = ReusedMemory(NBYTES, split)
    for _ in range(10):
        leaves = memory.take()[1]
        assert not leaves[0].requires_grad
        assert leaves[0].shape == (5,)
        assert not hasattr(leaves[0], "mine")
        leaves[0].requires_grad_()
        leaves[0].mine = 3
        leaves[1].resize_(0)
        leaves[3].data = torch.zeros(7)


def test_memory_is_always_new_without_use_counts(monkeypatch):
    monkeypatch.setattr(batch_memory, "_use_count", None)
    memory = ReusedMemory(NBYTES, split)
    kept = [memory.take()[1] for _ in range(6)]
    assert len({leaves[0].data_ptr() for leaves in kept}) == 6


def test_a_batch_that_is_large_is_not_kept():
    large = batch_memory._LARGEST_KEPT + 1
    gone = weakref.ref(ReusedMemory(large, lambda buffer: [buffer]).take()[0])
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("make", [SerialEnv, ParallelEnv])
def test_batches_of_an_executor_stay_what_they_are(make):
    """For anything that a caller keeps of its steps."""
    with make(3, CountingEnv, seed=0) as env:
        root, kept = env.reset(), []
        for step in range(40):
            td, root = env.step_and_maybe_reset(env.rand_action(root))
            value = td["next", "observation"]
            if step % 5 == 1:
                kept.append((value.numpy(), value.clone()))
            elif step % 5 == 2:
                kept.append((root["observation"][0], root["observation"][0].clone()))
            elif step % 5 == 3:
                kept.append((pickle.loads(pickle.dumps(value)), value.clone()))
            elif step % 5 == 4:
                kept.append(
                    (copy.deepcopy(td)["next", "reward"], td["next", "reward"].clone())
                )
        for found, expected in kept:
            assert torch.equal(torch.as_tensor(found), expected)


INFERENCE = [
    (SerialEnv, {}),
    (ParallelEnv, {}),
    (ParallelEnv, {"options": ExecutorOptions(infos="plain")}),
]


@pytest.mark.parametrize("is_made_inside", [False, True])
@pytest.mark.parametrize(
    ("make", "options"), [*INFERENCE, (SerialEnv, {"copy": False})]
)
def test_batches_made_in_inference_mode_work_outside_of_it(
    make, options, is_made_inside
):
    with torch.inference_mode(is_made_inside):
        env = make(3, CountingEnv, seed=0, **options)
    batches = []
    with env:
        for is_inside in (is_made_inside, True, False):
            with torch.inference_mode(is_inside):
                root = env.reset()
                td, after = env.step_and_maybe_reset(env.rand_action())
                env.send(env.rand_action())
                received = env.recv()
                current = env.current(received["env_ids"])
                batches += [root, td, after, received, current, env.current()]
                env.send(env.rand_action(current), received["env_ids"])
                env.recv(1, 10.0, max_envs=3)
                env.recv() if env.engine.states.under_way.any() else None
                batches.append(env.rollout(4, break_when_any_done=False))
            env.rollout(4, out=batches[-1], break_when_any_done=False)
            assert env.rollout(20).batch_size[1] < 20
        for batch in batches:
            for leaf in batch.values(include_nested=True, leaves_only=True):
                leaf.zero_()


@pytest.mark.parametrize("collector_type", [Collector, AsyncCollector])
def test_collectors_may_enter_and_leave_inference_mode(collector_type):
    layer = torch.nn.Linear(3, 1)

    def act(td: Any) -> Any:
        hidden = (
            layer(td["observation"].float())
            + td.get("hidden", torch.zeros(3, 1)).mean()
        )
        return td.set("action", td["observation"][:, 0] % 2).set(
            "next", TensorDict({"hidden": hidden}, td.batch_size)
        )

    def collect(collector: Any) -> None:
        for _ in range(2):
            data = collector.collect()
            data["next", "reward"].zero_()
            data["observation"].zero_()

    with torch.inference_mode():
        env = SerialEnv(3, CountingEnv, seed=0)
        collector = collector_type(env, act, frames_per_batch=12)
        collect(collector)
    with collector:
        collect(collector)
        with torch.inference_mode():
            collect(collector)
        collect(collector)
