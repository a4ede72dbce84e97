"""N PettingZoo parallel envs as one: the methods of a parallel env, over arrays `[N, ...]` for each agent.

Guarantees:
- Every transition is one `env.step`; observations and rewards are the env's own, bit for bit (float64 rewards).
- An env gets only the actions of its present agents. An absent agent's observation and reward are zeros.
- An env whose last agent has left is reset according to the autoreset mode; its last observations are never lost.
- Infos, timeouts, errors, `call` and the autoreset modes are those of the Gymnasium facade.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import create_empty_array

from envherd.executor.batched import BatchedEnv
from envherd.executor.facades.columns import LatestColumn
from envherd.executor.facades.fitting import fitted, refuse_unknown
from envherd.executor.facades.gymnasium.base import StepResult
from envherd.executor.facades.gymnasium.vector_env import AsyncVectorEnv
from envherd.executor.facades.pettingzoo.worker import (
    ACTIVE,
    AGENTS,
    REWARD,
    ParallelFactory,
)
from envherd.executor.keywords import names_right_keyword
from envherd.executor.options import ExecutorOptions
from envherd.shm.finalizer import ClosedAtEnd
from envherd.workers.adapters.gymnasium.spaces import Space
from envherd.workers.errors import ActionError

ByAgent = dict[Any, Any]


class AgentDictEnv(AsyncVectorEnv):
    """Gymnasium's vector env over spaces that are dicts by agent; rewards and flags are `[N, A]`.

    Attributes:
        active: which agents act in the next step, bool `[N, A]`.
    """

    _factory = ParallelFactory
    _name = "ParallelVectorEnv"

    def _take(self) -> None:
        super()._take()
        columns = self._engine.pool.slab.groups[0].columns
        self._agent_rewards = columns["next", *REWARD]
        self._agent_terminations = columns["next", *AGENTS, "terminated"][..., 0]
        self._agent_truncations = columns["next", *AGENTS, "truncated"][..., 0]
        self.active = LatestColumn(
            self._engine.positions,
            ACTIVE,
            self.num_envs,
            self._agent_rewards.shape[-1:],
        )

    def agent_results(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return rewards float64, terminations and truncations bool of the latest step, `[N, A]` each, copies."""
        column = self._flight.at
        return (
            self._agent_rewards[column].copy(),
            self._agent_terminations[column].copy(),
            self._agent_truncations[column].copy(),
        )


class OverAgentDicts:
    """The requests that a class over an `AgentDictEnv` passes on to the envs."""

    _envs: AgentDictEnv

    @property
    def executor(self) -> BatchedEnv:
        """The executor underneath, for example for its `statistics()`."""
        return self._envs.executor

    def render(self) -> tuple[Any, ...]:
        """Return a picture of each env, uint8 `[H, W, 3]`; None where its render mode is not "rgb_array"."""
        return tuple(self._envs.executor.ask("render", None))

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of each env, or return its attribute of that name."""
        return self._envs.call(name, *args, **kwargs)

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Return an attribute of each env; a callable is called first."""
        return self._envs.call(name)


