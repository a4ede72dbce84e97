"""Chosen entries of an env's infos as leaves of its observation.

    ParallelEnv(8, make_env, options=ExecutorOptions(infos=("lives",)))          # shapes are read from an env
    ... infos={"lives": int, "position": np.zeros(3), ("episode", "r"): float}   # or given
    ... infos="all"                                                              # every number there is

An entry `lives` becomes `("info", "lives")`. The bool `("info", "_lives")` is True if the env returned the entry;
otherwise the leaf is 0. An entry of a dict inside the info is a path, `("episode", "r")`, and becomes
`("info", "episode", "r")` and `("info", "episode", "_r")`. The root holds the info of a reset, `next` that of the step.

Shapes are read from a separate env, which is reset, stepped once and closed, so the envs themselves start untouched.
Declare the shapes of entries that appear only later (at an episode's end), and those of envs of which a process may
have only one.

Guarantees: no info makes a step fail. A value that does not fit its leaf (another shape, a float for an int, None,
text) counts as absent and is logged once.
"""

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from envherd.shm.specs import Binary, Discrete, EnvSpec, LeafSpec, Unbounded
from envherd.workers.adapters.base import Adapter, Mask, Options, StepValues
from envherd.workers.errors import SpecError
from envherd.workers.info_keys import Path, as_array, as_path, example_of
from envherd.workers.infos import explain
from envherd.workers.random_values import draw
from envherd.workers.wrappers.wrapping import Wrapping
from envherd.workers.writers import coerce

_ROOT = "info"
#: Where a vector env in SAME_STEP mode reports the infos of the rows that ended: Gymnasium's key.
_FINAL = "final_info"
_DEEPEST = 6
_AS_DICTS = "ExecutorOptions(infos='plain') returns infos as dicts, by env.infos()."
_MOST = 1000  # leaves; an info with more numbers is probably a mistake


@dataclass(frozen=True)
class InfoEntry:
    """One entry.

    Attributes:
        path: where it is in the info.
        leaf: its leaf, also the shape and dtype of what is stored.
        mask: the leaf that says whether it was there.
    """

    path: Path
    leaf: LeafSpec
    mask: LeafSpec


class InfoLeaves(Wrapping):
    """Another adapter, with entries of its infos behind its observation.

    Args:
        inner: the adapter.
        fields: from `declared_fields` or `find_fields`.

    Raises:
        SpecError: the env has an observation named `info` itself, or two of the leaves would have one place.
    """

    def __init__(self, inner: Adapter, fields: Iterable[InfoEntry]) -> None:
        self._fields = tuple(fields)
        leaves = [leaf for field in self._fields for leaf in (field.leaf, field.mask)]
        paths = sorted(leaf.key[1:] for leaf in leaves)
        for path, following in pairwise(paths):
            # A path comes directly before those that begin with it.
            if following[: len(path)] == path:
                raise SpecError(
                    f"infos failed: expected each entry and each mask (`_x` is that of `x`) at a separate place, got "
                    f"{_show(path)!r} and {_show(following)!r}. Name only one of these entries in infos=, or rename "
                    f"one in a wrapper around the env."
                )
        super().__init__(inner, leaves, [(_ROOT,)] if leaves else [], "infos")
        self._batch_shape = inner.spec.batch_shape
        self._resets_itself = inner.spec.metadata.get("resets_itself", False)
        self._values: list[Any] = [np.zeros(leaf.shape, leaf.dtype) for leaf in leaves]

    def reset(
        self,
        seed: int | None,
        options: Options = None,
        mask: Mask = None,
    ) -> list[Any]:
        observation = self.inner.reset(seed, options, mask)
        self._read(None if mask is None else mask[..., 0])
        return [*observation, *self._values]

    def step(self, action: list[Any]) -> StepValues:
        observation, reward, terminated, truncated = self.inner.step(action)
        self._read(None)
        if self._resets_itself and (terminated | truncated).any():
            # What such an env reports of a row that ended is of the next episode, whose reset reads it. An entry that
            # is not among the last infos stays: a wrapper may have added it (RecordEpisodeStatistics: `episode`).
            self._read(as_array(terminated | truncated)[..., 0], (_FINAL,))
        return [*observation, *self._values], reward, terminated, truncated

    def _read(self, rows: np.ndarray | None, within: Path = ()) -> None:
        """Read the info, or the mapping at a path in it, into the values.

        Args:
            rows: bool `[*batch_shape]`: of which rows; None for all.
            within: the path. Entries that are not there are left as they are.
        """
        values = self._values
        for index, field in enumerate(self._fields):
            value, was_given = self._value_of(field, within)
            if rows is not None:
                read = rows & (was_given | (not within))
                value = np.where(
                    read.reshape(*read.shape, *[1] * (value.ndim - read.ndim)),
                    value,
                    values[2 * index],
                )
                was_given = np.where(read, was_given, values[2 * index + 1])
            values[2 * index] = value
            values[2 * index + 1] = was_given

    def _value_of(
        self,
        field: InfoEntry,
        within: Path,
    ) -> tuple[np.ndarray, np.ndarray]:
        try:
            found, holder = _look_up(self.inner.info, (*within, *field.path))
            if found is None:
                return self._nothing(field)
            value = coerce(field.leaf, as_array(found))
            mask = np.ones(self._batch_shape, bool)
            # A vector env's mask of the rows that returned it.
            if self._batch_shape and f"_{field.path[-1]}" in holder:
                mask = np.asarray(holder[f"_{field.path[-1]}"], bool).reshape(
                    self._batch_shape
                )
                value = np.where(
                    mask.reshape(*mask.shape, *[1] * (value.ndim - mask.ndim)),
                    value,
                    value.dtype.type(0),
                )
            return value, mask
        except (
            Exception
        ) as error:  # an info may hold the user's objects, which may raise anything
            if self.on_left_out is not None:
                self.on_left_out({_show(field.path): explain(error)})
            return self._nothing(field)

    def _nothing(self, field: InfoEntry) -> tuple[np.ndarray, np.ndarray]:
        return np.zeros(field.leaf.shape, field.leaf.dtype), np.zeros(
            self._batch_shape,
            bool,
        )


