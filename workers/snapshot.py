"""Save and restore the state of an env that is written in Python: its attributes, wrappers and generators.

Guarantees:
- A state is data: `restore` imports nothing, and makes only objects of numpy, of the standard containers, and of
  classes of the packages that the env's own objects come from.
- `restore` changes nothing if the state is of another env.
- What one name refers to by two attributes is one object again afterwards.

How: objects that are reached by attributes alone (the env, its wrappers, a task) are changed in place, because others
may hold them. What they hold is copied by value. Functions, classes, modules, models, spaces and renderers stay as they
are: a state refers to them by the path that leads to them, e.g. `env.unwrapped.model`. Simulators in C are saved by
functions of their own (`_SIMULATORS`); any other object of an extension refuses.
"""

from __future__ import annotations

import copyreg
import enum
import functools
import io
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import numpy as np

from envherd.workers.env_graph import Graph, is_fixed, is_picture, is_python, name_of, simulator_of


class Unsaveable(NotImplementedError):
    """An env that holds an object whose state cannot be read."""


def save(env: Any) -> dict[str, Any]:
    """Return the state of an env, as plain data.

    Raises:
        Unsaveable: names the attribute that cannot be saved.
    """
    graph = Graph(env)
    owners = graph.owners
    try:
        held = _dump(graph, {path: vars(owner) for path, owner in owners.items()})
    except Exception as error:
        raise Unsaveable(_first_unsaveable(graph) or f"{type(error).__name__}: {error}") from error
    simulators = {path: _SIMULATORS[kind][0](one) for path, (kind, one) in graph.simulators.items()}
    return {
        "classes": {path: name_of(type(owner)) for path, owner in owners.items()},
        "held": held,
        "simulators": simulators,
    }


def restore(env: Any, state: Any) -> None:
    """Restore a state from `save`, of this env or of another one that an equal call has built.

    Raises:
        ValueError: the state is of another env, or no state.
    """
    if not (isinstance(state, Mapping) and {"classes", "held", "simulators"} <= state.keys()):
        raise ValueError(f"expected what state_dict() or save() returned of this env, got a {type(state).__name__}.")
    graph = Graph(env)
    owners = {path: _owner(graph, path, name) for path, name in state["classes"].items()}
    missing = sorted(state["simulators"].keys() ^ graph.simulators.keys())
    if missing:
        raise ValueError(f"expected the state of an env with equal simulators, got another one of env{missing[0]}.")
    held = _Unpickler(io.BytesIO(state["held"]), graph, owners).load()
    for path, attributes in held.items():
        present = vars(owners[path])
        pictures = {name: value for name, value in present.items() if is_picture(value)}
        present.clear()
        present.update({**attributes, **pictures})
    for path, values in state["simulators"].items():
        kind, one = graph.simulators[path]
        _SIMULATORS[kind][1](one, values)


def _owner(graph: Graph, path: str, name: str) -> Any:
    """Return the object at a path, or a new one where the env holds none of this class now."""
    live = graph.owners.get(path)
    if live is not None and name_of(type(live)) == name:
        return live
    if path == "" or hasattr(live, "step"):
        raise ValueError(f"expected the state of a {_words(live)}, got one of a {name.replace(':', '.')}.")
    return object.__new__(graph.find_class(name))


# ---- values ------------------------------------------------------------------------------------


def _put(one: Any, attributes: dict[str, Any]) -> None:
    """Set all attributes of a new object, without a `__setstate__`, which might build an env."""
    vars(one).update(attributes)


def _as_tensor(array: np.ndarray) -> Any:
    return sys.modules["torch"].from_numpy(array)


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, graph: Graph) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._graph = graph

    def persistent_id(self, obj: Any) -> str | None:
        if (path := self._graph.paths.get(id(obj))) is not None:
            return f"{'picture' if is_picture(obj) else 'at'} {path}"
        if isinstance(obj, type) and obj.__module__ != "builtins":
            return f"class {name_of(obj)}"
        return None

    def reducer_override(self, obj: Any) -> Any:
        if is_fixed(obj) or type(obj).__name__ == "SwigPyObject":
            if obj in _MAKERS.values():
                return NotImplemented
            raise Unsaveable(f"a {_words(obj)}")
        if name_of(type(obj)) == "torch:Tensor":
            return _as_tensor, (obj.detach().cpu().numpy(),)
        if isinstance(obj, enum.Enum):
            return type(obj), (obj.value,)
        if is_python(type(obj)):
            return copyreg.__newobj__, (type(obj),), vars(obj), None, None, _put  # type: ignore[attr-defined]
        return NotImplemented


