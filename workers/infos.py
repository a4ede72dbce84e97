"""What envs say beside their rows (`info`), packed before the env is called again and may change it."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from typing import Any, Literal

import cloudpickle

from envherd.workers import plain
from envherd.workers.errors import SpecError

#: What becomes of infos: they stay in the worker, come back as plain data (entries that are not plain are
#: left out), or come back as they are, by pickle.
InfoPolicy = Literal["drop", "plain", "pickle"]

Pack = Callable[[Mapping[str, Any]], bytes]


def packer(policy: InfoPolicy) -> Pack | None:
    """Return the function that packs one info, or None where infos are dropped."""
    return {"drop": None, "plain": _pack_plain, "pickle": _pack_pickle}[policy]


def unpack(data: bytes, policy: InfoPolicy) -> dict[str, Any]:
    """Return the info that was packed, in memory of its own."""
    info: dict[str, Any] = pickle.loads(data) if policy == "pickle" else plain.decode(data)
    return info


def _pack_plain(info: Mapping[str, Any]) -> bytes:
    try:
        return plain.encode(dict(info))
    except plain.NotPlain:
        return plain.encode({key: value for key, value in info.items() if _is_plain(key) and _is_plain(value)})


def _is_plain(value: Any) -> bool:
    try:
        plain.encode(value)
    except plain.NotPlain:
        return False
    return True


def _pack_pickle(info: Mapping[str, Any]) -> bytes:
    try:
        return pickle.dumps(dict(info), protocol=5)
    except Exception:  # perhaps of a class that came here with the factory, and can go back so
        return _pack_by_value(info)


def _pack_by_value(info: Mapping[str, Any]) -> bytes:
    try:
        return bytes(cloudpickle.dumps(dict(info)))
    except Exception as error:
        key = next((key for key, value in info.items() if not _can_pickle(value)), None)
        raise SpecError(
            f"reading info failed: expected entries that can be pickled, got {key!r} "
            f"({type(error).__name__}: {error}). Leave it out in a wrapper around the env."
        ) from error


def _can_pickle(value: Any) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:  # whatever its own code raises
        return False
    return True
