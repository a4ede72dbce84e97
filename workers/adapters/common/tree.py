"""Convert nested native values to flat lists of leaves, and back; shared by families with nested spaces.

A family describes an env's observation, action or reward once, as a tree of `Leaf` and `Branch`, and
gets functions compiled for it: `flattener` (native value -> list aligned with `leaf_specs`) and
`builder` (such a list -> native value). For the usual env, with a single plain leaf, the functions only wrap and unwrap
a list. Arrays are never copied: the env's own arrays are passed on.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np

from envherd.shm.specs import (
    Box,
    Discrete,
    Domain,
    Key,
    LeafSpec,
    MultiDiscrete,
    Unbounded,
)
from envherd.workers.errors import SpecError

Convert = Callable[[Any], Any]

#: Names that an observation must not use at its root, because a batch uses them.
RESERVED_NAMES = frozenset(
    (
        "action",
        "reward",
        "done",
        "terminated",
        "truncated",
        "next",
        "env_ids",
        "interrupted",
        "_reset",
        "_step",
    )
)


@dataclass(frozen=True)
class Leaf:
    """One leaf of a tree.

    Attributes:
        spec: what is stored.
        take: native value -> stored value; None if they are the same.
        give: stored value -> native value; None if they are the same.
    """

    spec: LeafSpec
    take: Convert | None = None
    give: Convert | None = None


@dataclass(frozen=True)
class Branch:
    """A dict, tuple or list of further nodes.

    Attributes:
        kind: `dict`, `tuple` or `list`: what the env itself returns and accepts.
        entries: `(native key or index, node)` in the order of the leaves.
    """

    kind: type
    entries: "tuple[tuple[Any, Node], ...]"

    @property
    def keys(self) -> tuple[Any, ...]:
        """The native keys or indices."""
        return tuple(key for key, _ in self.entries)


Node = Leaf | Branch


def leaf_specs(node: Node) -> tuple[LeafSpec, ...]:
    """Return the leaves of a tree, in the order of the flat list of values."""
    if isinstance(node, Leaf):
        return (node.spec,)
    return tuple(spec for _, child in node.entries for spec in leaf_specs(child))


def is_bare(node: Node) -> bool:
    """Return whether a tree is one leaf that is stored without conversion."""
    return isinstance(node, Leaf) and node.take is None


def dict_branch(
    items: Mapping[Any, Any],
    key: Key,
    make: Callable[[Any, Key], Node],
    operation: str,
) -> Branch:
    """Return the tree of a dict whose entries are below `key`.

    Args:
        items: native key -> description of the entry.
        key: of the dict.
        make: describes an entry at a key.
        operation: what is being read, for messages.

    Raises:
        SpecError: two native keys share a name.
    """
    branch = Branch(
        dict,
        tuple(
            (native, make(inner, (*key, str(native))))
            for native, inner in items.items()
        ),
    )
    check_names(branch, tuple(map(str, items)), operation)
    return branch


def refuse_reserved(names: Iterable[str], operation: str) -> None:
    """Refuse root names of observations that a batch uses.

    Raises:
        SpecError: names the first one.
    """
    for name in names:
        if name in RESERVED_NAMES:
            raise SpecError(
                f"{operation} failed: expected observation names other than {', '.join(sorted(RESERVED_NAMES))}, "
                f"got {name!r} at the root. Rename it in a wrapper around the env, or nest the observation."
            )


def check_names(node: Branch, names: tuple[str, ...], operation: str) -> None:
    """Refuse names that two native keys share (1 and "1").

    Raises:
        SpecError: names the first one.
    """
    for name, key in zip(names, node.keys, strict=True):
        if names.count(name) > 1:
            raise SpecError(
                f"{operation} failed: expected a name for each entry, got {name!r} for several, one of them {key!r}. "
                f"Rename it in a wrapper around the env."
            )


def flattener(node: Node, where: str | None) -> Callable[[Any], list[Any]]:
    """Return the function that splits a native value into its leaves.

    Args:
        node: the tree.
        where: what is read, for messages, e.g. "observation". None ignores entries that were never declared.

    Returns:
        native value -> list aligned with `leaf_specs(node)` (VIEW of the env's arrays). It raises SpecError where the
        value lacks an entry or has one that was never declared; without `where`, what indexing the value raises.
    """
    if isinstance(node, Leaf):
        take = node.take
        return (
            (lambda value: [value]) if take is None else (lambda value: [take(value)])
        )
    if (
        where is not None
        # `itemgetter` of a single key does not return a tuple.
        and len(node.entries) > 1
        and all(is_bare(child) for _, child in node.entries)
    ):
        return _flat_flattener(node, where)
    extend = _extender(node, where)

    def flatten(value: Any) -> list[Any]:
        values: list[Any] = []
        extend(value, values)
        return values

    return flatten


def _flat_flattener(node: Branch, where: str) -> Callable[[Any], list[Any]]:
    get = itemgetter(*node.keys)
    num_entries = len(node.entries)

    def flatten(value: Any) -> list[Any]:
        try:
            if len(value) == num_entries:
                return list(get(value))
        except (TypeError, LookupError):
            pass
        raise _mismatch(node, where, value)

    return flatten


def _extender(node: Node, where: str | None) -> Callable[[Any, list[Any]], None]:
    if isinstance(node, Leaf):
        take = node.take
        if take is None:
            return lambda value, values: values.append(value)
        return lambda value, values: values.append(take(value))
    parts = [
        (key, _extender(child, where and f"{where}[{key!r}]"))
        for key, child in node.entries
    ]

    def pick(value: Any, values: list[Any]) -> None:
        for key, part in parts:
            part(value[key], values)

    if where is None:
        return pick

    def extend(value: Any, values: list[Any]) -> None:
        try:
            inner = (
                [value[key] for key, _ in parts] if len(value) == len(parts) else None
            )
        except (TypeError, LookupError):
            inner = None
        if inner is None:
            raise _mismatch(node, where, value)
        for (_, part), entry in zip(parts, inner, strict=True):
            part(entry, values)

    return extend


def _mismatch(node: Branch, where: str, value: Any) -> SpecError:
    if node.kind is dict:
        expected = f"a dict with {', '.join(map(repr, node.keys)) or 'no entry'}"
    else:
        expected = f"a {node.kind.__name__} of {len(node.entries)}"
    got = type(value).__name__
    if isinstance(value, dict) and node.kind is dict:
        missing = [key for key in node.keys if key not in value]
        extra = [key for key in value if key not in node.keys]
        got = (
            f"one without {missing[0]!r}"
            if missing
            else f"one that has {extra[0]!r} too"
        )
    elif isinstance(value, (tuple, list)):
        got = f"{got} of {len(value)}"
    return SpecError(
        f"reading {where} failed: expected {expected}, got {got}. "
        f"The env breaks its own spec: fix the env or the space it declares."
    )


def builder(node: Node) -> Callable[[list[Any]], Any]:
    """Return the function that builds a native value from its leaves.

    Returns:
        list aligned with `leaf_specs(node)` (further values behind are ignored) -> native value.
    """
    if isinstance(node, Leaf):
        give = node.give
        return itemgetter(0) if give is None else (lambda values: give(values[0]))
    make = _maker(node)
    return lambda values: make(iter(values))


def _maker(node: Node) -> Callable[[Iterator[Any]], Any]:
    if isinstance(node, Leaf):
        give = node.give
        return next if give is None else (lambda values: give(next(values)))
    parts = [_maker(child) for _, child in node.entries]
    keys = node.keys
    kind = node.kind
    if kind is dict:
        return lambda values: {
            key: part(values) for key, part in zip(keys, parts, strict=True)
        }
    return lambda values: kind(part(values) for part in parts)


def interval(low: Any, high: Any, dtype: np.dtype) -> Domain:
    """Return the domain `[low, high]`: bounds that are equal everywhere as one number, none at all as `Unbounded`."""
    low = np.asarray(low, dtype)
    high = np.asarray(high, dtype)
    if dtype.kind == "f" and np.all(np.isneginf(low)) and np.all(np.isposinf(high)):
        return Unbounded()
    return Box(shrunk(low), shrunk(high))


def shrunk(bound: np.ndarray) -> np.ndarray:
    """Return a bound that is equal everywhere as one number, of shape `()`."""
    return (
        bound.reshape(-1)[:1].reshape(())
        if bound.size and (bound == bound.flat[0]).all()
        else bound
    )


def stacked(domains: Sequence[Any], shape: tuple[int, ...], dim: int = 0) -> Domain:
    """Return the domain of values that are stacked along a dimension: one domain for each, all of one shape."""
    first: Domain = domains[0]
    if not isinstance(first, (Box, MultiDiscrete)) and all(
        domain == first for domain in domains
    ):
        return first
    if all(isinstance(domain, (Box, Unbounded)) for domain in domains):
        ends = (
            _stack([getattr(domain, name, none) for domain in domains], shape, dim)
            for name, none in _ENDS
        )
        return Box(*map(shrunk, ends))
    if not all(isinstance(domain, (Discrete, MultiDiscrete)) for domain in domains):
        return Unbounded()
    counts = [
        domain.n if isinstance(domain, Discrete) else domain.nvec for domain in domains
    ]
    starts = _stack([domain.start or 0 for domain in domains], shape, dim)
    return MultiDiscrete(
        nested(_stack(counts, shape, dim)),
        nested(starts) if starts.any() else (),
    )


#: The bounds of a Box, and their values where a domain has none.
_ENDS = (("low", -np.inf), ("high", np.inf))


def _stack(values: Sequence[Any], shape: tuple[int, ...], dim: int) -> np.ndarray:
    return np.stack([np.broadcast_to(value, shape) for value in values], dim)


def nested(values: Any) -> Any:
    """Return numbers, an array or nested lists as an int or nested tuples of ints."""
    values = values.tolist() if isinstance(values, np.ndarray) else values
    return tuple(map(nested, values)) if isinstance(values, list) else int(values)


def array_leaf(
    key: Key,
    shape: tuple[int, ...],
    dtype: np.dtype,
    domain: Domain,
) -> Leaf:
    """Describe an array. One of shape () is stored as an array of one, and handed out as a 0-d array (VIEWS)."""
    if shape != ():
        return Leaf(LeafSpec(key, shape, dtype.name, domain))
    return Leaf(
        LeafSpec(key, (1,), dtype.name, domain),
        take=lambda value: np.asarray(value)[np.newaxis],
        give=lambda value: value.reshape(()),
    )


def side_leaf(key: Key) -> LeafSpec:
    """Return the spec of a leaf that has no fixed shape and dtype."""
    return LeafSpec(key, dtype="", is_side=True)
