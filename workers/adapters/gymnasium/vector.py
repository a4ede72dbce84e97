"""Gymnasium vector envs: n rows that are stepped together, behind the partial-reset protocol.

A vector env resets its rows by itself (autoreset). The table shows what it does to a row that ended, and what the
adapter does:

=========  =========================================  ====================================================
mode       the vector env                             here
=========  =========================================  ====================================================
DISABLED   leaves it; `reset_mask` resets it          nothing to undo: `reset_mask`
NEXT_STEP  resets it in place of its next step        `reset_mask` before that step, which then steps it
SAME_STEP  resets it at once, gives `final_obs`       `next` gets `final_obs`; the first observation that came
                                                      with it is kept until that row is reset
=========  =========================================  ====================================================

Guarantees:
- one step is one `env.step`, in which no row is reset instead of stepped. A row that ended must be reset before
  the next step; a reset touches exactly its rows, and a vector env that touches others is refused.
- `next` holds the last observation of an episode, never the first one of the next episode.
- the env gets copies of the mask and of the caller's options.
Gymnasium's `CartPoleVectorEnv` lacks partial resets; `_lend_masks` adds them.
Refused, with the fix in the message: a vector env that does not declare its mode; one that is known to lose a reset or
an observation (see `_refuse_unfit`).
Does not check whether a third-party NEXT_STEP env cancels its own pending reset after a reset by mask.

Seeds: a full reset passes the seed to the env (row i gets seed + i). So does a partial reset if every row has a
generator (SyncVectorEnv, AsyncVectorEnv, ALE); otherwise the one generator serves all rows and continues.
"""

import contextlib
import copy
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.envs.classic_control.utils import maybe_parse_reset_bounds
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv

from envherd.shm.specs import EnvSpec, LeafSpec, done_leaves
from envherd.workers.adapters.base import Adapter, Mask, Options, StepValues
from envherd.workers.adapters.common.tree import builder, flattener, leaf_specs
from envherd.workers.adapters.common.values import are_flags, own_options
from envherd.workers.adapters.gymnasium import spaces as gymnasium_spaces
from envherd.workers.adapters.gymnasium.spaces import mosaic
from envherd.workers.errors import FactoryError, ResetNeeded, SpecError

_MODES = ("NextStep", "SameStep", "Disabled")

_DECLARE = (
    "Say it where the env is built, e.g. env.metadata = {**env.metadata, 'autoreset_mode': "
    "gymnasium.vector.AutoresetMode.NEXT_STEP}, or return "
    "envherd.workers.adapters.gymnasium_vector.GymnasiumVectorAdapter(env, autoreset_mode='NextStep'): 'NextStep' if a "
    "row that ended ignores its next action, 'SameStep' if its reset observation comes with the end, 'Disabled' if "
    "it waits for reset(options={'reset_mask': ...})."
)


