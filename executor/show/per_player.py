"""`PerPlayer`: one policy for a batch of envs with agents, composed of policies by agent or by role.

policy = PerPlayer({"player_0": mine, "*": other}, env.spec)
data = env.rollout(200, policy)

Guarantees: each distinct policy is called once per batch, with one row per agent that it acts for. All keys that it
writes, including its state for the next step, are in the batch under the group of the agents. Policies are not copied
or moved.
Does not know executors: it works like any other policy in rollouts, collectors and facades.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import nn

from envherd.executor.batches.actions import ActionSampler
from envherd.executor.batches.arguments import WRAP, WRAP_MODEL
from envherd.executor.guests.collectors.policy import Policy
from envherd.executor.rollouts.policy_state import leaf_keys, run_policy
from envherd.shm.specs import Discrete, EnvSpec, Key

#: Name for all agents that no other name covers.
OTHERS = "*"


class RandomPlayer:
    """A policy that draws uniformly among the legal actions, from torch's generator.

    Args:
        num_actions: actions are `0..num_actions - 1`; an `action_mask` in the rows (bool `[B, A]`) restricts them.
    """

    def __init__(self, num_actions: int) -> None:
        self.num_actions = num_actions

    def __call__(self, rows: TensorDictBase) -> TensorDictBase:
        """Set `action`, int64 `[B]`."""
        mask = rows.get("action_mask", None)
        if mask is None:
            action = torch.randint(
                self.num_actions,
                rows.batch_size,
                device=rows.device,
            )
        else:
            action = (
                torch.rand(mask.shape, device=mask.device)
                .masked_fill(~mask.bool(), -1.0)
                .argmax(-1)
            )
        return rows.set("action", action)


class Part(NamedTuple):
    """A policy and the agents that it acts for.

    Attributes:
        policy: as it was passed; for None a `RandomPlayer`, or what draws actions that are not discrete.
        players: ascending indices in the group.
    """

    policy: Any
    players: tuple[int, ...]

    @property
    def at(self) -> slice | list[int]:
        """The agents as an index: a slice, which copies nothing, if possible."""
        first = self.players[0]
        last = self.players[-1]
        return (
            slice(first, last + 1)
            if last - first + 1 == len(self.players)
            else list(self.players)
        )


class PerPlayer(TensorDictModuleBase):  # type: ignore[misc]  # untyped base
    """Act with different policies for the agents of one env.

    A policy is called with rows `[B]`, one for each of its agents in each env, and returns them with `action`. A row
    holds the agent's observation (`("observation", "RGB")`), `player` (int64, its index) and the flags of its env.
    Other keys that the policy writes are kept under the group, with zeros for agents whose policies do not write them.
    A key `("next", key)` that it writes is `key` in the row of the same agent and env at the next step.

    The same object for several names is one policy with shared parameters; different objects are separate.

    Args:
        policies: policy by agent (its name or index), role, or `"*"` for all others. An agent takes precedence over
            a role, and a role over `"*"`. None draws random actions.
        spec: of the envs, `env.spec`, with the names and roles of the agents. Without a spec, pass None and `roles`.
        roles: one role per agent; None for those of the spec.
        group: key of the group of agents; None for the first group of the spec that acts, without a spec `"agents"`.

    Attributes:
        parts: the distinct policies and their agents, in the order of their first agents.
        names: of the agents.
        roles: of the agents.

    Raises:
        ValueError: a name that is neither an agent nor a role, an agent without a policy, or None without a spec.
    """

    def __init__(
        self,
        policies: Mapping[str | int, Policy | None],
        spec: EnvSpec | None = None,
        *,
        roles: Sequence[str] | None = None,
        group: Key | str | None = None,
    ) -> None:
        super().__init__()
        if spec is None and roles is None:
            raise ValueError(
                "PerPlayer failed: expected the spec of the envs or roles, got neither. Pass env.spec."
            )
        self.group = _group(spec, group)
        # TorchRL reads these to see that it can be called with a batch.
        self.in_keys = [self.group]
        self.out_keys = [(*self.group, "action")]
        self.names, self.roles = names_and_roles(spec, self.group, roles)
        chosen = choose_policies(policies, self.names, self.roles)
        by_policy: dict[int, list[int]] = {}
        for player, policy in chosen.items():
            by_policy.setdefault(id(policy), []).append(player)
        parts = []
        for players in by_policy.values():
            acting = chosen[players[0]]
            if not (acting is None or callable(acting)):
                raise TypeError(
                    f"PerPlayer failed: expected a callable or None for a policy, got {acting!r}."
                )
            acting = _random_player(spec, self.group) if acting is None else acting
            parts.append(Part(acting, tuple(players)))
        self.parts = tuple(parts)
        self.trained = nn.ModuleList(
            [part.policy for part in self.parts if isinstance(part.policy, nn.Module)]
        )
        self.copyable = all(
            getattr(part.policy, "copyable", True) is not False for part in self.parts
        )

    def forward(self, root: TensorDictBase) -> TensorDictBase:
        """Act for all agents: set `(group, "action")` and the other keys that the policies write.

        Args:
            root: batch `[N]` with the group as `[N, P]`; or any other leading shape.
        """
        group = root.get(self.group)
        lead = root.batch_size
        if tuple(group.batch_size) != (*lead, len(self.names)):
            raise ValueError(
                f"PerPlayer failed: expected a group of batch size {[*lead, len(self.names)]}, got "
                f"{[*group.batch_size]}. Make it with the spec of these envs."
            )
        written: dict[Key, torch.Tensor] = {}
        for part in self.parts:
            rows = self._rows(root, group, part).reshape(-1)
            given = {key: rows.get(key) for key in leaf_keys(rows)}
            acted = run_policy(part.policy, rows)
            for key in leaf_keys(acted):
                value = acted.get(key)
                if value is not given.get(key):
                    value = value.reshape(*lead, len(part.players), *value.shape[1:])
                    self._merge(written, key, value, part, len(lead))
        for key, value in written.items():
            place = (
                ("next", *self.group, *key[1:])
                if key[0] == "next"
                else (*self.group, *key)
            )
            root.set(place, value)
        return root

    def _merge(
        self,
        written: dict[Key, torch.Tensor],
        key: Key,
        value: torch.Tensor,
        part: Part,
        dim: int,
    ) -> None:
        """Write a policy's values for its agents into the entry of all agents, along dimension `dim`."""
        if len(self.parts) == 1:
            written[key] = value
            return
        shape = (*value.shape[:dim], len(self.names), *value.shape[dim + 1 :])
        whole = written.setdefault(key, value.new_zeros(shape))
        # Floats would be truncated.
        if whole.shape != shape or not torch.can_cast(value.dtype, whole.dtype):
            raise ValueError(
                f"PerPlayer failed: expected {'/'.join(key)} of one shape and kind from all policies, got "
                f"{whole.dtype} {[*whole.shape[dim + 1 :]]} and {value.dtype} {[*shape[dim + 1 :]]}. Use "
                f"different names."
            )
        whole[(*(slice(None),) * dim, part.at)] = value

    def split(self, data: TensorDictBase) -> Iterator[tuple[Part, TensorDictBase]]:
        """Yield each policy's part of a batch, for its learner.

        Args:
            data: transitions of any shape, `[N, T]` say.

        Yields:
            The part, and its rows `[N, T, p]`: its agents' observations, actions and other keys of the group, with
            `next`, which also has the flags of the env: `("next", "reward")` and `("next", "done")` are `[N, T, p, 1]`.
            VIEWS if the agents are contiguous.
        """
        following = data.get("next")
        for part in self.parts:
            rows = self._rows(data, data.get(self.group), part)
            yield (
                part,
                rows.set(
                    "next",
                    self._rows(following, following.get(self.group), part),
                ),
            )

    def _rows(
        self,
        root: TensorDictBase,
        group: TensorDictBase,
        part: Part,
    ) -> TensorDictBase:
        """Return the rows `[*lead, p]` of some agents, with the flags and numbers of their envs."""
        lead = root.batch_size
        count = len(part.players)
        rows: Any = group[(..., part.at)] if count < len(self.names) else group.copy()
        for key, value in root.items():
            is_of_env = isinstance(value, torch.Tensor) and value.shape in (
                lead,
                (*lead, 1),
            )
            # PettingZoo's groups have their own flags.
            if is_of_env and rows.get(key, None) is None:
                rows.set(
                    key,
                    value.unsqueeze(len(lead)).expand(
                        *lead,
                        count,
                        *value.shape[len(lead) :],
                    ),
                )
        player = torch.tensor(part.players, device=root.device)
        return rows.set("player", player.expand(*lead, count))

    def primer(self, num_envs: int, **state: torch.Tensor) -> TensorDictBase:
        """Return a primer for `rollout` and the collectors: the policies' state at the beginning of an episode.

        Args:
            num_envs: N.
            **state: by key, of one agent; repeated for all agents and envs.

        Returns:
            A batch `[N]` with `(group, key)` `[N, P, ...]`.
        """
        shape = (num_envs, len(self.names))
        values = {
            key: value.expand(*shape, *value.shape).clone()
            for key, value in state.items()
        }
        return TensorDict({}, [num_envs]).set(self.group, TensorDict(values, shape))


