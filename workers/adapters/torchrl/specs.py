"""Convert TorchRL's specs to ours: the leaves of an env, and their places in its tensordict.

Guarantees: the encoding that the env declares is kept (one-hot stays one-hot); leaves come in the same
order in every process (by depth, then by name, as TorchRL sorts its keys). Knows TorchRL's spec classes
by name only, so that nothing is imported here, neither TorchRL nor torch.

A heterogeneous stack (agents of one group with unlike specs) cannot be one array. Leaves on which all members agree
stay dense under their own key. The others are split into one leaf for each member, with the member's index in the key:
`("agents", "vector")` becomes `("agents", "0", "vector")`, `("agents", "1", "vector")`, ... and the tensordict under
`agents` then has no further batch shape. Leaves that are not tensors, or whose shape is dynamic, are side leaves.
"""

import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from envherd.shm.specs import (
    Binary,
    Box,
    Discrete,
    Domain,
    Groups,
    Key,
    LeafSpec,
    MultiDiscrete,
    OneHot,
    Unbounded,
)
from envherd.workers.adapters.common.tree import nested, shrunk, stacked
from envherd.workers.errors import SpecError

#: Names of the dtypes that torch and numpy share.
DTYPES = frozenset(
    {"bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"}
    | {"float16", "float32", "float64", "complex64", "complex128"}
)

#: Classes that are distinguished; a user's class counts as the first base that is listed here.
_KINDS = frozenset(
    {"StackedComposite", "Composite", "Stacked", "NonTensor", "Bounded"}
    | {"MultiOneHot", "OneHot", "Binary", "MultiCategorical", "Categorical"}
)


@dataclass(frozen=True)
class Member:
    """A step of a path: the member `index` of a lazy stack along dimension `dim`."""

    index: int
    dim: int


Path = tuple[str | Member, ...]


@dataclass(frozen=True)
class PlacedLeaf:
    """A leaf and the place of its value.

    Attributes:
        spec: the leaf as the executor knows it.
        path: where the env's tensordict holds it; equals `spec.key` unless it is in a heterogeneous stack.
        tensor_dtype: numpy dtype name of the tensor, also of dynamic (side) leaves; empty if no tensor.
    """

    spec: LeafSpec
    path: Path
    tensor_dtype: str


def place_leaves(composite: Any) -> list[PlacedLeaf]:
    """Return the leaves of a `Composite`, sorted by depth and name.

    Raises:
        SpecError: a leaf has a dtype that numpy lacks, or the rows of a batched env have unlike specs.
    """
    if _kind(composite) == "StackedComposite":
        raise SpecError(
            "reading the env's specs failed: expected rows of equal specs, got a heterogeneous stack at the root. "
            "Give one factory for each row instead."
        )
    return sorted(
        _walk(composite, ()), key=lambda leaf: (len(leaf.spec.key), leaf.spec.key)
    )


def group_shapes(
    composites: Iterable[Any],
    leaves: Iterable[PlacedLeaf],
    batch_shape: tuple[int, ...],
) -> Groups:
    """Return the nested tensordicts whose batch shape differs from that of their parent.

    Args:
        composites: the env's full specs; if two disagree, their common leading dimensions count.
        leaves: of all of them; stacks that were split have no batch shape.
        batch_shape: of the env.
    """
    shapes: dict[Key, tuple[int, ...]] = {(): batch_shape}
    for composite in composites:
        for key, shape in _nested_shapes(composite, ()):
            pairs = zip(shapes.get(key, shape), shape, strict=False)
            shapes[key] = tuple(
                n
                for n, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)
            )
    for leaf in leaves:
        for depth, step in enumerate(leaf.path):
            if isinstance(step, Member) and depth:
                key = leaf.spec.key[:depth]
                shapes[key] = shapes[key[:-1]]
    return tuple(
        (key, shapes[key])
        for key in sorted(shapes)
        if key and shapes[key] != shapes[key[:-1]]
    )


def _nested_shapes(
    composite: Any,
    prefix: Key,
) -> Iterator[tuple[Key, tuple[int, ...]]]:
    for name, item in composite.items():
        if _kind(item) in ("Composite", "StackedComposite"):
            yield (*prefix, name), tuple(int(n) for n in item.shape)
            yield from _nested_shapes(item, (*prefix, name))


def _kind(spec: Any) -> str:
    return next(
        (cls.__name__ for cls in type(spec).__mro__ if cls.__name__ in _KINDS),
        "",
    )


