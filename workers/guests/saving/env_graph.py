"""What can be reached from an env: its wrappers, tasks and simulators, and what they hold, each by the path to it.

Guarantees: looking changes nothing and calls no code of the env, except for properties named `__dict__`.
"""

import contextlib
import enum
import functools
import re
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np

#: Types of objects that only draw.
_DRAWING = (
    "gymnasium.envs.mujoco.mujoco_rendering.",
    *(
        f"pygame.{name}."
        for name in ("surface", "time", "font", "freetype", "display", "mixer", "event")
    ),
)
#: Types whose objects stay as they are, by the start of `module.QualName` of a class or of one of its bases.
_FIXED = (
    "gymnasium.spaces.",
    "gymnasium.envs.registration.EnvSpec",
    "gym.spaces.",
    "mujoco.",
    "dm_env.specs.",
    "envherd.shm.",
    "logging.",
    *_DRAWING,
)
_FUNCTIONS = (
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.MethodWrapperType,
    property,
    staticmethod,
    classmethod,
)
_CONTAINERS = (dict, list, tuple, set, frozenset)
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})
#: Packages of which a state names no classes, unless the env has an object of the class now.
_NOT_OF_ENVS = frozenset({*sys.stdlib_module_names, "numpy", "torch"})
#: Classes of C whose objects have a state that functions of `snapshot.py` read and put back.
_SIMULATORS = frozenset(
    {
        "mujoco._structs:MjData",
        "dm_control.mujoco.engine:Physics",
        "ale_py._ale_py:ALEInterface",
    }
)
#: The attribute of a Gymnasium space that changes: all else that it has describes it.
GENERATOR_OF_SPACE = "_np_random"
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: the class is not one of C's static types


class Graph:
    """The objects that can be reached from an env, by the path that leads to each.

    Attributes:
        owners: path -> object that is reached by attributes alone, "" for the env.
        simulators: path -> object.
        held_classes: name -> class that is itself a value, e.g. a key.
        packages: of the classes of all objects, without those of `_NOT_OF_ENVS`.
        lenders: path -> array of a simulator, of which the env may hold views; floats alone, because simulators do not
            check others.
        lent: address -> path of these.
    """

    def __init__(self, env: Any) -> None:
        self.owners: dict[str, Any] = {}
        self.simulators: dict[str, Any] = {}
        self.fixed: dict[str, Any] = {}
        self.held_classes: dict[str, type] = {}
        self.paths: dict[int, str] = {}
        self.packages: set[str] = set()
        self.lenders: dict[str, np.ndarray] = {}
        self.lent: dict[int, str] = {}
        self._classes: dict[str, type] = {}
        queue = [("", env, True)]
        seen = {id(env)}
        # Grows: breadth first, so that a path is the shortest.
        for path, one, is_owned in queue:
            self._note(path, one, is_owned=is_owned)
            if path and (
                simulator_of(type(one)) is not None
                or is_fixed(one)
                or isinstance(one, enum.Enum)
            ):
                continue
            for name, value, by_attribute in self._members(one):
                if id(value) not in seen and not is_plain(value):
                    seen.add(id(value))
                    queue.append((f"{path}{name}", value, is_owned and by_attribute))
        # Ids are unique only among objects that live.
        self._alive = [one for _, one, _ in queue]

    def _note(self, path: str, one: Any, *, is_owned: bool) -> None:
        cls = type(one)
        name = name_of(cls)
        self._classes.setdefault(name, cls)
        self.packages |= {re.split(r"[.:]", name)[0]} - _NOT_OF_ENVS
        if simulator_of(cls) is not None:
            self.simulators[path] = one
            self.paths[id(one)] = path
        elif isinstance(one, type):
            self.held_classes[name_of(one)] = one
        elif path and is_fixed(one):
            self.fixed[path] = one
            self.paths[id(one)] = path
        elif (
            (is_owned or is_space(cls))
            and is_python(cls)
            and not (isinstance(one, enum.Enum) or is_closing(cls))
        ):
            self.owners[path] = one
            self.paths[id(one)] = path

    def _members(self, one: Any) -> Iterator[tuple[str, Any, bool]]:
        """Yield what an object holds: the step from its path, the value, and whether it is an attribute."""
        if isinstance(one, dict):
            yield from ((f"[{key!r}]", value, False) for key, value in one.items())
            yield from (
                (f".keys()[{position}]", key, False) for position, key in enumerate(one)
            )
        elif isinstance(one, _CONTAINERS) or type(one).__name__ == "deque":
            yield from (
                (f"[{position}]", value, False) for position, value in enumerate(one)
            )
        if hasattr(one, "__dict__"):
            yield from ((f".{name}", value, True) for name, value in vars(one).items())
        for name, member in slots_of(type(one)).items():
            with contextlib.suppress(AttributeError):  # one that was never set
                yield f".{name}", member.__get__(one), False

    def find_class(self, name: str) -> type:
        """Return the class of a name: of an object that the env has, or one that a package of theirs defines.

        Raises:
            ValueError: there is none, or it would run code when an object of it is removed.
        """
        found = self._classes.get(name) or self._defined.get(name)
        if found is None:
            raise ValueError(
                f"an object of {name!r:.80}, which no package of the env defines ({sorted(self.packages)})"
            )
        if hasattr(found, "__del__") and (
            name not in self._classes or is_closing(found)
        ):
            raise ValueError(f"an object of {name}, which has a finalizer")
        return found

    @functools.cached_property
    def _defined(self) -> dict[str, type]:
        """The classes that the packages of the env's objects define, by name; of the modules that are loaded."""
        found: dict[str, type] = {}
        for module_name, module in list(sys.modules.items()):
            if module_name.partition(".")[0] in self.packages:
                values = list(vars(module).values())
                for value in values:  # grows: classes in classes
                    if (
                        isinstance(value, type)
                        and value.__module__ == module_name
                        and name_of(value) not in found
                    ):
                        found[name_of(value)] = value
                        values += vars(value).values()
        return found


