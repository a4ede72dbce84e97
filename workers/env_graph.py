"""What can be reached from an env: its wrappers, tasks and simulators, and what they hold, each by the path to it.

Guarantees: looking changes nothing and calls no code of the env, except for properties named `__dict__`.
"""

from __future__ import annotations

import enum
import re
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np

#: Types of objects that only draw.
_DRAWING = (
    "gymnasium.envs.mujoco.mujoco_rendering.",
    *(f"pygame.{name}." for name in ("surface", "time", "font", "freetype", "display", "mixer", "event")),
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
_PLAIN = (type(None), bool, int, float, complex, str, bytes, np.ndarray, np.generic)
#: Packages that a state may name besides those of the env's own objects; of numpy, the classes.
_PACKAGES = frozenset(
    {"numpy", "collections", "enum", "random", "torch", "pathlib", "datetime", "decimal", "fractions"}
)
#: Classes of C whose objects have a state that functions of `snapshot.py` read and put back.
_SIMULATORS = frozenset(
    {
        "gymnasium.spaces.space:Space",
        "mujoco._structs:MjData",
        "dm_control.mujoco.engine:Physics",
        "ale_py._ale_py:ALEInterface",
    }
)
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: the class is not one of C's static types


class Graph:
    """The objects that can be reached from an env, by the path that leads to each.

    Attributes:
        owners: path -> object that is reached by attributes alone, "" for the env.
        simulators: path -> kind and object.
        packages: of the classes of all objects.
    """

    def __init__(self, env: Any) -> None:
        self.owners: dict[str, Any] = {}
        self.simulators: dict[str, tuple[str, Any]] = {}
        self.fixed: dict[str, Any] = {}
        self.paths: dict[int, str] = {}
        self.packages = set(_PACKAGES)
        self._classes: dict[str, type] = {}
        queue = [("", env, True)]
        seen = {id(env)}
        for path, one, is_owned in queue:  # grows: breadth first, so that a path is the shortest
            self._note(path, one, is_owned=is_owned)
            if path and (simulator_of(type(one)) is not None or is_fixed(one) or isinstance(one, enum.Enum)):
                continue
            for name, value, by_attribute in self._members(one):
                if id(value) not in seen and not isinstance(value, _PLAIN):
                    seen.add(id(value))
                    queue.append((f"{path}{name}", value, is_owned and by_attribute))
        self._alive = [one for _, one, _ in queue]  # ids are unique only among objects that live

    def _note(self, path: str, one: Any, *, is_owned: bool) -> None:
        cls = type(one)
        name = name_of(cls)
        self._classes.setdefault(name, cls)
        if (package := re.split(r"[.:]", name)[0]) not in sys.stdlib_module_names:
            self.packages.add(package)
        if (kind := simulator_of(cls)) is not None:
            self.simulators[path], self.paths[id(one)] = (kind, one), path
        elif isinstance(one, type):
            self._classes.setdefault(name_of(one), one)
        elif path and is_fixed(one):
            self.fixed[path], self.paths[id(one)] = one, path
        elif is_owned and is_python(cls) and not isinstance(one, enum.Enum):
            self.owners[path], self.paths[id(one)] = one, path

    def _members(self, one: Any) -> Iterator[tuple[str, Any, bool]]:
        """Yield what an object holds: the step from its path, the value, and whether it is an attribute."""
        if isinstance(one, dict):
            yield from ((f"[{key!r}]", value, False) for key, value in one.items())
        elif isinstance(one, _CONTAINERS) or type(one).__name__ == "deque":
            yield from ((f"[{position}]", value, False) for position, value in enumerate(one))
        if hasattr(one, "__dict__"):
            yield from ((f".{name}", value, True) for name, value in vars(one).items())

    def find_class(self, name: str) -> type:
        """Return a class that a state names: of an object that the env holds, or of one of their packages.

        Raises:
            ValueError: it is of another package, or no class.
        """
        if name in self._classes:
            return self._classes[name]
        module, _, qualname = name.partition(":")
        found: Any = sys.modules.get(module) if module.partition(".")[0] in self.packages else None
        for part in qualname.split("."):
            found = getattr(found, part, None)
        if not isinstance(found, type) or name_of(found) != name:
            raise ValueError(f"expected a state with objects of {sorted(self.packages)}, got one with {name}.")
        return found


def simulator_of(cls: type) -> str | None:
    """Return the name of the simulator that a class is, or None."""
    return next((name for base in cls.__mro__ if (name := name_of(base)) in _SIMULATORS), None)


def is_fixed(one: Any) -> bool:
    """Return whether an object is no state: a function, class, module, space, model or renderer."""
    if isinstance(one, (*_FUNCTIONS, type)):
        return True
    return any(name_of(base).replace(":", ".").startswith(_FIXED) for base in type(one).__mro__[:-1])


def is_picture(one: Any) -> bool:
    """Return whether an object only draws: an env makes it when it is first needed."""
    return name_of(type(one)).replace(":", ".").startswith(_DRAWING)


def is_python(cls: type) -> bool:
    """Return whether the objects of a class consist of their attributes, so that C code holds nothing of them."""
    return all(base.__flags__ & _HEAP_TYPE for base in cls.__mro__[:-1]) and (
        cls.__basicsize__ <= object.__basicsize__ + 2 * np.dtype(np.intp).itemsize  # for `__dict__` and weak references
        and cls.__dictoffset__ != 0
    )


def name_of(cls: type) -> str:
    """Return `module:QualName` of a class."""
    return f"{getattr(cls, '__module__', '')}:{cls.__qualname__}"  # SWIG's types have no module
