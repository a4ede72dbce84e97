"""Pickle objects for workers: what a script defines goes by value.

A worker never imports the user's script, so its functions and classes are pickled by value (cloudpickle). `Pickler`
also handles definitions that cloudpickle pickles by their name in the script, or not at all:
- caches and dispatchers of `functools`: a worker's copy has the parameters and the implementations, and is empty;
- locks, conditions, thread-local and weak containers in attributes of classes: a worker has its own, unlocked and
  empty, as a process that imports the script would have;
- classes whose metaclass or `__init_subclass__` has required arguments or must not run twice;
- names of the script that class statements inside functions use;
- aliases, functions and attributes of the members of an enum;
- `NewType` and its kind, and the sentinels of `dataclasses`.

A lock that a factory captures is refused: the copies of a lock in several processes exclude nobody. `find_culprit`
names the object that cannot be pickled, and the way to it.
Assumes: both processes run the same version of Python.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import enum
import functools
import gc
import inspect
import io
import pickle
import queue
import sys
import threading
import types
import typing
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle

_Reduced = tuple[Any, ...]

_LRU_CACHE = type(functools.lru_cache(len))
_KEY_WRAPPER = type(functools.cmp_to_key(lambda one, other: 0))  # noqa: ARG005
#: The function that `functools.singledispatch` returns has this code, whatever it dispatches.
_DISPATCHER = functools.singledispatch(len).__code__  # type: ignore[attr-defined]  # it is a function
_SENTINELS = {type(getattr(dataclasses, name)): name for name in ("MISSING", "KW_ONLY")}
_ALIAS_TYPE = getattr(typing, "TypeAliasType", None)  # Python 3.12
_IMMUTABLE = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE: classes of C
_MAX_DEPTH = 12  # links of the way to an object that cannot be pickled


def dumps(value: Any) -> bytes:
    """Return a value as a pickle for a worker; `pickle.loads` reads it."""
    file = io.BytesIO()
    Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # untyped
    """Pickles values for workers, which never run the script."""

    def __init__(self, file: Any, protocol: int | None = None) -> None:
        super().__init__(file, protocol=protocol)
        self._owned: set[int] = set()  # ids of objects in attributes of classes; the classes keep the objects alive

    def reducer_override(self, obj: Any) -> Any:
        """Return how to rebuild an object, or NotImplemented for pickle's own way."""
        if isinstance(obj, type):
            return super().reducer_override(obj) if _is_importable(obj) else self._reduce_class(obj)
        kind = type(obj)
        if id(obj) in self._owned and (fresh := _fresh(obj)):
            return fresh
        if kind in _SENTINELS:
            return getattr, (dataclasses, _SENTINELS[kind])
        reduce = _REDUCERS.get(kind)
        if kind is types.FunctionType and obj.__code__ is _DISPATCHER:
            reduce = _reduce_dispatcher
        if reduce is not None and not _is_importable(obj):
            return reduce(obj)
        if isinstance(obj, functools.cached_property):
            self._own(vars(obj).get("lock"))  # before Python 3.12
        reduced = super().reducer_override(obj)
        if kind is types.FunctionType and isinstance(reduced, tuple):
            _add_names_of_classes(obj, reduced)
        return reduced

    def _reduce_class(self, cls: type) -> Any:
        for value in vars(cls).values():
            self._own(value)
        reduced = super().reducer_override(cls)
        if not isinstance(reduced, tuple) or len(reduced) != 6:  # pickled by name
            return reduced
        make, arguments, state, *_, setter = reduced
        if issubclass(cls, enum.Enum):
            return _reduce_enum(cls, make, arguments, (setter, *state))
        if make.__name__ == "_make_skeleton_class":
            return (_make_class, (make, arguments, _has_hooks(cls)), *reduced[2:])
        return reduced

    def _own(self, value: Any) -> None:
        """Note an attribute of a class, and what it holds."""
        if id(value) in self._owned or isinstance(value, (type, types.ModuleType, types.FunctionType)):
            return
        if _fresh(value):
            self._owned.add(id(value))
            return
        held: list[Any] = []
        if isinstance(value, dict):
            held = list(value.values())
        elif isinstance(value, (list, tuple, set, frozenset)):
            held = list(value)
        elif hasattr(value, "__dict__"):
            held = list(vars(value).values())
        if held:
            self._owned.add(id(value))
            for one in held:
                self._own(one)


def _is_importable(obj: Any) -> bool:
    """Return whether a worker gets an object by importing its module."""
    module = sys.modules.get(getattr(obj, "__module__", None) or "")
    if module is None or module is sys.modules.get("__main__"):
        return False
    names = cloudpickle.list_registry_pickle_by_value()
    if any(module.__name__ == name or module.__name__.startswith(f"{name}.") for name in names):
        return False
    found: Any = module
    path = str(getattr(obj, "__qualname__", None) or getattr(obj, "__name__", ""))
    for name in path.split("."):
        found = getattr(found, name, None)
    return found is obj


