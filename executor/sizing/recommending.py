"""`recommend`: measure an env and decide in one call; also behind `num_envs="auto"` and `num_workers="auto"`."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from envherd.executor.batches.arguments import as_count
from envherd.executor.keywords import refuses_keywords
from envherd.executor.machine.machine import Machine, Others, read_machine, require_room
from envherd.executor.options import ExecutorOptions
from envherd.executor.processes.error_messages import log
from envherd.executor.sending.blueprint import MakeEnv
from envherd.executor.sizing.confirming import confirm
from envherd.executor.sizing.probe import Subject, probe
from envherd.executor.sizing.rule import (
    DISTURBED,
    Goal,
    Limits,
    Measurement,
    Run,
    explain,
    settings_for,
)

#: Seconds of measurement for `"auto"`, which delays a program's start.
AUTO_BUDGET_S = 5.0
#: A smaller setting is chosen if it reaches this share of the best one's speed.
_GOOD_ENOUGH = 0.95
#: Share of the budget that the probe may take.
_PROBE_SHARE = 0.25


@dataclass(frozen=True, kw_only=True)
class Sizing:
    """The measurements and the decision.

    Attributes:
        machine: the available resources.
        measured: of the env.
        runs: every setting that was considered, as it was run, or with the reason why it was not run.
        chosen: the run of the chosen setting; with 0 workers it is `SerialEnv`.
        binding: its bottleneck, in one or two words; "target" if the wanted speed is reached.
        why: sentences, the most important first.
    """

    machine: Machine
    measured: Measurement
    runs: tuple[Run, ...]
    chosen: Run
    binding: str
    why: tuple[str, ...]


@refuses_keywords(
    machine="Call it on that machine: all speeds are measured.",
    probe_bytes="Limit the memory of the process with a control group.",
)
def recommend(  # the env, the goal and the limits
    make_env: Callable[..., Any],
    *,
    env_kwargs: dict[str, Any] | None = None,
    goal: Goal | None = None,
    budget_s: float = 20.0,
    options: ExecutorOptions | None = None,
    progress: Callable[[str, float], None] = lambda _text, _share: None,
) -> Sizing:
    """Measure an env, run at most four settings on real executors, and recommend the smallest of the fastest ones.

    Args:
        make_env: builds one env; see `ParallelEnv`. It is called only in worker processes.
        env_kwargs: keyword arguments of the call.
        goal: fixed and wanted numbers; see `Goal`.
        budget_s: seconds of measurement, at most; it may end a few seconds later if starts are slow.
        options: of the executors.
        progress: called with the current activity and the used share of the budget.

    Raises:
        FactoryError, EnvError, WorkerLost, WorkerTimeout: the env failed, its process died, or a call took too long.
        DoesNotFit: not even one fits.
        ValueError, OSError: the goal has more envs or workers than this machine can hold.
    """
    goal = goal or Goal()
    require_room(
        goal.num_envs or 1,
        min(goal.num_workers or 0, goal.num_envs or goal.num_workers or 0),
    )
    began = time.monotonic()
    machine = read_machine()
    subject = Subject(make_env, env_kwargs or {}, options or ExecutorOptions())

    def show(text: str) -> None:
        progress(text, min(1.0, (time.monotonic() - began) / budget_s))

    with subject.helper():
        others = Others(machine.cpus)
        show("probe: build")
        measured = probe(subject, _PROBE_SHARE * budget_s, show)
        if goal.episode_steps is not None:
            measured = replace(measured, end_share=1 / goal.episode_steps)
        limits = Limits(measured, machine, goal, subject.options.num_frames)
        runs = limits.fitting(settings_for(measured, machine.cores, goal))
        confirm(
            subject,
            limits,
            runs,
            end=began + budget_s,
            budget_s=budget_s,
            show=show,
            is_busy=lambda: others.share() > DISTURBED,
        )
        return decide(limits, runs, others.share())


def decide(limits: Limits, runs: Sequence[Run], others_share: float = 0.0) -> Sizing:
    """Return the decision from what was run: the smallest setting that is fast enough. Pure.

    Fast enough is the target if one setting reaches it, else 5 % less than the fastest.

    Args:
        limits: of the machine.
        runs: of the settings that were considered.
        others_share: of the processors' time, that other programs took meanwhile.
    """
    most = max(one.steps_per_s for one in runs)
    target = limits.goal.target_steps_per_s
    enough = target if target is not None and most >= target else _GOOD_ENOUGH * most
    # Small are few processes, then little effort in user code, then few envs.
    chosen = min(
        (one for one in runs if one.refusal is None and one.steps_per_s >= enough),
        key=lambda one: (
            one.setting.num_workers,
            one.setting.mode != "sync",
            one.setting.num_envs,
        ),
    )
    binding, why = explain(limits, chosen, runs, others_share)
    return Sizing(
        machine=limits.machine,
        measured=limits.measured,
        runs=tuple(runs),
        chosen=chosen,
        binding=binding,
        why=tuple(why),
    )


def resolve(
    num_envs: int | Literal["auto"],
    num_workers: int | Literal["auto"] | None,
    make_env: MakeEnv,
    env_kwargs: Any,
    options: ExecutorOptions,
) -> tuple[int, int | None]:
    """Return the arguments of `ParallelEnv` with `"auto"` replaced by the measured choice.

    With a list of factories the first is measured, and their number is the number of envs. No env is built in this
    process.
    """
    is_list = isinstance(make_env, (list, tuple))
    if is_list and num_envs == "auto":
        num_envs = len(make_env)  # type: ignore[arg-type]  # a list
    if "auto" not in (num_envs, num_workers):
        return num_envs, num_workers  # type: ignore[return-value]
    factory: Any = make_env[0] if is_list else make_env  # type: ignore[index]  # a list
    first_kwargs = (
        env_kwargs
        if env_kwargs is None or isinstance(env_kwargs, dict)
        else env_kwargs[0]
    )
    goal = Goal(
        num_envs=_fixed("num_envs", num_envs),
        num_workers=_fixed("num_workers", num_workers, or_none=True),
        workers_only=True,
    )
    done = recommend(
        factory,
        env_kwargs=first_kwargs,
        goal=goal,
        budget_s=AUTO_BUDGET_S,
        options=options,
    )
    chosen = done.chosen.setting
    log.info(
        "auto: %d envs on %d workers; %s",
        chosen.num_envs,
        chosen.num_workers,
        " ".join(done.why),
    )
    return chosen.num_envs, chosen.num_workers


def _fixed(name: str, value: Any, **how: bool) -> int | None:
    """Return an argument of `ParallelEnv`, None for `"auto"`."""
    return None if value == "auto" else as_count("ParallelEnv", name, value, **how)
