"""Start the executors of a search, all from one helper process.

Guarantees: this process builds no env. A worker that dies or hangs, also during a start, raises an error within
`patience_s`, and does not affect other executors. `Opener.close` ends all that it has started.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from envherd.executor.batched import BatchedEnv
from envherd.executor.machine.machine import Machine
from envherd.executor.options import ExecutorOptions
from envherd.executor.pools.ahead_pool import AheadPool
from envherd.executor.pools.blueprint import as_factories, draw, spread
from envherd.executor.pools.crew import Blueprint
from envherd.executor.pools.preloading import preloaded
from envherd.executor.pools.worker_pool import WorkerPool
from envherd.executor.sizing.driving import Driver, Figures, Runner, Turn
from envherd.executor.sizing.forked_host import ForkedHost
from envherd.executor.sizing.probing import Subject
from envherd.executor.sizing.serial_host import SerialFactory, options_of_host
from envherd.executor.sizing.settings import Mode, Setting
from envherd.workers.build import pickle_factory

#: Seconds of a turn; and of a turn under a CPU quota, which usually stops all processes ten times a second.
_SPAN_S, _THROTTLED_SPAN_S = 0.1, 0.5


def span_of(machine: Machine) -> float:
    """Return how many seconds a turn takes."""
    return _THROTTLED_SPAN_S if machine.is_throttled else _SPAN_S


class Opener:
    """Starts the executors of a search.

    Args:
        subject: the env.
        options: of the executors.
        span_s: seconds of a turn.
        policy_s: see `Driver`.
        forked: for `SerialEnv`; None for a worker process. Closed by `close`.
    """

    def __init__(
        self,
        subject: Subject,
        options: ExecutorOptions,
        span_s: float,
        policy_s: float,
        forked: ForkedHost | None = None,
    ) -> None:
        self._subject, self._options = subject, options
        self._span_s, self._policy_s = span_s, policy_s
        self._forked = forked
        self._serial: SerialProcess | ForkedHost | None = None

    def open(self, setting: Setting, patience_s: float) -> Runner:
        """Start the executor of a setting.

        Args:
            setting: see `Setting`.
            patience_s: seconds for a build, a reset or a step of a worker.

        Raises:
            EnvherdError: it cannot be started; none of its processes is left running.
        """
        if not setting.num_workers:
            if self._serial is None:
                self._serial = self._start_serial(patience_s)
            return _SerialRunner(self._serial, setting.num_envs)
        return Driver(lambda: self._start(setting, patience_s), self._span_s, self._policy_s)

    def _start_serial(self, patience_s: float) -> SerialProcess | ForkedHost:
        made_by = SerialFactory(
            factory=self._subject.factory,
            env_kwargs=self._subject.env_kwargs,
            options=self._options,
            span_s=self._span_s,
            policy_s=self._policy_s,
        )
        if self._forked is not None:
            self._forked.prepare(made_by, patience_s)
            return self._forked
        return SerialProcess(made_by, _within(options_of_host(self._options), patience_s))

    def _start(self, setting: Setting, patience_s: float) -> BatchedEnv:
        subject, count = self._subject, setting.num_envs
        options = replace(_within(self._options, patience_s), reset_ahead=setting.reset_ahead)
        blocks = spread(count, setting.num_workers)
        blueprint = Blueprint((subject.factory,) * count, (subject.env_kwargs,) * count, blocks, 0, subject.preload)
        pool = AheadPool(blueprint, options) if setting.reset_ahead else WorkerPool(blueprint, options)
        pool.start()
        try:
            return BatchedEnv(pool, seed=0, device=None, copy=True, options=options)
        except BaseException:
            pool.close(timeout_s=0)
            raise

    def close(self) -> None:
        """End the process of `SerialEnv`; the caller closes runners."""
        for process in (self._serial, self._forked):
            if process is not None:
                process.close()


class SerialProcess:
    """The owner's handle of a worker with a `SerialHost`."""

    def __init__(self, made_by: SerialFactory, options: ExecutorOptions) -> None:
        self._pool = WorkerPool(Blueprint((pickle_factory(made_by),), ({},), spread(1, 1), 0, ()), options)
        self._pool.start()

    def call(self, name: str, *args: Any) -> Any:
        """Call a method of the host and return what it returns."""
        return self._pool.ask("call", [0], name=name, args=args, kwargs={})[0]["plain"]

    def close(self) -> None:
        """End it."""
        self._pool.close()


class _SerialRunner:
    """A `SerialEnv` in another process."""

    def __init__(self, process: SerialProcess | ForkedHost, num_envs: int) -> None:
        self._process, self._num_envs = process, num_envs
        self.start_s: float = process.call("open", num_envs)

    def turn(self, mode: Mode, least_steps: int = 0) -> Turn:
        return Turn(**self._process.call("turn", self._num_envs, mode, least_steps))

    def figures(self) -> Figures:
        return Figures(**self._process.call("figures", self._num_envs))

    def close(self) -> None:
        """Do nothing: the opener ends the process of all of them."""


def _within(options: ExecutorOptions, patience_s: float) -> ExecutorOptions:
    """Return options whose deadlines are at most `patience_s`."""
    return replace(
        options,
        build_timeout_s=min(patience_s, options.build_timeout_s or patience_s),
        reset_timeout_s=min(patience_s, options.reset_timeout_s or patience_s),
        step_timeout_s=min(patience_s, options.step_timeout_s or patience_s),
    )


def subject_of(make_env: Callable[..., Any], env_kwargs: dict[str, Any] | None, options: ExecutorOptions) -> Subject:
    """Return the subject of a probe: a pickled factory."""
    blueprint = draw(as_factories(1, make_env), env_kwargs, 1, 0, options)
    return Subject(
        factory=blueprint.factories[0],
        env_kwargs=blueprint.env_kwargs[0],
        preload=blueprint.preload,
        seed=blueprint.root_seed,
    )


@contextlib.contextmanager
def helper(subject: Subject, options: ExecutorOptions) -> Iterator[None]:
    """Make the probe and all executors start their workers from one helper, if possible."""
    with contextlib.ExitStack() as stack:
        if subject.preload and options.start_method == "zygote":
            with contextlib.suppress(ImportError):  # workers report a module that cannot be imported
                stack.enter_context(preloaded(*subject.preload, options=options))
        yield
