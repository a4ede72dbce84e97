"""Make a pool's blueprint from a user's arguments: check and pickle factories, spread envs over workers.

Also check that the envs which were built have specs that fit together.
"""

import errno
import functools
import importlib.util
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from envherd.executor.machine.machine import require_room, usable_cores
from envherd.executor.options import ExecutorOptions
from envherd.shm.specs import EnvSpec
from envherd.workers.adapters import is_env_like
from envherd.workers.adapters.env_names import factory_for
from envherd.workers.build import (
    Factory,
    are_equal,
    check_factory,
    describe,
    interpreter_of,
    kwargs_error,
    modules_of,
    pickle_factory,
)
from envherd.workers.errors import FactoryError, SpecError
from envherd.workers.messages import Prepare
from envherd.workers.options import FactoryCall
from envherd.workers.seeding import as_root_seed
from envherd.workers.sending.pickling import dumps

#: A factory, a name that `env_names` knows, or a list of them.
MakeEnv = Factory | str | Sequence[Factory | str]
EnvKwargs = dict[str, Any] | Sequence[dict[str, Any]] | None

#: Module of envs -> slow module that they import when they are built, if it is installed: a `GymEnv` checks for
#: Stable-Baselines3's envs.
_BROUGHT_IN = {"torchrl.envs.libs.gym": "stable_baselines3"}


class EnvCall(NamedTuple):
    """How an env is built.

    Attributes:
        sent: what its process gets: the factory, pickled unless the pool is serial, and the arguments.
        factory: itself.
    """

    sent: FactoryCall
    factory: Factory


@dataclass
class Blueprint:
    """The description of a pool. The pool and its crew have the same object, of which only `rebuild` changes calls.

    Attributes:
        calls: env id -> how it is built, ascending.
        blocks: env ids of each worker: contiguous, ascending, none empty.
        root_seed: of which `workers.seeding` makes the seeds of all episodes.
        preload: modules for the zygote to import.
        interpreters: of each env, None for this one.
        starts: of each env, what changes the settings of its worker, or None; empty if nothing does. Those of a worker
            do the same.
        draw: `(factories, env_kwargs, env_ids)`: returns the blueprint of such a pool for others, with these ids.
    """

    calls: dict[int, EnvCall]
    blocks: tuple[tuple[int, ...], ...]
    root_seed: int
    preload: tuple[str, ...] = ()
    interpreters: tuple[str | None, ...] = ()
    starts: tuple[Callable[[dict[str, Any]], None] | None, ...] = ()
    draw: Any = None

    def envs_of(self, worker_ids: Iterable[int]) -> np.ndarray:
        """Return the ids of all envs of some workers, int64 `[k]`, ascending."""
        return np.array(sorted(i for w in worker_ids for i in self.blocks[w]), np.int64)

    def is_equal_call(self, env_id: int, other: int) -> bool:
        """Return whether equal calls build two envs."""
        one = self.calls[env_id].sent
        another = self.calls[other].sent
        return another.factory is one.factory and are_equal(another.kwargs, one.kwargs)

    def equal_call_before(self, env_id: int, worker_id: int) -> int | None:
        """Return an env of a worker that an equal call built before this one, or None."""
        for other in self.blocks[worker_id]:
            if other < env_id and self.is_equal_call(env_id, other):
                return other
        return None


def counted(num_envs: Any, make_env: MakeEnv | None) -> tuple[Any, MakeEnv]:
    """Return the number of envs and their factories; a list of factories alone determines both.

    Raises:
        FactoryError: the factory came first, or there is none.
    """
    if make_env is None and isinstance(num_envs, (list, tuple)):
        if not num_envs:
            raise ValueError(
                "make_env failed: expected at least one factory, got an empty list."
            )
        return len(num_envs), num_envs
    if (
        callable(num_envs)
        or isinstance(num_envs, (list, tuple))
        or (isinstance(num_envs, str) and make_env is None)
    ):
        raise FactoryError(
            f"num_envs failed: expected the number of envs first, got {num_envs!r}. Write (4, make_env), or give a "
            f"list of factories alone."
        )
    return num_envs, make_env  # type: ignore[return-value]  # None is refused with the others that cannot be called


