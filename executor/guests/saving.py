"""Save the envs of an executor, and restore them: in place, in other envs, or from a checkpoint.

Guarantees: a state that is damaged or of other envs is refused with one ValueError before anything is changed, here or
in a worker. A `load_state_dict` of the env checks its state only when it loads it: if it raises, the envs that were to
be restored need a reset, and all others continue.
"""

import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from envherd.executor.pools.commands import crossed
from envherd.executor.processes.error_messages import log
from envherd.executor.protocol.engine import Engine
from envherd.executor.protocol.env_batches import check_root
from envherd.workers import seeding
from envherd.workers.errors import EnvError


def save(engine: Engine, env_ids: np.ndarray) -> list[dict[str, Any]]:
    """Return the states of some envs; see `BatchedEnv.save`."""
    engine.refuse_under_way(env_ids)
    return _save(engine, env_ids, is_whole=True)


def _save(
    engine: Engine,
    env_ids: np.ndarray,
    *,
    is_whole: bool,
) -> list[dict[str, Any]]:
    """Return states; with `is_whole`, refuse envs of which a part alone can be saved, which must be reset."""
    ids = env_ids.tolist()
    answers = engine.ask("save", ids, kwargs={"is_whole": is_whole})
    return [
        {
            "env": crossed(answers[env_id]),
            "root": root,
            # An env of which a part alone was saved cannot continue its episode.
            "ended": bool(has_ended) or not answers[env_id]["is_whole"],
            "episode": answers[env_id]["episode"],
            "generators": answers[env_id]["generators"],
        }
        for env_id, root, has_ended in zip(
            ids,
            engine.batches.roots(env_ids),
            engine.states.needs_reset[env_ids],
            strict=True,
        )
    ]


def restore(engine: Engine, env_ids: np.ndarray, states: Any) -> None:
    """Restore the states of some envs; see `BatchedEnv.restore`."""
    if not isinstance(states, (list, tuple)) or len(states) != len(env_ids):
        got = (
            f"{len(states)} states"
            if isinstance(states, (list, tuple))
            else f"a {type(states).__name__}"
        )
        raise ValueError(
            f"restore failed: expected a list of {len(env_ids)} states, one for each env, got {got}. To restore one "
            f"state in several envs: env.restore([state] * {len(env_ids)}, env_ids)."
        )
    engine.guard.refuse_rolling()
    engine.refuse_under_way(env_ids)
    for env_id, state in zip(env_ids.tolist(), states, strict=True):
        if not (
            isinstance(state, Mapping) and {"env", "root", *_FORMS} <= state.keys()
        ):
            raise _refusal(
                "restore",
                "states that save() returned",
                state,
                f"env {env_id}",
            )
    _check("restore", engine, env_ids, states)
    engine.give_up(env_ids)  # in case an exception breaks it off
    _put(engine, env_ids, states)


def _check(
    call: str,
    engine: Engine,
    env_ids: np.ndarray,
    states: Sequence[Mapping[str, Any]],
) -> None:
    """Refuse states of which any is not of its env, before anything is changed.

    Raises:
        ValueError: with the entry.
    """
    for env_id, state in zip(env_ids.tolist(), states, strict=True):
        for name, form in _FORMS.items():
            if name in state and not form.is_valid(state[name]):
                raise _refusal(
                    call,
                    form.expected,
                    state[name],
                    f"{name!r} of env {env_id}",
                )
        if "root" in state:
            check_root(state["root"], engine.specs[env_id], env_id, call)
    answers = engine.ask(
        "check",
        env_ids.tolist(),
        args=tuple({"env": state["env"]} for state in states),
    )
    for env_id in env_ids.tolist():
        if why := answers[env_id]["plain"]:
            raise ValueError(
                f"{call} failed: {why.removesuffix('.')} (state of env {env_id}). Nothing was restored."
            )


def _put(
    engine: Engine,
    env_ids: np.ndarray,
    states: Sequence[Mapping[str, Any]],
) -> None:
    """Restore states that `_check` has checked."""
    engine.ask(
        "restore",
        env_ids.tolist(),
        args=tuple(
            {name: state.get(name) for name in ("env", "episode", "generators")}
            for state in states
        ),
    )
    if "root" in states[0]:
        engine.restore(
            env_ids,
            [state["root"] for state in states],
            np.array([state["ended"] for state in states], bool),
        )
    else:
        engine.restore(env_ids, None, None)


def state_dict(engine: Engine, *, with_envs: bool | None) -> dict[str, Any]:
    """Return the state of all envs for a checkpoint; see `BatchedEnv.state_dict`."""
    engine.refuse_under_way(engine.all_ids)
    kept: dict[str, Any] = {
        "version": _VERSION,
        "seed": engine.seed,
        "episodes": engine.pool.slab.words["episode"][: engine.num_envs].tolist(),
        "actions": engine.sampler.state,
    }
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
    kept["roots"] = [one["root"] for one in saved]
    kept["ended"] = [one["ended"] for one in saved]
    kept["generators"] = [one["generators"] for one in saved]
    return {f"env{i}": one["env"] for i, one in enumerate(saved)} | {"executor": kept}


