"""Everything about an executor that most users never set: one frozen, keyword-only value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from envherd.workers.block.info_leaves import check_keys
from envherd.workers.options import BlockOptions, EnvType, InfoKeys, InfoPolicy

StartMethod = Literal["zygote", "spawn", "fork"]
LossPolicy = Literal["raise", "restart"]
ActionCheck = Literal["strict", "finite", "off"]
WorkerOutput = Literal["capture", "inherit"]


@dataclass(frozen=True, kw_only=True)
class ExecutorOptions:
    """How workers are started, watched and stopped, and how data is handed out.

    Attributes:
        start_method: "zygote" forks workers from a private helper that has imported `preload`
            (fast, memory shared); "spawn" executes a fresh interpreter for each worker; "fork"
            forks the helper without preloading anything.
        preload: modules that the helper imports before it forks. None: those that the factories
            refer to and what the env family needs.
        worker_threads: threads for OMP, MKL, OpenBLAS and torch in a worker; None leaves them alone.
        worker_output: "capture" keeps what workers print (the last lines are part of errors, and
            `worker_output(worker_id)` returns it); "inherit" lets it through to the console.
        build_timeout_s: seconds for a worker to start and build all its envs, and before that for the helper to
            import modules; None waits forever.
        reset_timeout_s: seconds for a reset; None waits forever (a stall is logged after `stall_log_s`).
        step_timeout_s: seconds for a step; None waits forever (a stall is logged after `stall_log_s`). A worker that
            has begun a reset in the same call (`step_and_maybe_reset`, rollouts) has `reset_timeout_s` in addition.
        stall_log_s: after so many seconds without a deadline, log the stack of the worker waited for.
        loss_grace_s: seconds that the other workers have to answer after a worker was lost, before the loss is raised
            (`on_worker_loss="raise"`). Envs that have not answered by then must be reset too, and the error's `partial`
            is None. None waits for all answers. The loss is logged at once in any case.
        close_timeout_s: seconds for `close()` in all, however many workers there are.
        on_worker_loss: "raise" a WorkerLost, or "restart" the worker and mark its rows `interrupted`.
        max_restarts: restarts of one worker within `restart_window_s` before a loss raises after all. The
            first is made at once, the others wait 0.1 s, 0.2 s, 0.4 s, ... while the other workers go on.
        restart_window_s: seconds.
        recycle_after: episodes of an env after which its worker is replaced by a new one, where that interrupts no row
            (see `executor.recycling`); for envs that leak. None: never.
        max_worker_memory: bytes of memory (USS) of a worker and of what its envs have started beyond which it is
            replaced likewise. None: no limit.
        check_actions: "strict" refuses values outside the spec, NaN and infinities; "finite" refuses
            only NaN, infinities and illegal indices; "off" checks shape and dtype alone.
        check_finite: also refuse NaN and infinities in observations and rewards (costs a pass over
            every float observation).
        isolate_rng: keep one state of python's and numpy's global generators per env.
        ring_frames: steps for which a `copy=False` batch stays valid, its own among them: the `ring_frames`-th step
            after its own overwrites it. Resets and rollouts overwrite none.
        poison: overwrite the rows of a `copy=False` batch as soon as they are no longer valid (with NaN
            and the largest integers), so that a program that uses one too long shows it at once.
        affinity: CPU ids for the workers, worker i gets `affinity[i % len]`; None leaves them free.
        nice: added to the workers' niceness.
        env_vars: further environment variables for the workers.
        infos: what becomes of what envs say beside their observations: "drop", "plain" (see
            `BatchedEnv.infos`; entries that are not plain data are left out) or "pickle" (as they are;
            entries that cannot be pickled are left out). What is left out is named once in the log.
        info_keys: entries of the infos that become leaves: `("info", NAME)`, and `("info", "_NAME")` for
            whether the env gave it. Names, a dict of names and values (or types) like theirs, "all" or
            None. Names and "all" are looked up in one more env, reset and stepped once.
        episode_seeds: seed every reset from (root seed, env id, episode); False leaves envs their own
            generators, except where `reset` is given seeds.
        env_type: what the envs take and give. "auto" goes by their class; "torch" says that envs of no known torch
            family are batched simulators with Gymnasium's methods and torch's tensors; "numpy" that they are not.
        pickle_replies: let `call` and `get` bring back arbitrary objects by pickle; off by default,
            plain data and arrays always work.
        reset_ahead: give every env two instances, in two processes of their own: while one is stepped, the other is
            reset for the next episode, and takes its place when that is asked for. The data are the same. Costs twice
            the processes and twice the envs' memory, and processor time that would have been idle; worth it where
            resets are long and cores are free. See docs/reset_ahead.md.
        first_env_id: what seeds call env 0. Executors of one root seed that each run a share of one large batch
            (on machines of their own, say) give the data of that batch, bit for bit, if each says where its begins.
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
    nice: int = 0
    env_vars: tuple[tuple[str, str], ...] = ()
    infos: InfoPolicy = "drop"
    info_keys: InfoKeys | None = None
    episode_seeds: bool = True
    env_type: EnvType = "auto"
    pickle_replies: bool = False
    reset_ahead: bool = False
    first_env_id: int = 0

    def for_block(self) -> BlockOptions:
        """Return what concerns the envs themselves."""
        return BlockOptions(
            isolate_rng=self.isolate_rng,
            check_finite=self.check_finite,
            infos=self.infos,
            info_keys=self.info_keys,
            episode_seeds=self.episode_seeds,
            env_type=self.env_type,
            first_env_id=self.first_env_id,
            reset_ahead=self.reset_ahead,
        )

    def _check_ahead(self) -> None:
        if self.reset_ahead and not self.episode_seeds:
            raise ValueError(
                "ExecutorOptions failed: expected episode_seeds=True with reset_ahead, got False. Where an env's own "
                "generator goes on from episode to episode (as the facades have it, which keep their host's seeding), "
                "no episode can begin before the last one has ended."
            )
        if self.reset_ahead and self.isolate_rng:
            raise ValueError(
                "ExecutorOptions failed: expected isolate_rng=False with reset_ahead, got True. What state the global "
                "generators have at the begin of an episode is known only when the one before it has ended."
            )

    @property
    def recycles(self) -> bool:
        """Whether workers are to be replaced between episodes."""
        return self.recycle_after is not None or self.max_worker_memory is not None

    @property
    def num_frames(self) -> int:
        """Frames in the ring: one more than are valid when expired ones are poisoned before they are used again."""
        return self.ring_frames + self.poison

    def __post_init__(self) -> None:
        """Refuse values that cannot work.

        Raises:
            ValueError: fewer than 2 ring frames, an unknown name, `info_keys` that are none, a negative env id, a
                limit below 1, or `reset_ahead` where an episode begins as the one before it ended.
        """
        check_keys(self.info_keys)
        self._check_ahead()
        if self.first_env_id < 0:
            raise ValueError(f"ExecutorOptions failed: expected first_env_id of at least 0, got {self.first_env_id}.")
        if self.ring_frames < 2:
            raise ValueError(f"ExecutorOptions failed: expected ring_frames of at least 2, got {self.ring_frames}.")
        for name in ("recycle_after", "max_worker_memory"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"ExecutorOptions failed: expected {name} of at least 1, or None, got {value!r}.")
        choices = (
            ("start_method", get_args(StartMethod)),
            ("on_worker_loss", get_args(LossPolicy)),
            ("check_actions", get_args(ActionCheck)),
            ("worker_output", get_args(WorkerOutput)),
            ("infos", get_args(InfoPolicy)),
            ("env_type", get_args(EnvType)),
        )
        for name, allowed in choices:
            if getattr(self, name) not in allowed:
                raise ValueError(f"ExecutorOptions failed: expected {name} in {allowed}, got {getattr(self, name)!r}.")