def bounds(array: np.ndarray) -> tuple[int, int]:
    """Return the addresses of the first byte of an array, and after its last one."""
    start: int = array.__array_interface__["data"][0]
    spans = [
        (size - 1) * stride
        for size, stride in zip(array.shape, array.strides, strict=True)
    ]
    return start + sum(min(0, span) for span in spans), start + sum(
        max(0, span) for span in spans
    ) + array.itemsize


def simulator_of(cls: type) -> str | None:
    """Return the name of the simulator that a class is, or None."""
    return next(
        (name for base in cls.__mro__ if (name := name_of(base)) in _SIMULATORS),
        None,
    )


def is_space(cls: type) -> bool:
    """Return whether the objects of a class are spaces of Gymnasium."""
    return any(name_of(base) == "gymnasium.spaces.space:Space" for base in cls.__mro__)


def is_fixed(one: Any) -> bool:
    """Return whether an object is no state: a function, class, module, model or renderer."""
    if isinstance(one, (*_FUNCTIONS, type)):
        return True
    return not is_space(type(one)) and any(
        name_of(base).replace(":", ".").startswith(_FIXED)
        for base in type(one).__mro__[:-1]
    )


def is_closing(cls: type) -> bool:
    """Return whether objects of a class of the standard library do something when they are removed: delete a file."""
    return (
        hasattr(cls, "__del__")
        and cls.__module__.partition(".")[0] in sys.stdlib_module_names
    )


def is_plain(one: Any) -> bool:
    """Return whether a value refers to no others, and has no class of the env."""
    return (
        type(one) in _PLAIN
        or isinstance(one, np.generic)
        or (type(one) is np.ndarray and one.dtype != object)
    )


def is_picture(one: Any) -> bool:
    """Return whether an object only draws: an env makes it when it is first needed."""
    return name_of(type(one)).replace(":", ".").startswith(_DRAWING)


def is_python(cls: type) -> bool:
    """Return whether the objects of a class consist of what is in their `__dict__`."""
    return is_made_of_attributes(cls) and not slots_of(cls) and cls.__dictoffset__ != 0


def slots_of(cls: type) -> dict[str, Any]:
    """Return what `__slots__` of a class and its bases in Python have declared, by name."""
    return {
        name: one
        for base in cls.__mro__
        if base.__flags__ & _HEAP_TYPE
        for name, one in vars(base).items()
        if isinstance(one, types.MemberDescriptorType)
    }


def is_made_of_attributes(cls: type) -> bool:
    """Return whether the objects of a class consist of attributes and slots, so that C code holds nothing of them."""
    # Pointers: of the slots, of `__dict__` and of weak references.
    most = object.__basicsize__ + (2 + len(slots_of(cls))) * np.dtype(np.intp).itemsize
    return (
        all(base.__flags__ & _HEAP_TYPE for base in cls.__mro__[:-1])
        and cls.__basicsize__ <= most
    )


def name_of(cls: type) -> str:
    """Return `module:QualName` of a class."""
    # SWIG's types have no module.
    return f"{getattr(cls, '__module__', '')}:{cls.__qualname__}"
