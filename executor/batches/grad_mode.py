"""`without_grad`: a function that records no gradients, and that leaves the thread's mode as it was."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")


def without_grad(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return a function that runs under `torch.no_grad`.

    A Ctrl-C while `torch.no_grad` enters or leaves may keep its mode from being put back: later losses of the caller
    would have no gradient. This puts it back.
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
