"""Seeds depend only on the triple, and seeds of neighbours are unrelated."""

import itertools
import random

import numpy as np
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

from envherd.workers import seeding


def test_the_triple_decides():
    assert seeding.episode_seed(7, 3, 5) == seeding.episode_seed(7, 3, 5)
    assert 0 <= seeding.episode_seed(2**63 - 1, 10**6, 10**6) < 2**32


def test_neighbours_differ():
    triples = itertools.product(range(5), range(20), range(20))
    assert len({seeding.episode_seed(*triple) for triple in triples}) == 5 * 20 * 20


def test_building_draws_from_a_separate_stream():
    assert seeding.build_seed(0, 1) not in {
        seeding.episode_seed(0, 1, episode) for episode in range(1000)
    }


def test_global_generators_are_seeded():
    def draw():
        seeding.seed_globals(11)
        return random.random(), np.random.random(), torch.rand(1).item()

    before = seeding.caller_state()
    assert draw() == draw()
    assert torch.initial_seed() == 11
    seeding.restore_globals(before)


def test_the_caller_gets_its_generators_back():
    before = seeding.caller_state()
    expected = random.random(), np.random.random(), torch.rand(1).item()
    seeding.restore_globals(before)
    seeding.seed_globals(5)
    seeding.restore_globals(before)
    assert (random.random(), np.random.random(), torch.rand(1).item()) == expected
    seeding.restore_globals(before)


def test_drawn_generators_are_named():
    before = seeding.globals_state()
    assert seeding.drawn_between(before, seeding.globals_state()) == []
    random.random()
    assert seeding.drawn_between(before, seeding.globals_state()) == ["random"]
    np.random.random()
    assert seeding.drawn_between(before, seeding.globals_state()) == [
        "random",
        "numpy.random",
    ]
    seeding.restore_globals(before)


def test_root_seeds_are_drawn_afresh():
    assert seeding.draw_root_seed() != seeding.draw_root_seed()


_WORDS = st.one_of(
    st.integers(0, 3), st.integers(2**32 - 2, 2**32 + 1), st.integers(0, 2**32)
)


@given(
    st.one_of(
        _WORDS,
        st.integers(0, 2**63 - 1),
        st.integers(2**127, 2**130),
        st.integers(0, 2**300),
    ),
    _WORDS,
    _WORDS,
)
@example(0, 0, 0)
@example(2**128, 2**32, 2**32 - 1)
def test_the_pool_of_an_env_gives_its_seeds(root_seed, env_id, episode):
    assume(episode < 2**32)
    pool = seeding.seed_pool(root_seed, env_id)
    assert pool.dtype == np.uint32
    assert pool.shape == (5,)
    *words, multiplier = pool.tolist()
    # As `episode_seed` of `step.c`.
    value = hashed(episode ^ multiplier, multiplier * seeding.MULT_A)
    mixed = seeding.MIX_L * words[0] - seeding.MIX_R * value
    word = (mixed % 2**32) ^ mixed % 2**32 >> seeding.SHIFT
    seed = hashed(word ^ seeding.INIT_B, seeding.INIT_B * seeding.MULT_B)
    assert seed == seeding.episode_seed(root_seed, env_id, episode)


def hashed(value, multiplier):
    product = value * multiplier % 2**32
    return product ^ product >> seeding.SHIFT
