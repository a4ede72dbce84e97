"""Slabs and storages: equal envs share arrays; ring and rollout are both indexed by column."""

import numpy as np
import pytest

from envherd.shm.slab import (
    NUM_BINS,
    WORDS,
    Slab,
    Storage,
    bin_middle,
    bin_of,
    plan_slab,
    plan_storage,
)
from envherd.shm.specs import Discrete, EnvSpec, LeafSpec


def spec_of(width, *, batch_shape=()):
    observation = LeafSpec(("observation",), (*batch_shape, width), "float32")
    side = LeafSpec(("text",), is_side=True)
    action = LeafSpec(("action",), batch_shape, "int64", Discrete(3))
    return EnvSpec((observation, side), (action,), batch_shape=batch_shape)


def slab_of(*widths, num_workers=2, num_frames=3):
    plan = plan_slab([spec_of(width) for width in widths], num_workers, num_frames)
    return Slab(plan, np.zeros(plan.nbytes, np.uint8))


def test_words_have_one_entry_per_env_or_worker():
    slab = slab_of(4, 4, 4)
    for name, word in WORDS.items():
        assert (
            len(slab.words[name])
            == {"env": 3, "info": 6, "worker": 2, "bin": 2 * NUM_BINS}[word.length]
        )
        assert word.writer in ("parent", "worker", "both")
        assert word.meaning


def test_every_duration_has_a_bin_that_is_near_it():
    assert [bin_of(n) for n in range(9)] == [0, 1, 2, 3, 4, 5, 6, 7, 12]
    for nanoseconds in (9, 100, 999, 12_345, 10**6, 33 * 10**6, 10**9, 10**12):
        assert abs(bin_middle(bin_of(nanoseconds)) / nanoseconds - 1) <= 0.15
    assert bin_of(10**18) == NUM_BINS - 1
    assert sorted(map(bin_of, range(1, 10_000))) == [
        bin_of(n) for n in range(1, 10_000)
    ]


def test_equal_specs_share_a_group_in_order():
    slab = slab_of(4, 2, 4, 2)
    assert [group.plan.env_ids for group in slab.groups] == [(0, 2), (1, 3)]
    assert [slab.plan.place(i) for i in range(4)] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    with pytest.raises(KeyError):
        slab.plan.place(4)


def test_side_leaves_take_no_memory():
    assert ("next", "text") not in slab_of(4).groups[0].columns


def test_all_regions_are_disjoint():
    slab = slab_of(4, 2, 4)
    arrays = [*slab.words.values()]
    for group in slab.groups:
        arrays += [
            *group.inputs.values(),
            *(a[c] for a in group.columns.values() for c in range(3)),
        ]
    for number, array in enumerate(arrays):
        array[...] = number % 2
    for number, array in enumerate(arrays):
        assert (array == number % 2).all()
    bells = slab.buffer[slab.plan.bells_offset : slab.plan.go_offset(1) + 128]
    assert not bells.any()


def test_the_bytes_of_next_are_one_block():
    group = slab_of(4, 4).groups[0]
    group.columns["next", "observation"][1] = 1
    group.columns["next", "reward"][1] = 2
    assert group.next_bytes(1).any()
    group.next_bytes(1)[:] = 0
    assert not group.columns["next", "observation"][1].any()
    assert not group.columns["next", "reward"][1].any()


def test_ring_and_storage_are_seen_by_column():
    slab = slab_of(4, 4)
    row = slab.groups[0].of_row(1)
    assert row["next", "observation"].shape == (3, 4)
    plan = plan_storage(slab.plan, 10)
    storage = Storage(plan, np.zeros(plan.nbytes, np.uint8))
    storage.of_row(0, 1)["next", "observation"][7] = 5
    assert storage.columns[0]["next", "observation"][1, 7].tolist() == [5] * 4
    assert storage.columns[0]["input", "action"].shape == (2, 10)


def test_envs_that_are_batches_have_a_reset_mask():
    plan = plan_slab([spec_of(4, batch_shape=(5,))], 1, 2)
    slab = Slab(plan, np.zeros(plan.nbytes, np.uint8))
    assert slab.groups[0].inputs["reset_mask",].shape == (1, 5, 1)
