"""The description of an env's arrays: leaves, their domains, and the spec of one env.

Plain, immutable, picklable values; numpy only. A worker sends an `EnvSpec` to the parent as plain data (`to_plain` /
`from_plain`). The parent knows nothing else about an env.

Leading dimensions are never part of a spec: a leaf's shape is that of ONE env (one slot). The
executor adds `[num_envs]` (and `[num_envs, time]` in a rollout) in front.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Key = tuple[str, ...]
#: Key of a nested tensordict -> its batch shape, as pairs: a spec has no dicts that could change.
Groups = tuple[tuple[Key, tuple[int, ...]], ...]

#: The done keys that every env has at its root, in the order in which they are stored.
DONE_KEYS: tuple[Key, ...] = (("done",), ("terminated",), ("truncated",))

#: Entry of a spec's metadata: the keys of the observation leaves that are episode statistics.
EPISODE_KEYS = "episode_keys"


@dataclass(frozen=True)
class Unbounded:
    """Any value of the dtype."""

    def __str__(self) -> str:
        return "any"


@dataclass(frozen=True, eq=False)
class Box:
    """Values in `[low, high]`, bounds inclusive, broadcast to the leaf's shape; infinities mean no bound."""

    low: np.ndarray
    high: np.ndarray

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Box)
            and np.array_equal(self.low, other.low)
            and np.array_equal(self.high, other.high)
        )

    __hash__ = None  # type: ignore[assignment]  # holds arrays

    def __str__(self) -> str:
        low = np.asarray(self.low)
        high = np.asarray(self.high)
        if low.size and high.size:
            return f"[{low.min()}, {high.max()}]"
        return "[]"


@dataclass(frozen=True)
class Discrete:
    """Integer indices `0 .. n-1`; the env itself sees `index + start`."""

    n: int
    start: int = 0

    def __str__(self) -> str:
        return f"0..{self.n - 1}"


@dataclass(frozen=True)
class MultiDiscrete:
    """Integer indices `0 .. nvec[j]-1`, `nvec` nested as the leaf's shape; the env sees `index + start`."""

    nvec: tuple[Any, ...]
    start: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return f"0..{self.nvec} - 1"


@dataclass(frozen=True)
class Binary:
    """Zeros and ones."""

    def __str__(self) -> str:
        return "0 or 1"


@dataclass(frozen=True)
class OneHot:
    """Exactly one of the last dimension's `n` entries is set."""

    n: int

    def __str__(self) -> str:
        return f"one-hot of {self.n}"


Domain = Unbounded | Box | Discrete | MultiDiscrete | Binary | OneHot


