"""TorchRL's `ParallelEnv` on top of the executor: the same arguments and behaviour.

    from envherd.torchrl import ParallelEnv        # was: from torchrl.envs import ParallelEnv

Guarantees: instances pass isinstance checks for TorchRL's `ParallelEnv`, with TorchRL's specs, keys, masks, seeds and
state dicts. No env is built in this process, and its number of threads is not changed. Intended differences are listed
in docs/torchrl.md.
Attributes that the class lacks are those of the envs: a list of values, or a method to call in each.
Trusts its workers: attributes, specs and leaves that do not fit the slab are pickled, as in TorchRL.
"""

import contextlib
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torchrl.envs
from torchrl.data.utils import CloudpickleWrapper
from torchrl.envs import EnvBase, EnvCreator

from envherd.executor.facades import replaced
from envherd.executor.facades.errors import as_raised
from envherd.executor.facades.torchrl.crew import HostedEnvs
from envherd.executor.facades.torchrl.data import BatchedData, MakeEnv
from envherd.executor.facades.torchrl.worker import Call
from envherd.executor.machine.machine import require_room
from envherd.executor.options import ExecutorOptions
from envherd.executor.processes.worker_process import WorkerProcess
from envherd.workers.build import check_factory
from envherd.workers.errors import FactoryError

_READERS = "TorchRL's envs read infos. Call the env's auto_register_info_dict or set_info_dict_reader in the factory."
#: Refused options -> reason, and what to do instead.
_REFUSED = {
    "env_threads": "each TorchRL env has its own state of torch's generator, which the threads of a process share. Use "
    "more num_processes, or envherd.ParallelEnv.",
    "infos": _READERS,
    "episode_statistics": "TorchRL counts them: TransformedEnv(ParallelEnv(...), Compose(RewardSum(), StepCounter())).",
}


class BuildFailed(FactoryError, RuntimeError):
    """The factory raised, or its env was refused; also an instance of the exception type that the factory raised.

    TorchRL builds an env in the caller's process, so programs expect the original exception types.
    """


class _ParallelMeta(type(torchrl.envs.ParallelEnv)):  # type: ignore[misc]  # untyped
    """Skips TorchRL's metaclass, which builds the env of a lambda in this process."""

    # A class, seen from its metaclass.
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return type(EnvBase).__call__(cls, *args, **kwargs)


