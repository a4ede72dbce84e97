"""The `gym` for CleanRL's scripts: Gymnasium 0.29's vector envs over the executor, on Gymnasium 1.

    from envherd.cleanrl import gym    # was: import gymnasium as gym

Guarantees: an env that ends is reset in the same step, as before Gymnasium 1.0. Its last observation and info are in
`infos["final_observation"][i]` and `infos["final_info"][i]`, and None is there for the envs that have not ended. Seeds,
transitions and all other infos are those of Gymnasium's own vector envs.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import gymnasium.vector
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

import envherd.executor.facades.cleanrl.worker as of_workers
from envherd.executor.facades.gymnasium.vector_env import AsyncVectorEnv
from envherd.executor.options import ExecutorOptions

#: Info key of the Gymnasium 1 facade -> the key in 0.29.
_FINALS = {"final_info": "final_info", "final_obs": "final_observation"}


class OldVectorEnv(AsyncVectorEnv, VectorEnv[Any, Any, np.ndarray]):
    """A vector env of Gymnasium 0.29: it resets in the step that ends an episode, and infos are lists.

    Args:
        env_fns: one callable for each env; called in its worker.
        copy: False hands out views of the ring of rows.
        num_workers: processes; None for one per usable core, at most one per env.
        options: see `ExecutorOptions`.
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], Any]],
        # Arguments of 0.29 that have no effect here, such as `shared_memory` and `context`.
        *_: Any,
        copy: bool = True,
        num_workers: int | Literal["auto"] | None = None,
        options: ExecutorOptions | None = None,
        **__: Any,
    ) -> None:
        super().__init__(
            tuple(env_fns),
            shared_memory=False,
            copy=copy,
            autoreset_mode=AutoresetMode.SAME_STEP,
            num_workers=num_workers,
            options=options,
        )

    def _add_info(
        self,
        vector_infos: dict[str, Any],
        env_info: dict[str, Any],
        env_num: int,
    ) -> dict[str, Any]:
        rest = dict(env_info)
        for name, old_name in _FINALS.items():
            if name in rest:
                finals = vector_infos.setdefault(
                    old_name,
                    np.full(self.num_envs, None, object),
                )
                finals[env_num] = rest.pop(name)
                has_ended = vector_infos.setdefault(
                    f"_{old_name}",
                    np.zeros(self.num_envs, bool),
                )
                has_ended[env_num] = True
        return super()._add_info(vector_infos, rest, env_num)


class _Vector:
    """`gymnasium.vector`, whose two vector envs are ours."""

    def __init__(
        self,
        num_workers: int | Literal["auto"] | None,
        options: ExecutorOptions | None,
    ) -> None:
        self._arguments = {"num_workers": num_workers, "options": options}

    def __getattr__(self, name: str) -> Any:
        return getattr(gymnasium.vector, name)

    def SyncVectorEnv(  # noqa: N802
        self,
        env_fns: Sequence[Callable[[], Any]],
        *args: Any,
        **kwargs: Any,
    ) -> OldVectorEnv:
        """Make a vector env in worker processes."""
        return OldVectorEnv(env_fns, *args, **{**self._arguments, **kwargs})

    AsyncVectorEnv = SyncVectorEnv


class Gym(of_workers.Gym):
    """A `gym` for scripts, with the number of workers and options for its vector envs.

    Args:
        num_workers: processes of each vector env; None for one per usable core, at most one per env.
        options: see `ExecutorOptions`.

    Attributes:
        vector: Gymnasium's, where `SyncVectorEnv` and `AsyncVectorEnv` both make an `OldVectorEnv`.
    """

    def __init__(
        self,
        *,
        num_workers: int | Literal["auto"] | None = None,
        options: ExecutorOptions | None = None,
    ) -> None:
        super().__init__()
        self.vector = _Vector(num_workers, options)


gym = Gym()
