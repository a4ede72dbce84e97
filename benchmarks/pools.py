"""Pools of envs behind one small interface, so that one harness can drive them all."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["ours", "peer", "bound"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """The work of a pool.

    Attributes:
        make_env: builds one env, a Gymnasium one unless `family` says otherwise.
        num_envs, num_workers: N, and the number of workers of pools with that choice.
        family: "gymnasium", or "meltingpot", whose `make_env` is a `MeltingPotFactory`.
        has_ends: whether episodes end and are counted.
        episode: steps after which Melting Pot's episodes end, and calls that a slot has at least; 0 for neither.
    """

    make_env: Callable[[], Any]
    num_envs: int = 8
    num_workers: int = 2
    family: Literal["gymnasium", "meltingpot"] = "gymnasium"
    has_ends: bool = False
    episode: int = 0


def _nothing() -> None:
    """Do nothing."""


def _unknown() -> int:
    return -1


@dataclass(frozen=True)
class Pool:
    """A running pool.

    Attributes:
        step: one call, as users make it; returns the number of env steps.
        close: ends it.
        episodes: number of ended episodes so far; -1 if unknown.
        wake, rest: called before and after each slot, for pools that would otherwise work in between.
    """

    step: Callable[[], int]
    close: Callable[[], Any]
    episodes: Callable[[], int] = _unknown
    wake: Callable[[], None] = _nothing
    rest: Callable[[], None] = _nothing


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One way to run envs.

    Attributes:
        name: in tables.
        build: starts it.
        kind: ours, a peer, or a bound: a limit that no executor can exceed, or a loop without an executor.
        peer: its name in `--peers`.
        package: that must be installed.
        families: of envs that it takes.
    """

    name: str
    build: Callable[[Job], Pool]
    kind: Kind = "peer"
    peer: str = ""
    package: str | None = None
    families: tuple[str, ...] = field(default=("gymnasium",))

    @property
    def is_installed(self) -> bool:
        """Whether its package is installed."""
        return (
            self.package is None or importlib.util.find_spec(self.package) is not None
        )


class EndCounter:
    """Counts the ends in batches of flags."""

    def __init__(self) -> None:
        self.total = 0

    def add(self, flags: Any) -> None:
        """Count the true ones of an array or a tensor."""
        self.total += int(flags.sum())

    def read(self) -> int:
        """Return how many there were."""
        return self.total
