"""The state of an env that consists of its attributes: what is saved, what is refused, what a state may name."""

import collections
import dataclasses
import enum
import io
import random
import subprocess
import tempfile
import threading

import gymnasium
import numpy as np
import pytest
import torch

from envherd.workers import plain
from envherd.workers.errors import Unsaveable
from envherd.workers.guests.saving import snapshot
from tests.extras import needs


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass
class Ball:
    at: np.ndarray
    colour: Colour = Colour.RED


@dataclasses.dataclass(frozen=True)
class Spot:
    """What has its own hash, by its attributes."""

    at: int


class Pair:
    __slots__ = ("one", "two")

    def __init__(self, one, two):
        self.one, self.two = one, two


class Task:
    """What other objects hold, so it must stay the same object."""

    def __init__(self):
        self.score = 0
        self.balls = [Ball(np.zeros(2))]

    def add(self, ball):
        self.balls.append(ball)


LARGE = np.zeros((4000, 250))


class Room(gymnasium.Env):
    """An env with most kinds of attributes."""

    observation_space = gymnasium.spaces.Box(-9, 9, (2,), np.float64)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self):
        self.task = Task()
        self.add = self.task.add  # a method of an object that is restored in place
        self.shape = lambda ball: ball.at * 2
        self.carried = None
        self.grid = np.zeros((3, 3))
        self.rows = self.grid  # the same array by two names
        self.corner, self.column = self.grid[::-1, :2], self.grid[:, 1:2]  # views of it
        self.turned = np.asfortranarray(np.zeros((2, 3)))
        self.edge = self.turned[:, 1:]
        self.words = self.grid.view(np.uint64)
        self.phases = np.zeros(2, complex)
        self.real = self.phases.real
        self.episode = LARGE[3]  # a view of what is no state
        self.seen = {Spot(1): "a", (Spot(2), 3): "b"}
        self.walls = frozenset({(0, 1), Colour.RED})
        self.queue = collections.deque([1, 2], maxlen=3)
        self.counts = collections.Counter(a=2)
        self.drawn = random.Random(3)
        self.legacy = np.random.RandomState(4)
        self.pair = Pair(1, [2])
        # Sampled, so not the class's.
        self.observation_space = gymnasium.spaces.Box(-9, 9, (2,), np.float64)
        self.both = gymnasium.spaces.Dict(n=gymnasium.spaces.Discrete(1000))
        self.spaces = {"a": gymnasium.spaces.Discrete(3)}
        self.itself = self
        self.kinds = {(Ball, Task): 1, (int, Ball): 2}
        self.process = subprocess.Popen  # of which a state cannot make an object
        self.step_type = np.float32(0.5)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2), {}

    def change(self, number):
        self.task.score = number
        self.add(Ball(np.full(2, number), Colour.BLUE))
        self.carried = self.task.balls[-1]
        self.grid[0] = number
        self.queue.append(number)
        self.counts["b"] = number
        self.pair = Pair(number, [number])
        sampled = [self.observation_space.sample().tolist(), self.both.sample()["n"]]
        return (
            self.drawn.random(),
            self.legacy.random_sample(),
            self.np_random.random(),
            sampled,
        )


def make():
    env = gymnasium.wrappers.TimeLimit(
        gymnasium.wrappers.OrderEnforcing(gymnasium.wrappers.PassiveEnvChecker(Room())),
        9,
    )
    env.reset(seed=1)
    env.unwrapped.change(5)
    return env


def of(room):
    return (
        room.task.score,
        [(ball.at.tolist(), ball.colour) for ball in room.task.balls],
        room.grid.tolist(),
        room.corner.tolist(),
        list(room.queue),
        dict(room.counts),
        (room.pair.one, room.pair.two),
    )


