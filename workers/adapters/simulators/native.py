"""Batched simulators with Gymnasium's methods on torch tensors: IsaacLab and similar ones.

`step(actions)` takes a tensor `[B, ...]` and gives `(observations, rewards, terminated, truncated, extras)`, tensors
`[B, ...]` or nested dicts of them; `reset(seed=, options=)` gives `(observations, extras)`; `num_envs` is B.

How such simulators treat rows that end, and what the adapter does:
- It resets them within `step` by `_reset_idx` (IsaacLab, mjlab): the adapter takes the last observation before that
  call (see "native resets" below), and keeps the first one of the next episode until the caller resets the row.
- It resets them within `step`, declares it (`metadata["autoreset_mode"]` SAME_STEP), and returns `final_obs`. In
  IsaacLab 3, `cfg.compute_final_obs` is the switch for it, which is off by default; the adapter turns it on.
- It never resets by itself (autoreset mode DISABLED, or `cfg.auto_reset` False; ManiSkill).
- It declares nothing: refused with a message that names what to declare. A reset observation is never taken for a last
  one.
The caller sees one protocol. A row that has ended keeps its last observation until the caller resets it, and the reset
returns the first observation of the next episode. A reset of a row that has not ended resets it in the simulator.

Observation keys are the simulator's (`policy`, `critic`), or `observation` for a single tensor. The adapter resets the
simulator once, to learn the actual shapes and dtypes.

Guarantees
- In a worker, and in a `SerialEnv` with several simulators, an action is a copy, which the simulator may keep. In
  `SerialEnv(1, ...)` it is the caller's own tensor. It is moved to the simulator's device once, and nothing else is.
- Rows that a reset does not select are returned unchanged, bit for bit, even if the simulator recomputes them.
- While a simulator runs, Python's, numpy's and torch's (CPU) global generators hold its own state, so envs of the same
  worker do not affect each other. A reset of all rows seeds them; a reset of some rows does not, because one generator
  serves all rows. Generators of GPUs are shared.
Does not check whether observations are within the bounds of their spaces.
Assumes: one thread at a time. Imports torch, as only workers with such simulators import this module.
"""

import contextlib
import functools
import inspect
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import torch

from envherd.shm.specs import (
    Discrete,
    EnvSpec,
    Key,
    LeafSpec,
    MultiDiscrete,
    done_leaves,
)
from envherd.workers import seeding
from envherd.workers.adapters.base import Adapter, Mask, Options, StepValues
from envherd.workers.adapters.common.tree import interval, refuse_reserved
from envherd.workers.adapters.common.values import OwnGenerators, check_keywords
from envherd.workers.adapters.torchrl.specs import dtype_name, to_numpy, to_plain
from envherd.workers.errors import FactoryError, ResetNeeded, SpecError

# ---- native resets -----------------------------------------------------------------------------
# Take the last observation of rows that a simulator resets within its own step, before it is overwritten.
#
# IsaacLab's simulators (`ManagerBasedRLEnv`, `DirectRLEnv`) and similar ones step, find the rows that have ended, call
# `_reset_idx` for these, and only then compute the observations that they return. For a row that has ended, that is the
# first observation of its next episode. Newer ones publish the last one as `extras["final_obs"]` if
# `cfg.compute_final_obs` is set.
#
# Guarantees of `ResetWatch`:
# - The last observation is in separate memory before the first row is reset, even if the simulator reuses its
#   observation buffers. `extras["final_obs"]` is used if the simulator publishes it; otherwise the observation is
#   computed as the simulator does, with the noise that its step would add.
# - Observation histories of a manager-based simulator are pushed once per step and row, as without it, and the last
#   observation's history ends with it. (IsaacLab's own `final_obs` leaves histories as they were one step before, so
#   where there are any it is computed here.)
# - `rows` also shows rows that were reset without having ended.
# Imports no class of IsaacLab; it relies on the names of its public methods and attributes.

FINAL_KEYS = ("final_obs", "final_observation")


