"""Plain data as bytes, the only data that a worker sends to the parent; no pickles.

A value is None, bool, int, float, str, bytes, a numpy scalar or array of a numeric, bool or string
dtype, or a list, tuple or dict of such values (dict keys: str, int, bool, float, None or tuples of
them). A torch tensor is sent as a numpy array. Anything else raises `NotPlain`, which names it.

Encoding: one JSON text (structure, tags for what JSON lacks) followed by the raw bytes of arrays.
Decoding trusts nothing: lengths and dtypes are checked before any array is made.
"""

import json
import math
import struct
from typing import Any

import numpy as np

_HEAD = struct.Struct("<II")
_TAG = "\0"
_KINDS = "biufcSU"


class NotPlain(TypeError):
    """A value that is not plain data; the message says which and where."""


def encode(value: Any) -> bytes:
    """Return the bytes of a plain value.

    Raises:
        NotPlain: it holds something else.
    """
    buffers: list[bytes] = []
    # Unescaped: the escapes of two lone surrogates are those of one character.
    text = json.dumps(
        _lower(value, buffers, "value"), ensure_ascii=False, separators=(",", ":")
    ).encode(errors="surrogatepass")
    sizes = struct.pack(f"<{len(buffers)}Q", *map(len, buffers))
    return b"".join((_HEAD.pack(len(text), len(buffers)), sizes, text, *buffers))


def decode(data: bytes | memoryview) -> Any:
    """Return the value whose bytes `encode` gave; arrays are fresh and writable."""
    text_size, num_buffers = _HEAD.unpack_from(data)
    sizes = struct.unpack_from(f"<{num_buffers}Q", data, _HEAD.size)
    at = _HEAD.size + 8 * num_buffers
    text = bytes(data[at : at + text_size])
    at += text_size
    if at + sum(sizes) != len(data):
        raise ValueError(
            f"decode failed: expected {at + sum(sizes)} bytes, got {len(data)}."
        )
    buffers = []
    for size in sizes:
        buffers.append(bytes(data[at : at + size]))
        at += size
    return _raise(json.loads(text), buffers)


def _lower(value: Any, buffers: list[bytes], where: str) -> Any:
    if isinstance(value, np.generic):
        # Before float and str, of which some are subclasses.
        return _lower_array(value, buffers, where)
    # Before int, of which bool is a subclass.
    if value is None or isinstance(value, (bool, str)):
        return value
    # A reader of JSON may round larger ones.
    if isinstance(value, int):
        return int(value) if abs(value) < 2**53 else {_TAG: "i", "v": str(int(value))}
    # JSON has no infinities and no NaN.
    if isinstance(value, float):
        return (
            float(value)
            if math.isfinite(value)
            else {_TAG: "f", "v": repr(float(value))}
        )
    if isinstance(value, list):
        return [_lower(item, buffers, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, tuple):
        return {
            _TAG: "t",
            "v": [
                _lower(item, buffers, f"{where}[{i}]") for i, item in enumerate(value)
            ],
        }
    if isinstance(value, dict):
        return _lower_dict(value, buffers, where)
    if isinstance(value, (bytes, bytearray, memoryview)):
        buffers.append(bytes(value))
        return {_TAG: "b", "v": len(buffers) - 1}
    return _lower_array(value, buffers, where)


def _lower_dict(value: dict[Any, Any], buffers: list[bytes], where: str) -> Any:
    if all(isinstance(key, str) and key != _TAG for key in value):
        return {
            key: _lower(item, buffers, f"{where}[{key!r}]")
            for key, item in value.items()
        }
    return {
        _TAG: "d",
        "v": [
            [
                _lower(key, buffers, f"key of {where}"),
                _lower(item, buffers, f"{where}[{key!r}]"),
            ]
            for key, item in value.items()
        ],
    }


def _lower_array(value: Any, buffers: list[bytes], where: str) -> Any:
    if not isinstance(value, (np.ndarray, np.generic)):
        if (
            type(value).__module__.partition(".")[0] != "torch"
            or getattr(value, "numpy", None) is None
        ):
            raise NotPlain(
                f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which is not plain data"
            )
        value = value.detach().cpu().numpy()
    if value.dtype.kind not in _KINDS:
        raise NotPlain(
            f"{where} is an array of dtype {value.dtype}, which is not plain data"
        )
    # Of a scalar as well; an array of empty texts reserves one character each.
    array = np.asarray(value)
    buffers.append(array.tobytes())
    return {
        _TAG: "g" if isinstance(value, np.generic) else "a",
        "v": len(buffers) - 1,
        "s": list(array.shape),
        "d": array.dtype.str,
    }


def _raise(value: Any, buffers: list[bytes]) -> Any:
    if isinstance(value, list):
        return [_raise(item, buffers) for item in value]
    if not isinstance(value, dict):
        return value
    tag = value.get(_TAG)
    if tag is None:
        return {key: _raise(item, buffers) for key, item in value.items()}
    content = value["v"]
    if tag == "t":
        return tuple(_raise(item, buffers) for item in content)
    if tag == "d":
        return {_raise(k, buffers): _raise(v, buffers) for k, v in content}
    if tag == "i":
        return int(content)
    if tag == "f":
        return float(content)
    if tag == "b":
        return buffers[content]
    return _raise_array(value, buffers[content])


def _raise_array(value: dict[str, Any], buffer: bytes) -> Any:
    dtype = np.dtype(value["d"])
    if dtype.kind not in _KINDS:
        raise ValueError(f"decode failed: expected a numeric dtype, got {dtype}.")
    if dtype.itemsize or buffer:
        array = np.frombuffer(buffer, dtype).reshape(value["s"]).copy()
    else:  # text of no characters has no bytes to be read from
        array = np.ndarray(value["s"], dtype)
    return array[()] if value["\0"] == "g" else array
