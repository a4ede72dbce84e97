"""Replace envs by copies of another env, whose worker forks itself; see `ParallelEnv.branch`."""

from collections.abc import Callable

import numpy as np

from envherd.executor.protocol.engine import Engine
from envherd.executor.protocol.env_states import State
from envherd.workers.errors import EnvherdError, ResetNeeded

#: `(source, targets, give_up)`: see `WorkerPool.branch`.
Fork = Callable[[int, np.ndarray, Callable[[], None]], None]


def branch(engine: Engine, source: int, targets: np.ndarray, fork: Fork) -> None:
    """Replace envs by copies of another; see `ParallelEnv.branch`.

    Args:
        engine: of the executor.
        source: env id.
        targets: env ids, int64 `[k]`, without `source`.
        fork: see `WorkerPool.branch`.
    """
    engine.guard.refuse_rolling()
    engine.guard.refuse_asking()
    engine.refuse_under_way(np.append(targets, source))
    states = engine.states
    if states.values[source] in (State.NEEDS_RESET, State.CUT):
        raise ResetNeeded(
            f"branch failed: expected an env that was reset, got env {source}, which has no episode. Reset it first.",
            env_ids=(source,),
        )
    has_ended = bool(states.needs_reset[source])

    def give_up() -> None:
        # Not before: a refused branch changes nothing.
        engine.received = None
        engine.flights.losses.lose(targets)

    try:
        fork(source, targets, give_up)
    except EnvherdError:
        engine.flights.losses.accept()
        raise
    episodes = engine.pool.slab.words["episode"]
    episodes[targets] = episodes[source]
    engine.positions.copy_root(source, targets)
    states.restore(targets, np.full(len(targets), has_ended))