class ResetWatch:
    """Intercepts the calls of a simulator's `_reset_idx` during its step.

    Args:
        env: the simulator, without wrappers; its `_reset_idx` is replaced by one that first takes the observations.
        num_rows: B.
        observe: simulator -> its observations now; None chooses a way.

    Attributes:
        final: observations before the rows of the latest step were reset, all B rows; None if none was.
        rows: bool `[B]`, the rows that were reset in the latest step; None if none was.
        id_dtype: of the row ids that the simulator itself uses.
        takes_published: whether `final` is what the simulator publishes, if it does.
    """

    def __init__(
        self,
        env: Any,
        num_rows: int,
        observe: Callable[[Any], Any] | None,
    ) -> None:
        self._env = env
        self._num_rows = num_rows
        self._observe = observe or _observer(env)
        self.takes_published = observe is None and not list(_histories(env))
        self._native: Callable[..., Any] = env._reset_idx  # noqa: SLF001  # the hook that IsaacLab documents
        env._reset_idx = self._reset_idx  # noqa: SLF001
        self._is_stepping = False
        self.final: Any = None
        self.rows: torch.Tensor | None = None
        self.id_dtype = torch.int64

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Watch for as long as a step lasts."""
        self.final = self.rows = None
        for key in FINAL_KEYS:
            # So that an entry after the step is from this step.
            _extras(self._env).pop(key, None)
        self._is_stepping = True
        try:
            yield
        finally:
            self._is_stepping = False

    def _reset_idx(self, env_ids: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(env_ids, torch.Tensor) and env_ids.dtype is not torch.bool:
            self.id_dtype = env_ids.dtype
        if self._is_stepping:
            if self.final is None:
                published = (
                    published_final(_extras(self._env))
                    if self.takes_published
                    else None
                )
                self.final = clone(
                    self._observe(self._env) if published is None else published
                )
            self._note(env_ids)
        return self._native(env_ids, *args, **kwargs)

    def _note(self, env_ids: Any) -> None:
        if self.rows is None:
            self.rows = torch.zeros(
                self._num_rows,
                dtype=torch.bool,
                device=getattr(self._env, "device", "cpu"),
            )
        # Not every version of torch takes int32 for indices, which simulators may have as ids.
        ids = slice(None) if env_ids is None else env_ids
        self.rows[
            ids.long()
            if isinstance(ids, torch.Tensor) and ids.dtype is not torch.bool
            else ids
        ] = True


def published_final(extras: Any) -> Any:
    """Return the last observations that a simulator has published, or None."""
    found = extras if isinstance(extras, Mapping) else {}
    return next((found[key] for key in FINAL_KEYS if found.get(key) is not None), None)


def clone(observations: Any) -> Any:
    """Return a copy of nested observations."""
    if isinstance(observations, Mapping):
        return {key: clone(value) for key, value in observations.items()}
    return (
        observations.clone() if isinstance(observations, torch.Tensor) else observations
    )


def reset_rows(env: Any, ids: torch.Tensor, rows: torch.Tensor) -> Any:
    """Reset some rows of an IsaacLab-like simulator that have not ended, and return its observations.

    Args:
        env: the simulator, without wrappers.
        ids: of the rows, in the simulator's form.
        rows: the same as bool `[B]`.

    Returns:
        Observations of all rows; the histories of the other rows are unchanged.
    """
    before = [
        (history, dict(vars(history)), _buffer_copy(history))
        for history in _histories(env)
    ]
    if hasattr(env, "observation_manager"):
        observations, _ = env.reset(env_ids=ids)
        observations = clone(observations)
    else:
        env._reset_idx(ids)  # noqa: SLF001
        env.scene.write_data_to_sim()
        env.sim.forward()
        observations = clone(env._get_observations())  # noqa: SLF001
    for history, attributes, buffer in before:
        _restore_rows(history, attributes, buffer, ~rows)
    return observations


def _observer(env: Any) -> Callable[[Any], Any]:
    """Return the function that computes a simulator's observations as its step does."""
    if hasattr(env, "observation_manager"):
        return _observe_managed
    if hasattr(env, "_get_observations"):
        return _observe_direct
    raise SpecError(
        f"reading the env failed: expected `_get_observations` or an `observation_manager` besides `_reset_idx`, got "
        f"neither in {type(env).__name__}. Say how its observations are computed: return "
        f"TorchNativeAdapter(env, final_observation=lambda env: ...) from the factory."
    )


def _observe_managed(env: Any) -> Any:
    before = [
        (history, dict(vars(history)), _buffer_copy(history))
        for history in _histories(env)
    ]
    observations = clone(env.observation_manager.compute(update_history=True))
    for history, attributes, buffer in before:
        vars(history).update(attributes, _buffer=buffer)
    return observations


