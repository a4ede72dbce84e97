"""Infos belong to the right env, step and reset, or are dropped; their entries may be leaves.

Bad infos of every kind do not make a step fail.
"""

import functools
import signal
import threading

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from envherd.executor import (
    EnvError,
    ExecutorOptions,
    ParallelEnv,
    SerialEnv,
    SpecError,
)
from envherd.executor.testing import check_env_contract
from envherd.workers.infos import packer, unpack
from envherd.workers.options import Infos
from tests.executor.calls import begun

pytestmark = pytest.mark.preloads()

NUM_ENVS = 3


class Ending(gymnasium.Env):
    """Ends every third step; `what` selects the content of its infos."""

    observation_space = gymnasium.spaces.Box(0, 100, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, what="plain"):
        self.what = what
        self.count = 0
        self.seeds = []
        self.reused = {"count": 0}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.seeds.append(seed)
        self.count = 0
        return np.zeros(1, np.float32), self.first_info(options)

    def step(self, action):
        self.count += 1
        return (
            np.full(1, self.count, np.float32),
            0.0,
            self.count == 3,
            False,
            self.info(),
        )


class Telling(Ending):
    """Every info has the step count, except the second step's, which is empty."""

    def first_info(self, options):
        return {"fresh": True, "options": options}

    def info(self):
        self.reused["count"] = self.count
        if self.what == "lock":
            return {"fine": 1, "lock": threading.Lock()}
        if self.what == "large":
            return {"picture": np.zeros(5000)}
        if self.count == 2:
            return {}
        return (
            {"count": self.count, "space": self.action_space}
            if self.what == "object"
            else self.reused
        )


class Ringing:
    """Sends SIGALRM to its process when it is unpickled."""

    def __reduce__(self):
        return signal.raise_signal, (signal.SIGALRM,)


def actions(num_envs=NUM_ENVS):
    return TensorDict({"action": torch.zeros(num_envs, dtype=torch.int64)}, [num_envs])


KINDS = {"serial": SerialEnv, "parallel": functools.partial(ParallelEnv, num_workers=2)}


@pytest.fixture(params=KINDS)
def make(request):
    def build(what="plain", **options):
        make_env = functools.partial(Telling, what)
        return KINDS[request.param](
            NUM_ENVS, make_env, seed=0, options=ExecutorOptions(**options)
        )

    return build


class TellingOnce(Telling):
    """Raises in its second reset."""

    def reset(self, *, seed=None, options=None):
        if self.seeds:
            raise ValueError("no second episode")
        return super().reset(seed=seed, options=options)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_infos_of_a_step_whose_reset_raises(kind):
    with begun(
        kind(NUM_ENVS, TellingOnce, options=ExecutorOptions(infos="plain"))
    ) as env:
        for _ in range(2):
            env.step_and_maybe_reset(actions())
        with pytest.raises(EnvError, match="no second episode"):
            env.step_and_maybe_reset(actions())
        assert env.infos() == [{"count": 3}] * NUM_ENVS
        assert env.infos("root") == [{}] * NUM_ENVS


@pytest.mark.parametrize("is_sent", [False, True])
def test_infos_of_a_step_whose_reset_builds_a_new_instance(is_sent):
    """The first episode ends with the info of its last step, and the next one begins with that of its reset."""
    options = ExecutorOptions(infos="plain", on_env_error="interrupt")
    with begun(
        ParallelEnv(NUM_ENVS, TellingOnce, num_workers=2, options=options)
    ) as env:
        for _ in range(3):
            if is_sent:
                env.send(actions())
                env.recv()
            else:
                env.step_and_maybe_reset(actions())
        assert env.infos() == [{"count": 3}] * NUM_ENVS
        assert env.infos("root") == [{"fresh": True, "options": None}] * NUM_ENVS


