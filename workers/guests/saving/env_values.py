"""The values that an env holds as nodes, which are plain data; and nodes as values.

A value is None, a bool, int, float, str or bytes, or `[NUMBER]`: the node of that number. A node is
`[KIND, CLASS, CONTENT, ATTRIBUTES]`; `_KINDS` lists the kinds. Two references to one object have one number.

Guarantees:
- Reading imports nothing and calls nothing that a node names. It makes objects of the kinds below alone, by the
  constructors of numpy, of Python's containers, and of `_DATA`; objects of other classes get their attributes without a
  call of their class, except for the hashes of keys.
- A node's class is compared with those that the living env has (`Graph.find_class`), and never looked up elsewhere.
- Reading changes no object that lives: `Reader.changes` lists what is to be set.
- Memory follows the size of the nodes: every array has as many bytes as its shape needs, or is a view of one that has.
- Arrays that share memory share it again, and so do tensors. An array and a tensor that do are refused.
"""

import collections
import contextlib
import ctypes
import enum
import functools
import math
import pickle
import random
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

from envherd.workers import seeding
from envherd.workers.errors import Unsaveable
from envherd.workers.guests.saving.env_graph import (
    GENERATOR_OF_SPACE,
    Graph,
    bounds,
    is_closing,
    is_fixed,
    is_made_of_attributes,
    is_picture,
    is_plain,
    is_python,
    is_space,
    name_of,
    slots_of,
)

_SCALARS = frozenset({type(None), bool, int, float, str, bytes})
#: Names of dtypes whose values are numbers, text, times or bools, as `dtype.str` gives them.
_DTYPE = re.compile(r"[<>|=][biufcSUmM]\d+(\[\d*[a-zA-Z]+\])?")
#: Of the pool of a `SeedSequence`; numpy's own have 4, and mixing takes the square of it.
_MAX_SEED_WORDS = 64


def words_for(value: Any) -> str:
    """Return the class of a value, in words."""
    name = name_of(type(value)).removeprefix("builtins:").replace(":", ".")
    return "C++ object, wrapped by SWIG" if name == ".SwigPyObject" else name


# ---- arrays ------------------------------------------------------------------------------------


def pack(array: np.ndarray) -> list[Any]:
    """Return an array as dtype, shape, order and bytes.

    Raises:
        Unsaveable: it holds objects or records.
    """
    order: Literal["F", "C"] = (
        "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
    )
    return [_dtype_of(array), list(array.shape), order, array.tobytes(order)]


def _dtype_of(array: np.ndarray) -> str:
    if not _DTYPE.fullmatch(array.dtype.str):
        raise Unsaveable(f"an array of dtype {array.dtype}")
    return array.dtype.str


def unpack(packed: Any, kind: type = np.ndarray) -> np.ndarray:
    """Return a fresh array.

    Raises:
        Exception: of any type, if these are not the parts of an array.
    """
    name, shape, order, data = packed
    if not (isinstance(name, str) and _DTYPE.fullmatch(name) and order in ("C", "F")):
        raise ValueError(f"an array of dtype {name!r}")
    dtype = np.dtype(name)
    if len(data) != math.prod(shape) * dtype.itemsize or (shape and not dtype.itemsize):
        raise ValueError(f"{len(data)} bytes for an array {name} of shape {shape}")
    if not data:
        return np.zeros(tuple(shape), dtype).view(kind)
    array: np.ndarray = np.ndarray.__new__(
        kind,
        tuple(shape),
        dtype,
        bytearray(data),
        0,
        None,
        order,
    )
    return array.copy(order)


def view_of(memory: np.ndarray, packed: Any, kind: type) -> np.ndarray:
    """Return a view of an array, of bytes or of the view's dtype; numpy refuses one beyond its memory.

    Raises:
        Exception: of any type, if these are not the parts of a view.
    """
    name, shape, strides, offset = packed
    if not _DTYPE.fullmatch(name) or memory.dtype.str not in ("|u1", name):
        raise ValueError(f"a view {name!r} of {memory.dtype}")
    if math.prod(shape) * np.dtype(name).itemsize > memory.nbytes:
        raise ValueError(f"a view of shape {shape} of {memory.nbytes} bytes")
    array: np.ndarray = np.ndarray.__new__(
        kind,
        tuple(shape),
        name,
        memory,
        offset,
        tuple(strides),
    )
    return array