def declared_fields(keys: Mapping[str | Path, Any], spec: EnvSpec) -> list[InfoEntry]:
    """Return the fields of declared entries; declarations describe one row of an env that is itself a batch."""
    fields = []
    for name, like in keys.items():
        value = example_of(name, like)
        fields.append(
            _field(
                as_path(name),
                np.broadcast_to(value, (*spec.batch_shape, *value.shape)),
                spec,
            )
        )
    return fields


def find_fields(
    adapter: Adapter,
    keys: Literal["all"] | Sequence[str | Path],
) -> list[InfoEntry]:
    """Reset and step an env once, and return a field for each entry wanted.

    Raises:
        SpecError: a name is not among these infos, or its values are no numbers.
    """
    found: dict[Path, np.ndarray] = {}
    adapter.reset(0)
    _collect(adapter.info, (), found, adapter.spec.batch_shape)
    failure = ""
    try:
        rng = np.random.default_rng(0)
        adapter.step(
            [_input(leaf, rng) for leaf in (*adapter.spec.action, *adapter.spec.state)]
        )
        _collect(adapter.info, (), found, adapter.spec.batch_shape)
    except Exception as error:  # a random action may be one that the env refuses
        failure = f" (its step raised {explain(error)})"
    if keys == "all":
        return [
            _field(path, array, adapter.spec)
            for path, array in found.items()
            # The mask of `x` is `_x`.
            if not (path[-1].startswith("_") and (*path[:-1], path[-1][1:]) in found)
        ]
    fields: dict[Path, InfoEntry] = {}
    for name in keys:
        wanted = as_path(name)
        matching = {
            path: array
            for path, array in found.items()
            if path[: len(wanted)] == wanted
        }
        if not matching:
            value, _ = _look_up(adapter.info, wanted)
            kind = type(value).__name__
            if kind != "NoneType":
                raise SpecError(
                    f"infos failed: expected a number as {_show(wanted)!r}, got a {kind}. {_AS_DICTS}"
                )
            raise SpecError(_not_found(wanted, sorted(map(_show, found)), failure))
        fields.update(
            {
                path: _field(path, array, adapter.spec)
                for path, array in matching.items()
            }
        )
    return list(fields.values())


def _input(leaf: LeafSpec, rng: np.random.Generator) -> Any:
    """Draw a value in the form that adapters take."""
    value = draw(leaf, rng)
    return (
        int(value) if isinstance(leaf.domain, Discrete) and leaf.shape == () else value
    )


def _field(path: Path, array: np.ndarray, spec: EnvSpec) -> InfoEntry:
    domain = Binary() if array.dtype.kind == "b" else Unbounded()
    return InfoEntry(
        path,
        LeafSpec((_ROOT, *path), array.shape, array.dtype.name, domain),
        LeafSpec(
            (_ROOT, *path[:-1], f"_{path[-1]}"),
            spec.batch_shape,
            "bool",
            Binary(),
        ),
    )


def _collect(
    info: Any,
    path: Path,
    found: dict[Path, np.ndarray],
    batch_shape: tuple[int, ...],
) -> None:
    """Add the numbers of an info (of one env, or of a batch) to those already found; existing ones are kept."""
    if len(path) == _DEEPEST or not isinstance(info, Mapping):
        return
    items: list[Any] = []
    # It may be a mapping of the user's own.
    with contextlib.suppress(Exception):
        items = list(info.items())
    for key, value in items:
        if not isinstance(key, str) or not key or len(found) >= _MOST:
            continue
        if isinstance(value, Mapping):
            _collect(value, (*path, key), found, batch_shape)
            continue
        if key.startswith("_") and batch_shape and key[1:] in info:
            continue  # a vector env's own mask
        array = _number(value)
        if array is not None and array.shape[: len(batch_shape)] == batch_shape:
            found.setdefault((*path, key), array)


def _number(value: Any) -> np.ndarray | None:
    try:
        array = as_array(value)
    except Exception:  # ragged, or an object's own code
        return None
    # torch has no long doubles.
    is_number = array.dtype.kind in "biufc" and array.dtype.char not in "gG"
    return array if is_number and array.size else None


def _look_up(info: Any, path: Path) -> tuple[Any, Any]:
    """Return the value at a path, or None, and the mapping that holds it."""
    for name in path[:-1]:
        info = info.get(name) if isinstance(info, Mapping) else None
    return (info.get(path[-1]), info) if isinstance(info, Mapping) else (None, {})


def _show(path: Path) -> str:
    return "/".join(path)


def _not_found(wanted: Path, known: list[str], failure: str) -> str:
    has = f"numbers called {', '.join(known[:20])}" if known else "no numbers at all"
    name = wanted[0] if len(wanted) == 1 else wanted
    return (
        f"infos failed: expected {_show(wanted)!r} in the infos of the first reset and step, which have {has}"
        f"{failure}. If it comes later (or is None at first), say what it will be: infos={{{name!r}: float}}."
    )
