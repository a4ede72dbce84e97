"""What needs no cluster: envs are spread over nodes, rollouts are folded, factories are refused."""

import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict

from envherd.executor import FactoryError
from envherd.executor.cluster import ClusterError, RayParallelEnv
from envherd.executor.cluster.folding import fold, unfold
from envherd.executor.cluster.shares import bundles_for, divide


@pytest.mark.parametrize(
    ("num_envs", "weights", "counts"),
    [
        (4, [2, 2], [2, 2]),
        (5, [2, 2], [3, 2]),
        (12, [1, 2, 3], [2, 4, 6]),
        (3, [1, 1, 100], [1, 1, 1]),
        (10, [1, 1, 100], [1, 1, 8]),
        (1, [7], [1]),
    ],
)
def test_envs_are_divided_by_weight_with_one_each(num_envs, weights, counts):
    assert divide(num_envs, weights) == counts


def test_fewer_envs_than_nodes_are_refused():
    with pytest.raises(ValueError, match="at least one env per node, got 2 envs for 3 nodes"):
        divide(2, [1, 1, 1])


FREE = [{"CPU": 0.0}, {"CPU": 4.0, "node:1": 1.0}, {"CPU": 16.0, "GPU": 2.0, "memory": 1e9}]


@pytest.mark.parametrize(
    ("num_envs", "num_nodes", "per_node", "bundles"),
    [
        (99, None, None, [{"CPU": 16.0}, {"CPU": 4.0}]),
        (99, 1, None, [{"CPU": 16.0}]),
        (1, None, None, [{"CPU": 16.0}]),
        (99, None, {"GPU": 1}, [{"GPU": 1}]),
        (99, 3, {"CPU": 2}, [{"CPU": 2}] * 3),
        (99, None, [{"CPU": 2}, {"CPU": 1}], [{"CPU": 2}, {"CPU": 1}]),
    ],
)
def test_each_share_is_asked_for(num_envs, num_nodes, per_node, bundles):
    assert bundles_for(FREE, num_envs, num_nodes, per_node) == bundles


@pytest.mark.parametrize(("num_nodes", "per_node"), [(3, None), (None, {"TPU": 1})])
def test_what_no_node_has_is_refused(num_nodes, per_node):
    with pytest.raises(ClusterError, match="16 CPU, 2 GPU") as caught:
        bundles_for(FREE, 99, num_nodes, per_node)
    assert "got none: 3 living nodes" in str(caught.value)


def rollout(num_envs=3, num_steps=7, shape=(5, 4)):
    """Return a rollout in which envs end now and then."""
    torch.manual_seed(0)
    root = torch.randn(num_envs, num_steps, *shape)
    root[0, num_steps // 2, 0] = torch.nan
    after = torch.cat([root[:, 1:], torch.randn(num_envs, 1, *shape)], 1)
    ends = torch.rand(num_envs, num_steps) < 0.2
    after[ends] = torch.randn(int(ends.sum()), *shape)
    done = ends.unsqueeze(-1)
    nested = {"a": {"pixels": root}, "done": done, "next": {"a": {"pixels": after}, "done": done.clone()}}
    return TensorDict(nested, [num_envs, num_steps], names=[None, "time"]), ends


def check(parts):
    """Fold and unfold some rollouts; return how they cross."""
    folded = [fold(part) for part in parts]
    whole = unfold(folded)
    assert whole.names == parts[0].names
    for key in (("a", "pixels"), ("next", "a", "pixels"), "done", ("next", "done")):
        assert whole[key].numpy().tobytes() == torch.cat([part[key] for part in parts]).numpy().tobytes(), key
    return folded


def test_a_rollout_crosses_with_each_observation_once():
    data, ends = rollout()
    folded = check([data, data[:1]])[0]
    assert set(folded.repeated) == {("next", "a", "pixels")}
    assert len(folded.repeated["next", "a", "pixels"][0]) == 3 + ends[:, :-1].sum()


def test_what_a_policy_has_written_to_crosses_as_it_is():
    data, _ = rollout()
    data["a", "pixels"][1, 3] = -1.0  # one root differs from the `next` before it
    assert check([data])[0].repeated
    data["a", "pixels"] *= 2  # every root does
    assert not check([data])[0].repeated


@pytest.mark.parametrize("how", [{"num_steps": 1}, {"shape": (1, 1)}])
def test_rollouts_of_one_step_and_small_leaves_are_left_alone(how):
    assert not check([rollout(**how)[0]])[0].repeated


def test_what_is_more_than_tensors_crosses_as_it_is():
    data, _ = rollout(2)
    texts = data.clone().set("text", NonTensorStack(*[NonTensorStack(*"abcdefg")] * 2))
    for parts in ([texts], [data, texts]):
        whole = unfold([fold(part) for part in parts])
        assert isinstance(whole, TensorDict if len(parts) == 1 else LazyStackedTensorDict)
        assert whole[-1]["text"] == [*"abcdefg"]


def test_a_factory_that_cannot_be_pickled_is_named_before_anything_starts():
    held = (number for number in range(3))
    with pytest.raises(FactoryError, match="captured the variable `held`"):
        RayParallelEnv(2, lambda: held)