def _packed_view(array: np.ndarray, start: int) -> list[Any]:
    """Return what `view_of` needs to make a view of the memory at an address."""
    offset = array.__array_interface__["data"][0] - start
    return [_dtype_of(array), list(array.shape), list(array.strides), offset]


# ---- writing -----------------------------------------------------------------------------------


class Writer:
    """Writes values as nodes: lists of kind, name of a class, content and attributes.

    Attributes:
        nodes: so far; complete after `finish`.
        arrays: and their nodes' contents, which `finish` fills.
    """

    def __init__(self, graph: Graph) -> None:
        self.nodes: list[list[Any]] = []
        self.arrays: list[tuple[np.ndarray, list[Any]]] = []
        self.graph = graph
        self._numbers: dict[int, int] = {}
        self._written: list[Any] = []  # ids are unique only among objects that live
        self._unfinished: collections.deque[Any] = collections.deque()
        self._kinds: dict[type, str] = {}
        # Of a simulator's array, the address is known.
        lent = [(address, address + 1) for address in graph.lent]
        self._memories: dict[str, list[tuple[int, int]]] = {"array": lent, "tensor": []}

    def value(self, one: Any) -> Any:
        """Return a value: a scalar, or the number of its node."""
        if type(one) in _SCALARS:
            return one
        number = self._numbers.get(id(one))
        return [self._add(one) if number is None else number]

    def claim(self, start: int, end: int, kind: str) -> None:
        """Note that the memory between two addresses is that of an array, or of tensors.

        Raises:
            Unsaveable: a part of it is that of the other kind.
        """
        other = "tensor" if kind == "array" else "array"
        if any(first < end and start < last for first, last in self._memories[other]):
            raise Unsaveable("an array that shares its memory with a tensor")
        self._memories[kind].append((start, end))

    def finish(self, *, with_owners: bool = True) -> None:
        """Write what the nodes so far refer to; without the attributes of the graph's owners, on request."""
        while self._unfinished:
            one = self._unfinished.popleft()
            number = self._numbers[id(one)]
            [kind] = self.nodes[number]
            if with_owners or kind != "owner":
                self.nodes[number] = self._node(kind, one)
        together: list[tuple[np.ndarray, list[Any]]] = []
        reached = 0
        for array, content in sorted(self.arrays, key=lambda one: bounds(one[0])):
            start, end = bounds(array)
            if start >= reached:
                self._write(together, reached)
                together = []
            together.append((array, content))
            reached = max(reached, end)
        self._write(together, reached)
        self.arrays = []

    def _write(self, arrays: list[tuple[np.ndarray, list[Any]]], end: int) -> None:
        """Fill the contents of arrays; those of several are views of the memory that they share, up to an address."""
        if len(arrays) == 1:
            [(array, content)] = arrays
            content.extend(pack(array))
        elif arrays:
            start, _ = bounds(arrays[0][0])
            memory = np.frombuffer(ctypes.string_at(start, end - start), np.uint8)
            shared = [len(self.nodes)]
            self.nodes.append(["array", None, pack(memory), {}])
            for array, content in arrays:
                content.extend([shared, _packed_view(array, start)])

    def _add(self, one: Any) -> int:
        self._written.append(one)
        kind = self._kind_of(one)
        node: list[Any] = [kind]
        # What it holds may hold it.
        if _KINDS[kind].fill is not None:
            self._unfinished.append(one)
        else:
            node = self._node(kind, one)
        number = self._numbers[id(one)] = len(self.nodes)
        self.nodes.append(node)
        return number

    def _node(self, kind: str, one: Any) -> list[Any]:
        base = _KINDS[kind].base
        name = None if base is type(one) or base is None else name_of(type(one))
        content = _KINDS[kind].take(self, one)
        has_attributes = base is not None or kind == "owner"
        return [kind, name, content, self._attributes(one) if has_attributes else {}]

    def _attributes(self, one: Any) -> dict[str, Any]:
        held = dict(vars(one)) if hasattr(one, "__dict__") else {}
        if is_space(type(one)):
            held = {GENERATOR_OF_SPACE: held[GENERATOR_OF_SPACE]}
        for name, member in slots_of(type(one)).items():
            with contextlib.suppress(AttributeError):  # one that was never set
                held[name] = member.__get__(one)
        return {name: self.value(value) for name, value in held.items()}

    def _kind_of(self, one: Any) -> str:
        cls = type(one)
        if id(one) in self.graph.paths:
            return "owner" if self.graph.paths[id(one)] in self.graph.owners else "at"
        if isinstance(one, type) and one in (
            _CLASSES.get(name_of(one)),
            self.graph.held_classes.get(name_of(one)),
        ):
            return "class"
        if is_fixed(one) or is_closing(cls):
            raise Unsaveable(f"a {words_for(one)}")
        if cls not in self._kinds:
            own = (
                kind
                for kind, entry in _KINDS.items()
                if entry.has is not None and entry.has(cls)
            )
            self._kinds[cls] = "data" if name_of(cls) in _DATA else next(own, "")
        kind = self._kinds[cls]
        if not kind:
            raise Unsaveable(f"a {words_for(one)}")
        return kind


