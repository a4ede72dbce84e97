"""Seeds: from (root seed, env id, episode) to the numbers that envs and global generators get.

Guarantees: the same triple gives the same seed on every machine, for any number of workers and in any
order; seeds of different envs and episodes are statistically independent (numpy's `SeedSequence`,
which mixes the triple by hashing; neighbouring root seeds do not overlap as `seed + rank` does).
"""

from __future__ import annotations

import operator
import random
import secrets
import sys
from typing import Any

import numpy as np

#: spawn_key of the seed for what the factory draws from global generators, besides the episodes'.
_BUILD = 2**32 - 1


def draw_root_seed() -> int:
    """Return a fresh root seed in `[0, 2**63)` from the operating system's entropy."""
    return secrets.randbits(63)


def as_root_seed(seed: Any, what: str = "seed") -> int:
    """Return a root seed as given, or a fresh one for None.

    Raises:
        ValueError: neither an integer of at least 0 nor None; `what` names the call.
    """
    if seed is None:
        return draw_root_seed()
    try:
        found = operator.index(seed)
    except TypeError:
        found = -1
    if found < 0 or isinstance(seed, bool):
        raise ValueError(f"{what} failed: expected an integer of at least 0, or None, got {seed!r}.")
    return found


def episode_seed(root_seed: int, env_id: int, episode: int) -> int:
    """Return the seed of one episode of one env, in `[0, 2**32)`."""
    return _first_word(root_seed, env_id, episode)


def build_seed(root_seed: int, env_id: int) -> int:
    """Return the seed of the global generators while one env's factory runs, in `[0, 2**32)`."""
    return _first_word(root_seed, env_id, _BUILD)


def _first_word(root_seed: int, *spawn_key: int) -> int:
    return int(np.random.SeedSequence(root_seed, spawn_key=spawn_key).generate_state(1)[0])


def seed_globals(seed: int) -> None:
    """Seed python's, numpy's and, where it is loaded already, torch's global generators."""
    random.seed(seed)
    np.random.seed(seed)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(seed)


def globals_state() -> tuple[Any, ...]:
    """Return the state of python's and numpy's global generators, comparable with `same_state`."""
    return random.getstate(), np.random.get_state(legacy=False)


def restore_globals(state: tuple[Any, ...]) -> None:
    """Put back what `globals_state` returned."""
    random.setstate(state[0])
    np.random.set_state(state[1])


def drawn_between(before: tuple[Any, ...], after: tuple[Any, ...]) -> list[str]:
    """Name the global generators that were drawn from between two states: "random", "numpy.random"."""
    drawn = []
    if before[0] != after[0]:
        drawn.append("random")
    old, new = before[1]["state"], after[1]["state"]
    if old["pos"] != new["pos"] or not np.array_equal(old["key"], new["key"]):
        drawn.append("numpy.random")
    return drawn


def caller_state() -> tuple[Any, ...]:
    """Return the state of all global generators (torch's too, if it is loaded), for `restore_caller`."""
    torch = sys.modules.get("torch")
    return (*globals_state(), None if torch is None else torch.get_rng_state())


def restore_caller(state: tuple[Any, ...]) -> None:
    """Put back what `caller_state` returned."""
    restore_globals(state)
    torch = sys.modules.get("torch")
    if torch is not None and state[2] is not None:
        torch.set_rng_state(state[2])
