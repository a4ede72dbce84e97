"""Partial resets for the vector env that `gymnasium.make_vec("CartPole-v1", n)` makes, which has none.

`CartPoleVectorEnv` is arithmetic on arrays of all rows: `state`, `steps` and `prev_done`, the rows that its next step
would reset instead of stepping them. Resetting a row is what that step would do to it, done before: a start drawn from
the env's generator, no steps, nothing owed. Its own `reset` stays for all that is no partial reset.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.envs.classic_control.utils import maybe_parse_reset_bounds


def lend_masks(native: Any) -> None:
    """Have the env, without wrappers, take `reset_mask` from now on, if it is one of Gymnasium's CartPoles.

    Subclasses with a reset or step of their own are left as they are, as nobody knows what they would add.
    """
    kept = (getattr(type(native), name, None) is getattr(CartPoleVectorEnv, name) for name in ("reset", "step"))
    if all(kept):
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