@pytest.mark.parametrize("where", ["the same env", "another env"])
def test_a_state_restores_all_that_an_env_holds(where):
    env = make()
    state = plain.decode(plain.encode(snapshot.save(env)))
    saved, drawn = of(env.unwrapped), env.unwrapped.change(7)
    to = env if where == "the same env" else make()
    to.unwrapped.change(8)
    task, add = to.unwrapped.task, to.unwrapped.add
    snapshot.read(to, state)()
    room = to.unwrapped
    assert of(room) == saved
    assert room.change(7) == drawn  # the generators continue
    assert room.task is task
    assert room.add is add
    assert room.rows is room.grid
    room.column[:] = 6
    assert (room.grid[:, 1] == 6).all()
    assert (room.corner[:, 1] == 6).all()
    assert (room.words == room.grid.view(np.uint64)).all()
    room.real[:] = 3
    assert (room.phases == 3).all()
    assert len(state["held"]) < LARGE.nbytes // 10
    room.edge[:] = 4
    assert (room.turned == [[0, 4, 4]] * 2).all()
    assert room.seen == {Spot(1): "a", (Spot(2), 3): "b"}
    assert room.walls == {(0, 1), Colour.RED}
    assert room.carried is room.task.balls[-1]
    assert room.itself is room
    assert room.queue.maxlen == 3
    assert room.shape(Ball(np.ones(2))).tolist() == [2, 2]
    assert isinstance(room.carried.colour, Colour)
    assert room.kinds == {(Ball, Task): 1, (int, Ball): 2}


def test_saved_state_shares_no_memory_with_envs():
    env = make()
    state = snapshot.save(env)
    saved = of(env.unwrapped)
    for number in (7, 8):
        snapshot.read(env, state)()
        assert of(env.unwrapped) == saved
        env.unwrapped.change(number)


class Held(Room):
    def __init__(self, held):
        super().__init__()
        self.held = held


class Turn(enum.IntEnum):
    LEFT = 1


class Name(enum.StrEnum):
    KEY = "key"


class Doors(enum.Flag):
    NORTH = 1
    SOUTH = 2


@pytest.mark.parametrize(
    "held",
    [Turn.LEFT, Name.KEY, Doors.NORTH, Doors.NORTH | Doors.SOUTH, {Turn.LEFT: 1}],
)
def test_members_of_enums_stay_members(held):
    env = Held(held)
    state = snapshot.save(env)
    env.held = None
    snapshot.read(env, state)()
    assert type(env.held) is type(held)
    assert repr(env.held) == repr(held)


def tensors():
    place = torch.arange(6.0).view(2, 3)
    return {
        "place": place,
        "turned": place.t(),
        "row": place[1],
        "repeated": torch.ones(1).expand(3),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "half": torch.ones(2, dtype=torch.bfloat16),
        "none": torch.zeros(0, 3),
        "start": torch.arange(7, dtype=torch.uint8)[:4].view(torch.int32),
        "learned": torch.ones(2, requires_grad=True),
        "of": (place.dtype, place.device, place.shape),
    }


def test_tensors_share_their_memory_again():
    env, expected = Held(tensors()), tensors()
    state = plain.decode(plain.encode(snapshot.save(env)))
    env.held["row"] += 10
    # The saved `place` and `row` are two parts of one memory, whatever the env holds now.
    env.held["place"] = env.held["row"]
    snapshot.read(env, state)()
    assert env.held.pop("of") == expected.pop("of")
    for name, tensor in expected.items():
        assert torch.equal(env.held[name], tensor), name
        assert env.held[name].dtype == tensor.dtype
    env.held["row"] += 10
    assert (env.held["place"][1] == torch.arange(13.0, 16)).all()
    assert (env.held["turned"][:, 1] == torch.arange(13.0, 16)).all()
    snapshot.read(env, state)()
    assert torch.equal(env.held["place"], expected["place"])


def array_and_tensor():
    array = np.zeros(3)
    return array[1:], torch.from_numpy(array)


