"""Envs that are saved continue bit for bit: in place, in other envs, and in another executor.

A run that is resumed from a state continues with the episodes, seeds and random actions that would have come next.
"""

import functools
import logging

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control import CartPoleEnv

from envherd import (
    AsyncCollector,
    Busy,
    Collector,
    EnvError,
    ExecutorOptions,
    ParallelEnv,
    ResetNeeded,
    SerialEnv,
)
from envherd.workers.testing import CountingEnv
from envherd.workers.testing.envs import STEP
from tests.envs.counting_envs import TextEnv
from tests.executor.calls import RESTART, begun, both, kill, only
from tests.executor.drives import act
from tests.extras import needs


def wrapped():
    from gymnasium import wrappers

    env = wrappers.RecordEpisodeStatistics(
        gymnasium.make("CartPole-v1", max_episode_steps=12)
    )
    env = wrappers.TransformObservation(env, lambda observation: observation * 2, None)
    return wrappers.NormalizeReward(
        wrappers.NormalizeObservation(wrappers.FrameStackObservation(env, 3))
    )


def atari():
    import ale_py
    from gymnasium import wrappers

    gymnasium.register_envs(ale_py)
    env = gymnasium.make("ALE/Pong-v5", frameskip=1, repeat_action_probability=0)
    return wrappers.TimeLimit(
        wrappers.FrameStackObservation(wrappers.AtariPreprocessing(env), 2), 20
    )


def suite(domain="reacher", task="easy"):  # a task that changes the model
    from dm_control import suite as tasks

    return tasks.load(domain, task, task_kwargs={"time_limit": 0.4})


def minigrid():
    import minigrid as _  # noqa: F401  # registers

    return gymnasium.make("MiniGrid-DoorKey-5x5-v0", max_steps=20)


def spread():
    from mpe2 import simple_spread_v3

    return simple_spread_v3.parallel_env(max_cycles=15)


FAMILIES = {
    "counting": CountingEnv,
    "CartPole": functools.partial(gymnasium.make, "CartPole-v1", max_episode_steps=15),
    "wrappers": wrapped,
    "Taxi": functools.partial(
        gymnasium.make,
        "Taxi-v4" if "Taxi-v4" in gymnasium.registry else "Taxi-v3",
        max_episode_steps=20,
    ),
    "HalfCheetah": functools.partial(
        gymnasium.make, "HalfCheetah-v5", max_episode_steps=20
    ),
    "Ant": functools.partial(gymnasium.make, "Ant-v5", max_episode_steps=20),
    "Atari": atari,
    "dm_control": suite,
    "MiniGrid": minigrid,
    "PettingZoo": spread,
}
NEEDS = {
    "HalfCheetah": "mujoco",
    "Ant": "mujoco",
    "Atari": "atari",
    "dm_control": "dm-control",
    "MiniGrid": "minigrid",
    "PettingZoo": "pettingzoo",
}
CASES = [
    pytest.param(name, marks=needs(NEEDS[name]) if name in NEEDS else ())
    for name in FAMILIES
]


LONG = functools.partial(CountingEnv, 99)


def drive(env, inputs):
    """Step all envs with given inputs, and reset those that end; return all that they return."""
    td, found = env.current(), []
    for one in inputs:
        td.update(one)
        data, td = env.step_and_maybe_reset(td)
        found.append(data.clone())
    return torch.stack(found, 1)


def drawn(env, number):
    """Return inputs for all envs, of which env 0 and env 1 have the same."""
    found = []
    for _ in range(number):
        one = (
            env.rand_action()
            .select(*[leaf.key for leaf in env.specs[0].action])
            .clone()
        )
        one[1] = one[0]
        found.append(one)
    return found


