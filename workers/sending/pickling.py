"""Pickle objects for workers: what a script defines goes by value.

A worker never imports the user's script, so its functions and classes are pickled by value (cloudpickle), and so are
those of other modules that no worker can import, as `importing.goes_by_name` decides. In a worker, they are also
attributes of the module in which they were defined. `Pickler` also handles definitions that cloudpickle pickles by
their name in the script, or not at all:
- caches and dispatchers of `functools`: a worker's copy has the parameters and the implementations, and is empty;
- locks that are attributes of classes: a worker has its own, unlocked, as a process that imports the script would have;
- classes whose metaclass or `__init_subclass__` has required arguments or must not run twice;
- names of the script that class statements inside functions use;
- attributes of the members of an enum;
- `NewType` and its kind, and the sentinels of `dataclasses`.

A lock that a factory captures is refused: the copies of a lock in several processes exclude nobody. But what a module
that workers import holds, such as its logger, goes by its name if it cannot be pickled. `find_culprit` names the object
that cannot be pickled, and the way to it.
Assumes: both processes run the same version of Python.
"""

import contextlib
import dataclasses
import enum
import functools
import importlib
import inspect
import io
import pickle
import sys
import threading
import types
import typing
from collections.abc import Callable, Iterator
from multiprocessing import reduction
from typing import Any, NamedTuple

import cloudpickle
from cloudpickle import cloudpickle as private

from envherd.workers.sending.importing import (
    SCRIPT,
    can_import,
    codes_in,
    goes_by_name,
)
from envherd.workers.sending.sharing import reduce_shared, sharing

_Reduced = tuple[Any, ...]

_LRU_CACHE = type(functools.lru_cache(len))
#: The function that `functools.singledispatch` returns has this code, whatever it dispatches.
_DISPATCHER = functools.singledispatch(len).__code__  # type: ignore[attr-defined]  # it is a function
_LOCKS: dict[type, Callable[[], Any]] = {
    type(threading.Lock()): threading.Lock,
    type(threading.RLock()): threading.RLock,
}
_SENTINELS = {type(getattr(dataclasses, name)): name for name in ("MISSING", "KW_ONLY")}
_IMMUTABLE = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE: classes of C
_HEAP = 1 << 9  # Py_TPFLAGS_HEAPTYPE: not static in C
_MAX_DEPTH = 12  # links of the way to an object that cannot be pickled


def dumps(value: Any, *, shares: bool = False) -> bytes:
    """Return a value as a pickle for a worker; `pickle.loads` reads it.

    Args:
        value: any.
        shares: objects that processes share are not copied; the pickle is for workers of this process.
    """
    named: _Names = {}
    with sharing() if shares else contextlib.nullcontext():
        while True:
            try:
                return _dumps(value, named)
            except Exception:
                found = _nameable(value, named)
                if found is None:
                    raise
            named.update(found)


