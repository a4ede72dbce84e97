"""Families whose envs are batches themselves: several rows with separate ends and resets."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from tests.contracts.family import IS_FULL, Family
from tests.contracts.optional_families import reset_by_option
from tests.envs.batched_envs import (
    NUM_ROWS,
    atari,
    balance,
    cartpole,
    isaac,
    maniskill,
    pool,
    vector_env,
)
from tests.oracles import plain_batches, plain_loops
from tests.oracles.plain_batches import PlainRows, PlainSimulator

if TYPE_CHECKING:
    import torch  # workers that build one of the other envs do without it

_MODES = ("NEXT_STEP", "SAME_STEP", "DISABLED")


def isaac_by_hand(kind: str, **cfg: Any) -> Any:
    """Make one that publishes its last observations, even if the process holds others."""
    from tests.oracles import isaaclab_standin

    isaaclab_standin.forget_simulator()
    env = isaac(kind, compute_final_obs=True, reuses_buffers=False, **cfg)
    isaaclab_standin.forget_simulator()
    return env


def reset_direct(env: Any, ids: "torch.Tensor") -> Any:
    """Reset rows of a `DirectRLEnv`, whose `reset` takes no ids."""
    env._reset_idx(ids)
    return env._get_observations()


def reset_managed(env: Any, ids: "torch.Tensor") -> Any:
    """Reset rows of a `ManagerBasedRLEnv`."""
    return env.reset(env_ids=ids)[0]


def reset_by_mask(env: Any, ids: "torch.Tensor") -> Any:
    """Reset rows of a simulator in Gymnasium's DISABLED mode."""
    import torch

    return env.reset(
        options={"reset_mask": torch.isin(torch.arange(env.num_envs), ids)}
    )[0]


def _batched(
    title: str,
    make_env: Callable[[], Any],
    plain: Callable[[], Any] | None,
    **kwargs: Any,
) -> Family:
    settings: dict[str, Any] = {
        "num_steps": 40,
        "is_ordinary": False,
        "num_rows": NUM_ROWS,
        **kwargs,
    }
    return Family(f"{title}, {NUM_ROWS} rows", make_env, plain, **settings)


def _vector(kind: str, mode: str) -> Family:
    titles = {
        "sync": "Gymnasium `SyncVectorEnv`",
        "async": "Gymnasium `AsyncVectorEnv`",
        "custom": "custom Gymnasium `VectorEnv`",
        "wrapped": "Gymnasium `SyncVectorEnv` in a vector wrapper",
    }
    # A SyncVectorEnv is switched out of SAME_STEP, in which it can lose last observations.
    resets_itself = mode == "SAME_STEP" and kind in ("async", "custom")
    plain = partial(
        PlainRows,
        partial(plain_loops.PlainGymnasium, cartpole),
        NUM_ROWS,
        seeds="none" if kind == "custom" else "row",
        resets_itself=resets_itself,
    )
    is_apart = kind == "async"
    extra = {"draws": kind != "custom", "is_slow": is_apart, "needs_worker": is_apart}
    extra["is_only_in_full"] = is_apart and mode == "DISABLED"
    return _batched(
        f"{titles[kind]}, {mode}", partial(vector_env, kind, mode), plain, **extra
    )


def _atari(mode: str) -> Family:
    plain = partial(
        PlainRows,
        partial(plain_batches.AtariRow, partial(atari, "NEXT_STEP")),
        NUM_ROWS,
        seeds="place",
        resets_itself=mode == "SAME_STEP",
        num_seeds=2**31 - NUM_ROWS,
    )
    more: dict[str, Any] = {
        "num_steps": 110,
        "extra": "atari",
        "draws": False,
        "is_only_in_full": True,
    }
    return _batched(
        f"ALE `AtariVectorEnv`: Pong, 50 steps, {mode}",
        partial(atari, mode),
        plain,
        **more,
    )


def _pool(api: str, **config: Any) -> Family:
    title = f"EnvPool: {api} API, {'async' if config else 'sync'}"
    plain = partial(plain_batches.PlainPool, pool, NUM_ROWS)
    return _batched(
        title, partial(pool, api, draws=IS_FULL, **config), plain, extra="envpool"
    )


def _isaac(title: str, kind: str, reset_rows: Any) -> Family:
    plain = partial(
        PlainSimulator, partial(isaac_by_hand, kind), reset_rows, resets_itself=True
    )
    return _batched(
        title, partial(isaac, kind), plain, draws=False, is_alone=True, is_slow=True
    )


def _maniskill(title: str, *, resets_itself: bool) -> Family:
    make = partial(maniskill, resets_itself=resets_itself)
    plain = partial(PlainSimulator, make, reset_by_option, resets_itself=resets_itself)
    return _batched(title, partial(make, draws=IS_FULL), plain, draws=not resets_itself)


BATCHED: dict[str, Family] = {
    **{
        f"vector_{kind}_{mode.lower()}": _vector(kind, mode)
        for kind in ("sync", "async", "custom", "wrapped")
        for mode in _MODES
    },
    "vector_default": _batched(
        'Gymnasium `make_vec("CartPole-v1")`',
        partial(vector_env, "default", "NEXT_STEP"),
        None,
        num_steps=60,
    ),
    "vector_atari_next_step": _atari("NEXT_STEP"),
    "vector_atari_same_step": _atari("SAME_STEP"),
    "envpool_sync": _pool("gymnasium"),
    "envpool_async": _pool("gymnasium", batch_size=2),
    "envpool_dm_sync": _pool("dm"),
    "envpool_dm_async": _pool("dm", batch_size=2),
    "vmas": _batched(
        "a simulator over VMAS: balance, three agents",
        balance,
        partial(PlainSimulator, balance, reset_by_mask, resets_itself=False),
        num_steps=30,
        draws=False,
        extra="vmas",
        is_slow=True,
    ),
    "maniskill": _maniskill("ManiSkill's `BaseEnv`, a stand-in", resets_itself=False),
    "maniskill_vector": _maniskill(
        "`ManiSkillVectorEnv`, a stand-in", resets_itself=True
    ),
    "isaaclab_direct": _isaac(
        "IsaacLab's `DirectRLEnv`, a stand-in", "direct", reset_direct
    ),
    "isaaclab_managed": _isaac(
        "IsaacLab's `ManagerBasedRLEnv`, a stand-in", "managed", reset_managed
    ),
}