@pytest.mark.sampled(2)
@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_saved_envs_continue_bit_for_bit(name, tmp_path):
    make = FAMILIES[name]
    with ParallelEnv(3, make, num_workers=2, seed=3) as env:
        env.rebuild()
        env.rollout(25, break_when_any_done=False)
        torch.save([env.save(), env.state_dict()], tmp_path / "states.pt")
        saved, episodes = torch.load(tmp_path / "states.pt", weights_only=True)
        inputs = drawn(env, 40)
        expected = drive(env, inputs)
        assert name == "HalfCheetah" or expected["next", "done"].any()
        env.restore(saved)
        assert (drive(env, inputs) == expected).all()
        env.restore(saved[:1] * 2, [0, 1])
        env.restore(saved[2:], [2])
        found = drive(env, inputs)
        assert (found[[0, 2]] == expected[[0, 2]]).all()
        ends = (
            int(expected[0]["next", "done"].flatten(1).any(1).long().argmax()) or 40
        )  # later episodes have env 1's own seeds
        assert (found[1, :ends] == expected[0, :ends]).all()
    with SerialEnv(3, make, seed=8) as other:
        other.rollout(7, break_when_any_done=False)
        other.rebuild([0, 2])
        other.load_state_dict(episodes)
        assert (drive(other, inputs) == expected).all()


def test_envs_that_are_not_restored_continue():
    with ParallelEnv(3, LONG, num_workers=2, seed=0) as env:
        env.rollout(2)
        saved = env.save([1])
        before = env.step(act(env.current()))
        held = before.clone()
        env.restore(saved, [1])
        assert (before == held).all()  # a batch that the caller holds
        assert env.current()["observation"][:, 1].tolist() == [3, 2, 3]
        assert env.step(act(env.current()))["next", "observation"][:, 1].tolist() == [
            4,
            3,
            4,
        ]


@both
@pytest.mark.parametrize(
    ("save", "restore"), [("save", "restore"), ("state_dict", "load_state_dict")]
)
def test_an_episode_that_had_ended_needs_a_reset_when_it_is_restored(
    make, save, restore
):
    with make(
        2, [functools.partial(TextEnv, length) for length in (2, 99)], seed=0
    ) as env:
        env.rollout(2)
        saved = getattr(env, save)()
        before = env.current()
        env.reset()
        getattr(env, restore)(saved)
        now = env.current()
        assert now["done"].flatten().tolist() == [True, False]
        assert torch.equal(now["observation"], before["observation"])
        assert now["text"] == before["text"]
        with pytest.raises(ResetNeeded) as caught:
            env.step(act(env.current()))
        assert caught.value.env_ids == (0,)


def test_statistics_of_the_episode_and_the_next_seed_are_restored():
    with SerialEnv(
        2, CountingEnv, seed=0, options=ExecutorOptions(episode_statistics=True)
    ) as env:
        env.rollout(9, act, break_when_any_done=False)
        saved = env.save()
        expected = env.rollout(30, act, auto_reset=False, break_when_any_done=False)
        env.restore(saved)
        found = env.rollout(30, act, auto_reset=False, break_when_any_done=False)
        times = ("episode", "time"), ("next", "episode", "time")
        assert (found.exclude(*times) == expected.exclude(*times)).all()


class DrawingEnv(CountingEnv):
    """Draws from a global generator."""

    def step(self, action):
        [observation], *rest = super().step(action)
        return [observation + np.random.randint(1000)], *rest  # what is tested


@pytest.mark.filterwarnings("ignore")
def test_isolated_global_generators_are_restored(tmp_path):
    with SerialEnv(
        2,
        functools.partial(DrawingEnv, 99),
        seed=0,
        options=ExecutorOptions(isolate_rng=True),
    ) as env:
        env.rollout(2, act)
        saved, state = env.save(), env.state_dict()
        expected = env.step(act(env.current()))["next", "observation"]
        env.restore(saved)
        assert (env.step(act(env.current()))["next", "observation"] == expected).all()
        torch.save(state, tmp_path / "state.pt")
        env.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        assert (env.step(act(env.current()))["next", "observation"] == expected).all()


class Unsaveable(CartPoleEnv):
    """Holds a generator of Python, which has no state that can be read."""

    def __init__(self):
        super().__init__()
        self.frames = (i for i in range(9))


