"""Batches on a device: the right bytes, one transfer per batch, and a clear error without such a device.

Without a GPU, the meta device (shapes, dtypes, number of transfers) and the CPU in the device's place (values) are
tested; marked tests need a GPU.
"""

import functools

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict

from envherd.executor import AsyncCollector, Collector, ParallelEnv, SerialEnv
from envherd.executor.batches.hand_out import GroupBatch
from envherd.executor.batches.transfer import Mover, as_device, packed, to_device
from envherd.executor.rollouts.rollout import StepwiseRun
from envherd.executor.show.evaluate import evaluate
from envherd.workers.testing import CountingEnv
from tests.envs.counting_envs import AgentsEnv
from tests.executor.batches.test_loans import assert_saved_as_held

NUM_ENVS = 3
META = torch.device("meta")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
on_devices = pytest.mark.parametrize(
    "device", ["meta", pytest.param("cuda", marks=needs_gpu)]
)


@pytest.fixture(params=["serial", "parallel"])
def kind(request):
    return (
        SerialEnv
        if request.param == "serial"
        else functools.partial(ParallelEnv, num_workers=2)
    )


@pytest.fixture
def moves(monkeypatch):
    """Count transfers."""
    found = []
    real = Mover.move
    monkeypatch.setattr(
        Mover,
        "move",
        lambda self, frame, column: found.append(column) or real(self, frame, column),
    )
    return found


def act_alone(_root=None):
    """Return a batch with only the action: on the meta device it would lose its values."""
    return TensorDict({"action": torch.ones(NUM_ENVS, dtype=torch.int64)}, [NUM_ENVS])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_reported_before_anything_starts(kind):
    with pytest.raises(
        ValueError, match=r"got 'cuda', but there is no GPU that torch can use"
    ):
        kind(NUM_ENVS, CountingEnv, device="cuda")


def test_names_of_devices():
    assert as_device(None) is None
    assert as_device("cpu") == torch.device("cpu")
    with pytest.raises(ValueError, match="expected a device such as"):
        as_device("gpu")
    with pytest.raises(ValueError, match="cuda:99"):
        as_device("cuda:99")


@pytest.mark.parametrize("make_env", [CountingEnv, AgentsEnv])
def test_a_batch_crosses_in_one_transfer(kind, moves, make_env):
    with (
        kind(NUM_ENVS, make_env, seed=0, device=META) as env,
        kind(NUM_ENVS, make_env, seed=0) as on_cpu,
    ):
        env.reset()
        other = on_cpu.reset()
        for _ in range(6):
            drawn = on_cpu.rand_action(other)
            given = drawn.select(*[leaf.key for leaf in on_cpu.action_spec])
            moves.clear()
            td, root = env.step_and_maybe_reset(given)
            assert len(moves) == 1
            td_cpu, other = on_cpu.step_and_maybe_reset(drawn)
            for ours, theirs in ((td["next"], td_cpu["next"]), (root, other)):
                assert ours.device == META
                for key in theirs.keys(include_nested=True, leaves_only=True):
                    assert ours[key].device == META
                    assert ours[key].shape == theirs[key].shape
                    assert ours[key].dtype == theirs[key].dtype


def test_moved_batches_have_the_right_bytes(kind):
    with kind(NUM_ENVS, AgentsEnv, seed=0) as env:
        td, batch = env.reset(), env._engine.batches.groups[0]
        td = env.step(env.rand_action(td))
        column = env._engine.positions.columns[0]
        num_frames = env._engine.positions.num_frames
        mover = Mover(env._engine.pool.slab.buffer, torch.device("cpu"), num_frames)
        moved = GroupBatch(
            batch.slab, num_frames, None, has_interrupted=False, mover=mover
        ).next_copies(column)
        assert_saved_as_held(moved)
        for key, leaf in zip(batch.next_keys, moved, strict=True):
            assert torch.equal(leaf, td["next", *key])
            assert not np.shares_memory(leaf.numpy(), env._engine.pool.slab.buffer)
        mover.close()
        mover.close()


