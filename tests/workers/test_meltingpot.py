"""The Melting Pot adapter against real substrates and scenarios."""

import random
from collections.abc import Callable
from typing import Any

from tests.extras import skip_without

skip_without("meltingpot")

import numpy as np
import pytest

from envherd.shm.specs import DONE_KEYS, Discrete, EnvSpec
from envherd.workers.adapters import find_adapter
from envherd.workers.adapters.meltingpot.adapter import MeltingPotAdapter
from envherd.workers.adapters.meltingpot.factory import (
    MeltingPotFactory,
    substrate_names,
)
from envherd.workers.adapters.meltingpot.light_import import install_lazy_import
from envherd.workers.errors import ActionError, ResetNeeded
from tests.scale import scaled

install_lazy_import()

_PRISONERS = "prisoners_dilemma_in_the_matrix__repeated"
_ONE_SHOT = "running_with_scissors_in_the_matrix__one_shot"
_STAY = np.zeros(2, np.int64)


def _raw(name: str = _PRISONERS, **settings: Any) -> Any:
    """Build a substrate with Melting Pot's own API; `settings` replace those of its config."""
    from meltingpot import substrate

    config = substrate.get_config(name).unlock()
    build = config.lab2d_settings_builder
    config.lab2d_settings_builder = lambda roles, config: {
        **build(roles=roles, config=config),
        **settings,
    }
    return substrate.build_from_config(config, roles=config.default_player_roles)


def _made(name: str = _PRISONERS, **options: Any) -> Any:
    return MeltingPotAdapter(MeltingPotFactory(name, **options)())


def _play(
    adapter: MeltingPotAdapter, seed: int, steps: int, rng_seed: int = 0
) -> list[np.ndarray]:
    """Return copies of everything that an episode gave."""
    rng = np.random.default_rng(rng_seed)
    given = [np.array(value) for value in adapter.reset(seed)]
    for _ in range(steps):
        action = rng.integers(
            0,
            adapter.spec.metadata["num_actions"],
            adapter.spec.metadata["agent_count"],
        )
        observation, reward, terminated, truncated = adapter.step([action])
        given += [np.array(value) for value in (*observation, *reward)]
        if terminated or truncated:
            break
    return given


def _same(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    return len(one) == len(other) and all(
        np.array_equal(a, b) for a, b in zip(one, other, strict=True)
    )


def _check_values(spec: EnvSpec, observation: list[Any], reward: list[Any]) -> None:
    for leaves, values in ((spec.observation, observation), (spec.reward, reward)):
        for leaf, value in zip(leaves, values, strict=True):
            array = np.asarray(value)  # images of players may be given as a tuple
            assert (array.shape, array.dtype.name) == (leaf.shape, leaf.dtype), leaf


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [_PRISONERS, "hidden_agenda", "collaborative_cooking__cramped", "clean_up"]
)
@pytest.mark.filterwarnings("ignore")  # torchrl's own
def test_leaves_are_those_of_torchrl(name: str) -> None:
    import torch
    from torchrl.envs.libs.meltingpot import MeltingpotEnv

    def facts(data: Any) -> dict[tuple[str, ...], tuple[tuple[int, ...], str]]:
        return {
            key if isinstance(key, tuple) else (key,): (
                tuple(value.shape),
                str(value.dtype).removeprefix("torch."),
            )
            for key, value in data.items(include_nested=True, leaves_only=True)
        }

    env = MeltingpotEnv(name)
    root = env.rand_action(env.reset())
    after = env.step(root.clone())["next"]
    for adapter in (MeltingPotAdapter(_raw(name)), _made(name)):
        spec = adapter.spec
        ours = {
            leaf.key: (leaf.shape, leaf.dtype)
            for leaf in (*spec.observation, *spec.done)
        }
        # TorchRL has no `truncated` here: it reports a frame cap as a termination.
        assert ours.pop(("truncated",)) == ours["terminated",]
        assert ours | {
            leaf.key: (leaf.shape, leaf.dtype) for leaf in spec.action
        } == facts(root)
        assert ours | {
            leaf.key: (leaf.shape, leaf.dtype) for leaf in spec.reward
        } == facts(after)
        assert [torch.Size(shape) for _, shape in spec.groups] == [
            root["agents"].batch_size
        ]


def test_specs_do_not_depend_on_who_built_the_env() -> None:
    assert MeltingPotAdapter(_raw()).spec == _made().spec