def _observe_direct(env: Any) -> Any:
    observations = clone(env._get_observations())  # noqa: SLF001
    if getattr(env.cfg, "observation_noise_model", None):
        observations["policy"] = env._observation_noise_model(observations["policy"])  # noqa: SLF001
    return observations


def _histories(env: Any) -> Iterator[Any]:
    """Yield the histories that a manager-based simulator keeps of its observation terms."""
    groups = (
        getattr(
            getattr(env, "observation_manager", None),
            "_group_obs_term_history_buffer",
            None,
        )
        or {}
    )
    for terms in groups.values():
        yield from terms.values()


def _buffer_copy(history: Any) -> Any:
    for name in ("_buffer", "_num_pushes"):
        if not hasattr(history, name):
            raise SpecError(
                f"reading histories failed: expected IsaacLab's CircularBuffer, got a {type(history).__name__} "
                f"without {name}. Say how observations are computed: TorchNativeAdapter(env, final_observation=...)."
            )
    history._num_pushes = history._num_pushes.clone()  # noqa: SLF001  # what `vars` was copied from stays
    return None if history._buffer is None else history._buffer.clone()  # noqa: SLF001


def _restore_rows(
    history: Any,
    attributes: Mapping[str, Any],
    buffer: torch.Tensor | None,
    rows: torch.Tensor,
) -> None:
    """Restore some rows of a history, even if its ring pointer has moved since."""
    if buffer is None:
        return
    now = history._buffer  # noqa: SLF001
    if getattr(history, "_stack_dim_internal", None) is not None:
        now[rows] = buffer[rows]
    else:
        # Of versions that have one.
        num_pushed = getattr(history, "_pointer", 0) - attributes.get("_pointer", 0)
        now[:, rows] = buffer.roll(num_pushed, 0)[:, rows]
    history._num_pushes[rows] = attributes["_num_pushes"][rows]  # noqa: SLF001


def _extras(env: Any) -> Any:
    extras = getattr(env, "extras", None)
    return extras if isinstance(extras, dict) else {}


# ---- native ------------------------------------------------------------------------------------

Leaves = list[torch.Tensor]
#: When a simulator itself resets rows that have ended: in the step in which they end, or never.
Resets = Literal["same_step", "never"]
#: Result of a step of the simulator: observation and reward leaves, then terminated and truncated `[B]`.
Stepped = tuple[Leaves, Leaves, torch.Tensor, torch.Tensor]


