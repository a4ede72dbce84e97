"""Entries of infos as leaves; bad infos of every kind do not make a step fail."""

from __future__ import annotations

import functools

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from envherd.executor import ExecutorOptions, FactoryError, ParallelEnv, SerialEnv, SpecError
from envherd.workers.options import Infos
from envherd.workers.testing import check_env_contract

pytestmark = pytest.mark.preloads()

NUM_ENVS = 2


class Evil:
    """Raises in every method."""

    def __repr__(self):
        raise RuntimeError("no repr")

    __str__ = __array__ = __len__ = __iter__ = __reduce_ex__ = __getstate__ = __repr__  # type: ignore[assignment]


class Unloadable(Exception):
    """Can be pickled but not unpickled, like many exceptions with their own arguments."""

    def __init__(self, one, two):
        super().__init__(one)


def _circle():
    circle = {"fine": 1}
    circle["itself"] = circle
    return circle


def _deep():
    value = []
    for _ in range(5000):
        value = [value]
    return value


def _objects():
    array = np.empty(2, object)
    array[0] = Evil()
    return array


class Mean(dict):
    def keys(self):
        raise SystemExit(3)

    items = get = __iter__ = __len__ = __getitem__ = keys  # type: ignore[assignment]


#: Content of an info -> whether `plain` and `pickle` pass on its entry `bad`.
BAD = {
    "evil": (Evil, False, False),
    "unloadable": (lambda: Unloadable(1, 2), False, False),
    "circle": (_circle, False, True),
    "deep": (_deep, False, False),
    "generator": (lambda: (i for i in range(3)), False, False),
    "huge": (lambda: np.zeros((1 << 26) + 1, np.uint8), False, False),
    "nan": (lambda: float("nan"), True, True),
    "surrogate": (lambda: "\ud800", True, True),
    "objects": (_objects, False, False),
}


class Telling(gymnasium.Env):
    """Ends every third step; `what` selects the content of its infos."""

    observation_space = gymnasium.spaces.Box(0, 100, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, what="good"):
        self.what = what
        self.count = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return np.zeros(1, np.float32), {"lives": 3, "level": {"name": "cave", "depth": np.float32(0.5)}}

    def step(self, action):
        self.count += 1
        ended = self.count == 3
        return np.full(1, self.count, np.float32), 0.0, ended, False, self._info(ended)

    def _info(self, ended):
        if self.what in BAD:
            return {"lives": 3 - self.count, "bad": BAD[self.what][0]()}
        if self.what == "mean":
            return Mean(lives=1)
        if self.what == "list":
            return [("lives", 1), "x"]
        if self.what == "changing":
            return {"lives": [1, 2.5, None][self.count - 1], "place": np.zeros(self.count)}
        info = {"lives": 3 - self.count, "place": np.arange(2.0) + self.count, "word": "hello", "won": ended}
        return info | ({"episode": {"r": 1.5, "l": self.count}} if ended else {})


def actions():
    return TensorDict({"action": torch.zeros(NUM_ENVS, dtype=torch.int64)}, [NUM_ENVS])


KINDS = {"serial": SerialEnv, "parallel": functools.partial(ParallelEnv, num_workers=2)}


def make(what="good", kind="serial", **options):
    return KINDS[kind](NUM_ENVS, functools.partial(Telling, what), seed=0, options=ExecutorOptions(**options))


@pytest.mark.parametrize("kind", KINDS)
def test_names_are_looked_up_and_become_leaves_of_rollouts(kind):
    with make(kind=kind, infos=("lives", "place", ("level", "depth"))) as env:
        data = env.rollout(4, break_when_any_done=False)
    assert data["info", "lives"].tolist() == [[3, 2, 1, 3]] * NUM_ENVS
    assert data["next", "info", "lives"].tolist() == [[2, 1, 0, 2]] * NUM_ENVS
    assert data["info", "lives"].dtype == torch.int64
    assert data["next", "info", "place"][0].tolist() == [[1.0, 2.0], [2.0, 3.0], [3.0, 4.0], [1.0, 2.0]]
    assert data["info", "_place"][0].tolist() == [False, True, True, False]
    assert data["info", "place"][0, 0].tolist() == [0.0, 0.0]
    assert data["info", "level", "depth"][0].tolist() == [0.5, 0.0, 0.0, 0.5]
    assert data["info", "level", "_depth"][0].tolist() == [True, False, False, True]


def test_what_comes_later_is_said_beforehand():
    with make(infos={("episode", "r"): float, ("episode", "l"): 0, "never": np.zeros(3, np.float32)}) as env:
        data = env.rollout(3)["next", "info"]
    assert data["episode", "r"][0].tolist() == [0.0, 0.0, 1.5]
    assert data["episode", "_l"][0].tolist() == [False, False, True]
    assert data["episode", "l"].dtype == torch.int64
    assert data["never"].shape == (NUM_ENVS, 3, 3)
    assert not data["_never"].any()


def test_all_numbers():
    with make(infos="all") as env:
        keys = {"/".join(leaf.key) for leaf in env.observation_spec}
        assert keys >= {"info/lives", "info/level/depth", "info/place", "info/won", "info/_won"}
        assert not any("word" in key or "name" in key for key in keys)
        root = env.reset()
        assert root["info", "level", "depth"].tolist() == [0.5, 0.5]


def test_a_partial_reset_tells_of_its_own_rows():
    with make(infos=("lives",)) as env:
        env.reset()
        env.step(actions())
        root = env.reset(TensorDict({"_reset": torch.tensor([True, False])}, [NUM_ENVS]))
        assert root["info", "lives"].tolist() == [3, 2]


