"""`ParallelEnv`: the executor over worker processes."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

from envherd.executor.assembly import make_pool
from envherd.executor.batched import BatchedEnv
from envherd.executor.batches.arguments import as_count
from envherd.executor.batches.transfer import as_device
from envherd.executor.keywords import names_right_keyword, refuses_keywords
from envherd.executor.options import ExecutorOptions
from envherd.executor.sending.blueprint import (
    EnvKwargs,
    MakeEnv,
    as_factories,
    check_agreement,
    checked_options,
    choose_apart,
    choose_workers,
    counted,
    draw,
    num_runs,
)
from envherd.workers.build import Factory


class ParallelEnv(BatchedEnv):
    """N envs in worker processes, stepped as one batch over shared memory.

    Args:
        num_envs: N, or a list of N factories alone; "auto" measures an env for some seconds and decides (see
            `envherd size` and docs/sizing.md).
        make_env: a callable that builds one env, or a list of N callables (different tasks). It is
            pickled by value and called inside a worker; this process never builds an env. A name of the command line
            (`"CartPole-v1"`, `"meltingpot:clean_up"`) stands for a callable.
        num_workers: processes; None for one per usable core, at most N; "auto" measures and decides. Envs are
            spread over them in contiguous blocks.
        env_kwargs: keyword arguments of the factory calls: one dict for all, or a list of N.
        seed: root seed of everything random; None draws one (see the attribute `seed`).
        device: of the batches; None leaves them on the CPU.
        copy: True hands out batches that nothing overwrites; False hands out views of a ring. The
            `options.ring_frames`-th step after a view's own step overwrites it; resets and rollouts do not.
        options: see `ExecutorOptions`.

    Raises:
        ValueError: more envs or workers than the machine can hold.
        FactoryError: not a factory, cannot be pickled, returned no env, or raised.
        SpecError: envs of one factory have different specs.
        WorkerLost, WorkerTimeout: a worker did not start.
    """

    #: `(specs, factories, keyword arguments of each call)`: refuses envs that do not fit together.
    _check_specs: ClassVar[Callable[..., None]] = staticmethod(check_agreement)

    @names_right_keyword
    def __init__(  # noqa: PLR0913  # the signature that users know from other vector envs
        self,
        num_envs: int | Literal["auto"] | Sequence[Factory | str],
        make_env: MakeEnv | None = None,
        *,
        num_workers: int | Literal["auto"] | None = None,
        env_kwargs: EnvKwargs = None,
        seed: int | None = None,
        device: Any = None,
        copy: bool = True,
        options: ExecutorOptions | None = None,
    ) -> None:
        count, make_env = counted(num_envs, make_env)
        options = checked_options(options, copy=copy)
        where = as_device(device)  # refused before anything is measured
        if options.alone and not isinstance(count, str):
            num_workers = choose_apart(count, num_workers)
        if isinstance(count, str) or isinstance(num_workers, str):
            # Imported here: only "auto" needs it.
            from envherd.executor.sizing.recommending import resolve

            count, num_workers = resolve(
                count,
                num_workers,
                make_env,
                env_kwargs,
                options,
            )
        factories = as_factories(count, make_env)
        num_workers = choose_workers(count, num_workers, fewest=num_runs(factories))
        blueprint = draw(factories, env_kwargs, num_workers, seed, options)
        pool = make_pool(blueprint, options)
        try:
            pool.start()
            self._branch_pool = pool
            self._check_specs(
                pool.specs,
                factories,
                [call.sent.kwargs for call in blueprint.calls.values()],
            )
            super().__init__(
                pool,
                seed=blueprint.root_seed,
                device=where,
                copy=copy,
                options=options,
            )
        except BaseException:
            pool.close(timeout_s=0)
            raise

    @refuses_keywords(
        reseed="After the branch, call a method of the env that seeds its generators, for each copy: "
        "env.call(METHOD, SEED, env_ids=[TARGET])."
    )
    def branch(self, source_id: int, target_ids: Any) -> None:
        """Replace envs by copies of another one, with the whole state of its simulator, in the middle of its episode.

        The worker of the source forks itself, and the copies take the places of the workers of the targets. The env
        needs no methods for this, unlike for `save`. Otherwise the effect is that of `restore(save(...))`:
        `current()` returns the source's root for the targets. With equal actions, source and copies return equal data,
        bit for bit, until a reset. The next episode of a target has the number after the source's, and the target's
        seed of that number. See docs/checkpoints.md.

        Args:
            source_id: the env that is copied. It must have been reset; its episode may have ended.
            target_ids: the envs that are replaced, as in `send`. Their episodes are abandoned, and their envs are not
                closed.

        Raises:
            ValueError: the envs have no worker process each, unlike specs, or a worker that cannot be forked (it has
                threads, sockets, processes, a GPU or an OpenGL context) or is of the portable pool; nothing
                has changed.
            ResetNeeded: the source has no episode.
            Busy: one of these envs was sent and not received.
            WorkerLost, WorkerTimeout: the source is lost, or a copy; then the targets need a reset.
        """
        from envherd.executor.guests.branching import branch

        as_count("branch", "source_id", source_id, least=0)
        with self._guard:
            source = int(self._exchange.as_ids(source_id)[0])
            targets = self._exchange.as_ids(target_ids)
            self._check_branch(source, targets.tolist())
            if len(targets):
                branch(self._engine, source, targets, self._branch_pool.branch)

    def _check_branch(self, source: int, targets: list[int]) -> None:
        """Refuse a branch between envs that cannot take each other's place."""
        if not self._branch_pool.can_fork:
            raise ValueError(
                f"branch failed: expected workers that can fork, got the portable pool. Use "
                f"`env.restore(env.save([{source}]) * {len(targets)}, {targets})`."
            )
        if source in targets:
            raise ValueError(
                f"branch failed: expected targets other than the source, got env {source} as both."
            )
        pool = self._branch_pool
        if not all(
            len(pool.blueprint.blocks[pool.worker_of[env_id]]) == 1
            for env_id in (source, *targets)
        ):
            raise ValueError(
                f"branch failed: expected a worker process for each env, got {self.num_envs} envs in "
                f"{self.num_workers}. Pass num_workers={self.num_envs}."
            )
        if self.options.env_threads:
            raise ValueError(
                "branch failed: expected an executor without env_threads, got env_threads=True."
            )
        for env_id in targets:
            if self.specs[env_id] != self.specs[source]:
                raise ValueError(
                    f"branch failed: expected envs with the spec of env {source}, got env {env_id} with another: "
                    f"{self.specs[source].difference(self.specs[env_id])}."
                )