def test_unsaveable_env_is_named_and_its_seeds_are_saved(caplog):
    with begun(SerialEnv(2, Unsaveable, seed=0)) as env:
        for call in (env.save, functools.partial(env.state_dict, with_envs=True)):
            with pytest.raises(
                EnvError,
                match=r"save failed: .* got Unsaveable: .*Unsaveable\.frames is a generator",
            ):
                call()
        with caplog.at_level(logging.WARNING, "envherd"):
            assert env.state_dict().keys() == {"executor"}
        assert "state_dict has saved the seeds alone" in caplog.text
        assert "frames" in caplog.text
        env.step(env.rand_action())  # it continues


BAD = {
    "one state too few": (
        lambda saved: saved[:1],
        r"expected a list of 2 states, one for each env, got 1 states",
    ),
    "no list": (lambda saved: saved[0], "expected a list of 2 states, .* got a dict"),
    "other things": (lambda _: [1, 2], "expected states that save"),
    "a part of a state": (
        lambda saved: [{"env": 1, "root": 2, "ended": False}] * 2,
        "expected states that save",
    ),
    "an episode of text": (
        lambda saved: [saved[0] | {"episode": "x"}] * 2,
        r".*, got 'x' \('episode' of env 0\)",
    ),
    "a huge episode": (
        lambda saved: [saved[0], saved[1] | {"episode": 10**5000}],
        r".*got a int \('episode' of env 1\)",
    ),
    "no generators": (
        lambda saved: [saved[0] | {"generators": 3}] * 2,
        r".*'generators' of env 0",
    ),
    "a root of another type": (
        lambda saved: [
            saved[0],
            saved[1] | {"root": {**saved[1]["root"], "done": torch.zeros(1)}},
        ],
        r"expected .*done.*, got float32 \(1,\) \(root of env 1\)",
    ),
    "a root without values": (
        lambda saved: (
            [
                saved[0]
                | {"root": {**saved[0]["root"], "done": torch.zeros(1, device="meta")}}
            ]
            * 2
        ),
        "expected .*done.*, got a Tensor .*meta",
    ),
    "another root": (
        lambda saved: [saved[0] | {"root": {}}] * 2,
        r"expected .*observation.*, got none \(root of env 0\)",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_states_that_do_not_fit_are_refused_and_change_nothing(name):
    change, words = BAD[name]
    with SerialEnv(2, LONG, seed=0) as env:
        env.rollout(1)
        saved = env.save()
        env.step(act(env.current()))
        with pytest.raises(ValueError, match=f"restore failed: {words}"):
            env.restore(change(saved))
        assert env.step(act(env.current()))["next", "observation"][:, 1].tolist() == [
            3,
            3,
        ]


@pytest.mark.parametrize(
    "make", [functools.partial(ParallelEnv, num_workers=1), SerialEnv]
)
def test_an_env_that_refuses_its_state_needs_a_reset(make):
    with begun(make(2, CountingEnv, seed=0)) as env:
        saved = env.save()
        with pytest.raises(EnvError, match="restore failed: the env raised KeyError"):
            env.restore([saved[0] | {"env": {}}], [0])
        with pytest.raises(ResetNeeded) as caught:
            env.step(act(env.current()))
        assert caught.value.env_ids == (0,)
        assert env.current()["done"].flatten().tolist() == [True, False]


@pytest.mark.parametrize(
    "reset",
    [lambda env: env.reset(), lambda env: env.rollout(1)],
    ids=["reset", "rollout"],
)
def test_a_reset_of_all_envs_ends_what_was_loaded(reset):
    """The first collector does not continue episodes that are not those of the checkpoint."""
    with begun(SerialEnv(2, CountingEnv, seed=0)) as env:
        env.load_state_dict(env.state_dict())
        env.reset(only(env, 0))
        assert env.is_resumed
        reset(env)
        assert not env.is_resumed


def test_envs_that_were_sent_are_refused():
    with begun(SerialEnv(2, CountingEnv, seed=0)) as env:
        saved = env.save()
        env.send(act(env.current())[:1], env_ids=[0])
        for call in (env.save, functools.partial(env.restore, saved)):
            with pytest.raises(Busy):
                call()
        env.restore(saved[1:], [1])
        env.recv()


# ---- runs that are resumed ---------------------------------------------------------------------------

MAKERS = {
    "parallel": functools.partial(ParallelEnv, num_workers=2),
    "serial": SerialEnv,
}
PAIRS = [("parallel", "serial"), ("serial", "parallel")]


@pytest.mark.parametrize(("before", "after"), PAIRS)
@pytest.mark.slow
def test_a_state_without_envs_begins_the_episodes_that_would_have_come_next(
    before, after
):
    with MAKERS[before](3, CountingEnv, seed=5) as env:
        data = env.rollout(10, break_when_any_done=False)
        state = env.state_dict(with_envs=False)
        assert state.keys() == {"executor"}
        # Random actions.
        expected = env.rollout(20, break_when_any_done=False)
    with MAKERS[after](3, CountingEnv, seed=99) as env:
        env.load_state_dict(state)
        assert env.seed == 5
        found = env.rollout(20, break_when_any_done=False)
    assert (found == expected).all()
    seeds = [
        set(batch["observation"][..., 0].flatten().tolist()) for batch in (data, found)
    ]
    assert not seeds[0] & seeds[1]


@pytest.mark.parametrize("kind", [Collector, AsyncCollector])
# In the middle of the episodes; all envs have ended.
@pytest.mark.parametrize("num_steps", [3, 5])
def test_a_collector_of_loaded_envs_continues_their_episodes(kind, num_steps):
    def policy(td):
        return td.set("action", torch.ones(len(td), dtype=torch.int64))

    def make():
        return SerialEnv(2, lambda: CountingEnv(length=5), seed=3)

    with make() as env:
        td = env.reset()
        for _ in range(num_steps):
            td = env.step(policy(td))["next"]
        state = env.state_dict()
        expected = env.rollout(4, policy, auto_reset=False, break_when_any_done=False)
    with make() as env:
        env.load_state_dict(state)
        with kind(
            env, policy, frames_per_batch=8, total_frames=8, close_env=False
        ) as collector:
            (data,) = collector
        with kind(
            env, policy, frames_per_batch=8, total_frames=8, close_env=False
        ) as collector:
            (fresh,) = collector
    assert (fresh["observation"][:, 0, STEP] == 0).all(), (
        "a further collector begins with a reset"
    )
    assert (data["next", "observation"] == expected["next", "observation"]).all()
    assert (data["observation"] == expected["observation"]).all()


def test_envs_must_be_reset_after_seeds_alone():
    with begun(SerialEnv(2, CountingEnv, seed=5)) as env:
        env.load_state_dict(env.state_dict(with_envs=False))
        assert env.current()["done"].all()
        with pytest.raises(ResetNeeded):
            env.step(env.rand_action())


def test_a_state_of_another_number_of_envs_is_refused_and_loads_nothing():
    with (
        SerialEnv(3, CountingEnv, seed=5) as one,
        begun(SerialEnv(2, CountingEnv, seed=6)) as other,
    ):
        for state in (one.state_dict(with_envs=False), one.state_dict()):
            with pytest.raises(
                ValueError,
                match=r"load_state_dict failed: expected .*saved with 3, this has 2",
            ):
                other.load_state_dict(state)
        assert other.seed == 6
        assert other.step(act(other.current()))["next", "observation"][
            :, 1
        ].tolist() == [1, 1]


@pytest.mark.slow
@pytest.mark.broken_pool
def test_worker_replaced_during_load_uses_the_loaded_seeds():
    with SerialEnv(2, CountingEnv, seed=5) as env:
        env.rollout(10, act, break_when_any_done=False)
        state = env.state_dict(with_envs=False)
        expected = env.rollout(6, act, break_when_any_done=False)
    with ParallelEnv(2, CountingEnv, num_workers=2, seed=9, options=RESTART) as env:
        kill(env, 1)
        env.load_state_dict(state)
        found = env.rollout(6, act, break_when_any_done=False)
    assert (found["observation"] == expected["observation"]).all()
