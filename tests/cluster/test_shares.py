"""Spread envs over nodes, and pack their rows; no cluster, no process."""

import numpy as np
import pytest

from envherd.executor.cluster import ClusterError
from envherd.executor.cluster.packing import fold, unfolded
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


def rolled_leaves(rng, num_envs=3, num_steps=7, shape=(5, 4)):
    """Return leaves of a rollout in which envs end now and then."""
    root = rng.standard_normal((num_envs, num_steps, *shape)).astype(np.float32)
    root[0, num_steps // 2, 0, 0] = np.nan
    after = np.concatenate([root[:, 1:], rng.standard_normal((num_envs, 1, *shape)).astype(np.float32)], 1)
    ends = rng.random((num_envs, num_steps)) < 0.2
    after[ends] = rng.standard_normal((ends.sum(), *shape))
    flags = ends[..., None]
    return {("a", "pixels"): root, ("next", "a", "pixels"): after, ("done",): flags, ("next", "done"): flags.copy()}


def test_a_rollout_crosses_with_each_observation_once():
    leaves = rolled_leaves(np.random.default_rng(0))
    kept, folded = fold(leaves)
    assert set(folded) == {("next", "a", "pixels")}
    assert len(folded["next", "a", "pixels"].rows) == 3 + leaves["done",][:, :-1].sum()
    whole = {key: unfolded(kept, folded, key) for key in leaves}
    assert whole.keys() == leaves.keys()
    assert all(whole[key].tobytes() == leaves[key].tobytes() for key in leaves)


def test_what_a_policy_has_written_to_crosses_as_it_is():
    leaves = rolled_leaves(np.random.default_rng(1))
    leaves["a", "pixels"] *= 2  # every root differs from the `next` before it
    kept, folded = fold(leaves)
    assert not folded
    assert kept.keys() == leaves.keys()
    leaves = rolled_leaves(np.random.default_rng(1))
    leaves["a", "pixels"][1, 3] = -1.0  # one does
    kept, folded = fold(leaves)
    whole = {key: unfolded(kept, folded, key) for key in leaves}
    assert all(whole[key].tobytes() == leaves[key].tobytes() for key in leaves)


@pytest.mark.parametrize("shape", [(3,), ()])
def test_rollouts_of_one_step_and_small_leaves_are_left_alone(shape):
    leaves = rolled_leaves(
        np.random.default_rng(2), num_steps=1 if shape else 6, shape=(*shape, 1) if shape else (1, 1)
    )
    kept, folded = fold(leaves)
    assert not folded
    assert kept.keys() == leaves.keys()