UNSAVEABLE = {
    "a lock": (threading.Lock, "Held.held is a _thread.lock"),
    "a file that is removed": (
        lambda: vars(tempfile)["_TemporaryFileCloser"](io.BytesIO(), "x", delete=False),
        "Held.held is a tempfile._TemporaryFileCloser",
    ),
    "a generator": (lambda: (i for i in range(3)), "Held.held is a generator"),
    "an array of objects": (
        lambda: np.array([{}, None]),
        "Held.held is a numpy.ndarray .an array of dtype object",
    ),
    "a tensor of a part of an array": (
        lambda: [array := np.zeros(9), torch.from_numpy(array[4:])],
        "Held.held is a list .an array that shares its memory with a tensor",
    ),
    "an array and a tensor of one memory": (
        array_and_tensor,
        "Held.held is a tuple .an array that shares its memory with a tensor",
    ),
    "a parameter": (
        lambda: torch.nn.Parameter(torch.zeros(2)),
        "Held.held is a torch.nn.parameter.Parameter",
    ),
    "a frozenset of objects": (
        lambda: frozenset({Spot(1)}),
        "Held.held is a frozenset .a frozenset of objects",
    ),
    "in a container": (lambda: {"a": [threading.Lock()]}, "Held.held is a dict"),
}


@pytest.mark.parametrize("name", UNSAVEABLE)
def test_unsaveable_objects_are_named(name):
    make_held, words = UNSAVEABLE[name]
    with pytest.raises(Unsaveable, match=words):
        snapshot.save(Held(make_held()))


def test_of_an_array_and_a_tensor_of_one_memory_the_second_is_named():
    env = Held(torch.zeros(3))
    env.last = env.held.numpy()
    with pytest.raises(Unsaveable, match=r"Held\.last is a numpy\.ndarray .an array"):
        snapshot.save(env)


def forged(state, change):
    """Return a state whose nodes and simulators somebody has changed."""
    nodes, simulators = plain.decode(state["held"])
    held = plain.encode(
        [nodes, simulators]
        if (changed := change(nodes, simulators)) is None
        else changed
    )
    return {**state, "held": held, "digest": snapshot._digest(held)}


def with_node(*node):
    """Give the env an attribute with a value of this node."""

    def change(nodes, _):
        nodes.append([*node, {}] if len(node) == 3 else [*node])
        nodes[0][3]["forged"] = [len(nodes) - 1]

    return lambda state: forged(state, change)


def with_view(packed):
    """Add a view of an array of 8 bytes."""

    def change(nodes, _):
        memory = ["array", None, ["<f8", [1], "C", bytes(8)], {}]
        nodes.extend([memory, ["array", None, [[len(nodes)], packed], {}]])

    return lambda state: forged(state, change)


class Removed:
    """Would run when it is removed."""

    def __del__(self):
        raise AssertionError


PLACE = ".env.env.env"


def with_tensor(shape, strides, dtype="torch.float32"):
    """Add a tensor in a memory of 8 bytes."""

    def change(nodes, _):
        first = len(nodes)
        packed = ["|u1", [8], "C", bytes(8)]
        nodes.extend(
            [
                ["data", None, ["torch:device", ["cpu"]], {}],
                ["storage", None, [[first], packed], {}],
                ["torch.dtype", None, dtype, {}],
                ["tensor", None, [[first + 1], [first + 2], shape, strides, 0], {}],
            ]
        )

    return lambda state: forged(state, change)