class TorchNativeAdapter(Adapter):
    """One batched simulator; see the module.

    A factory may return the adapter itself, to declare what the simulator does not.

    Args:
        env: the simulator, perhaps in Gymnasium wrappers.
        resets: whether it resets rows that have ended within `step`; None relies on what it declares.
        final_observation: simulator (without wrappers) -> its observations now, for simulators that reset through
            `_reset_idx`; None uses `final_obs`, `observation_manager` or `_get_observations`.

    Raises:
        FactoryError: it does not declare when it resets, resets in the next step, or has several agents.
        SpecError: no `num_envs`, no action space of a fixed shape, or observations that are not tensors `[B, ...]`.
    """

    family: ClassVar[str] = "torch"
    takes_tensors = True

    def __init__(
        self,
        env: Any,
        *,
        resets: Resets | None = None,
        final_observation: Callable[[Any], Any] | None = None,
    ) -> None:
        self._inner = inner = getattr(env, "unwrapped", env)
        num_rows = getattr(inner, "num_envs", None)
        if not isinstance(num_rows, int) or num_rows < 1:
            raise SpecError(
                f"reading the env failed: expected a torch simulator with `num_envs`, got {num_rows!r} in "
                f"{type(inner).__name__}. Leave env_type at 'auto' for an env that is no batch."
            )
        self.env = env
        self.device = torch.device(getattr(inner, "device", None) or "cpu")
        self._num_rows = num_rows
        self._generators = OwnGenerators(seeding.caller_state, seeding.restore_globals)
        self._latest: Leaves | None = None
        self._resets: Resets = resets or _resets_of(inner)
        if self._resets not in get_args(Resets):
            raise FactoryError(
                f"TorchNativeAdapter failed: expected resets in {get_args(Resets)}, got {resets!r}."
            )
        has_watch = self._resets == "same_step" and callable(
            getattr(inner, "_reset_idx", None)
        )
        self._watch = (
            ResetWatch(inner, num_rows, final_observation) if has_watch else None
        )
        self._takes_published = self._resets == "same_step" and (
            self._watch is None or self._watch.takes_published
        )
        if self._takes_published and _is_off(inner, "compute_final_obs"):
            inner.cfg.compute_final_obs = True
        #: Whether it resets every row that has ended, perhaps without a call of `_reset_idx`.
        self._resets_all = _autoreset_mode(inner) == "SAME_STEP"
        self._takes_ids = "env_ids" in inspect.signature(inner.reset).parameters
        self._reads_env_idx = _reads_option(type(inner), "env_idx")
        #: Rows that the simulator has reset and the caller has not, and their first observations.
        self._waiting: torch.Tensor | None = None
        self._fresh: Leaves = []
        self._extras: Any = {}
        with torch.no_grad(), self._generators:
            observations = self._unpack(self.env.reset())
        self._paths, leaves = _read_structure(observations, num_rows)
        refuse_reserved((leaf.key[0] for leaf in leaves), "reading observations")
        self.spec = EnvSpec(
            observation=leaves,
            action=(_action_leaf(inner, num_rows),),
            reward=(LeafSpec(("reward",), (num_rows, 1), "float32"),),
            done=done_leaves((num_rows,)),
            batch_shape=(num_rows,),
            family=self.family,
            metadata={
                "env": f"{type(inner).__module__}.{type(inner).__qualname__}",
                "device": str(self.device),
                "resets_itself": self._resets == "same_step",
            },
        )

    @property
    def info(self) -> Mapping[str, Any]:  # type: ignore[override]  # made on access, which is rare
        """The simulator's `extras`, with arrays (copies) for tensors."""
        return {
            key: to_plain(value)
            for key, value in dict(self._extras).items()
            if key not in FINAL_KEYS
        }

    def reset(
        self,
        seed: int | None,
        options: Options = None,
        mask: Mask = None,
    ) -> list[Any]:
        """Start an episode in all rows, or in those in `mask` (the first reset is of all rows).

        Args:
            seed: seeds the simulator if all rows are reset, otherwise not used.
            options: passed to the simulator if it takes any.
            mask: bool `[B, 1]`, the rows to reset; None for all.

        Returns:
            Values aligned with `spec.observation`: VIEWS of the simulator's tensors where they are on the CPU.
        """
        kwargs = dict(options or {})
        with torch.no_grad(), self._generators:
            if mask is None or self._latest is None:
                if seed is not None:
                    _seed_generators(seed)
                self._waiting = None
                result = self.env.reset(seed=seed, **_known(kwargs))
                latest = self._flatten(self._unpack(result))
            else:
                rows = torch.from_numpy(mask.reshape(-1)).to(self.device)
                # The simulator may overwrite its tensors.
                before = [leaf.clone() for leaf in self._latest]
                latest = _choose(rows, self._reset_rows(rows, kwargs), before)
        self._latest = latest
        return self._given(latest)

    def step(self, action: list[Any]) -> StepValues:
        """Make one transition of all rows.

        Args:
            action: aligned with `spec.action`: the caller's tensors, or copies as arrays.

        Returns:
            Values as of `reset`; terminated and truncated as bool arrays `[B, 1]`, copies.
        """
        if self._latest is None:
            raise ResetNeeded(
                "step failed: expected a reset first, got a step. Reset the env."
            )
        with torch.no_grad(), self._generators:
            observation, rewards, terminated, truncated = self._step(
                torch.as_tensor(action[0]).to(self.device)
            )
        self._latest = observation
        return (
            self._given(observation),
            self._given(rewards),
            self._flags(terminated),
            self._flags(truncated),
        )

    def _given(self, leaves: Leaves) -> list[Any]:
        return leaves if self.gives_tensors else [to_numpy(leaf) for leaf in leaves]

    def _flags(self, flags: torch.Tensor) -> np.ndarray:
        if flags.dtype is not torch.bool or flags.numel() != self._num_rows:
            raise SpecError(
                f"step failed: expected ends as bool ({self._num_rows},), got {flags.dtype} {tuple(flags.shape)}. "
                f"Fix the env."
            )
        # A copy, because the simulator may write to its flags again.
        return np.array(to_numpy(flags)).reshape(self._num_rows, 1)

    def render(self) -> Any:
        """Return what `env.render()` draws, if its render mode is "rgb_array", else None."""
        return (
            self.env.render()
            if getattr(self.env, "render_mode", None) == "rgb_array"
            else None
        )

    def _reset_rows(self, rows: torch.Tensor, options: dict[str, Any]) -> Leaves:
        """Reset some rows, bool `[B]` with at least one set, and return observation leaves; only these rows count."""
        waiting = (
            torch.zeros_like(rows) if self._waiting is None else self._waiting & rows
        )
        left = rows & ~waiting
        if options and bool(waiting.any()):
            raise TypeError(
                f"reset failed: expected no keyword arguments, got {next(iter(options))!r}: the simulator resets rows "
                f"in the step in which they end. Give them with a reset of all rows."
            )
        if self._waiting is not None:
            self._waiting &= ~rows
        if not bool(left.any()):
            return self._fresh
        leaves = self._flatten(self._reset_in_simulator(left, _known(options)))
        return _choose(waiting, self._fresh, leaves) if bool(waiting.any()) else leaves

    def _reset_in_simulator(self, rows: torch.Tensor, options: dict[str, Any]) -> Any:
        """Reset rows that the simulator has not reset itself; return observations of all rows."""
        inner = self._inner
        dtype = torch.int64 if self._watch is None else self._watch.id_dtype
        ids = rows.nonzero().view(-1).to(dtype)
        if callable(getattr(inner, "_reset_idx", None)) and not options:
            return reset_rows(inner, ids, rows)
        if self._takes_ids:
            return self._unpack(inner.reset(env_ids=ids, **options))
        own = options.get("options") or {}
        if self._reads_env_idx:
            return self._unpack(self.env.reset(options={**own, "env_idx": ids}))
        if _autoreset_mode(inner) == "DISABLED":
            return self._unpack(self.env.reset(options={**own, "reset_mask": rows}))
        raise SpecError(
            f"reset failed: expected a simulator that can reset some rows ({int(rows.sum())} of {len(rows)} asked "
            f"for), got {type(inner).__name__}, whose reset takes neither env_ids nor options['env_idx']. Reset all "
            f"rows, or only those that have ended."
        )

    def _step(self, action: torch.Tensor) -> Stepped:
        self._waiting = None
        with self._watch.stepping() if self._watch else contextlib.nullcontext():
            stepped = self.env.step(self._native_action(action))
        if not isinstance(stepped, (tuple, list)) or len(stepped) != 5:
            raise SpecError(
                f"step failed: expected (observations, rewards, terminated, truncated, extras), got "
                f"{type(stepped).__name__} of {len(stepped) if isinstance(stepped, (tuple, list)) else 1}. Fix the env."
            )
        observations, rewards, terminated, truncated, self._extras = stepped
        leaves = self._flatten(observations)
        if self._resets == "same_step":
            leaves = self._undo_resets(leaves, (terminated | truncated).view(-1))
        return leaves, [rewards.view(self._num_rows, 1)], terminated, truncated

    def _undo_resets(self, leaves: Leaves, ended: torch.Tensor) -> Leaves:
        """Return the observations with the last one in rows that have ended, and keep the first of the next episode."""
        watch = self._watch
        was_reset, final = (ended, None) if watch is None else (watch.rows, watch.final)
        if self._resets_all and bool(
            (ended if was_reset is None else ended & ~was_reset).any()
        ):
            was_reset = ended if was_reset is None else ended | was_reset
            final = None
        if was_reset is None or not bool(was_reset.any()):
            return leaves
        if bool((was_reset & ~ended).any()):
            raise SpecError(
                f"step failed: expected resets of rows that have ended only, got one of row "
                f"{int((was_reset & ~ended).nonzero()[0])}, which the simulator says is neither terminated nor "
                f"truncated. Fix the env: its episode would have no end."
            )
        final = self._flatten(self._published() if final is None else final)
        self._waiting = was_reset.clone()
        self._fresh = [leaf.clone() for leaf in leaves]
        for last, first in zip(final, leaves, strict=True):
            # Tensors without elements all have the address 0.
            if last.data_ptr() == first.data_ptr() and last.numel():
                raise SpecError(
                    "step failed: expected last observations in memory of their own, got those of the next episode: "
                    "the simulator's final_obs is a view of its observation buffer. clone() it there."
                )
        return _choose(self._waiting, final, leaves)

    def _published(self) -> Any:
        final = published_final(self._extras) if self._takes_published else None
        if final is None or not isinstance(final, (torch.Tensor, Mapping)):
            raise SpecError(
                f"step failed: expected the last observations of the rows that were reset in this step, as tensors "
                f"[{self._num_rows}, ...] in extras['final_obs'], got {type(final).__name__}. They are lost: have the "
                f"simulator publish them (IsaacLab: cfg.compute_final_obs = True; observations with a history need "
                f"resets by _reset_idx), or turn its autoreset off."
            )
        return final

    def _native_action(self, action: torch.Tensor) -> torch.Tensor:
        domain = self.spec.action[0].domain
        return (
            action + domain.start
            if isinstance(domain, Discrete) and domain.start
            else action
        )

    def _unpack(self, result: Any) -> Any:
        observations, self._extras = (
            result if isinstance(result, tuple) else (result, {})
        )
        return observations

    def _flatten(self, observations: Any) -> Leaves:
        leaves: Leaves = []
        for path in self._paths:
            try:
                leaves.append(functools.reduce(operator.getitem, path, observations))
            except (KeyError, TypeError, IndexError):
                raise SpecError(
                    f"reading observations failed: expected {'/'.join(map(str, path))} as at the first reset, got "
                    f"none. The env must give it at every reset and step."
                ) from None
        return leaves


