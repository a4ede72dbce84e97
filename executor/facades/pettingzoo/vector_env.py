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
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, create_empty_array

from envherd.executor.batched import BatchedEnv
from envherd.executor.facades.gymnasium.vector_env import AsyncVectorEnv, StepResult
from envherd.executor.facades.pettingzoo.worker import (
    ACTIVE,
    AGENTS,
    REWARD,
    OneGroupFactory,
    ParallelFactory,
)
from envherd.executor.facades.rows import LatestColumn
from envherd.executor.facades.spaces import fitted, refuse_unknown
from envherd.executor.keywords import names_right_keyword
from envherd.executor.options import ExecutorOptions
from envherd.shm.finalizer import ClosedAtEnd
from envherd.workers.adapters.common.tree import builder, flattener
from envherd.workers.adapters.gymnasium.spaces import Space, native_tree
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


# ---- agent rows --------------------------------------------------------------------------------
# PettingZoo parallel envs as one vector env with a row for each agent, for learners that share one policy.
#
# Arrays and infos are those of `supersuit.pettingzoo_env_to_vec_env_v1` and `concat_vec_envs_v1`: the rows of env 0's
# agents, then those of env 1, and so on. Agents may leave and return: an absent agent has zeros and no flag.

AgentInfos = list[dict[str, Any]]


