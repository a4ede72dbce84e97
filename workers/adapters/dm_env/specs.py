"""Describe dm_env specs as trees of leaves: the keys, shapes, dtypes and domains of an env's values.

Keys, shapes and dtypes follow TorchRL's `DMControlWrapper`: entries of a dict become root keys, a single
array is `("observation",)`, entries of a list are "0", "1", ... (at the root: below "observation"); a
0-d array has shape (1,); dtypes are the spec's, float64 for dm_control's observations and reward. An
action is `("action",)`, or nested below it where the env takes a dict or a list (dmlab2d takes a dict by
action name); a DiscreteArray is an int64 index, a BoundedArray a Box of the same dtype, integers included.
Arrays of strings or objects (dmlab2d's texts), and observations of dmlab2d with a dynamic dimension,
are side-channel values.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from dm_env import specs

from envherd.shm.specs import Binary, Discrete, Domain, Key, LeafSpec, Unbounded
from envherd.workers.adapters.common.scalars import as_float
from envherd.workers.adapters.common.side_values import snapshot
from envherd.workers.adapters.common.tree import (
    Branch,
    Convert,
    Leaf,
    Node,
    array_leaf,
    dict_branch,
    interval,
    refuse_reserved,
    side_leaf,
)
from envherd.workers.errors import SpecError

_MakeLeaf = Callable[[specs.Array, Key], Leaf]


def observation_tree(spec: Any, *, has_dynamic: bool) -> Node:
    """Describe an observation spec.

    Args:
        spec: what `env.observation_spec()` returned.
        has_dynamic: a dimension of 0 stands for one that varies (dmlab2d) rather than for an empty array.

    Raises:
        SpecError: no dm_env spec, or a root name that a batch uses itself.
    """

    def make_leaf(leaf: specs.Array, key: Key) -> Leaf:
        return (
            _text_leaf(key)
            if has_dynamic and 0 in leaf.shape
            else _observation_leaf(leaf, key)
        )

    if not isinstance(spec, Mapping):
        return described(spec, ("observation",), make_leaf)
    operation = "reading observation_spec"
    refuse_reserved(map(str, spec), operation)
    return dict_branch(
        spec, (), lambda inner, key: described(inner, key, make_leaf), operation
    )


def described(spec: Any, key: Key, make_leaf: _MakeLeaf) -> Node:
    """Describe a spec, or a dict or list of specs.

    Args:
        spec: what the env returned.
        key: of its leaf, or below which those of a dict or list are.
        make_leaf: describes one array, such as `action_leaf`.

    Raises:
        SpecError: no dm_env spec.
    """
    if isinstance(spec, Mapping):
        return dict_branch(
            spec,
            key,
            lambda inner, at: described(inner, at, make_leaf),
            f"reading the spec of {'/'.join(key)}",
        )
    if isinstance(spec, (list, tuple)):
        kind = tuple if isinstance(spec, tuple) else list
        return Branch(
            kind,
            tuple(
                (i, described(inner, (*key, str(i)), make_leaf))
                for i, inner in enumerate(spec)
            ),
        )
    if not isinstance(spec, specs.Array):
        raise SpecError(
            f"reading the spec of {'/'.join(key)} failed: expected a dm_env.specs.Array or a dict or list of them, "
            f"got {type(spec).__module__}.{type(spec).__qualname__}. Fix the env."
        )
    return make_leaf(spec, key)


def _observation_leaf(spec: specs.Array, key: Key) -> Leaf:
    dtype = np.dtype(spec.dtype)
    if dtype.kind not in "biufc":
        return _text_leaf(key)
    if isinstance(spec, specs.DiscreteArray):
        return Leaf(LeafSpec(key, (), dtype.name, Discrete(int(spec.num_values))))
    return array_leaf(key, tuple(spec.shape), dtype, _domain(spec, dtype))


def _text_leaf(key: Key) -> Leaf:
    where = "/".join(key)
    return Leaf(side_leaf(key), take=lambda value: snapshot(value, where))


def action_leaf(spec: specs.Array, key: Key) -> Leaf:
    """Describe an array of an action spec."""
    dtype = np.dtype(spec.dtype)
    if dtype.kind not in "biufc":
        return Leaf(side_leaf(key))
    if isinstance(spec, specs.DiscreteArray):
        scalar: Convert = dtype.type
        return Leaf(
            LeafSpec(key, (), "int64", Discrete(int(spec.num_values))),
            give=scalar,
        )
    return array_leaf(key, tuple(spec.shape), dtype, _domain(spec, dtype))


def reward_leaf(spec: specs.Array, key: Key) -> Leaf:
    """Describe an array of a reward spec: a single reward is a float leaf of shape (1,)."""
    dtype = np.dtype(spec.dtype)
    shape = tuple(spec.shape)
    if shape in ((), (1,)) and dtype.kind == "f":
        return Leaf(
            LeafSpec(key, (1,), dtype.name),
            take=lambda value: (
                value if value.__class__ is float else as_float(value, "reward")
            ),
        )
    return array_leaf(key, shape, dtype, Unbounded())


def _domain(spec: specs.Array, dtype: np.dtype) -> Domain:
    if dtype.kind == "b":
        return Binary()
    if isinstance(spec, specs.BoundedArray):
        return interval(spec.minimum, spec.maximum, dtype)
    return Unbounded()
