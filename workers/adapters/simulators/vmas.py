"""VMAS envs behind the partial-reset protocol: B rows of a scenario with several agents, in torch.

Keys and shapes are those of TorchRL's `VmasEnv`: agents are grouped by name (`agent_0`, `agent_1` -> `agents`),
`(group, "observation")` is `[B, agents, ...]`, infos are observed under `(group, "info")`. Where members of a group
differ in shape, each has its own leaves, with its index in the key: `("agents", "0", "observation")`.
Discrete actions are indices `[B, agents]`. Unlike in TorchRL, the infos of a row that was just reset are 0: scenarios
compute infos in `reward`, so at a reset they would belong to the previous episode.

`terminated` is the scenario's own `done`, `truncated` is `max_steps`; the adapter always reads both, whatever
`terminated_truncated` the env was made with, so neither hides the other.

Seeds: VMAS keeps one random state for all its envs of a process; here each env has its own. A reset of some rows
draws from the state of the env and seeds nothing. What a scenario draws while it is built depends on VMAS's state at
that time; `VmasFactory` also seeds that.

Limits: if an observation function draws random numbers, a partial reset also draws for the rows that are not reset.
That changes only later random numbers.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from envherd.shm.specs import Box, Discrete, Domain, EnvSpec, Key, LeafSpec, MultiDiscrete, Unbounded, done_leaves
from envherd.workers import seeding, snapshot
from envherd.workers.adapters.common.tree import interval, nested
from envherd.workers.adapters.simulators.batch import Leaves, Stepped, TorchBatchAdapter, torch_dtype_name
from envherd.workers.env_values import Unsaveable
from envherd.workers.errors import SpecError

#: Agent index -> what VMAS gave for that agent.
_ByAgent = Sequence[Any]
_Take = Callable[[_ByAgent], torch.Tensor]


@dataclass(frozen=True)
class _Group:
    """Agents that share a tensordict.

    Attributes:
        name: key of it.
        members: indices into the env's agents.
        is_dense: all members have leaves of the same shape, so the group has its own batch shape.
    """

    name: str
    members: tuple[int, ...]
    is_dense: bool


class VmasAdapter(TorchBatchAdapter):
    """One `vmas.simulator.environment.environment.Environment`; see the module.

    Args:
        env: what the factory returned.

    Raises:
        SpecError: an observation or action that no array can hold.
    """

    family: ClassVar[str] = "vmas"

    def __init__(self, env: Any) -> None:
        super().__init__(env, int(env.num_envs), env.device, keeps_actions=False)  # it clones them
        self._random_state = list(env.vmas_random_state)
        env.terminated_truncated = True
        self._names = [agent.name for agent in env.agents]
        with self._on_stage():
            observations, infos = env.get_from_scenario(
                get_observations=True, get_rewards=False, get_infos=True, get_dones=False
            )
        self._no_infos = [{name: torch.zeros_like(value) for name, value in one.items()} for one in self._listed(infos)]
        observed = [
            {"observation": one, **({"info": info} if info else {})}
            for one, info in zip(self._listed(observations), self._no_infos, strict=True)
        ]
        groups = [
            _Group(name, tuple(map(self._names.index, members)), _is_dense(observed, env, members, self._names))
            for name, members in _group_map(self._names).items()
        ]
        self._takes, observation = _plan_observation(groups, observed)
        action, self._gives = _plan_actions(groups, env)
        self._rewards = [(group.name, group.members) for group in groups]
        batch = (self._num_rows,)
        self.spec = EnvSpec(
            observation=observation,
            action=action,
            reward=tuple(LeafSpec((g.name, "reward"), (*batch, len(g.members), 1), "float32") for g in groups),
            done=done_leaves(batch),
            batch_shape=batch,
            groups=tuple(((g.name,), (*batch, len(g.members))) for g in groups if g.is_dense),
            family=self.family,
            metadata={
                "env": type(env.scenario).__module__.rpartition(".")[2],
                "device": str(self.device),
                "group_map": {group.name: [self._names[i] for i in group.members] for group in groups},
                "agent_names": self._names,
                "agent_count": len(self._names),
            },
        )

    def state_dict(self) -> Any:
        """Return the state of the env and of the generators that it draws from."""
        state = _State()
        state.env, state.latest, state.random_state = self.env, self._latest, self._random_state
        state.generators = self._generators.state
        try:
            return snapshot.save(state)
        except Unsaveable as error:
            raise self._without_state(str(error)) from None

    def load_state_dict(self, state: Any) -> None:
        """Restore a state that `state_dict` returned."""
        self.read_state(state)()

    def read_state(self, state: Any) -> Callable[[], None]:
        """Check a state that `state_dict` returned; return what restores it."""
        restored = _State()
        restored.env = self.env
        put = snapshot.read(restored, state)

        def put_all() -> None:
            put()
            seeding.legacy_of(restored.generators[1])  # numpy does not check it
            self._latest, self._random_state = restored.latest, restored.random_state
            self._generators.state = restored.generators

        return put_all

    def render(self) -> Any:
        """Return VMAS's picture of row 0, uint8 `[H, W, 3]`; VMAS needs a display (or a virtual one)."""
        with self._on_stage():
            picture = self.env.render(mode="rgb_array", env_index=0)
        return None if picture is None else np.ascontiguousarray(picture)

    def _reset_all(self, seed: int | None, options: dict[str, Any]) -> Leaves:
        _refuse_options(options)
        return self._observed(self.env.reset(seed=seed), self._no_infos)

    def _reset_rows(self, rows: torch.Tensor, options: dict[str, Any]) -> Leaves:
        _refuse_options(options)
        for index in rows.nonzero().view(-1).tolist():
            self.env.reset_at(index, return_observations=False)
        (observations,) = self.env.get_from_scenario(
            get_observations=True, get_rewards=False, get_infos=False, get_dones=False
        )
        return self._observed(observations, self._no_infos)

    def _step(self, actions: Leaves) -> Stepped:
        by_agent: list[Any] = [None] * len(self._names)
        for leaf, (members, dim) in zip(actions, self._gives, strict=True):
            for index, own in zip(members, [leaf] if dim is None else leaf.unbind(dim), strict=True):
                by_agent[index] = own
        observations, rewards, terminated, truncated, infos = self.env.step(by_agent)
        given = self._listed(rewards)
        grouped = [torch.stack([given[i] for i in members], 1).unsqueeze(-1) for _, members in self._rewards]
        return self._observed(observations, infos), grouped, terminated, truncated

    def _observed(self, observations: Any, infos: Any) -> Leaves:
        observed = [
            {"observation": one, "info": info}
            for one, info in zip(self._listed(observations), self._listed(infos), strict=True)
        ]
        return [take(observed) for take in self._takes]

    def _listed(self, by_agent: Any) -> _ByAgent:
        return [by_agent[name] for name in self._names] if isinstance(by_agent, Mapping) else by_agent

    @contextlib.contextmanager
    def _on_stage(self) -> Iterator[None]:
        shared = self.env.vmas_random_state  # one list for all VMAS envs of the process
        with super()._on_stage():
            before = list(shared)
            shared[:] = self._random_state
            try:
                yield
            finally:
                self._random_state = list(shared)
                shared[:] = before