def load_state_dict(engine: Engine, state: Any) -> None:
    """Load a state of all envs from a checkpoint; see `BatchedEnv.load_state_dict`."""
    num_envs = engine.num_envs
    kept = state.get("executor", {}) if isinstance(state, Mapping) else None
    if not isinstance(kept, Mapping):
        raise _refusal(_LOAD, "what state_dict() returned", state, "the state")
    engine.guard.refuse_rolling()
    engine.refuse_under_way(engine.all_ids)
    if kept:
        _check_kept(engine, kept)
    saved_ids = [key for key in state if re.fullmatch("env[0-9]+", str(key))]
    if saved_ids or "roots" in kept or not kept:
        _check_number(len(saved_ids) or num_envs, num_envs)
        missing = [i for i in range(num_envs) if f"env{i}" not in state]
        if missing or (kept and "roots" not in kept):
            got = (
                f"none of env {missing[0]}" if missing else "one without executor.roots"
            )
            raise ValueError(
                f"{_LOAD} failed: expected a state of each env, got {got} among {sorted(map(str, state))[:8]}. Pass "
                f"what state_dict() returned, not a dict that holds it."
            )
    per_env = {one: kept[name] for name, one in _PER_ENV.items() if name in kept}
    states = [
        {"env": state[f"env{i}"], **{one: values[i] for one, values in per_env.items()}}
        for i in range(num_envs if saved_ids else 0)
    ]
    _check(_LOAD, engine, engine.all_ids[: len(states)], states)
    engine.give_up(engine.all_ids)  # in case an exception breaks off the load
    if kept:
        engine.set_seed(kept["seed"], kept["episodes"])
        engine.sampler.state = kept["actions"]
    if states:
        _put(engine, engine.all_ids, states)


#: Entry of the executor's part of a state with one item for each env -> the item's entry in a state of `save`.
_PER_ENV = {"roots": "root", "ended": "ended", "generators": "generators"}
_LOAD = "load_state_dict"
#: Version of the executor's part.
_VERSION = 1


def _check_kept(engine: Engine, kept: Mapping[str, Any]) -> None:
    """Refuse the executor's part of a state if it is damaged, or of another number of envs."""
    if kept.get("version", _VERSION) != _VERSION:
        raise _refusal(
            _LOAD,
            f"version {_VERSION} of the format",
            kept["version"],
            "executor.version",
        )
    # A state of the seeds alone has none of the lists of envs; any other has all of them.
    for name in ("episodes", *(_PER_ENV if _PER_ENV.keys() & kept.keys() else ())):
        if not isinstance(kept.get(name), (list, tuple)):
            raise _refusal(
                _LOAD,
                "a list of one item for each env",
                kept.get(name),
                f"executor.{name}",
            )
        _check_number(len(kept[name]), engine.num_envs)
    for env_id, episode in enumerate(kept["episodes"]):
        if not is_count(episode, most=_MAX_EPISODE):
            raise _refusal(
                _LOAD,
                "an integer from 0 to 2**62",
                episode,
                f"executor.episodes[{env_id}]",
            )
    seed = kept.get("seed")
    if not (isinstance(seed, int) and not isinstance(seed, bool) and seed >= 0):
        raise _refusal(_LOAD, "an integer of at least 0", seed, "executor.seed")
    if not _is_state(lambda: engine.sampler.check(kept.get("actions"))):
        raise _refusal(
            _LOAD,
            "the state of the generator of rand_action",
            kept.get("actions"),
            "executor.actions",
        )


def _check_number(num_saved: int, num_envs: int) -> None:
    if num_saved != num_envs:
        raise ValueError(
            f"{_LOAD} failed: expected the state of {num_envs} envs, got one of {num_saved} (saved with "
            f"{num_saved}, this has {num_envs}). Nothing was restored. Make an executor of {num_saved} envs."
        )


def _is_state(read: Callable[[], Any]) -> bool:
    """Return whether a state can be read."""
    try:
        read()
    except Exception:  # whatever it is
        return False
    return True


def is_count(value: Any, most: int = 2**63 - 1) -> bool:
    """Return whether a value of a file is an integer from 0 to `most`."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most


# An int64 of the slab counts on from it, with room for resets.
_MAX_EPISODE = 2**62


class _Form(NamedTuple):
    """What an entry of an env's state must be.

    Attributes:
        expected: in words.
        is_valid: returns whether a value is so.
    """

    expected: str
    is_valid: Callable[[Any], bool]


#: Entry of an env's state -> what it must be.
_FORMS = {
    "ended": _Form("True or False", lambda value: isinstance(value, bool)),
    "episode": _Form(
        "an integer from 0 to 2**62",
        lambda value: is_count(value, most=_MAX_EPISODE),
    ),
    "generators": _Form(
        "None or the state of the global generators",
        lambda value: value is None or _is_state(lambda: seeding.from_plain(value)),
    ),
}


def _refusal(call: str, expected: str, got: Any, place: str) -> ValueError:
    try:
        shown = reprlib.repr(got)
    except Exception:  # an integer of too many digits
        shown = f"a {type(got).__name__}"
    return ValueError(
        f"{call} failed: expected {expected}, got {shown} ({place}). Nothing was restored."
    )