class ParallelVectorEnv(ClosedAtEnd, OverAgentDicts):
    """N PettingZoo parallel envs in worker processes, stepped together.

    Args:
        env_fns: one callable for each env, called in its worker. It returns a PettingZoo parallel env, an AEC env that
            can be made parallel, or an env of another family whose agents are stacked (Melting Pot). All envs have
            the same agents with the same spaces.
        copy: False hands out views of the ring of rows; the `options.ring_frames`-th further step overwrites a view.
        autoreset_mode: an `AutoresetMode` of Gymnasium or its value; "SameStep" resets an env in the step that has
            ended its episode, and puts the last observations into `infos["final_obs"]`.
        num_workers: processes; None for one per usable core, at most one per env; "auto" measures the first env.
        options: see `ExecutorOptions`; `infos` and `episode_seeds` are set here.

    Attributes:
        num_envs: N.
        possible_agents: all agents, of each env.
        agents: the same list: every agent has a part in every batch. `active` marks the present agents.
        metadata: of the envs.
        render_mode: of the envs.

    Raises:
        RuntimeError: agents or spaces of the envs differ.
        FactoryError: an env could not be built; also of the type that was raised.
    """

    @names_right_keyword
    def __init__(
        self,
        env_fns: Sequence[Callable[[], Any]],
        *,
        copy: bool = True,
        autoreset_mode: str | AutoresetMode = AutoresetMode.SAME_STEP,
        num_workers: int | Literal["auto"] | None = None,
        options: ExecutorOptions | None = None,
    ) -> None:
        self._envs = AgentDictEnv(
            env_fns,
            shared_memory=False,
            copy=copy,
            autoreset_mode=autoreset_mode,
            num_workers=num_workers,
            options=options,
        )
        self.num_envs = self._envs.num_envs
        self.possible_agents = self.agents = list(self._envs.single_observation_space)  # type: ignore[call-overload]  # a Dict
        self.metadata = self._envs.metadata
        self.render_mode = self._envs.render_mode
        self._actions: Any = self._envs.single_action_space

    # ---- what it is --------------------------------------------------------------------------

    def __repr__(self) -> str:
        """Name the executor, which describes envs and workers."""
        return f"{type(self).__name__}({self.executor!r})"

    @property
    def num_agents(self) -> int:
        """The number of possible agents of an env."""
        return len(self.possible_agents)

    max_num_agents = num_agents

    @property
    def unwrapped(self) -> "ParallelVectorEnv":
        """This object."""
        return self

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._envs.closed

    @property
    def active(self) -> ByAgent:
        """The envs in which each agent is present, and so acts in the next step: bool `[N]` by agent, copies."""
        return self._by_agent(self._envs.active.read())

    def observation_space(self, agent: Any) -> Space:
        """Return the space of an agent's observations of all envs, `[N, ...]`."""
        return self._envs.observation_space[agent]  # type: ignore[index]  # a Dict

    def action_space(self, agent: Any) -> Space:
        """Return the space of an agent's actions for all envs, `[N, ...]`."""
        return self._envs.action_space[agent]  # type: ignore[index]  # a Dict

    def single_observation_space(self, agent: Any) -> Space:
        """Return an agent's observation space in one env."""
        return self._envs.single_observation_space[agent]  # type: ignore[index]  # a Dict

    def single_action_space(self, agent: Any) -> Space:
        """Return an agent's action space in one env."""
        return self._actions[agent]

    # ---- reset and step ----------------------------------------------------------------------

    def reset(
        self,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[ByAgent, dict[str, Any]]:
        """Reset all envs, or those of `options["reset_mask"]` (bool `[N]`).

        Args:
            seed: int, from which env i gets `seed + i`; one int or None for each env; or None.
            options: given to each env; never changed.

        Returns:
            `(observations, infos)`: arrays `[N, ...]` by agent, own memory; infos by agent and name, with the
            masks of Gymnasium's vector infos (`infos[agent]["_name"]`).
        """
        return self._envs.reset(seed=seed, options=options)

    def reset_async(
        self,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        """Begin a `reset`; `reset_wait` ends it."""
        self._envs.reset_async(seed=seed, options=options)

    def reset_wait(
        self,
        timeout: float | None = None,
    ) -> tuple[ByAgent, dict[str, Any]]:
        """End a `reset`; see `AsyncVectorEnv.reset_wait`."""
        return self._envs.reset_wait(timeout)

    def step(
        self,
        actions: Mapping[Any, Any],
    ) -> tuple[ByAgent, ByAgent, ByAgent, ByAgent, dict[str, Any]]:
        """Step all envs once.

        Args:
            actions: `[N, ...]` by agent, arrays, tensors or lists. Those of absent agents are not used, and an agent
                that is absent in all envs may be left out.

        Returns:
            `(observations, rewards, terminations, truncations, infos)`: by agent arrays `[N, ...]`, float64 `[N]`, and
            bool `[N]`. The flags of an agent that has left stay set until it returns. Own memory, except for the
            observations with `copy=False`.

        Raises:
            ActionError: an agent that is present has no action, an agent is unknown, or actions do not fit its space.
                No env was stepped.
            EnvError: an env raised; it is also of the type that was raised.
            (WorkerLost, WorkerTimeout): see `BatchedEnv.step`.
        """
        return self._results(self._envs.step(self._complete(actions)))

    def step_async(self, actions: Mapping[Any, Any]) -> None:
        """Begin a `step`; `step_wait` ends it."""
        self._envs.step_async(self._complete(actions))

    def step_wait(
        self,
        timeout: float | None = None,
    ) -> tuple[ByAgent, ByAgent, ByAgent, ByAgent, dict[str, Any]]:
        """End a `step`; see `AsyncVectorEnv.step_wait`."""
        return self._results(self._envs.step_wait(timeout))

    def _results(
        self,
        made: StepResult,
    ) -> tuple[ByAgent, ByAgent, ByAgent, ByAgent, dict[str, Any]]:
        observations, _, _, _, infos = made
        rewards, terminations, truncations = map(
            self._by_agent,
            self._envs.agent_results(),
        )
        return observations, rewards, terminations, truncations, infos

    def _by_agent(self, values: np.ndarray) -> ByAgent:
        return {agent: values[:, i] for i, agent in enumerate(self.possible_agents)}

    def _complete(self, actions: Mapping[Any, Any]) -> ByAgent:
        """Return an action of every agent; those of absent agents are zeros."""
        if not isinstance(actions, Mapping):
            raise ActionError(
                f"step failed: expected a dict of actions by agent, got {type(actions).__name__}. No env was stepped."
            )
        refuse_unknown(actions, self.possible_agents)
        complete = {}
        for agent in self.possible_agents:
            if agent in actions:
                given = actions[agent]
                batched = self.action_space(agent)
                if (
                    # Nested actions have no single dtype; `Actions` takes them apart.
                    isinstance(given, (Mapping, tuple))
                    or batched.dtype is None
                    or batched.shape is None
                ):
                    complete[agent] = given
                else:
                    complete[agent] = fitted(
                        given,
                        batched.shape,
                        batched.dtype,
                        f" of {agent}",
                    )
            elif self.active[agent].any():
                raise ActionError(
                    f"step failed: expected actions of each agent that is present, got none of {agent}. "
                    f"No env was stepped."
                )
            else:
                complete[agent] = create_empty_array(
                    self._actions[agent],
                    self.num_envs,
                )
        return complete

    # ---- calls -------------------------------------------------------------------------------

    def state(self) -> np.ndarray:
        """Return the envs' `state()`, stacked `[N, ...]`."""
        return np.stack(self._envs.call("state"))

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute of each env: to `values`, or to its own item of a list or tuple."""
        self._envs.set_attr(name, values)

    def close(self, **kwargs: Any) -> None:
        """Close the envs and end the workers. Idempotent; see `AsyncVectorEnv.close_extras` for arguments."""
        self._envs.close(**kwargs)