class IsaacLabAdapter(TorchNativeAdapter):
    """One IsaacLab `ManagerBasedRLEnv` or `DirectRLEnv`. It resets within `step`; a process can hold only one.

    A `DirectMARLEnv` is refused, also one that `multi_agent_to_single_agent` has converted.

    Single actions of a `Discrete` space reach the simulator as `[B, 1]`, as IsaacLab samples them.
    """

    family: ClassVar[str] = "isaaclab"
    is_alone = True

    def __init__(
        self,
        env: Any,
        *,
        final_observation: Callable[[Any], Any] | None = None,
    ) -> None:
        inner = getattr(env, "unwrapped", env)
        # What `multi_agent_to_single_agent` returns holds the env of the agents, which resets its rows.
        if any(
            hasattr(one, "possible_agents")
            for one in (inner, getattr(inner, "env", None))
        ):
            raise FactoryError(
                f"the factory failed: expected an IsaacLab env with one agent, got {type(inner).__name__} with several."
                " Write the task as a DirectRLEnv or ManagerBasedRLEnv whose action has the parts of all agents."
            )
        super().__init__(env, final_observation=final_observation)

    def _native_action(self, action: torch.Tensor) -> torch.Tensor:
        native = super()._native_action(action)
        return native.view(-1, 1) if native.ndim == 1 else native


