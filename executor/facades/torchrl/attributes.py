"""Attributes of envs in other processes: one request to all of them, whose result is a list."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

#: `(path, arguments of a call)` -> one result per env.
CallAll = Callable[[tuple[str, ...], tuple[Any, ...], dict[str, Any]], list[Any]]
#: Path -> the envs' attributes.
FindAll = Callable[[tuple[str, ...]], Any]


class _Attribute:
    """An attribute of each env; attribute access returns those of the envs' values."""

    _path: tuple[str, ...]
    _find: FindAll

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(
                f"private attribute {name!r} of {'.'.join(self._path)} cannot be dispatched."
            )
        return self._find((*self._path, name))


class Attributes(_Attribute, list[Any]):
    """The value of an attribute in each env, in env order.

    It can also be called without arguments, like TorchRL's dispatchers of plain attributes.
    """

    def __init__(self, values: list[Any], path: tuple[str, ...], find: FindAll) -> None:
        super().__init__(values)
        self._path, self._find = path, find

    def __call__(self) -> list[Any]:
        """Return the values."""
        return list(self)


class Dispatcher(_Attribute):
    """A method of each env, or an object in it that cannot be pickled; calls return one result per env."""

    def __init__(self, path: tuple[str, ...], find: FindAll, call: CallAll) -> None:
        self._path, self._find, self._call = path, find, call

    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Call it in all envs."""
        return self._call(self._path, args, kwargs)

    def __iter__(self) -> Iterator[Any]:
        return iter(self())

    def __repr__(self) -> str:
        return f"<{'.'.join(self._path)} of each env>"


class NotStarted(AttributeError, RuntimeError):
    """An attribute was requested of envs that are not started, or closed.

    An AttributeError, so that `hasattr` returns False; a RuntimeError, as in TorchRL.
    """
