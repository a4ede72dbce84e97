"""Differences of Gymnasium's versions for tests: 1.1 has neither `Discrete(dtype=)` nor the later ids."""

import inspect
from typing import Any

import gymnasium
from gymnasium.spaces import Discrete

TAXI = "Taxi-v4" if "Taxi-v4" in gymnasium.registry else "Taxi-v3"
#: Whether its `AsyncVectorEnv` has `max_concurrency`.
HAS_LIMIT = (
    "max_concurrency" in inspect.signature(gymnasium.vector.AsyncVectorEnv).parameters
)
_HAS_DTYPE = "dtype" in inspect.signature(Discrete).parameters


def discrete(n: int, dtype: Any, start: int = 0) -> Any:
    """Return a `Discrete` of a dtype, or of int64 where this Gymnasium has no other."""
    return (
        Discrete(n, start=start, dtype=dtype)
        if _HAS_DTYPE
        else Discrete(n, start=start)
    )


#: The error of `batch_differing_spaces` for different shapes: 1.1 asserts.
NOT_BATCHED = (ValueError, AssertionError)