class ManiSkillAdapter(TorchNativeAdapter):
    """One ManiSkill `BaseEnv`, as `gymnasium.make` wraps it, or a `ManiSkillVectorEnv` around it.

    The env never resets by itself, and resets the rows `options["env_idx"]`; a vector env around it (with
    `auto_reset`) resets rows in the step in which they end, and its `final_observation` is used as their last one.
    """

    family: ClassVar[str] = "maniskill"

    def __init__(self, env: Any) -> None:
        super().__init__(
            env,
            resets="same_step" if getattr(env, "auto_reset", False) else "never",
        )

    def render(self) -> Any:
        """Return what the rows draw, side by side in a square, uint8 `[H, W, 3]`, or None if they draw no arrays."""
        # Which imports Gymnasium, as ManiSkill does.
        from envherd.workers.adapters.gymnasium.spaces import mosaic

        frames = super().render()
        return None if frames is None else mosaic(to_plain(frames))


def _choose(
    rows: torch.Tensor,
    leaves: Sequence[torch.Tensor],
    others: Sequence[torch.Tensor],
) -> Leaves:
    """Return `leaves` in the rows set in bool `[B]`, and `others` in the rest, in fresh memory."""
    return [
        torch.where(rows.view(-1, *(1,) * (leaf.ndim - 1)), leaf, other)
        for leaf, other in zip(leaves, others, strict=True)
    ]


def _seed_generators(seed: int) -> None:
    """Seed the global generators, but not those of other devices."""
    has_devices = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    before = torch.cuda.get_rng_state_all() if has_devices else None
    seeding.seed_globals(seed)
    if before is not None:
        torch.cuda.set_rng_state_all(before)