def _walk(spec: Any, prefix: Key) -> Iterator[PlacedLeaf]:
    if spec is None:  # a Composite may hold names that have no spec
        return
    kind = _kind(spec)
    if kind == "StackedComposite":
        yield from _walk_stack(spec, prefix)
    elif kind == "Composite":
        for name, item in spec.items():
            yield from _walk(item, (*prefix, name))
    else:
        yield _leaf(spec, prefix)


def _walk_stack(stack: Any, prefix: Key) -> Iterator[PlacedLeaf]:
    dim = int(stack.stack_dim)
    members = [
        {leaf.spec.key: leaf for leaf in _walk(member, ())}
        for member in stack.unbind(dim)
    ]
    for key in dict.fromkeys(key for member in members for key in member):
        leaves = [member.get(key) for member in members]
        if (
            merged := _merge([leaf for leaf in leaves if leaf], len(members), dim)
        ) is not None:
            yield PlacedLeaf(
                replace(merged, key=(*prefix, *key)),
                (*prefix, *key),
                merged.dtype,
            )
            continue
        for index, leaf in enumerate(leaves):
            if leaf is not None:
                yield PlacedLeaf(
                    replace(leaf.spec, key=(*prefix, str(index), *key)),
                    (*prefix, Member(index, dim), *leaf.path),
                    leaf.tensor_dtype,
                )


def _merge(leaves: list[PlacedLeaf], count: int, dim: int) -> LeafSpec | None:
    """Return members' leaves as one dense leaf; None unless all have the same place, shape and dtype."""
    first = leaves[0]
    alike = {
        (leaf.path, leaf.spec.shape, leaf.spec.dtype, leaf.spec.is_side)
        for leaf in leaves
    }
    if (
        len(leaves) < count
        or len(alike) > 1
        or first.spec.is_side
        or first.path != first.spec.key
    ):
        return None
    return replace(
        first.spec,
        shape=(*first.spec.shape[:dim], count, *first.spec.shape[dim:]),
        domain=stacked([leaf.spec.domain for leaf in leaves], first.spec.shape, dim),
    )


def _leaf(spec: Any, key: Key) -> PlacedLeaf:
    shape = tuple(int(n) for n in spec.shape)
    dtype = (
        ""
        if spec.dtype is None or _kind(spec) == "NonTensor"
        else dtype_name(
            spec.dtype,
            key,
            "the env's specs",
            f"Append DTypeCastTransform({spec.dtype}, torch.float32) to the env in the factory.",
        )
    )
    if _kind(spec) == "Stacked":
        dim = int(spec.stack_dim)
        members = [_leaf(member, key) for member in spec.unbind(dim)]
        if (merged := _merge(members, len(members), dim)) is not None:
            return PlacedLeaf(merged, key, merged.dtype)
        # Members that differ have no common shape, so this is a side leaf.
        shape = (-1,)
    if not dtype or -1 in shape:
        return PlacedLeaf(LeafSpec(key, dtype="", is_side=True), key, dtype)
    return PlacedLeaf(LeafSpec(key, shape, dtype, _domain(spec, shape)), key, dtype)


