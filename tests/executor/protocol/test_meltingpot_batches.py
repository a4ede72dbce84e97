"""Melting Pot in workers: different substrates in one executor, custom roles, selected observations, scenarios."""

from pathlib import Path

from tests.extras import skip_without

skip_without("meltingpot")

import numpy as np
import pytest

from envherd.executor import FactoryError, MeltingPotFactory, ParallelEnv, SerialEnv
from tests.executor.protocol.test_fast_calls import assert_same

pytestmark = pytest.mark.slow

COOKING = MeltingPotFactory(
    "collaborative_cooking__cramped",
    drop=("COLLECTIVE_REWARD",),
    max_steps=4,
    deterministic=True,
)
FANS = MeltingPotFactory(
    "bach_or_stravinsky_in_the_matrix__arena",
    roles=("bach_fan", "stravinsky_fan", "stravinsky_fan"),
    keys=("RGB", "INVENTORY"),
    world_rgb=False,
    max_steps=3,
    deterministic=True,
)
PRISONERS = MeltingPotFactory(
    "prisoners_dilemma_in_the_matrix__repeated",
    keys=("INVENTORY",),
    max_steps=5,
    deterministic=True,
)
HERD = [COOKING, FANS, PRISONERS, FANS]


def keys_of(td):
    return {
        "/".join(key) if isinstance(key, tuple) else key
        for key in td.keys(include_nested=True, leaves_only=True)
    }


def test_unlike_substrates_in_one_executor():
    """Each env has its own keys, players and lengths; data equal the serial ones."""
    batches = []
    for kind, kwargs in ((ParallelEnv, {"num_workers": 2}), (SerialEnv, {})):
        with kind(len(HERD), HERD, seed=3, **kwargs) as env:
            root = env.reset()
            seen = [root[i].clone() for i in range(len(HERD))]
            for _ in range(6):
                td, root = env.step_and_maybe_reset(env.rand_action(root))
                seen += [td[i].clone() for i in range(len(HERD))]
            steps = env.statistics().steps_per_env, env.statistics().resets_per_env
            batches.append(seen)
        assert steps == ((6,) * 4, (2, 3, 2, 3))
    for mine, theirs in zip(*batches, strict=True):
        assert_same(mine, theirs)

    cooking, fans, prisoners, _ = batches[0][:4]
    assert cooking["RGB"].shape == (40, 72, 3)
    assert "agents/observation/COLLECTIVE_REWARD" not in keys_of(cooking)
    assert keys_of(fans) == {
        "agents/observation/RGB",
        "agents/observation/INVENTORY",
        "done",
        "terminated",
        "truncated",
    }
    assert fans["agents", "observation", "RGB"].shape == (3, 88, 88, 3)
    assert prisoners["agents", "observation", "INVENTORY"].shape == (2, 2)
    ends = [
        [bool(td["next", "truncated"]) for td in batches[0][4 + i : 28 : 4]]
        for i in range(3)
    ]
    assert [end.index(True) + 1 for end in ends] == [4, 3, 5]


def test_scenario_without_bots_names_what_is_missing():
    from meltingpot.configs import bots

    if Path(bots.MODELS_ROOT).exists():
        pytest.skip("the bots' models are installed")
    with pytest.raises(
        FactoryError,
        match=r"got none for clean_up__cleaner_0, .*pip install --force-reinstall",
    ):
        ParallelEnv(2, MeltingPotFactory("clean_up_0"), num_workers=1)


def test_a_scenario_with_bots_of_ones_own_runs_in_workers():
    from tests.workers.test_meltingpot import _scenario

    with ParallelEnv(1, _scenario, num_workers=1, seed=1) as env:
        data = env.rollout(5)
        pictures = env.render()
    assert data["agents", "observation", "RGB"].shape == (1, 5, 3, 88, 88, 3)
    assert data["agents", "action"].shape == (1, 5, 3)
    assert all(
        picture.shape == (144, 192, 3) and picture.dtype == np.uint8
        for picture in pictures
    )