class _State:
    """What the next steps of a `VmasAdapter` depend on."""

    env: Any
    latest: Leaves | None
    random_state: list[Any]
    generators: Any


def seed_builds() -> None:
    """Set VMAS's random state, from which scenarios draw while they are built, to that of the global generators."""
    from vmas.simulator.environment import Environment

    Environment.vmas_random_state[:] = [torch.get_rng_state(), np.random.get_state(), random.getstate()]


def _refuse_options(options: Mapping[str, Any]) -> None:
    if options:
        raise TypeError(f"reset failed: expected no keyword arguments for a VMAS env, got {next(iter(options))!r}.")


def _group_map(names: Sequence[str]) -> dict[str, list[str]]:
    """Group agents as TorchRL's `VmasEnv` does: by `NAME_<int>`, or all in one group."""
    groups: dict[str, list[str]] = {}
    for name in names:
        prefix, _, number = name.rpartition("_")
        if not (prefix and number.isdigit()):
            return {"agents": list(names)}
        groups.setdefault(prefix, []).append(name)
    return {"agents": groups["agent"]} if list(groups) == ["agent"] else groups


def _is_dense(observed: _ByAgent, env: Any, members: Sequence[str], names: list[str]) -> bool:
    """Return whether all members of a group have the same leaves, of the same shapes."""
    indices = [names.index(member) for member in members]
    shapes = [[(key, value.shape[1:]) for key, value in _items(observed[i], ())] for i in indices]
    sizes = [_action_shape(_action_space(env, i)) for i in indices]
    return all(shape == shapes[0] for shape in shapes) and all(size == sizes[0] for size in sizes)