def _dumps(value: Any, named: "_Names") -> bytes:
    file = io.BytesIO()
    pickler = Pickler(file, protocol=pickle.HIGHEST_PROTOCOL)
    pickler.named = named
    pickler.dump(value)
    return file.getvalue()


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # untyped
    """Pickles values for workers, which never run the script.

    Attributes:
        named: objects that go by their name.
    """

    named: "_Names" = {}  # noqa: RUF012  # never changed

    def __init__(self, file: Any, protocol: int | None = None) -> None:
        super().__init__(file, protocol=protocol)
        # Ids of locks that are attributes of classes, which keep them alive.
        self._locks: set[int] = set()

    def reducer_override(self, obj: Any) -> Any:
        """Return how to rebuild an object, or NotImplemented for pickle's own way."""
        if isinstance(obj, type):
            if not _is_importable(obj):
                return self._reduce_class(obj)
            return super().reducer_override(obj)
        reduced = self._reduce_special(obj)
        if reduced is not None:
            return reduced
        reduced = super().reducer_override(obj)
        if type(obj) is not types.FunctionType or _is_importable(obj):
            return reduced
        if reduced is NotImplemented:  # it has a name, which workers lack
            reduced = self._dynamic_function_reduce(obj)
        _add_names_of_classes(obj, reduced)
        return _with_place(obj, reduced)

    def _reduce_special(self, obj: Any) -> Any:
        """Return how to rebuild an object that cloudpickle would pickle in another way, or None."""
        kind = type(obj)
        if id(obj) in self.named:
            return _look_up, self.named[id(obj)]
        if id(obj) in self._locks:
            return _LOCKS[kind], ()
        if kind in _SENTINELS:
            return getattr, (dataclasses, _SENTINELS[kind])
        if isinstance(obj, types.ModuleType):
            return self._reduce_module(obj)
        if kind in _REDUCERS and not _is_importable(obj):
            return _REDUCERS[kind](obj)
        if kind is types.FunctionType and obj.__code__ is _DISPATCHER:
            return None if _is_importable(obj) else _reduce_dispatcher(obj)
        return reduce_shared(obj)

    def _reduce_module(self, module: types.ModuleType) -> Any:
        name = module.__name__
        is_here = module is sys.modules.get(name)
        if is_here and (name in SCRIPT or goes_by_name(name)):
            return importlib.import_module, (name,)
        state = {
            key: value for key, value in vars(module).items() if key not in _OF_IMPORTS
        }
        return (
            types.ModuleType,
            (name,),
            (state, is_here and not can_import(name)),
            None,
            None,
            _set_module,
        )

    def _reduce_class(self, cls: type) -> Any:
        self._locks.update(id(one) for one in vars(cls).values() if type(one) in _LOCKS)
        reduced = super().reducer_override(cls)
        if (
            reduced is NotImplemented
            and cls.__flags__ & _HEAP
            and not goes_by_name(cls.__module__)
        ):
            reduced = private._dynamic_class_reduce(cls)  # noqa: SLF001  # it has a name, which workers lack
        if not isinstance(reduced, tuple) or len(reduced) != 6:  # pickled by name
            return reduced
        make, arguments, state, *_, setter = reduced
        if issubclass(cls, enum.Enum):
            # cloudpickle leaves out aliases, functions that are members, and the attributes of members.
            members = {
                name: enum.member(one.value) if callable(one.value) else one.value
                for name, one in cls.__members__.items()
            }
            attributes, slots = state
            attributes = {
                name: value for name, value in attributes.items() if name not in members
            }
            own = {
                member.name: {
                    name: value
                    for name, value in vars(member).items()
                    if name not in _OF_MEMBERS
                }
                for member in cls
            }
            reduced = (
                make,
                (*arguments[:3], members, *arguments[4:]),
                (setter, (attributes, slots), own),
                *(None, None),
                _set_members,
            )
        elif make.__name__ == "_make_skeleton_class":
            reduced = (_make_class, (make, arguments, _has_hooks(cls)), *reduced[2:])
        return _with_place(cls, reduced)


def _is_importable(obj: Any) -> bool:
    """Return whether a worker gets an object by importing its module."""
    module = getattr(obj, "__module__", None)
    return isinstance(module, str) and goes_by_name(module) and _is_named(obj)


def _is_named(obj: Any) -> bool:
    """Return whether an object is found by its name in its module."""
    found: Any = sys.modules.get(obj.__module__)
    path = str(getattr(obj, "__qualname__", None) or getattr(obj, "__name__", ""))
    for name in path.split("."):
        found = getattr(found, name, None)
    return found is obj


# ---- where definitions are in a worker ---------------------------------------------------------


class Script(types.ModuleType):
    """The `__main__` of a worker: what the factories use of the script."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"module '__main__' has no attribute {name!r}: workers do not run the script. They have what the factory "
            f"uses. Use {name} in the factory, or define it in a module that they import"
        )


_script: Script | None = None


def enter_script(script: Script) -> None:
    """Make a module the `__main__` of this process, a worker."""
    global _script  # noqa: PLW0603
    _script = script
    sys.modules.update(dict.fromkeys(SCRIPT, script))
    reduction.ForkingPickler.reducer_override = _reduce_for_children  # type: ignore[method-assign]


def _reduce_for_children(_: Any, obj: Any) -> Any:
    """Return how a process that an env spawns gets one of the script's definitions: it does not run the script either.

    Without that, a pool of spawned processes would start one after another, without end.
    """
    if not isinstance(obj, (type, types.FunctionType)) or obj.__module__ not in SCRIPT:
        return NotImplemented
    try:
        pickled = dumps(obj)
    # It uses what the env has made. A forked process has it by its name.
    except Exception:
        return NotImplemented
    # Of what another factory of this worker uses, `__main__` has the first one's under the same name.
    if not _is_named(obj):
        return pickle.loads, (pickled,)
    return _define, (obj.__qualname__, pickled)


def _define(name: str, pickled: bytes) -> Any:
    """Return the script's definition of a name; define it, if this process has none."""
    script = sys.modules["__main__"]
    if not hasattr(script, name):
        setattr(script, name, pickle.loads(pickled))
    return getattr(script, name)


def _with_place(obj: Any, reduced: _Reduced) -> _Reduced:
    """Make what `reduced` builds an attribute of its module in a worker, if it is one here and a worker lacks that."""
    place = (
        obj.__module__
        if obj.__module__ in sys.modules and not can_import(obj.__module__)
        else None
    )
    name = obj.__name__ if "." not in obj.__qualname__ and _is_named(obj) else None
    make, arguments, state, *_, setter = reduced
    return make, arguments, (setter, state, place, name), None, None, _set_definition


