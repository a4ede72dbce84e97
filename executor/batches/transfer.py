"""Batches on a device: one copy each, from memory that the device can read directly.

Guarantees: a whole `next` crosses as one transfer, whatever its number of keys. On CUDA the slab is
page-locked in place (once), transfers are asynchronous on the current stream, and a frame of the ring is
not given to the workers again before its transfer has ended. Batches of a policy that runs elsewhere cross through
page-locked memory; a thread that collects has a stream (`Lane`).
Assumes: for CUDA, that the slab stays mapped until `close`. Other devices copy synchronously.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

_CUDA_REGISTER_PORTABLE = 1  # cuda_runtime_api.h: cudaHostRegisterPortable


def as_device(device: Any) -> torch.device | None:
    """Return a device that is there, or None.

    Raises:
        ValueError: no such device on this machine; says which there are.
    """
    if device is None:
        return None
    try:
        wanted = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device failed: expected a name such as 'cpu' or 'cuda:0', got {device!r}. {error}") from None
    if wanted.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (wanted.index or 0) >= count:
            there = f"cuda:0 to cuda:{count - 1}" if count else "no GPU that torch can use"
            raise ValueError(
                f"device failed: expected a device of this machine, got {str(wanted)!r}, but there is {there}. "
                f"Leave device out, or install a torch built for your GPU."
            )
    return wanted


def to_device(batch: TensorDictBase, device: torch.device | str) -> TensorDictBase:
    """Return a batch on a device; a new one unless it is there.

    From the host to CUDA it crosses through page-locked memory, and the caller does not wait: work that it gives to the
    current stream afterwards comes after the transfer. torch keeps that memory for the next batch, and gives it out
    again only after the transfer has ended.
    """
    device = torch.device(device)
    if device.type != "cuda" or batch.device not in (None, torch.device("cpu")):
        return batch.to(device)
    return batch.cpu().pin_memory(num_threads=0).to(device, non_blocking=True)


class Lane:
    """A stream for a thread that must not wait for what others give to a device; does nothing for other than CUDA.

    Args:
        device: where the thread works; None for the host.
    """

    def __init__(self, device: torch.device | None) -> None:
        is_cuda = device is not None and device.type == "cuda"
        self._stream: Any = torch.cuda.Stream(device) if is_cuda else None  # type: ignore[no-untyped-call]
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(device))  # weights that are being made

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Give the thread's work to the stream inside the `with`, and wait for its end."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()

    @contextlib.contextmanager
    def written_to(self) -> Iterator[None]:
        """Let the caller write, inside the `with`, to what the stream reads.

        The caller's stream waits for what was given to this one before, and this one for what is given inside.
        """
        if self._stream is None:
            yield
            return
        current = torch.cuda.current_stream(self._stream.device)
        current.wait_stream(self._stream)
        yield
        self._stream.wait_stream(current)


class Mover:
    """Moves frames of one slab to one device.

    Args:
        buffer: uint8, the slab (VIEW).
        device: not the cpu.
        num_frames: of the ring.
    """

    def __init__(self, buffer: np.ndarray, device: torch.device, num_frames: int) -> None:
        self.device = device
        self._buffer = buffer
        self._events: list[Any] = [None] * num_frames
        self._unpin: Any = None
        if device.type == "cuda":
            self._unpin = _pin(buffer, device)

    @property
    def is_pinned(self) -> bool:
        """Whether the device reads the slab directly."""
        return self._unpin is not None

    def move(self, frame: torch.Tensor, column: int) -> torch.Tensor:
        """Return a frame's bytes on the device, in memory of their own.

        Args:
            frame: uint8, a part of the slab (VIEW).
            column: which frame of the ring it is of.
        """
        if not self.is_pinned:
            return frame.to(self.device, copy=True)
        moved = frame.to(self.device, non_blocking=True)
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        self._events[column] = event
        return moved

    def await_frame(self, column: int) -> None:
        """Wait until a frame of the ring is no longer read."""
        event, self._events[column] = self._events[column], None
        if event is not None:
            event.synchronize()

    def close(self) -> None:
        """Let go of the slab, after the transfers that are under way. Idempotent."""
        for column in range(len(self._events)):
            self.await_frame(column)
        if self._unpin is not None:
            self._unpin()


def _pin(buffer: np.ndarray, device: torch.device) -> Any:
    """Page-lock a buffer; return what undoes it, or None where the driver refuses."""
    with torch.cuda.device(device):
        torch.cuda.init()  # type: ignore[no-untyped-call]
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        address = buffer.ctypes.data
        if int(runtime.cudaHostRegister(address, buffer.nbytes, _CUDA_REGISTER_PORTABLE)) != 0:
            return None
    undo = weakref.finalize(buffer, runtime.cudaHostUnregister, address)
    undo.atexit = False
    return undo
