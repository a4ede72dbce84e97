"""RLlib's two env runners (new API stack) with the envs in envherd's worker processes.

    from envherd.rllib import SingleAgentEnvRunner

    config.env_runners(env_runner_cls=SingleAgentEnvRunner, num_envs_per_env_runner=8)

Guarantees: episodes, callbacks, connectors and metrics are RLlib's own code. Envs are built, reset, stepped and seeded
as by RLlib's runner of the same name with `gym_env_vectorize_mode="sync"`, but in workers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, cast

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import concatenate, create_empty_array, iterate
from ray.rllib.callbacks.utils import make_callback
from ray.rllib.env import multi_agent_env_runner, single_agent_env_runner
from ray.rllib.env.env_context import EnvContext
from ray.rllib.env.multi_agent_env import MultiAgentEnv
from ray.rllib.env.vector.vector_multi_agent_env import VectorMultiAgentEnv
from ray.tune.registry import ENV_CREATOR, _global_registry

from envherd.executor.facades.gymnasium.vector_env import AsyncVectorEnv
from envherd.executor.facades.pettingzoo.vector_env import AgentDictEnv, OverAgentDicts
from envherd.executor.facades.rllib.worker import (
    ALL,
    OBSERVED,
    PRESENT,
    REWARDED,
    TERMINATED,
    TRUNCATED,
    MultiAgentFactory,
    with_context,
)
from envherd.executor.facades.rows import LatestColumn
from envherd.executor.options import ExecutorOptions
from envherd.workers.errors import ActionError

# ---- multi agent -------------------------------------------------------------------------------
# N multi-agent envs in worker processes, for RLlib's `MultiAgentEnvRunner`: lists of dicts by agent.
#
# Guarantees:
# - an agent is in a dict of env i if the env's own dict had it; values are the env's (observations in the dtype of
#   their space, rewards as floats, flags as bools).
# - an env gets only the actions of agents that act.
# - the step after an episode's end is a reset, with rewards of 0 and no flag, as in RLlib's `SyncVectorMultiAgentEnv`.

ByAgent = dict[Any, Any]
#: (observations, rewards, terminateds, truncateds, infos), each a dict by agent for each env
Dicts = tuple[list[ByAgent], list[ByAgent], list[ByAgent], list[ByAgent], list[ByAgent]]


class _RowsEnv(AgentDictEnv):
    """PettingZoo's rows, with a record of the entries of the envs' own dicts.

    Attributes:
        present: the leaf `PRESENT` of each env's latest row, `[N, A]`.
    """

    _factory = MultiAgentFactory

    def _take(self) -> None:
        super()._take()
        self.present = LatestColumn(
            self._engine.positions,
            PRESENT,
            self.num_envs,
            self.active.read().shape[1:],
        )

    def env_infos(self) -> list[ByAgent]:
        """Return each env's latest info."""
        infos = self._engine.side.infos
        latest = {**infos.read("next"), **infos.read("root")}
        return [latest.get(i, {}) for i in range(self.num_envs)]


class _Agents(MultiAgentEnv):  # type: ignore[misc]  # has no types
    """The agents and spaces of one env, for RLlib."""

    def __init__(self, observation_spaces: ByAgent, action_spaces: ByAgent) -> None:
        self.observation_spaces = observation_spaces
        self.action_spaces = action_spaces
        self.possible_agents = self.agents = list(observation_spaces)
        super().__init__()