class GymnasiumVectorAdapter(Adapter):
    """One `gymnasium.vector.VectorEnv` (of any wrappers) of n rows: batch shape `(n,)`; see the module.

    Keys are those of a single env, shapes have n in front, the reward is float32 `[n, 1]`. `options` of `reset` may
    hold the single keyword `options`, which the env gets; at partial resets without it, rows get `{}`. A SyncVectorEnv
    in SAME_STEP mode is switched to DISABLED: it would reset an env before its last observation can be copied, and envs
    that reuse their buffers would overwrite it.

    Args:
        env: what the factory returned; it is neither reset nor stepped here.
        autoreset_mode: Gymnasium's name of the mode, for an env whose metadata do not declare it.
        ends_where_it_starts: an episode's last observation may equal the next one's first. If False, equal ones prove
            that an env in SAME_STEP mode has lost the last observation.

    Attributes:
        info: the last `infos` dict of the env, as it gave it (VIEW); empty before the first reset.
        mode: "NextStep", "SameStep" or "Disabled": what the env does now.

    Raises:
        SpecError: the mode is unknown, a space is missing, or an observation has a name that a batch uses.
        FactoryError: the env, or a wrapper of it, is known to break partial resets.
    """

    family: ClassVar[str] = "gymnasium"

    def __init__(
        self,
        env: VectorEnv[Any, Any, Any],
        *,
        autoreset_mode: Any = None,
        ends_where_it_starts: bool = False,
    ) -> None:
        self.env = env
        self.info: Mapping[str, Any] = {}
        self.num_rows = n = int(env.num_envs)
        self.mode = _mode_of(env, autoreset_mode)
        _lend_masks(env.unwrapped)
        _refuse_unfit(env, self.mode)
        if self.mode == "SameStep" and type(env.unwrapped).step is SyncVectorEnv.step:
            self.mode = _disable_autoreset(env.unwrapped)
        self._ends_where_it_starts = ends_where_it_starts
        is_atari = type(env.unwrapped).__module__ == "ale_py.vector_env"
        self._seeds_rows = is_atari or isinstance(
            env.unwrapped,
            (SyncVectorEnv, AsyncVectorEnv),
        )
        # ALE takes int32, and row i gets seed + i.
        self._num_seeds = 2**31 - n if is_atari else 2**32
        space = getattr(env, "single_observation_space", None)
        row, _ = gymnasium_spaces.observation_tree(space)
        batch, renamed = gymnasium_spaces.observation_tree(
            space,
            gymnasium_spaces.observations_of(n),
        )
        action = gymnasium_spaces.tree_below(
            getattr(env, "single_action_space", None),
            "action",
            make_leaf=gymnasium_spaces.actions_of(n),
        )
        self._flatten_row = flattener(row, "final_obs")
        self._flatten = flattener(batch, "observation")
        self._build = builder(action)
        self._dense = [
            i for i, leaf in enumerate(leaf_specs(batch)) if not leaf.is_side
        ]
        self._is_reseeded = True
        self._ended = np.ones(n, bool)
        # Rows that the env has reset by itself already. Once there are any, `_begun_at` and `_begun_info` have their
        # first observations and infos.
        self._begun = np.zeros(n, bool)
        # Current observations of all rows (VIEW of the env's).
        self._now: list[Any] = []
        self.spec = EnvSpec(
            observation=leaf_specs(batch),
            action=leaf_specs(action),
            reward=(LeafSpec(("reward",), (n, 1), "float32"),),
            done=done_leaves((n,)),
            batch_shape=(n,),
            family=self.family,
            metadata={
                **gymnasium_spaces.metadata(env, renamed),
                "autoreset_mode": self.mode,
                "resets_itself": self.mode == "SameStep",
            },
        )

    def reseeded(self) -> None:
        """Make the next reset of all rows use its seed, even if the env has already begun their episodes by itself."""
        self._is_reseeded = True

    def reset(
        self,
        seed: int | None,
        options: Options = None,
        mask: Mask = None,
    ) -> list[Any]:
        """Start new episodes in some rows; the others keep theirs.

        Args:
            seed: see the module.
            options: `{"options": {...}}`, of which the env gets a copy, or nothing.
            mask: bool `[n, 1]`; None resets all rows.

        Raises:
            TypeError: a keyword other than `options`, or a `reset_mask` in the options.
            SpecError: the env touched other rows, or returned anything but `(observation, infos)`.
        """
        own = _own_options(options)
        seed = None if seed is None else seed % self._num_seeds
        if mask is None:
            mask = np.ones((self.num_rows, 1), bool)
        is_anew = (
            self._is_reseeded
            or not self._now
            or own is not None
            or not self._begun.all()
        )
        # Otherwise the env has begun all rows by itself, and their first observations are at hand.
        if mask.all() and is_anew:
            self._is_reseeded = False
            observation, self.info = _pair(self.env.reset(seed=seed, options=own))
            self._now = self._flatten(observation)
            self._ended[:] = self._begun[:] = False
            return self._now
        rows = mask[:, 0]
        now = [_copied(value) for value in self._now]
        waiting = rows & ~self._begun
        if own is not None:  # options need a real reset
            waiting = rows
        if waiting.any():
            _put(
                now,
                self._reset_rows(waiting, seed if self._seeds_rows else None, own, now),
                waiting,
            )
        taken = rows & ~waiting
        if taken.any():
            _put(now, self._begun_at, taken)
            self.info = _with_rows(self.info, self._begun_info, taken)
        self._ended[rows] = self._begun[rows] = False
        self._now = now
        return now

    def _reset_rows(
        self,
        rows: np.ndarray,
        seed: int | None,
        options: Any,
        now: list[Any],
    ) -> list[Any]:
        """Reset rows of the env by mask and return its observations; `now` holds the current ones of all rows."""
        observation, self.info = _pair(
            self.env.reset(seed=seed, options=_MaskedOptions(rows.copy(), options))
        )
        values = self._flatten(observation)
        others = ~rows & ~self._begun
        for index in self._dense:
            if np.shape(values[index]) != self.spec.observation[index].shape:
                continue  # the code that stores it raises
            theirs = np.ascontiguousarray(np.asarray(values[index])[others])
            # Bytes, because a NaN is not equal to itself.
            if (
                theirs.tobytes()
                != np.ascontiguousarray(np.asarray(now[index])[others])
                .astype(theirs.dtype)
                .tobytes()
            ):
                raise SpecError(
                    f"reset failed: expected {type(self.env.unwrapped).__name__} to reset the rows "
                    f"{np.flatnonzero(rows).tolist()} and no others, but {'/'.join(self.spec.observation[index].key)} "
                    f"of other rows has changed: it does not know options={{'reset_mask': ...}}, or a wrapper drops "
                    f"it. {_BUILD_DISABLED}"
                )
        return values

    def step(self, action: list[Any]) -> StepValues:
        """Make one transition in every row.

        Raises:
            ResetNeeded: a row has ended, or was never reset.
            SpecError: the env returned no five values or no flags, or has lost a last observation.
        """
        if self._ended.any():
            raise ResetNeeded(
                f"step failed: expected running rows, got rows {np.flatnonzero(self._ended).tolist()} that have ended "
                f"or were never reset. Reset them with a '_reset' mask."
            )
        result = self.env.step(self._build(action))
        try:
            observation, reward, terminated, truncated, self.info = result
        except (TypeError, ValueError):
            raise SpecError(
                f"step failed: expected (observations, rewards, terminations, truncations, infos), "
                f"got {type(result).__name__}. Return five values from env.step."
            ) from None
        terminated = self._flags(terminated, "terminations")
        truncated = self._flags(truncated, "truncations")
        self._ended = terminated | truncated
        values = self._flatten(observation)
        if self._ended.any():
            values = self._with_ends(values)
        self._now = values
        reward = np.asarray(reward)
        if reward.shape == (self.num_rows,):
            reward = reward[:, np.newaxis]
        return values, [reward], terminated[:, np.newaxis], truncated[:, np.newaxis]

    def _with_ends(self, values: list[Any]) -> list[Any]:
        """Return a step's observations with the last ones of ended rows; keep the first ones of their next episodes."""
        final = self.info.get("final_obs")
        if self.mode != "SameStep":
            if final is not None:
                raise SpecError(
                    f"step failed: expected no final_obs from a vector env in mode {self.mode}, got one: it is in "
                    f"SAME_STEP mode. {_DECLARE}"
                )
            return values
        self._begun = self._ended.copy()
        # Without what concerns the episodes that ended.
        self._begun_info = {
            key: value
            for key, value in self.info.items()
            if str(key).lstrip("_") not in ("final_obs", "final_info")
        }
        self._begun_at = [_copied(value) for value in values]
        last = [_copied(value) for value in values]
        for row in np.flatnonzero(self._ended).tolist():
            for target, value in zip(last, self._final_row(final, row), strict=True):
                target[row] = value
            pairs = (
                (np.asarray(last[i][row]), np.asarray(self._begun_at[i][row]))
                for i in self._dense
            )
            if not self._ends_where_it_starts and all(
                one.tobytes() == other.tobytes() for one, other in pairs
            ):
                raise SpecError(
                    f"step failed: expected the last observation of row {row} in final_obs, got the first one of its "
                    f"next episode: the env has changed it in its reset (it reuses its buffer). {_BUILD_DISABLED} If "
                    f"its episodes really end where they start, return GymnasiumVectorAdapter(env, "
                    f"ends_where_it_starts=True) from the factory."
                )
        return last

    def _final_row(self, final: Any, row: int) -> list[Any]:
        is_array = isinstance(final, np.ndarray)
        if is_array and final.dtype == object and final[row] is not None:
            return self._flatten_row(final[row])
        if final is None or (is_array and final.dtype == object):
            raise SpecError(
                f"step failed: expected infos['final_obs'] for row {row}, which ended, as the env is in SAME_STEP "
                f"mode, got none: its last observation is lost. {_BUILD_DISABLED}"
            )
        return [value[row] for value in self._flatten(_without_masks(final))]

    def _flags(self, value: Any, name: str) -> np.ndarray:
        flags = np.asarray(value)
        if flags.shape != (self.num_rows,) or not are_flags(flags):
            raise SpecError(
                f"step failed: expected bool ({self.num_rows},) as {name}, got {flags.dtype} {flags.shape}. Fix the "
                f"vector env."
            )
        return flags.astype(bool)

    def render(self) -> Any:
        """Return what the rows draw, side by side in a square, uint8 `[H, W, 3]`, or None if they draw no arrays."""
        if self.env.render_mode != "rgb_array":
            return None
        frames = self.env.render()
        return None if frames is None else mosaic(frames)


