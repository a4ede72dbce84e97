"""Gymnasium's `AsyncVectorEnv` and `SyncVectorEnv` on top of the executor: one import changed.

    from envherd.gymnasium import AsyncVectorEnv    # was: from gymnasium.vector import ...

Spaces, transitions, infos, autoreset modes and errors are Gymnasium's own; see `docs/gymnasium.md` for what
is deliberately different. `gymnasium.make_vec` makes these classes inside `installed()`.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

import gymnasium
import numpy as np
from gymnasium import logger
from gymnasium.vector import AutoresetMode, VectorEnv

from envherd.executor.facades import replaced
from envherd.executor.facades.errors import CallTimeout, raising_gymnasiums
from envherd.executor.facades.gymnasium.base import EnvFns, HostedVectorEnv, StepResult
from envherd.executor.facades.gymnasium.worker import NativeFactory, loads
from envherd.executor.facades.states import FOLLOWS, AsyncState
from envherd.executor.keywords import names_right_keyword
from envherd.executor.options import ExecutorOptions
from envherd.executor.parallel import ParallelEnv
from envherd.executor.sending.blueprint import choose_workers
from envherd.executor.serial import SerialEnv
from envherd.workers.adapters.base import Adapter

__all__ = ["AsyncState", "AsyncVectorEnv", "SyncVectorEnv", "installed", "make_vec"]

#: Methods that `call` does not reach.
_OWN_METHODS = ("reset", "step", "close", "_setattr", "_check_spaces")

#: Seconds between checks for the answers to a `call_async` with a deadline.
_LOOK_S = 0.001


class AsyncVectorEnv(HostedVectorEnv, VectorEnv[Any, Any, np.ndarray]):
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
        super().__init__(
            env_fns,
            copy=copy,
            observation_mode=observation_mode,
            autoreset_mode=autoreset_mode,
        )
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
                options=self._options(options),
                copy=bool(copy),
            )
        # For `rebuild`, which gets functions of the user.
        made.hosted = lambda env_fn, _: self._factory(
            env_fn,
            keeps_final=self._resets_in_step,
        )
        self._refuses_custom = shared_memory
        self._run(made)

    # ---- reset and step ----------------------------------------------------------------------

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


class SyncVectorEnv(HostedVectorEnv, VectorEnv[Any, Any, np.ndarray]):
    """Envs in this process, one after the other: `gymnasium.vector.SyncVectorEnv` over `SerialEnv`.

    Args:
        env_fns: one callable for each env.
        copy: False hands out views of the ring of rows; the `options.ring_frames`-th further step overwrites a view.
        observation_mode: "same", "different", or `(observation_space, single_observation_space)`.
        autoreset_mode: an `AutoresetMode` or its value.
        options: see `ExecutorOptions`; `infos` and `episode_seeds` are set here.

    Attributes:
        envs: the envs themselves, a list.

    Raises:
        RuntimeError: spaces do not fit together.
        FactoryError: an env could not be built; also of the type that was raised.
    """

    @names_right_keyword
    def __init__(
        self,
        env_fns: EnvFns,
        copy: bool = True,  # noqa: FBT001, FBT002  # Gymnasium's signature
        observation_mode: Any = "same",
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        *,
        options: ExecutorOptions | None = None,
    ) -> None:
        super().__init__(
            env_fns,
            copy=copy,
            observation_mode=observation_mode,
            autoreset_mode=autoreset_mode,
        )
        with raising_gymnasiums():
            executor = SerialEnv(
                self.num_envs,
                [
                    NativeFactory(env_fn, keeps_final=self._resets_in_step)
                    for env_fn in self.env_fns
                ],
                copy=copy,
                options=self._options(options),
            )
        # A `SerialPool`, which has the adapters in this process.
        pool: Any = executor.engine.pool
        self.envs: list[Any] = [adapter.env.env for adapter in pool.adapters.values()]
        self._run(executor)

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of each env or of its wrappers, or return its attribute of that name."""
        found = [env.get_wrapper_attr(name) for env in self.envs]
        return tuple(
            value(*args, **kwargs) if callable(value) else value for value in found
        )

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute of each env or of its wrappers: to `values`, or to its own item of a list or tuple.

        Raises:
            ValueError: not one value for each env.
        """
        for env, value in zip(self.envs, _one_each(values, self.num_envs), strict=True):
            env.set_wrapper_attr(name, value)

    def close_extras(self, **_: Any) -> None:
        """Close the envs."""
        self.executor.close()


def make_vec(
    id: Any,  # noqa: A002
    num_envs: int = 1,
    vectorization_mode: str = "async",
    **kwargs: Any,
) -> Any:
    """Make what `gymnasium.make_vec` makes, with the vector envs of this module.

    Args:
        id: as in `gymnasium.make_vec`, with all further arguments.
        num_envs: N.
        vectorization_mode: "async" or "sync".
        **kwargs: `vector_kwargs` go to the vector env, e.g. `{"num_workers": 4}`.
    """
    with installed():
        return gymnasium.make_vec(id, num_envs, vectorization_mode, **kwargs)


def installed() -> contextlib.AbstractContextManager[None]:
    """Make `gymnasium.make_vec` (and all of Gymnasium) use the vector envs of this module for a block."""
    return replaced(
        "gymnasium",
        {
            gymnasium.vector.AsyncVectorEnv: AsyncVectorEnv,
            gymnasium.vector.SyncVectorEnv: SyncVectorEnv,
        },
    )


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
