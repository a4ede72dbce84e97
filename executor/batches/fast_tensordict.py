"""Make and read TensorDicts by private functions, because the public ones are slow; gradients off for a function.

Each has the effect of the public function for valid arguments, which the callers guarantee (tests check that). Each
falls back to the public function if this version of TensorDict is not built as expected.
"""

import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from envherd.shm.specs import Key

# ---- grad mode ---------------------------------------------------------------------------------
# Run a function without recording gradients, or outside of `torch.inference_mode`.

_P = ParamSpec("_P")
_R = TypeVar("_R")


def without_grad(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return a function that runs under `torch.no_grad`.

    A Ctrl-C while `torch.no_grad` enters or exits may leave its mode set, so that later losses of the caller would have
    no gradient. This function restores the mode.
    """

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        was_enabled = torch.is_grad_enabled()
        try:
            with torch.no_grad():
                return function(*args, **kwargs)
        finally:
            if torch.is_grad_enabled() is not was_enabled:
                torch.set_grad_enabled(was_enabled)

    return call


def outside_inference_mode(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return a function that makes tensors which can also be used outside of `torch.inference_mode`.

    Torch's own functions return inference tensors in that mode: without a version, and read-only outside of it.
    """

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(mode=False):
            return function(*args, **kwargs)

    return call


# ---- fast tensordict ---------------------------------------------------------------------------

_new_unsafe = TensorDict._new_unsafe  # noqa: SLF001
_version = operator.attrgetter("_version")  # counts writes
_INNER = {"_tensordict", "_batch_size", "_device", "_td_dim_names"}

Make = Callable[[dict[str, Any]], TensorDict]
Find = Callable[[dict[str, Any]], Any]


def _is_as_expected() -> bool:
    try:
        example = _new_unsafe(
            {"a": torch.zeros(1)},
            batch_size=torch.Size([1]),
            device=None,
        )
        return (
            set(vars(example)) == _INNER
            and vars(example)["_tensordict"].__class__ is dict
            and hasattr(TensorDict, "_set_str")
        )
    except Exception:
        # Another version may raise anything.
        return False


IS_AS_EXPECTED = _is_as_expected()


def maker(batch_size: torch.Size, device: torch.device | None) -> Make:
    """Return a constructor of TensorDicts (0.4 us; the public one takes 11).

    Returns:
        A function from a dict of leaves and TensorDicts with this batch size and device to a TensorDict, which owns the
        dict.
    """
    if not IS_AS_EXPECTED:
        return lambda source: _new_unsafe(source, batch_size=batch_size, device=device)
    new = object.__new__
    kind = TensorDict

    def make(source: dict[str, Any]) -> TensorDict:
        td = new(kind)
        inner = td.__dict__
        inner["_tensordict"] = source
        inner["_batch_size"] = batch_size
        inner["_device"] = device
        inner["_td_dim_names"] = None
        return td

    return make


class Shell:
    """The compiled nesting of a TensorDict: builds it from a flat list of leaves (1 us).

    Args:
        members: key of each leaf -> its index in the list.
        groups: key prefix -> batch shape of that nested tensordict, without the leading dimensions.
        lead: the leading dimensions of everything, `[n]` or `[n, T]`.
        own_shape: the batch shape of this tensordict after them.
        device: of the TensorDict, or None.
    """

    def __init__(
        self,
        members: Mapping[Key, int],
        groups: Mapping[Key, tuple[int, ...]],
        lead: tuple[int, ...],
        own_shape: tuple[int, ...],
        device: torch.device | None,
    ) -> None:
        self._make = maker(torch.Size((*lead, *own_shape)), device)
        # Pairs, which are faster to read than the items of a dict.
        self._leaves = [
            (key[0], index) for key, index in members.items() if len(key) == 1
        ]
        nested: dict[str, dict[Key, int]] = {}
        for key, index in members.items():
            if len(key) > 1:
                nested.setdefault(key[0], {})[key[1:]] = index
        self._nested: list[tuple[str, Shell]] = []
        for name, inner in nested.items():
            inner_groups = {
                key[1:]: shape
                for key, shape in groups.items()
                if len(key) > 1 and key[0] == name
            }
            shape = groups.get((name,), own_shape)
            made = Shell(
                inner,
                inner_groups,
                lead,
                shape,
                device,
            )
            self._nested.append((name, made))

    def build(self, leaves: Sequence[Any]) -> TensorDict:
        """Return a fresh TensorDict over the given leaves (no copy)."""
        source = {name: leaves[index] for name, index in self._leaves}
        for name, shell in self._nested:
            source[name] = shell.build(leaves)
        return self._make(source)


def get_leaf(td: TensorDictBase, key: str | Key) -> Any:
    """Return an entry, or None (at the root 0.1 us; `get` takes 1.3)."""
    if IS_AS_EXPECTED and td.__class__ is TensorDict and key.__class__ is str:
        return td._tensordict.get(key)  # noqa: SLF001
    return td.get(key, None)


def finder(key: Key) -> Find:
    """Return the function that finds a leaf among the entries of a TensorDict; it returns None if there is none.

    Limits: needs `IS_AS_EXPECTED`.
    """
    *path, name = key
    if not path:
        return operator.methodcaller("get", name)

    def find(entries: dict[str, Any]) -> Any:
        for step in path:
            td: Any = entries.get(step)
            if td.__class__ is not TensorDict:
                return None
            entries = td._tensordict  # noqa: SLF001
        return entries.get(name)

    return find


@outside_inference_mode
def _set(td: TensorDictBase, key: Key, leaf: torch.Tensor) -> None:
    td.set(key, leaf)


def set_leaf(td: TensorDictBase, key: Key, leaf: torch.Tensor) -> None:
    """Set an entry whose leading dimensions are known to fit, on the cpu (0.3 us at the root; `set` takes 4)."""
    if (
        IS_AS_EXPECTED
        and td.__class__ is TensorDict
        and len(key) == 1
        and td._device is None  # noqa: SLF001
    ):
        td._set_str(  # noqa: SLF001
            key[0],
            leaf,
            inplace=False,
            validated=True,
        )
    else:
        # The public function moves it to the batch's device.
        _set(td, key, leaf)


def set_next(td: TensorDictBase, next_td: TensorDictBase) -> None:
    """Set `next` to a batch whose batch size and device are known to fit (0.3 us; `set` takes 2)."""
    if (
        IS_AS_EXPECTED
        and td.__class__ is TensorDict
        and next_td.__class__ is TensorDict
        and td._batch_size == next_td._batch_size  # noqa: SLF001
        and td._device is next_td._device  # noqa: SLF001
        and td._td_dim_names is None  # noqa: SLF001
        and not td._is_locked  # noqa: SLF001
    ):
        td._tensordict["next"] = next_td  # noqa: SLF001
    else:
        td.set("next", next_td)


def num_writes(leaves: Iterable[torch.Tensor]) -> float:
    """Return how often torch has written to some tensors in place; no public function returns it.

    It is NaN, which equals no number, for tensors that torch does not count: on a device, made in its inference mode.
    """
    try:
        return sum(map(_version, leaves))
    except RuntimeError:
        # A new object each time: `in` finds the same object although it equals nothing.
        return float("nan")


def as_tensor(array: np.ndarray, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a tensor over an array (no copy) that can also be used outside of `torch.inference_mode`.

    Torch's own functions return inference tensors in that mode: without a version, and read-only outside of it.

    Args:
        array: of a dtype that torch has.
        dtype: one of the same size as which to view it; None for its own.
    """
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(mode=False):
            return as_tensor(array, dtype)
    tensor = torch.from_numpy(array)
    if dtype is None:
        return tensor
    return tensor.view(dtype)
