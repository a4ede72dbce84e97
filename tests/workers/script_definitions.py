"""A script whose definitions a worker needs: `test_pickling` runs each case here and in a process without the script.

    python script_definitions.py         prints a JSON object: case -> [result here, result there]

Prints pickling's error in place of the result there.
"""

# mypy: ignore-errors

import abc
import collections
import dataclasses
import enum
import functools
import json
import math
import pickle
import subprocess
import sys
import threading
import typing

import gymnasium

from envherd.workers.sending.pickling import dumps

CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


# ---- functools


@functools.cache
def fibonacci(n):
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)


root = functools.lru_cache(maxsize=3, typed=True)(math.sqrt)
ADDED = functools.partial(fibonacci, 5)
fibonacci.extra = 5


@case
def caches():
    misses = fibonacci.cache_info().misses
    return (
        fibonacci(20),
        misses,
        fibonacci.extra,
        fibonacci.__name__,
        root(4.0),
        root.cache_parameters(),
        ADDED(),
    )


class Cached:
    def __init__(self):
        self.doubled = functools.lru_cache(self.double)

    @functools.lru_cache(maxsize=None)
    def space(self, agent):
        return agent

    @classmethod
    @functools.lru_cache
    def name(cls):
        return cls.__name__

    @staticmethod
    @functools.cache
    def five():
        return 5

    @property
    @functools.lru_cache
    def seven(self):
        return 7

    @functools.cached_property
    def goal(self):
        return 3

    def double(self, x, y=0):
        return 2 * x + y

    plus_two = functools.partialmethod(double, y=2)

    @functools.singledispatchmethod
    def kind(self, x):
        return "object"

    @kind.register
    def _(self, x: int):
        return "int"


class Inherited(Cached):
    @functools.cached_property
    def goal(self):
        return super().goal + 1

    def space(self, agent):
        return super().space(agent) + len(__class__.__name__)


INSTANCE = Cached()


@case
def methods():
    one, other = Cached(), Inherited()
    return (
        [
            one.space(2),
            Cached.name(),
            Cached.five(),
            one.seven,
            one.goal,
            one.plus_two(3),
            one.doubled(4),
        ],
        [one.kind(1), one.kind("x"), Cached.goal.attrname, Inherited.name()],
        [other.goal, other.space(1), other.kind(2), INSTANCE.doubled(1)],
    )


@functools.singledispatch
def flat(x):
    """Flatten."""
    return [x]


@flat.register
def _(x: list):
    return [leaf for item in x for leaf in flat(item)]


@flat.register(collections.abc.Mapping)
def _(x):
    return ["mapping", *flat(list(x.values()))]


flat.extra = 3


@case
def dispatchers():
    before = (
        flat([1, [2, {"a": 3}]]),
        flat.__doc__,
        flat.extra,
        flat.dispatch(dict) is flat.dispatch(collections.abc.Mapping),
    )
    flat.register(str, lambda _: ["text"])
    return before, flat(["a"])


class Locked:
    lock, again = threading.Lock(), threading.RLock()

    def use(self):
        with self.lock, self.again:
            return True


@case
def locks():
    return Locked().use()


@case
def a_locked_lock_is_free_there():
    return Locked.lock.locked()


def made_inside():
    @functools.lru_cache
    def factorial(n):
        return 1 if n < 2 else n * factorial(n - 1)

    class Inner:
        @functools.cached_property
        def value(self):
            return factorial(5)

        def own_class(self):
            return Inner

    return lambda: (factorial(4), Inner().value, Inner().own_class() is Inner)


CLOSURE = made_inside()


@case
def closures():
    return CLOSURE()


SIZE = 4


