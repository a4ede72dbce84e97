"""Describe Gymnasium spaces as trees of leaves: the keys, shapes, dtypes and domains of an env's values.

==================  ======================  ========  =======================================================
space               shape                   dtype     domain
==================  ======================  ========  =======================================================
Box                 its own, `()` as (1,)   its own   Box; Unbounded if no bound is finite; Binary if bool
Discrete            ()                      below     below
MultiDiscrete       of `nvec`               below     below
MultiBinary         its own                 int8      Binary
Text, Graph,        side channel: plain data, see below
Sequence, OneOf,
any other space
==================  ======================  ========  =======================================================

Discrete *actions* are int64 indices `0..n-1`; the domain is Discrete or MultiDiscrete with the space's `start`. This
module adds `start`, and the env gets its space's own dtype. Discrete *observations* are what the env returns, in the
space's dtype: with a `start` of 0 the domain is Discrete or MultiDiscrete, otherwise it is the Box
`[start, start + n - 1]`, which contains the env's values.

Keys follow TorchRL's `GymWrapper`: a Dict at the root of an observation gives root keys, a Dict inside
gives nested keys, anything else at the root is `("observation",)`; a root entry "state" is called
"observation" where there is no "observation" at the same level. A Tuple's entries are "0", "1", ... below its
key. An action is `("action",)` or, for Dict and Tuple spaces, nested below it.

Side channel: text is a str; a graph is a dict of `nodes`, `edges`, `edge_links` (arrays, or None where
the graph has none); a sequence is a tuple of such values, or, if stacked, an array (a dict or tuple of
arrays); a OneOf is `(index, value)`; values of a custom space are what `common.values.snapshot` returns for them. In
actions, the same values are converted back into what the space samples.

The facade of Gymnasium passes values unchanged (`native_tree`); all but the four spaces of arrays are pickled there.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from gymnasium import spaces

from envherd.shm.specs import (
    Binary,
    Box,
    Discrete,
    Domain,
    Key,
    LeafSpec,
    MultiDiscrete,
)
from envherd.workers.adapters.common.tree import (
    Branch,
    Convert,
    Leaf,
    Node,
    array_leaf,
    check_names,
    dict_branch,
    interval,
    nested,
    refuse_reserved,
    side_leaf,
)
from envherd.workers.adapters.common.values import snapshot
from envherd.workers.errors import SpecError
from envherd.workers.sending.pickling import dumps

# In older releases of Gymnasium, Discrete takes no parameter.


Space = spaces.Space[Any]
#: Spaces whose values are arrays of one shape and dtype.
FIXED = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
#: Describes one space that is neither Dict nor Tuple.
MakeLeaf = Callable[[Space, Key], Leaf]


def observation_tree(
    space: Any,
    make_leaf: MakeLeaf | None = None,
) -> tuple[Node, dict[str, str]]:
    """Describe an observation space.

    Args:
        space: of one env.
        make_leaf: describes its leaves; None for `observation_leaf`, which describes those of one env.

    Returns:
        The tree, and the root names that differ from the env's own, as `{ours: native}`.

    Raises:
        SpecError: no space, or a root name that a batch uses.
    """
    _check_space(space, "observation_space")
    make_leaf = make_leaf or observation_leaf
    if not isinstance(space, spaces.Dict):
        return _tree(space, ("observation",), make_leaf), {}
    renames = {"state": "observation"} if "observation" not in space.spaces else {}
    names = tuple(renames.get(str(key), str(key)) for key in space.spaces)
    tree = Branch(
        dict,
        tuple(
            (key, _tree(sub, (name,), make_leaf))
            for name, (key, sub) in zip(names, space.spaces.items(), strict=True)
        ),
    )
    refuse_reserved(names, "reading observation_space")
    check_names(tree, names, "reading observation_space")
    return tree, {
        ours: native for native, ours in renames.items() if native in space.spaces
    }


def tree_below(
    space: Any,
    what: str,
    *above: str,
    make_leaf: MakeLeaf | None = None,
) -> Node:
    """Describe a space whose leaves, including a Dict's, are at or below one key.

    Args:
        space: of one env.
        what: "observation" or "action".
        *above: the first names of the key; `what` is its last.
        make_leaf: as of `observation_tree`.

    Raises:
        SpecError: no space at all.
    """
    _check_space(space, f"{what}_space")
    return _tree(
        space,
        (*above, what),
        make_leaf or (observation_leaf if what == "observation" else action_leaf),
    )


def native_tree(
    space: Space,
    name: str,
    order: Any = None,
    take: Convert | None = dumps,
) -> Node:
    """Describe a space whose values are passed unchanged: leaves `(name, "0")`, `(name, "1")`, ..., any value allowed.

    Args:
        space: of one env.
        name: of the root of the keys.
        order: the space of a batch: Gymnasium passes envs dicts whose keys are in its order. None for `space`.
        take: converts values that are no arrays of a fixed shape; None leaves them as they are.
    """
    numbers = itertools.count()

    def make_leaf(space: Space, _: Key) -> Leaf:
        key = (name, str(next(numbers)))
        if isinstance(space, FIXED):
            return Leaf(
                LeafSpec(key, tuple(space.shape or ()), np.dtype(space.dtype).name)
            )
        return Leaf(side_leaf(key), take=take)

    return _tree(space, (), make_leaf, space if order is None else order)


def reward_leaf(space: Any) -> Leaf | None:
    """Describe a `reward_space` of several rewards (multi-objective envs); None for a single one or no space."""
    if not isinstance(space, spaces.Box) or space.shape in ((), (1,)):
        return None
    return Leaf(
        LeafSpec(
            ("reward",),
            space.shape,
            "float32",
            interval(space.low, space.high, np.dtype("float32")),
        )
    )


def metadata(env: Any, renamed: dict[str, str]) -> dict[str, Any]:
    """Return the metadata of the spec of an env (or vector env).

    Args:
        env: what the factory returned.
        renamed: see `observation_tree`.
    """
    native = type(env.unwrapped)
    facts = {
        "env_id": getattr(getattr(env, "spec", None), "id", None)
        or f"{native.__module__}.{native.__qualname__}",
        "render_mode": env.render_mode,
        **frame_rate(env),
    }
    return {**facts, "renamed": renamed} if renamed else facts


def frame_rate(env: Any) -> dict[str, float]:
    """Return `{"render_fps": ...}` of the env's own metadata, if it is a number there."""
    fps = (getattr(env, "metadata", None) or {}).get("render_fps")
    return {"render_fps": fps} if isinstance(fps, (int, float)) else {}