# ---- reading -----------------------------------------------------------------------------------


def _put(one: Any, attributes: dict[str, Any]) -> None:
    """Give an object of the env, or a new one, these attributes; it keeps what only draws, and a space all others."""
    present = vars(one)
    kept = {
        name: value
        for name, value in present.items()
        if is_picture(value) or (is_space(type(one)) and name != GENERATOR_OF_SPACE)
    }
    present.clear()
    present.update({**attributes, **kept})


class Reader:
    """Makes the values of nodes.

    Any exception means that these nodes are none of this env.

    Attributes:
        changes: path -> sets the attributes of the object there, of the env or new.
    """

    def __init__(self, graph: Graph, nodes: list[list[Any]]) -> None:
        self.graph = graph
        self.changes: dict[str, Callable[[], None]] = {}
        self._nodes = nodes
        self._made: dict[int, Any] = {}
        self._begun: set[int] = set()

    def read(self) -> None:
        """Make all values."""
        numbers = range(len(self._nodes))
        for number in numbers:
            self._object(number)
        # What holds values by their hashes last: an object's hash may depend on its attributes.
        for number in sorted(numbers, key=lambda one: self._nodes[one][0] in _HASHING):
            self._fill(number)

    def value(self, value: Any) -> Any:
        """Return a value."""
        if type(value) in _SCALARS:
            return value
        return self._object(self._number(value))

    def attributes(self, attributes: dict[str, Any]) -> dict[str, Any]:
        """Return attributes by name."""
        if not all(isinstance(name, str) for name in attributes):
            raise ValueError(f"attributes named {list(attributes)!r:.80}")
        return {name: self.value(value) for name, value in attributes.items()}

    def class_of(self, name: str | None, base: type) -> type:
        """Return the class that a node names, or its base; a class must be one that the env has."""
        found = base if name is None else self.graph.find_class(name)
        if issubclass(found, base):
            return found
        raise ValueError(f"a {name}, which is no {base.__name__}")

    def _number(self, value: Any) -> int:
        if type(value) is not list or len(value) != 1 or type(value[0]) is not int:
            raise ValueError(f"the value {value!r:.80}")
        number: int = value[0]
        if not 0 <= number < len(self._nodes):
            raise ValueError(f"no node {number}")
        return number

    def _object(self, number: int) -> Any:
        if number not in self._made:
            if number in self._begun:
                raise ValueError(f"a node {number} that consists of itself")
            self._begun.add(number)
            kind, name, content, _ = self._nodes[number]
            base = _KINDS[kind].base
            cls = None if base is None else self.class_of(name, base)
            self._made[number] = _KINDS[kind].make(self, cls, content)
        return self._made[number]

    def _fill(self, number: int) -> None:
        kind, _, content, attributes = self._nodes[number]
        one = self._object(number)
        if kind == "owner":
            path, _ = content
            self.changes[path] = functools.partial(
                _put,
                one,
                self.attributes(attributes),
            )
            return
        if attributes and _KINDS[kind].base is None:
            raise ValueError(f"attributes of a {kind}")
        fill = _KINDS[kind].fill
        if fill is not None:
            fill(self, one, content)
        slots = slots_of(type(one)) if attributes else {}
        for name, value in self.attributes(attributes).items():
            if name in slots:
                slots[name].__set__(one, value)
            else:
                vars(one)[name] = value