class ParallelEnv(BatchedData, torchrl.envs.ParallelEnv, metaclass=_ParallelMeta):  # type: ignore[misc]  # untyped
    """TorchRL's `ParallelEnv` with its envs in the executor's worker processes.

    Args:
        num_workers: number of envs.
        create_env_fn: callable that builds a TorchRL env, or a list of one per env.
        num_processes: worker processes; None for one per usable core, at most one per env.
        options: of the executor. None: TorchRL's `num_sub_threads` and `shutdown_timeout` apply, and actions are passed
            to the envs unchecked, as in TorchRL. If given, `check_actions` refuses NaN and infinities, not bounds.
        **kwargs: TorchRL's other arguments; docs/torchrl.md lists those without effect.

    Raises:
        FactoryError: an env instead of a factory, or a factory that cannot be pickled, raised or returned no env.
        ValueError: options with `env_threads`, `infos` or `episode_statistics`.
    """

    def __init__(
        self,
        num_workers: int,
        create_env_fn: MakeEnv | Sequence[MakeEnv],
        *,
        num_processes: int | None = None,
        options: ExecutorOptions | None = None,
        **kwargs: Any,
    ) -> None:
        if isinstance(num_workers, int):
            require_room(num_workers)
        factories: Any = create_env_fn
        for factory in (
            [factories]
            if callable(factories) or isinstance(factories, str)
            else factories
        ):
            check_factory(factory, "GymEnv('CartPole-v1')")
        for name, why in _REFUSED.items() if options is not None else ():
            default = getattr(ExecutorOptions, name)
            value = getattr(options, name)
            if value != default:
                raise ValueError(
                    f"ParallelEnv failed: expected options with {name}={default}, got {value}: {why}"
                )
        self.__dict__.update(
            _num_processes=num_processes,
            _options=options,
            _crew=None,
            _shells=None,
        )
        try:
            super().__init__(num_workers, create_env_fn, **kwargs)
        except BaseException:
            self._dismiss()
            raise

    # ---- lifecycle ---------------------------------------------------------------------------

    def _crew_at_work(self) -> HostedEnvs:
        """Return the crew, which exists before the env counts as started, because it provides the specs."""
        crew: HostedEnvs | None = self.__dict__["_crew"]
        if crew is None:
            try:
                crew = self.__dict__["_crew"] = HostedEnvs(
                    self.create_env_fn,
                    self.create_env_kwargs,
                    self.__dict__["_num_processes"],
                    self._executor_options(),
                )
            except FactoryError as error:
                if "type_name" in error.context:
                    raise as_raised(
                        BuildFailed(
                            error.message,
                            remote_traceback=error.remote_traceback,
                            **error.context,
                        )
                    ) from error
                raise
        return crew

    def _executor_options(self) -> ExecutorOptions:
        options: ExecutorOptions | None = self.__dict__["_options"]
        if options is None:
            options = ExecutorOptions(
                worker_threads=self.num_sub_threads,
                close_timeout_s=self.shutdown_timeout,
                check_actions="off",
            )
        return replace(options, episode_seeds=False)

    def _dismiss(self) -> None:
        crew = self.__dict__.get("_crew")
        if crew is not None:
            crew.close()
        self.__dict__["_crew"] = self.__dict__["_shells"] = None

    def _learn_specs(self) -> None:
        # Envs of one task have equal specs.
        asked = range(1 if self._one_task else self.num_workers)
        self._set_specs(
            self._crew_at_work().tell(asked, [Call("describe")] * len(asked))
        )

    def _begin(self) -> None:
        self._crew_at_work()
        self.is_closed = False
        self.set_spec_lock_()

    def _open(self) -> HostedEnvs:
        """Return the crew, started if need be."""
        if self.is_closed:
            self._begin()
        crew: HostedEnvs = self.__dict__["_crew"]
        return crew

    def start(self) -> None:
        """Start the env explicitly.

        Raises:
            RuntimeError: it is started already.
        """
        if not self.is_closed:
            raise RuntimeError("trying to start a environment that is not closed.")
        self._begin()

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Close the envs and end their workers. The next use starts new workers.

        Raises:
            RuntimeError: it is closed, or was never started, unless `raise_if_closed` is False.
        """
        was_closed = self.is_closed
        self._dismiss()
        self.is_closed = True
        if was_closed and raise_if_closed:
            raise RuntimeError("trying to close a closed environment")

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state["_crew"] = None
        state["_shells"] = None
        state["create_env_fn"] = [
            one
            if isinstance(one, (CloudpickleWrapper, EnvCreator))
            else CloudpickleWrapper(one)
            for one in self.create_env_fn
        ]
        return state

    def update_kwargs(self, kwargs: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Change the keyword arguments of the factories from the next start on."""
        super().update_kwargs(kwargs)
        if self.is_closed and kwargs:
            self._dismiss()

    def to(self, device: Any) -> Any:
        """Move specs and outputs to a device, and seed the envs again, as TorchRL does; return the env itself.

        The envs stay where they are.
        """
        # A tensor's device has an index: "cuda" becomes "cuda:0".
        is_moved = torch.empty(0, device=device).device != self.device
        self.__dict__["_shells"] = None
        EnvBase.to(self, device)
        if is_moved and self._env_seeds is not None:
            warnings.warn(
                f"Sending a seeded ParallelEnv to another device requires re-seeding it. "
                f"Re-seeding envs to {self._env_seeds}.",
                stacklevel=2,
            )
            self.set_seed(self._env_seeds[0])
        return self

    def __reduce__(self) -> Any:
        if not self.is_closed:
            self.close()
        # The copy starts other workers.
        return EnvBase.__reduce__(self)

    # ---- control -----------------------------------------------------------------------------

    def set_seed(
        self,
        seed: int | None = None,
        static_seed: bool = False,  # noqa: FBT001, FBT002  # TorchRL's
    ) -> int | None:
        """Seed env after env with TorchRL's chain of seeds; return the seed that follows."""
        crew = self._open()
        self._env_seeds = []
        for env_id in range(self.num_workers):
            # An env returns the seed of the next one, so they are seeded in turn.
            self._env_seeds.append(seed)
            seed = crew.tell(
                [env_id],
                [Call("seed", (seed,), {"static": static_seed})],
            )[0]
        return seed

    def state_dict(self) -> OrderedDict[str, Any]:
        """Return `{"worker0": ..., ...}`, each env's own."""
        return OrderedDict(
            (f"worker{i}", state)
            for i, state in enumerate(self._tell_all("state_dict"))
        )

    def load_state_dict(self, state_dict: Mapping[str, Any], **kwargs: Any) -> None:
        """Load a state from `state_dict`; a state dict of one env is loaded into all envs.

        Raises:
            EnvError: an env refused it.
        """
        crew = self._open()
        states = [
            state_dict[f"worker{i}"] if "worker0" in state_dict else state_dict
            for i in range(self.num_workers)
        ]
        crew.tell(
            range(self.num_workers),
            [Call("load_state_dict", (state, kwargs)) for state in states],
        )

    def __getitem__(self, item: Any) -> Any:
        raise NotImplementedError(
            "indexing an env failed: expected no view of some envs, which envherd's ParallelEnv does not support. Use "
            "the masks `_step` and `_reset`, and env.NAME[i] for attributes."
        )

    def __setitem__(self, item: Any, source: Any) -> None:
        raise NotImplementedError(
            "assigning to an env failed: expected no snapshot writeback, which envherd's ParallelEnv does not "
            "support. Use load_state_dict."
        )

    def configure_parallel(self, **_: Any) -> Any:
        """Refuse: the envs are running."""
        raise NotImplementedError(
            "configure_parallel failed: envherd's ParallelEnv does not support it. Pass these arguments to the "
            "constructor."
        )

    # ---- attributes --------------------------------------------------------------------------

    def __getattr__(self, attr: str) -> Any:
        if (
            attr in _OWN_NAMES
            or attr in self.__dict__.get("_modules", {})
            or hasattr(type(self), attr)
        ):
            return EnvBase.__getattr__(self, attr)
        if attr.startswith("__") or self.__dict__.get("is_closed", True):
            raise NotStarted(
                f"{type(self).__name__} has no attribute {attr!r}, and its envs, which may have it, are not "
                f"started. Start them first, e.g. with reset()."
            )
        return self._find_all((attr,))

    def _find_all(self, path: tuple[str, ...]) -> Any:
        try:
            found = self._tell_all("look_up", path)
        except RuntimeError as error:
            # `hasattr` needs the type that the env has raised.
            if getattr(error, "context", {}).get("type_name") != "AttributeError":
                raise
            raise AttributeError(
                f"attribute {'.'.join(path)} not found in {self._env_text}"
            ) from error
        if all(found):
            return Attributes([value for (value,) in found], path, self._find_all)
        return Dispatcher(path, self._find_all, self._call_all)

    def _call_all(
        self,
        path: tuple[str, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> list[Any]:
        args = tuple(arg for arg in args if arg is not self)
        return self._tell_all("call", path, args, kwargs)

    def _tell_all(self, name: str, *args: Any) -> list[Any]:
        """Call a method of each `HostedEnv`, all with the same arguments; return the results."""
        calls = [Call(name, args)] * self.num_workers
        return self._open().tell(range(self.num_workers), calls)

    @property
    def _worker_processes(self) -> list[WorkerProcess]:
        return [*self._crew_at_work().engine.pool.crew.workers]  # type: ignore[attr-defined]  # a `WorkerPool`


#: Names that are read before they are set, and must not be looked up in the envs.
_OWN_NAMES = frozenset({"is_closed", "parent_channels", "batch_size", "meta_data"})


def installed() -> contextlib.AbstractContextManager[None]:
    """Replace TorchRL's `ParallelEnv` by ours, in all of TorchRL, for a block."""
    return replaced("torchrl", {torchrl.envs.ParallelEnv: ParallelEnv})


#: Path -> the envs' attributes.
FindAll = Callable[[tuple[str, ...]], Any]


class _Attribute:
    """An attribute of each env; attribute access returns those of the envs' values."""

    _path: tuple[str, ...]
    _find: FindAll

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(
                f"private attribute {name!r} of {'.'.join(self._path)} cannot be dispatched."
            )
        return self._find((*self._path, name))


class Attributes(_Attribute, list[Any]):
    """The value of an attribute in each env, in env order.

    It can also be called without arguments, like TorchRL's dispatchers of plain attributes.
    """

    def __init__(self, values: list[Any], path: tuple[str, ...], find: FindAll) -> None:
        super().__init__(values)
        self._path = path
        self._find = find

    def __call__(self) -> list[Any]:
        """Return the values."""
        return list(self)


class Dispatcher(_Attribute):
    """A method of each env, or an object in it that cannot be pickled; calls return one result per env."""

    def __init__(
        self,
        path: tuple[str, ...],
        find: FindAll,
        call: Callable[..., list[Any]],
    ) -> None:
        self._path = path
        self._find = find
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Call it in all envs."""
        return self._call(self._path, args, kwargs)

    def __iter__(self) -> Iterator[Any]:
        return iter(self())

    def __repr__(self) -> str:
        return f"<{'.'.join(self._path)} of each env>"


class NotStarted(AttributeError, RuntimeError):
    """An attribute was requested of envs that are not started, or closed.

    An AttributeError, so that `hasattr` returns False; a RuntimeError, as in TorchRL.
    """