@pytest.mark.parametrize("breaks", [True, False])
@pytest.mark.parametrize(
    "make_env", [CountingEnv, AgentsEnv, [CountingEnv, AgentsEnv, CountingEnv]]
)
def test_rollouts_step_by_step_are_as_all_others(kind, make_env, breaks):
    def act(td):
        td["next", "count"] = td.get("count", torch.zeros(NUM_ENVS, 1)) + 1
        return env.rand_action(td)

    with kind(NUM_ENVS, make_env, seed=0) as env:
        results = []
        for run in (None, StepwiseRun):
            env.set_seed(3)
            env._rollouts._run_type = run
            results.append(
                env.rollout(
                    15,
                    None if isinstance(make_env, list) else act,
                    break_when_any_done=breaks,
                )
            )
        assert results[0].batch_size == results[1].batch_size
        assert results[0].names == results[1].names
        for expected, got in zip(*[data.unbind(0) for data in results], strict=True):
            assert breaks or any(
                flag.any()
                for key, flag in expected.items(True, True)  # noqa: FBT003
                if key[-1] == "done"
            )
            assert set(got.keys(True, True)) == set(expected.keys(True, True))  # noqa: FBT003
            assert (got == expected).all()


@pytest.mark.parametrize("stepwise", [True, False])
def test_a_policy_may_write_every_result_where_it_wrote_the_last(kind, stepwise):
    """CUDA graphs do that: results of earlier steps, and the state that goes to the next, are copies."""
    action, total = torch.zeros(NUM_ENVS, dtype=torch.int64), torch.zeros(NUM_ENVS, 1)

    def act(td):
        total.copy_(td["total"] + 1)
        action.copy_(total[:, 0].long() % 2 + 1)
        td["action"] = action
        td["next", "total"] = total
        return td

    primer = TensorDict({"total": torch.zeros(NUM_ENVS, 1)}, [NUM_ENVS])
    with kind(NUM_ENVS, CountingEnv, seed=0) as env:
        env._rollouts._run_type = StepwiseRun if stepwise else None
        data = env.rollout(7, act, primer=primer, break_when_any_done=False)
    assert data["next", "done"].any()
    assert torch.equal(data["next", "total"], data["total"] + 1)
    follows = ~data["next", "done"][:, :-1]
    assert torch.equal(data["total"][:, 1:], data["next", "total"][:, :-1] * follows)
    assert torch.equal(data["action"], data["next", "total"][..., 0].long() % 2 + 1)


def test_a_rollout_and_a_collector_on_a_device(kind, moves):
    with kind(NUM_ENVS, CountingEnv, seed=0, device=META) as env:
        data = env.rollout(4, act_alone, break_when_any_done=False)
        assert data.batch_size == (NUM_ENVS, 4)
        assert data["next", "observation"].device == META
        assert len(moves) == 4
        batch = Collector(env, act_alone, frames_per_batch=6, close_env=False).collect()
        assert batch["observation"].shape == (NUM_ENVS, 2, 3)


def test_views_are_no_longer_views_on_a_device(kind):
    with kind(NUM_ENVS, CountingEnv, seed=0, device=META, copy=False) as env:
        env.reset()
        td = env.step(act_alone())
        assert td["next", "observation"].device == META


@on_devices
def test_batches_made_in_inference_mode_work_outside_of_it(kind, device):
    action = act_alone()
    with kind(NUM_ENVS, CountingEnv, seed=0, device=device) as env:
        with torch.inference_mode():
            root, drawn = env.reset(), env.rand_action()
            stepped = [env.step_and_maybe_reset(action.copy()) for _ in range(6)]
            env.send(action)
            batches = [
                root,
                drawn,
                *stepped[0],
                *stepped[-1],
                env.recv(),
                env.current([0, 2]),
                env.current(),
            ]
            batches.append(env.rollout(4, act_alone, break_when_any_done=False))
        for batch in batches:
            batch.apply_(torch.Tensor.zero_)


class Linear(torch.nn.Module):
    """Acts by its weights, and records the stream of the call."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1, dtype=torch.float32))
        self.streams = []

    def forward(self, td):
        if td.device is not None and td.device.type == "cuda":
            self.streams.append(torch.cuda.current_stream(td.device))
        seen = td["observation"].float().flatten(1).sum(1)
        return td.set("action", (seen * self.weight).long() % 2 + 1)


def collected(device, *, updates=True):
    """Return three batches collected by a thread; the policy's weights change after each."""
    policy = Linear().to(device)
    env = SerialEnv(NUM_ENVS, CountingEnv, seed=0)
    found = []
    with AsyncCollector(
        env, policy, frames_per_batch=12, policy_device=device, in_background=1
    ) as collector:
        for _ in range(3):
            found.append(collector.collect())
            if updates:
                with torch.no_grad():
                    policy.weight.add_(1)
                collector.update_policy_()
        return torch.cat(found, 0), collector.policy.streams