def as_factories(num_envs: int, make_env: MakeEnv) -> list[Factory]:
    """Return one factory per env.

    Raises:
        FactoryError: an env instance, something that cannot be called, or a name of no env.
        ValueError: `num_envs` below 1 or far more than the machine can hold, or a list of another length.
    """
    if (
        isinstance(num_envs, bool)
        or not isinstance(num_envs, (int, np.integer))
        or num_envs < 1
    ):
        raise ValueError(
            f"num_envs failed: expected an int of at least 1, got {num_envs!r}."
        )
    num_envs = int(num_envs)
    require_room(num_envs)
    if isinstance(make_env, (list, tuple)):
        if len(make_env) != num_envs:
            raise ValueError(
                f"make_env failed: expected {num_envs} factories, one per env, got {len(make_env)}."
            )
        factories = list(make_env)
    else:
        factories = [make_env] * num_envs
    # Each object once: all envs of a name then share one factory, which is pickled once.
    made = {id(factory): as_factory(factory) for factory in factories}
    return [made[id(factory)] for factory in factories]


def as_factory(make_env: Any) -> Factory:
    """Return a factory itself, or the one that a name such as `CartPole-v1` stands for: the same for the same name.

    Raises:
        FactoryError: anything else, or a name of no env.
    """
    if isinstance(make_env, str):
        return _factory_named(make_env)
    check_factory(make_env)
    return make_env


# The same object for the same name: by identity, envs count as built by one factory.
_factory_named = functools.cache(factory_for)


def as_kwargs(num_envs: int, env_kwargs: EnvKwargs) -> tuple[dict[str, Any], ...]:
    """Return the keyword arguments of each factory call, copied: the caller's dicts are never changed."""
    if env_kwargs is None:
        return tuple({} for _ in range(num_envs))
    if not isinstance(env_kwargs, (dict, list, tuple)):
        raise TypeError(
            f"env_kwargs failed: expected a dict, or a list of one dict per env, got {env_kwargs!r}."
        )
    if isinstance(env_kwargs, dict):
        return tuple(dict(env_kwargs) for _ in range(num_envs))
    if len(env_kwargs) != num_envs:
        raise ValueError(
            f"env_kwargs failed: expected {num_envs} dicts, one per env, got {len(env_kwargs)}."
        )
    if wrong := [one for one in env_kwargs if not isinstance(one, Mapping)]:
        raise TypeError(
            f"env_kwargs failed: expected a list of dicts, got {wrong[0]!r} among them."
        )
    return tuple(dict(kwargs) for kwargs in env_kwargs)


def checked_options(
    options: ExecutorOptions | None,
    *,
    copy: Any = True,
) -> ExecutorOptions:
    """Return the options, or the default ones; refuse other objects, and a `copy` that is no bool."""
    if not (options is None or isinstance(options, ExecutorOptions)):
        raise TypeError(
            f"options failed: expected an ExecutorOptions, got {options!r}. Write ExecutorOptions(...)."
        )
    if not isinstance(copy, bool):
        raise ValueError(f"copy failed: expected True or False, got {copy!r}.")  # noqa: TRY004
    return options or ExecutorOptions()


def spread(num_envs: int, num_workers: int) -> tuple[tuple[int, ...], ...]:
    """Return contiguous blocks of env ids whose sizes differ by at most one."""
    return tuple(
        tuple(block.tolist())
        for block in np.array_split(np.arange(num_envs), num_workers)
    )


def num_runs(factories: Sequence[Factory]) -> int:
    """Return the fewest workers that envs need: consecutive envs of one interpreter can share one."""
    return len(list(itertools.groupby(map(interpreter_of, factories))))


def choose_workers(
    num_envs: int,
    num_workers: int | None,
    name: str = "num_workers",
    fewest: int = 1,
) -> int:
    """Return the number of workers: the argument, or one per usable core and at least `fewest`; at most one per env."""
    if num_workers is None:
        return min(num_envs, max(usable_cores(), fewest))
    if (
        isinstance(num_workers, bool)
        or not isinstance(num_workers, (int, np.integer))
        or num_workers < 1
    ):
        auto = {"num_workers": ", 'auto'"}.get(name, "")
        raise ValueError(
            f"{name} failed: expected an int of at least 1{auto} or None, got {num_workers!r}."
        )
    return min(num_envs, int(num_workers))


def choose_apart(num_envs: int, num_workers: int | str | None) -> int:
    """Return the number of workers for envs that are `alone`: one per env.

    Raises:
        ValueError: another number was passed.
    """
    if num_workers in (None, "auto", num_envs):
        return num_envs
    raise ValueError(
        f"num_workers failed: expected {num_envs} (one for each env) or None with alone, got {num_workers!r}. Each has "
        f"a process."
    )


