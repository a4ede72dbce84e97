"""Replace envs by copies of another env, whose worker forks itself; see `ParallelEnv.branch`."""

from collections.abc import Callable

import numpy as np

from envherd.executor.protocol.engine import Engine
from envherd.executor.protocol.env_states import State
from envherd.workers.block.slot import KEPT_FLAGS, KEPT_STEPS, JournalFlag
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
    _copy_journals(engine, source, targets, is_changed=False)
    engine.positions.copy_root(source, targets)
    states.restore(targets, np.full(len(targets), has_ended))


def _copy_journals(
    engine: Engine,
    source: int,
    targets: np.ndarray,
    *,
    is_changed: bool,
) -> None:
    """Make the inputs of an env's episode also those of its copies; see `workers.block.slot`."""
    group, row = engine.positions.places.of_env[source]
    journal = dict(engine.pool.slab.groups[group].journal)
    rows = engine.positions.places.row_of[targets]
    if not journal:
        return
    facts = journal.pop(("facts",))
    facts[rows] = facts[row]
    if is_changed:
        facts[rows, KEPT_FLAGS] |= JournalFlag.CHANGED
    for inputs in journal.values():
        # The rest takes no memory yet.
        inputs[rows, : facts[row, KEPT_STEPS]] = inputs[row, : facts[row, KEPT_STEPS]]
