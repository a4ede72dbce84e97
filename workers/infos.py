"""Pack envs' infos before the env is called again and may change them; the names of entries that become leaves.

Guarantees: no info makes a step fail. An entry that cannot be sent (not plain data, cannot be pickled or unpickled, too
large, or its own code raises) is left out and reported by name.
"""

import contextlib
import functools
import logging
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from envherd.shm.interrupts import uninterrupted
from envherd.workers import plain
from envherd.workers.errors import SpecError
from envherd.workers.options import InfoPolicy
from envherd.workers.sending.pickling import dumps

#: (the info's bytes, or None if it is empty; entries left out: name -> reason)
Packed = tuple[bytes | None, dict[str, str]]
Pack = Callable[[Any], Packed]

_LOG = logging.getLogger(__name__)

#: Largest size of one info, bytes: more is probably a mistake, and would take longer than any step.
_MAX_BYTES = 1 << 26
_EVERYTHING = "everything"
#: Exceptions that the code of an env's objects may raise; not Ctrl-C.
_ANY = (Exception, SystemExit, GeneratorExit)


def packer(policy: InfoPolicy) -> Pack | None:
    """Return the function that packs one info, or None where infos are dropped."""
    if policy == "drop":
        return None
    return functools.partial(
        _pack,
        encode={"plain": plain.encode, "pickle": _dumps}[policy],
    )


def unpack(data: bytes, policy: InfoPolicy) -> dict[str, Any]:
    """Unpack an info into its own memory; if it cannot be unpickled here, log that and return an empty one."""
    load: Callable[[bytes], dict[str, Any]] = (
        pickle.loads if policy == "pickle" else plain.decode
    )
    try:
        return load(data)
    except _ANY as error:
        with uninterrupted():
            try:
                load(data)
            except _ANY:
                _LOG.warning(
                    "an info was lost, as it could not be unpickled in this process (%s).",
                    explain(error),
                )
                return {}
        raise  # the info can be loaded, so a signal handler of this program raised


def _pack(info: Any, encode: Callable[[dict[Any, Any]], bytes]) -> Packed:
    if info is None:
        return None, {}
    try:
        entries = dict(info)
        if not entries:
            return None, {}
    except _ANY as error:
        return None, {_EVERYTHING: explain(error)}
    with contextlib.suppress(*_ANY):
        data = encode(entries)
        if len(data) <= _MAX_BYTES:
            return data, {}
    # Something in it cannot be sent, and the rest should be.
    return _pack_each(entries, encode)


def _pack_each(
    entries: dict[Any, Any],
    encode: Callable[[dict[Any, Any]], bytes],
) -> Packed:
    """Pack the entries that can be packed."""
    kept = {}
    left_out = {}
    size = 0
    for key, value in entries.items():
        try:
            num_bytes = len(encode({key: value}))
        except _ANY as error:
            left_out[_name(key)] = explain(error)
            continue
        if size + num_bytes > _MAX_BYTES:
            left_out[_name(key)] = (
                f"its {num_bytes} bytes are more than the {_MAX_BYTES} that an info may have"
            )
            continue
        size += num_bytes
        kept[key] = value
    return (encode(kept) if kept else None), left_out


def _dumps(entries: dict[Any, Any]) -> bytes:
    """Pickle entries, and unpickle them as a check."""
    try:
        data = pickle.dumps(entries, protocol=5)
    except _ANY:  # perhaps of a class that was pickled by value with the factory
        data = dumps(entries)
    pickle.loads(data)
    return data


def _name(key: Any) -> str:
    return key[:80] if type(key) is str else f"a key of type {type(key).__name__}"


def explain(error: BaseException) -> str:
    """Describe an exception in one line, even if it cannot be printed."""
    try:
        return f"{type(error).__name__}: {error}"[:200].removesuffix(": ")
    except _ANY:
        return type(error).__name__


# ---- info keys ---------------------------------------------------------------------------------
# Names of info entries of which `wrappers.leaves` makes leaves, and what is declared of their values.

InfoPath = tuple[str, ...]


def check_keys(keys: Any) -> None:
    """Refuse anything but `InfoKeys`.

    Raises:
        ValueError: says what was expected.
    """
    problem = f"{keys!r:.200}. Write infos={{NAME: int}}, or an example: {{NAME: numpy.zeros(3)}}."
    if isinstance(keys, Mapping):
        bad = [
            name
            for name in keys
            if not as_path(name)
            or not all(isinstance(part, str) and part for part in as_path(name))
        ]
        problem = f"the name {bad[0]!r}." if bad else ""
    if problem:
        raise ValueError(
            f'ExecutorOptions failed: expected infos to be "drop", "plain", "pickle", or a dict of names and values '
            f"(or types) like theirs, got {problem}"
        )
    for name, like in keys.items():
        try:
            example_of(name, like)
        except SpecError as error:
            raise ValueError(f"ExecutorOptions failed: {error}") from None


def example_of(name: str | InfoPath, like: Any) -> np.ndarray:
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


def as_path(name: Any) -> InfoPath:
    """Return a name as a path of names."""
    return tuple(name) if isinstance(name, (tuple, list)) else (name,)
