"""Leaves that options of an executor add to an env's observation: statistics of episodes, and entries of infos.

Return, length and time of episodes:

    ParallelEnv(8, make_env, options=ExecutorOptions(episode_statistics=True))

The leaves cover the episode so far: in the row in which an episode ends (`done`) they cover all of it; after a reset
they are 0. The sum of `("reward",)` is `("episode", "return")`; the sum of a group's reward, `("agents", "reward")`,
is `("agents", "episode", "return")`, with the reward's shape. `("episode", "length")` counts steps, and
`("episode", "time")` is the number of seconds since the first step began. Rewards are added in float64.

Chosen entries of an env's infos:

    infos = {"lives": int, "position": np.zeros(3), ("episode", "r"): float}
    ParallelEnv(8, make_env, options=ExecutorOptions(infos=infos))

An entry `lives` becomes `("info", "lives")`. The bool `("info", "_lives")` is True if the env returned the entry;
otherwise the leaf is 0. An entry of a dict inside the info is a path, `("episode", "r")`, and becomes
`("info", "episode", "r")` and `("info", "episode", "_r")`. The root holds the info of a reset, `next` that of the step.

Guarantees: no info makes a step fail. A value that does not fit its leaf (another shape, a float for an int, None,
text) counts as absent and is logged once.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from envherd.shm.specs import (
    EPISODE_KEYS,
    Binary,
    EnvSpec,
    Key,
    LeafSpec,
    Unbounded,
)
from envherd.workers.adapters.base import Adapter, Mask, Options, StepValues
from envherd.workers.errors import SpecError
from envherd.workers.infos import InfoPath, as_array, as_path, example_of, explain
from envherd.workers.options import InfoKeys
from envherd.workers.writers import coerce


class Wrapping(Adapter):
    """Forwards everything to another adapter; subclasses add the values of further leaves.

    Args:
        inner: the adapter.
        leaves: of the observation, behind those of the env.
        roots: keys under which all added leaves are.
        option: name of the option that adds them, for the message.

    Raises:
        SpecError: the env has an observation under one of the added names.
    """

    def __init__(
        self,
        inner: Adapter,
        leaves: Iterable[LeafSpec],
        roots: Iterable[Key],
        option: str,
    ) -> None:
        self.inner = inner
        self.family = inner.family  # type: ignore[misc]  # one adapter for all families
        self.origin = inner.origin
        self.takes_tensors = inner.takes_tensors
        self.is_alone = inner.is_alone
        self.device = inner.device
        self.has_whole_state = inner.has_whole_state
        self.done_values = inner.done_values  # type: ignore[method-assign]
        self.render = inner.render  # type: ignore[method-assign]
        self.reseeded = inner.reseeded  # type: ignore[method-assign]
        self.close = inner.close  # type: ignore[method-assign]
        self.leaves = tuple(leaves)
        refuse_taken([leaf.key for leaf in inner.spec.observation], roots, option)
        self.unchecked = inner.unchecked | {leaf.key for leaf in self.leaves}
        self.spec = replace(
            inner.spec,
            observation=(*inner.spec.observation, *self.leaves),
        )

    @property
    def env(self) -> Any:
        """The native env, which a family may build anew."""
        return self.inner.env

    @property
    def info(self) -> Mapping[str, Any]:  # type: ignore[override]
        """The env's info of its last reset or step (VIEW)."""
        return self.inner.info

    def state_dict(self) -> Any:
        return self.inner.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.read_state(state)()

    def read_state(self, state: Any) -> Callable[[], None]:
        return self.inner.read_state(state)


def refuse_taken(observed: Sequence[Key], roots: Iterable[Key], option: str) -> None:
    """Refuse an env that has an observation under one of the names that an option adds.

    Raises:
        SpecError: it has.
    """
    for root in roots:
        if any(key[: len(root)] == root for key in observed):
            raise SpecError(
                f"{option} failed: expected an env without an observation named {'/'.join(root)!r}, got one that "
                f"has it. Rename it in a wrapper around the env."
            )


# ---- episode leaves ----------------------------------------------------------------------------

_EPISODE_ROOT = "episode"
#: Marks a state that also holds the statistics of the episode.
_STATE = "envherd.episode"
_FLOATS = ("float32", "float64")


