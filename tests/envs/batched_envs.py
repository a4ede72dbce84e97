"""Factories of envs that are batches themselves; importing this module does not import torch."""

from functools import partial
from typing import Any

from tests.contracts.family import IS_FULL

NUM_ROWS = 5


def cartpole(*, draws: bool = False) -> Any:
    """Make one row: episodes that fall over, or are cut off after 15 steps."""
    import gymnasium

    return gymnasium.make(
        "CartPole-v1", max_episode_steps=15, render_mode="rgb_array" if draws else None
    )


def vector_env(kind: str, mode: str) -> Any:
    """Make a vector env of CartPoles."""
    import gymnasium
    from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

    from tests.envs.vector_envs import LoopVectorEnv

    autoreset, make_row = AutoresetMode[mode], partial(cartpole, draws=IS_FULL)
    if kind == "async":
        return AsyncVectorEnv([make_row] * NUM_ROWS, autoreset_mode=autoreset)
    if kind == "default":
        return gymnasium.make_vec(
            "CartPole-v1", NUM_ROWS, render_mode="rgb_array" if IS_FULL else None
        )
    if kind == "custom":
        return LoopVectorEnv(NUM_ROWS, autoreset, make_row=cartpole)
    env = SyncVectorEnv([make_row] * NUM_ROWS, autoreset_mode=autoreset)
    return (
        gymnasium.wrappers.vector.RecordEpisodeStatistics(env)
        if kind == "wrapped"
        else env
    )


def atari(mode: str, num_rows: int = NUM_ROWS) -> Any:
    """Make ALE's own vector env of Pong, cut off after 200 frames (50 steps)."""
    from ale_py.vector_env import AtariVectorEnv

    settings = {
        "max_num_frames_per_episode": 200,
        "noop_max": 8,
        "stack_num": 1,
        "use_fire_reset": False,
    }
    return AtariVectorEnv(
        "pong", num_rows, num_threads=1, autoreset_mode=_mode(mode), **settings
    )


def _mode(name: str) -> Any:
    from gymnasium.vector import AutoresetMode

    return AutoresetMode[name]


def pool(api: str = "gymnasium", *, draws: bool = False, **config: Any) -> Any:
    """Make an EnvPool of CartPoles."""
    import envpool

    settings = {
        "num_envs": NUM_ROWS,
        "num_threads": 1,
        "max_episode_steps": 15,
        **config,
    }
    if draws:
        settings["render_mode"] = "rgb_array"
    return envpool.make("CartPole-v1", env_type=api, **settings)


def balance(**kwargs: Any) -> Any:
    """Make the simulator of the examples: three agents of VMAS that balance something."""
    from examples.vmas_simulator import VmasSimulator

    return VmasSimulator("balance", NUM_ROWS, max_steps=14, **kwargs)


def maniskill(*, resets_itself: bool, draws: bool = False) -> Any:
    """Make a stand-in of ManiSkill's interface, or the vector env around it."""
    from tests.oracles import maniskill_standin

    if resets_itself:
        return maniskill_standin.make_maniskill_vector(NUM_ROWS)
    return maniskill_standin.make_maniskill(NUM_ROWS, "rgb_array" if draws else None)


def isaac(kind: str, **cfg: Any) -> Any:
    """Make a stand-in of IsaacLab's interface; a process can hold only one."""
    from tests.oracles import isaaclab_standin

    make = getattr(isaaclab_standin, f"make_{kind}")
    return make(num_envs=NUM_ROWS, **cfg)