def _dump(graph: Graph, value: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file, graph).dump(value)
    return file.getvalue()


class _Unpickler(pickle._Unpickler):  # noqa: SLF001  # the one in C cannot refuse calls
    """Reads a state; it calls nothing but constructors of data."""

    stack: list[Any]
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(pickle._Unpickler.dispatch)  # noqa: SLF001

    def _call(self, load: Callable[[Any], None]) -> None:
        called = self.stack[-2]
        is_data = isinstance(called, type) and (issubclass(called, enum.Enum) or name_of(called) in _DATA)
        if not is_data and not any(called is maker for maker in _MAKERS.values()):
            raise ValueError(f"expected a state that consists of data, got one that calls {called!r:.80}.")
        load(self)

    def _build(self, load: Callable[[Any], None]) -> None:
        if is_python(type(self.stack[-2])):  # a `__setstate__` might build an env
            raise ValueError(f"expected a state that consists of data, got one that builds {self.stack[-2]!r:.80}.")
        load(self)

    dispatch[pickle.REDUCE[0]] = functools.partial(_call, load=dispatch[pickle.REDUCE[0]])
    dispatch[pickle.BUILD[0]] = functools.partial(_build, load=dispatch[pickle.BUILD[0]])
    for _code in (pickle.OBJ, pickle.INST, pickle.NEWOBJ_EX):
        del dispatch[_code[0]]

    def __init__(self, file: io.BytesIO, graph: Graph, owners: Mapping[str, Any]) -> None:
        super().__init__(file)
        self._graph, self._owners = graph, owners

    def persistent_load(self, pid: str) -> Any:
        kind, _, name = pid.partition(" ")
        if kind == "class":
            return self._graph.find_class(name)
        if name in self._owners:
            return self._owners[name]
        if name in self._graph.simulators:
            return self._graph.simulators[name][1]
        if name not in self._graph.fixed:
            if kind == "picture":
                return None
            raise ValueError(f"expected an env that holds an equal object at env{name}, got one without.")
        return self._graph.fixed[name]

    def find_class(self, module: str, name: str) -> Any:
        """Return one of the functions that make values; a state may name no others."""
        if (module, name) in _MAKERS:
            return _MAKERS[module, name]
        if module == "torch" and name_of(type(found := getattr(sys.modules["torch"], name, None))) == "torch:dtype":
            return found
        raise ValueError(f"expected a state that consists of data, got one that calls {module}.{name}.")


def _makers() -> dict[tuple[str, str], Callable[..., Any]]:
    """Return what pickles of numpy's and the standard library's values call, by module and name."""
    found: list[Any] = [_put, _as_tensor, set, frozenset, bytearray, complex, slice, range]
    array, number = np.zeros(1), np.float64(0)
    found += [array.__reduce__()[0], number.__reduce__()[0], array.__reduce_ex__(pickle.HIGHEST_PROTOCOL)[0]]
    for bits in (np.random.PCG64(), np.random.MT19937()):
        found += [bits.__reduce__()[0], np.random.Generator(bits).__reduce__()[0]]
    found += [np.random.RandomState().__reduce__()[0], np.random.SeedSequence(0).__reduce__()[0]]
    return {(one.__module__, one.__qualname__): one for one in found}


_MAKERS = _makers()
#: Classes that a state may call.
_DATA = frozenset(
    f"{module}:{name}"
    for module, names in (
        ("numpy", "dtype ndarray"),
        ("collections", "OrderedDict Counter deque defaultdict"),
        ("random", "Random"),
        ("torch", "device Size"),
        ("pygame.rect", "Rect FRect"),
        ("pygame.math", "Vector2 Vector3"),
        ("pygame.color", "Color"),
        ("pathlib", "PosixPath PurePosixPath"),
        ("datetime", "datetime timedelta date"),
        ("decimal", "Decimal"),
        ("fractions", "Fraction"),
    )
    for name in names.split()
)


def _first_unsaveable(graph: Graph) -> str | None:
    """Return which attribute cannot be saved, in words."""
    for owner in graph.owners.values():
        for name, value in vars(owner).items():
            try:
                _dump(graph, value)
            except Exception as error:  # of any object
                why = str(error) if isinstance(error, Unsaveable) else f"{type(error).__name__}: {error}"
                return f"its attribute {type(owner).__name__}.{name} is a {_words(value)} ({why})"
    return None


