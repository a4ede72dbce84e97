"""Convert objects of a TorchRL program to bytes and back, between a worker and its owner.

Unlike everything else that a worker sends, these are pickles: TorchRL's batched envs return what their envs hold
(specs, tensordicts with any data in them, attributes), and trust them. Classes that the user's script defines are
pickled by value, tensors as arrays on the CPU.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

from envherd.workers.sending.pickling import Pickler


class _Pickler(Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if (
            type(obj) is torch.Tensor
            and not obj.is_nested
            and obj.dtype is not torch.bfloat16
        ):
            return _tensor, (
                obj.detach().cpu().numpy(),
                str(obj.device) if obj.device.type != "cpu" else None,
            )
        return super().reducer_override(obj)


def _tensor(array: Any, device: str | None) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor.to(device) if device else tensor


def dumps(value: Any) -> bytes:
    """Return any picklable value as bytes (a tensor takes a few microseconds; torch's own pickling about fifty)."""
    file = io.BytesIO()
    _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()


def loads(data: bytes) -> Any:
    """Return the value that `dumps` packed."""
    return pickle.loads(data)