class _MaskedOptions(dict[str, Any]):
    """Options whose `reset_mask` can be popped any number of times.

    Gymnasium's vector envs pop the mask from the options; its wrappers read it afterwards and would mistake a partial
    reset for a full one. The mask is not an entry, so inner envs and other processes get only the other options.
    """

    def __init__(self, mask: np.ndarray, options: Mapping[str, Any] | None) -> None:
        super().__init__(options or {})
        self._mask = mask

    def __contains__(self, key: object) -> bool:
        return key == "reset_mask" or super().__contains__(key)

    def __missing__(self, key: str) -> np.ndarray:
        if key == "reset_mask":
            return self._mask.copy()
        raise KeyError(key)

    def __bool__(self) -> bool:
        return True

    def get(self, key: str, default: Any = None) -> Any:
        """Return an option or the mask."""
        return self._mask.copy() if key == "reset_mask" else super().get(key, default)

    def pop(self, key: str, *default: Any) -> Any:
        """Take an option out, or return the mask."""
        return self[key] if key == "reset_mask" else super().pop(key, *default)

    def copy(self) -> dict[str, Any]:
        """Return a copy with the same mask, for a wrapper that adds options."""
        return _MaskedOptions(self._mask, self)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return _MaskedOptions(self._mask, copy.deepcopy(dict(self.items()), memo))

    def __reduce__(self) -> Any:
        return dict, (dict(self.items()),)


