"""Other libraries' vector envs, each stepped in its own fastest documented loop. Their packages are optional.

Those that can fork do: that changes only their start time (which is measured elsewhere, with their defaults).
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from benchmarks.ours import stepped_arrays
from benchmarks.pools import Contender, EndCounter, Job, Pool
from benchmarks.work import import_melting_pot

GYMNASIUM_SYNC, GYMNASIUM_ASYNC = "Gymnasium SyncVectorEnv", "Gymnasium AsyncVectorEnv"
SB3_DUMMY, SB3_SUBPROC = "SB3 DummyVecEnv", "SB3 SubprocVecEnv"
TORCHRL_SERIAL, TORCHRL_PARALLEL, TORCHRL_ASYNC = (
    "TorchRL SerialEnv",
    "TorchRL ParallelEnv",
    "TorchRL AsyncEnvPool",
)
TIANSHOU, ENVPOOL, PUFFERLIB = (
    "tianshou ShmemVectorEnv",
    "EnvPool",
    "PufferLib Multiprocessing",
)


def _gymnasium(kind: str, job: Job) -> Pool:
    import gymnasium

    return stepped_arrays(
        getattr(gymnasium.vector, kind)([job.make_env] * job.num_envs),
        job,
        has_two_flags=True,
    )


def _sb3(kind: str, job: Job, **kwargs: Any) -> Pool:
    from stable_baselines3.common import vec_env

    return stepped_arrays(
        getattr(vec_env, kind)([job.make_env] * job.num_envs, **kwargs),
        job,
        has_two_flags=False,
    )


def torchrl_factory(job: Job) -> Any:
    """Return a factory of TorchRL's version of an env: its own Melting Pot env, or its Gymnasium wrapper."""
    from torchrl.envs import GymWrapper, MeltingpotEnv

    if job.family == "meltingpot":
        # For envs in this process. Workers that TorchRL spawns import by themselves.
        import_melting_pot()
        return functools.partial(
            MeltingpotEnv,
            job.make_env.name,  # type: ignore[attr-defined]  # its factory
            max_steps=job.episode or None,
        )
    return functools.partial(_wrapped, GymWrapper, job.make_env)


def _wrapped(wrapper: Any, make_env: Any) -> Any:
    return wrapper(make_env(), categorical_action_encoding=True)


def stepped_tensordicts(env: Any, job: Job) -> Pool:
    """Return a pool of a TorchRL env, stepped by `step_and_maybe_reset`."""
    root = env.reset()
    key = env.action_key
    actions = env.rand_action(root.clone()).get(key)
    ends = EndCounter()

    def step() -> int:
        nonlocal root
        td, root = env.step_and_maybe_reset(root.set(key, actions))
        if job.has_ends:
            ends.add(td["next", "done"])
        return job.num_envs

    return Pool(step, env.close, ends.read if job.has_ends else Pool.episodes)


def _torchrl(kind: str, job: Job, **kwargs: Any) -> Pool:
    from torchrl import envs

    return stepped_tensordicts(
        getattr(envs, kind)(job.num_envs, torchrl_factory(job), **kwargs), job
    )


def _torchrl_async(job: Job) -> Pool:
    from torchrl.envs import AsyncEnvPool

    env = AsyncEnvPool(
        [torchrl_factory(job)] * job.num_envs,
        backend="multiprocessing",
        exchange="shm",
        stack="dense",
    )
    root = env.reset()
    key, wanted = env.action_key, min(job.num_workers, job.num_envs)
    actions = torch.arange(job.num_envs) % 2
    env.async_step_and_maybe_reset_send(root.set(key, actions))
    ends = EndCounter()

    def step() -> int:
        td, root = env.async_step_and_maybe_reset_recv(min_get=wanted)
        if job.has_ends:
            ends.add(td["next", "done"])
        env_ids = torch.as_tensor(_ids(root))
        env.async_step_and_maybe_reset_send(root.set(key, actions[env_ids]))
        return len(env_ids)

    return Pool(step, env.close, ends.read if job.has_ends else Pool.episodes)