class AgentRowsEnv(VectorEnv[Any, Any, np.ndarray]):
    """A Gymnasium vector env of N * A rows, one for each agent of each env.

    An env is reset in the step in which its last agent has left, and the last observations are in
    `infos[row]["terminal_observation"]`.

    Args:
        env_fns: see `ParallelVectorEnv`; all agents of an env have the same spaces.
        num_workers: processes; None for one per usable core, at most one per env.
        options: see `ExecutorOptions`.

    Attributes:
        envs: the `ParallelVectorEnv`.
        num_envs: rows, N * A.
        observation_space: of ONE row, as in SuperSuit; `batched_observation_space` is that of all rows.
        action_space: of ONE row, as in SuperSuit; `batched_action_space` is that of all rows.
        single_observation_space: of one row.
        single_action_space: of one row.

    Raises:
        ValueError: agents have different spaces.
    """

    @names_right_keyword
    def __init__(
        self,
        env_fns: Sequence[Callable[[], Any]],
        *,
        num_workers: int | Literal["auto"] | None = None,
        options: ExecutorOptions | None = None,
    ) -> None:
        self.closed = True  # as `AsyncVectorEnv`
        self.envs = envs = ParallelVectorEnv(
            env_fns,
            num_workers=num_workers,
            options=options,
        )
        self._agents = envs.possible_agents
        self.num_envs = envs.num_envs * len(self._agents)
        self.metadata = {**envs.metadata, "autoreset_mode": AutoresetMode.SAME_STEP}
        self.render_mode = envs.render_mode
        try:
            observed = self._only_space("observation", envs.single_observation_space)
            acted = self._only_space("action", envs.single_action_space)
        except BaseException:
            envs.close()
            raise
        self.single_observation_space = self.observation_space = observed
        self.single_action_space = self.action_space = acted
        self.batched_observation_space = batch_space(observed, self.num_envs)
        self.batched_action_space = batch_space(acted, self.num_envs)
        seen = native_tree(observed, "", take=None)
        self._split_seen = flattener(seen, None)
        self._join = builder(seen)
        action = native_tree(acted, "", take=None)
        self._split = flattener(action, None)
        self._join_action = builder(action)
        self.closed = False

    def _only_space(self, what: str, space_of: Callable[[Any], Any]) -> Any:
        first = space_of(self._agents[0])
        other = next(
            (agent for agent in self._agents if space_of(agent) != first),
            None,
        )
        if other is not None:
            raise ValueError(
                f"reading the env failed: expected one {what} space of all agents, got {first} of {self._agents[0]} "
                f"and {space_of(other)} of {other}. Make them alike in the factory, for example with SuperSuit's "
                f"pad_observations_v0 or pad_action_space_v0, or use ParallelVectorEnv."
            )
        return first

    def reset(  # type: ignore[override]  # SuperSuit's infos
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Any, AgentInfos]:
        """Reset all envs; return observations `[N * A, ...]` and one info for each row."""
        observations, infos = self.envs.reset(seed, options)
        return self._rows(observations), self._infos(infos)

    def step(  # type: ignore[override]
        self,
        actions: Any,
    ) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, AgentInfos]:
        """Step all envs; return observations, rewards float32, flags bool `[N * A]`, and one info for each row."""
        return self._results(self.envs.step(self._taken(actions)))

    def step_async(self, actions: Any) -> None:
        """Begin a `step`; `step_wait` ends it."""
        self.envs.step_async(self._taken(actions))

    def step_wait(self) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, AgentInfos]:
        """End a `step`."""
        return self._results(self.envs.step_wait())

    def _taken(self, actions: Any) -> ByAgent:
        """Return the actions of a step that begins, by agent."""
        # Read before the step: after it, agents that it ends are no longer active.
        self._was_active = self._stacked(self.envs.active)
        leaves = [self._by_env(leaf) for leaf in self._split(actions)]
        return {
            agent: self._join_action([leaf[:, i] for leaf in leaves])
            for i, agent in enumerate(self._agents)
        }

    def _results(
        self,
        made: tuple[ByAgent, ByAgent, ByAgent, ByAgent, dict[str, Any]],
    ) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, AgentInfos]:
        observations, rewards, terminations, truncations, infos = made
        terminated = self._stacked(terminations)
        truncated = self._stacked(truncations)
        has_ended = (terminated | truncated).all(1)
        # A flag counts when the agent leaves, and at the episode's end.
        is_new = self._was_active | has_ended[:, None]
        return (
            self._rows(observations),
            self._stacked(rewards).astype(np.float32).reshape(-1),
            (terminated & is_new).reshape(-1),
            (truncated & is_new).reshape(-1),
            self._infos(infos),
        )

    def _stacked(self, values: ByAgent) -> np.ndarray:
        """Return arrays `[N, ...]` by agent as one `[N, A, ...]`."""
        return np.stack([values[agent] for agent in self._agents], axis=1)

    def _rows(self, observations: ByAgent) -> Any:
        """Return observations `[N, ...]` by agent as rows `[N * A, ...]`, nested as the space is."""
        by_agent = [self._split_seen(observations[agent]) for agent in self._agents]
        leaves = [np.stack(values, axis=1) for values in zip(*by_agent, strict=True)]
        return self._join([leaf.reshape(-1, *leaf.shape[2:]) for leaf in leaves])

    def _by_env(self, actions: Any) -> np.ndarray:
        """Return a leaf of actions `[N * A, ...]` as `[N, A, ...]`."""
        array = np.asarray(actions)
        if array.shape[:1] != (self.num_envs,):
            raise ValueError(
                f"step failed: expected {self.num_envs} actions, one for each agent of each env, got shape "
                f"{array.shape}. No env was stepped."
            )
        return array.reshape(self.envs.num_envs, len(self._agents), *array.shape[1:])

    def _infos(self, infos: Mapping[str, Any]) -> AgentInfos:
        """Return an info for each row, from infos by agent with masks."""
        ends = infos.get("final_obs")
        finals = infos.get("final_info", {})
        rows: AgentInfos = []
        for env_id in range(self.envs.num_envs):
            for agent in self._agents:
                own = _unmasked(finals.get(agent, {}), env_id)
                own.update(_unmasked(infos.get(agent, {}), env_id))
                if ends is not None and ends[env_id] is not None:
                    own["terminal_observation"] = ends[env_id][agent]
                rows.append(own)
        return rows

    def render(self) -> Any:
        """Return the result of env 0's `render`."""
        return self.envs.render()[0]

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Return an attribute of each env."""
        return self.envs.get_attr(name)

    def env_is_wrapped(self, wrapper_class: type) -> list[bool]:  # noqa: ARG002  # SuperSuit's method
        """Return False for each row, as SuperSuit does."""
        return [False] * self.num_envs

    def close_extras(self, **kwargs: Any) -> None:
        """Close the envs and end the workers."""
        self.envs.close(**kwargs)


def concat_vec_envs_v1(
    make_env: Callable[[], Any],
    num_vec_envs: int,
    num_cpus: int = 0,
    base_class: str = "gymnasium",
    *,
    options: ExecutorOptions | None = None,
) -> Any:
    """Return a vector env with one row for each agent, as SuperSuit's function of this name; takes a factory.

    Args:
        make_env: returns one PettingZoo parallel env, with SuperSuit's wrappers if you like; called in workers.
        num_vec_envs: N.
        num_cpus: worker processes; 0 for one per usable core.
        base_class: "gymnasium" for an `AgentRowsEnv`; "stable_baselines3" for `envherd.sb3.SubprocVecEnv`.
        options: see `ExecutorOptions`.

    Raises:
        ValueError: another `base_class`.
        FactoryError: an env in place of a function.
    """
    num_workers = min(num_cpus, num_vec_envs) or None
    if base_class in ("gymnasium", "gym"):
        return AgentRowsEnv(
            [make_env] * num_vec_envs,
            num_workers=num_workers,
            options=options,
        )
    if base_class == "stable_baselines3":
        # Only with Stable-Baselines3.
        from envherd.executor.facades.sb3.vec_env import SubprocVecEnv

        return SubprocVecEnv(
            [OneGroupFactory(make_env)] * num_vec_envs,
            num_workers=num_workers,
            options=options,
        )
    raise ValueError(
        f"concat_vec_envs_v1 failed: expected 'gymnasium' or 'stable_baselines3' as base_class, got {base_class!r}."
    )


def _unmasked(infos: Mapping[str, Any], env_id: int) -> dict[str, Any]:
    """Return one env's part of Gymnasium's vector infos, as a dict without masks."""
    own = {}
    for name, values in infos.items():
        if f"_{name}" in infos and infos[f"_{name}"][env_id]:
            is_nested = isinstance(values, dict)
            own[name] = _unmasked(values, env_id) if is_nested else values[env_id]
    return own
