"""Factories for named envs that are themselves a batch: Gymnasium vector envs and EnvPool.

As those of `named`, they are frozen values that pickle by reference, and making one checks nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class GymnasiumVectorFactory:
    """Build a SyncVectorEnv of `gymnasium.make(env_id)` that leaves resets to the executor.

    Attributes:
        env_id: as Gymnasium reads it.
        num_rows: envs in it.
        render_mode: "rgb_array" for envs that are to be drawn; None leaves it to the env.
    """

    env_id: str
    num_rows: int = 8
    render_mode: str | None = None

    @property
    def preload(self) -> tuple[str, ...]:
        """Modules worth importing before workers are forked."""
        return ("gymnasium",)

    def __call__(self, **env_kwargs: Any) -> Any:
        """Return the vector env, its envs made with these arguments."""
        import gymnasium

        rendering: dict[str, Any] = {"render_mode": self.render_mode} if self.render_mode else {}
        disabled = gymnasium.vector.AutoresetMode.DISABLED
        return gymnasium.make_vec(
            self.env_id,
            self.num_rows,
            vectorization_mode="sync",
            vector_kwargs={"autoreset_mode": disabled},
            **rendering,
            **env_kwargs,
        )


@dataclass(frozen=True)
class EnvPoolFactory:
    """Build `envpool.make(task)`.

    Attributes:
        task: as EnvPool calls it.
        num_rows: envs in it.
        num_threads: its own; workers run at the same time, so one each is enough.
    """

    task: str
    num_rows: int = 8
    num_threads: int = 1

    @property
    def preload(self) -> tuple[str, ...]:
        """Modules worth importing before workers are forked."""
        return ("envpool",)

    def __call__(self, **env_kwargs: Any) -> Any:
        """Return the pool, made with these arguments (`ParallelEnv(..., env_kwargs={"max_episode_steps": 50})`)."""
        import envpool

        settings = {"env_type": "gymnasium", "num_envs": self.num_rows, "num_threads": self.num_threads, **env_kwargs}
        return envpool.make(self.task, **settings)


def envpool_tasks() -> list[str]:
    """Return the names of all EnvPool tasks, sorted."""
    import envpool

    return sorted(envpool.list_all_envs())