def return_key(reward: Key) -> Key:
    """Return the key of the sum of a reward."""
    name = "return" if reward[-1] == "reward" else f"{reward[-1]}_return"
    return (*reward[:-1], _EPISODE_ROOT, name)


class EpisodeSums:
    """Return, length and time of the running episodes of one env.

    Args:
        shape: the env's batch shape.
        rewards: its reward leaves.

    Attributes:
        leaves: of the returns in the order of the rewards, then of length and time.
        roots: keys under which all of them are.
        values: arrays, aligned with `leaves` (VIEWS).
    """

    def __init__(self, shape: tuple[int, ...], rewards: Sequence[LeafSpec]) -> None:
        returns = [
            LeafSpec(
                return_key(leaf.key),
                leaf.shape,
                {"f": leaf.dtype, "c": "float64"}.get(
                    np.dtype(leaf.dtype).kind,
                    "int64",
                ),
            )
            for leaf in rewards
        ]
        self.leaves = (
            *returns,
            LeafSpec((_EPISODE_ROOT, "length"), (*shape, 1), "int64"),
            LeafSpec((_EPISODE_ROOT, "time"), (*shape, 1), "float32"),
        )
        self.roots = sorted({leaf.key[:-1] for leaf in self.leaves})
        self.values = [np.zeros(leaf.shape, leaf.dtype) for leaf in self.leaves]
        self._sums = [np.zeros(leaf.shape) for leaf in returns]
        self._began = np.zeros(shape)
        self._is_fresh = np.ones(shape, bool)
        self._has_fresh = True
        *self._returns, self._length, self._seconds = self.values
        if not shape and [(leaf.shape, leaf.dtype in _FLOATS) for leaf in rewards] == [
            ((1,), True)
        ]:
            self.add = self._single_adder()  # type: ignore[assignment,method-assign]

    def restart(self, rows: Any) -> None:
        """Set everything to 0 for some rows of the env: an index, e.g. bool `[*shape]`."""
        for array in (*self._sums, *self._returns):
            array[rows] = 0
        self._length[rows] = self._seconds[rows] = 0
        self._is_fresh[rows] = self._has_fresh = True

    def begin(self) -> None:
        """Note the time, before a step."""
        if self._has_fresh:
            self._began[self._is_fresh] = time.perf_counter()
            self._is_fresh[...] = self._has_fresh = False

    def add(self, rewards: list[Any]) -> None:
        """Add the rewards, after a step."""
        # The block refuses too few or too many.
        for total, value, given in zip(
            self._sums,
            self._returns,
            rewards,
            strict=False,
        ):
            try:
                np.add(total, given, out=total)
            # It is no reward of this env, which the block reports when it stores it.
            except (TypeError, ValueError):
                continue
            value[...] = total
        self._length += 1
        self._seconds[..., 0] = time.perf_counter() - self._began

    def _single_adder(self) -> Callable[[list[Any]], None]:
        """Return the same as `add` for an env with one reward, which takes a third of the time."""
        memories: list[Any] = [
            array.reshape(-1).data for array in (*self._sums, self._began, *self.values)
        ]
        total, began, value, length, seconds = memories

        def add(rewards: list[Any]) -> None:
            if len(rewards) != 1 or rewards[0].__class__ is not float:
                EpisodeSums.add(self, rewards)
                return
            total[0] += rewards[0]
            value[0] = total[0]
            length[0] += 1
            seconds[0] = time.perf_counter() - began[0]

        return add

    def state(self) -> list[Any]:
        """Return copies of the sums, the lengths, and the seconds so far."""
        seconds = np.where(self._is_fresh, 0.0, time.perf_counter() - self._began)
        return [*(total.copy() for total in self._sums), self._length.copy(), seconds]

    def checked(self, state: Any) -> list[Any]:
        """Return what `state` returned.

        Raises:
            ValueError: it is none of these sums.
        """
        forms = [(array.shape, array.dtype) for array in self.state()]
        arrays = state if isinstance(state, list) else []
        if [
            (getattr(one, "shape", None), getattr(one, "dtype", None)) for one in arrays
        ] != forms:
            raise ValueError(
                f"expected the statistics of an episode as {forms}, got {type(state).__name__}."
            )
        return arrays

    def restore(self, state: list[Any]) -> None:
        """Put back what `state` returned."""
        *sums, length, seconds = state
        for total, value, kept in zip(self._sums, self._returns, sums, strict=True):
            total[...] = value[...] = kept
        self._length[...] = length
        self._began[...] = time.perf_counter() - seconds
        self._seconds[..., 0] = seconds
        self._is_fresh[...] = length[..., 0] == 0
        self._has_fresh = bool(self._is_fresh.any())