def _items(value: Any, prefix: Key) -> Iterator[tuple[Key, torch.Tensor]]:
    """Yield `(key, tensor)` of a nested dict, sorted by key."""
    if isinstance(value, Mapping):
        for name in sorted(value):
            yield from _items(value[name], (*prefix, str(name)))
    else:
        yield prefix, value


def _plan_observation(groups: Sequence[_Group], observed: _ByAgent) -> tuple[list[_Take], tuple[LeafSpec, ...]]:
    takes: list[_Take] = []
    leaves = []
    for group in groups:
        stacks = [group.members] if group.is_dense else [(index,) for index in group.members]
        for position, members in enumerate(stacks):
            prefix = (group.name,) if group.is_dense else (group.name, str(position))
            for key, like in _items(observed[members[0]], ()):
                is_info = key[0] == "info"
                width = tuple(like.shape[1:]) or (1,)
                shape = (like.shape[0], *((len(members),) if group.is_dense else ()), *width)
                dtype = "float32" if is_info else torch_dtype_name(like.dtype, "/".join((*prefix, *key)))
                leaves.append(LeafSpec((*prefix, *key), shape, dtype))
                takes.append(_taker(members, key, width, is_stacked=group.is_dense, is_info=is_info))
    return takes, tuple(leaves)


def _taker(members: tuple[int, ...], key: Key, width: tuple[int, ...], *, is_stacked: bool, is_info: bool) -> _Take:
    def one(observed: _ByAgent, index: int) -> torch.Tensor:
        value = observed[index]
        try:
            for name in key:
                value = value[name]
        except KeyError:
            raise SpecError(
                f"reading {'/'.join(key)} failed: expected it of every agent at every step, got none of agent "
                f"{index}. Always return it in the scenario."
            ) from None
        value = value.view(value.shape[0], *width)
        return value.to(torch.float32) if is_info else value

    if is_stacked:
        return lambda observed: torch.stack([one(observed, index) for index in members], 1)
    return lambda observed: one(observed, members[0])


#: The agents of an action leaf, and the dimension along which they are stacked (None: a single agent).
_Give = tuple[tuple[int, ...], int | None]


def _plan_actions(groups: Sequence[_Group], env: Any) -> tuple[tuple[LeafSpec, ...], list[_Give]]:
    leaves: list[LeafSpec] = []
    gives: list[_Give] = []
    for group in groups:
        spaces = [_action_space(env, i) for i in group.members]
        if group.is_dense:
            shape = (env.num_envs, len(spaces), *_action_shape(spaces[0]))
            dtype, domain = _action_domain(spaces, shape)
            leaves.append(LeafSpec((group.name, "action"), shape, dtype, domain))
            gives.append((group.members, 1))
            continue
        for position, (index, space) in enumerate(zip(group.members, spaces, strict=True)):
            shape = (env.num_envs, *_action_shape(space))
            dtype, domain = _action_domain([space], (env.num_envs, 1, *_action_shape(space)))
            leaves.append(LeafSpec((group.name, str(position), "action"), shape, dtype, _alone(domain)))
            gives.append(((index,), None))
    return tuple(leaves), gives


def _action_space(env: Any, index: int) -> Any:
    return env.get_agent_action_space(env.agents[index])


def _action_shape(space: Any) -> tuple[int, ...]:
    return () if hasattr(space, "n") else tuple(space.shape)


def _action_domain(spaces: Sequence[Any], shape: tuple[int, ...]) -> tuple[str, Domain]:
    """Return dtype and domain of the actions of agents, `[B, agents, ...]`; gym's spaces are read by what they have."""
    first = spaces[0]
    if hasattr(first, "n"):
        sizes = [int(space.n) for space in spaces]
        if len(set(sizes)) == 1:
            return "int64", Discrete(sizes[0])
        return "int64", MultiDiscrete(nested(np.broadcast_to(np.array(sizes), shape)))
    if hasattr(first, "nvec"):
        return "int64", MultiDiscrete(nested(np.broadcast_to(np.stack([space.nvec for space in spaces]), shape)))
    low, high = (np.stack([getattr(space, bound) for space in spaces]) for bound in ("low", "high"))
    domain = interval(low, high, np.dtype("float32"))
    return "float32", domain


def _alone(domain: Domain) -> Domain:
    """Return the domain of `[B, 1, ...]` as one of `[B, ...]`."""
    if isinstance(domain, Box):
        return Box(*(bound[0] if bound.ndim else bound for bound in (domain.low, domain.high)))
    if isinstance(domain, MultiDiscrete):
        return MultiDiscrete(tuple(row[0] for row in domain.nvec))
    assert isinstance(domain, (Discrete, Unbounded))
    return domain
