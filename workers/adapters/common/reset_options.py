"""The `options` of a reset, for envs with Gymnasium's `reset` signature."""

import copy
from collections.abc import Mapping
from typing import Any


def own_options(options: Mapping[str, Any] | None, kind: str) -> Any:
    """Return a copy, for one env, of the `options` that the caller passed to `reset`; None if there are none.

    Args:
        options: keyword arguments of the reset.
        kind: of env, for the message.

    Raises:
        TypeError: a keyword other than `options`.
    """
    if not options:
        return None
    check_keywords(options, kind)
    return copy.deepcopy(options["options"])


def check_keywords(options: Mapping[str, Any], kind: str) -> None:
    """Refuse keyword arguments of a reset other than `options`.

    Args:
        options: keyword arguments of the reset.
        kind: of env, for the message.
    """
    unknown = [name for name in options if name != "options"]
    if unknown:
        raise TypeError(
            f"reset failed: expected no keyword but `options` for a {kind}, got `{unknown[0]}`. "
            f"Put it into reset(options={{{unknown[0]!r}: ...}}), which the env receives. "
            f"To reset some envs only, set td['_reset'] to a mask."
        )