# ---- kinds -------------------------------------------------------------------------------------


class _Kind(NamedTuple):
    """How a kind of value is written and made.

    Attributes:
        take: the content of a value's node.
        make: of a reader, a class and the content: the value, or an empty one.
        has: whether the objects of a class are of the kind, unless they are of one before; None: `Writer` knows.
        fill: fills an empty one; None if `make` returns it complete.
        base: of the classes of the kind's objects, which may have attributes; None for those without.
    """

    take: Callable[[Writer, Any], Any]
    make: Callable[[Reader, Any, Any], Any]
    has: Callable[[type], bool] | None = None
    fill: Callable[[Reader, Any, Any], None] | None = None
    base: type | None = None


def _below(base: type) -> Callable[[type], bool]:
    return lambda cls: issubclass(cls, base)


def _nothing(_: Reader, __: Any, ___: Any) -> None:
    """Fill an object that has attributes alone."""


def _make_owner(reader: Reader, _: Any, content: Any) -> Any:
    """Return the object at a path, or a new one where the env holds none of this class now."""
    path, name = content
    live = reader.graph.owners.get(path)
    if live is not None and name_of(type(live)) == name:
        return live
    cls = reader.class_of(name, object)
    if path == "" or hasattr(live, "step") or is_space(cls):
        raise ValueError(
            f"one of a {str(name).replace(':', '.')} for a {words_for(live)}"
        )
    if not is_python(cls):
        raise ValueError(f"an object of {name} as a part of the env")
    return object.__new__(cls)


def _make_object(_: Reader, cls: Any, __: Any) -> Any:
    """Return an object without its attributes; no code of its class is called."""
    if not is_made_of_attributes(cls):
        raise ValueError(f"an object of {name_of(cls)}")
    return object.__new__(cls)


def _make_at(reader: Reader, _: Any, content: Any) -> Any:
    """Return the object at a path; a state has no other way to name a function or a class."""
    path, is_drawing = content
    graph = reader.graph
    if path in graph.simulators:
        return graph.simulators[path]
    if path not in graph.fixed and not is_drawing:
        raise ValueError(f"a reference to env{path}, where there is no equal object")
    return graph.fixed.get(path)


def _container(base: Any, put: Callable[[Reader, Any, list[Any]], None]) -> _Kind:
    """Return the kind of a list, set or deque."""
    return _Kind(
        take=lambda writer, one: [writer.value(item) for item in base.__iter__(one)],
        make=lambda _, cls, __: base.__new__(cls),
        has=_below(base),
        fill=put,
        base=base,
    )


def _mapping(base: Any) -> _Kind:
    """Return the kind of a dict, or of a subclass of dict in C."""

    def fill(reader: Reader, one: Any, content: list[Any]) -> None:
        for key, value in content:
            base.__setitem__(one, reader.value(key), reader.value(value))

    return _Kind(
        take=lambda writer, one: [
            [writer.value(key), writer.value(value)] for key, value in base.items(one)
        ],
        make=lambda _, cls, __: base.__new__(cls),
        has=_below(base),
        fill=fill,
        base=base,
    )


def _fixed_items(base: Any) -> _Kind:
    """Return the kind of a tuple or frozenset."""
    return _Kind(
        take=lambda writer, one: [writer.value(item) for item in base.__iter__(one)],
        make=lambda reader, cls, content: base.__new__(
            cls,
            [reader.value(item) for item in content],
        ),
        has=_below(base),
        base=base,
    )