def as_policy(call: str, given: Any, spec: EnvSpec) -> Policy:
    """Return the policy that a user's object stands for: a callable itself, or a `PerPlayer` for a dict.

    Args:
        call: for messages.
        given: a callable, or a dict of policies by agent, role and "*" (see `PerPlayer`).
        spec: of the envs.

    Raises:
        TypeError: anything else, or a dict for envs that do not have exactly one group of agents.
    """
    has_players = len(acting_groups(spec)) == 1
    if isinstance(given, Mapping) and has_players:
        return PerPlayer(given, spec)
    if not callable(given) or (
        isinstance(given, (Mapping, PerPlayer)) and not has_players
    ):
        expected = "a callable or a dict of them by agent"
        kind = "agents"
        if not has_players:
            expected = "a callable"
            kind = "several groups of agents" if spec.groups else "one agent"
        advice = WRAP_MODEL if hasattr(given, "predict") else WRAP
        raise TypeError(
            f"{call} failed: expected {expected} as the policy of {spec.family} envs of {kind}, got "
            f"{type(given).__name__}. {advice}"
        )
    policy: Policy = given
    return policy


def choose_policies(
    policies: Mapping[str | int, Policy | None],
    names: Sequence[str],
    roles: Sequence[str],
    players: Iterable[int] | None = None,
) -> dict[int, Policy | None]:
    """Return the policy of each agent, by index; see `PerPlayer`.

    Args:
        policies: by agent, role, or "*".
        names: of all agents.
        roles: of all agents.
        players: those that need a policy; None for all.
    """
    if not isinstance(policies, Mapping):
        raise TypeError(
            f"PerPlayer failed: expected a dict of policies by agent or role, got a {type(policies).__name__}. Write "
            f"{{'*': policy}} for one policy of all."
        )
    known = {OTHERS, *names, *roles, *range(len(names))}
    for name in policies:
        if name not in known:
            raise ValueError(
                f"PerPlayer failed: expected names among agents {list(names)}, roles {sorted(set(roles))} and '*', "
                f"got {name!r}."
            )
    chosen: dict[int, Policy | None] = {}
    for player in range(len(names)) if players is None else players:
        candidates = (player, names[player], roles[player], OTHERS)
        found = next((name for name in candidates if name in policies), None)
        if found is None:
            raise ValueError(
                f"PerPlayer failed: expected a policy for each agent, got none for {names[player]} (role "
                f"{roles[player]!r}). Add it, or '*' for all others."
            )
        chosen[player] = policies[found]
    return chosen


