"""Gymnasium's `AsyncVectorEnv` on top of the executor: one import changed.

    from envherd.gymnasium import AsyncVectorEnv    # was: from gymnasium.vector import ...

Spaces, transitions, infos, autoreset modes and errors are Gymnasium's own; see `docs/gymnasium.md` for what
is deliberately different. `gymnasium.make_vec` makes this class inside `installed()`.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal, NoReturn

import gymnasium
import numpy as np
from gymnasium import logger
from gymnasium.error import (
    AlreadyPendingCallError,
    ClosedEnvironmentError,
    NoAsyncCallError,
)
from gymnasium.vector import AutoresetMode, VectorEnv

from envherd.executor.facades import replaced
from envherd.executor.facades.errors import (
    CallTimeout,
    as_gymnasium,
    listed,
    raising_gymnasiums,
)
from envherd.executor.facades.gymnasium.rows import (
    Actions,
    Columns,
    Observations,
    batch,
    check_mode,
    has_custom,
)
from envherd.executor.facades.gymnasium.worker import (
    FINAL_OBSERVATION,
    Description,
    NativeFactory,
    loads,
)
from envherd.executor.facades.rows import ReadEpisodes, episode_reader
from envherd.executor.facades.states import FOLLOWS, AsyncState, Hosted
from envherd.executor.keywords import names_right_keyword
from envherd.executor.options import ExecutorOptions
from envherd.executor.parallel import ParallelEnv
from envherd.executor.protocol.info_reader import Part, first_env
from envherd.executor.sending.blueprint import checked_options, choose_workers
from envherd.executor.start.waiting import DeadlinePassed
from envherd.workers.adapters.base import Adapter
from envherd.workers.errors import EnvherdError
from envherd.workers.protocol import Op

__all__ = ["AsyncState", "AsyncVectorEnv", "installed", "make_vec"]

#     autoreset mode  a step is                                             an ended env's next step is
#     NEXT_STEP       STEP for the running envs, RESET for those that       a reset: reward 0, no flag set,
#                     ended with the step before, in one round trip         its action is not used
#     SAME_STEP       STEP_RESET: the reset comes back with the step,       a step of the new episode
#                     what the episode ended with is in the infos
#     DISABLED        STEP                                                  refused; reset it with a mask
#
# Guarantees: every transition is one `env.step`, and equals Gymnasium's own bit for bit, with one exception: an
# episode's last observation is right even if an env reuses its memory.

#: (observations, rewards, terminations, truncations, infos)
StepResult = tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]
EnvFns = Sequence[Callable[[], Any] | str]
#: Methods that `call` does not reach.
_OWN_METHODS = ("reset", "step", "close", "_setattr", "_check_spaces")
#: Seconds between checks for the answers to a `call_async` with a deadline.
_LOOK_S = 0.001


class AsyncVectorEnv(Hosted, VectorEnv[Any, Any, np.ndarray]):
    """Envs in worker processes: `gymnasium.vector.AsyncVectorEnv` with several envs to a process.

    Args:
        env_fns: one callable for each env; called in its worker, never here.
        shared_memory: accepted; memory is always shared. True refuses custom observation spaces, as in Gymnasium.
        copy: False hands out views of the ring of rows; the `options.ring_frames`-th further step overwrites a view.
        context: accepted but not used; see `options.start_method`.
        daemon: accepted but not used; workers end with this process and may have children in any case.
        worker: refused; there is no worker function to replace.
        observation_mode: "same", "different", or `(observation_space, single_observation_space)`.
        autoreset_mode: an `AutoresetMode` or its value.
        max_concurrency: largest number of envs that run at one time; limits the number of processes.
        num_workers: processes; None for one per usable core, at most one per env; "auto" measures the first env for
            some seconds and decides (see docs/sizing.md).
        options: see `ExecutorOptions`; `infos` and `episode_seeds` are set here.

    Raises:
        RuntimeError: spaces do not fit together.
        ValueError: an invalid argument.
        FactoryError: an env could not be built; also of the type that was raised.
    """

    _remedy = (
        "Call reset(), or reset(options={'reset_mask': mask}) for these envs alone."
    )
    #: Of the class that users build, for messages.
    _name = "AsyncVectorEnv"
    #: Makes the adapter of an env; called with the user's factory and `keeps_final`.
    _factory: ClassVar[Callable[..., Callable[[], Adapter]]] = NativeFactory

    @names_right_keyword
    def __init__(  # noqa: PLR0913, PLR0917  # Gymnasium's signature
        self,
        env_fns: EnvFns,
        shared_memory: bool = True,  # noqa: FBT001, FBT002  # Gymnasium's signature
        copy: bool = True,  # noqa: FBT001, FBT002
        context: str | None = None,
        daemon: bool = True,  # noqa: FBT001, FBT002
        worker: Callable[..., None] | None = None,
        observation_mode: Any = "same",
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        max_concurrency: int | None = None,
        *,
        num_workers: int | Literal["auto"] | None = None,
        options: ExecutorOptions | None = None,
    ) -> None:
        self.env_fns = listed(self._name, env_fns)
        self.copy = copy
        self.observation_mode = observation_mode
        modes = [mode.value for mode in AutoresetMode]
        # Gymnasium takes a mode or its value.
        if autoreset_mode not in (*AutoresetMode, *modes):
            raise ValueError(
                f"{self._name} failed: expected autoreset_mode as an AutoresetMode or one of "
                f"{', '.join(map(repr, modes))}, got {autoreset_mode!r}."
            )
        self.autoreset_mode = AutoresetMode(autoreset_mode)
        self._resets_in_step = self.autoreset_mode is AutoresetMode.SAME_STEP
        self.num_envs = len(self.env_fns)
        check_mode(observation_mode)
        if worker is not None:
            raise ValueError(
                "AsyncVectorEnv failed: expected no `worker`, got a function. Workers here have no such function: wrap "
                "the env instead, or use gymnasium.vector.AsyncVectorEnv."
            )
        self.shared_memory = shared_memory
        self.context = context
        self.daemon = daemon
        self.worker = worker
        self.max_concurrency = _checked_limit(max_concurrency)
        factories = {
            # One for each function: envs of one factory are known to be built by equal calls.
            id(env_fn): self._factory(env_fn, keeps_final=self._resets_in_step)
            for env_fn in self.env_fns
        }
        if self.max_concurrency is not None:
            if isinstance(num_workers, str) or (
                options is not None and (options.env_threads or options.alone)
            ):
                raise ValueError(
                    f"AsyncVectorEnv failed: expected neither num_workers='auto' nor env_threads nor alone together "
                    f"with max_concurrency, got max_concurrency={max_concurrency}. It limits the number of processes, "
                    f"each of which runs one env at a time. Leave it out, or the others."
                )
            num_workers = min(
                choose_workers(self.num_envs, num_workers),
                self.max_concurrency,
            )
        with raising_gymnasiums():
            made = ParallelEnv(
                self.num_envs,
                [factories[id(env_fn)] for env_fn in self.env_fns],
                num_workers=num_workers,
                # Gymnasium's behaviour: all infos, and the envs' own seeding.
                options=replace(
                    checked_options(options),
                    infos="pickle",
                    episode_seeds=False,
                ),
                copy=bool(copy),
            )
        # For `rebuild`, which gets functions of the user.
        made.hosted = lambda env_fn, _: self._factory(
            env_fn,
            keeps_final=self._resets_in_step,
        )
        self._host(made, Op.STEP_RESET if self._resets_in_step else Op.STEP)

    def _take(self) -> None:
        engine = self._engine
        descriptions: list[Description] = [
            loads(answer) for answer in self.executor.call("describe")
        ]
        first = descriptions[0]
        if self.shared_memory and has_custom(first.observation_space):
            raise ValueError(
                f"AsyncVectorEnv(shared_memory=True) failed: expected an observation space of Gymnasium's own, got "
                f"{first.observation_space}. Its values are pickled with shared_memory=False."
            )
        # Gymnasium's wrappers of vector envs read the mode there.
        self.metadata = {**first.metadata, "autoreset_mode": self.autoreset_mode}
        self.render_mode = first.render_mode
        (
            self.single_observation_space,
            self.observation_space,
            self.single_action_space,
            self.action_space,
        ) = batch(self._name, descriptions, self.observation_mode)
        self._actions = Actions(engine, first.action_space, self.action_space)
        self._observations = Observations(
            engine,
            first.observation_space,
            engine.pool.slab.groups[0].spec.observation,
            self.num_envs,
            is_copy=self.copy,
        )
        group = engine.pool.slab.groups[0].columns
        self._episodes = episode_reader(
            engine.pool.slab,
            group["next", "reward"].shape[-1],
        )
        # Lists of one array `[N]` for each column of the ring.
        self._rewards = list(group["next", "reward"][:, :, 0])
        self._terminations = list(group["next", "terminated"][:, :, 0])
        self._truncations = list(group["next", "truncated"][:, :, 0])
        self._resets_next = self.autoreset_mode is AutoresetMode.NEXT_STEP
        self._columns = Columns(self.num_envs)
        #: Parts of infos in rows, and what copies them; see `Columns.copies`.
        self._rows: Any = None
        self._copies: list[tuple[str, Callable[[], Any]]] = []
        # Int [k], the envs that the next step resets; None for none.
        self._ended: np.ndarray | None = None
        self._resetting = engine.all_ids  # the envs that are being reset

    @property
    def np_random_seed(self) -> Any:
        """The envs' own seeds, a tuple."""
        return self.get_attr("np_random_seed")

    @property  # type: ignore[misc]  # Gymnasium's own vector envs have no setter either
    def np_random(self) -> Any:
        """The envs' own generators, a tuple (copies, if the envs are in other processes)."""
        return self.get_attr("np_random")

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Return an attribute of each env or of its wrappers; a callable is called first."""
        return self.call(name)

    def render(self) -> tuple[Any, ...]:
        """Return the result of each env's `render`."""
        return self.call("render")

    # ---- reset -------------------------------------------------------------------------------

    def _refuse(self, event: str, call: str) -> NoReturn:
        if self.closed:
            raise ClosedEnvironmentError(
                f"Trying to operate on `{self._name}`, after a call to `close()`."
            )
        if event == "begin":
            raise AlreadyPendingCallError(
                f"Calling `{call}` while waiting for a pending call to `{self._state.value}` to complete.",
                self._state.value,
            )
        raise NoAsyncCallError(
            f"Calling `{event}` without any prior call to `{event.replace('wait', 'async')}`.",
            event.removesuffix("_wait"),
        )

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """Reset all envs, or those of `options["reset_mask"]` (bool `[N]`); return observations and infos.

        Args:
            seed: int, from which env i gets `seed + i`; one int or None for each env; or None.
            options: given to each env; never changed.
        """
        self._start_reset(seed, options)
        return self._finish_reset(None)

    def _seeds(self, seed: int | Sequence[int | None] | None) -> Sequence[int | None]:
        if seed is None:
            return [None] * self.num_envs
        if isinstance(seed, (int, np.integer)):
            return [int(seed) + i for i in range(self.num_envs)]
        if len(seed) != self.num_envs:
            raise ValueError(
                f"If seeds are passed as a list the length must match num_envs={self.num_envs} but got "
                f"length={len(seed)}."
            )
        return seed

    def _start_reset(
        self,
        seed: int | Sequence[int | None] | None,
        options: dict[str, Any] | None,
    ) -> None:
        """Start a reset of all envs, or of those of a `reset_mask` among the options."""
        self._move("begin", "reset_async")
        seeds = self._seeds(seed)
        env_ids = self._engine.all_ids
        if options is not None and "reset_mask" in options:
            env_ids = np.flatnonzero(
                _checked_mask(options["reset_mask"], self.num_envs)
            )
            # The mask is for this class; envs do not get it.
            options = {
                key: value for key, value in options.items() if key != "reset_mask"
            }
        with raising_gymnasiums(), self._guard:
            self._flight = self._engine.flights.begin_resets(
                env_ids,
                extras=self._engine.extras_of(
                    env_ids,
                    seeds,
                    None,
                    {"options": options},
                ),
                is_parked=True,
            )
        self._resetting = env_ids

    def _land(self, call: str, timeout: float | None) -> None:
        """Wait for the flight.

        Raises:
            CallTimeout: not within `timeout` seconds. Errors of envs, workers and signal handlers pass unchanged.
        """
        try:
            with self._guard:
                self._flight.land(timeout)
        except DeadlinePassed:
            raise CallTimeout(
                f"The call to `{call}` has timed out after {timeout} second(s)."
            ) from None

    def _finish_reset(self, timeout: float | None) -> tuple[Any, dict[str, Any]]:
        with raising_gymnasiums():
            self._land("reset_wait", timeout)
        self._move("land")
        # The next step does not reset an env once more that the caller has reset.
        if self._ended is not None:
            self._ended = _some(self._ended[~np.isin(self._ended, self._resetting)])
        is_reset = np.zeros(self.num_envs, bool)
        is_reset[self._resetting] = True
        infos: dict[str, Any] = {}
        for part in self._engine.side.infos.parts("root"):
            if own := part.of(is_reset):
                infos = self._add_part(infos, own)
        return self._observations.now(), infos

    # ---- step --------------------------------------------------------------------------------

    def step(self, actions: Any) -> StepResult:
        """Step all envs; return observations, rewards, terminations, truncations and infos."""
        self._start_step(actions, is_parked=False)
        return self._finish_step(None)

    def _start_step(self, actions: Any, *, is_parked: bool) -> None:
        self._move("begin", "step_async")
        try:  # as `raising_gymnasiums`, in less time
            with self._guard:
                self._flight = self._command(
                    write_inputs=partial(self._actions.take, actions),
                    # None unless the mode is NEXT_STEP.
                    resets=self._ended,
                    is_parked=is_parked,
                )
        except EnvherdError as error:
            raise as_gymnasium(error) from error.__cause__

    def _finish_step(self, timeout: float | None) -> StepResult:
        flight = self._flight
        was_reset = self._ended
        try:
            if not flight.has_landed:
                self._land("step_wait", timeout)
        except EnvherdError as error:
            # All envs that have not failed were stepped.
            self._note_failed_step()
            raise as_gymnasium(error) from error.__cause__
        except BaseException:
            self._ended = None  # the caller must reset all of them
            raise
        self._move("land")
        column = flight.at
        ended = flight.ended
        if self._resets_next:
            self._ended = ended
            # The resets of this call are of episodes that an earlier step has ended.
            infos = self._infos(None, column)
        else:
            was_reset = ended if flight.was_reset is not None else None
            infos = self._infos(was_reset, column)
        if self._episodes is not None and ended is not None:
            infos.update(self._of_episodes(self._episodes, ended, column))
        return (
            self._observations.after(column, was_reset),
            self._rewards[column].copy(),
            self._terminations[column].copy(),
            self._truncations[column].copy(),
            infos,
        )

    def _of_episodes(
        self,
        read: ReadEpisodes,
        ended: np.ndarray,
        column: int,
    ) -> dict[str, Any]:
        """Return the entries of Gymnasium's `RecordEpisodeStatistics` for a step in which episodes have ended."""
        is_over = np.zeros(self.num_envs, bool)
        is_over[ended] = True
        returns, lengths, seconds = read(column)
        # 0 for the other envs, as in `RecordEpisodeStatistics`.
        returns = np.where(is_over[:, None], returns, 0)
        return {
            "episode": {
                "r": returns[:, 0] if returns.shape[1] == 1 else returns,
                "l": np.where(is_over, lengths, 0),
                "t": np.where(is_over, seconds, 0),
            },
            "_episode": is_over,
        }

    def _note_failed_step(self) -> None:
        """Note which envs the next step must reset, after a step in which envs failed."""
        if self._resets_next:
            flight = self._flight
            ended = self._terminations[flight.at] | self._truncations[flight.at]
            # An env that has failed waits for a reset by the caller.
            ended[flight.dead] = False
            self._ended = _some(np.flatnonzero(ended))

    def _infos(self, ended: np.ndarray | None, column: int) -> dict[str, Any]:
        """Return the infos of a step.

        Args:
            ended: int `[k]`, envs that ended with the step and were reset in it.
            column: of the step's rows.
        """
        reader = self._engine.side.infos
        positions = self._engine.positions
        has_more = ended is not None or (
            positions.has_interrupted and positions.interrupted.any()
        )
        if not (reader.has_any or has_more):
            return {}
        rows = reader.rows()
        if rows is not self._rows:
            # First: after an interrupt no copies are of other rows.
            self._copies = []
            self._rows = rows
            if rows["next"] and not rows["root"]:
                self._copies = self._columns.copies(rows["next"])
        if self._copies and not (has_more or reader.has_messages()):
            # The usual infos, in less time.
            return {key: copy() for key, copy in self._copies}
        parts: list[Part] = [*reader.parts("next"), *reader.parts("root")]
        if has_more:
            parts = self._with_ends(parts, ended, column)
        infos: dict[str, Any] = {}
        # In the order of the envs: the first value of a key decides the type of its array.
        for part in parts if len(parts) < 2 else sorted(parts, key=first_env):
            infos = self._add_part(infos, part)
        return infos

    def _with_ends(
        self,
        parts: list[Part],
        ended: np.ndarray | None,
        column: int,
    ) -> list[Part]:
        """Return parts in which each env that has ended, or was interrupted, has separate parts, with more entries."""
        positions = self._engine.positions
        reader = self._engine.side.infos
        is_interrupted = positions.interrupted[:, 0] & positions.has_interrupted
        has_ended = np.zeros(self.num_envs, bool)
        has_ended[[] if ended is None else ended] = True
        is_special = has_ended | is_interrupted
        # `of` returns None if no env is left in a part.
        changed = [*filter(None, (part.of(~is_special) for part in parts))]
        stepped = reader.read("next", is_special)
        fresh = reader.read("root", is_special)
        for env_id in np.flatnonzero(is_special).tolist():
            own = dict(stepped.get(env_id, {}))
            if has_ended[env_id]:
                if FINAL_OBSERVATION in own:
                    last = own.pop(FINAL_OBSERVATION)
                else:
                    last = self._observations.last_of(env_id, column)
                own = {"final_obs": last, "final_info": own}
            root = fresh.get(env_id, {})
            if is_interrupted[env_id]:
                root = {**root, "interrupted": True}
            # Separate, because a root's info may have the key "final_info".
            changed += [Part(np.array([env_id]), None, info) for info in (own, root)]
        return changed

    def _add_part(self, infos: dict[str, Any], part: Part) -> dict[str, Any]:
        """Add infos to those of the vector env."""
        if self._columns.add(infos, part):
            return infos
        for env_id, info in zip(part.env_ids.tolist(), part.infos(), strict=True):
            infos = self._add_info(infos, info, env_id) if info else infos
        return infos

    # ---- in two halves ---------------------------------------------------------------------

    def reset_async(
        self,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        """Begin a `reset`; `reset_wait` ends it."""
        self._start_reset(seed, options)
        self._move("reset_async")

    def reset_wait(self, timeout: float | None = None) -> tuple[Any, dict[str, Any]]:
        """End a `reset`.

        Raises:
            multiprocessing.TimeoutError: not within `timeout` seconds; the envs must be reset again.
            NoAsyncCallError, ClosedEnvironmentError: as in Gymnasium.
        """
        self._move("reset_wait")
        return self._finish_reset(timeout)

    def step_async(self, actions: Any) -> None:
        """Begin a `step`; `step_wait` ends it."""
        self._start_step(actions, is_parked=True)
        self._move("step_async")

    def step_wait(self, timeout: float | None = None) -> StepResult:
        """End a `step`; raises as `reset_wait` does."""
        self._move("step_wait")
        return self._finish_step(timeout)

    # ---- calls -------------------------------------------------------------------------------

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of each env or of its wrappers, or return its attribute of that name."""
        self._ask(name, args, kwargs)
        return self._answers(None)

    def call_async(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        """Begin a `call`; `call_wait` ends it."""
        self._ask(name, args, kwargs)
        self._move("call_async")
        self._engine.is_asking = True

    def _ask(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._move("begin", "call_async")
        if name in _OWN_METHODS:
            raise ValueError(
                f"Trying to call function `{name}` with `call`, use `{name}` directly instead."
            )
        with raising_gymnasiums(), self._guard:
            self._question = self._engine.pool.question(
                "call",
                list(range(self.num_envs)),
                name="ask",
                args=(name, args, kwargs),
            )
            self._called = name

    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """End a `call`; raises as `reset_wait` does, and exceptions of envs."""
        self._move("call_wait")
        self._engine.is_asking = False
        return self._answers(timeout)

    def _answers(self, timeout: float | None) -> tuple[Any, ...]:
        pool = self._engine.pool
        end = None if timeout is None else time.monotonic() + timeout
        with raising_gymnasiums(f"call {self._called}"), self._guard:
            # Without a deadline, `answers` waits.
            while end is not None and not pool.has_answered(self._question):
                if time.monotonic() >= end:
                    raise CallTimeout(
                        f"The call to `call_wait` has timed out after {timeout} second(s)."
                    )
                time.sleep(_LOOK_S)
            answers = pool.answers(self._question, "call")
        self._move("land")
        return tuple(loads(answers[env_id]["plain"]) for env_id in range(self.num_envs))

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute of each env or of its wrappers: to `values`, or to its own item of a list or tuple.

        Raises:
            ValueError: not one value for each env.
        """
        self._move("begin", "set_attr")
        # Outside the guard: an error of the caller's values breaks off no call.
        args = tuple({name: one} for one in _one_each(values, self.num_envs))
        with raising_gymnasiums(f"set_attr {name}"), self._guard:
            self._engine.ask(
                "each",
                list(range(self.num_envs)),
                name="assign",
                args=args,
            )

    def close_extras(
        self,
        timeout: float | None = None,
        terminate: bool = False,  # noqa: FBT001, FBT002
    ) -> None:
        """Close the envs and end the workers, within `timeout` seconds (default: of the options) and then by force.

        Args:
            timeout: seconds.
            terminate: by force at once.
        """
        # A call waits for its end; Gymnasium warns as well.
        if self._state not in FOLLOWS["begin"]:
            logger.warn(
                f"Calling `close` while waiting for a pending call to `{self._state.value}` to complete."
            )
        if terminate:
            timeout = 0.0
        if timeout is not None:
            self._engine.pool.close(timeout)
        self.executor.close()


def make_vec(
    id: Any,  # noqa: A002
    num_envs: int = 1,
    vectorization_mode: str = "async",
    **kwargs: Any,
) -> Any:
    """Make what `gymnasium.make_vec` makes, with the vector env of this module.

    Args:
        id: as in `gymnasium.make_vec`, with all further arguments.
        num_envs: N.
        vectorization_mode: "async"; other modes make what they make in Gymnasium.
        **kwargs: `vector_kwargs` go to the vector env, e.g. `{"num_workers": 4}`.
    """
    with installed():
        return gymnasium.make_vec(id, num_envs, vectorization_mode, **kwargs)


def installed() -> contextlib.AbstractContextManager[None]:
    """Make `gymnasium.make_vec` (and all of Gymnasium) use the vector env of this module for a block."""
    return replaced("gymnasium", {gymnasium.vector.AsyncVectorEnv: AsyncVectorEnv})


def _checked_limit(limit: Any) -> int | None:
    if limit is not None and not isinstance(limit, (int, np.integer)):
        raise ValueError(
            f"`max_concurrency` must be an integer or None, got {type(limit)}."
        )
    if limit is not None and limit < 1:
        raise ValueError(f"`max_concurrency` must be a positive or None, got {limit}.")
    return None if limit is None else int(limit)


def _one_each(values: Any, num_envs: int) -> list[Any]:
    if not isinstance(values, (list, tuple)):
        return [values] * num_envs
    if len(values) != num_envs:
        raise ValueError(
            f"Values must be a list or tuple with length equal to the number of environments. "
            f"Got `{len(values)}` values for {num_envs} environments."
        )
    return list(values)


def _some(env_ids: np.ndarray) -> np.ndarray | None:
    """Return ids, or None if there are none."""
    return env_ids if len(env_ids) else None


def _checked_mask(mask: Any, num_envs: int) -> np.ndarray:
    name = "`options['reset_mask']`"
    if not isinstance(mask, np.ndarray):
        raise TypeError(f"{name} must be a numpy array, got {type(mask)}")
    if mask.shape != (num_envs,):
        raise ValueError(f"{name} must have shape `({num_envs},)`, got {mask.shape}")
    if mask.dtype != np.bool_:
        raise TypeError(f"{name} must have `dtype=np.bool_`, got {mask.dtype}")
    if not mask.any():
        raise ValueError(
            f"{name} must contain a boolean array with at least one True value, got reset_mask={mask}"
        )
    return mask
