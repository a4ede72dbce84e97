"""The options of an executor that most users never set: one frozen, keyword-only value."""

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple, get_args

from envherd.executor.keywords import names_right_keyword
from envherd.shm.platforms import usable_cpus
from envherd.workers.infos import check_keys
from envherd.workers.options import BlockOptions, EnvType, InfoKeys, InfoPolicy, Infos

StartMethod = Literal["zygote", "spawn", "portable"]
LossPolicy = Literal["raise", "restart"]
ErrorPolicy = Literal["raise", "interrupt"]
ActionCheck = Literal["strict", "finite", "off"]
WorkerOutput = Literal["capture", "inherit"]
#: Environment variables: a dict, or pairs.
EnvVars = Mapping[str, str] | tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True)
class ExecutorOptions:
    """How workers are started, watched and stopped, and how data is handed out.

    Attributes:
        start_method: "zygote" forks workers from a helper process that has imported `preload`
            (fast, memory shared), and that executors with the same modules share; "spawn" executes
            a fresh interpreter for each worker; "portable" starts workers by `multiprocessing`, on every platform (see
            docs/portable.md). It is also used if the system lacks what the others need.
        preload: modules that the helper imports before it forks; `()` for none. None: those that the factories
            refer to and those of the env family.
        worker_threads: threads for OMP, MKL, OpenBLAS and torch in a worker; None does not set them.
        worker_output: "capture" keeps workers' output (errors quote its last lines, and `worker_output(worker_id)`
            returns it); "inherit" passes it to the console.
        build_timeout_s: seconds for a worker to start and build all its envs, and before that for the helper to
            import modules; None waits forever.
        reset_timeout_s: seconds for a reset; None waits forever (a stall is logged after `stall_log_s`).
        step_timeout_s: seconds for a step; None waits forever (a stall is logged after `stall_log_s`). A worker that
            has begun a reset in the same call (`step_and_maybe_reset`, rollouts) has `reset_timeout_s` in addition. A
            pause of all processes (a suspended job) counts as at most a second.
        stall_log_s: seconds after which the executor logs the stack of a worker that it waits for without a deadline.
        loss_grace_s: seconds for the other workers to answer after a worker was lost, before the loss is raised
            (`on_worker_loss="raise"`). Envs without an answer by then must also be reset, and the error's `partial`
            is None. None waits for all answers. The loss is logged at once in any case.
        close_timeout_s: seconds for `close()` in all, however many workers there are.
        on_worker_loss: "raise" a WorkerLost, or "restart" the worker and mark its rows `interrupted`.
        on_env_error: "raise" an EnvError if a step or reset of an env raises; or "interrupt" its episode: its row is
            marked `interrupted`, the error is logged, and all continue. A reset that raises is made again with a new
            instance of the env, for its next episode. Not for envs that are batches of rows.
        max_restarts: restarts of one worker within `restart_window_s`; the next loss raises. The
            first is made at once, the others wait 0.1 s, 0.2 s, 0.4 s, ... while the other workers continue.
            With `on_env_error="interrupt"` also the exceptions of one env without a step in between; the next raises.
        restart_window_s: seconds.
        recycle_after: episodes of an env after which its worker is replaced by a new one, as soon as all envs of the
            worker are between episodes; for envs that leak. None: never.
        max_worker_memory: largest memory (USS, bytes) of a worker and the processes of its envs, beyond which it is
            replaced likewise. None: no limit.
        check_actions: "strict" refuses values outside the spec, NaN and infinities; "finite" refuses
            only NaN, infinities and illegal indices; "off" checks shape and dtype alone.
        check_finite: also refuse NaN and infinities in observations and rewards (costs a pass over
            every float observation).
        isolate_rng: keep one state of python's and numpy's global generators per env.
        ring_frames: number of steps for which a `copy=False` batch stays valid, including its own: the `ring_frames`-th
            step after it may overwrite it. Resets and rollouts do not overwrite it. 2 needs as much memory as 3.
        poison: overwrite the rows of a `copy=False` batch with NaN and the largest integers as soon as they are no
            longer valid, so that late uses show at once.
        affinity: CPU ids for the workers, worker i gets `affinity[i % len]`; None leaves them free.
        env_vars: further environment variables for the workers: a dict or pairs of names and values for all, a list of
            one dict per worker, or a function from the worker's id to its dict (called in this process). They are set
            before a worker imports modules of envs. So with a list or a function, and with `gpus`, no helper imports
            modules for the workers, unless `preload` names them.
        gpus: gives each worker one GPU, in turn: "all" that this process sees, or their indices. Sets
            CUDA_VISIBLE_DEVICES (and AMD's HIP_VISIBLE_DEVICES) and the renderers' MUJOCO_EGL_DEVICE_ID and
            EGL_VISIBLE_DEVICES; `env_vars` may set them differently. None leaves the workers the GPUs of this process.
        infos: which of the envs' infos leave the workers. "drop": none. A dict from names to example values (or
            types): these entries become leaves `("info", NAME)`, with `("info", "_NAME")` for whether the env returned
            it.
            "plain": `BatchedEnv.infos` returns the dicts, without entries that are not plain data. "pickle": the same
            with any object that can be pickled, also from `call` and `get`; the workers must then be trusted. Entries
            that are left out are logged once by name.
        episode_statistics: put return, length and time of the episode so far into every batch, in the root and in
            `next`: `("episode", "return")`, `"length"`, `"time"`; of a group `("agents", "episode", "return")`. In a
            `next` with `done`, they cover the whole episode. The facades of Gymnasium and SB3 put them into
            the infos of steps that end episodes, as `RecordEpisodeStatistics` and `Monitor` do.
        episode_seeds: seed every reset from (root seed, env id, episode); False leaves envs their own
            generators, except where `reset` gets seeds.
        env_type: what the envs take and return. "auto" decides by their class; "torch" declares that envs of no known
            torch family are batched simulators with Gymnasium's methods on torch tensors; "numpy" declares that they
            are not.
        alone: give every env a process: for envs that disturb each other in one (`envherd check ENV --together 2` shows
            it). The number of workers is that of the envs.
        env_threads: run each env of a worker on a separate thread, on which it is also built and closed: for envs that
            mostly wait (for a game, a browser, a simulator behind a socket), many of which can then share a process. An
            env that computes, or holds Python's GIL while it waits, still blocks the other envs of its worker: leave
            the option off for such envs, and use more workers. The envs of a worker share its global random generators,
            and are closed at the same time. See docs/asynchronous.md.
        first_env_id: id of env 0 for seeds. Executors with the same root seed can each run a share of one large batch
            (on different machines, say). If each sets the id of its first env, their data equal that batch's, bit for
            bit.
    """

    start_method: StartMethod = "zygote"
    preload: tuple[str, ...] | None = None
    worker_threads: int | None = 1
    worker_output: WorkerOutput = "capture"
    build_timeout_s: float | None = 300.0
    reset_timeout_s: float | None = None
    step_timeout_s: float | None = None
    stall_log_s: float = 30.0
    loss_grace_s: float | None = 1.0
    close_timeout_s: float = 5.0
    on_worker_loss: LossPolicy = "raise"
    on_env_error: ErrorPolicy = "raise"
    max_restarts: int = 3
    restart_window_s: float = 60.0
    recycle_after: int | None = None
    max_worker_memory: int | None = None
    check_actions: ActionCheck = "strict"
    check_finite: bool = False
    isolate_rng: bool = False
    ring_frames: int = 4
    poison: bool = False
    affinity: tuple[int, ...] | None = None
    env_vars: EnvVars | Sequence[EnvVars] | Callable[[int], EnvVars] = ()
    gpus: Literal["all"] | Sequence[int] | None = None
    infos: InfoPolicy | InfoKeys | Infos = "drop"
    episode_statistics: bool = False
    episode_seeds: bool = True
    env_type: EnvType = "auto"
    alone: bool = False
    env_threads: bool = False
    first_env_id: int = 0

    def for_block(self) -> BlockOptions:
        """Return the options that concern the envs themselves."""
        return BlockOptions(
            isolate_rng=self.isolate_rng,
            check_finite=self.check_finite,
            infos=self.info_policy,
            info_keys=self.info_keys,
            episode_statistics=self.episode_statistics,
            episode_seeds=self.episode_seeds,
            env_type=self.env_type,
            first_env_id=self.first_env_id,
            env_threads=self.env_threads,
            limits_resets=self.reset_timeout_s is not None,
        )

    @property
    def interrupts(self) -> bool:
        """Whether rows may be marked `interrupted`."""
        return self.on_worker_loss == "restart" or self.on_env_error == "interrupt"

    def refuse_interrupts(self, where: str) -> None:
        """Raise ValueError if exceptions of envs are to end their episodes; `where` is what cannot do that."""
        if self.on_env_error == "interrupt":
            raise ValueError(
                f"{where} failed: expected on_env_error='raise', got 'interrupt'. Catch the exception in a wrapper "
                f"around the env, and return the last observation with truncated=True."
            )

    @property
    def info_policy(self) -> InfoPolicy:
        """What `infos` says about dicts."""
        return self._read_infos().policy

    @property
    def info_keys(self) -> InfoKeys | None:
        """What `infos` says about leaves."""
        return self._read_infos().keys

    def _read_infos(self) -> Infos:
        infos: Any = self.infos
        if isinstance(infos, Infos):
            return infos
        return Infos(policy=infos) if infos in _INFO_POLICIES else Infos(keys=infos)

    @property
    def recycles(self) -> bool:
        """Whether workers are replaced between episodes."""
        return self.recycle_after is not None or self.max_worker_memory is not None

    @property
    def num_frames(self) -> int:
        """Frames in the ring: one more than valid ones if expired frames are poisoned before they are reused."""
        return max(_FEWEST_FRAMES, self.ring_frames + self.poison)

    def __post_init__(self) -> None:
        """Refuse values that can never work.

        Raises:
            ValueError, TypeError: with the name, the expected values and the actual one.
        """
        for name, allowed in _CHOICES.items():
            if (value := getattr(self, name)) not in allowed:
                raise _refusal(
                    name,
                    f"one of {allowed}",
                    value,
                    _INSTEAD_OF.get(f"{name}={value!r}", ""),
                )
        for name, limit in _NUMBERS.items():
            limit.check(name, getattr(self, name))
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise _refusal(name, "True or False", getattr(self, name))
        self._check_lists()
        if not isinstance(self.infos, Infos) and self.infos not in _INFO_POLICIES:
            check_keys(self.infos)
        if self.env_threads and self.isolate_rng:
            raise ValueError(
                "ExecutorOptions failed: expected isolate_rng=False with env_threads, got True: the process's "
                "generators are shared."
            )

    def check_here(self) -> None:
        """Refuse options that do not fit the machine of the workers.

        Raises:
            ValueError: a module of `preload` is not installed, or this process may not use a processor of `affinity`.
        """
        for name in self.preload or ():
            if find_spec(name.partition(".")[0]) is None:
                raise _refusal("preload", "names of modules that are installed", name)
        cpus = set(usable_cpus())
        if self.affinity is not None and not cpus.issuperset(self.affinity):
            raise _refusal(
                "affinity",
                f"some of the CPU ids {sorted(cpus)} that this process may use",
                self.affinity,
            )

    def _check_lists(self) -> None:
        if not (self.preload is None or _is_list_of(str, self.preload)):
            raise _refusal(
                "preload",
                "a sequence of module names, or None",
                self.preload,
            )
        if not (
            self.affinity is None or (_is_list_of(int, self.affinity) and self.affinity)
        ):
            raise _refusal("affinity", "a sequence of CPU ids, or None", self.affinity)
        each: Any = self.env_vars if self.has_list else [self.env_vars]
        if not callable(self.env_vars) and not all(map(are_texts, each)):
            raise _refusal(
                "env_vars",
                "a dict of names and values, or pairs of them, all texts (or a list of dicts, or a function)",
                self.env_vars,
            )
        gpus: Any = self.gpus
        if gpus not in (None, "all"):
            is_list = _is_list_of(int, gpus) and len(gpus) > 0
            if (
                not is_list
                or min(gpus) < 0
                or any(isinstance(one, bool) for one in gpus)
            ):
                raise _refusal(
                    "gpus",
                    "'all', a sequence of indices of GPUs, or None",
                    gpus,
                )

    @property
    def has_list(self) -> bool:
        """Whether `env_vars` is a list of one dict per worker."""
        return isinstance(self.env_vars, (list, tuple)) and any(
            isinstance(one, Mapping) for one in self.env_vars
        )

    @property
    def differ_by_worker(self) -> bool:
        """Whether workers have different environment variables."""
        return callable(self.env_vars) or self.has_list or self.gpus is not None


