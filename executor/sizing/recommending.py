"""`recommend`: measure an env and decide in one call; also behind `num_envs="auto"` and `num_workers="auto"`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from envherd.executor.batches.arguments import as_count
from envherd.executor.machine.machine import Machine, Others, read_machine
from envherd.executor.options import ExecutorOptions
from envherd.executor.pools.blueprint import MakeEnv
from envherd.executor.sizing.confirming import Confirmation, choose
from envherd.executor.sizing.driving import Subject
from envherd.executor.sizing.limits import Limits
from envherd.executor.sizing.measurement import Measurement
from envherd.executor.sizing.probe import Progress, probe
from envherd.executor.sizing.reasons import reasons
from envherd.executor.sizing.rule import settings_for
from envherd.executor.sizing.settings import WORKERS_ONLY, Goal, Run, Setting

_log = logging.getLogger("envherd")
#: Seconds of measurement for `recommend`, and for `"auto"`, which delays a program's start.
BUDGET_S, AUTO_BUDGET_S = 20.0, 5.0
#: Share of the budget that the probe may take.
_PROBE_SHARE = 0.25

Auto = Literal["auto"]


@dataclass(frozen=True, kw_only=True)
class Advice:
    """The decision.

    Attributes:
        setting: see `Setting`; with 0 workers it is `SerialEnv`.
        predicted: its speed, memory and start, as it was run, or predicted from the probe.
        binding: its bottleneck, in one or two words.
        why: sentences, the most important first.
        parallel: the best setting with worker processes; None if `SerialEnv` is chosen.
        memory_room_bytes: available memory, before headroom.
        most_envs_in_memory: envs that fit with that number of workers; None for more than a thousand per worker.
        meets_target: whether the target in steps per second is reached; None without a target.
    """

    setting: Setting
    predicted: Run
    binding: str
    why: tuple[str, ...]
    parallel: Setting | None
    memory_room_bytes: int
    most_envs_in_memory: int | None
    meets_target: bool | None

    def to_plain(self) -> dict[str, Any]:
        """Return it as documented in docs/reference/json.md."""
        names = ("binding", "why", "memory_room_bytes", "most_envs_in_memory", "meets_target")
        predicted = ("steps_per_s", "batch_s", "memory_bytes", "start_s", "is_scaled")
        return {
            **asdict(self.setting),
            "executor": "ParallelEnv" if self.setting.num_workers else "SerialEnv",
            **{name: getattr(self, name) for name in names},
            "parallel": None if self.parallel is None else asdict(self.parallel),
            "predicted": {name: getattr(self.predicted, name) for name in predicted},
        }


@dataclass(frozen=True, kw_only=True)
class Sizing:
    """The measurements and the decision.

    Attributes:
        machine: the planned one.
        measured: of the env.
        runs: every setting that was considered: as it was run on this machine, or with the reason why it was not run.
            For another machine, and for `SerialEnv`, the figures are predicted from the probe.
        advice: the decision.
    """

    machine: Machine
    measured: Measurement
    runs: tuple[Run, ...]
    advice: Advice

    @property
    def serial(self) -> Run | None:
        """The speed of `SerialEnv` with as many envs, by the probe; None if it cannot be used."""
        return next((one for one in self.runs if not one.setting.num_workers), None)


def recommend(  # noqa: PLR0913  # the env, the goal and the limits
    make_env: Callable[..., Any],
    *,
    env_kwargs: dict[str, Any] | None = None,
    goal: Goal | None = None,
    budget_s: float = BUDGET_S,
    machine: Machine | None = None,
    options: ExecutorOptions | None = None,
    progress: Progress = lambda _text, _share: None,
) -> Sizing:
    """Measure an env, run at most three settings on real executors, and recommend the smallest of the fastest ones.

    Args:
        make_env: builds one env; see `ParallelEnv`. It is called only in worker processes.
        env_kwargs: keyword arguments of the call.
        goal: fixed and wanted numbers; see `Goal`.
        budget_s: seconds of measurement, at most; it may end a few seconds later if starts are slow.
        machine: to plan for; None for this one. For another machine the probe is scaled, and no setting is run.
        options: of the executors.
        progress: called with the current activity and the used share of the budget.

    Raises:
        FactoryError, EnvError, WorkerLost, WorkerTimeout: the env failed, its process died, or a call took too long.
        DoesNotFit: not even one fits.
        ValueError, OSError: the goal has more envs or workers than this machine can hold.
    """
    goal = goal or Goal()
    if machine is None:
        goal.require_room()
    began, here = time.monotonic(), read_machine()
    options = options or ExecutorOptions()
    subject = Subject(make_env, env_kwargs or {}, options)
    with subject.helper():
        others = Others(here.cpus)
        measured = probe(
            subject,
            _PROBE_SHARE * budget_s,
            lambda stage, share: progress(f"probe: {stage}", _PROBE_SHARE * share),
        )
        if goal.episode_steps is not None:
            measured = replace(measured, end_share=1 / goal.episode_steps, episode_steps=goal.episode_steps)
        limits = Limits(measured, machine or here, goal, options.num_frames, is_here=machine is None)
        wanted = settings_for(measured, limits.machine.cores, goal)
        if machine is not None or not wanted[0].num_workers:  # `SerialEnv` makes what the probe made
            return decide(limits, plan(limits, wanted[0]), others.share())
        confirmation = Confirmation(subject, limits, (began, began + budget_s), progress)
        runs = confirmation.run(limits.fitting(wanted))
        return decide(limits, runs, others.share())


def plan(limits: Limits, wanted: Setting) -> tuple[Run, ...]:
    """Return what a setting is predicted to make, or the largest that fits in its place, after the reason.

    Raises:
        DoesNotFit: the machine has no room.
    """
    return tuple(map(limits.predict, limits.fitting([wanted])))


def decide(limits: Limits, runs: tuple[Run, ...], others_share: float = 0.0) -> Sizing:
    """Return the decision from what was run or planned; pure.

    Args:
        limits: of the machine.
        runs: what was run or planned.
        others_share: of the processors' time, that other programs took meanwhile.
    """
    measured, goal = limits.measured, limits.goal
    ran = [one for one in runs if one.refusal is None]
    fastest = max(ran, key=lambda one: one.steps_per_s)
    chosen = choose(ran, goal.target_steps_per_s)
    serial, considered = None, runs
    if not (goal.workers_only or measured.is_alone):
        serial = limits.predict(Setting(num_envs=chosen.setting.num_envs, num_workers=0))
        if chosen.setting.num_workers:
            considered = (*runs, serial)
    binding, why = reasons(limits, chosen, runs, serial, others_share)
    advice = Advice(
        setting=chosen.setting,
        predicted=chosen,
        binding=binding,
        why=why,
        parallel=fastest.setting if fastest.setting.num_workers else None,
        memory_room_bytes=limits.room,
        most_envs_in_memory=limits.most_envs(chosen.setting.num_workers),
        meets_target=goal.is_met_by(chosen),
    )
    most = max(one.steps_per_s for one in considered if one.refusal is None)
    relative = tuple(replace(one, relative=one.steps_per_s / most) for one in considered)
    return Sizing(machine=limits.machine, measured=measured, runs=relative, advice=advice)


def resolve(
    num_envs: int | Auto,
    num_workers: int | Auto | None,
    make_env: MakeEnv,
    env_kwargs: Any,
    options: ExecutorOptions,
) -> tuple[int, int | None]:
    """Return the arguments of `ParallelEnv` with `"auto"` replaced by the measured choice.

    With a list of factories the first is measured, and their number is the number of envs. No env is built in this
    process.
    """
    if num_envs != "auto" and num_workers != "auto":
        return num_envs, num_workers
    is_list = isinstance(make_env, (list, tuple))
    if is_list and num_envs == "auto":
        num_envs = len(make_env)  # type: ignore[arg-type]  # a list
        if num_workers != "auto":
            return num_envs, num_workers
    fixed: dict[str, int | None] = {}
    for name, value in (("num_envs", num_envs), ("num_workers", num_workers)):
        if isinstance(value, str) and value != "auto":
            raise ValueError(f"{name} failed: expected an int or 'auto', got {value!r}.")
        fixed[name] = None if value == "auto" else as_count("ParallelEnv", name, value, or_none=name == "num_workers")
    factory: Any = make_env[0] if is_list else make_env  # type: ignore[index]  # a list
    first_kwargs = env_kwargs if env_kwargs is None or isinstance(env_kwargs, dict) else env_kwargs[0]
    goal = replace(WORKERS_ONLY, num_envs=fixed["num_envs"], num_workers=fixed["num_workers"])
    done = recommend(factory, env_kwargs=first_kwargs, goal=goal, budget_s=AUTO_BUDGET_S, options=options)
    setting = done.advice.setting
    _log.info("auto: %d envs on %d workers; %s", setting.num_envs, setting.num_workers, " ".join(done.advice.why))
    return setting.num_envs, setting.num_workers
