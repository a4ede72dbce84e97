"""Save the envs of an executor, and restore them: in place, in other envs, or from a checkpoint.

Guarantees: a state that does not fit is refused before any env is touched. If an env refuses its state, the envs that
were to be restored need a reset, and all others continue.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from envherd.executor.protocol.env_batches import check_root
from envherd.workers.errors import EnvError

if TYPE_CHECKING:
    from envherd.executor.protocol.engine import Engine

log = logging.getLogger("envherd")


def save(engine: Engine, env_ids: np.ndarray) -> list[dict[str, Any]]:
    """Return the states of some envs; see `BatchedEnv.save`."""
    engine.refuse_under_way(env_ids)
    return _save(engine, env_ids, is_whole=True)


def _save(engine: Engine, env_ids: np.ndarray, *, is_whole: bool) -> list[dict[str, Any]]:
    """Return states; with `is_whole`, refuse envs of which a part alone can be saved, which must be reset."""
    ids = env_ids.tolist()
    answers = engine.ask("save", ids, kwargs={"is_whole": is_whole})
    roots, needs_reset = engine.batches.roots(env_ids), engine.states.needs_reset
    return [
        {
            "env": crossed(answers[env_id]),
            "root": root,
            "ended": bool(needs_reset[env_id]) or not answers[env_id]["is_whole"],
            "episode": answers[env_id]["episode"],
            "generators": answers[env_id]["generators"],
        }
        for env_id, root in zip(ids, roots, strict=True)
    ]


def restore(engine: Engine, env_ids: np.ndarray, states: Any) -> None:
    """Restore the states of some envs; see `BatchedEnv.restore`."""
    if not isinstance(states, (list, tuple)) or len(states) != len(env_ids):
        got = f"{len(states)} states" if isinstance(states, (list, tuple)) else f"a {type(states).__name__}"
        raise ValueError(
            f"restore failed: expected a list of {len(env_ids)} states, one for each env, got {got}. To restore one "
            f"state in several envs: env.restore([state] * {len(env_ids)}, env_ids)."
        )
    engine.guard.refuse_rolling()
    engine.refuse_under_way(env_ids)
    for env_id, state in zip(env_ids.tolist(), states, strict=True):
        if not (isinstance(state, Mapping) and {"env", "root", "ended"} <= state.keys()):
            raise ValueError(f"restore failed: expected states that save() returned, got {state!r:.80} (env {env_id}).")
        check_root(state["root"], engine.specs[env_id], env_id, "restore")
    engine.give_up(env_ids)  # in case an exception breaks it off
    sent = tuple({name: state.get(name) for name in ("env", "episode", "generators")} for state in states)
    engine.ask("restore", env_ids.tolist(), args=sent)
    engine.restore(env_ids, [state["root"] for state in states], np.array([bool(state["ended"]) for state in states]))


def state_dict(engine: Engine, *, with_envs: bool | None) -> dict[str, Any]:
    """Return the state of all envs for a checkpoint; see `BatchedEnv.state_dict`."""
    engine.refuse_under_way(engine.all_ids)
    episodes = engine.pool.slab.words["episode"][: engine.num_envs].tolist()
    kept: dict[str, Any] = {"seed": engine.seed, "episodes": episodes, "actions": engine.sampler.state}
    if with_envs is False:
        return {"executor": kept}
    try:
        saved = _save(engine, engine.all_ids, is_whole=with_envs is True)
    except EnvError as error:
        if with_envs or error.context.get("type_name") != "NotImplementedError":
            raise
        log.warning(
            "state_dict has saved the seeds alone: an executor that loads it begins new episodes, which continue the "
            "seeds. %s",
            str(error).removeprefix("save failed: "),
        )
        return {"executor": kept}
    states = {f"env{i}": one["env"] for i, one in enumerate(saved)}
    kept["roots"], kept["ended"] = [one["root"] for one in saved], [one["ended"] for one in saved]
    kept["generators"] = [one["generators"] for one in saved]
    return {**states, "executor": kept}


def load_state_dict(engine: Engine, state: Any) -> None:
    """Load a state of all envs from a checkpoint; see `BatchedEnv.load_state_dict`."""
    if not isinstance(state, Mapping):
        raise TypeError(f"load_state_dict failed: expected what state_dict() returned, got {state!r}.")
    engine.guard.refuse_rolling()
    engine.refuse_under_way(engine.all_ids)
    num_envs, kept = engine.num_envs, state.get("executor")
    missing = [i for i in range(num_envs) if f"env{i}" not in state]
    is_seeds_alone = kept is not None and "roots" not in kept
    if missing and not (is_seeds_alone and len(missing) == num_envs):
        raise ValueError(
            f"load_state_dict failed: expected a state of each env, got none of env {missing[0]} among "
            f"{sorted(map(str, state))[:8]}. Pass what state_dict() returned, not a dict that holds it."
        )
    if kept is not None:
        _check_kept(engine, kept, has_roots=not is_seeds_alone)
    engine.give_up(engine.all_ids)  # in case an exception breaks off the load
    if kept is not None and "seed" in kept:
        engine.set_seed(kept["seed"], kept["episodes"])
        engine.sampler.state = kept["actions"]
    if is_seeds_alone:
        return
    generators = [None] * num_envs if kept is None else kept.get("generators", [None] * num_envs)
    sent = tuple({"env": state[f"env{i}"], "generators": own} for i, own in enumerate(generators))
    engine.ask("restore", engine.all_ids.tolist(), args=sent)
    if kept is None:
        engine.restore(engine.all_ids, None, None)
    else:
        engine.restore(engine.all_ids, kept["roots"], np.array(kept["ended"], bool))


def _check_kept(engine: Engine, kept: Mapping[str, Any], *, has_roots: bool) -> None:
    """Refuse the executor's part of a state of another number of envs, or with roots of other envs."""
    episodes = kept.get("episodes", [0] * engine.num_envs)
    if len(episodes) != engine.num_envs:
        raise ValueError(
            f"load_state_dict failed: expected the episodes of {engine.num_envs} envs, got {len(episodes)}."
        )
    roots: Sequence[Any] = kept["roots"] if has_roots else ()
    if has_roots and len(roots) != engine.num_envs:
        raise ValueError(f"load_state_dict failed: expected {engine.num_envs} roots, got {len(roots)}.")
    for env_id, root in enumerate(roots):
        check_root(root, engine.specs[env_id], env_id, "load_state_dict")


def crossed(answer: Mapping[str, Any]) -> Any:
    """Return the value of an answer from a worker."""
    if "pickled" in answer:
        return pickle.loads(answer["pickled"])  # only with infos="pickle"
    return answer["plain"]
