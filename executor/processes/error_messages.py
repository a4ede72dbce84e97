"""Build the exceptions for failures of envs and workers."""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from envherd.executor.options import ExecutorOptions
from envherd.executor.processes.worker_process import WorkerProcess
from envherd.executor.start.zygote import without_own_frames
from envherd.workers.current import WorkerInfo
from envherd.workers.errors import (
    EnvError,
    EnvherdError,
    FactoryError,
    SpecError,
    WorkerLost,
    WorkerTimeout,
)
from envherd.workers.protocol import IDLE, Phase

log = logging.getLogger("envherd")

Frame = dict[str, Any]


@dataclass
class Numbering:
    """The ids of envs and workers in this process's messages and errors.

    Attributes:
        first_env_id, first_worker_id: ids of env 0 and of worker 0.
        place: location of the envs, if the process runs a share of a larger batch; else empty.
    """

    first_env_id: int = 0
    first_worker_id: int = 0
    place: str = ""


#: This process's numbering. A process that hosts a share of a larger batch changes it before it creates an executor.
numbering = Numbering()


#: The types whose messages are written by this package, and the errors that have them.
_OURS = {"FactoryError": FactoryError, "SpecError": SpecError}
#: Phase -> types of exceptions whose messages need no words about the env, and the errors that have them: those of the
#: builder, and those of adapters of envs that have no state.
_WHOLE: dict[str, dict[str, type[EnvherdError]]] = {
    "rebuild": _OURS,
    "save": {"NotImplementedError": EnvError},
    "restore": {"NotImplementedError": EnvError},
}
#: Phase -> what raises in it, the error for that, and how its envs go on.
_RAISERS: dict[str, tuple[str, type[EnvherdError], str]] = {
    "rebuild": (
        "the factory",
        FactoryError,
        "The envs of this call keep their tasks, and need a reset.",
    )
}
#: Advice by the type of an env's exception.
_ADVICE = {
    "BdbQuit": " A debugger needs envs in this process: SerialEnv. There `q` raises this error, and `c` continues."
}
#: What has failed, by the phase of a worker, if that is not its name.
_OPERATIONS = {IDLE: "the call"}
_REMEDY = (
    "Use fewer envs or workers (`envherd size` says how many fit), or raise the limit."
)
RESTART = "ExecutorOptions(on_worker_loss='restart') replaces lost workers."
#: Text about a killed worker, by where the kernel has killed processes for lack of memory since.
_KILLERS = {
    "group": f"The kernel killed it, or a process of its control group, for the memory limit of that group. {_REMEDY}",
    "machine": f"The kernel killed processes for want of memory meanwhile, probably this one too. {_REMEDY}",
    "nobody": "The kernel has killed no process for want of memory meanwhile: a program sent that signal, or a limit "
    "of CPU time was reached (ulimit -t).",
    "unknown": "Often out of memory: see the memory of each worker in statistics().",
}


def another_spec(env_id: int, difference: str) -> SpecError:
    """Return the error for an env whose spec differs after the restart of its worker."""
    return SpecError(
        f"restart failed: expected env {env_id} with the spec that it had, got another: {difference}. Make its factory "
        f"build equal envs at every call.",
        env_id=env_id,
    )


def worker_lost(
    worker: WorkerProcess,
    phase: str,
    env_id: int | None = None,
) -> WorkerLost:
    """Return the error for a worker that has ended.

    Args:
        worker: has exited; its log is still open.
        phase: of the worker.
        env_id: of the env that it worked on, if known.
    """
    how = worker.exit_description()
    hint = ""
    if "SIGKILL" in how:
        hint = " " + _KILLERS[worker.killed_for_memory()]
    lines = worker.last_lines()
    return WorkerLost(
        f"{_OPERATIONS.get(phase, phase)} failed: worker {_called(worker.info)} ended with {how} "
        f"{_in_words(phase, env_id)} ({_where(worker.info, worker.pid, worker.gpu)}).{hint}"
        + (lines and f"\nIts last output:\n{lines}"),
        remote_traceback=lines or None,
        exit_code=worker.exit_code(),
        **_context(worker.info, phase, env_id, worker.pid),
    )