def _set_definition(
    obj: Any,
    what: tuple[Callable[[Any, Any], Any], Any, str | None, str | None],
) -> None:
    setter, state, place, name = what
    setter(obj, state)
    if place is None or _script is None:
        return
    module = (
        _script
        if place in SCRIPT
        else sys.modules.setdefault(place, types.ModuleType(place))
    )
    used = getattr(obj, "__globals__", {})
    if name is not None:
        vars(module).setdefault(name, obj)
    # Otherwise it is a function with the name and place of another one, by `functools.wraps`.
    if used.get("__name__") == place:
        for key, value in list(used.items()):
            # All but `__file__` and its kind, with which it would look like an imported module.
            if not key.startswith("__") or key == "__path__":
                vars(module).setdefault(key, value)


#: Attributes of modules that imports set.
_OF_IMPORTS = frozenset({"__builtins__", "__cached__", "__loader__", "__spec__"})


def _set_module(module: types.ModuleType, value: tuple[dict[str, Any], bool]) -> None:
    state, is_lacking = value
    vars(module).update(state)
    if is_lacking and _script is not None:
        sys.modules[module.__name__] = module


# ---- by name, because it cannot be pickled -----------------------------------------------------

#: id of an object -> names of a module and of its attribute.
_Names = dict[int, tuple[str, str]]


def _look_up(module: str, name: str) -> Any:
    holder = importlib.import_module(module)
    if not hasattr(holder, name):
        raise AttributeError(
            f"expected {module} to have {name!r} after its import, got none: the script has set it, and it cannot be "
            f"pickled. Make it in {module}, or in the factory"
        )
    return getattr(holder, name)


def _nameable(value: Any, named: _Names) -> _Names | None:
    """Return the name of an object that keeps a value from being pickled, if a module that workers import holds it."""
    for _, obj in _way_to_culprit(value, named):
        if not isinstance(obj, (type, types.FunctionType)):
            package = type(obj).__module__.partition(".")[0]
            own_first = sorted(
                sys.modules, key=lambda module: module.partition(".")[0] != package
            )
            held = (
                (module, name)
                for module in own_first
                for name, one in list(
                    getattr(sys.modules.get(module), "__dict__", {}).items()
                )
                if one is obj and goes_by_name(module)
            )
            found = next(held, None)
            if found is not None:
                return {id(obj): found}
    return None


def _add_names_of_classes(function: types.FunctionType, reduced: _Reduced) -> None:
    """Add the globals that class statements in a function use to what cloudpickle sends with it."""
    known = reduced[2][1]["__globals__"]
    for code in codes_in(function.__code__):
        # The body of a class, or from Python 3.14 on its annotations, which are evaluated when they are read.
        if not code.co_flags & inspect.CO_OPTIMIZED or code.co_name == "__annotate__":
            used = (name for name in code.co_names if name in function.__globals__)
            known.update((name, function.__globals__[name]) for name in used)


# ---- functools, typing -------------------------------------------------------------------------


