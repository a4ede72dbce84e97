"""Save and restore the state of an env that is written in Python: its attributes, wrappers and generators.

Guarantees:
- A state is data: `read` imports nothing, and calls nothing that a state names; see `env_values.py`.
- `read` changes nothing. It refuses what is damaged and what is of another env, and returns what restores the rest.
- What one name refers to by two attributes is one object again afterwards.

How: objects that are reached by attributes alone (the env, its wrappers, a task) are changed in place, because others
may hold them. What they hold is copied by value. Of a space, the generator alone is saved. Functions, classes, modules,
models and renderers stay as they are: a state refers to them by the path that leads to them, e.g. `env.model`.
Simulators in C are saved by separate functions (`_SIMULATORS`); any other object of an extension refuses.
"""

import functools
import hashlib
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from envherd.workers import plain
from envherd.workers.errors import Unsaveable
from envherd.workers.guests.saving.env_graph import Graph, bounds, simulator_of
from envherd.workers.guests.saving.env_values import (
    Reader,
    Writer,
    pack,
    unpack,
    words_for,
)

#: Of states; those of another version are refused.
VERSION = 3


def save(env: Any) -> dict[str, Any]:
    """Return the state of an env, as plain data.

    Raises:
        Unsaveable: names the attribute that cannot be saved.
    """
    graph = _graph_of(env)
    try:
        writer = Writer(graph)
        for owner in graph.owners.values():
            writer.value(owner)
        writer.finish()
        held = plain.encode(
            [
                writer.nodes,
                {
                    path: _functions_of(one).save(one)
                    for path, one in graph.simulators.items()
                },
            ]
        )
    except Exception as error:
        raise Unsaveable(
            _first_unsaveable(graph) or f"{type(error).__name__}: {error}"
        ) from error
    return {"version": VERSION, "held": held, "digest": _digest(held)}


def read(env: Any, state: Any) -> Callable[[], None]:
    """Check a state of this env, or of one that an equal call has built; return the function that restores it.

    Until that is called, nothing is changed.

    Raises:
        ValueError: the state is of another env, or damaged, or no state.
    """
    expected = "expected what state_dict() or save() returned of this env"
    if not (
        isinstance(state, Mapping) and {"version", "held", "digest"} <= state.keys()
    ):
        raise ValueError(
            f"{expected}, got a {type(state).__name__} without a state of this form."
        )
    if state["version"] != VERSION:
        raise ValueError(
            f"{expected} with version {VERSION} of the format, got version {state['version']!r:.80}."
        )
    held = state["held"]
    if not isinstance(held, bytes) or state["digest"] != _digest(held):
        raise ValueError(f"{expected}, got one that is damaged.")
    graph = _graph_of(env)
    try:
        nodes, simulators = plain.decode(held)
        reader = Reader(graph, nodes)
        reader.read()
        loads = [
            _functions_of(one).read(one, simulators.pop(path))
            for path, one in graph.simulators.items()
        ]
    except Exception as error:  # whatever the bytes are
        why = (
            str(error)
            if isinstance(error, ValueError)
            else f"{type(error).__name__}: {error}"
        )
        raise ValueError(f"{expected}, got {why:.400}.") from None
    if simulators or "" not in reader.changes:
        raise ValueError(
            f"{expected}, got one of an env with a simulator at {[*simulators]!r:.80}, or of none."
        )

    def put() -> None:
        for change in (*reader.changes.values(), *loads):
            change()

    return put


def _graph_of(env: Any) -> Graph:
    """Return what can be reached from an env, with the arrays of its simulators."""
    graph = Graph(env)
    for path, one in graph.simulators.items():
        for name, array in _functions_of(one).lent(one).items():
            if array.dtype.kind == "f" and array.flags.c_contiguous:
                graph.lenders[f"{path}.{name}"] = array
                graph.lent[bounds(array)[0]] = f"{path}.{name}"
    return graph


def _digest(held: bytes) -> bytes:
    """Return a hash that shows damage; who changes a state on purpose can also change it."""
    return hashlib.blake2b(held, digest_size=16).digest()


def _first_unsaveable(graph: Graph) -> str | None:
    """Return which attribute cannot be saved, in words."""
    writer = Writer(graph)
    for owner in graph.owners.values():
        for name, value in vars(owner).items():
            num_before = len(writer.nodes)
            try:
                writer.value(value)
                writer.finish(with_owners=False)
                plain.encode(writer.nodes[num_before:])
            except Exception as error:  # of any object
                why = (
                    str(error)
                    if isinstance(error, Unsaveable)
                    else f"{type(error).__name__}: {error}"
                )
                return f"its attribute {type(owner).__name__}.{name} is a {words_for(value)} ({why})"
    return None


# ---- simulators in C ---------------------------------------------------------------------------