REFUSED = {
    "a call": (with_node("data", None, ["posix:system", ["true"]]), "posix:system"),
    "a call of a package": (
        with_node("data", None, ["numpy:load", ["x"]]),
        "numpy:load",
    ),
    "a file of numpy": (
        with_node("data", None, ["numpy:memmap", ["x", "uint8", "w+", 0, 5]]),
        "numpy:memmap",
    ),
    "an array of another class": (
        with_node("array", "numpy:memmap", ["|u1", [5], "C", bytes(5)]),
        "numpy:memmap",
    ),
    "an array of objects": (
        with_node("array", None, ["|O", [1], "C", bytes(8)]),
        "dtype",
    ),
    "an array of records": (
        with_node("array", None, ["(1,i4", [1], "C", bytes(4)]),
        "dtype",
    ),
    "a view beyond its memory": (
        with_view(["<f8", [1], [8], 4]),
        "strides is incompatible",
    ),
    "a view before its memory": (
        with_view(["<f8", [1], [8], -8]),
        "strides is incompatible",
    ),
    "a huge view": (with_view(["<f8", [2**40], [0], 0]), "a view of shape"),
    "a view of a view with gaps": (
        lambda state: forged(
            state,
            lambda nodes, _: nodes.extend(
                [
                    ["array", None, ["<f8", [3], "C", bytes(24)], {}],
                    ["array", None, [[len(nodes)], ["<f8", [2], [16], 0]], {}],
                    ["array", None, [[len(nodes) + 1], ["<f8", [1], [8], 0]], {}],
                ]
            ),
        ),
        "not contiguous",
    ),
    "a view of objects": (with_view(["|O", [1], [8], 0]), "a view '|O'"),
    "a view of a simulation that is not there": (
        with_node("array", None, ["a.qpos", ["<f8", [1], [8], 0]]),
        "a.qpos",
    ),
    "a view of an env": (
        with_node("array", None, [[0], ["<f8", [1], [8], 0]]),
        "AttributeError",
    ),
    "a huge array": (
        with_node("array", None, ["<f8", [2**40], "C", bytes(8)]),
        "8 bytes for an array",
    ),
    "an array of nothing": (
        with_node("array", None, ["|S0", [2**40], "C", b""]),
        "0 bytes for an array",
    ),
    "a tensor beyond its memory": (with_tensor([2], [2]), "out of bounds"),
    "a huge tensor": (with_tensor([2**40], [0]), "8 bytes"),
    "a tensor of no dtype": (with_tensor([1], [1], "torch.load"), "StopIteration"),
    "a space that the env does not have": (
        with_node(
            "owner", None, [f"{PLACE}.new", "gymnasium.spaces.discrete:Discrete"]
        ),
        "Discrete for a NoneType",
    ),
    "a finalizer": (
        with_node("object", f"{__name__}:Removed", []),
        "Removed, which has a finalizer",
    ),
    "a class that the env refers to": (
        with_node("object", "subprocess:Popen", []),
        "subprocess:Popen",
    ),
    "a file that is removed": (
        with_node(
            "owner",
            None,
            [f"{PLACE}.task.kept", "tempfile:_TemporaryFileCloser"],
            {"name": "x", "delete": True},
        ),
        "an object of .tempfile:_TemporaryFileCloser",
    ),
    "a class as a value": (with_node("class", None, "shutil:rmtree"), "rmtree"),
    "a class of C": (with_node("object", "numpy:ndarray", []), "ndarray"),
    "a list as a dict": (with_node("dict", f"{__name__}:Ball", []), "which is no dict"),
    "a function as a class": (with_node("object", "numpy:load", []), "numpy:load"),
    "an object that is not there": (
        with_node("at", None, [".nothing", False]),
        r"env\.nothing",
    ),
    "attributes of a function": (
        with_node("at", None, [f"{PLACE}.shape", False], {"__code__": 1}),
        "attributes of a at",
    ),
    "a value that holds itself": (
        lambda state: forged(
            state, lambda nodes, _: nodes.append(["tuple", None, [[len(nodes)]], {}])
        ),
        "consists of itself",
    ),
    "a node that is not there": (
        lambda state: forged(state, lambda nodes, _: nodes[0][3].update(x=[10**9])),
        "no node",
    ),
    "an unknown kind": (with_node("call", None, []), "KeyError"),
    "no node": (
        lambda state: forged(state, lambda nodes, _: nodes.append(3)),
        "TypeError",
    ),
    "a generator beyond its words": (
        with_node(
            "bits",
            None,
            [
                {"bit_generator": "MT19937", "state": {"key": [1] * 624, "pos": 10**6}},
                None,
            ],
        ),
        "pos=1000000",
    ),
    "seeds of much memory": (with_node("seeds", None, [1, [], 2**40, 0]), "a pool of"),
    "a state without the env": (
        lambda state: forged(state, lambda _, simulators: [[], simulators]),
        "of none",
    ),
    "damage": (
        lambda state: state | {"held": state["held"][:-1]},
        "got one that is damaged",
    ),
    "a text": (lambda state: state | {"held": "x"}, "got one that is damaged"),
    "a newer version": (
        lambda state: state | {"version": 4},
        "with version 3 of the format, got version 4",
    ),
    "no version": (
        lambda state: {"held": state["held"]},
        "without a state of this form",
    ),
    "another env": (
        lambda _: snapshot.save(gymnasium.make("CartPole-v1")),
        "got one of a .*Cart.* for a .*Room",
    ),
    "another wrapper": (
        lambda _: snapshot.save(Room()),
        "got one of a .*Room for a .*TimeLimit",
    ),
    "no state": (lambda _: {"a": 1}, "expected what state_dict"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_state_that_is_refused_changes_nothing(name):
    change, words = REFUSED[name]
    env = make()
    state = change(snapshot.save(env))
    before, attributes = of(env.unwrapped), vars(env.unwrapped).copy()
    with pytest.raises(ValueError, match=words):
        snapshot.read(env, state)()
    assert of(env.unwrapped) == before
    assert vars(env.unwrapped) == attributes


def test_a_state_makes_objects_that_the_env_does_not_hold_now():
    env, other = make(), make()
    other.unwrapped.task = None
    other.unwrapped.carried = None
    snapshot.read(other, snapshot.save(env))()
    assert of(other.unwrapped) == of(env.unwrapped)


def test_a_simulation_without_its_model_cannot_be_saved():  # as in MuJoCo 2
    held = collections.UserDict(
        data=type("MjData", (), {"__module__": "mujoco._structs"})()
    )
    with pytest.raises(Unsaveable):
        snapshot.save(held)


@needs("mujoco")
def test_views_of_a_simulation_follow_it_again():
    one, other = (gymnasium.make("InvertedPendulum-v5") for _ in range(2))
    for env in (one, other):
        env.reset(seed=1)
        env.unwrapped.velocity = env.unwrapped.data.qvel[1:]
        # Which is copied.
        env.unwrapped.rows = np.broadcast_to(env.unwrapped.data.qpos, (5, 2))
        env.unwrapped.mass = env.unwrapped.model.body_mass
    state = snapshot.save(one)
    for env in (one, other):
        env.step(env.action_space.high)
        snapshot.read(env, state)()
        env.step(env.action_space.high)
        inner = env.unwrapped
        assert np.shares_memory(inner.velocity, inner.data.qvel)
        assert inner.velocity == inner.data.qvel[1]
        assert np.shares_memory(inner.mass, inner.model.body_mass)


@needs("box2d")
def test_pictures_are_made_again_where_there_are_none():
    one, other, third = (
        gymnasium.make("CartPole-v1", render_mode="rgb_array") for _ in range(3)
    )
    for seed, env in enumerate((one, other, third)):
        env.reset(seed=seed)
    drawn = one.render()
    snapshot.read(other, snapshot.save(one))()
    assert (other.render() == drawn).all()
    snapshot.read(one, snapshot.save(third))()  # which was never drawn
    assert one.unwrapped.screen is not None
    assert (one.render() == third.render()).all()


@needs("atari")
def test_ale_with_sticky_actions_is_refused():
    import ale_py

    gymnasium.register_envs(ale_py)
    env = gymnasium.make("ALE/Pong-v5")
    env.reset()
    with pytest.raises(Unsaveable, match="repeat_action_probability=0"):
        snapshot.save(env)