def _make_cache(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _reduce_dispatcher(dispatcher: Any) -> _Reduced:
    own = ("register", "dispatch", "registry", "_clear_cache", "__wrapped__")
    state = {name: value for name, value in vars(dispatcher).items() if name not in own}
    state |= {
        name: getattr(dispatcher, name)
        for name in functools.WRAPPER_ASSIGNMENTS
        if hasattr(dispatcher, name)
    }
    return (
        _make_dispatcher,
        (dict(dispatcher.registry),),
        state,
        None,
        None,
        _set_attributes,
    )


def _make_dispatcher(implementations: dict[type, Callable[..., Any]]) -> Any:
    dispatcher = functools.singledispatch(implementations[object])
    for cls, implementation in implementations.items():
        dispatcher.register(cls, implementation)
    return dispatcher


def _set_attributes(obj: Any, state: dict[str, Any]) -> None:
    for name, value in state.items():
        setattr(obj, name, value)


def _reduce_parts(names: list[str], one: Any) -> _Reduced:
    return type(one), tuple(getattr(one, name) for name in names)


#: Types whose objects pickle stores by their name, or not at all -> how to rebuild them.
_REDUCERS: dict[type, Callable[[Any], _Reduced]] = {
    _LRU_CACHE: lambda cache: (
        _make_cache,
        (cache.__wrapped__, cache.cache_parameters()),
        vars(cache),
        None,
        None,
        _set_attributes,
    ),
    # Before Python 3.12 it has a lock.
    functools.cached_property: lambda one: (
        functools.cached_property,
        (one.func,),
        {"attrname": one.attrname, "__doc__": one.__doc__},
        None,
        None,
        _set_attributes,
    ),
    typing.NewType: lambda kind: (
        typing.NewType,
        (kind.__name__, kind.__supertype__),
        {"__module__": kind.__module__, "__qualname__": kind.__qualname__},
        None,
        None,
        _set_attributes,
    ),
    # A worker's Python may be older than the caller's.
    **{
        getattr(typing, kind): functools.partial(_reduce_parts, names)
        for kind, names in {
            "ParamSpec": ["__name__"],
            "TypeVarTuple": ["__name__"],
            "TypeAliasType": ["__name__", "__value__"],
        }.items()
        if hasattr(typing, kind)
    },
    typing.TypeVar: lambda variable: (
        private._make_typevar,  # noqa: SLF001
        private._decompose_typevar(variable),  # noqa: SLF001
    ),
}


# ---- classes -----------------------------------------------------------------------------------


def _has_hooks(cls: type) -> bool:
    """Return whether making the class runs code of the script, whose results are attributes that are pickled also."""
    return not _is_importable(type(cls)) or any(
        "__init_subclass__" in vars(base) and not _is_importable(base)
        for base in cls.__mro__[1:]
    )


def _make_class(
    make: Callable[..., type],
    arguments: tuple[Any, ...],
    has_hooks: bool,  # noqa: FBT001
) -> type:
    """Make a class without attributes, and without its hooks if they have run where it was defined.

    Args:
        make: makes a class of a metaclass, a name, bases and more.
        arguments: of `make`.
        has_hooks: whether `_has_hooks` has found any.
    """
    if not has_hooks:
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


def _call_type(
    meta: type,
    name: str,
    bases: tuple[type, ...],
    namespace: dict[str, Any],
) -> Any:
    """Make a class with the first of a metaclass and its bases that workers import."""
    kind = next(kind for kind in meta.__mro__ if _is_importable(kind))
    return kind.__new__(meta, name, bases, namespace)


#: Attributes of an enum's member that `enum` sets.
_OF_MEMBERS = frozenset({"_value_", "_name_", "_sort_order_", "__objclass__"})


def _set_members(
    kind: type[enum.Enum],
    state: tuple[Callable[..., None], Any, dict[str, dict[str, Any]]],
) -> None:
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
        for name, cell in zip(
            factory.__code__.co_freevars,
            factory.__closure__ or (),
            strict=True,
        ):
            # Nothing was assigned to the variable yet.
            with contextlib.suppress(ValueError):
                yield name, cell.cell_contents
        used = dict.fromkeys(
            name for code in codes_in(factory.__code__) for name in code.co_names
        )
        yield from (
            (name, factory.__globals__[name])
            for name in used
            if name in factory.__globals__
        )
        defaults = inspect.signature(factory, follow_wrapped=False).parameters.values()
        yield from ((p.name, p.default) for p in defaults if p.default is not p.empty)
        yield from vars(factory).items()
    elif isinstance(factory, _LRU_CACHE):
        yield from captures(factory.__wrapped__)
    else:
        yield from getattr(factory, "__dict__", {}).items()


class Link(NamedTuple):
    """A step of the way to an object: its name in what holds it, and the object."""

    name: str
    value: Any


def find_culprit(value: Any) -> list[Link]:
    """Return the way from an object that cannot be pickled to the cause.

    Returns:
        empty if the object holds nothing that fails alone.
    """
    named: _Names = {}
    with sharing():
        while found := _nameable(value, named):
            named.update(found)
        return _way_to_culprit(value, named)


def _way_to_culprit(value: Any, named: _Names) -> list[Link]:
    way: list[Link] = []
    seen = {id(value)}
    while len(way) < _MAX_DEPTH:
        found = next(
            (
                Link(name, one)
                for name, one in _held_by(value)
                if id(one) not in seen and _fails(one, named)
            ),
            None,
        )
        if found is None:
            break
        way.append(found)
        value = found.value
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
        yield from (
            (one.__name__, one)
            for one in (value.fget, value.fset, value.fdel)
            if one is not None
        )
    elif isinstance(value, type):
        if not _is_importable(value):
            yield from (
                (name, one)
                for name, one in vars(value).items()
                if name not in ("__dict__", "__weakref__") and type(one) not in _LOCKS
            )
            yield from (
                (base.__qualname__, base) for base in (*value.__bases__, type(value))
            )
    elif callable(value) or not _is_importable(type(value)):
        yield from captures(value)


def _fails(value: Any, named: _Names) -> bool:
    try:
        _dumps(value, named)
    except Exception:
        return True
    return False