def test_what_no_longer_fits_counts_as_not_given(caplog):
    with make("changing", infos={"lives": int, "place": np.zeros(1)}) as env:
        data = env.rollout(3)["next", "info"]
    assert data["lives"][0].tolist() == [1, 0, 0]
    assert data["_lives"][0].tolist() == [True, False, False]
    assert data["_place"][0].tolist() == [True, False, False]
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2 * NUM_ENVS
    assert (
        "env 0: 'lives' of its info is left out (SpecError: writing info/lives failed: expected int64 (), got"
        in said[0]
    )


@pytest.mark.parametrize("what", [*BAD, "mean", "list"])
@pytest.mark.parametrize("infos", ["plain", "pickle"])
def test_no_info_costs_a_step(what, infos):
    keys = {"lives": int, "bad": np.zeros(1)}
    options = ExecutorOptions(infos=Infos(infos, keys), check_finite=True)
    with SerialEnv(NUM_ENVS, functools.partial(Telling, what), seed=0, options=options) as env:
        _check(env, what, infos)


@pytest.mark.slow
def test_no_info_costs_a_worker():
    """All bad infos at once, each in a separate env."""
    names = [*BAD, "mean", "list"]
    factories = [functools.partial(Telling, what) for what in names]
    for infos in ("plain", "pickle"):
        options = ExecutorOptions(infos=Infos(infos, {"lives": int}))
        with ParallelEnv(len(names), factories, num_workers=2, seed=0, options=options) as env:
            env.reset()
            for count in (1, 2, 3, 1):
                td = TensorDict({"action": torch.zeros(len(names), dtype=torch.int64)}, [len(names)])
                td, _ = env.step_and_maybe_reset(td)
                assert td["next", "observation"].tolist() == [[count]] * len(names)
            for name, info in zip(names, env.infos(), strict=True):
                assert ("bad" in info) == (name in BAD and BAD[name][1 + (infos == "pickle")]), name


def _check(env, what, infos):
    env.reset()
    for count in (1, 2, 3):
        td, _ = env.step_and_maybe_reset(actions())
        assert td["next", "observation"].tolist() == [[count]] * NUM_ENVS
        said = env.infos()[0]
        if what in BAD:
            assert said["lives"] == 3 - count
            assert ("bad" in said) == BAD[what][1 + (infos == "pickle")]
            assert td["next", "info", "_lives"].all()
        else:
            assert said == {}
            assert not td["next", "info", "_lives"].any()
        assert not td["next", "info", "_bad"].any()


def test_a_name_that_is_not_there_is_refused():
    with pytest.raises(
        SpecError, match=r"expected 'deth' in the infos of the first reset and step, which have numbers"
    ) as caught:
        SerialEnv(1, Telling, options=ExecutorOptions(infos=("deth",)))
    assert "infos={'deth': float}" in str(caught.value)
    with pytest.raises((SpecError, FactoryError), match=r"expected 'word' in the infos"):
        ParallelEnv(1, Telling, num_workers=1, options=ExecutorOptions(infos=("word",)))


@pytest.mark.parametrize("keys", ["lives", None, 3, ("",), (3,), {"x": "text"}, {"x": object}])
def test_keys_that_are_none_are_refused(keys):
    with pytest.raises(ValueError, match="ExecutorOptions failed"):
        ExecutorOptions(infos=keys)


def test_looking_up_changes_nothing():
    """The env's data are unchanged; one additional env is built for each kind of env, and closed."""
    built = []

    def build(wind=0):
        built.append(gymnasium.make("CartPole-v1"))
        return built[-1]

    with SerialEnv(3, build, seed=5, options=ExecutorOptions(infos="all")) as env:
        with_leaves = env.rollout(20, break_when_any_done=False)
        assert len(built) == 4
    with SerialEnv(3, build, seed=5) as env:
        assert (
            with_leaves["next", "observation"] == env.rollout(20, break_when_any_done=False)["next", "observation"]
        ).all()


def test_an_observation_of_this_name_is_refused():
    class Clash(Telling):
        observation_space = gymnasium.spaces.Dict({"info": Telling.observation_space})

    with pytest.raises(SpecError, match="expected an env without an observation named 'info'"):
        SerialEnv(1, Clash, options=ExecutorOptions(infos={"lives": int}))


def test_the_contract_holds():
    from envherd.workers.adapters.gymnasium.adapter import GymnasiumAdapter
    from envherd.workers.block.info_leaves import InfoLeaves, declared_fields

    def make():
        inner = GymnasiumAdapter(Telling())
        return InfoLeaves(inner, declared_fields({"lives": int, ("episode", "r"): float}, inner.spec))

    assert check_env_contract(make, num_steps=20).num_ends > 4


@pytest.mark.parametrize("mode", list(gymnasium.vector.AutoresetMode))
def test_rows_of_a_vector_env_tell_of_themselves(mode):
    """Also at an end whose info is inside `final_info`, and in resets of some rows."""

    class Long(Telling):
        def step(self, action):
            observation, reward, _, truncated, info = super().step(action)
            return observation, reward, self.count == 4, truncated, info

    def make_env():
        return gymnasium.vector.SyncVectorEnv([Telling, Long], autoreset_mode=mode)

    keys = {"lives": int, ("episode", "r"): float}
    with SerialEnv(1, make_env, seed=0, options=ExecutorOptions(infos=keys)) as env:
        data = env.rollout(5, break_when_any_done=False)[0]
    assert data["info", "lives"].tolist() == [[3, 3], [2, 2], [1, 1], [3, 0], [2, 3]]
    assert data["next", "info", "lives"].tolist() == [[2, 2], [1, 1], [0, 0], [2, -1], [1, 2]]
    assert data["next", "info", "_lives"].all()
    assert data["next", "info", "episode", "r"].tolist() == [[0, 0], [0, 0], [1.5, 1.5], [0, 0], [0, 0]]