_BUILD_DISABLED = (
    "Build it of single envs, e.g. gymnasium.make_vec(ID, n, vectorization_mode='sync', "
    "vector_kwargs={'autoreset_mode': gymnasium.vector.AutoresetMode.DISABLED})."
)


def _mode_of(env: VectorEnv[Any, Any, Any], declared: Any) -> str:
    """Return the mode from the env's metadata, or the declared one.

    Raises:
        SpecError: there is none, it is unknown, or the two differ.
    """
    # Some envs write their mode into the base class's metadata, where it would apply to every other vector env.
    metadata = {} if env.metadata is VectorEnv.metadata else (env.metadata or {})
    own = metadata.get("autoreset_mode", getattr(env.unwrapped, "autoreset_mode", None))
    modes = [
        getattr(mode, "value", mode) for mode in (own, declared) if mode is not None
    ]
    if not modes:
        raise SpecError(
            f"reading the autoreset mode failed: expected metadata['autoreset_mode'] of {type(env.unwrapped).__name__} "
            f"to say how rows that ended are reset, got nothing, and guessing loses observations. {_DECLARE}"
        )
    if modes[0] not in _MODES or modes[-1] != modes[0]:
        raise SpecError(
            f"reading the autoreset mode failed: expected {', '.join(_MODES)} for {type(env.unwrapped).__name__}, "
            f"got {' and '.join(map(str, modes))}. {_DECLARE}"
        )
    return str(modes[0])


