"""Derive the seeds of envs and global generators from (root seed, env id, episode).

Guarantees: the same triple gives the same seed on every machine, for any number of workers and in any
order; seeds of different envs and episodes are statistically independent (numpy's `SeedSequence`,
which mixes the triple by hashing; neighbouring root seeds do not overlap as `seed + rank` does).
"""

import operator
import random
import secrets
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

#: spawn_key of the seed of the global generators while a factory runs.
_BUILD = 2**32 - 1


def draw_root_seed() -> int:
    """Return a fresh root seed in `[0, 2**63)` from the operating system's entropy."""
    return secrets.randbits(63)


def as_root_seed(seed: Any, what: str = "seed") -> int:
    """Return a root seed as an int, or a fresh one for None.

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
        raise ValueError(
            f"{what} failed: expected an integer of at least 0, or None, got {seed!r}."
        )
    return found


def episode_seed(root_seed: int, env_id: int, episode: int) -> int:
    """Return the seed of one episode of one env, in `[0, 2**32)`."""
    return _first_word(root_seed, env_id, episode)


#: Of numpy's `SeedSequence`, which promises never to change them, for `native/step.c`. They are those of O'Neill's
#: `seed_seq` (https://www.pcg-random.org/posts/developing-a-seed_seq-alternative.html).
POOL_SIZE = 4
SHIFT = 16
INIT_A = 0x43B0D7E5
MULT_A = 0x931E8875
INIT_B = 0x8B51F9DD
MULT_B = 0x58F38DED
MIX_L = 0xCA01F9DD
MIX_R = 0x4973F715


def seed_pool(root_seed: int, env_id: int) -> np.ndarray:
    """Return what all seeds of an env's episodes have in common, from which C makes those of `episode_seed`.

    The episode is the last word that `SeedSequence` mixes into its pool.

    Returns:
        uint32 `[5]`: the pool before that word, and the multiplier of its hash, which follows from the number of hashes
        so far: one for each word and each part of the pool.
    """
    num_words = max(POOL_SIZE, _num_words(root_seed)) + _num_words(env_id)
    multiplier = INIT_A * pow(MULT_A, num_words * POOL_SIZE, 2**32) % 2**32
    pool = np.random.SeedSequence(root_seed, spawn_key=(env_id,)).pool
    return np.array([*pool, multiplier], np.uint32)


def _num_words(number: int) -> int:
    """Return how many words of 32 bits a number has; one for 0."""
    return max(1, -(-number.bit_length() // 32))


def build_seed(root_seed: int, env_id: int) -> int:
    """Return the seed of the global generators while one env's factory runs, in `[0, 2**32)`."""
    return _first_word(root_seed, env_id, _BUILD)


def _first_word(root_seed: int, *spawn_key: int) -> int:
    return int(
        np.random.SeedSequence(root_seed, spawn_key=spawn_key).generate_state(1)[0]
    )


def seed_globals(seed: int) -> None:
    """Seed Python's, numpy's and, if torch is already loaded, torch's global generators."""
    random.seed(seed)
    np.random.seed(seed)
    # Never imported here: workers of envs without torch do without it.
    torch: Any = sys.modules.get("torch")
    # Torch before 2.6, which another interpreter may have, lacks `accelerator`.
    if (
        hasattr(torch, "accelerator")
        and torch.accelerator.current_accelerator() is None
    ):
        # `torch.manual_seed` would record a stack for each kind of accelerator: 8 ms in a new worker.
        torch.default_generator.manual_seed(seed)
    elif torch is not None:
        torch.manual_seed(seed)


_BITS = {
    kind.__name__: kind
    for kind in (
        np.random.MT19937,
        np.random.PCG64,
        np.random.PCG64DXSM,
        np.random.Philox,
        np.random.SFC64,
    )
}
#: Where the generators read from a block of words next; numpy does not check it.
_MOST = {"pos": 624, "buffer_pos": 4}


