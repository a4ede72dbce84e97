"""Partial resets for Gymnasium's `CartPoleVectorEnv` (`gymnasium.make_vec("CartPole-v1", n)`), which lacks them.

`CartPoleVectorEnv` computes on arrays of all rows: `state`, `steps` and `prev_done` (the rows that its next step would
reset instead of stepping). A partial reset does to a row what that step would do, but earlier: it draws a start state
from the env's generator and clears `steps` and `prev_done`. Full resets still use the env's own `reset`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.envs.classic_control.utils import maybe_parse_reset_bounds


def lend_masks(native: Any) -> None:
    """Make an unwrapped env accept `reset_mask` from now on, if it is Gymnasium's `CartPoleVectorEnv`.

    Subclasses that override `reset` or `step` are left unchanged, because what they add is unknown.
    """
    if all(
        getattr(type(native), name, None) is getattr(CartPoleVectorEnv, name)
        for name in ("reset", "step")
    ):
        native.reset = _masked(native)


def _masked(native: Any) -> Any:
    reset_all = native.reset

    def reset(*, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if options is None or "reset_mask" not in options:
            return reset_all(seed=seed, options=options)
        rows = np.flatnonzero(options["reset_mask"])
        low, high = maybe_parse_reset_bounds(options, native.low, native.high)
        native.state[:, rows] = native.np_random.uniform(low, high, (4, len(rows)))
        native.steps[rows] = 0
        native.prev_done[rows] = False
        return native.state.T.astype(np.float32), {}

    return reset
