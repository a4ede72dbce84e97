"""Names of info entries of which `wrappers.info_leaves` makes leaves, and what is declared of their values."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from envherd.workers.errors import SpecError
from envherd.workers.infos import explain

Path = tuple[str, ...]


def check_keys(keys: Any) -> None:
    """Refuse anything but `InfoKeys`.

    Raises:
        ValueError: says what was expected.
    """
    if keys == "all":
        return
    problem = None
    if isinstance(keys, str) or not isinstance(keys, (Sequence, Mapping)):
        problem = f"{keys!r}." + (
            f" Write ({keys!r},)." if isinstance(keys, str) else ""
        )
    else:
        bad = [
            name
            for name in keys
            if not as_path(name)
            or not all(isinstance(part, str) and part for part in as_path(name))
        ]
        problem = f"the name {bad[0]!r}." if bad else None
    if problem is not None:
        raise ValueError(
            f'ExecutorOptions failed: expected infos to be "drop", "plain", "pickle", "all", names, or a dict of names '
            f"and values like theirs, got {problem}"
        )
    if isinstance(keys, Mapping):
        for name, like in keys.items():
            try:
                example_of(name, like)
            except SpecError as error:
                raise ValueError(f"ExecutorOptions failed: {error}") from None


def example_of(name: str | Path, like: Any) -> np.ndarray:
    """Return an array of the declared shape and dtype; a declaration is a value, a type, or a numpy dtype."""
    try:
        is_type = isinstance(like, (type, np.dtype))
        array = np.zeros((), like) if is_type else as_array(like)
    except Exception as error:
        raise SpecError(f"infos[{name!r}]: {explain(error)}.") from None
    # torch has no long doubles.
    if array.dtype.kind not in "biufc" or array.dtype.char in "gG":
        raise SpecError(
            f"infos[{name!r}]: expected a number, an array of numbers, or int, float, bool or a numpy dtype, "
            f"got {type(like).__name__} of {array.dtype}."
        )
    return array


def as_array(value: Any) -> np.ndarray:
    """Return a value, also a tensor, as an array."""
    if type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "detach"):
        value = value.detach().cpu()
    return np.asarray(value)


def as_path(name: Any) -> Path:
    """Return a name as a path of names."""
    return tuple(name) if isinstance(name, (tuple, list)) else (name,)
