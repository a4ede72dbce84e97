"""`SmallPictures`: pixels are the means of those that they replace, in the worker."""

import functools

import numpy as np
import pytest
import torch

from envherd import (
    EpisodeLogger,
    ExecutorOptions,
    FactoryError,
    MeltingPotFactory,
    SerialEnv,
    SmallPictures,
    SpecError,
)
from envherd.executor.testing import check_env_contract
from envherd.workers.wrappers.pictures import shrunk
from tests.envs.team_env import Team
from tests.extras import needs

VIEW = ("agents", "observation", "RGB")
TEAM = functools.partial(Team, 3, 8)


def mean_of(picture, factor):
    *lead, height, width, channels = picture.shape
    blocks = picture.astype(np.float64).reshape(
        *lead, height // factor, factor, width // factor, factor, channels
    )
    return np.floor(blocks.mean((-4, -2)) + 0.5).astype(np.uint8)


@pytest.mark.parametrize("factor", [1, 2, 4, 8, 20, 40])
def test_a_pixel_is_the_rounded_mean_of_those_that_it_replaces(factor):
    random = np.random.default_rng(factor)
    for picture in (
        random.integers(0, 256, (3, 80, 40, 3), dtype=np.uint8),
        np.full((80, 80, 3), 255, np.uint8),
    ):
        assert np.array_equal(shrunk(picture, factor), mean_of(picture, factor))


def test_views_are_made_smaller_and_the_world_view_is_not():
    batches = []
    for make_env in (TEAM, SmallPictures(TEAM, shrink=4)):
        with SerialEnv(1, make_env, seed=0) as env:
            batches.append(env.rollout(7, break_when_any_done=False))
    full, small = batches
    for batch in (full, small), (full["next"], small["next"]):
        large, shrunken = (one[VIEW].numpy() for one in batch)
        assert shrunken.shape == (1, 7, 3, 2, 2, 3)
        assert np.array_equal(shrunken, mean_of(large, 4))
    assert small["RGB"].shape == (1, 7, 8, 16, 3)


@pytest.mark.parametrize(
    ("make", "shrink", "error", "message"),
    [
        (TEAM, 3, SpecError, "expected sides that shrink=3 divides"),
        (TEAM, 0, FactoryError, "expected shrink to be a positive integer, got 0"),
        (
            TEAM,
            True,
            FactoryError,
            "expected shrink to be a positive integer, got True",
        ),
        (Team, 1, SpecError, "got none among"),  # it has no pictures
    ],
)
def test_impossible_arguments_are_refused(make, shrink, error, message):
    with pytest.raises(error, match=message):
        SerialEnv(1, SmallPictures(make, shrink=shrink))


@needs("meltingpot")
@pytest.mark.slow
def test_views_of_melting_pot_are_those_of_the_substrate_made_smaller():
    plain = MeltingPotFactory(
        "prisoners_dilemma_in_the_matrix__repeated",
        keys=("RGB",),
        deterministic=True,
        max_steps=4,
    )
    batches = []
    for make_env in (plain, SmallPictures(plain, shrink=8)):
        with SerialEnv(
            1, make_env, seed=3, options=ExecutorOptions(episode_statistics=True)
        ) as env:
            batches.append(env.rollout(6, break_when_any_done=False))
    full, small = batches
    assert small[VIEW].shape == (1, 6, 2, 5, 5, 3)
    assert np.array_equal(small[VIEW].numpy(), mean_of(full[VIEW].numpy(), 8))
    assert torch.equal(full["RGB"], small["RGB"])
    assert len(EpisodeLogger().add(small)) == 1


def test_the_contract_holds():
    check_env_contract(SmallPictures(Drawn, shrink=2))


class Drawn(Team):
    """Two to five steps, drawn from the seed."""

    def __init__(self):
        super().__init__(0, 8)