def _group(spec: EnvSpec | None, group: Key | str | None) -> Key:
    """Return the key of the agents' group."""
    if group is not None:
        return (group,) if isinstance(group, str) else tuple(group)
    if spec is None:
        return ("agents",)
    acting = acting_groups(spec)
    if not acting:
        raise ValueError(
            f"PerPlayer failed: expected envs with a group of agents, got {spec.family} envs without."
        )
    return acting[0]


def acting_groups(spec: EnvSpec) -> list[Key]:
    """Return the keys of the groups that have actions."""
    return [
        key
        for key, _ in spec.groups
        if any(leaf.key[: len(key)] == key for leaf in spec.action)
    ]


def names_and_roles(
    spec: EnvSpec | None,
    group: Key,
    roles: Sequence[str] | None = None,
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names and the roles of the agents; the role "default" if the spec has none."""
    if spec is None:
        spec = EnvSpec((), (), groups=((group, (len(roles or ()),)),))
    shapes = dict(spec.groups)
    if group not in shapes:
        raise ValueError(
            f"PerPlayer failed: expected a group among {sorted(shapes)}, got {group}."
        )
    count = shapes[group][-1]
    found = (
        (spec.metadata.get("agent_roles") or ["default"] * count)
        if roles is None
        else roles
    )
    if len(found) != count or not count:
        raise ValueError(
            f"PerPlayer failed: expected one role for each of {count} agents, got {len(found)}."
        )
    return tuple(spec.agent_names(group, count)), tuple(map(str, found))


def _random_player(spec: EnvSpec | None, group: Key) -> Policy:
    """Return the policy of agents that act at random."""
    if spec is None:
        raise ValueError(
            "PerPlayer failed: expected the spec of the envs where a policy is None, got none. Pass env.spec, or "
            "RandomPlayer(num_actions) as the policy."
        )
    for leaf in spec.action:
        if leaf.key == (*group, "action") and isinstance(leaf.domain, Discrete):
            return RandomPlayer(leaf.domain.n)
    return partial(_draw_rows, spec, group)


def _draw_rows(spec: EnvSpec, group: Key, rows: TensorDictBase) -> TensorDictBase:
    """Set actions that are not discrete: for each row those of its agent, among the drawn actions of all agents."""
    players = rows["player"]
    # The rows of an env follow each other, one for each agent of the policy.
    num_envs = int((players == players[0]).sum())
    empty = TensorDict({}, [num_envs], device=rows.device)
    drawn = random_actions(spec, empty).get(group)
    env_of = torch.arange(len(rows), device=players.device) // (len(rows) // num_envs)
    return rows.update(drawn[env_of, players])


def random_actions(spec: EnvSpec, root: TensorDictBase) -> TensorDictBase:
    """Act as a policy that draws legal actions, of all agents, from torch's generator."""
    sampler = ActionSampler([spec], int(torch.randint(2**62, ())))
    return sampler.fill(
        root,
        root.batch_size,
        root.device,
        np.zeros(len(root), np.int64),
    )
