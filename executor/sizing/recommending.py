"""`recommend`: measure an env and decide, in one call; and what `num_envs="auto"` and `num_workers="auto"` do."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from envherd.executor.fixed import FixedParallelEnv
from envherd.executor.machine.machine import Machine, read_machine
from envherd.executor.options import ExecutorOptions
from envherd.executor.pools.blueprint import MakeEnv, as_factories, choose_apart, draw
from envherd.executor.sizing.comparing import compare_modes
from envherd.executor.sizing.deciding import Advice, decide
from envherd.executor.sizing.limits import Goal
from envherd.executor.sizing.measurement import Measurement
from envherd.executor.sizing.model import Model
from envherd.executor.sizing.modes import MODES, Mode
from envherd.executor.sizing.overhead import Overhead, measure_overhead
from envherd.executor.sizing.probing import ProbeLimits, Subject, probe

_log = logging.getLogger("envherd")
#: Seconds that `"auto"` measures for; a program that starts should not wait longer.
AUTO_BUDGET_S = 5.0
#: Share of the available memory that a probe may take.
PROBE_MEMORY_SHARE = 0.8

Auto = Literal["auto"]


@dataclass(frozen=True, kw_only=True)
class Sizing:
    """What was measured, and what follows from it.

    Attributes:
        machine: what may be used.
        measured: of the env.
        overhead: of the executor.
        advice: the decision.
    """

    machine: Machine
    measured: Measurement
    overhead: Overhead
    advice: Advice


def recommend(
    make_env: Callable[..., Any],
    *,
    env_kwargs: dict[str, Any] | None = None,
    goal: Goal | None = None,
    budget_s: float = 10.0,
    machine: Machine | None = None,
    options: ExecutorOptions | None = None,
) -> Sizing:
    """Measure an env in a probe worker and say how many of it to run on how many workers.

    Args:
        make_env: builds one env; see `ParallelEnv`.
        env_kwargs: keyword arguments of the call.
        goal: what is fixed and what is wanted; see `Goal`.
        budget_s: seconds to measure for. A few more are taken to measure the executor itself, and mostly no more
            than as many again to run some envs in all modes; more where a reset takes seconds.
        machine: to plan for; None for this one, as it is now.
        options: the executor's.

    Raises:
        FactoryError, EnvError: the env failed. ProbeFailed: it could not be measured within the limits.
        DoesNotFit: not even one fits.
    """
    here = read_machine()
    limits = ProbeLimits(budget_s=budget_s, memory_bytes=int(here.memory_available * PROBE_MEMORY_SHARE))
    options = options or ExecutorOptions()
    goal = goal or Goal()
    measured, overhead = measure(make_env, env_kwargs, limits, options, lambda _stage, _share: None, goal.modes)
    advice = decide(measured, overhead, machine or here, goal, options.num_frames)
    return Sizing(machine=machine or here, measured=measured, overhead=overhead, advice=advice)


def measure(
    make_env: Callable[..., Any],
    env_kwargs: dict[str, Any] | None,
    limits: ProbeLimits,
    options: ExecutorOptions,
    progress: Callable[[str, float], None],
    modes: tuple[Mode, ...] = MODES,
) -> tuple[Measurement, Overhead]:
    """Measure an env, the executor with envs that look like it, and its modes with the env itself; see `recommend`."""
    measured, overhead = measure_subject(subject_of(make_env, env_kwargs, options), limits, options, progress)
    if len(modes) == 1:
        return measured, overhead

    def open_env(num_envs: int, num_workers: int) -> FixedParallelEnv:
        return FixedParallelEnv(
            num_envs, make_env, num_workers=num_workers, seed=0, env_kwargs=env_kwargs, options=options
        )

    model = Model(measured, overhead, read_machine(), num_frames=options.num_frames)
    return compare_modes(open_env, model, limits, partial(progress, "modes"))


def subject_of(make_env: Callable[..., Any], env_kwargs: dict[str, Any] | None, options: ExecutorOptions) -> Subject:
    """Return what a probe builds: an env from a factory, pickled."""
    blueprint = draw(as_factories(1, make_env), env_kwargs, 1, 0, options)
    return Subject(
        factory=blueprint.factories[0],
        env_kwargs=blueprint.env_kwargs[0],
        preload=blueprint.preload,
        seed=blueprint.root_seed,
    )


def measure_subject(
    subject: Subject, limits: ProbeLimits, options: ExecutorOptions, progress: Callable[[str, float], None]
) -> tuple[Measurement, Overhead]:
    """Measure an env whose factory is pickled already; see `measure`."""
    measured = probe(subject, limits, options, progress)
    overhead = measure_overhead(
        measured.spec,
        read_machine(),
        options,
        lambda share: progress("executor", share),
        min(measured.cpu_per_step_s, measured.step_s),
        measured.end_share,
    )
    return measured, overhead


def with_episodes_of(measured: Measurement, steps: int) -> Measurement:
    """Return a measurement whose episodes last so many steps."""
    return replace(measured, end_share=1 / steps)


def resolve(
    num_envs: int | Auto,
    num_workers: int | Auto | None,
    make_env: MakeEnv,
    env_kwargs: Any,
    options: ExecutorOptions,
) -> tuple[int, int | None]:
    """Return the numbers that `ParallelEnv` was given, `"auto"` replaced by what is measured and decided.

    With a list of factories the first is measured, and their number is the number of envs. With `reset_ahead`, the
    number of workers is that of the envs, and nothing is measured.
    """
    if options.reset_ahead:
        num_envs = choose_apart(num_envs, num_workers)
        return num_envs, num_envs
    if num_envs != "auto" and num_workers != "auto":
        return num_envs, num_workers
    for name, value in (("num_envs", num_envs), ("num_workers", num_workers)):
        if isinstance(value, str) and value != "auto":
            raise ValueError(f"{name} failed: expected an int or 'auto', got {value!r}.")
    is_list = isinstance(make_env, (list, tuple))
    if is_list and num_envs == "auto":
        num_envs = len(make_env)  # type: ignore[arg-type]  # a list
        if num_workers != "auto":
            return num_envs, num_workers
    factory: Any = make_env[0] if is_list else make_env  # type: ignore[index]  # a list
    first_kwargs = env_kwargs if env_kwargs is None or isinstance(env_kwargs, dict) else env_kwargs[0]
    goal = Goal(
        num_envs=None if num_envs == "auto" else num_envs,
        num_workers=num_workers if isinstance(num_workers, int) else None,
        modes=("sync",),
    )
    done = recommend(factory, env_kwargs=first_kwargs, goal=goal, budget_s=AUTO_BUDGET_S, options=options)
    setting = done.advice.setting
    _log.info("auto: %d envs on %d workers; %s", setting.num_envs, setting.num_workers, " ".join(done.advice.why))
    return setting.num_envs, setting.num_workers