def _add_names_of_classes(function: types.FunctionType, reduced: _Reduced) -> None:
    """Add the globals that class statements in a function use to what cloudpickle sends with it."""
    known = reduced[2][1]["__globals__"]
    for code in _codes_in(function.__code__):
        if not code.co_flags & inspect.CO_OPTIMIZED:  # the body of a class
            used = (name for name in code.co_names if name in function.__globals__)
            known.update((name, function.__globals__[name]) for name in used)


def _codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield the code of a function, and of the functions and classes in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes_in(constant)


# ---- functools ---------------------------------------------------------------------------------


def _reduce_cache(cache: Any) -> _Reduced:
    return _make_cache, (cache.__wrapped__, cache.cache_parameters()), vars(cache), None, None, _set_attributes


def _make_cache(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _reduce_dispatcher(dispatcher: Any) -> _Reduced:
    own = ("register", "dispatch", "registry", "_clear_cache", "__wrapped__")
    state = {name: value for name, value in vars(dispatcher).items() if name not in own}
    state |= {name: getattr(dispatcher, name) for name in functools.WRAPPER_ASSIGNMENTS if hasattr(dispatcher, name)}
    return _make_dispatcher, (dict(dispatcher.registry),), state, None, None, _set_attributes


def _make_dispatcher(implementations: dict[type, Callable[..., Any]]) -> Any:
    dispatcher = functools.singledispatch(implementations[object])
    for cls, implementation in implementations.items():
        dispatcher.register(cls, implementation)
    return dispatcher


def _reduce_key(key: Any) -> _Reduced:
    compare = next(one for one in gc.get_referents(key) if not isinstance(one, type))
    return functools.cmp_to_key, (compare,)


def _set_attributes(obj: Any, state: dict[str, Any]) -> None:
    for name, value in state.items():
        setattr(obj, name, value)


# ---- typing ------------------------------------------------------------------------------------


def _reduce_new_type(kind: Any) -> _Reduced:
    state = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return typing.NewType, (kind.__name__, kind.__supertype__), state, None, None, _set_attributes


def _reduce_parameters(parameters: Any) -> _Reduced:
    return type(parameters), (parameters.__name__,)


def _reduce_alias(alias: Any) -> _Reduced:
    return type(alias), (alias.__name__, alias.__value__)


#: Types whose objects pickle stores by their name -> how to rebuild them.
_REDUCERS: dict[type, Callable[[Any], _Reduced]] = {
    _LRU_CACHE: _reduce_cache,
    _KEY_WRAPPER: _reduce_key,
    typing.NewType: _reduce_new_type,
    typing.ParamSpec: _reduce_parameters,
}
if hasattr(typing, "TypeVarTuple"):  # from Python 3.11: a worker may be older
    _REDUCERS[typing.TypeVarTuple] = _reduce_parameters
if _ALIAS_TYPE:
    _REDUCERS[_ALIAS_TYPE] = _reduce_alias


# ---- attributes of classes ---------------------------------------------------------------------


def _reduce_variable(variable: contextvars.ContextVar[Any]) -> _Reduced:
    try:
        default = contextvars.Context().run(variable.get)
    except LookupError:
        return contextvars.ContextVar, (variable.name,)
    return _make_variable, (variable.name, default)


def _make_variable(name: str, default: Any) -> contextvars.ContextVar[Any]:
    return contextvars.ContextVar(name, default=default)


#: Types of objects that each process has for itself -> how to make an unused one.
_FRESH: dict[type, Callable[[Any], _Reduced]] = {
    type(threading.Lock()): lambda _: (threading.Lock, ()),
    type(threading.RLock()): lambda _: (threading.RLock, ()),
    queue.SimpleQueue: lambda _: (queue.SimpleQueue, ()),
    weakref.WeakValueDictionary: lambda _: (weakref.WeakValueDictionary, ()),
    weakref.WeakKeyDictionary: lambda _: (weakref.WeakKeyDictionary, ()),
    weakref.WeakSet: lambda _: (weakref.WeakSet, ()),
    contextvars.ContextVar: _reduce_variable,
}


def _fresh(obj: Any) -> _Reduced | None:
    """Return how to make an unused object of the same kind, or None if the kind is not in the table."""
    if isinstance(obj, threading.local):
        return type(obj), ()
    return _FRESH[type(obj)](obj) if type(obj) in _FRESH else None


# ---- classes -----------------------------------------------------------------------------------


def _has_hooks(cls: type) -> bool:
    """Return whether making the class runs code of the script, whose results are attributes that are pickled also."""
    bases = cls.__mro__[1:]
    hooked = [base for base in bases if "__init_subclass__" in vars(base) and not _is_importable(base)]
    return bool(hooked) or not _is_importable(type(cls))


def _make_class(make: Callable[..., type], arguments: tuple[Any, ...], has_hooks: bool) -> type:  # noqa: FBT001
    """Make a class without attributes; if hooks have run where it was defined, or fail here, without them.

    Args:
        make: makes a class of a metaclass, a name, bases and more.
        arguments: of `make`.
        has_hooks: see `_has_hooks`.
    """
    if not has_hooks:
        with contextlib.suppress(Exception):  # a hook of a library wants the keywords of the class statement
            return make(*arguments)
    meta, name, bases, *more = arguments
    with _quiet(bases[0]):
        return make(functools.partial(_call_type, meta), name, bases, *more)


@contextlib.contextmanager
def _quiet(base: type) -> Iterator[None]:
    """Let no `__init_subclass__` run for a class whose first base this is."""
    if base.__flags__ & _IMMUTABLE:
        yield
        return
    own = vars(base).get("__init_subclass__")
    type.__setattr__(base, "__init_subclass__", classmethod(lambda _: None))
    try:
        yield
    finally:
        if own is None:
            type.__delattr__(base, "__init_subclass__")
        else:
            type.__setattr__(base, "__init_subclass__", own)


def _call_type(meta: type, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> Any:
    """Make a class with the first metaclass of `meta` and its bases that a library defines and that can make it."""
    kinds = [kind for kind in meta.__mro__ if issubclass(kind, type) and _is_importable(kind)]
    for kind in kinds[:-1]:
        try:
            return kind.__new__(meta, name, bases, namespace)
        except Exception:  # it wants the keywords of the class statement
            continue
    return type.__new__(meta, name, bases, namespace)


#: Attributes of an enum's member that `enum` sets.
_OF_MEMBERS = frozenset({"_value_", "_name_", "_sort_order_", "__objclass__"})


def _reduce_enum(kind: type[enum.Enum], make: Any, arguments: tuple[Any, ...], state: tuple[Any, ...]) -> _Reduced:
    """Return how to rebuild an enum, with what cloudpickle leaves out: aliases, functions and attributes of members."""
    values = {name: member.value for name, member in kind.__members__.items()}
    members = {name: enum.member(value) if callable(value) else value for name, value in values.items()}
    setter, attributes, slots = state
    attributes = {name: value for name, value in attributes.items() if name not in members}
    own = {
        name: {key: value for key, value in vars(member).items() if key not in _OF_MEMBERS}
        for name, member in kind.__members__.items()
    }
    arguments = (*arguments[:3], members, *arguments[4:])
    return make, arguments, (setter, (attributes, slots), own), None, None, _set_members


def _set_members(kind: type[enum.Enum], state: tuple[Callable[..., None], Any, dict[str, dict[str, Any]]]) -> None:
    set_attributes, attributes, own = state
    set_attributes(kind, attributes)
    for name, values in own.items():
        vars(kind[name]).update(values)


# ---- what cannot be pickled --------------------------------------------------------------------


def captures(factory: Any) -> Iterator[tuple[str, Any]]:
    """Yield `(variable name, value)` of what a callable captures: closure, globals used, defaults, bound objects."""
    if isinstance(factory, functools.partial):
        yield from ((f"argument {i}", value) for i, value in enumerate(factory.args))
        yield from factory.keywords.items()
        yield from captures(factory.func)
    elif inspect.ismethod(factory):
        yield "self", factory.__self__
    elif isinstance(factory, types.FunctionType):
        for name, cell in zip(factory.__code__.co_freevars, factory.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # nothing was assigned to the variable yet
                yield name, cell.cell_contents
        used = dict.fromkeys(name for code in _codes_in(factory.__code__) for name in code.co_names)
        yield from ((name, factory.__globals__[name]) for name in used if name in factory.__globals__)
        defaults = inspect.signature(factory, follow_wrapped=False).parameters.values()
        yield from ((p.name, p.default) for p in defaults if p.default is not p.empty)
        yield from vars(factory).items()
    elif isinstance(factory, _LRU_CACHE):
        yield from captures(factory.__wrapped__)
    else:
        yield from getattr(factory, "__dict__", {}).items()


def find_culprit(value: Any) -> list[tuple[str, Any]]:
    """Return the way from an object that cannot be pickled to the cause: pairs of a name and the object.

    Returns:
        empty if the object holds nothing that fails alone.
    """
    way: list[tuple[str, Any]] = []
    seen = {id(value)}
    while len(way) < _MAX_DEPTH:
        found = next(((name, one) for name, one in _held_by(value) if id(one) not in seen and _fails(one)), None)
        if found is None:
            break
        way.append(found)
        value = found[1]
        seen.add(id(value))
    return way


def _held_by(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", one) for key, one in value.items())
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"[{index}]", one) for index, one in enumerate(value))
    elif isinstance(value, (staticmethod, classmethod)):
        yield value.__func__.__name__, value.__func__
    elif isinstance(value, property):
        yield from ((one.__name__, one) for one in (value.fget, value.fset, value.fdel) if one is not None)
    elif isinstance(value, type):
        if not _is_importable(value):
            yield from ((name, one) for name, one in vars(value).items() if name not in ("__dict__", "__weakref__"))
            yield from ((base.__qualname__, base) for base in (*value.__bases__, type(value)))
    elif callable(value) or not _is_importable(type(value)):
        yield from captures(value)


def _fails(value: Any) -> bool:
    try:
        dumps(value)
    except Exception:
        return True
    return False