@pytest.mark.parametrize("make", [lambda: MeltingPotAdapter(_raw()), _made])
def test_bad_actions_are_refused_before_the_env_is_touched(
    make: Callable[[], Any],
) -> None:
    """Melting Pot itself would take them."""
    adapter = make()
    adapter.reset(1)
    for action, got in (
        ([0, -1], "-1 for player_1"),
        ([8, 0], "8 for player_0"),
        ([0], r"int64 \(1,\)"),
        ([0, 0, 0], r"int64 \(3,\)"),
        (3, r"int64 \(\)"),
        ([0.0, 1.0], r"float64 \(2,\)"),
        ([True, False], r"bool \(2,\)"),
    ):
        with pytest.raises(
            ActionError, match=rf"expected 2 integers in 0\.\.7, got {got}"
        ):
            adapter.step([np.array(action)])
    assert adapter._num_steps == 0
    adapter.step([_STAY])


def test_the_callers_random_state_comes_back() -> None:
    adapter = _made("coins", deterministic=True)
    before = random.getstate()
    adapter.reset(1)
    adapter.reset(2)
    assert random.getstate() == before


def test_it_must_be_reset_first_and_after_an_end() -> None:
    adapter = _made(max_steps=1)
    with pytest.raises(ResetNeeded):
        adapter.step([_STAY])
    adapter.reset(1)
    adapter.step([_STAY])
    with pytest.raises(ResetNeeded):
        adapter.step([_STAY])
    with pytest.raises(ValueError, match="expected no arguments"):
        adapter.reset(1, {"reset_mask": None})
    with pytest.raises(ResetNeeded):
        adapter.step([_STAY])


def test_the_frame_cap_of_a_users_own_env_truncates() -> None:
    adapter = MeltingPotAdapter(_raw(maxEpisodeLengthFrames=4))
    assert adapter.spec.metadata["max_episode_steps"] == 4
    for _ in range(2):
        adapter.reset(3)
        ends = [adapter.step([_STAY])[2:] for _ in range(4)]
        assert ends == [(False, False)] * 3 + [(False, True)]


def test_a_cap_before_max_steps_and_after() -> None:
    assert _made(max_steps=10**6).spec.metadata["max_episode_steps"] == 5000
    assert _made(max_steps=7).spec.metadata["max_episode_steps"] == 7


@pytest.mark.slow
@pytest.mark.parametrize(
    "make", [lambda: _made(_ONE_SHOT), lambda: MeltingPotAdapter(_raw(_ONE_SHOT))]
)
def test_real_ends_are_terminated_and_the_cap_is_truncated(
    make: Callable[[], MeltingPotAdapter],
) -> None:
    # Ends with the first interaction, which is rare for random players, or after 1000 frames.
    adapter = make()
    rng = np.random.default_rng(0)
    seen = set()
    for seed in range(60):
        adapter.reset(seed)
        terminated = truncated = False
        while not (terminated or truncated):
            _, _, terminated, truncated = adapter.step([rng.integers(0, 8, 2)])
        assert (terminated, truncated) == (
            (False, True) if adapter._num_steps == 1000 else (True, False)
        )
        seen.add(terminated)
        if seen == {True, False}:
            return
    pytest.fail(f"no end of both kinds in 60 episodes, only terminated={seen}")


@pytest.mark.parametrize("seed", [0, 7, 2**32 - 1])
def test_a_seed_is_the_seed_of_that_very_episode(seed: int) -> None:
    adapter = MeltingPotAdapter(_raw())
    episodes = adapter._episodes
    # The first needs a rebuild: the env was built from Melting Pot's own seed.
    for _ in range(2):
        adapter.reset(seed)
        assert episodes._settings()["env_seed"] == str(seed)
        expected = np.random.RandomState(seed)
        expected.randint(0, 2**31)  # one draw for the start of the episode
        assert episodes.wrapper._env._rng.randint(0, 2**31) == expected.randint(
            0, 2**31
        )


def test_first_reset_reuses_the_build_with_its_seed() -> None:
    adapter = MeltingPotAdapter(_raw())
    built = adapter._episodes.wrapper._env
    adapter.reset(int(adapter._episodes._settings()["env_seed"]))
    assert adapter._episodes.wrapper._env is built
    adapter.reset(5)
    assert adapter._episodes.wrapper._env is not built


@pytest.mark.slow
def test_seeds_do_not_run_into_their_neighbours() -> None:
    # With Melting Pot's own `env_seed`, episode 2 of seed 7 is episode 1 of seed 8.
    adapter = _made(deterministic=True)
    seven = _play(adapter, 7, 5)
    after_seven = [value.copy() for value in adapter.reset(None)]
    eight = _play(adapter, 8, 5)
    assert not _same(after_seven, eight[: len(after_seven)])
    assert _same(_play(adapter, 7, 5), seven)
    # Unseeded episodes follow the last seed.
    assert _same(after_seven, adapter.reset(None))
    assert not _same(seven, eight)


