"""Envs' infos, packed before the env is called again and may change it.

Guarantees: no info makes a step fail. An entry that cannot travel (an object that is not plain data, one
that cannot be pickled or unpickled, one too large, one whose own code raises) is left out, and named.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np

from envherd.shm.interrupts import uninterrupted
from envherd.workers import plain
from envherd.workers.options import InfoPolicy

#: (the info's bytes or None where it says nothing, entries left out: name -> why)
Packed = tuple[bytes | None, dict[str, str]]
Pack = Callable[[Any], Packed]

_LOG = logging.getLogger(__name__)

#: Bytes of one info that travel: more is a mistake, and would take longer than any step.
_MAX_BYTES = 1 << 26
_EVERYTHING = "everything"
#: What the code of an env's own objects may raise; Ctrl-C is not its own.
_ANY = (Exception, SystemExit, GeneratorExit)
#: Values that come out of a pickle as they went in.
_SURE = frozenset({type(None), bool, int, float, complex, str, bytes, np.bool_, np.float32, np.float64, np.int64})
_CONTAINERS = frozenset({dict, list, tuple})
_DEEPEST = 4


def packer(policy: InfoPolicy) -> Pack | None:
    """Return the function that packs one info, or None where infos are dropped."""
    return {"drop": None, "plain": _pack_plain, "pickle": _pack_pickle}[policy]


def unpack(data: bytes, policy: InfoPolicy) -> dict[str, Any]:
    """Return the info that was packed, in its own memory; empty, and logged, where it cannot be unpickled here."""
    load: Callable[[bytes], dict[str, Any]] = pickle.loads if policy == "pickle" else plain.decode
    try:
        return load(data)
    except _ANY as error:
        with uninterrupted():
            try:
                load(data)
            except _ANY:
                _LOG.warning("an info was lost, for it could not be unpickled in this process (%s).", explain(error))
                return {}
        raise  # the info can be loaded: a signal handler of this program has raised this


def _pack_plain(info: Any) -> Packed:
    return _pack(info, plain.encode)


def _pack_pickle(info: Any) -> Packed:
    return _pack(info, _dumps)


def _pack(info: Any, encode: Callable[[dict[Any, Any]], bytes]) -> Packed:
    if info is None:
        return None, {}
    try:
        entries = dict(info)
        if not entries:
            return None, {}
    except _ANY as error:
        return None, {_EVERYTHING: explain(error)}
    try:
        data = encode(entries)
        if len(data) <= _MAX_BYTES:
            return data, {}
    except _ANY:
        pass
    return _pack_each(entries, encode)


def _pack_each(entries: dict[Any, Any], encode: Callable[[dict[Any, Any]], bytes]) -> Packed:
    """Pack those entries that can be."""
    kept, left_out, size = {}, {}, 0
    for key, value in entries.items():
        try:
            num_bytes = len(encode({key: value}))
        except _ANY as error:
            left_out[_name(key)] = explain(error)
            continue
        if size + num_bytes > _MAX_BYTES:
            left_out[_name(key)] = f"its {num_bytes} bytes are more than the {_MAX_BYTES} that an info may have"
            continue
        size += num_bytes
        kept[key] = value
    return (encode(kept) if kept else None), left_out


def _dumps(entries: dict[Any, Any]) -> bytes:
    """Pickle, and see whether what is not sure to come back does: an object's own code decides that."""
    try:
        data = pickle.dumps(entries, protocol=5)
    except _ANY:  # perhaps of a class that came here with the factory, and can go back so
        data = bytes(cloudpickle.dumps(entries))
    if not _is_sure(entries):
        pickle.loads(data)
    return data


def _is_sure(value: Any, depth: int = 0) -> bool:
    kind = value.__class__
    if kind in _SURE:
        return True
    if kind is np.ndarray:
        return bool(value.dtype.kind in "biufcSU")
    if kind not in _CONTAINERS or depth == _DEEPEST:
        return False
    return all(_is_sure(item, depth + 1) for item in (value.values() if kind is dict else value))


def _name(key: Any) -> str:
    return key[:80] if type(key) is str else f"a key of type {type(key).__name__}"


def explain(error: BaseException) -> str:
    """Describe an exception in a line; one that cannot be printed is no obstacle."""
    try:
        return f"{type(error).__name__}: {error}"[:200]
    except _ANY:
        return type(error).__name__