def test_infos_after_a_rollout_are_those_of_its_latest_step(make):
    seen = []
    with begun(make(infos="plain")) as env:
        env.step(actions())
        env.rollout(
            5,
            break_when_any_done=False,
            auto_reset=False,
            callback=lambda env, _: seen.append((env.infos()[0], env.infos("root")[0])),
        )
        assert env.infos() == [{"count": 3}] * NUM_ENVS
        assert env.infos("root") == [{}] * NUM_ENVS
    fresh = {"fresh": True, "options": None}
    counted = [{}, {"count": 3}, {"count": 1}, {}, {"count": 3}]
    assert seen == list(zip(counted, [{}, fresh, {}, {}, {}], strict=True))


def test_writes_to_them_change_no_later_ones(make):
    with make(infos="plain") as env:
        env.reset(options={"level": [2]})
        for info in env.infos("root"):
            info["options"]["level"].append(3)
            info.clear()
        assert (
            env.infos("root") == [{"fresh": True, "options": {"level": [2]}}] * NUM_ENVS
        )


def test_info_entries_that_are_not_plain_are_left_out_or_pickled(make):
    with begun(make("object", infos="plain")) as env:
        env.step(actions())
        assert env.infos() == [{"count": 1}] * NUM_ENVS
    with begun(make("object", infos="pickle")) as env:
        env.step(actions())
        assert (
            env.infos()
            == [{"count": 1, "space": gymnasium.spaces.Discrete(2)}] * NUM_ENVS
        )


def test_too_large_info_is_logged_once_per_env(make, caplog):
    with begun(make("large", infos="plain")) as env:
        for _ in range(4):
            env.step_and_maybe_reset(actions())
        assert [info["picture"].sum() for info in env.infos()] == [0] * NUM_ENVS
    logged = [
        record.getMessage()
        for record in caplog.records
        if "larger than the 32768 bytes" in record.getMessage()
    ]
    assert [line.split(":")[0] for line in logged] == [
        f"env {i}" for i in range(NUM_ENVS)
    ]


def test_unpicklable_info_entries_are_left_out_and_named_once(make, caplog):
    with begun(make("lock", infos="pickle")) as env:
        env.step(actions())
        env.step(actions())
        assert env.infos() == [{"fine": 1}] * NUM_ENVS
    logged = [record.getMessage() for record in caplog.records]
    assert len(logged) == NUM_ENVS
    assert all(
        "'lock' of its info is left out (TypeError: cannot pickle" in line
        for line in logged
    )


def test_seeds_are_the_callers_alone_if_asked(make):
    with make(episode_seeds=False, infos="plain") as env:
        env.reset(seed=[5, None, 7])
        for _ in range(3):
            env.step_and_maybe_reset(actions())
        env.reset()
        assert env.get("seeds") == [
            [5, None, None],
            [None, None, None],
            [7, None, None],
        ]


def test_handler_that_raises_during_unpacking_of_an_info_is_raised():
    class TooLateError(Exception):
        pass

    def ring(*_):
        if is_armed:
            is_armed.clear()
            raise TooLateError

    is_armed = []
    before = signal.signal(signal.SIGALRM, ring)
    try:
        packed, left_out = packer("pickle")({"count": 1, "ringing": Ringing()})
        is_armed.append(True)
        with pytest.raises(TooLateError):
            unpack(packed, "pickle")
        assert unpack(packed, "pickle") == {"count": 1, "ringing": None}
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not left_out


# ---- in rows of the slab ------------------------------------------------------------------------------


class Various(Ending):
    """Its infos are a function of its id, its resets and its steps: of several schemas, some of which fit no row."""

    def __init__(self, env_id=0):
        super().__init__()
        self.env_id = env_id
        self.num_resets = 0
        self.place = np.zeros(2)

    def first_info(self, options):
        self.num_resets += 1
        return various(self.env_id, self.num_resets, 0)

    def info(self):
        self.place += 1  # a view that the env changes
        info = various(self.env_id, self.num_resets, self.count)
        if "place" in info:
            self.place[:] = info["place"]
            info["place"] = self.place
        return info