def _take_frozen(writer: Writer, one: Any) -> Any:
    """Return the items of a frozenset, which is made before objects have their attributes, and so their hashes."""
    if not all(map(_has_hash_at_once, one)):
        raise Unsaveable("a frozenset of objects")
    return [writer.value(item) for item in frozenset.__iter__(one)]


def _has_hash_at_once(one: Any) -> bool:
    return (
        is_plain(one)
        or isinstance(one, (enum.Enum, type))
        or (isinstance(one, tuple) and all(map(_has_hash_at_once, one)))
    )


def _fill_deque(reader: Reader, one: Any, content: Any) -> None:
    maxlen, items = content
    collections.deque.__init__(one, map(reader.value, items), maxlen)


def _fill_defaultdict(reader: Reader, one: Any, content: Any) -> None:
    factory, items = content
    collections.defaultdict.__init__(one, reader.value(factory))
    _KINDS["dict"].fill(reader, one, items)  # type: ignore[misc]


def _take_array(writer: Writer, one: np.ndarray) -> list[Any]:
    """Return where an array is in the memory of a simulator's, or what `Writer.finish` fills."""
    start, end = bounds(one)
    # One of which bytes repeat is copied.
    if not 0 < one.nbytes <= end - start:
        return pack(one)
    whole = one
    while isinstance(whole.base, np.ndarray):
        whole = whole.base
    first, _ = bounds(whole)
    writer.claim(start, end, "array")
    lender = writer.graph.lent.get(first)
    if lender is not None and one.dtype == whole.dtype:
        return [lender, _packed_view(one, first)]
    content: list[Any] = []
    writer.arrays.append((one, content))
    return content


def _make_array(reader: Reader, cls: Any, content: Any) -> np.ndarray:
    """Return an array, or a view of another one or of a simulator's."""
    if len(content) == 2:
        lender, packed = content
        return view_of(
            reader.graph.lenders[lender]
            if isinstance(lender, str)
            else reader.value(lender),
            packed,
            cls,
        )
    return unpack(content, cls)


def _take_enum(_: Writer, one: Any) -> Any:
    cls = type(one)
    is_named = cls.__members__.get(one.name) is one
    return (
        [name_of(cls), one.name, None] if is_named else [name_of(cls), None, one.value]
    )


def _make_enum(reader: Reader, _: Any, content: Any) -> Any:
    class_name, name, value = content
    cls: Any = reader.class_of(class_name, enum.Enum if value is None else enum.Flag)
    if type(value) is int:  # several flags
        return cls(value)
    return cls.__members__[name]


def _make_data(reader: Reader, _: Any, content: Any) -> Any:
    """Return a value of one of the classes of `_DATA`."""
    name, arguments = content
    module, _, qualname = name.partition(":")
    if name not in _DATA:
        raise ValueError(f"a {name}")
    found = vars(sys.modules[module])[qualname]
    values = [reader.value(one) for one in arguments]
    if not all(
        type(one) in _SCALARS or name_of(type(one)).startswith("datetime:")
        for one in values
    ):
        raise ValueError(f"a {name} of {arguments!r:.80}")
    return found(values) if name == "torch:Size" else found(*values)


def _take_data(writer: Writer, one: Any) -> Any:
    name = name_of(type(one))
    return [name, [writer.value(part) for part in _DATA[name](one)]]


def _make_dtype(_: Reader, __: Any, content: Any) -> Any:
    if not _DTYPE.fullmatch(content):
        raise ValueError(f"the dtype {content!r}")
    return np.dtype(content)


def _whole_of(storage: Any, dtype: Any) -> Any:
    """Return the memory of tensors as one tensor (VIEW)."""
    empty = sys.modules["torch"].empty(0, dtype=dtype, device=storage.device)
    return empty.set_(storage)


def _take_storage(writer: Writer, one: Any) -> Any:
    """Return the memory of tensors, and its device."""
    writer.claim(one.data_ptr(), one.data_ptr() + one.nbytes(), "tensor")
    memory = _whole_of(one, sys.modules["torch"].uint8)
    return [writer.value(one.device), pack(memory.cpu().numpy())]


