"""Read a TorchRL tensordict: leaves as Python and numpy data, and the end of an episode.

Guarantees: arrays are VIEWS of CPU tensors; a missing leaf raises a `SpecError` that names it. This module uses only
methods of tensors and tensordicts, so it imports neither torch nor TorchRL.
"""

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from envherd.workers.adapters.torchrl.specs import Member, Path, PlacedLeaf
from envherd.workers.errors import SpecError

#: Tensordict -> one value.
Read = Callable[[Any], Any]

#: The names of the root done keys.
END_NAMES = ("done", "terminated", "truncated")


def topmost(done_leaves: list[PlacedLeaf]) -> list[Path]:
    """Return the paths of the done leaves that decide: those without a done leaf above them."""
    prefixes = sorted({leaf.path[:-1] for leaf in done_leaves}, key=len)
    return [
        path
        for path in prefixes
        if not any(path != other and path[: len(other)] == other for other in prefixes)
    ]


def ends_reader(
    done_leaves: list[PlacedLeaf],
    batch_shape: tuple[int, ...],
) -> Callable[[Any], tuple[Any, Any]]:
    """Return a reader of the root's `(terminated, truncated)`: bools, or bool arrays `[*batch_shape, 1]`.

    An end that the env marks neither terminated nor truncated counts as truncated.
    """
    flags: dict[str, list[Read]] = {name: [] for name in END_NAMES}
    decisive = topmost(done_leaves)
    for leaf in done_leaves:
        if leaf.path[:-1] in decisive:
            name = leaf.spec.key[-1] if leaf.spec.key[-1] in flags else "done"
            flags[name].append(_flag_reader(leaf, batch_shape))
    done, terminated, truncated = flags.values()
    none: Any = False
    if batch_shape:
        none = np.zeros((*batch_shape, 1), bool)

    def read_ends(td: Any) -> tuple[Any, Any]:
        ended = functools.reduce(operator.or_, [read(td) for read in terminated], none)
        cut = functools.reduce(operator.or_, [read(td) for read in truncated], none)
        over = functools.reduce(operator.or_, [read(td) for read in done], none)
        # A new array also if nothing terminates it; then what is over, but not terminated.
        return ended | none, cut | (over > ended)

    return read_ends


def reader(leaf: PlacedLeaf) -> Read:
    """Return a leaf's reader, which returns an array (VIEW), a Python number (scalars, single floats) or plain data."""
    fetch = _fetcher(leaf)
    if leaf.spec.is_side:
        return lambda td: to_plain(fetch(td))
    if leaf.spec.shape == () or (
        leaf.spec.shape == (1,) and leaf.spec.dtype in ("float32", "float64")
    ):
        return lambda td: fetch(td).item()
    return lambda td: to_numpy(fetch(td))


def to_numpy(tensor: Any) -> np.ndarray:
    """Return a tensor as an array: a VIEW if it is on the CPU."""
    if tensor.is_cpu and not tensor.requires_grad:
        return tensor.numpy()
    return tensor.detach().cpu().numpy()


def to_plain(value: Any) -> Any:
    """Return data with arrays (copies) in place of tensors and the content in place of non-tensor data.

    bfloat16 becomes float32; a nested tensor becomes a list of arrays.
    """
    if hasattr(value, "is_nested"):
        if value.is_nested:
            return [to_plain(row) for row in value.unbind()]
        return np.array(
            to_numpy(value.float() if str(value.dtype) == "torch.bfloat16" else value)
        )
    if type(value).__name__ in ("NonTensorData", "NonTensorStack"):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(to_plain(item) for item in value)
    return value


def _flag_reader(leaf: PlacedLeaf, batch_shape: tuple[int, ...]) -> Read:
    fetch = _fetcher(leaf)
    if batch_shape:
        return lambda td: (
            to_numpy(fetch(td))
            .astype(bool)
            .reshape(*batch_shape, -1)
            .any(-1, keepdims=True)
        )
    if np.prod(leaf.spec.shape) == 1 and leaf.spec.dtype == "bool":
        return lambda td: fetch(td).item()
    return lambda td: bool(fetch(td).any())


def _fetcher(leaf: PlacedLeaf) -> Read:
    path = leaf.path
    is_side = leaf.spec.is_side

    def fetch(td: Any) -> Any:
        value = td
        for step in path:
            if value is None:
                break
            if isinstance(step, Member):
                value = value.unbind(step.dim)[step.index]
            else:
                value = value.get(step, None)
        if value is None and not is_side:
            raise SpecError(
                f"reading {'/'.join(leaf.spec.key)} failed: expected {leaf.spec}, got nothing. "
                f"The env breaks its own spec: give the leaf at every reset and step, or take it out of the spec."
            )
        return value

    return fetch