def _check_space(space: Any, name: str) -> None:
    if not isinstance(space, spaces.Space):
        raise SpecError(
            f"reading {name} failed: expected a gymnasium.spaces.Space, got {type(space).__module__}."
            f"{type(space).__qualname__}. Set `self.{name}` in the env's __init__."
        )


def _tree(space: Space, key: Key, make_leaf: MakeLeaf, order: Any = None) -> Node:
    """Describe a space; with an order, as of `native_tree`, two entries of a Dict may share a name."""
    if isinstance(space, spaces.Dict) and order is None:
        return dict_branch(
            space.spaces,
            key,
            lambda sub, at: _tree(sub, at, make_leaf),
            f"reading the space of {'/'.join(key)}",
        )
    if not isinstance(space, (spaces.Dict, spaces.Tuple)):
        return make_leaf(space, key)
    kind, names = (
        (dict, order.spaces)
        if isinstance(space, spaces.Dict)
        else (tuple, range(len(space.spaces)))
    )
    inner: Any = space.spaces
    return Branch(
        kind,
        tuple(
            (
                i,
                _tree(
                    inner[i],
                    (*key, str(i)),
                    make_leaf,
                    None if order is None else order[i],
                ),
            )
            for i in names
        ),
    )


def observation_leaf(space: Space, key: Key) -> Leaf:
    """Describe how an observation of one space is stored."""
    if isinstance(space, (spaces.Box, spaces.MultiBinary)):
        return _array_leaf(space, key)
    domain: Domain
    if isinstance(space, spaces.Discrete):
        start = int(space.start)
        n = int(space.n)
        domain = interval(start, start + n - 1, space.dtype) if start else Discrete(n)
        return Leaf(LeafSpec(key, (), space.dtype.name, domain))
    if isinstance(space, spaces.MultiDiscrete):
        if space.start.any():
            domain = Box(space.start.copy(), space.start + space.nvec - 1)
        else:
            domain = MultiDiscrete(nested(space.nvec.tolist()))
        return Leaf(LeafSpec(key, space.shape, space.dtype.name, domain))
    where = "/".join(key)
    return Leaf(side_leaf(key), take=lambda value: snapshot(value, where))


def action_leaf(space: Space, key: Key) -> Leaf:
    """Describe how an action of one space is passed."""
    if isinstance(space, (spaces.Box, spaces.MultiBinary)):
        return _array_leaf(space, key)
    if isinstance(space, spaces.Discrete):
        # The env gets a scalar of its space's dtype, as `space.sample()` returns it.
        return Leaf(
            LeafSpec(key, (), "int64", Discrete(int(space.n), int(space.start))),
            give=_Scalars(space).__getitem__,
        )
    if isinstance(space, spaces.MultiDiscrete):
        starts = nested(space.start.tolist()) if space.start.any() else ()
        return Leaf(
            LeafSpec(
                key,
                space.shape,
                "int64",
                MultiDiscrete(nested(space.nvec.tolist()), starts),
            ),
            give=from_indices(space),
        )
    return Leaf(side_leaf(key), give=_reviver(space))


def _array_leaf(space: spaces.Box | spaces.MultiBinary, key: Key) -> Leaf:
    dtype = np.dtype(space.dtype)
    domain = (
        Binary()
        if isinstance(space, spaces.MultiBinary) or dtype.kind == "b"
        else interval(space.low, space.high, dtype)
    )
    return array_leaf(key, space.shape, dtype, domain)