def _words(value: Any) -> str:
    name = name_of(type(value)).removeprefix("builtins:").replace(":", ".")
    return "C++ object, wrapped by SWIG" if name == ".SwigPyObject" else name


# ---- simulators in C ---------------------------------------------------------------------------


def _save_mujoco(data: Any) -> dict[str, Any]:
    """Return all that the next steps read: the integrator's state, and the arrays that the last step has computed."""
    mujoco = sys.modules["mujoco"]
    kind = mujoco.mjtState.mjSTATE_INTEGRATION
    state = np.empty(mujoco.mj_stateSize(data.model, kind))
    mujoco.mj_getState(data.model, data, state, kind)
    computed = {name: _packed(array) for name, array in _arrays(data)}
    model = {name: _packed(array) for name, array in _arrays(data.model)}  # tasks move targets and change masses in it
    return {"state": _packed(state), "computed": computed, "model": model}


def _restore_mujoco(data: Any, saved: Mapping[str, Any]) -> None:
    mujoco = sys.modules["mujoco"]
    _copy(saved["model"], data.model)
    mujoco.mj_setState(data.model, data, _unpacked(saved["state"]), mujoco.mjtState.mjSTATE_INTEGRATION)
    mujoco.mj_forward(data.model, data)  # contacts and constraints
    _copy(saved["computed"], data)


def _copy(saved: Mapping[str, list[Any]], to: Any) -> None:
    for name, array in _arrays(to):
        if (before := saved.get(name)) is not None and tuple(before[1]) == array.shape:
            array[...] = _unpacked(before)


def _packed(array: np.ndarray) -> list[Any]:
    """Return an array as dtype, shape and bytes, which `torch.load` reads without pickles."""
    return [array.dtype.str, list(array.shape), array.tobytes()]


def _unpacked(packed: list[Any]) -> np.ndarray:
    dtype, shape, data = packed
    return np.frombuffer(data, dtype).reshape(shape)


def _arrays(one: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the arrays of fixed size of an `MjData` or `MjModel` by name, without meshes and textures."""
    for name in dir(one):
        if not name.startswith(("_", "efc_", "contact", "iefc_", "island", "mesh_", "tex_", "skin_", "bvh_", "names")):
            value = getattr(one, name)
            if isinstance(value, np.ndarray) and value.flags.writeable and value.size:
                yield name, value


def _save_ale(ale: Any) -> bytes:
    if ale.getFloat("repeat_action_probability") > 0:
        raise Unsaveable(
            "ALE does not report which action its sticky actions repeat: make the env with repeat_action_probability=0"
        )
    state: bytes = ale.cloneState(include_rng=True).__getstate__()
    return state


def _restore_ale(ale: Any, state: bytes) -> None:
    ale.restoreState(sys.modules["ale_py"].ALEState(state))


def _save_physics(physics: Any) -> dict[str, Any]:
    return _save_mujoco(physics.data.ptr)


def _restore_physics(physics: Any, saved: Mapping[str, Any]) -> None:
    _restore_mujoco(physics.data.ptr, saved)


def _save_space(space: Any) -> list[Any]:
    """Return the state of the generator from which a space is sampled, and of those of its parts."""
    own = space._np_random  # noqa: SLF001  # `np_random` would make one
    return [None if own is None else own.bit_generator.state, [_save_space(part) for part in _parts_of(space)]]


def _restore_space(space: Any, saved: list[Any]) -> None:
    own, parts = saved
    if own is None:
        space._np_random = None  # noqa: SLF001
    else:
        space.np_random.bit_generator.state = own
    for part, state in zip(_parts_of(space), parts, strict=True):
        _restore_space(part, state)


def _parts_of(space: Any) -> list[Any]:
    held = list(vars(space).values())
    parts = getattr(space, "spaces", ())
    held += parts.values() if isinstance(parts, Mapping) else parts
    return [one for one in held if simulator_of(type(one)) == "gymnasium.spaces.space:Space"]


#: Class -> how its state is read and put back.
_SIMULATORS: dict[str, tuple[Callable[[Any], Any], Callable[[Any, Any], None]]] = {
    "gymnasium.spaces.space:Space": (_save_space, _restore_space),
    "mujoco._structs:MjData": (_save_mujoco, _restore_mujoco),
    "dm_control.mujoco.engine:Physics": (_save_physics, _restore_physics),
    "ale_py._ale_py:ALEInterface": (_save_ale, _restore_ale),
}