class MultiAgentVectorEnv(OverAgentDicts, VectorMultiAgentEnv):  # type: ignore[misc]  # has no types
    """RLlib's vector env of multi-agent envs, in worker processes.

    Args:
        env_fns: one callable for each env, called in its worker. It returns a `MultiAgentEnv` of RLlib, a PettingZoo
            parallel env, or an env of another family whose agents are stacked (Melting Pot).
        num_workers: processes; None for one per usable core, at most one per env; "auto" measures the first env.
        options: see `ExecutorOptions`; `infos` and `episode_seeds` are set here.

    Attributes:
        num_envs: N.
        envs: N times the agents and spaces of one env; the envs themselves are in the workers.
        single_observation_spaces: observation spaces by agent; `single_observation_space` is their `Dict`.
        single_action_spaces: action spaces by agent; `single_action_space` is their `Dict`.
        metadata: of the envs.
        render_mode: of the envs.

    Raises:
        RuntimeError: agents or spaces of the envs differ.
        FactoryError: an env could not be built; also of the type that was raised.
    """

    _envs: _RowsEnv

    def __init__(
        self,
        env_fns: Sequence[Callable[[], Any]],
        *,
        num_workers: int | Literal["auto"] | None = None,
        options: ExecutorOptions | None = None,
    ) -> None:
        self.closed = True  # RLlib closes deleted envs that are not closed
        self._envs = _RowsEnv(
            env_fns,
            shared_memory=False,
            num_workers=num_workers,
            options=options,
        )
        self.closed = False
        self.num_envs = self._envs.num_envs
        self.metadata = self._envs.metadata
        self.render_mode = self._envs.render_mode
        # These spaces are Dicts by agent, which the type of the base class does not show.
        self.single_observation_space = cast(
            "spaces.Dict",
            self._envs.single_observation_space,
        )
        self.single_action_space = cast("spaces.Dict", self._envs.single_action_space)
        self._observation_space = cast("spaces.Dict", self._envs.observation_space)
        action_space = cast("spaces.Dict", self._envs.action_space)
        self.single_observation_spaces = dict(self.single_observation_space.spaces)
        self.single_action_spaces = dict(self.single_action_space.spaces)
        self._agents = list(self.single_observation_spaces)
        self.envs = [
            _Agents(self.single_observation_spaces, self.single_action_spaces),
        ] * self.num_envs
        # `concatenate` needs an action of each agent for each env.
        self._blanks = {
            agent: next(
                iter(
                    iterate(
                        action_space[agent],
                        create_empty_array(space, self.num_envs),
                    )
                )
            )
            for agent, space in self.single_action_spaces.items()
        }
        self._resets_next = np.zeros(self.num_envs, bool)

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[list[ByAgent], list[ByAgent]]:
        """Reset all envs; return observations and infos by agent, a dict for each env.

        Args:
            seed: int, from which env i gets `seed + i`; one int or None for each env; or None.
            options: given to each env; never changed.
        """
        observations, _ = self._envs.reset(seed=seed, options=options)
        self._resets_next[:] = False
        return self._seen(
            observations,
            self._envs.present.read().tolist(),
        ), self._envs.env_infos()

    def step(self, actions: Sequence[Mapping[Any, Any]]) -> Dicts:
        """Step all envs once; reset instead those whose episode has ended.

        Args:
            actions: a dict by agent for each env; that of an env that is reset is not used.

        Returns:
            `(observations, rewards, terminateds, truncateds, infos)`: lists of N dicts by agent. Observations are views
            of memory that the caller owns. An env whose worker was lost is truncated, and has
            `{"interrupted": True}` as `infos[i]["__common__"]`.

        Raises:
            ActionError: not one dict for each env, or an agent that acts has no action. No env was stepped.
            EnvError: an env raised; it is also of the type that was raised.
            (WorkerLost, WorkerTimeout): see `BatchedEnv.step`.
        """
        self._check_complete(actions)
        was_reset = self._resets_next
        observations, _, terminations, truncations, _ = self._envs.step(
            self._batch(actions)
        )
        self._resets_next = terminations | truncations
        present = self._envs.present.read()
        positions = self.executor.engine.positions
        lost = np.flatnonzero(positions.interrupted[:, 0] & positions.has_interrupted)
        # Agents that acted or are observed have rewards; only the episode's flags are set.
        if len(lost):
            present[lost] &= OBSERVED
            # `OBSERVED` is 1: each agent that is observed gets the bit.
            present[lost] |= REWARDED * present[lost]
        bits = present.tolist()
        rewards, terminated, truncated = self._envs.agent_results()
        gained = [
            self._those(row, own, REWARDED)
            for row, own in zip(rewards.tolist(), bits, strict=True)
        ]
        ended = self._flags(terminated, bits, TERMINATED, terminations)
        cut = self._flags(truncated, bits, TRUNCATED, truncations)
        infos = self._envs.env_infos()
        # For these envs, the step was a reset.
        for env_id in np.flatnonzero(was_reset).tolist():
            gained[env_id] = dict.fromkeys(self._agents, 0.0)
            ended[env_id] = dict.fromkeys((*self._agents, ALL), False)
            cut[env_id] = dict.fromkeys((*self._agents, ALL), False)
        for env_id in lost.tolist():
            infos[env_id] = {**infos[env_id], "__common__": {"interrupted": True}}
        return self._seen(observations, bits), gained, ended, cut, infos

    def _flags(
        self,
        values: np.ndarray,
        bits: list[list[int]],
        bit: int,
        of_episodes: np.ndarray,
    ) -> list[ByAgent]:
        """Return the flags `[N, A]` of agents whose bits include `bit`, and those of their episodes `[N]`, by agent."""
        return [
            {**self._those(row, own, bit), ALL: is_over}
            for row, own, is_over in zip(
                values.tolist(),
                bits,
                of_episodes.tolist(),
                strict=True,
            )
        ]

    def _those(self, values: Sequence[Any], bits: list[int], bit: int) -> ByAgent:
        """Return the values of the agents whose bits include `bit`, by agent."""
        return {
            agent: value
            for agent, value, own in zip(self._agents, values, bits, strict=True)
            if own & bit
        }

    def _seen(self, observations: ByAgent, bits: list[list[int]]) -> list[ByAgent]:
        of_envs = zip(
            *(
                iterate(self._observation_space[agent], observations[agent])
                for agent in self._agents
            ),
            strict=True,
        )
        return [
            self._those(values, own, OBSERVED)
            for values, own in zip(of_envs, bits, strict=True)
        ]

    def _batch(self, actions: Sequence[Mapping[Any, Any]]) -> ByAgent:
        """Return actions `[N, ...]` by agent; those of agents that do not act are zeros."""
        batch = {}
        for agent, space in self.single_action_spaces.items():
            out: Any = create_empty_array(space, self.num_envs)
            batch[agent] = concatenate(
                space,
                [one.get(agent, self._blanks[agent]) for one in actions],
                out,
            )
        return batch

    def _check_complete(self, actions: Sequence[Mapping[Any, Any]]) -> None:
        if len(actions) != self.num_envs:
            raise ActionError(
                f"step failed: expected {self.num_envs} dicts of actions, one for each env, got {len(actions)}. No env "
                f"was stepped."
            )
        acting = self._envs.active.read() & ~self._resets_next[:, None]
        for env_id, (one, acts) in enumerate(
            zip(actions, acting.tolist(), strict=True)
        ):
            missing = [
                agent
                for agent, does in zip(self._agents, acts, strict=True)
                if does and agent not in one
            ]
            if missing:
                raise ActionError(
                    f"step failed: expected an action of each agent that has an observation, got none of "
                    f"{missing[0]} (env {env_id}). No env was stepped."
                )

    def close_extras(self, **kwargs: Any) -> None:
        """Close the envs and end the workers; RLlib's `close` calls this once."""
        self._envs.close(**kwargs)


# ---- env runners -------------------------------------------------------------------------------


class _Hosted:
    """The base of both runners; set the attributes in a subclass.

    Attributes:
        num_env_workers: worker processes of each runner, at most one per env. None: a remote runner has as many as Ray
            gives it CPUs (`num_cpus_per_env_runner`), the local runner one per usable core.
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