class _Scalars(dict[int, Any]):
    """index -> `index + start` as a numpy scalar; the first ones are made in advance (making one takes 0.1 us)."""

    _NUM_READY = 256

    def __init__(self, space: spaces.Discrete[Any]) -> None:
        self._make = space.dtype.type
        self._start = int(space.start)
        super().__init__(
            (i, self._make(i + self._start))
            for i in range(min(int(space.n), self._NUM_READY))
        )

    def __missing__(self, index: int) -> Any:
        return self._make(index + self._start)


def ready_values(give: Convert | None) -> tuple[Any, ...]:
    """Return what an action leaf's `give` returns for the first indices, if it is a table."""
    table = getattr(give, "__self__", None)
    return (
        tuple(table[i] for i in range(len(table)))
        if isinstance(table, _Scalars)
        else ()
    )


def from_indices(
    space: spaces.Discrete[Any] | spaces.MultiDiscrete[Any],
) -> Convert | None:
    """Return the function from an array of indices to what a space has in their place; None if they are the same."""
    dtype = space.dtype
    start = np.asarray(space.start, np.int64)
    if not start.any():
        return None if dtype == np.int64 else lambda indices: indices.astype(dtype)
    return lambda indices: (indices + start).astype(dtype, copy=False)


def _reviver(space: Space) -> Convert | None:
    """Return the function from plain data to what a space samples; None if they are the same."""
    if isinstance(space, spaces.Graph):
        return lambda value: (
            value
            if isinstance(value, spaces.GraphInstance)
            else spaces.GraphInstance(**value)
        )
    if isinstance(space, spaces.Sequence) and not space.stack:
        inner = _reviver(space.feature_space)
        return (
            tuple
            if inner is None
            else lambda value: tuple(inner(item) for item in value)
        )
    if isinstance(space, spaces.OneOf):
        options = [_reviver(sub) for sub in space.spaces]
        return lambda value: (
            np.int64(value[0]),
            _revive(options[int(value[0])], value[1]),
        )
    if isinstance(space, spaces.Dict):
        named = {key: _reviver(sub) for key, sub in space.spaces.items()}
        return lambda value: {
            key: _revive(convert, value[key]) for key, convert in named.items()
        }
    if isinstance(space, spaces.Tuple):
        parts = [_reviver(sub) for sub in space.spaces]
        return lambda value: tuple(
            _revive(convert, item) for convert, item in zip(parts, value, strict=True)
        )
    if isinstance(space, spaces.Discrete):
        scalar: Convert = space.dtype.type
        return scalar
    return None


def _revive(convert: Convert | None, value: Any) -> Any:
    return value if convert is None else convert(value)


# ---- rows --------------------------------------------------------------------------------------
# Spaces of envs that are themselves a batch: the counterpart, for n rows, of the spaces above.
#
# A leaf of a row's shape `s` becomes one of shape `(n, *s)`, with the same domain for each row. Keys are those of a
# single env. Values without a fixed shape are lists of n.


def observations_of(num_rows: int) -> MakeLeaf:
    """Return a function that describes the observations of `num_rows` rows, for `observation_tree`."""

    def make_leaf(space: Space, key: Key) -> Leaf:
        row = observation_leaf(space, key)
        if row.spec.is_side:
            return Leaf(row.spec, take=_for_each(row.take))
        # Of all spaces, only a Box of shape () is stored differently.
        take: Convert | None = (
            None if row.take is None else lambda value: np.asarray(value)[:, np.newaxis]
        )
        return Leaf(_of_rows(row, num_rows), take=take)

    return make_leaf


def actions_of(num_rows: int) -> MakeLeaf:
    """Return a function that describes the actions of `num_rows` rows, for `tree_below`."""

    def make_leaf(space: Space, key: Key) -> Leaf:
        row = action_leaf(space, key)
        if row.spec.is_side:
            each = _for_each(row.give)
            return Leaf(row.spec, give=lambda values: tuple(each(values)))
        if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
            return Leaf(_of_rows(row, num_rows), give=from_indices(space))
        return Leaf(
            _of_rows(row, num_rows),
            give=None if row.give is None else lambda value: value[:, 0],
        )

    return make_leaf


def mosaic(frames: Any) -> Any:
    """Return pictures of the same size as one, uint8 `[H, W, 3]`, in a grid as square as possible."""
    pictures = [np.asarray(frame) for frame in frames if frame is not None]
    if not pictures:
        return None
    num_columns = math.ceil(math.sqrt(len(pictures)))
    num_lines = math.ceil(len(pictures) / num_columns)
    pictures += [np.zeros_like(pictures[0])] * (num_lines * num_columns - len(pictures))
    return np.vstack(
        [
            np.hstack(pictures[i * num_columns : (i + 1) * num_columns])
            for i in range(num_lines)
        ]
    )


def _of_rows(row: Leaf, num_rows: int) -> Any:
    domain = row.spec.domain
    if isinstance(domain, MultiDiscrete):
        domain = MultiDiscrete(
            (domain.nvec,) * num_rows,
            (domain.start,) * num_rows if domain.start else (),
        )
    return replace(row.spec, shape=(num_rows, *row.spec.shape), domain=domain)


def _for_each(convert: Convert | None) -> Convert:
    return (
        list
        if convert is None
        else (lambda values: [convert(value) for value in values])
    )