def dtype_name(dtype: Any, key: Key, what: str, fix: str) -> str:
    """Return the name that torch and numpy share for a dtype.

    Args:
        dtype: of torch.
        key: of the leaf that has it, for the message.
        what: is being read, for the message.
        fix: what to do if numpy has no such dtype, for the message.

    Raises:
        SpecError: numpy has no such dtype.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise SpecError(
            f"reading {what} failed: expected a dtype that numpy has too, got {dtype} ({'/'.join(key)}). {fix}"
        )
    return name


def _domain(spec: Any, shape: tuple[int, ...]) -> Domain:
    kind = _kind(spec)
    if kind == "Bounded" and 0 not in shape:
        return Box(
            shrunk(spec.space.low.cpu().numpy()),
            shrunk(spec.space.high.cpu().numpy()),
        )
    if kind in ("Binary", "MultiOneHot"):
        return Binary()
    if kind == "OneHot":
        return OneHot(shape[-1])
    if kind == "MultiCategorical":
        return MultiDiscrete(nested(np.broadcast_to(spec.nvec.cpu().numpy(), shape)))
    if str(spec.dtype) == "torch.bool":
        return Binary()
    if kind == "Categorical" and spec.space.n > 0:
        return Discrete(int(spec.space.n))
    return Unbounded()


# ---- reading -----------------------------------------------------------------------------------
# Read a TorchRL tensordict: leaves as Python and numpy data, and the end of an episode.
#
# Guarantees: arrays are VIEWS of CPU tensors; a missing leaf raises a `SpecError` that names it. This module uses only
# methods of tensors and tensordicts, so it imports neither torch nor TorchRL.

#: Tensordict -> one value.
Read = Callable[[Any], Any]

#: The names of the root done keys.
END_NAMES = ("done", "terminated", "truncated")


def topmost(done_leaves: list[PlacedLeaf]) -> list[Path]:
    """Return the paths of the done leaves that decide: those without a done leaf above them."""
    prefixes = sorted({leaf.path[:-1] for leaf in done_leaves}, key=len)
    return [
        path
        for path in prefixes
        if not any(path != other and path[: len(other)] == other for other in prefixes)
    ]


def ends_reader(
    done_leaves: list[PlacedLeaf],
    batch_shape: tuple[int, ...],
) -> Callable[[Any], tuple[Any, Any]]:
    """Return a reader of the root's `(terminated, truncated)`: bools, or bool arrays `[*batch_shape, 1]`.

    An end that the env marks neither terminated nor truncated counts as truncated.
    """
    flags: dict[str, list[Read]] = {name: [] for name in END_NAMES}
    decisive = topmost(done_leaves)
    for leaf in done_leaves:
        if leaf.path[:-1] in decisive:
            name = leaf.spec.key[-1] if leaf.spec.key[-1] in flags else "done"
            flags[name].append(_flag_reader(leaf, batch_shape))
    done, terminated, truncated = flags.values()
    none: Any = False
    if batch_shape:
        none = np.zeros((*batch_shape, 1), bool)

    def read_ends(td: Any) -> tuple[Any, Any]:
        ended = functools.reduce(operator.or_, [read(td) for read in terminated], none)
        cut = functools.reduce(operator.or_, [read(td) for read in truncated], none)
        over = functools.reduce(operator.or_, [read(td) for read in done], none)
        # A new array also if nothing terminates it; then what is over, but not terminated.
        return ended | none, cut | (over > ended)

    return read_ends


def reader(leaf: PlacedLeaf) -> Read:
    """Return a leaf's reader, which returns an array (VIEW), a Python number (scalars, single floats) or plain data."""
    fetch = _fetcher(leaf)
    if leaf.spec.is_side:
        return lambda td: to_plain(fetch(td))
    if leaf.spec.shape == () or (
        leaf.spec.shape == (1,) and leaf.spec.dtype in ("float32", "float64")
    ):
        return lambda td: fetch(td).item()
    return lambda td: to_numpy(fetch(td))


def to_numpy(tensor: Any) -> np.ndarray:
    """Return a tensor as an array: a VIEW if it is on the CPU."""
    if tensor.is_cpu and not tensor.requires_grad:
        return tensor.numpy()
    return tensor.detach().cpu().numpy()


def to_plain(value: Any) -> Any:
    """Return data with arrays (copies) in place of tensors and the content in place of non-tensor data.

    bfloat16 becomes float32; a nested tensor becomes a list of arrays.
    """
    if hasattr(value, "is_nested"):
        if value.is_nested:
            return [to_plain(row) for row in value.unbind()]
        return np.array(
            to_numpy(value.float() if str(value.dtype) == "torch.bfloat16" else value)
        )
    if type(value).__name__ in ("NonTensorData", "NonTensorStack"):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(to_plain(item) for item in value)
    return value


def _flag_reader(leaf: PlacedLeaf, batch_shape: tuple[int, ...]) -> Read:
    fetch = _fetcher(leaf)
    if batch_shape:
        return lambda td: (
            to_numpy(fetch(td))
            .astype(bool)
            .reshape(*batch_shape, -1)
            .any(-1, keepdims=True)
        )
    if np.prod(leaf.spec.shape) == 1 and leaf.spec.dtype == "bool":
        return lambda td: fetch(td).item()
    return lambda td: bool(fetch(td).any())


def _fetcher(leaf: PlacedLeaf) -> Read:
    path = leaf.path
    is_side = leaf.spec.is_side

    def fetch(td: Any) -> Any:
        value = td
        for step in path:
            if value is None:
                break
            if isinstance(step, Member):
                value = value.unbind(step.dim)[step.index]
            else:
                value = value.get(step, None)
        if value is None and not is_side:
            raise SpecError(
                f"reading {'/'.join(leaf.spec.key)} failed: expected {leaf.spec}, got nothing. "
                f"The env breaks its own spec: give the leaf at every reset and step, or take it out of the spec."
            )
        return value

    return fetch
