"""Checks of what callers pass, with the call's and the argument's name; nothing has been started or changed by then."""

from __future__ import annotations

import difflib
import functools
import inspect
import operator
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from tensordict import TensorDictBase

P = ParamSpec("P")
T = TypeVar("T")

_STEPS = ("step", "step_and_maybe_reset", "send")
_ADVICE = (
    " Put actions into one: env.current().set('action', torch.as_tensor(actions)). For plain arrays use AsyncVectorEnv "
    "of envherd.executor.facades.gymnasium."
)


def as_count(call: str, name: str, value: Any, *, least: int = 1, or_none: bool = False) -> Any:
    """Return an integer of at least `least` as `int`, or None if that is allowed.

    Raises:
        ValueError: it is another number, or none.
    """
    if value is None and or_none:
        return None
    try:
        found = least - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        found = least - 1
    if found < least:
        others = " or None" if or_none else ""
        raise ValueError(f"{call} failed: expected {name} of at least {least}{others}, got {value!r}.")
    return found


def need_seconds(call: str, name: str, value: Any) -> None:
    """Refuse what is neither None nor a number of at least 0."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if value is not None and not (is_number and value >= 0):
        raise ValueError(f"{call} failed: expected {name} as seconds of at least 0 or None, got {value!r}.")


def need_bools(call: str, **switches: Any) -> None:
    """Refuse switches that are neither True nor False."""
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise ValueError(f"{call} failed: expected {name} to be True or False, got {value!r}.")  # noqa: TRY004


def need_callables(call: str, **functions: Any) -> None:
    """Refuse what is neither None nor can be called."""
    for name, value in functions.items():
        if value is not None and not callable(value):
            raise TypeError(f"{call} failed: expected {name} to be a callable or None, got {value!r}.")


def need_batch(call: str, td: Any, name: str = "a batch") -> None:
    """Refuse what is no TensorDict."""
    if not isinstance(td, TensorDictBase):
        raise TypeError(
            f"{call} failed: expected {name} as a TensorDict, got {_named(td)}.{_ADVICE if call in _STEPS else ''}"
        )


def _named(value: Any) -> str:
    kind = type(value)
    return f"a {kind.__name__}" if kind.__module__ == "builtins" else f"a {kind.__module__}.{kind.__name__}"


#: What other libraries call an argument -> what it is called here.
_NAMES_ELSEWHERE = {
    "n_envs": "num_envs",
    "nenvs": "num_envs",
    "n_workers": "num_workers",
    "num_processes": "num_workers",
    "env_fn": "make_env",
    "env_fns": "make_env",
    "env_makers": "make_env",
    "create_env_fn": "make_env",
    "create_env_kwargs": "env_kwargs",
    "env_args": "env_kwargs",
}


def names_right_keyword(call: Callable[P, T]) -> Callable[P, T]:
    """Let a constructor refuse a keyword that it does not have with the one that is meant."""
    names = [name for name in inspect.signature(call).parameters if name != "self"]

    @functools.wraps(call)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        for name in kwargs:
            if name not in names:
                meant = _NAMES_ELSEWHERE.get(name) or next(iter(difflib.get_close_matches(name, names)), None)
                advice = f"Did you mean {meant}?" if meant in names else f"It takes {', '.join(names)}."
                raise TypeError(f"{type(args[0]).__name__} failed: it has no argument {name!r}. {advice}")
        return call(*args, **kwargs)

    return checked