class refusals_as_loss:  # noqa: N801  # used as a function
    """Raise what the system refuses to a process that is being started as the loss of that worker."""

    def __init__(self, info: WorkerInfo) -> None:
        self._info = info

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(
        self, _kind: object, error: BaseException | None, trace: object
    ) -> None:
        """Raise the loss; an error without a number was raised by a signal handler, and passes."""
        # The error is kept. With these frames it would keep the process, and its descriptors open.
        del trace
        if isinstance(error, OSError) and error.errno is not None:
            raise WorkerLost(
                f"starting a worker failed: expected another process and its descriptors for worker "
                f"{_called(self._info)}, got {error} ({_where(self._info)}, phase start). "
                "Use fewer workers, or raise the limit (ulimit -n, ulimit -u).",
                **_context(self._info, "start"),
            ) from error.with_traceback(None)


def with_thread(call: str, start: Callable[..., Any], *args: Any) -> Any:
    """Return `start(*args)`, which starts a thread.

    Args:
        call: name of the user's call, for the message.
        start: the function.
        *args: its arguments.

    Raises:
        WorkerLost: the system refuses the thread.
    """
    try:
        return start(*args)
    except RuntimeError as error:
        raise WorkerLost(
            f"{call} failed: expected another thread, got none ({error}). Use fewer envs or workers, or raise the "
            f"limit (ulimit -u, docker --pids-limit, TasksMax=, kernel.pid_max).",
            phase="start",
        ) from error


def not_replaced(error: EnvherdError, options: ExecutorOptions) -> EnvherdError:
    """Return the loss of a worker or node that is not replaced after too many restarts; says so before its output."""
    return with_sentence(
        error,
        f"It is not replaced: ExecutorOptions.max_restarts={options.max_restarts} within "
        f"restart_window_s={options.restart_window_s:g} allows no further restart.",
    )


def with_sentence(error: EnvherdError, sentence: str) -> EnvherdError:
    """Return an error with one more sentence, before its output; the same if it has the sentence."""
    if sentence in error.message:  # it was raised before
        return error
    head, mark, output = error.message.partition("\nIt")
    return type(error)(
        f"{head} {sentence}{mark}{output}",
        remote_traceback=error.remote_traceback,
        **error.context,
    )


def worker_late(
    worker: WorkerProcess,
    timeout_s: float,
    phase: str,
    env_id: int | None = None,
) -> WorkerTimeout:
    """Read the stack of a worker that is out of time, kill it, and return the error."""
    stack = without_own_frames(worker.stack())
    worker.kill()
    worker.wait_exit(1.0)
    # An idle one was stopped, and has not taken its command yet.
    option = {
        "step": "step_timeout_s",
        "reset": "reset_timeout_s",
        IDLE: "step_timeout_s or reset_timeout_s",
    }.get(phase, "build_timeout_s")
    return WorkerTimeout(
        f"{_OPERATIONS.get(phase, phase)} failed: worker {_called(worker.info)} gave no answer within {timeout_s:g} s "
        f"{_in_words(phase, env_id)} and was killed ({_where(worker.info, worker.pid, worker.gpu)}). "
        f"Raise ExecutorOptions.{option} if it may take longer.\n"
        f"It was stuck in:\n{stack}",
        remote_traceback=stack,
        **_context(worker.info, phase, env_id, worker.pid),
    )


def not_forked(worker: WorkerProcess, why: Sequence[str]) -> ValueError:
    """Return the error for a worker that cannot be forked, for these reasons."""
    return ValueError(
        f"branch failed: expected a worker that can be forked, got {', '.join(why)} (worker {_called(worker.info)}, "
        f"{_where(worker.info, worker.pid, worker.gpu)}). A fork would break these: leave them out of the env, or "
        f"copy its state with save() and restore()."
    )


