"""`recommend`: measure an env and decide in one call; also behind `num_envs="auto"` and `num_workers="auto"`."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from envherd.executor.machine.machine import Machine, read_machine
from envherd.executor.options import ExecutorOptions
from envherd.executor.pools.blueprint import MakeEnv, choose_apart
from envherd.executor.sizing.limits import Limits
from envherd.executor.sizing.measurement import Measurement
from envherd.executor.sizing.opening import helper, start, subject_of
from envherd.executor.sizing.probing import ProbeLimits, Subject, probe
from envherd.executor.sizing.reasons import Facts, reasons
from envherd.executor.sizing.rule import settings_for
from envherd.executor.sizing.scaling import Prediction, Scale, plan
from envherd.executor.sizing.search import Found, Progress, Run, Search
from envherd.executor.sizing.settings import WORKERS_ONLY, Goal, Setting

_log = logging.getLogger("envherd")
#: Seconds of measurement for `recommend`, and for `"auto"`, which delays a program's start.
BUDGET_S, AUTO_BUDGET_S = 20.0, 5.0
#: Share of the available memory that a probe, and all executors of a search, may take.
PROBE_MEMORY_SHARE = 0.8
#: Share of the budget that the probe may take.
_PROBE_SHARE = 0.25

Auto = Literal["auto"]


@dataclass(frozen=True, kw_only=True)
class Advice:
    """The decision.

    Attributes:
        setting: see `Setting`; with 0 workers it is `SerialEnv`.
        predicted: its prediction.
        binding: its bottleneck, in one or two words.
        why: sentences, the most important first.
        parallel: the best setting with worker processes; None if `SerialEnv` is chosen.
        memory_room_bytes: available memory, before headroom.
        most_envs_in_memory: envs that fit with that number of workers; None for more than a thousand per worker.
        meets_target: whether the target in steps per second is reached; None without a target.
    """

    setting: Setting
    predicted: Prediction
    binding: str
    why: tuple[str, ...]
    parallel: Setting | None
    memory_room_bytes: int
    most_envs_in_memory: int | None
    meets_target: bool | None

    def to_plain(self) -> dict[str, Any]:
        """Return it as documented in docs/sizing.md."""
        plain = {name: value for name, value in vars(self).items() if name not in ("setting", "parallel", "predicted")}
        return {
            **asdict(self.setting),
            "executor": "ParallelEnv" if self.setting.num_workers else "SerialEnv",
            **plain,
            "parallel": None if self.parallel is None else asdict(self.parallel),
            "predicted": asdict(self.predicted),
        }


@dataclass(frozen=True, kw_only=True)
class Sizing:
    """The measurements and the decision.

    Attributes:
        machine: the planned one.
        measured: of the env.
        runs: every setting that was considered, with its speed on this machine or the reason why it was not run;
            none with worker processes if another machine is planned for.
        advice: the decision.
    """

    machine: Machine
    measured: Measurement
    runs: tuple[Run, ...]
    advice: Advice

    @property
    def serial(self) -> Run | None:
        """What `SerialEnv` makes with as many envs, by the probe; None if it is no choice."""
        return next((one for one in self.runs if not one.setting.num_workers), None)


def recommend(  # noqa: PLR0913  # the env, the goal and the limits
    make_env: Callable[..., Any],
    *,
    env_kwargs: dict[str, Any] | None = None,
    goal: Goal | None = None,
    budget_s: float = BUDGET_S,
    machine: Machine | None = None,
    options: ExecutorOptions | None = None,
    probe_bytes: int | None = None,
    progress: Progress = lambda _text, _share: None,
) -> Sizing:
    """Measure an env, run at most three settings on real executors, and recommend the smallest of the fastest ones.

    Args:
        make_env: builds one env; see `ParallelEnv`. It is called only in worker processes.
        env_kwargs: keyword arguments of the call.
        goal: fixed and wanted numbers; see `Goal`.
        budget_s: seconds of measurement, at most; it may end a few seconds later if starts are slow.
        machine: to plan for; None for this one. For another machine the probe is scaled, and no setting is run.
        options: of the executors; `reset_ahead` is tried if resets are costly, whatever its value here.
        probe_bytes: memory for the probe, and for all executors together; None for most of what is available.
        progress: called with the current activity and the used share of the budget.

    Raises:
        FactoryError, EnvError: the env failed. ProbeFailed: it could not be measured within the limits.
        DoesNotFit: not even one fits.
    """
    options, goal = replace(options or ExecutorOptions(), reset_ahead=False), goal or Goal()
    limits = ProbeLimits(budget_s=budget_s, memory_bytes=probe_bytes)
    subject = subject_of(make_env, env_kwargs, options)
    measured, here, found = measure(subject, goal, limits, options, progress, is_here=machine is None)
    return decide(measured, here, found, goal, machine or here, options.num_frames)


def measure(  # as `recommend`
    subject: Subject,
    goal: Goal,
    limits: ProbeLimits,
    options: ExecutorOptions,
    progress: Progress = lambda _text, _share: None,
    *,
    is_here: bool = True,
) -> tuple[Measurement, Machine, Found]:
    """Probe an env and confirm the rule's choice, on this machine; see `recommend`.

    Args:
        subject: the env.
        goal: see `recommend`.
        limits: seconds and bytes of the whole measurement.
        options: the executors'.
        progress: see `recommend`.
        is_here: whether this machine is planned for; otherwise nothing is run after the probe.
    """
    began, here = time.monotonic(), read_machine()
    most_bytes = int(here.memory_available * PROBE_MEMORY_SHARE) if limits.memory_bytes is None else limits.memory_bytes
    with helper(subject, options):
        probe_limits = replace(limits, budget_s=_PROBE_SHARE * limits.budget_s, memory_bytes=most_bytes)
        measured = probe(
            subject, probe_limits, options, lambda stage, share: progress(f"probe: {stage}", _PROBE_SHARE * share)
        )
        if goal.episode_steps is not None:
            measured = replace(measured, end_share=1 / goal.episode_steps, episode_steps=goal.episode_steps)
        wanted = settings_for(measured, here.cores, goal)
        fitting = Limits(measured, here, goal, options.num_frames)
        if not (is_here and wanted[0].num_workers):  # `SerialEnv` makes what the probe made
            return measured, here, Found((), wanted[0])
        begin = functools.partial(start, subject, options)
        search = Search(begin, fitting, goal, most_bytes, (began, began + limits.budget_s), progress)
        return measured, here, search.run(wanted)


def decide(
    measured: Measurement, here: Machine, found: Found, goal: Goal, machine: Machine, num_frames: int = 4
) -> Sizing:
    """Return the decision, for the machine on which settings were run or for another; pure.

    Raises:
        DoesNotFit: the other machine has no room.
    """
    limits = Limits(measured, machine, goal, num_frames)
    scale = Scale(measured, found.runs, here, limits, goal.policy_s)
    chosen, runs = found.chosen, found.runs
    if not runs:
        wanted, (chosen, _) = settings_for(measured, machine.cores, goal)[0], plan(scale, limits, goal)
        if wanted != chosen:
            runs += (Run(setting=wanted, refusal=limits.refusal(wanted)),)
    predicted, serial, considered = scale.predict(chosen), None, runs
    if not (goal.workers_only or measured.is_alone):
        setting = Setting(num_envs=chosen.num_envs, num_workers=0)
        serial = scale.predict(setting)
        fastest = max((one.steps_per_s for one in found.runs), default=serial.steps_per_s)
        runs += (
            Run(
                setting=setting,
                steps_per_s=serial.steps_per_s,
                relative=serial.steps_per_s / fastest,
                memory_bytes=serial.memory_bytes,
                start_s=serial.start_s,
                refusal=limits.refusal(setting),
            ),
        )
    facts = Facts(limits=limits, goal=goal, runs=considered, chosen=chosen, predicted=predicted, serial=serial)
    binding, why = reasons(facts)
    ran = [one for one in found.runs if one.refusal is None]
    best = max(ran, key=lambda one: one.steps_per_s).setting if ran else chosen
    advice = Advice(
        setting=chosen,
        predicted=predicted,
        binding=binding,
        why=why,
        parallel=best if best.num_workers else None,
        memory_room_bytes=limits.room,
        most_envs_in_memory=limits.most_envs(chosen.num_workers),
        meets_target=facts.meets_target,
    )
    return Sizing(machine=machine, measured=measured, runs=runs, advice=advice)


def resolve(
    num_envs: int | Auto,
    num_workers: int | Auto | None,
    make_env: MakeEnv,
    env_kwargs: Any,
    options: ExecutorOptions,
) -> tuple[int, int | None]:
    """Return the arguments of `ParallelEnv` with `"auto"` replaced by the measured choice.

    With a list of factories the first is measured, and their number is the number of envs. With `reset_ahead`, the
    number of workers is that of the envs, and nothing is measured. No env is built in this process.
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
    goal = replace(
        WORKERS_ONLY,
        num_envs=None if num_envs == "auto" else num_envs,
        num_workers=num_workers if isinstance(num_workers, int) else None,
    )
    done = recommend(factory, env_kwargs=first_kwargs, goal=goal, budget_s=AUTO_BUDGET_S, options=options)
    setting = done.advice.setting
    _log.info("auto: %d envs on %d workers; %s", setting.num_envs, setting.num_workers, " ".join(done.advice.why))
    return setting.num_envs, setting.num_workers
