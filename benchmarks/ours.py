"""envherd's own ways to run envs, as contenders."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from benchmarks.pools import Contender, EndCounter, Job, Pool
from envherd.executor import ParallelEnv, SerialEnv

OURS, ONE, WIDE, SERIAL = (
    "envherd",
    "envherd, 1 worker",
    "envherd, 1 env per worker",
    "envherd SerialEnv",
)
AUTO = 'envherd, num_workers="auto"'
VIEWS, ROLLOUT, FIRST_K = (
    "envherd, copy=False",
    "envherd rollout(64)",
    "envherd, async first-K",
)
AS_GYMNASIUM, AS_SB3, AS_TORCHRL = (
    "envherd as Gymnasium",
    "envherd as SB3",
    "envherd as TorchRL",
)
AS_GYMNASIUM_WIDE, AS_SB3_WIDE = (
    "envherd as Gymnasium, a worker per core",
    "envherd as SB3, a worker per core",
)
ROLLOUT_STEPS = 64
_BOTH = ("gymnasium", "meltingpot")


def _open(
    job: Job,
    kind: Any = ParallelEnv,
    *,
    num_workers: int | str | None = None,
    **kwargs: Any,
) -> Any:
    return kind(
        job.num_envs,
        job.make_env,
        num_workers=num_workers or job.num_workers,
        seed=0,
        **kwargs,
    )


def drawn_actions(env: Any) -> list[tuple[Any, torch.Tensor]]:
    """Return one batch of random actions, `(key, [N, ...])` for each leaf, for repeated use."""
    td = env.rand_action()
    return [
        (leaf.key if len(leaf.key) > 1 else leaf.key[0], td[leaf.key])
        for leaf in env.action_spec
    ]


def _synchronous(
    job: Job,
    *,
    kind: Any = ParallelEnv,
    num_workers: int | str | None = None,
    **kwargs: Any,
) -> Pool:
    env = _open(job, kind, num_workers=num_workers, **kwargs)
    root = env.reset()
    actions = drawn_actions(env)

    def step() -> int:
        nonlocal root
        for key, value in actions:
            root.set(key, value)
        _, root = env.step_and_maybe_reset(root)
        return job.num_envs

    return Pool(step, env.close, lambda: env.statistics().episodes)


def _wide(job: Job) -> Pool:
    return _synchronous(job, num_workers=job.num_envs)


def _rollout(job: Job) -> Pool:
    env = _open(job)
    env.reset()
    actions = drawn_actions(env)

    def policy(root: Any) -> Any:
        for key, value in actions:
            root.set(key, value)
        return root

    data = None

    def collect() -> int:
        nonlocal data  # reused: fresh memory would cause page faults
        data = env.rollout(
            ROLLOUT_STEPS, policy, auto_reset=False, break_when_any_done=False, out=data
        )
        return job.num_envs * ROLLOUT_STEPS

    return Pool(collect, env.close, lambda: env.statistics().episodes)


def _send_on(env: Any, actions: list[tuple[Any, torch.Tensor]], env_ids: Any) -> None:
    """Act for received envs."""
    root = env.current(env_ids)
    for key, value in actions:
        root.set(key, value[env_ids])
    env.send(root, env_ids)


def _first_k(job: Job) -> Pool:
    """Act for the first envs that are ready: for half of all, as in `envherd size`.

    Like most peers, it returns only the results of steps; the caller has the roots already.
    """
    env = _open(job)
    root = env.reset()
    actions = drawn_actions(env)
    wanted = max(1, job.num_envs // 2)
    for key, value in actions:
        root.set(key, value)
    env.send(root)

    def step() -> int:
        _send_on(env, actions, env.recv(min_envs=wanted, with_root=False)["env_ids"])
        return wanted

    return Pool(step, env.close, lambda: env.statistics().episodes)


def _as_gymnasium(job: Job, *, num_workers: int | None = 1) -> Pool:
    from envherd.gymnasium import AsyncVectorEnv

    return stepped_arrays(
        AsyncVectorEnv([job.make_env] * job.num_envs, num_workers=num_workers),
        job,
        has_two_flags=True,
    )


def _as_sb3(job: Job, *, num_workers: int | None = 1) -> Pool:
    from envherd.sb3 import SubprocVecEnv

    return stepped_arrays(
        SubprocVecEnv([job.make_env] * job.num_envs, num_workers=num_workers),
        job,
        has_two_flags=False,
    )


def _as_torchrl(job: Job) -> Pool:
    from benchmarks.peers import stepped_tensordicts, torchrl_factory
    from envherd.torchrl import ParallelEnv as Facade

    # CartPoles are fastest in one worker.
    num_processes = 1 if job.family == "gymnasium" else job.num_workers
    return stepped_tensordicts(
        Facade(job.num_envs, torchrl_factory(job), num_processes=num_processes), job
    )


def _actions(space: Any, num_envs: int) -> np.ndarray:
    """Return one action for each env; if they are numbers, several different ones."""
    if getattr(space, "n", 0) and not space.shape:
        return np.arange(num_envs) % min(2, int(space.n)) + int(
            getattr(space, "start", 0)
        )
    space.seed(0)
    return np.stack([space.sample() for _ in range(num_envs)])


def stepped_arrays(env: Any, job: Job, *, has_two_flags: bool) -> Pool:
    """Return a pool of an env with arrays: Gymnasium's vector envs (two flags) or SB3's (one)."""
    env.reset()
    actions = _actions(
        env.single_action_space if has_two_flags else env.action_space, job.num_envs
    )
    ends = EndCounter()

    def step() -> int:
        answer = env.step(actions)
        if job.has_ends:
            ends.add((answer[2] | answer[3]) if has_two_flags else answer[2])
        return job.num_envs

    return Pool(step, env.close, ends.read if job.has_ends else Pool.episodes)


CONTENDERS = tuple(
    Contender(name=name, build=build, kind="ours", families=families)
    for name, build, families in (
        (OURS, _synchronous, _BOTH),
        (ONE, functools.partial(_synchronous, num_workers=1), _BOTH),
        (AUTO, functools.partial(_synchronous, num_workers="auto"), _BOTH),
        (WIDE, _wide, _BOTH),
        (VIEWS, functools.partial(_synchronous, copy=False), _BOTH),
        (SERIAL, functools.partial(_synchronous, kind=SerialEnv), _BOTH),
        (ROLLOUT, _rollout, _BOTH),
        (FIRST_K, _first_k, _BOTH),
        (AS_GYMNASIUM, _as_gymnasium, ("gymnasium",)),
        (AS_SB3, _as_sb3, ("gymnasium",)),
        (
            AS_GYMNASIUM_WIDE,
            functools.partial(_as_gymnasium, num_workers=None),
            ("gymnasium",),
        ),
        (AS_SB3_WIDE, functools.partial(_as_sb3, num_workers=None), ("gymnasium",)),
        (AS_TORCHRL, _as_torchrl, _BOTH),
    )
)
