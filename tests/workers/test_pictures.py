"""`SmallPictures`: means, luma and stacks equal numpy's, in the worker, also over resets and saved states."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from envherd import EpisodeLogger, ExecutorOptions, FactoryError, MeltingPotFactory, SerialEnv, SmallPictures, SpecError
from envherd.workers.block.pictures import shrunk
from envherd.workers.testing import check_env_contract
from tests.executor.team_env import Team
from tests.extras import needs

VIEW = ("agents", "observation", "RGB")
TEAM = functools.partial(Team, 3, 8)


def mean_of(picture, factor):
    *lead, height, width, channels = picture.shape
    blocks = picture.astype(np.float64).reshape(*lead, height // factor, factor, width // factor, factor, channels)
    return np.floor(blocks.mean((-4, -2)) + 0.5).astype(np.uint8)


@pytest.mark.parametrize("factor", [1, 2, 4, 8, 20, 40])
def test_a_pixel_is_the_rounded_mean_of_those_that_it_replaces(factor):
    random = np.random.default_rng(factor)
    for picture in (random.integers(0, 256, (3, 80, 40, 3), dtype=np.uint8), np.full((80, 80, 3), 255, np.uint8)):
        assert np.array_equal(shrunk(picture, factor), mean_of(picture, factor))


def views(make_env, num_steps=7):
    """Return the players' views over some episodes, `[T + 1, 3, H, W, C]`, and where an episode began."""
    with SerialEnv(1, make_env, seed=0) as env:
        data = env.rollout(num_steps, break_when_any_done=False)
    return data[VIEW][0].numpy(), data["agents", "observation", "place"][0, :, 0, 0] == 0, data


def test_grey_is_the_luma_of_red_green_and_blue():
    full, _, _ = views(TEAM)
    grey, _, data = views(SmallPictures(TEAM, shrink=4, grey=True))
    assert grey.shape == (7, 3, 2, 2, 1)
    assert np.abs(grey[..., 0] - mean_of(full, 4) @ [0.299, 0.587, 0.114]).max() <= 1
    assert data["RGB"].shape == (1, 7, 8, 16, 3), "the world view is not cut"


@pytest.mark.parametrize("grey", [False, True])
def test_stacks_hold_the_latest_pictures_and_begin_anew_with_an_episode(grey):
    single, begins, _ = views(SmallPictures(TEAM, grey=grey))
    stacked, _, data = views(SmallPictures(TEAM, grey=grey, stack=3))
    channels = single.shape[-1]
    assert begins.sum() == 3
    first = 0
    for step in range(7):
        first = step if begins[step] else first
        expected = [single[max(first, step - age)] for age in (2, 1, 0)]
        assert np.array_equal(stacked[step], np.concatenate(expected, -1))
    ends = torch.nonzero(data["next", "done"].flatten()).flatten()
    last = data["next", *VIEW][0].numpy()
    assert np.array_equal(last[ends[0], ..., :-channels], stacked[ends[0], ..., channels:]), (
        "the last view is of the old one"
    )


def test_keys_choose_pictures():
    with SerialEnv(1, SmallPictures(functools.partial(World, 3, 8), shrink=4, keys=("RGB",)), seed=0) as env:
        shapes = {leaf.key[-1]: leaf.shape for leaf in env.observation_spec}
    assert shapes == {"RGB": (3, 2, 2, 3), "place": (3, 2), "map": (8, 16, 3)}


class World(Team):
    """The same with another name of the world view, without metadata for it."""

    def __init__(self, *args):
        super().__init__(*args)
        from dataclasses import replace

        world, *others = self.spec.observation
        self.spec = replace(self.spec, observation=(replace(world, key=("map",)), *others), metadata={})


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ({"shrink": 3}, SpecError, "expected sides that shrink=3 divides"),
        ({"keys": ("RGB", "place")}, SpecError, "got none for place"),
        ({"shrink": 0}, FactoryError, "expected shrink to be a positive integer, got 0"),
        ({"stack": True}, FactoryError, "expected stack to be a positive integer, got True"),
    ],
)
def test_what_cannot_be_is_refused(how, error, message):
    with pytest.raises(error, match=message):
        SerialEnv(1, SmallPictures(TEAM, **how))


def test_an_env_without_pictures_is_refused():
    with pytest.raises(SpecError, match="got none for pictures"):
        SerialEnv(1, SmallPictures(Team, grey=True))


@needs("meltingpot")
@pytest.mark.slow
def test_views_of_melting_pot_are_those_of_the_substrate_made_smaller():
    plain = MeltingPotFactory(
        "prisoners_dilemma_in_the_matrix__repeated", keys=("RGB",), deterministic=True, max_steps=4
    )
    batches = []
    for make_env in (plain, SmallPictures(plain, shrink=8, stack=2)):
        with SerialEnv(1, make_env, seed=3, options=ExecutorOptions(episode_statistics=True)) as env:
            batches.append(env.rollout(6, break_when_any_done=False))
    full, small = batches
    assert small[VIEW].shape == (1, 6, 2, 5, 5, 6)
    assert np.array_equal(small[VIEW][..., 3:].numpy(), mean_of(full[VIEW].numpy(), 8))
    assert torch.equal(full["RGB"], small["RGB"])
    assert len(EpisodeLogger().add(small)) == 1


def test_the_contract_holds_with_stacks():
    check_env_contract(SmallPictures(Drawn, shrink=2, grey=True, stack=2))


class Drawn(Team):
    """Two to five steps, drawn from the seed."""

    def __init__(self):
        super().__init__(0, 8)