def test_batches_that_need_no_staging_are_moved_by_torch():
    td = TensorDict({"a": torch.arange(3), "b": {"c": torch.ones(3, 2)}}, [3])
    assert to_device(td, "meta")["b", "c"].device == META
    assert (to_device(td, "cpu") == td).all()


def test_a_batch_is_packed_into_one_transfer_to_a_device(monkeypatch):
    inner = TensorDict(
        {"b": torch.rand(3, 5).bfloat16(), "none": TensorDict({}, [3])}, [3]
    )
    td = TensorDict(
        {
            "a": torch.arange(6).view(3, 2).T.contiguous().T,
            "in": inner,
            "z": torch.zeros(3, 0),
        },
        [3],
    )
    moved = packed(td, torch.device("cpu"))
    assert_saved_as_held(moved.values(include_nested=True, leaves_only=True))
    assert (moved == td).all()
    assert moved["in"].batch_size == inner.batch_size
    assert {*moved.keys(include_nested=True)} == {*td.keys(include_nested=True)}
    assert not np.shares_memory(moved["a"].numpy(), td["a"].numpy())
    found, real = [], torch.Tensor.to
    monkeypatch.setattr(
        torch.Tensor,
        "to",
        lambda *args, **kwargs: found.append(args) or real(*args, **kwargs),
    )
    assert packed(td, META)["in", "b"].dtype == torch.bfloat16
    assert len(found) == 1
    assert packed(td.select(), META).shape == td.shape


def test_torchs_default_device_is_not_that_of_batches():
    def act(td):
        assert td.get("valid", td["done"]).is_cpu
        return td.set("action", td["observation"][:, 0] % 2)

    td = TensorDict({"a": torch.arange(3), "b": torch.ones(3, 2)}, [3])
    env = SerialEnv(NUM_ENVS, CountingEnv, seed=0)
    with torch.device(META):
        assert (packed(td, torch.device("cpu")) == td).all()
        with AsyncCollector(
            env, act, frames_per_batch=6, batch_sizes=(2, 4)
        ) as collector:
            assert collector.collect()["action"].is_cpu
        assert len(evaluate(act, CountingEnv, 2, num_workers=1).episodes) == 2


def test_packed_batches_keep_names_unlike_rows_and_what_is_no_tensor():
    named = TensorDict(
        {"a": torch.rand(2, 3), "in": TensorDict({"b": torch.rand(2, 3, 1)}, [2, 3])},
        [2, 3],
    )
    named.refine_names(None, "time")
    assert (
        packed(named, torch.device("cpu")).names
        == packed(named, torch.device("cpu"))["in"].names
        == [None, "time"]
    )
    rows = [
        TensorDict({"a": torch.rand(length), "text": NonTensorData(str(length))}, [])
        for length in (3, 5)
    ]
    unlike = packed(LazyStackedTensorDict(*rows, stack_dim=0), torch.device("cpu"))
    for row, expected in zip(unlike.unbind(0), rows, strict=True):
        assert torch.equal(row["a"], expected["a"])
        assert row["text"] == expected["text"]


@needs_gpu
def test_batches_cross_to_a_gpu_from_page_locked_memory():
    td = TensorDict({"a": torch.arange(1000), "b": {"c": torch.rand(1000, 2)}}, [1000])
    for _ in range(20):
        moved = to_device(td, "cuda")
        assert (moved.cpu() == td).all()
        assert_saved_as_held(moved.values(include_nested=True, leaves_only=True))


@needs_gpu
def test_a_thread_that_collects_has_a_stream_on_a_gpu():
    on_cpu, _ = collected("cpu", updates=False)
    on_gpu, streams = collected("cuda", updates=False)
    assert (on_gpu.exclude("policy_version") == on_cpu.exclude("policy_version")).all()
    default = torch.cuda.default_stream()
    assert {stream.cuda_stream for stream in streams}.isdisjoint({default.cuda_stream})


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
def test_a_thread_acts_with_the_weights_whose_version_it_gives(device):
    data, _ = collected(device)
    seen = data["observation"].float().flatten(2).sum(2)
    assert torch.equal(
        data["action"], (seen * (1 + data["policy_version"])).long() % 2 + 1
    )