def factory_error(
    fault: Frame,
    worker: WorkerProcess,
    built: int | None = None,
) -> FactoryError:
    """Return the error for a factory that raised in a worker, or whose env was refused there.

    Args:
        fault: what the worker has reported.
        worker: that was to build the env.
        built: an env that the same call had built in this worker before.
    """
    env_id = fault["env_id"]
    message = fault["message"]
    advice = lacks_arguments(fault["type_name"], message)
    # Else the message is ours, of the builder or of a spec.
    if fault["type_name"] not in _OURS:
        message = (
            f"make_env failed: the factory raised {raised(fault['type_name'], message)}"
        )
        if built is not None:
            advice += (
                f" The same call had built env {numbering.first_env_id + built} in this process: if a process can have "
                f"only one such env, set ExecutorOptions(alone=True)."
            )
    return FactoryError(
        f"{message} (env {numbering.first_env_id + env_id}, worker {_called(worker.info)}, pid {worker.pid}"
        f"{_place(worker.gpu)}, phase build).{advice}",
        remote_traceback=without_own_frames(fault["traceback"]),
        type_name=fault["type_name"],
        type_module=fault["type_module"],
        **{
            **_context(worker.info, "build", env_id, worker.pid),
            "env_ids": (numbering.first_env_id + env_id,),
        },
    )


def raised(type_name: str, message: str) -> str:
    """Return an exception in one line; one without a message, as of `assert x`, is its type alone."""
    return ": ".join(filter(None, (type_name, message)))


def lacks_arguments(type_name: str, message: str) -> str:
    """Return advice for a factory that has arguments which nobody passes, by the exception that it raised; else ""."""
    if (
        type_name != "TypeError"
        or " missing " not in message
        or "argument" not in message
    ):
        return ""
    return " Factories get no arguments but those of env_kwargs=: pass them there, or bind them with functools.partial."


def env_error(
    faults: Sequence[Frame],
    worker_id: int,
    pid: int,
    gpu: str | None = None,
    *,
    is_interrupted: bool = False,
) -> EnvherdError:
    """Return the error for exceptions of envs: about the first env (run by `worker_id`), naming the others.

    Args:
        faults: of the worker.
        worker_id: of the pool.
        pid: of its process.
        gpu: that the worker was given.
        is_interrupted: the envs' episodes end with interrupted rows.
    """
    fault = first_fault(faults)
    env_id = numbering.first_env_id + fault["env_id"]
    worker_id += numbering.first_worker_id
    phase = fault["phase"]
    type_name = fault["type_name"]
    also = ""
    again = "reset this one to use it again"
    others = sorted(
        numbering.first_env_id + one["env_id"] for one in faults if one is not fault
    )
    if others:
        also = f" Envs {others} raised too."
        again = "reset these to use them again"
    raiser, kind, advice = _RAISERS.get(
        phase,
        ("the env", EnvError, "Its episode goes on."),
    )
    what = f"{raiser} raised {raised(type_name, fault['message'])}"
    if is_interrupted:
        advice = "All envs go on: the rows count as interrupted."
    whole = _WHOLE.get(phase, {})
    if type_name in whole:
        what = fault["message"]
    elif phase in ("step", "reset", "restore") and not is_interrupted:
        advice = f"The other envs go on; {again}."
    return whole.get(type_name, kind)(
        f"{phase} failed: {what} (env {env_id}, worker {worker_id}, pid {pid}{_place(gpu)}).{also} {advice}"
        f"{_ADVICE.get(type_name, '')}",
        remote_traceback=without_own_frames(fault["traceback"]),
        env_ids=(env_id, *others),
        worker_id=worker_id,
        pid=pid,
        phase=fault["phase"],
        type_name=type_name,
        type_module=fault["type_module"],
        reason=fault["message"],
    )


