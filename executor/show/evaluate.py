"""`evaluate`: plays whole episodes with the passed policies and records the returns of the players.

Guarantees: the episodes depend only on the seed, the number of envs and the policies, if env and policies are
deterministic. The number of workers does not matter. Each env plays an equal share of the episodes, so that short
episodes do not count more than long ones. An episode that the loss of a worker interrupted does not count: the env
plays another one.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from envherd.executor.batched import BatchedEnv
from envherd.executor.batches.arguments import as_count
from envherd.executor.collector import Collector
from envherd.executor.options import ExecutorOptions
from envherd.executor.parallel import ParallelEnv
from envherd.executor.policy import Policy
from envherd.executor.pools.blueprint import checked_options
from envherd.executor.show.per_player import OTHERS, PerPlayer, choose_policies
from envherd.executor.show.results import Evaluation
from envherd.workers.adapters.meltingpot.factory import MeltingPotFactory
from envherd.workers.block.episode_leaves import return_key

#: One policy for all players, or a dict of policies by player, role and "*"; see `PerPlayer`.
Policies = Policy | Mapping[str | int, Policy | None] | None
#: Steps of each env in a batch. More steps spread the cost of a batch; fewer use less memory.
_NUM_STEPS = 50


def evaluate(  # noqa: PLR0913  # its arguments are the settings of an evaluation
    policies: Policies,
    env: str | Callable[..., Any] | BatchedEnv,
    episodes: int = 10,
    *,
    background: Policies = None,
    focal: Sequence[int | str] | None = None,
    num_envs: int = 4,
    num_workers: int | None = None,
    seed: int = 0,
    max_steps: int | None = None,
    primer: Mapping[str, torch.Tensor] | None = None,
    options: ExecutorOptions | None = None,
) -> Evaluation:
    """Play episodes and return the returns of each player.

    Args:
        policies: of the focal players: one policy for all, or a dict by player, role and "*", or a `PerPlayer` for all
            players. None draws random actions. `PerPlayer` calls the policies.
        env: name of a Melting Pot substrate or scenario, which is built `deterministic` and without the world view; or
            a factory of any env with one group of players; or an executor with `episode_statistics`. `evaluate` resets
            the envs of an executor and leaves it open. With `background`, a named scenario keeps its roles, and the
            background policies replace its bots.
        episodes: number of episodes.
        background: policies of the players that are not focal, likewise; `{"*": None}` draws random actions.
        focal: names or indices of the focal players; None for those of the scenario, or all.
        num_envs: number of envs that play at once; at most `episodes`. Ignored with an executor.
        num_workers: worker processes; see `ParallelEnv`. Not with an executor.
        seed: root seed of the envs (an executor keeps its own), and of torch's generator during the evaluation.
        max_steps: truncate episodes after this number of steps; only with a name.
        primer: by key, the recurrent state of one player at the beginning of an episode.
        options: of the executor that `evaluate` makes. Not with an executor.

    Raises:
        ValueError: the envs are batches themselves or have no players, a player has no policy, or `background` is
            passed although all players are focal, `max_steps` with a factory, or settings of an executor with one.
        FactoryError: the models of a scenario's bots are not installed.
    """
    episodes = as_count("evaluate", "episodes", episodes)
    num_envs = as_count("evaluate", "num_envs", num_envs)
    max_steps = as_count("evaluate", "max_steps", max_steps, or_none=True)
    seed = as_count("evaluate", "seed", seed, least=0)
    options = None if options is None else checked_options(options)
    if primer is not None and not isinstance(primer, Mapping):
        raise TypeError(f"evaluate failed: expected primer as a dict of tensors by key or None, got {primer!r}.")
    with _opened(env, episodes, background is not None, num_envs, num_workers, seed, max_steps, options) as executor:
        spec = executor.spec
        if spec.batch_shape:
            raise ValueError(
                f"evaluate failed: expected envs of one row, got {spec.family} envs of {[*spec.batch_shape]}."
            )
        if not spec.groups:
            raise ValueError(
                f"evaluate failed: expected envs with players, as those of Melting Pot and PettingZoo, got "
                f"{spec.family} envs of one agent. `envherd rollout` reports their returns, as does "
                f"ExecutorOptions(episode_statistics=True)."
            )
        everyone = PerPlayer({OTHERS: None}, spec)
        names, roles = everyone.names, everyone.roles
        is_focal = _focal(focal, spec.metadata.get("is_focal"), names)
        policy = _joined(policies, background, is_focal, executor)
        primed = None if primer is None else policy.primer(executor.num_envs, **primer)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            returns, lengths = _play(executor, policy, primed, episodes)
        name = str(spec.metadata.get("name") or spec.family)
        return Evaluation(name, executor.seed, names, roles, is_focal, returns, lengths)


def for_evaluation(factory: MeltingPotFactory, *, has_background: bool) -> MeltingPotFactory:
    """Return the factory of envs that play the same episodes for the same seed, without the world view.

    Background policies take the places of a scenario's bots.
    """
    bots = not (has_background and factory.is_scenario)
    return replace(factory, world_rgb=False, deterministic=True, bots=bots)


@contextlib.contextmanager
def _opened(  # noqa: PLR0913, PLR0917  # the arguments of `evaluate`
    env: Any,
    episodes: int,
    has_background: bool,  # noqa: FBT001
    num_envs: int,
    num_workers: int | None,
    seed: int,
    max_steps: int | None,
    options: ExecutorOptions | None,
) -> Iterator[BatchedEnv]:
    """Yield the caller's executor, or make one and close it at the end."""
    if isinstance(env, BatchedEnv):
        if not env.options.episode_statistics:
            raise ValueError(
                "evaluate failed: expected an executor with options=ExecutorOptions(episode_statistics=True), got one "
                "without. Make it so, or pass the factory."
            )
        ignored = {"num_workers": num_workers, "max_steps": max_steps, "options": options}
        if passed := [name for name, value in ignored.items() if value is not None]:
            raise ValueError(f"evaluate failed: expected no {' or '.join(passed)} with an executor, which has its own.")
        yield env
        return
    if isinstance(env, str):
        env = for_evaluation(MeltingPotFactory(env, max_steps=max_steps), has_background=has_background)
    elif max_steps is not None:
        raise ValueError("evaluate failed: expected max_steps with the name of a substrate alone, got a factory.")
    options = replace(options or ExecutorOptions(), episode_statistics=True)
    count = min(num_envs, episodes)
    with ParallelEnv(count, env, num_workers=num_workers, seed=seed, options=options) as executor:
        yield executor


