"""Move batches to a device: one copy each, from memory that the device can read directly.

Guarantees: a whole `next` is one transfer, for any number of keys, and each leaf gets its own storage. On CUDA the slab
is page-locked in place (once), transfers are asynchronous on the current stream, and workers reuse a frame of the ring
only after its transfer has ended. A batch for a policy on another device is one transfer from page-locked memory; a
collecting thread has its own stream (`Lane`). Copies on the host use one thread: torch would copy with all of its
threads, which then spin for a while and take processors from the workers.
Assumes: for CUDA, that the slab stays mapped until `close`. Other devices copy synchronously.
"""

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from envherd.executor.batches.fast_tensordict import outside_inference_mode

_CUDA_REGISTER_PORTABLE = 1  # cuda_runtime_api.h: cudaHostRegisterPortable
_ALIGNMENT = 64  # bytes; a multiple of every dtype's size
#: Bytes up to which a copy from memory that is not page-locked does not block the host either (CUDA C++ Programming
#: Guide, "Concurrent execution between host and device").
_AT_ONCE = 1 << 16
#: Integers of the same size as numbers that numpy does not know.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def as_device(
    device: Any,
    call: str = "device",
    name: str = "a device",
) -> torch.device | None:
    """Return an existing device, or None; errors name the call and the argument.

    Raises:
        ValueError: this machine has no such device; the message lists its devices.
    """
    if device is None:
        return None
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"{call} failed: expected {name} such as 'cpu' or 'cuda:0', got {device!r}. {error}"
        ) from None
    if wanted.type == "cuda":
        count = torch.cuda.device_count()
        if (wanted.index or 0) >= count:
            there = "no GPU that torch can use"
            if count:
                there = f"cuda:0 to cuda:{count - 1}"
            raise ValueError(
                f"{call} failed: expected {name} of this machine, got {str(wanted)!r}, but there is {there}. "
                f"Leave the device out, or install a torch built for your GPU."
            )
    return wanted


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """Return a tensor on the CPU as an array (VIEW); dtypes that numpy does not know, such as bfloat16, as integers."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    try:
        return tensor.numpy()
    # A dtype without a counterpart.
    except TypeError:
        return tensor.view(_INTEGERS[tensor.element_size()]).numpy()


def take_rows(td: TensorDictBase, rows: Any) -> TensorDictBase:
    """Return the rows of a batch of tensors at some indices `[k]`, a copy."""

    def taken(leaf: torch.Tensor) -> torch.Tensor:
        # Numpy's indexing takes less time for a few rows.
        if leaf.is_cpu:
            return torch.from_numpy(as_array(leaf)[rows]).view(leaf.dtype)
        return leaf[torch.tensor(rows)]

    return td.apply(taken, batch_size=[len(rows), *td.batch_size[1:]])


@outside_inference_mode
def to_device(batch: TensorDictBase, device: torch.device | str) -> TensorDictBase:
    """Return a batch on a device; a copy unless it is there already.

    From the host to CUDA it is one copy, and the caller does not wait: later work on the current stream runs after the
    transfer. Larger batches are copied from page-locked memory, which torch keeps for later ones and reuses only after
    the transfer has ended. Each leaf has its own storage on the device.
    """
    device = torch.device(device)
    if device.type != "cuda" or batch.device not in (None, torch.device("cpu")):
        return batch.to(device)
    return packed(batch.cpu(), device)


def packed(batch: TensorDictBase, device: torch.device) -> TensorDictBase:
    """Return a copy of a batch on the CPU whose leaves are on a device, by one transfer."""
    leaves: list[torch.Tensor] = []
    batch.apply(leaves.append, filter_empty=True)
    sizes = [-(-leaf.nbytes // _ALIGNMENT) * _ALIGNMENT for leaf in leaves]
    buffer = torch.empty(
        sum(sizes),
        dtype=torch.uint8,
        device="cpu",
        pin_memory=device.type == "cuda" and sum(sizes) > _AT_ONCE,
    )
    parts = zip(leaves, buffer.split_with_sizes(sizes), strict=True)
    targets = [
        part[: leaf.nbytes].view(leaf.dtype).view(leaf.shape) for leaf, part in parts
    ]
    for leaf, target in zip(leaves, targets, strict=True):
        np.copyto(as_array(target), as_array(leaf))
    # The buffer may be dropped at once: torch reuses page-locked memory only after its transfer.
    moved = iter(apart(buffer.to(device, non_blocking=True), sizes, targets))
    return batch.apply(lambda _leaf: next(moved), device=device)


@outside_inference_mode
def apart(
    moved: torch.Tensor,
    sizes: Sequence[int],
    like: Iterable[torch.Tensor],
) -> list[torch.Tensor]:
    """Return the leaves of a batch that was moved as bytes, each with its own storage: one copy on the device.

    A storage of all leaves could not be saved, because torch saves none as several dtypes, and a leaf would save all of
    it. The storages belong to the current stream, as the bytes do.

    Args:
        moved: uint8 `[sum(sizes)]`.
        sizes: bytes of each leaf, with padding.
        like: contiguous; dtype and shape of each leaf.
    """
    parts = [
        torch.empty(size, dtype=torch.uint8, device=moved.device) for size in sizes
    ]
    if len(moved):
        torch.split_with_sizes_copy(moved, sizes, out=parts)
    return [
        part.view(leaf.dtype).as_strided(leaf.shape, leaf.stride())
        for part, leaf in zip(parts, like, strict=True)
    ]


class Lane:
    """A CUDA stream for a thread that must not wait for other work on the device; does nothing on other devices.

    Args:
        device: of the thread's work; None for the host.
    """

    def __init__(self, device: torch.device | None) -> None:
        self._stream: Any = None
        if device is not None and device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            # For weights that are still being computed.
            self._stream.wait_stream(torch.cuda.current_stream(device))

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Run the thread's work in the `with` on the stream, and wait for its end."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()

    @contextlib.contextmanager
    def written_to(self) -> Iterator[None]:
        """Let the caller write, inside the `with`, to tensors that the stream reads.

        The caller's stream waits for earlier work of this stream, and this stream waits for the work of the `with`.
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

    def __init__(
        self,
        buffer: np.ndarray,
        device: torch.device,
        num_frames: int,
    ) -> None:
        self.device = device
        self._buffer = buffer
        self._events: list[Any] = [None] * num_frames
        # Undoes the page-lock; None if the device cannot read the slab directly.
        self._unpin: Any = None
        if device.type == "cuda":
            self._unpin = _pin(buffer, device)

    def move(self, frame: torch.Tensor, column: int) -> torch.Tensor:
        """Return a copy of a frame's bytes on the device.

        Args:
            frame: uint8, a part of the slab (VIEW).
            column: of the ring.
        """
        if self._unpin is None:
            return frame.to(self.device, copy=True)
        moved = frame.to(self.device, non_blocking=True)
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        self._events[column] = event
        return moved

    def await_frame(self, column: int) -> None:
        """Wait until no transfer reads a frame of the ring."""
        event = self._events[column]
        if event is not None:
            event.synchronize()
            # After the wait: an interrupt in it must not lose the event.
            self._events[column] = None

    def close(self) -> None:
        """Release the slab, after the transfers that are under way. Idempotent."""
        for column in range(len(self._events)):
            self.await_frame(column)
        if self._unpin is not None:
            self._unpin()


def _pin(buffer: np.ndarray, device: torch.device) -> Any:
    """Page-lock a buffer; return the function that undoes it, or None if the driver refuses."""
    with torch.cuda.device(device):
        torch.cuda.init()  # type: ignore[no-untyped-call]
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        address = buffer.ctypes.data
        if (
            int(
                runtime.cudaHostRegister(
                    address,
                    buffer.nbytes,
                    _CUDA_REGISTER_PORTABLE,
                )
            )
            != 0
        ):
            return None
    undo = weakref.finalize(buffer, runtime.cudaHostUnregister, address)
    # At the exit, the driver may be gone already, and the system releases it anyway.
    undo.atexit = False
    return undo