class EpisodeLeaves(Wrapping):
    """Another adapter, with the statistics of the episode behind its observation.

    Args:
        inner: the adapter.

    Raises:
        SpecError: the env has an observation named `episode` itself.
    """

    def __init__(self, inner: Adapter) -> None:
        self._sums = sums = EpisodeSums(inner.spec.batch_shape, inner.spec.reward)
        super().__init__(inner, sums.leaves, sums.roots, "episode_statistics")
        self.spec = replace(
            self.spec,
            metadata={
                **self.spec.metadata,
                EPISODE_KEYS: [list(leaf.key) for leaf in self.leaves],
            },
        )

    def reset(
        self,
        seed: int | None,
        options: Options = None,
        mask: Mask = None,
    ) -> list[Any]:
        observation = self.inner.reset(seed, options, mask)
        self._sums.restart(... if mask is None else mask[..., 0])
        return [*observation, *self._sums.values]

    def step(self, action: list[Any]) -> StepValues:
        sums = self._sums
        sums.begin()
        observation, reward, terminated, truncated = self.inner.step(action)
        sums.add(reward)
        return [*observation, *sums.values], reward, terminated, truncated

    def state_dict(self) -> Any:
        """Return the env's state, with the statistics of its episode."""
        return {_STATE: self._sums.state(), "env": self.inner.state_dict()}

    def read_state(self, state: Any) -> Callable[[], None]:
        """Check a state, also one saved without the option: the statistics then start here; return what restores it."""
        if not (isinstance(state, Mapping) and _STATE in state and "env" in state):
            return self.inner.read_state(state)
        put = self.inner.read_state(state["env"])
        sums = self._sums.checked(state[_STATE])

        def put_all() -> None:
            put()
            self._sums.restore(sums)

        return put_all


# ---- info leaves -------------------------------------------------------------------------------

_INFO_ROOT = "info"
#: Where a vector env in SAME_STEP mode reports the infos of the rows that ended: Gymnasium's key.
_FINAL = "final_info"


@dataclass(frozen=True)
class InfoEntry:
    """One entry.

    Attributes:
        path: where it is in the info.
        leaf: its leaf, also the shape and dtype of what is stored.
        mask: the leaf that says whether it was there.
    """

    path: InfoPath
    leaf: LeafSpec
    mask: LeafSpec


class InfoLeaves(Wrapping):
    """Another adapter, with entries of its infos behind its observation.

    Args:
        inner: the adapter.
        keys: name or path of an entry -> a value like those of one row, or their type.

    Raises:
        SpecError: the env has an observation named `info` itself, or two of the leaves would have one place.
    """

    def __init__(self, inner: Adapter, keys: InfoKeys) -> None:
        self._fields = [_field(name, like, inner.spec) for name, like in keys.items()]
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
        super().__init__(inner, leaves, [(_INFO_ROOT,)] if leaves else [], "infos")
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

    def _read(self, rows: np.ndarray | None, within: InfoPath = ()) -> None:
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
        within: InfoPath,
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


def _field(name: str | InfoPath, like: Any, spec: EnvSpec) -> InfoEntry:
    path = as_path(name)
    value = example_of(name, like)
    domain = Binary() if value.dtype.kind == "b" else Unbounded()
    shape = (*spec.batch_shape, *value.shape)
    mask_key = (_INFO_ROOT, *path[:-1], f"_{path[-1]}")
    return InfoEntry(
        path,
        LeafSpec((_INFO_ROOT, *path), shape, value.dtype.name, domain),
        LeafSpec(mask_key, spec.batch_shape, "bool", Binary()),
    )


def _look_up(info: Any, path: InfoPath) -> tuple[Any, Any]:
    """Return the value at a path, or None, and the mapping that holds it."""
    for name in path[:-1]:
        info = info.get(name) if isinstance(info, Mapping) else None
    return (info.get(path[-1]), info) if isinstance(info, Mapping) else (None, {})


def _show(path: InfoPath) -> str:
    return "/".join(path)