def various(env_id, num_resets, count):
    kind = (3 * env_id + 5 * num_resets + count) % 7
    number = 100.0 * num_resets + count
    return [
        {},
        {"number": number, "place": np.array([number, env_id])},
        {"number": number, "nested": {"text": f"{env_id}", "none": None, "empty": {}}},
        {"number": np.float32(number), "pair": (count, True)},
        {"number": number, "odd": {1: count}},
        {"number": 2**70, "list": [number] * (count + 1)},
        {"text": "x" * 100 * count},
    ][kind]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", ["plain", "pickle"])
def test_infos_equal_the_envs_for_random_schemas_and_calls(kind, policy):  # noqa: C901  # a loop over calls
    """Random calls; after each the infos are those of every env's latest command."""
    num_envs, rng = 4, np.random.default_rng(3)
    factories = [functools.partial(Various, env_id) for env_id in range(num_envs)]
    expected = {"next": [{}] * num_envs, "root": [{}] * num_envs}
    resets, counts = [0] * num_envs, [0] * num_envs

    def reset(mask):
        env.reset(TensorDict({"_reset": torch.tensor(mask)}, [num_envs]))
        note(np.flatnonzero(mask), is_reset=True)

    def note(env_ids, *, is_reset=False, resets_ended=True):
        for i in env_ids:
            counts[i] += 1
            expected["next"][i] = {} if is_reset else various(i, resets[i], counts[i])
            expected["root"][i] = {}
            if is_reset or (counts[i] == 3 and resets_ended):
                resets[i], counts[i] = resets[i] + 1, 0
                expected["root"][i] = various(i, resets[i], 0)

    with begun(
        KINDS[kind](num_envs, factories, seed=0, options=ExecutorOptions(infos=policy))
    ) as env:
        note(range(num_envs), is_reset=True)
        for call in rng.integers(0, 5, 120).tolist():
            if call == 0:
                reset(rng.permutation([True, True, False, False]))
            elif call == 1:
                env.send(actions(num_envs))
                for _ in range(num_envs):
                    note(env.recv(1)["env_ids"].tolist())
                    assert repr([env.infos("next"), env.infos("root")]) == repr(
                        [*expected.values()]
                    )
            elif call == 2:
                env.rollout(2, auto_reset=False, break_when_any_done=False)
                note(range(num_envs))
                note(range(num_envs), resets_ended=False)
                if 3 in counts:
                    reset(np.array(counts) == 3)
            else:
                env.step_and_maybe_reset(actions(num_envs))
                note(range(num_envs))
            assert repr([env.infos("next"), env.infos("root")]) == repr(
                [*expected.values()]
            )


# ---- entries as leaves --------------------------------------------------------------------------------


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


class Numbered(Ending):
    """Its infos have numbers, among others, or what cannot be sent."""

    def first_info(self, options):
        return {"lives": 3, "level": {"name": "cave", "depth": np.float32(0.5)}}

    def info(self):
        if self.what in BAD:
            return {"lives": 3 - self.count, "bad": BAD[self.what][0]()}
        if self.what == "mean":
            return Mean(lives=1)
        if self.what == "list":
            return [("lives", 1), "x"]
        if self.what == "changing":
            return {
                "lives": [1, 2.5, None][self.count - 1],
                "place": np.zeros(self.count),
            }
        info = {
            "lives": 3 - self.count,
            "place": np.arange(2.0) + self.count,
            "word": "hello",
            "won": self.count == 3,
            "_won": 7,  # no leaf: its name is that of a mask
            "long": np.longdouble(1),  # no leaf: torch has none
        }
        return info | (
            {"episode": {"r": 1.5, "l": self.count}} if self.count == 3 else {}
        )