def _reads_option(cls: type, name: str) -> bool:
    """Return whether the `reset` of a class, or a base's that it calls, mentions an option."""
    codes = (getattr(vars(base).get("reset"), "__code__", None) for base in cls.__mro__)
    return any(code is not None and name in code.co_consts for code in codes)


def _resets_of(env: Any) -> Resets:
    """Return when a simulator resets, as it declares."""
    mode = _autoreset_mode(env)
    if mode == "NEXT_STEP":
        raise FactoryError(
            f"the factory failed: expected a simulator that does not reset in the step after an end, got "
            f"{type(env).__name__} with autoreset_mode NEXT_STEP. Build it with autoreset_mode DISABLED."
        )
    if mode == "DISABLED" or _is_off(env, "auto_reset"):
        return "never"
    if mode == "SAME_STEP" or callable(getattr(env, "_reset_idx", None)):
        return "same_step"
    raise FactoryError(
        f"the factory failed: expected a torch simulator that says when it resets rows that have ended, got "
        f"{type(env).__name__} without metadata['autoreset_mode'] and without _reset_idx. Return "
        f"envherd.workers.adapters.torch_native.TorchNativeAdapter(env, resets='never') from the factory, or "
        f"resets='same_step' if it resets within step and gives extras['final_obs']."
    )


def _is_off(env: Any, setting: str) -> bool:
    return getattr(getattr(env, "cfg", None), setting, None) is False


def _autoreset_mode(env: Any) -> str:
    metadata = getattr(env, "metadata", None)
    mode = metadata.get("autoreset_mode") if isinstance(metadata, Mapping) else None
    return str(getattr(mode, "name", mode or ""))


def _known(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments for the simulator's reset: only `options`."""
    check_keywords(options, "torch simulator")
    return dict(options)


def _read_structure(
    observations: Any,
    num_rows: int,
) -> tuple[list[tuple[Any, ...]], tuple[LeafSpec, ...]]:
    """Return the paths and the specs of the leaves of observations."""
    is_dict = isinstance(observations, Mapping)
    paths = []
    leaves = []
    for path, value in _walk(observations, ()):
        key: Key = tuple(map(str, path)) if is_dict else ("observation",)
        if (
            not isinstance(value, torch.Tensor)
            or value.ndim == 0
            or value.shape[0] != num_rows
        ):
            got = (
                f"{value.dtype} {tuple(value.shape)}"
                if isinstance(value, torch.Tensor)
                else type(value).__name__
            )
            raise SpecError(
                f"reading observations failed: expected {'/'.join(key)} as a tensor [{num_rows}, ...], got {got}. "
                f"Leave env_type at 'auto', or give 'numpy', for an env that gives arrays."
            )
        paths.append(path)
        leaves.append(
            LeafSpec(
                key,
                tuple(value.shape),
                dtype_name(
                    value.dtype,
                    key,
                    "observations",
                    "Cast it in a wrapper, e.g. to torch.float32.",
                ),
            )
        )
    return paths, tuple(leaves)


def _walk(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _walk(item, (*path, name))
    else:
        yield path, value


def _action_leaf(env: Any, num_rows: int) -> LeafSpec:
    """Describe the actions of all rows; spaces are recognised by their attributes, so no package is imported."""
    space: Any = getattr(env, "single_action_space", None)
    if hasattr(space, "nvec"):
        nvec = tuple(int(n) for n in space.nvec.reshape(-1))
        return LeafSpec(
            ("action",),
            (num_rows, len(nvec)),
            "int64",
            MultiDiscrete((nvec,) * num_rows),
        )
    if (
        hasattr(space, "n")
        and np.shape(space.n) == ()
        and not getattr(space, "shape", ())
    ):
        return LeafSpec(
            ("action",),
            (num_rows,),
            "int64",
            Discrete(int(space.n), int(getattr(space, "start", 0))),
        )
    if hasattr(space, "low") and hasattr(space, "high"):
        dtype = np.dtype(space.dtype)
        return LeafSpec(
            ("action",),
            (num_rows, *space.shape),
            dtype.name,
            interval(space.low, space.high, dtype),
        )
    raise SpecError(
        f"reading the env failed: expected `single_action_space` to be a Box, Discrete or MultiDiscrete, got "
        f"{type(space).__name__} in {type(env).__name__}. Flatten the actions in a wrapper around the env."
    )