@dataclass(frozen=True)
class LeafSpec:
    """One array (or one side-channel value) of an env.

    Attributes:
        key: path in the tensordict, e.g. `("agents", "observation", "RGB")`.
        shape: of one env, without `num_envs`; `()` for scalars. Meaningless when `is_side`.
        dtype: numpy dtype name, e.g. `"uint8"`, `"float32"`, `"bool"`. Empty when `is_side`.
        domain: the legal values.
        is_side: True for leaves without a fixed shape and dtype (text, graphs, sequences, python
            objects): workers send them as plain data outside the slab, and the batch holds them as non-tensor data.
    """

    key: Key
    shape: tuple[int, ...] = ()
    dtype: str = "float32"
    domain: Domain = field(default_factory=Unbounded)
    is_side: bool = False

    def __str__(self) -> str:
        if self.is_side:
            return f"{'/'.join(self.key)}: side channel"
        return f"{'/'.join(self.key)}: {self.dtype} {self.shape} in {self.domain}"

    def to_plain(self) -> dict[str, Any]:
        """Return the leaf as dicts, lists, strings, numbers and arrays."""
        return {
            "key": list(self.key),
            "shape": list(self.shape),
            "dtype": self.dtype,
            "domain": _domain_to_plain(self.domain),
            "is_side": self.is_side,
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "LeafSpec":
        """Rebuild what `to_plain` returned."""
        return cls(
            key=tuple(plain["key"]),
            shape=tuple(int(n) for n in plain["shape"]),
            dtype=str(plain["dtype"]),
            domain=_domain_from_plain(plain["domain"]),
            is_side=bool(plain["is_side"]),
        )


class OneForEach(tuple[LeafSpec, ...]):
    """The specs of several leaves; refuses the attributes of one leaf with a message that says where they are."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        owners = (
            {}
            if name.startswith("_") or not self
            else {".domain": self[0].domain, "": self[0]}
        )
        place = next(
            (f"[0]{at}.{name}" for at, owner in owners.items() if hasattr(owner, name)),
            "[0]",
        )
        raise AttributeError(
            f"a tuple of specs of leaves has no attribute {name!r}. Index it first, as in env.action_spec{place}."
        )


@dataclass(frozen=True)
class EnvSpec:
    """All the leaves of one env, in the order in which adapters return and accept them.

    Attributes:
        observation: what `reset` and `step` return.
        action: what `step` takes.
        reward: usually one leaf `("reward",)`, shape `(1,)`, float32.
        done: bool leaves; the first three are always `DONE_KEYS` with shape `(*batch_shape, 1)`,
            then any nested ones (`("agents", "done")`, ...).
        state: further inputs that a step reads besides the action (TorchRL's `state_spec`).
        batch_shape: empty, or the batch shape of an env that is itself a batch (TorchRL envs with
            a batch size, simulators). Every leaf's shape includes it.
        groups: nested tensordicts with their own batch shape, as `(key, batch shape)`: a multi-agent group of 7 is
            `(("agents",), (7,))`, and the tensordict under `agents` (and those below it) then has batch size
            `[num_envs, 7]`. Include `batch_shape` in it.
        family: the adapter's name, for messages and the CLI.
        metadata: facts about the env: agent names, groups, frame key, action names, ...
    """

    observation: tuple[LeafSpec, ...]
    action: tuple[LeafSpec, ...]
    reward: tuple[LeafSpec, ...] = (LeafSpec(("reward",), (1,), "float32"),)
    done: tuple[LeafSpec, ...] = tuple(
        LeafSpec(k, (1,), "bool", Binary()) for k in DONE_KEYS
    )
    state: tuple[LeafSpec, ...] = ()
    batch_shape: tuple[int, ...] = ()
    groups: Groups = ()
    family: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict, compare=False)

    _GROUPS = ("observation", "action", "reward", "done", "state")

    @property
    def episode_keys(self) -> frozenset[Key]:
        """The keys of the observation leaves that are episode statistics and not the env's own observations."""
        return frozenset(tuple(key) for key in self.metadata.get(EPISODE_KEYS, ()))

    def agent_names(self, group: Key, count: int) -> list[str]:
        """Return the names of the agents of a group: the env's, or else `agent_0`, `agent_1`, ...

        Where there are several rewards, the group's name replaces "agent". One agent without a group has no number.

        Args:
            group: its key, or the key of what is counted where there is no group.
            count: of its agents.
        """
        of_all = self.metadata.get("agent_names") if len(self.reward) == 1 else None
        names = self.metadata.get("group_map", {}).get("/".join(group)) or of_all or ()
        if len(names) == count:
            return [str(name) for name in names]
        label = group[-1] if len(self.reward) > 1 else "agent"
        has_numbers = count > 1 or group in dict(self.groups)
        return [f"{label}_{i}" for i in range(count)] if has_numbers else [label]

    def reward_names(self) -> list[str]:
        """Return a name for each number of one env's rewards: that of its agent."""
        num_leading = len(self.batch_shape)
        return [
            name
            for leaf in self.reward
            for name in self.agent_names(
                leaf.key[:-1] or leaf.key,
                math.prod(leaf.shape[num_leading:]),
            )
        ]

    def leaves(self) -> Iterator[LeafSpec]:
        """Yield every leaf of every group."""
        for group in self._GROUPS:
            yield from getattr(self, group)

    def to_plain(self) -> dict[str, Any]:
        """Return the spec as dicts, lists, strings, numbers and arrays."""
        plain: dict[str, Any] = {
            g: [leaf.to_plain() for leaf in getattr(self, g)] for g in self._GROUPS
        }
        plain["batch_shape"] = list(self.batch_shape)
        plain["groups"] = [[list(key), list(shape)] for key, shape in self.groups]
        plain["family"] = self.family
        plain["metadata"] = dict(self.metadata)
        return plain

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "EnvSpec":
        """Rebuild what `to_plain` returned."""
        groups = {
            g: tuple(LeafSpec.from_plain(leaf) for leaf in plain[g])
            for g in cls._GROUPS
        }
        return cls(
            **groups,
            batch_shape=tuple(int(n) for n in plain["batch_shape"]),
            groups=tuple(
                (tuple(key), tuple(int(n) for n in shape))
                for key, shape in plain["groups"]
            ),
            family=str(plain["family"]),
            metadata=dict(plain["metadata"]),
        )

    def difference(self, other: "EnvSpec") -> str:
        """Return the first difference of two specs, as `key: mine, theirs`; empty if they agree."""
        for group in self._GROUPS:
            mine = {leaf.key: leaf for leaf in getattr(self, group)}
            theirs = {leaf.key: leaf for leaf in getattr(other, group)}
            for key in mine.keys() | theirs.keys():
                if mine.get(key) != theirs.get(key):
                    return f"{group} {mine.get(key, 'absent')} against {theirs.get(key, 'absent')}"
        for name in ("batch_shape", "groups"):
            if getattr(self, name) != getattr(other, name):
                return f"{name} {getattr(self, name)} against {getattr(other, name)}"
        return ""


def done_leaves(
    batch_shape: tuple[int, ...] = (),
    groups: Groups = (),
) -> tuple[LeafSpec, ...]:
    """Return the done leaves of an env: the three root ones, then three for each `(group key, shape)`."""
    root = [LeafSpec(k, (*batch_shape, 1), "bool", Binary()) for k in DONE_KEYS]
    nested = [
        LeafSpec((*prefix, *k), shape, "bool", Binary())
        for prefix, shape in groups
        for k in DONE_KEYS
    ]
    return (*root, *nested)


def _domain_to_plain(domain: Domain) -> dict[str, Any]:
    plain = {"kind": type(domain).__name__, **vars(domain)}
    if isinstance(domain, Box):
        plain.update(low=np.asarray(domain.low), high=np.asarray(domain.high))
    return plain


def _domain_from_plain(plain: Mapping[str, Any]) -> Domain:
    kinds: dict[str, Any] = {
        c.__name__: c for c in (Unbounded, Box, Discrete, MultiDiscrete, Binary, OneHot)
    }
    return kinds[plain["kind"]](**{k: v for k, v in plain.items() if k != "kind"})