def bits_of(state: Mapping[str, Any], seeds: Any = None) -> np.random.BitGenerator:
    """Return a bit generator in a state that `BitGenerator.state` returned.

    Args:
        state: of the generator.
        seeds: its `SeedSequence`; None if it has none.

    Raises:
        Exception: of any type, if it is no such state.
    """
    if seeds is not None and type(seeds) is not np.random.SeedSequence:
        raise TypeError(f"seeds of {type(seeds)}")
    for name, place in {**state, **state["state"]}.items():
        if name in _MOST and not (type(place) is int and 0 <= place <= _MOST[name]):
            raise ValueError(f"{name}={place!r:.80}")
    bits: np.random.BitGenerator = _BITS[state["bit_generator"]](
        np.random.SeedSequence(0) if seeds is None else seeds
    )
    bits.state = state
    return bits


def legacy_of(state: Mapping[str, Any]) -> np.random.RandomState:
    """Return a generator in a state that `RandomState.get_state(legacy=False)` returned; raises as `bits_of`."""
    found = np.random.RandomState(bits_of(state))
    found.set_state(dict(state))
    return found


def python_of(version: int, words: Sequence[int], gauss: float | None) -> random.Random:
    """Return a generator in a state that `random.Random.getstate` returned; raises as `bits_of`."""
    found = random.Random()
    if type(gauss) not in (float, type(None)):
        raise TypeError(f"gauss={gauss!r:.80}")
    found.setstate((version, tuple(words), gauss))
    return found


class GlobalsState(NamedTuple):
    """The state of the global generators: of python's `random`, of `numpy.random`, and of torch if that is kept."""

    python: tuple[Any, ...]
    numpy: Any
    torch: Any = None


def globals_state() -> GlobalsState:
    """Return the state of python's and numpy's global generators, comparable with `drawn_between`."""
    return GlobalsState(random.getstate(), np.random.get_state(legacy=False))


def restore_globals(state: GlobalsState) -> None:
    """Restore a state from `globals_state` or `caller_state`."""
    random.setstate(state.python)
    np.random.set_state(state.numpy)
    if state.torch is not None:
        sys.modules["torch"].set_rng_state(state.torch)


def as_plain(state: GlobalsState) -> dict[str, Any]:
    """Return a state from `globals_state` as plain data without arrays."""
    version, words, gauss = state.python
    legacy = state.numpy
    key = legacy["state"]["key"].astype("<u4").tobytes()
    return {
        "python": [version, np.array(words, "<u4").tobytes(), gauss],
        "numpy": {**legacy, "state": {**legacy["state"], "key": key}},
    }


def from_plain(state: Mapping[str, Any]) -> GlobalsState:
    """Return the state that `as_plain` was given; raises as `bits_of`, if it was given none."""
    version, words, gauss = state["python"]
    legacy = dict(state["numpy"])
    legacy["state"] = {
        **legacy["state"],
        "key": np.frombuffer(legacy["state"]["key"], "<u4"),
    }
    if legacy["bit_generator"] != "MT19937":
        raise ValueError(f"the global generator {legacy['bit_generator']!r:.80}")
    return GlobalsState(
        python_of(version, np.frombuffer(words, "<u4").tolist(), gauss).getstate(),
        legacy_of(legacy).get_state(legacy=False),
    )


def drawn_between(before: GlobalsState, after: GlobalsState) -> list[str]:
    """Name the global generators that were drawn from between two states: "random", "numpy.random"."""
    drawn = []
    if before.python != after.python:
        drawn.append("random")
    old = before.numpy["state"]
    new = after.numpy["state"]
    if old["pos"] != new["pos"] or not np.array_equal(old["key"], new["key"]):
        drawn.append("numpy.random")
    return drawn


def caller_state() -> GlobalsState:
    """Return the state of all global generators (torch's too, if it is loaded)."""
    torch = sys.modules.get("torch")
    return globals_state()._replace(
        torch=None if torch is None else torch.get_rng_state()
    )