def merge_answers(
    asked: Iterable[int],
    take: Callable[[int], dict[int, Any]],
) -> dict[int, Any]:
    """Collect the answers of several workers or hosts into one dict.

    Args:
        asked: ids of workers or hosts.
        take: waits for the answer of one, env id -> value, or raises its error.

    Raises:
        EnvherdError: after all have answered: the first loss, or without one the first error of an env.
    """
    values: dict[int, Any] = {}
    errors: list[EnvherdError] = []
    for one in asked:
        try:
            values.update(take(one))
        except EnvherdError as error:
            errors.append(error)
    if errors:
        raise min(
            errors,
            key=lambda error: isinstance(error, (EnvError, FactoryError, SpecError)),
        )
    return values


def first_fault(faults: Sequence[Frame]) -> Frame:
    """Return the fault of the lowest env id."""
    return min(faults, key=lambda one: one["env_id"])


def log_stall(worker: WorkerProcess, phase: Phase, waited_s: float) -> None:
    """Log the stack of a worker in a long wait without a deadline."""
    log.warning(
        "worker %d has not answered for %.0f s, %s:\n%s",
        _called(worker.info),
        waited_s,
        _in_words(*phase),
        without_own_frames(worker.stack()),
    )


def log_notice(frame: Frame) -> None:
    """Log that an env draws from global random generators, or that entries of its infos are left out."""
    env_id = numbering.first_env_id + frame["env_id"]
    if frame["kind"] == "left_out":
        for name, why in frame["entries"].items():
            log.warning(
                "env %d: %r of its info is left out (%s). This is logged once.",
                env_id,
                name,
                why,
            )
    else:
        log.warning(
            "env %d drew from the global generators (%s) during %s: its data depend on which envs share its worker. "
            "ExecutorOptions(isolate_rng=True) makes them reproducible.",
            env_id,
            ", ".join(frame["generators"]),
            frame["phase"],
        )


def log_close_fault(frame: Frame) -> None:
    """Log the exception of an env's `close`."""
    log.warning(
        "closing env %s raised %s: %s",
        numbering.first_env_id + frame["env_id"],
        frame["type_name"],
        frame["message"],
    )


def _called(info: WorkerInfo) -> int:
    return numbering.first_worker_id + info.worker_id


def _place(gpu: str | None) -> str:
    """Return where a worker is, to go on after a comma: its GPU, and its share of a larger batch; "" for neither."""
    return "".join(f", {one}" for one in (gpu and f"gpu {gpu}", numbering.place) if one)


def _in_words(phase: str, env_id: int | None) -> str:
    """Return a phase in words: "in step of env 0", "in build", "while idle"."""
    if phase == IDLE:
        return "while idle"
    if env_id is None:
        return f"in {phase}"
    return f"in {phase} of env {numbering.first_env_id + env_id}"


def _where(info: WorkerInfo, pid: int = 0, gpu: str | None = None) -> str:
    """Return the envs and the process of a worker, in words; it has no pid before its start."""
    env_ids = [numbering.first_env_id + i for i in info.env_ids]
    span = f"env {env_ids[0]}"
    if len(env_ids) > 1:
        span = f"envs {env_ids[0]}-{env_ids[-1]}"
    process = f", pid {pid}" if pid else ""
    return f"{span}{process}, generation {info.generation}{_place(gpu)}"


def _context(
    info: WorkerInfo,
    phase: str,
    env_id: int | None = None,
    pid: int = 0,
) -> dict[str, Any]:
    return {
        "env_ids": tuple(numbering.first_env_id + i for i in info.env_ids),
        "env_id": None if env_id is None else numbering.first_env_id + env_id,
        "worker_id": _called(info),
        "pid": pid,
        "generation": info.generation,
        "phase": phase,
    }