#: An option, or value of one, that earlier versions had -> what to do instead.
_INSTEAD_OF = {
    "capsules": "Keep the seed and the actions, and run the episode in a SerialEnv (docs/errors.md).",
    "info_keys": 'Use infos={"NAME": int}.',
    "nice": "Call os.setpriority(os.PRIO_PROCESS, 0, N) in the factory.",
    "pickle_replies": 'Use infos="pickle".',
    "reset_ahead": "Step with send and recv: other envs are then stepped while one is reset.",
    "start_method='fork'": 'Use start_method="zygote" with preload=().',
}
_INFO_POLICIES = get_args(InfoPolicy)

ExecutorOptions.__init__ = names_right_keyword(ExecutorOptions.__init__, _INSTEAD_OF)  # type: ignore[method-assign]


def are_texts(variables: Any) -> bool:
    """Return whether a value is a dict of texts, or pairs of them."""
    try:
        return all(
            isinstance(text, str) for pair in dict(variables).items() for text in pair
        )
    except (TypeError, ValueError):
        return False


def _is_list_of(kind: type, value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(
        isinstance(item, kind) for item in value
    )


class _Number(NamedTuple):
    """The range of a number.

    Attributes:
        least: the lowest value; with `is_above`, values must be above it.
        is_whole: whether it must be an integer.
        is_optional: whether None is allowed.
    """

    least: float
    is_above: bool = False
    is_whole: bool = False
    is_optional: bool = False

    def check(self, name: str, value: Any) -> None:
        """Raise ValueError unless a value is such a number."""
        if value is None and self.is_optional:
            return
        kinds: Any = numbers.Integral if self.is_whole else numbers.Real
        is_kind = isinstance(value, kinds) and not isinstance(value, bool)
        if (
            is_kind
            and self.least <= value < math.inf
            and not (self.is_above and value == self.least)
        ):
            return
        kind = "an integer" if self.is_whole else "a number"
        lowest = (
            f"above {self.least:g}" if self.is_above else f"of at least {self.least:g}"
        )
        raise _refusal(
            name,
            f"{kind} {lowest}{', or None' if self.is_optional else ''}",
            value,
        )


def _refusal(name: str, expected: str, got: Any, advice: str = "") -> ValueError:
    return ValueError(
        f"ExecutorOptions failed: expected {name} to be {expected}, got {got!r}. {advice}".rstrip()
    )


#: An env's latest step, the root of a second reset in a row, and its next step are in different frames; see
#: `Positions.reset_columns`.
_FEWEST_FRAMES = 3
_SECONDS = _Number(0, is_above=True)
_SECONDS_OR_NONE = _Number(0, is_above=True, is_optional=True)
_COUNT_OR_NONE = _Number(1, is_whole=True, is_optional=True)
_NUMBERS = {
    "worker_threads": _COUNT_OR_NONE,
    "build_timeout_s": _SECONDS_OR_NONE,
    "reset_timeout_s": _SECONDS_OR_NONE,
    "step_timeout_s": _SECONDS_OR_NONE,
    "stall_log_s": _SECONDS,
    "loss_grace_s": _Number(0, is_optional=True),
    "close_timeout_s": _Number(0),
    "max_restarts": _Number(0, is_whole=True),
    "restart_window_s": _SECONDS,
    "recycle_after": _COUNT_OR_NONE,
    "max_worker_memory": _COUNT_OR_NONE,
    "ring_frames": _Number(2, is_whole=True),
    "first_env_id": _Number(0, is_whole=True),
}
_CHOICES: dict[str, tuple[str, ...]] = {
    "start_method": get_args(StartMethod),
    "worker_output": get_args(WorkerOutput),
    "on_worker_loss": get_args(LossPolicy),
    "on_env_error": get_args(ErrorPolicy),
    "check_actions": get_args(ActionCheck),
    "env_type": get_args(EnvType),
}
_SWITCHES = (
    "check_finite",
    "isolate_rng",
    "poison",
    "episode_statistics",
    "episode_seeds",
    "alone",
    "env_threads",
)