def made(what="good", kind="serial", **options):
    return KINDS[kind](
        NUM_ENVS,
        functools.partial(Numbered, what),
        seed=0,
        options=ExecutorOptions(**options),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_entries_become_leaves_of_rollouts(kind):
    infos = {"lives": int, "place": np.zeros(2), ("level", "depth"): float}
    with made(kind=kind, infos=infos) as env:
        data = env.rollout(4, break_when_any_done=False)
    assert data["info", "lives"].tolist() == [[3, 2, 1, 3]] * NUM_ENVS
    assert data["next", "info", "lives"].tolist() == [[2, 1, 0, 2]] * NUM_ENVS
    assert data["info", "lives"].dtype == torch.int64
    assert data["next", "info", "place"][0].tolist() == [
        [1.0, 2.0],
        [2.0, 3.0],
        [3.0, 4.0],
        [1.0, 2.0],
    ]
    assert data["info", "_place"][0].tolist() == [False, True, True, False]
    assert data["info", "place"][0, 0].tolist() == [0.0, 0.0]
    assert data["info", "level", "depth"][0].tolist() == [0.5, 0.0, 0.0, 0.5]
    assert data["info", "level", "_depth"][0].tolist() == [True, False, False, True]


def test_later_changes_are_announced():
    with made(
        infos={
            ("episode", "r"): float,
            ("episode", "l"): 0,
            "never": np.zeros(3, np.float32),
        }
    ) as env:
        data = env.rollout(3)["next", "info"]
    assert data["episode", "r"][0].tolist() == [0.0, 0.0, 1.5]
    assert data["episode", "_l"][0].tolist() == [False, False, True]
    assert data["episode", "l"].dtype == torch.int64
    assert data["never"].shape == (NUM_ENVS, 3, 3)
    assert not data["_never"].any()


def test_partial_reset_updates_info_leaves_of_its_envs():
    with begun(made(infos={"lives": int})) as env:
        env.step(actions())
        root = env.reset(
            TensorDict({"_reset": torch.tensor([True, False, True])}, [NUM_ENVS])
        )
        assert root["info", "lives"].tolist() == [3, 2, 3]


def test_info_leaf_that_no_longer_fits_counts_as_missing(caplog):
    with made("changing", infos={"lives": int, "place": np.zeros(1)}) as env:
        data = env.rollout(3)["next", "info"]
    assert data["lives"][0].tolist() == [1, 0, 0]
    assert data["_lives"][0].tolist() == [True, False, False]
    assert data["_place"][0].tolist() == [True, False, False]
    logged = [record.getMessage() for record in caplog.records]
    assert len(logged) == 2 * NUM_ENVS
    assert (
        "env 0: 'lives' of its info is left out (SpecError: writing info/lives failed: expected int64 (), got"
        in logged[0]
    )


@pytest.mark.parametrize(
    "kind", ["serial", pytest.param("parallel", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("infos", ["plain", "pickle"])
@pytest.mark.long
def test_no_info_costs_a_step_or_a_worker(kind, infos):
    """All bad infos at once, each in a separate env."""
    names = [*BAD, "mean", "list"]
    factories = [functools.partial(Numbered, what) for what in names]
    keys = {"lives": int, "bad": np.zeros(1)}
    options = ExecutorOptions(infos=Infos(infos, keys), check_finite=True)
    executor = KINDS[kind](len(names), factories, seed=0, options=options)
    with begun(executor) as env:
        for count in (1, 2, 3, 1):
            td, _ = env.step_and_maybe_reset(actions(len(names)))
            assert td["next", "observation"].tolist() == [[count]] * len(names)
            has_lives = td["next", "info", "_lives"].flatten().tolist()
            assert has_lives == [name in BAD for name in names]
            assert not td["next", "info", "_bad"].any()
            for name, info in zip(names, env.infos(), strict=True):
                if name in BAD:
                    assert info["lives"] == 3 - count, name
                    assert ("bad" in info) == BAD[name][1 + (infos == "pickle")], name
                else:
                    assert info == {}, name


def test_entries_that_would_have_one_place_are_refused():
    class Nested(Numbered):
        def info(self):
            return {"lives": {"left": 1}, "_lives": 2}

    for infos, names in (
        ({"lives": int, "_lives": int}, "'_lives' and '_lives'"),
        ({("lives", "left"): int, "lives": int}, "'lives' and 'lives/_left'"),
    ):
        with pytest.raises(SpecError, match=f"at a separate place, got {names}"):
            SerialEnv(1, Nested, options=ExecutorOptions(infos=infos))


@pytest.mark.parametrize(
    "keys",
    [
        "lives",
        "all",
        ("lives",),
        None,
        3,
        {"": int},
        {3: int},
        {"x": "text"},
        {"x": object},
    ],
)
def test_keys_that_are_none_are_refused(keys):
    with pytest.raises(ValueError, match="ExecutorOptions failed"):
        ExecutorOptions(infos=keys)


def test_an_observation_of_this_name_is_refused():
    class Clash(Numbered):
        observation_space = gymnasium.spaces.Dict({"info": Numbered.observation_space})

    with pytest.raises(
        SpecError, match="expected an env without an observation named 'info'"
    ):
        SerialEnv(1, Clash, options=ExecutorOptions(infos={"lives": int}))


def test_the_contract_holds():
    from envherd.workers.adapters.gymnasium.adapter import GymnasiumAdapter
    from envherd.workers.wrappers.leaves import InfoLeaves

    def make():
        keys = {"lives": int, ("episode", "r"): float}
        return InfoLeaves(GymnasiumAdapter(Numbered()), keys)

    assert check_env_contract(make, num_steps=20).num_ends > 4


@pytest.mark.parametrize("mode", list(gymnasium.vector.AutoresetMode))
@pytest.mark.parametrize("kind", ["SyncVectorEnv", "AsyncVectorEnv"])
def test_rows_of_a_vector_env_tell_of_themselves(kind, mode):
    """Also at an end whose info is inside `final_info`, and in resets of some rows."""

    class Long(Numbered):
        def step(self, action):
            observation, reward, _, truncated, info = super().step(action)
            return observation, reward, self.count == 4, truncated, info

    def make_env():
        envs = [Numbered, Long, Long]
        return getattr(gymnasium.vector, kind)(envs, autoreset_mode=mode)

    infos = Infos("plain", {"lives": int, ("episode", "r"): float})
    # In a worker, because the memory of Gymnasium's processes stays open in the process that has started them.
    with ParallelEnv(1, make_env, seed=0, options=ExecutorOptions(infos=infos)) as env:
        data = env.rollout(5, break_when_any_done=False)[0, :, :2]
        # Of an ended and a running row: at once, and one after the other.
        for masks in ([[1, 1, 0]], [[0, 1, 0], [1, 0, 0]]):
            td = env.reset()
            for _ in range(3):
                td = env.step(env.rand_action(td))["next"]
            for mask in masks:
                td["_reset"] = torch.tensor(mask).reshape(1, 3, 1) > 0
                td = env.reset(td)
            assert td["info", "lives"].flatten().tolist() == [3, 3, 0]
            assert td["info", "_lives"].all()
            assert env.infos("root")[0]["lives"][0] == 3
    assert data["info", "lives"].tolist() == [[3, 3], [2, 2], [1, 1], [3, 0], [2, 3]]
    assert data["next", "info", "lives"].tolist() == [
        [2, 2],
        [1, 1],
        [0, 0],
        [2, -1],
        [1, 2],
    ]
    assert data["next", "info", "_lives"].all()
    assert data["next", "info", "episode", "r"].tolist() == [
        [0, 0],
        [0, 0],
        [1.5, 1.5],
        [0, 0],
        [0, 0],
    ]
