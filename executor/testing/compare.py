"""Compare rows, and describe their differences."""

from typing import Any

import numpy as np

from envherd.executor.testing.batch import Row
from envherd.shm.specs import DONE_KEYS, Box, EnvSpec, Key

_FINITE = (
    "Mend the env; in training, ExecutorOptions(check_finite=True) refuses such a step."
)


class ContractViolation(AssertionError):
    """An env, or its executor, has broken a rule."""


def demand(rule: int, one: Row, other: Row, where: str, why: str) -> None:
    """Raise unless two rows are equal, bit for bit."""
    for key, value in one.items():
        if not equal(value, other[key]):
            raise ContractViolation(
                f"rule {rule} is broken: expected {show_key(key)} {show(value)}, got {show(other[key])} ({where}): "
                f"{why}"
            )


def check_done(row: Row, where: str) -> None:
    """Raise unless every `done` of a row is `terminated | truncated`."""
    for key in row:
        if key[-1] != "done" or not all(
            (*key[:-1], *last) in row for last in DONE_KEYS
        ):
            continue
        done = row[key]
        terminated = row[*key[:-1], "terminated"]
        truncated = row[*key[:-1], "truncated"]
        if not np.array_equal(done, terminated | truncated):
            raise ContractViolation(
                f"rule 5 is broken: expected {show_key(key)} to be terminated | truncated, got {show(done)} for "
                f"{show(terminated)} and {show(truncated)} ({where})."
            )


def check_values(row: Row, spec: EnvSpec, where: str) -> None:
    """Raise unless the observations of a row are within the bounds of their spaces, and its rewards are finite."""
    for leaf in spec.observation:
        if leaf.is_side:
            continue
        value = row[leaf.key]
        if (is_nan := np.not_equal(value, value)).any():
            raise _violation(leaf.key, "without NaN", value, is_nan, where, _FINITE)
        if not isinstance(leaf.domain, Box):
            continue
        outside = (value < leaf.domain.low) | (value > leaf.domain.high)
        if outside.any():
            raise _violation(
                leaf.key,
                f"in {leaf.domain}",
                value,
                outside,
                where,
                "Mend the env's observation_space, or clip its observations.",
            )
    for leaf in spec.reward:
        if leaf.key in row and (infinite := ~np.isfinite(row[leaf.key])).any():
            raise _violation(
                leaf.key,
                "finite",
                row[leaf.key],
                infinite,
                where,
                _FINITE,
            )


def _violation(
    key: Key,
    expected: str,
    value: Any,
    is_broken: Any,
    where: str,
    advice: str,
) -> ContractViolation:
    at = tuple(map(int, np.argwhere(is_broken)[0]))
    return ContractViolation(
        f"rule 8 is broken: expected {show_key(key)} {expected}, got {value[at]} at {at} ({where}). {advice}"
    )


def has_ended(row: Row) -> bool:
    """Return whether (part of) an env had ended."""
    return bool(row[("done",)].any())


def same(one: Row, other: Row, keys: list[Key]) -> bool:
    """Return whether two rows agree in some keys."""
    return all(equal(one[key], other[key]) for key in keys)


def equal(one: Any, other: Any) -> bool:
    """Return whether two values have the same bits; NaN equals NaN."""
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return (
            one.dtype == other.dtype
            and one.shape == other.shape
            and one.tobytes() == other.tobytes()
        )
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(
            equal(one[key], other[key]) for key in one
        )
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(np.all(one == other))


def show_key(key: Key) -> str:
    """Return a key for messages."""
    return "/".join(key)


def show(value: Any) -> str:
    """Return a value as a short text for messages."""
    text = " ".join(str(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."