def _focal(
    chosen: Sequence[int | str] | None, known: Sequence[bool] | None, names: tuple[str, ...]
) -> tuple[bool, ...]:
    """Return for each player whether it is focal."""
    if chosen is None:
        return tuple(known) if known else (True,) * len(names)
    unknown = [one for one in chosen if one not in names and one not in range(len(names))]
    if unknown or not chosen:
        raise ValueError(f"evaluate failed: expected focal players among {list(names)}, got {unknown or 'none'}.")
    return tuple(name in chosen or player in chosen for player, name in enumerate(names))


def _joined(policies: Policies, background: Policies, is_focal: tuple[bool, ...], executor: BatchedEnv) -> PerPlayer:
    """Return one policy that acts for all players."""
    if isinstance(policies, PerPlayer) and background is None:
        return policies
    everyone = PerPlayer({OTHERS: None}, executor.spec)
    mine = [player for player, focal in enumerate(is_focal) if focal]
    others = [player for player, focal in enumerate(is_focal) if not focal]
    if (background is None) != (not others):
        got = "none" if background is None else "some, and all players are focal"
        advice = "Pass background=." if background is None else "Pass focal=, or leave background out."
        raise ValueError(
            f"evaluate failed: expected background policies for the players that are not focal, got {got}. {advice}"
        )
    chosen: dict[str | int, Policy | None] = {
        player: policy
        for given, players in ((policies, mine), (background, others))
        for player, policy in choose_policies(_by_name(given), everyone.names, everyone.roles, players).items()
    }
    return PerPlayer(chosen, executor.spec)


def _by_name(policies: Policies) -> Mapping[str | int, Policy | None]:
    if isinstance(policies, PerPlayer):
        return {player: part.policy for part in policies.parts for player in part.players}
    return policies if isinstance(policies, Mapping) else {OTHERS: policies}


def _play(env: BatchedEnv, policy: PerPlayer, primer: Any, episodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the returns `[E, P]` and lengths `[E]` of episodes: the first of each env, then the second ones, ..."""
    key = ("next", *return_key((*policy.group, "reward")))
    shares = [len(range(env_id, episodes, env.num_envs)) for env_id in range(env.num_envs)]
    found: list[list[tuple[np.ndarray, int]]] = [[] for _ in shares]
    num_steps = env.num_envs * _NUM_STEPS
    for data in Collector(env, policy, frames_per_batch=num_steps, primer=primer, close_env=False):
        following = data.get("next")
        counts = following.get("done").clone()
        if (interrupted := following.get("interrupted", None)) is not None:
            counts &= ~interrupted
        for env_id, step in counts.flatten(1).nonzero().tolist():
            sums = data.get(key)[env_id, step].double().flatten().numpy(force=True)
            found[env_id].append((sums.copy(), int(following.get(("episode", "length"))[env_id, step])))
        if all(len(mine) >= share for mine, share in zip(found, shares, strict=True)):
            break
    rounds = range(math.ceil(episodes / env.num_envs))
    kept = [found[env_id][turn] for turn in rounds for env_id, share in enumerate(shares) if turn < share]
    return np.stack([sums for sums, _ in kept]), np.array([length for _, length in kept], np.int64)