def draw(
    factories: list[Factory],
    env_kwargs: EnvKwargs,
    num_workers: int,
    seed: int | None,
    options: ExecutorOptions,
    env_ids: Sequence[int] | None = None,
) -> Blueprint:
    """Return the blueprint of a pool of worker processes; of `num_workers` 0, if those of another pool take its calls.

    Its envs have the ids from 0 on, or those of the other pool.

    Raises:
        FactoryError: a factory or its keyword arguments cannot be pickled.
        ValueError, OSError: the machine has no room for the workers.
    """
    if options.alone and num_workers:
        num_workers = len(factories)
    require_room(num_workers=num_workers)
    kwargs = as_kwargs(len(factories), env_kwargs)
    _check_kwargs(kwargs)
    # Each object once: a worker unpickles equal bytes once.
    pickled = {
        key: pickle_factory(factory)
        for key, factory in {id(factory): factory for factory in factories}.items()
    }
    preload = options.preload
    if preload is None and options.differ_by_worker:
        # A module may read the variables when it is imported, as MuJoCo's renderers do.
        preload = ()
    if preload is None:
        # The helper does not import the executor's own side, which needs torch.
        named = dict.fromkeys(
            m
            for f in factories
            for m in modules_of(f)
            if not m.startswith("envherd.executor")
        )
        brought_in = [
            _BROUGHT_IN[name]
            for name in named
            if name in _BROUGHT_IN and importlib.util.find_spec(_BROUGHT_IN[name])
        ]
        preload = tuple(dict.fromkeys([*named, *brought_in]))
    return Blueprint(
        calls=_numbered(
            env_ids,
            [pickled[id(factory)] for factory in factories],
            kwargs,
            factories,
        ),
        blocks=spread(len(factories), num_workers or 1),
        root_seed=as_root_seed(seed),
        preload=preload,
        interpreters=tuple(map(interpreter_of, factories)),
        draw=lambda others, kwargs, ids: draw(others, kwargs, 0, 0, options, ids),
    )


def serial_blueprint(
    factories: list[Factory],
    env_kwargs: EnvKwargs,
    seed: int | None,
    env_ids: Sequence[int] | None = None,
) -> Blueprint:
    """Return the blueprint of a serial pool: nothing is pickled. Its envs have the ids from 0 on, or these."""
    return Blueprint(
        calls=_numbered(
            env_ids,
            factories,
            as_kwargs(len(factories), env_kwargs),
            factories,
        ),
        blocks=spread(len(factories), 1),
        root_seed=as_root_seed(seed),
        draw=lambda others, kwargs, ids: serial_blueprint(others, kwargs, 0, ids),
    )


def _numbered(
    env_ids: Sequence[int] | None,
    sent: Sequence[Any],
    env_kwargs: Sequence[dict[str, Any]],
    factories: Sequence[Factory],
) -> dict[int, EnvCall]:
    """Return the calls of a blueprint: of each env the factory as its process gets it, the arguments, the factory."""
    calls = map(FactoryCall, sent, env_kwargs)
    return dict(
        zip(env_ids or range(len(sent)), map(EnvCall, calls, factories), strict=True)
    )


def check_agreement(
    specs: Sequence[EnvSpec],
    factories: Sequence[Factory],
    kwargs: Sequence[dict[str, Any]],
) -> None:
    """Refuse envs of one factory, called with the same arguments, that have different specs.

    Different factories or arguments may build different tasks; their batches are lazy stacks, whose members must have
    one batch shape.

    Raises:
        SpecError: with the first difference.
    """
    first: dict[int, int] = {}
    for env_id, (spec, factory) in enumerate(zip(specs, factories, strict=True)):
        # By identity: a factory need not be hashable.
        other = first.setdefault(id(factory), env_id)
        if spec != specs[other] and are_equal(kwargs[env_id], kwargs[other]):
            raise SpecError(
                f"make_env failed: the factory {describe(factory)} gave different specs for envs {other} and {env_id}: "
                f"{specs[other].difference(spec)}. Give a list of factories if the tasks are meant to differ.",
                env_ids=(other, env_id),
            )
        if spec.batch_shape != specs[0].batch_shape:
            raise SpecError(
                f"make_env failed: expected envs of one batch shape, got {specs[0].batch_shape} for env 0 and "
                f"{spec.batch_shape} for env {env_id}: their rows cannot be stacked. Make one executor for each shape.",
                env_ids=(0, env_id),
            )


def _check_kwargs(kwargs: tuple[dict[str, Any], ...]) -> None:
    for one in kwargs:
        for name, value in one.items():
            if is_env_like(value):
                raise FactoryError(
                    f"env_kwargs failed: expected plain arguments, got an env ({type(value).__name__}) as {name!r}. "
                    f"Build envs inside make_env."
                )
    try:
        dumps(
            [Prepare(env_id=0, call=FactoryCall(b"", one)) for one in kwargs],
            shares=True,
        )
    except Exception as error:
        if not isinstance(error, MemoryError) and getattr(error, "errno", None) not in (
            *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EAGAIN),
        ):
            # Without room on the machine no argument is to blame, and the start reports it.
            raise kwargs_error(kwargs, error) from error