def with_class():
    class Sized:
        size = SIZE
        half = [SIZE // 2 for _ in "x"]

        class Inner:
            goal = Cached().goal

    return Sized


@case
def classes_in_functions():
    return with_class().size, with_class().half, with_class().Inner.goal


# ---- enum, dataclasses, typing


class Planet(enum.Enum):
    EARTH = (1.0, 2.0)
    TERRA = (1.0, 2.0)
    MARS = (3.0, 4.0)

    def __init__(self, mass, radius):
        self.mass, self.radius = mass, radius

    @functools.lru_cache
    def gravity(self):
        return self.mass / self.radius

    @classmethod
    def _missing_(cls, value):
        return cls.MARS


class Labelled(int, enum.Enum):
    A = 1, "one"

    def __new__(cls, value, label):
        member = int.__new__(cls, value)
        member._value_, member.label = value, label
        return member


class Flags(enum.Flag, boundary=enum.KEEP):
    X, Y, XY = 1, 2, 3


class Rule(enum.Enum):
    double = enum.member(lambda one: 2 * one)


@case
def enums():
    return (
        [Rule.double.value(4), Rule.double.name],
        [
            Planet.EARTH.gravity(),
            Planet.TERRA is Planet.EARTH,
            Planet["TERRA"].name,
            Planet(9).name,
        ],
        [
            Labelled.A.label,
            Labelled(1) + 1,
            [flag.name for flag in Flags.XY],
            [Flags.XY.name, Flags["XY"].value],
            Flags(8).value,
        ],
    )


@dataclasses.dataclass
class Config:
    x: int
    start: dataclasses.InitVar[int] = 3
    names: list = dataclasses.field(default_factory=list, metadata={"unit": "m"})
    planet: Planet = Planet.EARTH

    def __post_init__(self, start):
        self.started = start


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Slotted:
    a: int = 1

    @functools.lru_cache
    def twice(self):
        return 2 * self.a


CONFIG = Config(7)


@case
def dataclass():
    @dataclasses.dataclass
    class Extended(Config):
        more: int = 5

    fields = dataclasses.fields(Config)
    return (
        [
            Config(7) == CONFIG,
            dataclasses.replace(Config(1), x=5, start=1).x,
            fields[1].metadata["unit"],
        ],
        [
            fields[0].default is dataclasses.MISSING,
            Config(1).planet is Planet.EARTH,
            Extended(1).names,
            Slotted(a=2).twice(),
        ],
    )


Uid = typing.NewType("Uid", int)
P = typing.ParamSpec("P")
T = typing.TypeVar("T")
Ts = typing.TypeVarTuple("Ts")


class Box(typing.Generic[T]):
    def __init__(self, x: T) -> None:
        self.x = x


class Call(typing.Generic[P, T]):
    def __init__(self, function: typing.Callable[P, T]) -> None:
        self.function = function


class Row(typing.Generic[*Ts]):
    def __init__(self, *parts: *Ts) -> None:
        self.parts = parts


class Point(typing.NamedTuple):
    x: Uid = Uid(1)

    @functools.lru_cache
    def double(self):
        return 2 * self.x


@typing.runtime_checkable
class HasDouble(typing.Protocol):
    def double(self): ...


@case
def typed():
    aliases = (
        Box[int](3).x,
        Call[[int], str].__args__[1] is str,
        Row[int, str](1, "a").parts,
        Uid(3),
        Uid.__name__,
        Uid.__module__,
    )
    return (
        aliases,
        Point().double(),
        isinstance(Point(), HasDouble),
        isinstance(3, HasDouble),
    )


# ---- metaclasses, hooks of subclasses


class Tagging(type):
    tags: typing.ClassVar = []

    def __new__(mcs, name, bases, namespace, *, tag):
        cls = super().__new__(mcs, name, bases, namespace)
        cls.tag = tag
        mcs.tags.append(tag)
        return cls

    def __init__(cls, name, bases, namespace, *, tag):
        super().__init__(name, bases, namespace)


class Tagged(metaclass=Tagging, tag=3):
    pass


class Retagged(Tagged, tag=4):
    def name(self):
        return super().__init__() or __class__.__name__


class Registered(abc.ABC):
    known: typing.ClassVar = {}

    def __init_subclass__(cls, *, key, **kwargs):
        super().__init_subclass__(**kwargs)
        assert key not in Registered.known, f"{key} twice"
        Registered.known[key] = cls

    @abc.abstractmethod
    def act(self): ...


class Acting(Registered, key="acting"):
    def act(self):
        return 3


class Kinds(gymnasium.Env):
    kinds: typing.ClassVar = {}

    def __init_subclass__(cls, *, kind):
        Kinds.kinds[kind] = cls

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return 0, {}


class OfKind(Kinds, kind="a"):
    @functools.cached_property
    def action_space(self):
        return gymnasium.spaces.Discrete(2)


@case
def classes():
    try:
        Registered()
    except TypeError:
        is_abstract = True
    env = OfKind()
    return (
        [
            Tagged.tag,
            Retagged.tag,
            Tagging.tags,
            Retagged().name(),
            Retagged.__bases__ == (Tagged,),
        ],
        [
            is_abstract,
            Acting().act(),
            list(Registered.known),
            Registered.known["acting"] is Acting,
        ],
        [
            Kinds.kinds == {"a": OfKind},
            env.reset(seed=1),
            env.action_space.n,
            OfKind.__bases__ == (Kinds,),
        ],
    )


THERE = """
import pickle, sys
cases = pickle.load(sys.stdin.buffer)
found = {}
for name, data in cases.items():
    try:
        found[name] = repr(pickle.loads(data)())
    except Exception as error:
        found[name] = f"{type(error).__name__}: {error}"
pickle.dump(found, sys.stdout.buffer)
"""


def main():
    Locked.lock.acquire()
    pickled = {name: dumps(function) for name, function in CASES.items()}
    Locked.lock.release()
    done = subprocess.run(
        [sys.executable, "-c", THERE],
        input=pickle.dumps(pickled),
        stdout=subprocess.PIPE,
        check=True,
    )
    there = pickle.loads(done.stdout)
    json.dump(
        {name: [repr(function()), there[name]] for name, function in CASES.items()},
        sys.stdout,
    )


if __name__ == "__main__":
    main()
