"""Progress bars for starts, rollouts and the loops of collectors.

Guarantees: outside a block of `progress()` tqdm is not imported and nothing is shown.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

#: Seconds after which a bar appears, for each open block; the innermost block's value is used.
_after_s: list[float] = []


class Bar:
    """A progress bar that shows nothing, with the method of tqdm's that is used here."""

    def update(self, count: float = 1) -> object:
        """Note that `count` more are done."""


@contextlib.contextmanager
def progress(*, after_s: float = 2.0) -> Iterator[None]:
    """In a `with` block, show a progress bar for each start, rollout and collector loop that takes long.

    Bars are those of tqdm, in terminals and in notebooks: `pip install "envherd[progress]"`.

    Args:
        after_s: seconds until a bar appears; shorter operations have none.

    Raises:
        ImportError: tqdm is not installed.
        ValueError: `after_s` is negative.
    """
    if not after_s >= 0:
        raise ValueError(
            f"progress failed: expected after_s of at least 0, got {after_s!r}."
        )
    _tqdm()
    _after_s.append(after_s)
    try:
        yield
    finally:
        _after_s.remove(after_s)


@contextlib.contextmanager
def showing(what: str, total: int, *, done: int = 0) -> Iterator[Bar]:
    """Yield a bar to update; it is shown inside a block of `progress`.

    Args:
        what: name of the operation.
        total: number of items in the end; below 0 if unknown.
        done: number of items done already.
    """
    if not _after_s:
        yield Bar()
        return
    with _tqdm()(
        total=total if total >= 0 else None,
        initial=done,
        desc=what,
        delay=_after_s[-1],
        leave=False,
    ) as bar:
        yield bar


def counted(count: int, what: str) -> Iterable[int]:
    """Return `range(count)`, with a bar in a block of `progress`."""
    if not _after_s:
        return range(count)
    bar: Iterable[int] = _tqdm()(
        range(count),
        desc=what,
        delay=_after_s[-1],
        leave=False,
    )
    return bar


def _tqdm() -> Any:
    try:
        from tqdm.auto import tqdm
    except ImportError:
        raise ImportError(
            'progress failed: tqdm is not installed. pip install "envherd[progress]"'
        ) from None

    class Quiet(tqdm):  # type: ignore[misc]  # untyped
        """A bar without tqdm's thread."""

        monitor_interval = 0

    return Quiet
