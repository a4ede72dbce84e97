"""Torch's modes of the calling thread: run without recording gradients, and make tensors that outlive a mode."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import numpy as np
import torch

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
    return tensor if dtype is None else tensor.view(dtype)