def _refuse_unfit(env: VectorEnv[Any, Any, Any], mode: str) -> None:
    """Refuse envs that are known to reset rows twice, to reset all rows at once, or to ignore the mask."""
    native = env.unwrapped
    name = type(native).__name__
    problem = fix = ""
    batch_size = getattr(native, "batch_size", native.num_envs)
    if any(
        cls.__name__ == "NormalizeObservation"
        for layer in _layers(env)
        for cls in type(layer).__mro__
    ):
        problem = "vector.NormalizeObservation, which refuses partial resets"
        fix = "Wrap the single envs in gymnasium.wrappers.NormalizeObservation, or normalize in the policy."
    elif (
        isinstance(native, AsyncVectorEnv)
        and mode == "NextStep"
        and not native.shared_memory
    ):
        problem = f"{name}(shared_memory=False) in NEXT_STEP mode, which resets a row again after it was reset by mask"
        fix = "Build it with autoreset_mode=gymnasium.vector.AutoresetMode.DISABLED."
    elif (
        mode != "SameStep"
        and type(native).__module__.startswith("gymnasium.envs.")
        and not _knows_masks(native)
    ):
        problem = (
            f"{name}, which resets rows in place of a step and cannot do so by mask"
        )
        fix = _BUILD_DISABLED
    elif isinstance(batch_size, int) and batch_size not in (0, native.num_envs):
        problem = f"{name} with batch_size {batch_size} of {native.num_envs} envs, which steps some rows at a time"
        fix = "Build it with batch_size=num_envs; executors step asynchronously with send() and recv()."
    if problem:
        env.close()
        raise FactoryError(
            f"the factory failed: expected a vector env that resets by mask, got {problem}. {fix}"
        )


def _layers(env: Any) -> Iterator[Any]:
    """Yield an env's wrappers, outermost first, and the env."""
    while env is not None:
        yield env
        env = getattr(env, "env", None)


def _knows_masks(native: Any) -> bool:
    code = getattr(native.reset, "__code__", None)
    return code is None or "reset_mask" in code.co_consts


def _disable_autoreset(native: Any) -> str:
    disabled = type(native.autoreset_mode)("Disabled")
    native.autoreset_mode = disabled
    native.metadata = {**native.metadata, "autoreset_mode": disabled}
    return "Disabled"


def _own_options(options: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return a copy of the caller's `options`, which must not hold a mask."""
    own: dict[str, Any] | None = own_options(options, "gymnasium vector env")
    if own is not None and "reset_mask" in own:
        raise TypeError(
            "reset failed: expected a '_reset' mask in the tensordict, got a reset_mask among the options."
        )
    return own


def _pair(result: Any) -> tuple[Any, Mapping[str, Any]]:
    if (
        isinstance(result, tuple)
        and len(result) == 2
        and isinstance(result[1], Mapping)
    ):
        return result
    raise SpecError(
        f"reset failed: expected (observations, infos dict), got {type(result).__name__}. Return both from env.reset."
    )


def _copied(value: Any) -> Any:
    return np.array(value) if not isinstance(value, list) else list(value)


def _put(values: list[Any], source: list[Any], rows: np.ndarray) -> None:
    """Overwrite some rows of observation values."""
    for target, value in zip(values, source, strict=True):
        if isinstance(target, list):
            for row in np.flatnonzero(rows).tolist():
                target[row] = value[row]
        else:
            target[rows] = np.asarray(value)[rows]


def _with_rows(
    info: Mapping[Any, Any],
    other: Mapping[Any, Any],
    rows: np.ndarray,
) -> dict[Any, Any]:
    """Return an info whose entries of some rows are those of another one; what has no rows is left as it is."""
    mixed = dict(info)
    for key, value in other.items():
        # An info may hold anything.
        with contextlib.suppress(Exception):
            if isinstance(value, Mapping):
                mixed[key] = _with_rows(info.get(key, {}), value, rows)
            else:
                own = np.array(info.get(key, np.zeros_like(value)))
                own[rows] = np.asarray(value)[rows]
                mixed[key] = own
                # Of an info without masks, all rows have the entry.
                if key not in info and key[:1] != "_":
                    mixed.setdefault(f"_{key}", rows)
    return mixed


def _without_masks(final: Any) -> Any:
    """Return batched observations without the masks that Gymnasium adds to each entry."""
    if isinstance(final, dict):
        return {
            key: _without_masks(value)
            for key, value in final.items()
            if f"_{key}" in final or key[:1] != "_"
        }
    return final


def _lend_masks(native: Any) -> None:
    """Make an unwrapped env accept `reset_mask` from now on, if it is Gymnasium's `CartPoleVectorEnv`, which does not.

    It computes on arrays of all rows: `state`, `steps` and `prev_done` (the rows that its next step would reset instead
    of stepping). A partial reset does to a row what that step would do, but earlier: it draws a start state from the
    env's generator and clears `steps` and `prev_done`. Full resets still use the env's own `reset`.

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
