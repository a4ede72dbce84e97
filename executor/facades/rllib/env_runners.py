"""RLlib's two env runners (new API stack) with the envs in envherd's worker processes.

    from envherd.rllib import SingleAgentEnvRunner

    config.env_runners(env_runner_cls=SingleAgentEnvRunner, num_envs_per_env_runner=8)

Guarantees: episodes, callbacks, connectors and metrics are RLlib's own code. Envs are built, reset, stepped and seeded
as by RLlib's runner of the same name with `gym_env_vectorize_mode="sync"`, but in workers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import gymnasium
from ray.rllib.callbacks.utils import make_callback
from ray.rllib.env import multi_agent_env_runner, single_agent_env_runner
from ray.rllib.env.env_context import EnvContext
from ray.tune.registry import ENV_CREATOR, _global_registry

from envherd.executor.facades.gymnasium.vector_env import AsyncVectorEnv
from envherd.executor.facades.rllib.multi_agent import MultiAgentVectorEnv
from envherd.executor.facades.rllib.worker import with_context
from envherd.executor.options import ExecutorOptions


class _Hosted:
    """The base of both runners; set the attributes in a subclass.

    Attributes:
        num_env_workers: worker processes of each runner, at most one per env. None: a remote runner has as many as Ray
            gives it CPUs (`num_cpus_per_env_runner`), the local runner one per usable core. 0: none, the envs are in
            RLlib's own vector env, in the runner's process.
        executor_options: see `ExecutorOptions`; `infos` and `episode_seeds` are set here.
    """

    num_env_workers: ClassVar[int | None] = None
    executor_options: ClassVar[ExecutorOptions | None] = None

    config: Any
    worker_index: int | None
    num_workers: int  # RLlib's name for the number of runners

    def _context(self) -> EnvContext:
        config = self.config.env_config
        if isinstance(config, EnvContext):
            return config
        return EnvContext(
            config,
            worker_index=self.worker_index,
            num_workers=self.num_workers,
            remote=self.config.remote_worker_envs,
        )

    def _env_fn(self, context: EnvContext) -> Callable[[], Any]:
        """Return the function that builds one env, without a reference to the runner.

        Raises:
            ValueError: the config has no env.
        """
        env = self.config.env
        if not env:
            raise ValueError(
                "make_env failed: expected an env in the config, got none. Call config.environment('CartPole-v1'), or "
                "with a class, a function, or a name that ray.tune.register_env knows."
            )
        if isinstance(env, str):
            if not _global_registry.contains(ENV_CREATOR, env):
                # Pass the spec: workers do not know ids that the user's script has registered.
                return functools.partial(gymnasium.make, gymnasium.spec(env), **context)
            env = _global_registry.get(ENV_CREATOR, env)
        return functools.partial(with_context, env, dict(context), vars(context))

    def _arguments(self) -> dict[str, Any]:
        num_workers = self.num_env_workers
        if num_workers is None and self.worker_index:
            num_workers = max(1, int(self.config.num_cpus_per_env_runner))
        return {"num_workers": num_workers, "options": self.executor_options}


class SingleAgentEnvRunner(_Hosted, single_agent_env_runner.SingleAgentEnvRunner):  # type: ignore[misc]  # has no types
    """RLlib's `SingleAgentEnvRunner`, whose vector env is `envherd.gymnasium.AsyncVectorEnv`."""

    def make_env(self) -> None:
        """Build the envs, after closing those that are there; see RLlib's method."""
        if self.num_env_workers == 0:
            super().make_env()
            return
        config = self.config
        # RLlib makes its vector env from the config, which names ours while it does so.
        before = config.env, config.gym_env_vectorize_mode
        config.env = functools.partial(
            _vector_env,
            self._env_fn(self._context()),
            self._arguments(),
        )
        config.gym_env_vectorize_mode = gymnasium.VectorizeMode.VECTOR_ENTRY_POINT
        try:
            super().make_env()
        finally:
            config.env, config.gym_env_vectorize_mode = before


def _vector_env(
    env_fn: Callable[[], Any],
    arguments: dict[str, Any],
    context: dict[str, Any],
) -> AsyncVectorEnv:
    """Return the vector env for RLlib, with a context that also has `num_envs`."""
    return AsyncVectorEnv(
        [env_fn] * context["num_envs"],
        shared_memory=False,
        **arguments,
    )


class MultiAgentEnvRunner(_Hosted, multi_agent_env_runner.MultiAgentEnvRunner):  # type: ignore[misc]  # has no types
    """RLlib's `MultiAgentEnvRunner`, whose vector env is a `MultiAgentVectorEnv`.

    Envs may also be PettingZoo parallel envs, and envs whose agents are stacked (Melting Pot), without a wrapper.
    RLlib's own checks of envs (`disable_env_checking`) do not run: rows are checked against the spaces instead.
    """

    env: MultiAgentVectorEnv | None

    def make_env(self) -> None:
        """Build the envs, after closing those that are there; see RLlib's method."""
        if self.num_env_workers == 0:
            super().make_env()
            return
        if self.env is not None:
            self.env.close()
        context = self._context()
        self.env = env = MultiAgentVectorEnv(
            [self._env_fn(context)] * self.config.num_envs_per_env_runner,
            **self._arguments(),
        )
        self.num_envs = env.num_envs
        # From here on as RLlib's method does.
        self._needs_initial_reset = True
        make_callback(
            "on_environment_created",
            callbacks_objects=self._callbacks,
            callbacks_functions=self.config.callbacks_on_environment_created,
            kwargs={
                "env_runner": self,
                "metrics_logger": self.metrics,
                "env": env,
                "env_context": context,
            },
        )
