"""Spread envs over nodes, and pack their rows; no cluster, no process."""

import numpy as np
import pytest

from envherd.executor.cluster import ClusterError
from envherd.executor.cluster.folding import fold, unfolded
from envherd.executor.cluster.shares import bundles_for, divide
from envherd.executor.cluster.wire import DriverMemory, WireRows
from envherd.shm.slab import Slab, Storage, plan_slab, plan_storage
from envherd.workers.testing import AgentsEnv, CountingEnv

NOBODY = np.zeros(0, np.int64)


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


def make_slab(specs):
    plan = plan_slab(specs, 1, 4)
    return Slab(plan, np.zeros(plan.nbytes, np.uint8))


@pytest.fixture
def ends():
    """A share of three envs of two kinds, within a batch of five: the host's end, and the driver's."""
    two, many = CountingEnv(3).spec, AgentsEnv().spec
    small, large = make_slab([two, many, two]), make_slab([many, two, two, many, two])
    rng = np.random.default_rng(0)
    for slab in (small, large):
        slab.buffer[slab.plan.bells_offset :] = rng.integers(0, 2, slab.plan.nbytes - slab.plan.bells_offset)
    return WireRows(small, small.plan), small, WireRows(large, small.plan, 2), large


def rows_of(slab, env_id, column):
    group, row = slab.plan.place(env_id)
    return {name: array[column, row].copy() for name, array in slab.groups[group].columns.items()}


@pytest.mark.parametrize("ids", [None, np.array([0, 2]), np.array([1]), NOBODY])
def test_rows_cross_to_their_own_places_and_touch_no_other(ends, ids):
    here, small, there, large = ends
    before = [[rows_of(large, env_id, column) for column in range(4)] for env_id in range(5)]
    asked = np.arange(3) if ids is None else ids
    roots = asked[:1]
    theirs = 1 if ids is None else np.arange(len(asked)) + 1
    nexts = here.pack_rows("next", ids, 2 if ids is None else asked * 0 + 2)
    there.unpack_rows("next", nexts, ids, theirs)
    there.unpack_rows("root", here.pack_rows("root", roots, roots * 0 + 3), roots, roots * 0)
    for env_id in range(5):
        for column in range(4):
            expected = before[env_id][column]
            own = env_id - 2
            if own in asked and column == (1 if ids is None else 1 + asked.tolist().index(own)):
                expected |= {n: v for n, v in rows_of(small, own, 2).items() if n[0] == "next"}
            if own in roots and column == 0:
                expected |= {n: v for n, v in rows_of(small, own, 3).items() if n[0] == "root"}
            now = rows_of(large, env_id, column)
            assert all(np.array_equal(now[name], expected[name]) for name in now), (env_id, column)


@pytest.mark.parametrize("ids", [None, np.array([0, 2]), np.array([1])])
def test_inputs_cross(ends, ids):
    here, small, there, large = ends
    here.unpack_inputs(there.pack_inputs(ids), ids)
    for own in range(3) if ids is None else ids.tolist():
        group, row = small.plan.place(own)
        home, place = large.plan.place(own + 2)
        for name, array in small.groups[group].inputs.items():
            assert np.array_equal(array[row], large.groups[home].inputs[name][place])


def test_a_storage_gets_the_step_and_the_root_that_follows(ends):
    here, small, there, large = ends
    plan = plan_storage(large.plan, 2)
    storage = Storage(plan, DriverMemory(plan.nbytes).array().copy())
    reset = np.array([1])
    for column in range(2):
        nexts, roots = here.pack_rows("next", None, column), here.pack_rows("root", reset, column)
        there.unpack_to_storage(nexts, None, roots, reset, (storage, column))
    for own in range(3):
        group, row = large.plan.place(own + 2)
        for name, array in storage.columns[group].items():
            told = [rows_of(small, own, column) for column in range(2)]
            if name[0] == "next":
                assert all(np.array_equal(array[row, t], told[t][name]) for t in range(2))
            elif name[0] == "root":
                source = name if own == 1 else ("next", *name[1:])
                assert np.array_equal(array[row, 1], told[0][source])


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
