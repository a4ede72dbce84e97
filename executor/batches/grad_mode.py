"""Run a function without recording gradients, or outside of `torch.inference_mode`."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

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