def _make_storage(reader: Reader, _: Any, content: Any) -> Any:
    device, packed = content
    memory = sys.modules["torch"].from_numpy(unpack(packed))
    return memory.to(reader.value(device)).untyped_storage()


def _take_tensor(writer: Writer, one: Any) -> Any:
    """Return where a tensor is in its memory, which others may share."""
    one = one.detach().resolve_conj().resolve_neg()
    # One of which bytes repeat is copied.
    if one.nbytes > one.untyped_storage().nbytes():
        one = one.contiguous()
    return [
        writer.value(one.untyped_storage()),
        writer.value(one.dtype),
        list(one.shape),
        list(one.stride()),
        one.storage_offset(),
    ]


def _make_tensor(reader: Reader, _: Any, content: Any) -> Any:
    """Return a tensor; torch refuses one beyond its memory."""
    storage, dtype, shape, strides, offset = content
    memory = reader.value(storage)
    whole = _whole_of(memory, reader.value(dtype))
    if math.prod(shape) * whole.itemsize > memory.nbytes():
        raise ValueError(f"a tensor of shape {shape} of {memory.nbytes()} bytes")
    return whole.as_strided(shape, strides, offset)


def _make_torch_dtype(_: Reader, __: Any, content: Any) -> Any:
    torch = sys.modules["torch"]
    return next(
        one
        for one in vars(torch).values()
        if type(one) is torch.dtype and str(one) == content
    )


def _take_bits(writer: Writer, one: Any) -> Any:
    seeds = getattr(one, "seed_seq", None)
    return [
        one.state,
        writer.value(seeds if type(seeds) is np.random.SeedSequence else None),
    ]


def _make_bits(reader: Reader, _: Any, content: Any) -> Any:
    state, seeds = content
    return seeding.bits_of(state, reader.value(seeds))


def _take_seeds(_: Writer, one: Any) -> Any:
    entropy = one.entropy
    words = (
        entropy
        if entropy is None or isinstance(entropy, int)
        else [int(word) for word in entropy]
    )
    return [
        words,
        [int(word) for word in one.spawn_key],
        one.pool_size,
        one.n_children_spawned,
    ]


def _make_seeds(_: Reader, __: Any, content: Any) -> Any:
    entropy, spawn_key, pool_size, num_children = content
    if not (type(pool_size) is int and pool_size <= _MAX_SEED_WORDS):
        raise ValueError(f"seeds with a pool of {pool_size}")
    return np.random.SeedSequence(
        entropy,
        spawn_key=spawn_key,
        pool_size=pool_size,
        n_children_spawned=num_children,
    )


def _make_generator(reader: Reader, _: Any, content: Any) -> Any:
    bits = reader.value(content)
    if isinstance(bits, np.random.BitGenerator):
        return np.random.Generator(bits)
    raise ValueError("a generator without bits")