def test_subscribers_still_hear_of_every_step() -> None:
    adapter = _made()
    adapter.reset(1)
    heard: list[Any] = []
    adapter.step([_STAY])
    subscription = adapter.env.observables().action.subscribe(on_next=heard.append)
    adapter.step([_STAY])
    adapter.step([_STAY + 1])
    assert heard == [[0, 0], [1, 1]]
    subscription.dispose()
    adapter.step([_STAY])
    assert len(heard) == 2


def test_a_users_own_wrapper_is_stepped_through() -> None:
    from meltingpot.utils.substrates import substrate

    class Noisy(substrate.Substrate):
        calls = 0

        def step(self, action: Any) -> Any:
            type(self).calls += 1
            return super().step(action)

    adapter = MeltingPotAdapter(Noisy(_raw()._env))
    adapter.reset(2)
    adapter.step([_STAY])
    assert Noisy.calls == 1
    assert adapter._episodes.can_seed
    assert adapter._episodes.max_frames == 5000


def test_render_is_the_world() -> None:
    adapter = _made()
    assert adapter.render() is None
    observation = adapter.reset(1)
    picture = adapter.render()
    assert picture is not None
    assert (picture.dtype, picture.shape) == (np.uint8, (120, 184, 3))
    assert (
        adapter.spec.observation[0].key
        == (adapter.spec.metadata["frame_key"],)
        == ("RGB",)
    )
    assert np.array_equal(picture, observation[0])
    hidden = _made(world_rgb=False, deterministic=True)
    shown = _made(deterministic=True)
    hidden.reset(9)
    shown.reset(9)
    assert np.array_equal(hidden.render(), shown.render())


def _scenario() -> Any:
    """Build a scenario with a bot of our own: the ones that Melting Pot ships need its downloaded models."""
    from meltingpot.utils.policies import policy
    from meltingpot.utils.scenarios import scenario

    class Wanderer(policy.Policy):
        def initial_state(self) -> int:
            return random.getrandbits(16)

        def step(self, timestep: Any, prev_state: int) -> tuple[int, int]:
            following = (prev_state * 75 + 74) % 65537
            return following % 8, following

        def close(self) -> None:
            pass

    return scenario.build_scenario(
        substrate=MeltingPotFactory("commons_harvest__open", deterministic=True)(),
        bots={"one": Wanderer(), "two": Wanderer()},
        bots_by_role={"default": ("one", "two")},
        roles=("default",) * 7,
        is_focal=(True, True, True, False, False, False, False),
        permitted_observations={"RGB", "READY_TO_SHOOT"},
    )


@pytest.mark.slow
def test_a_scenario_has_its_focal_players_as_rows() -> None:
    env = _scenario()
    assert find_adapter(env) is MeltingPotAdapter
    adapter: Any = MeltingPotAdapter(env)
    shapes = {"/".join(leaf.key): leaf.shape for leaf in adapter.spec.observation}
    assert shapes == {
        "RGB": (144, 192, 3),
        "agents/observation/READY_TO_SHOOT": (3, 1),
        "agents/observation/RGB": (3, 88, 88, 3),
    }
    first = _play(adapter, 3, 12)
    _play(adapter, 4, 5)
    # Bots and their states are drawn from the seed.
    assert _same(first, _play(adapter, 3, 12))
    picture = adapter.render()
    assert np.array_equal(picture, env._substrate.observation()[0]["WORLD.RGB"])
    assert adapter.spec.metadata["max_episode_steps"] == 5000
    with pytest.raises(ActionError):
        adapter.step([np.zeros(7, np.int64)])
    adapter.close()


@pytest.mark.parametrize(
    "name", scaled(substrate_names()[3::7], full=substrate_names())
)
def test_every_substrate_runs(name: str) -> None:
    adapter = _made(name)
    spec = adapter.spec
    players, actions = spec.metadata["agent_count"], spec.metadata["num_actions"]
    assert EnvSpec.from_plain(spec.to_plain()) == spec
    assert spec.groups == ((("agents",), (players,)),)
    assert tuple(leaf.key for leaf in spec.done) == DONE_KEYS
    assert spec.action[0].domain == Discrete(actions)
    _check_values(spec, adapter.reset(1), [np.zeros((players, 1))])
    rng = np.random.default_rng(0)
    for _ in range(10):
        observation, reward, terminated, truncated = adapter.step(
            [rng.integers(0, actions, players)]
        )
        _check_values(adapter.spec, observation, reward)
        assert not terminated
        assert not truncated
    assert adapter.spec.metadata["max_episode_steps"] >= 1000
    adapter.close()