def _ids(td: Any) -> Any:
    found = td["env_index"]
    return found.tolist() if hasattr(found, "tolist") else list(found)


def _tianshou(job: Job) -> Pool:
    from tianshou.env import ShmemVectorEnv

    env = ShmemVectorEnv([job.make_env] * job.num_envs)
    env.reset()
    actions = np.arange(job.num_envs) % 2
    ends = EndCounter()

    def step() -> int:
        _, _, terminated, truncated, _ = env.step(actions)
        done = terminated | truncated
        if done.any():
            env.reset(np.flatnonzero(done))
            ends.add(done)
        return job.num_envs

    return Pool(step, env.close, ends.read if job.has_ends else Pool.episodes)


def _envpool(job: Job) -> Pool:
    import envpool

    env = envpool.make(
        "CartPole-v1",
        env_type="gymnasium",
        num_envs=job.num_envs,
        num_threads=job.num_workers,
    )
    return stepped_arrays(env, job, has_two_flags=True)


def _pufferlib(job: Job) -> Pool:
    """Workers and caller poll bytes, so the caller needs a core too. A batch is views of the shared memory.

    An end is followed by a step that resets.
    """
    import pufferlib.emulation
    import pufferlib.vector

    env = pufferlib.vector.make(
        functools.partial(
            pufferlib.emulation.GymnasiumPufferEnv, env_creator=job.make_env
        ),
        backend=pufferlib.vector.Multiprocessing,
        num_envs=job.num_envs,
        num_workers=next(
            n
            for n in range(max(1, job.num_workers - 1), 0, -1)
            if job.num_envs % n == 0
        ),
        overwork=True,  # it counts cores without hyperthreads, and refuses more workers
    )
    env.async_reset()
    env.recv()
    actions = env.action_space.sample()
    ends = EndCounter()

    def step() -> int:
        env.send(actions)
        _, _, terminated, truncated, *_ = env.recv()
        if job.has_ends:
            ends.add(terminated | truncated)
        return job.num_envs

    return Pool(step, env.close, ends.read if job.has_ends else Pool.episodes)


def _peer(
    name: str, build: Any, peer: str, package: str, *, takes_meltingpot: bool = False
) -> Contender:
    families = ("gymnasium", "meltingpot") if takes_meltingpot else ("gymnasium",)
    return Contender(
        name=name, build=build, peer=peer, package=package, families=families
    )


CONTENDERS = (
    _peer(
        GYMNASIUM_SYNC,
        functools.partial(_gymnasium, "SyncVectorEnv"),
        "gymnasium",
        "gymnasium",
    ),
    _peer(
        GYMNASIUM_ASYNC,
        functools.partial(_gymnasium, "AsyncVectorEnv"),
        "gymnasium",
        "gymnasium",
    ),
    _peer(
        SB3_DUMMY, functools.partial(_sb3, "DummyVecEnv"), "sb3", "stable_baselines3"
    ),
    _peer(
        SB3_SUBPROC,
        functools.partial(_sb3, "SubprocVecEnv", start_method="fork"),
        "sb3",
        "stable_baselines3",
    ),
    _peer(
        TORCHRL_SERIAL, functools.partial(_torchrl, "SerialEnv"), "torchrl", "torchrl"
    ),
    _peer(
        TORCHRL_PARALLEL,
        functools.partial(_torchrl, "ParallelEnv", mp_start_method="fork"),
        "torchrl",
        "torchrl",
        takes_meltingpot=True,
    ),
    _peer(TORCHRL_ASYNC, _torchrl_async, "torchrl", "torchrl"),
    _peer(TIANSHOU, _tianshou, "tianshou", "tianshou"),
    _peer(PUFFERLIB, _pufferlib, "pufferlib", "pufferlib"),
    _peer(ENVPOOL, _envpool, "envpool", "envpool"),
)