#: Kind -> how it is written and made.
_KINDS: dict[str, _Kind] = {
    "owner": _Kind(
        take=lambda writer, one: [writer.graph.paths[id(one)], name_of(type(one))],
        make=_make_owner,
        fill=_nothing,
    ),
    "at": _Kind(
        take=lambda writer, one: [writer.graph.paths[id(one)], is_picture(one)],
        make=_make_at,
    ),
    "class": _Kind(
        take=lambda _, one: name_of(one),
        make=lambda reader, _, name: {**reader.graph.held_classes, **_CLASSES}[name],
    ),
    "data": _Kind(take=_take_data, make=_make_data),
    "enum": _Kind(take=_take_enum, make=_make_enum, has=_below(enum.Enum)),
    "scalar": _Kind(
        take=lambda _, one: pack(np.asarray(one)),
        make=lambda _, __, content: unpack(content)[()],
        has=lambda cls: issubclass(cls, np.generic) and cls.__module__ == "numpy",
    ),
    "array": _Kind(
        take=_take_array,
        make=_make_array,
        has=_below(np.ndarray),
        base=np.ndarray,
    ),
    "dtype": _Kind(take=lambda _, one: one.str, make=_make_dtype, has=_below(np.dtype)),
    "storage": _Kind(
        take=_take_storage,
        make=_make_storage,
        has=lambda cls: name_of(cls) == "torch.storage:UntypedStorage",
    ),
    "tensor": _Kind(
        take=_take_tensor,
        make=_make_tensor,
        has=lambda cls: name_of(cls) == "torch:Tensor",
    ),
    "torch.dtype": _Kind(
        take=lambda _, one: str(one),
        make=_make_torch_dtype,
        has=lambda cls: name_of(cls) == "torch:dtype",
    ),
    "seeds": _Kind(
        take=_take_seeds,
        make=_make_seeds,
        has=lambda cls: cls is np.random.SeedSequence,
    ),
    "bits": _Kind(take=_take_bits, make=_make_bits, has=_below(np.random.BitGenerator)),
    "generator": _Kind(
        take=lambda writer, one: writer.value(one.bit_generator),
        make=_make_generator,
        has=lambda cls: cls is np.random.Generator,
    ),
    "legacy": _Kind(
        take=lambda _, one: one.get_state(legacy=False),
        make=lambda _, __, state: seeding.legacy_of(state),
        has=lambda cls: cls is np.random.RandomState,
    ),
    "random": _Kind(
        take=lambda _, one: list(one.getstate()),
        make=lambda _, __, state: seeding.python_of(*state),
        has=lambda cls: cls is random.Random,
    ),
    "OrderedDict": _mapping(collections.OrderedDict),
    "defaultdict": _mapping(collections.defaultdict)._replace(
        take=lambda writer, one: [
            writer.value(one.default_factory),
            _KINDS["dict"].take(writer, one),
        ],
        fill=_fill_defaultdict,
    ),
    "dict": _mapping(dict),
    "list": _container(
        list, lambda reader, one, content: list.extend(one, map(reader.value, content))
    ),
    "set": _container(
        set, lambda reader, one, content: set.update(one, map(reader.value, content))
    ),
    "deque": _container(collections.deque, _fill_deque)._replace(
        take=lambda writer, one: [
            one.maxlen,
            [writer.value(item) for item in collections.deque.__iter__(one)],
        ]
    ),
    "tuple": _fixed_items(tuple),
    "frozenset": _fixed_items(frozenset)._replace(take=_take_frozen),
    "object": _Kind(
        take=lambda _, __: [],
        make=_make_object,
        has=is_made_of_attributes,
        fill=_nothing,
        base=object,
    ),
}
#: Kinds that are filled by the hashes of values.
_HASHING = frozenset({"dict", "OrderedDict", "defaultdict", "set"})
#: Classes that a state may name as values: those that make empty or converted data.
_CLASSES: dict[str, type] = {
    name_of(one): one
    for one in (
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        list,
        dict,
        set,
        tuple,
        *set(np.sctypeDict.values()),
    )
}
#: Class -> the arguments with which a call of it makes an equal value: scalars, or others of the module `datetime`. Of
#: none can a short text make a large value.
_DATA: Mapping[str, Callable[[Any], Any]] = {
    "builtins:complex": lambda one: (one.real, one.imag),
    "builtins:slice": lambda one: (one.start, one.stop, one.step),
    "builtins:range": lambda one: (one.start, one.stop, one.step),
    "datetime:date": lambda one: one.__reduce_ex__(pickle.HIGHEST_PROTOCOL)[1],
    "datetime:time": lambda one: one.__reduce_ex__(pickle.HIGHEST_PROTOCOL)[1],
    "datetime:datetime": lambda one: one.__reduce_ex__(pickle.HIGHEST_PROTOCOL)[1],
    "datetime:timedelta": lambda one: (one.days, one.seconds, one.microseconds),
    "datetime:timezone": lambda one: one.__getinitargs__(),
    **{
        f"{module}:{name}": lambda one: (str(one),)
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "PurePosixPath")
    },
    "torch:Size": tuple,
    "torch:device": lambda one: (str(one),),
    **{
        f"pygame.{name}": tuple
        for name in (
            "rect:Rect",
            "rect:FRect",
            "math:Vector2",
            "math:Vector3",
            "color:Color",
        )
    },
}