#: Integers of a MuJoCo model and simulation that a task may change, by the end of their names: bit masks and switches.
#: All others are indices and sizes, which the simulator does not check.
_MASKS = (
    "_contype",
    "_conaffinity",
    "_group",
    "_limited",
    "_priority",
    "eq_active0",
    "eq_active",
)
#: What a step begins with.
_INPUTS = ("qpos", "qvel", "act", "ctrl", "qacc_warmstart")


def _save_mujoco(data: Any) -> list[Any]:
    """Return all that the next steps read: the time, and what the last step and the task have written.

    MuJoCo computes the integers of a simulation again; those of the model are its structure.
    """
    return [
        float(data.time),
        _structure_of(data),
        {
            name: pack(array)
            for name, array in _arrays(data).items()
            if _is_free(name, array)
        },
    ]


def _is_free(name: str, array: np.ndarray) -> bool:
    return array.dtype.kind == "f" or name.endswith(_MASKS)


def _structure_of(data: Any) -> bytes:
    """Return a hash of the model's indices and sizes."""
    digest = hashlib.blake2b(digest_size=16)
    for name, array in _arrays(data).items():
        if name.startswith("model.") and not _is_free(name, array):
            digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
            digest.update(array.tobytes())
    return digest.digest()


def _read_mujoco(data: Any, saved: Any) -> Callable[[], None]:
    time, structure, packed = saved
    if structure != _structure_of(data):
        raise ValueError("a simulation of another model")
    before = {name: unpack(one) for name, one in packed.items()}
    inputs = (time, *(before[name] for name in _INPUTS if name in before))
    if not all(np.isfinite(one).all() for one in inputs):
        raise ValueError("a simulation that is not finite")

    def put() -> None:
        _copy(before, data)
        data.time = time
        # Contacts and constraints, in memory that is new afterwards.
        sys.modules["mujoco"].mj_forward(data.model, data)
        _copy(before, data)

    return put


def _copy(saved: Mapping[str, np.ndarray], data: Any) -> None:
    """Copy arrays to a simulation, except for those whose size follows from its present state."""
    for name, array in _arrays(data).items():
        before = saved.get(name)
        if (
            before is not None
            and _is_free(name, array)
            and (before.shape, before.dtype) == (array.shape, array.dtype)
        ):
            array[...] = before


def _arrays(data: Any) -> dict[str, np.ndarray]:
    """Return the arrays of an `MjData` by name, and those of its model by `model.NAME`, without meshes and textures."""
    left_out = (
        "_",
        "efc_",
        "contact",
        "iefc_",
        "island",
        "mesh_",
        "tex_",
        "skin_",
        "bvh_",
        "names",
    )
    # MuJoCo 2 has no model there, so its states cannot be saved.
    values = (
        (f"{place}{name}", getattr(one, name))
        for place, one in (("", data), ("model.", getattr(data, "model", None)))
        for name in dir(one)
        if not name.startswith(left_out)
    )
    return {
        name: value
        for name, value in values
        if isinstance(value, np.ndarray)
        and value.flags.writeable
        and value.size
        and value.dtype.kind in "biuf"
    }


def _save_ale(ale: Any) -> bytes:
    if ale.getFloat("repeat_action_probability") > 0:
        raise Unsaveable(
            "ALE does not report which action its sticky actions repeat: make the env with repeat_action_probability=0"
        )
    state: bytes = ale.cloneState(include_rng=True).__getstate__()
    return state


def _read_ale(ale: Any, saved: Any) -> Callable[[], None]:
    """Restore a state and then the present one: only the emulator can read a state."""
    state = sys.modules["ale_py"].ALEState(saved)
    before = ale.cloneState(include_rng=True)
    try:
        ale.restoreState(state)
    finally:
        ale.restoreState(before)
    return functools.partial(ale.restoreState, state)


class _Simulator(NamedTuple):
    """How the state of a simulator is saved, and read: `read` checks it and returns what puts it back.

    `lent` returns its arrays, of which an env may hold views.
    """

    save: Callable[[Any], Any]
    read: Callable[[Any, Any], Callable[[], None]]
    lent: Callable[[Any], dict[str, np.ndarray]] = lambda _: {}


#: Class -> its functions.
_SIMULATORS = {
    "mujoco._structs:MjData": _Simulator(_save_mujoco, _read_mujoco, _arrays),
    "dm_control.mujoco.engine:Physics": _Simulator(
        lambda physics: _save_mujoco(physics.data.ptr),
        lambda physics, saved: _read_mujoco(physics.data.ptr, saved),
        lambda physics: _arrays(physics.data.ptr),
    ),
    "ale_py._ale_py:ALEInterface": _Simulator(_save_ale, _read_ale),
}


def _functions_of(simulator: Any) -> _Simulator:
    return _SIMULATORS[simulator_of(type(simulator)) or ""]
