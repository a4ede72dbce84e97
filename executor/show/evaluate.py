"""`evaluate`: plays a fixed set of whole episodes of one task or of several, and returns returns, lengths and success.

Guarantees: the set of episodes and their seeds are fixed before the first one begins, so short episodes do not count
more than long ones. Each episode counts once: as ended, or as failed. If envs and policies are deterministic, the
results depend on the seed and on them, and not on the number of workers.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any, Concatenate, Protocol, cast, overload

import torch
from tensordict import TensorDict

from envherd.executor.batched import BatchedEnv
from envherd.executor.batches.arguments import as_count, need_callables, need_seconds
from envherd.executor.batches.fast_tensordict import without_grad
from envherd.executor.guests.collectors.policy import Placed, Policy
from envherd.executor.keywords import P, names_right_keyword
from envherd.executor.options import ExecutorOptions
from envherd.executor.sending.blueprint import checked_options, choose_workers
from envherd.executor.show.per_player import (
    OTHERS,
    PerPlayer,
    acting_groups,
    as_policy,
    choose_policies,
    names_and_roles,
    random_actions,
)
from envherd.executor.show.playing import Part, Play, Rules
from envherd.executor.show.results import Cast, EpisodeRecord, Evaluation, Evaluations
from envherd.shm.specs import EnvSpec
from envherd.workers.adapters.env_names import made_for
from envherd.workers.adapters.meltingpot.factory import MeltingPotFactory
from envherd.workers.options import Infos

#: One policy for all agents, or a dict of policies by agent, role and "*"; see `PerPlayer`.
Policies = Policy | Mapping[str | int, Policy | None] | None
#: A name, a factory, or an executor.
Env = str | Callable[..., Any] | BatchedEnv
#: Several, by name or in a list; no executors.
Tasks = Mapping[str, Any] | list[Any] | tuple[Any, ...]
#: Of workers without `options`. After these seconds for a step or a reset, the episode counts as failed.
_DEFAULT_OPTIONS = ExecutorOptions(
    infos="plain",
    step_timeout_s=300.0,
    reset_timeout_s=300.0,
)


#: Argument that is gone -> what to use.
_INSTEAD_OF = {
    **dict.fromkeys(
        ("videos", "filmed", "fps"),
        "Use VideoRecorder, or envherd rollout --mp4: with the same seed, the first episode of env i is episode i.",
    ),
    **dict.fromkeys(
        ("out", "label"),
        "Evaluate task by task, and write to_dict() of each result.",
    ),
}


class _Evaluate(Protocol[P]):
    """The type of `evaluate`: one task has an `Evaluation`, several have `Evaluations`."""

    @overload
    def __call__(
        self,
        policies: Policies,
        env: Tasks,
        *args: P.args,
        **settings: P.kwargs,
    ) -> Evaluations: ...
    @overload
    def __call__(
        self,
        policies: Policies,
        env: Env,
        *args: P.args,
        **settings: P.kwargs,
    ) -> Evaluation: ...


def _typed(
    function: Callable[Concatenate[Any, Any, P], Evaluation | Evaluations],
) -> _Evaluate[P]:
    """Return the function itself, whose result has a narrower type for type checkers."""
    return cast("_Evaluate[P]", function)


@_typed
@partial(names_right_keyword, instead_of=_INSTEAD_OF)
@without_grad
def evaluate(  # noqa: PLR0913  # its arguments are the settings of an evaluation
    policies: Policies,
    env: Env | Tasks,
    episodes: int = 10,
    *,
    background: Policies = None,
    focal: Sequence[int | str] | None = None,
    num_workers: int | None = None,
    seed: int = 0,
    max_steps: int | None = None,
    primer: Mapping[str, torch.Tensor] | None = None,
    options: ExecutorOptions | None = None,
    policy_for: Callable[[str, BatchedEnv], Policies] | None = None,
    success: Callable[[Mapping[str, Any], EpisodeRecord], bool] | None = None,
    max_batch: int | None = None,
    deadline_s: float = 0.005,
) -> Evaluation | Evaluations:
    """Play episodes, and return success, returns and lengths.

    Each worker process has one env at a time. It is built when the worker comes to its task, and dropped after the
    task's last episode, so that at most `num_workers` envs are alive. An episode whose env raises, breaks its spec,
    dies or exceeds a limit of `options` is recorded as failed, and its env is built anew. A task whose env cannot be
    built is recorded as failed as a whole.

    Args:
        policies: one policy for all agents, or a dict by agent, role and `"*"` (see `PerPlayer`); the same for all
            tasks. None draws random actions.
        env: a factory of any env, or a name as on the command line, such as "gymnasium:CartPole-v1". A dict of them by
            task, or a list. Or an executor: `evaluate` resets its envs and leaves it open, and a policy gets a batch of
            its envs. Melting Pot envs with names are built `deterministic` and without the world view. With
            `background`, a named scenario keeps its roles, and the background policies replace its bots.
        episodes: number of episodes of each task. Episode i has the seed of the first episode of env i in an executor
            with this root seed.
        background: policies of the agents that are not focal, likewise; `{"*": None}` draws random actions.
        focal: names or indices of the focal agents; None for those of the scenario, or all.
        num_workers: worker processes, with one env each; None for one per usable core. Not with an executor.
        seed: root seed of the episodes (an executor keeps its own), and of torch's generator during the evaluation.
        max_steps: truncate episodes after this number of steps.
        primer: by key, the recurrent state of one agent (or of an env of one agent) at the beginning of an episode.
        options: of the workers. By default a step and a reset may take 300 s. Not with an executor.
        policy_for: in place of `policies`: called with a task's name and an executor of its envs (read its spec; do not
            step it), it returns the policies of the task, which are released after the task.
        success: called with the info of an episode's last step and its record; returns whether it was a success. None
            reads `info["success"]` or `info["is_success"]`.
        max_batch: let one call of a policy act for the envs, at most this number, of all tasks that wait for it and
            have equal observations: for policies that take long for one env, such as large networks. A network's
            rounding, and random draws, depend on which envs these are, so results may differ between runs.
            None acts for each env alone. Not with an executor.
        deadline_s: with `max_batch`, seconds for which an env waits for others.

    Returns:
        An `Evaluation`; for a dict or list of tasks, `Evaluations`.

    Raises:
        ValueError: the envs are batches themselves, an agent has no policy, `background` is passed although all agents
            are focal, or settings of an executor with one.
        EnvherdError, MemoryError, OSError: no env of any task could be built, or the system refuses a thread.
    """
    rules = Rules(
        episodes=as_count("evaluate", "episodes", episodes),
        seed=as_count("evaluate", "seed", seed, least=0),
        max_steps=as_count("evaluate", "max_steps", max_steps, or_none=True),
        success=success,
        max_batch=as_count("evaluate", "max_batch", max_batch, or_none=True),
        deadline_s=deadline_s or 0.0,
    )
    need_seconds("evaluate", "deadline_s", deadline_s)
    need_callables("evaluate", success=success, policy_for=policy_for)
    if primer is not None and not isinstance(primer, Mapping):
        raise TypeError(
            f"evaluate failed: expected primer as a dict of tensors by key or None, got {primer!r}."
        )
    tasks = tasks_of(env, has_background=background is not None)
    if isinstance(env, BatchedEnv):
        _refuse(
            "with an executor, which has its own",
            num_workers=num_workers,
            options=options,
            max_batch=max_batch,
        )
        rules = replace(rules, seed=env.seed)
    if policy_for is not None and policies is not None:
        raise ValueError(
            "evaluate failed: expected policies=None with policy_for, got both. Leave one out."
        )
    if isinstance(policies, Mapping) and {*map(str, policies)}.issuperset(tasks):
        raise ValueError(
            "evaluate failed: expected policies for all tasks, got a dict of them by task. Pass None, and "
            "policy_for=lambda task, env: policies[task]."
        )

    def prepare(name: str, built: BatchedEnv) -> tuple[Part, Cast]:
        return _part_of(
            (lambda: policies)
            if policy_for is None
            else partial(policy_for, name, built),
            built.spec,
            background,
            focal,
            primer,
        )

    play = Play(tasks, rules, prepare)
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]  # torch's
    with torch.random.fork_rng(devices=list(devices)):
        if isinstance(env, BatchedEnv):
            play.play_in(env)
        else:
            chosen = _DEFAULT_OPTIONS if options is None else _with_infos(options)
            num_played = len(tasks) * rules.episodes
            play.run(choose_workers(num_played, num_workers), chosen)
    if play.build_error is not None and all(task.cast is None for task in play.tasks):
        raise play.build_error
    found = {
        task.name: Evaluation.of(
            task.cast or Cast(env=task.name),
            rules.seed,
            sorted(task.records, key=attrgetter("episode")),
        )
        for task in play.tasks
    }
    return (
        Evaluations(found)
        if isinstance(env, (Mapping, list, tuple))
        else next(iter(found.values()))
    )


def tasks_of(
    env: Any,
    env_kwargs: dict[str, Any] | None = None,
    *,
    has_background: bool,
) -> dict[str, Any]:
    """Return the tasks by name, with their factories, or with an executor.

    Args:
        env: as of `evaluate`.
        env_kwargs: of envs with names.
        has_background: see `_named_task`.

    Raises:
        TypeError, ValueError: an executor among several tasks; two tasks of one name, or no task.
    """
    pairs: Iterable[tuple[Any, Any]] = [(env if isinstance(env, str) else "env", env)]
    if isinstance(env, Mapping):
        pairs = env.items()
    elif isinstance(env, (list, tuple)):
        pairs = [
            (one if isinstance(one, str) else f"task_{i}", one)
            for i, one in enumerate(env)
        ]
    tasks: dict[str, Any] = {}
    for name, one in pairs:
        if isinstance(one, BatchedEnv) and one is not env:
            raise TypeError(
                f"evaluate failed: expected a factory or a name for task {name!r}, got an executor."
            )
        if str(name) in tasks:
            raise ValueError(
                f"evaluate failed: expected tasks of different names, got {name} twice. Name each once, or pass a dict "
                f"by name."
            )
        tasks[str(name)] = (
            _named_task(one, env_kwargs, has_background=has_background)
            if isinstance(one, str)
            else one
        )
    if not tasks:
        raise ValueError("evaluate failed: expected tasks, got none.")
    return tasks


def _named_task(
    name: str,
    env_kwargs: dict[str, Any] | None,
    *,
    has_background: bool,
) -> Any:
    """Return the factory of envs that a name stands for.

    Melting Pot's play the same episodes for the same seed, without the world view; background policies take the places
    of a scenario's bots.
    """
    factory, kwargs = made_for(name, env_kwargs, None)
    if isinstance(factory, MeltingPotFactory):
        bots = not (has_background and factory.is_scenario)
        factory = replace(factory, world_rgb=False, deterministic=True, bots=bots)
    return partial(factory, **kwargs) if kwargs else factory


def _refuse(where: str, **settings: Any) -> None:
    if passed := [name for name, value in settings.items() if value is not None]:
        raise ValueError(f"evaluate failed: expected no {' or '.join(passed)} {where}.")


def _with_infos(options: ExecutorOptions) -> ExecutorOptions:
    """Return options with which infos can be read."""
    options = checked_options(options)
    return (
        options
        if options.info_policy != "drop"
        else replace(options, infos=Infos("plain", options.info_keys))
    )


def _part_of(
    choose: Callable[[], Policies],
    spec: EnvSpec,
    background: Policies,
    focal: Sequence[int | str] | None,
    primer: Mapping[str, torch.Tensor] | None,
) -> tuple[Part, Cast]:
    """Return what acts in the envs of a task, and who plays there."""
    if spec.batch_shape:
        raise ValueError(
            f"evaluate failed: expected envs of one row, got {spec.family} envs of {[*spec.batch_shape]}."
        )
    title = str(spec.metadata.get("name") or spec.metadata.get("env_id") or spec.family)
    # Not before: a function of the caller may expect an env of one row.
    policy = join_policies(choose(), spec, background, focal)
    if isinstance(policy, PerPlayer):
        cast = Cast(
            env=title,
            players=policy.names,
            roles=policy.roles,
            is_focal=_focal(focal, spec.metadata.get("is_focal"), policy.names),
        )
        primed = None if primer is None else policy.primer(1, **primer)
        return Part(Placed(policy), primed, [(*policy.group, "reward")]), cast
    names = tuple(spec.reward_names())
    cast = Cast(
        env=title,
        players=names,
        roles=("default",) * len(names),
        is_focal=(True,) * len(names),
    )
    primed = None if primer is None else TensorDict(dict(primer)).unsqueeze(0)
    return Part(Placed(policy), primed, [leaf.key for leaf in spec.reward]), cast


def _focal(
    chosen: Sequence[int | str] | None,
    known: Sequence[bool] | None,
    names: tuple[str, ...],
) -> tuple[bool, ...]:
    """Return for each agent whether it is focal."""
    if chosen is None:
        return tuple(known) if known else (True,) * len(names)
    unknown = [
        one for one in chosen if one not in names and one not in range(len(names))
    ]
    if unknown or not chosen:
        raise ValueError(
            f"evaluate failed: expected focal agents among {list(names)}, got {unknown or 'none'}."
        )
    return tuple(
        name in chosen or player in chosen for player, name in enumerate(names)
    )


def join_policies(
    policies: Policies,
    spec: EnvSpec,
    background: Policies = None,
    focal: Sequence[int | str] | None = None,
) -> Policy:
    """Return one policy that acts for all agents, a `PerPlayer`; or that of an env of one agent, or of several groups.

    Raises:
        ValueError: an agent has no policy, or there are background policies or focal agents where there must be none.
    """
    acting = acting_groups(spec)
    if len(acting) != 1:
        return _single(policies, spec, background=background, focal=focal)
    if isinstance(policies, PerPlayer) and background is None:
        return policies
    names, roles = names_and_roles(spec, acting[0])
    is_focal = _focal(focal, spec.metadata.get("is_focal"), names)
    mine = [player for player, focal in enumerate(is_focal) if focal]
    others = [player for player, focal in enumerate(is_focal) if not focal]
    if (background is None) != (not others):
        got = (
            "none. Pass background="
            if background is None
            else "some, and all agents are focal. Pass focal=, or leave background out"
        )
        raise ValueError(
            f"evaluate failed: expected background policies for the agents that are not focal, got {got}."
        )
    chosen: dict[str | int, Policy | None] = {
        player: policy
        for given, players in ((policies, mine), (background, others))
        for player, policy in choose_policies(
            _by_name(given),
            names,
            roles,
            players,
        ).items()
    }
    return PerPlayer(chosen, spec)


def _single(policies: Any, spec: EnvSpec, **of_players: Any) -> Policy:
    """Return the policy of envs of one agent, or of several groups of agents, for all of which it acts."""
    kind = "several groups of agents" if spec.groups else "one agent"
    _refuse(f"for envs of {kind}, got {spec.family} envs", **of_players)
    if policies is None:
        return partial(random_actions, spec)
    return as_policy("evaluate", policies, spec)


def _by_name(policies: Policies) -> Mapping[str | int, Policy | None]:
    if isinstance(policies, PerPlayer):
        return {
            player: part.policy for part in policies.parts for player in part.players
        }
    return policies if isinstance(policies, Mapping) else {OTHERS: policies}
