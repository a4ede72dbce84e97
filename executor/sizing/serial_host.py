"""Run a search's `SerialEnv`s in a worker process, so that an env that crashes or hangs affects nothing else.

The worker's only env is a `SerialHost`, whose methods are called and which is never stepped. Its helper process imports
torch and the executor; `importing` starts that early. This module itself imports neither.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from envherd.executor.options import ExecutorOptions
from envherd.executor.pools.preloading import preloading
from envherd.shm.specs import Discrete, EnvSpec, LeafSpec
from envherd.workers.adapters.base import Adapter, StepValues

if TYPE_CHECKING:
    from envherd.executor.sizing.driving import Driver
    from envherd.executor.sizing.settings import Mode

#: An environment variable of workers with a `SerialHost`, so that other workers do not use their helper.
_MARK = {"ENVHERD_SERIAL_HOST": "1"}


def options_of_host(options: ExecutorOptions) -> ExecutorOptions:
    """Return the options of the worker of a `SerialHost`, from those of the executors that are compared."""
    env_vars = {**dict(options.env_vars), **_MARK}
    return dataclasses.replace(options, env_vars=env_vars, env_type="auto", info_keys=None, reset_ahead=False)


@contextlib.contextmanager
def importing(options: ExecutorOptions) -> Iterator[None]:
    """Import the modules of a `SerialHost` in a helper, while this process continues."""
    with contextlib.ExitStack() as stack:
        if options.start_method == "zygote":
            modules = ("envherd.executor.serial", "envherd.executor.sizing.driving")
            stack.enter_context(preloading(*modules, options=options_of_host(options)))
        yield


@dataclass(frozen=True, kw_only=True)
class SerialFactory:
    """Builds a `SerialHost` behind an adapter.

    Attributes:
        factory: of the env, pickled.
        env_kwargs: its keyword arguments.
        options: of the executors.
        span_s, policy_s: see `Driver`.
    """

    factory: bytes
    env_kwargs: dict[str, Any]
    options: ExecutorOptions
    span_s: float
    policy_s: float

    def __call__(self) -> Adapter:
        """Build it."""
        return _HostAdapter(SerialHost(self))


class SerialHost:
    """Executors in this process, by their number of envs. Answers are plain data, like workers' replies."""

    def __init__(self, made_by: SerialFactory) -> None:
        self._made_by = made_by
        self._drivers: dict[int, Driver] = {}

    def open(self, num_envs: int) -> float:
        """Start a `SerialEnv`; return how many seconds that took."""
        from envherd.executor.serial import SerialEnv
        from envherd.executor.sizing.driving import Driver

        made_by = self._made_by
        make_env = pickle.loads(made_by.factory)  # pickled by the process that started the search

        def start() -> SerialEnv:
            return SerialEnv(num_envs, make_env, env_kwargs=made_by.env_kwargs, seed=0, options=made_by.options)

        driver = self._drivers[num_envs] = Driver(start, made_by.span_s, made_by.policy_s)
        return driver.start_s

    def turn(self, num_envs: int, mode: Mode, least_steps: int) -> dict[str, Any]:
        """Return the fields of a `Turn`."""
        return dataclasses.asdict(self._drivers[num_envs].turn(mode, least_steps))

    def figures(self, num_envs: int) -> dict[str, Any]:
        """Return the fields of `Figures`."""
        return dataclasses.asdict(self._drivers[num_envs].figures())

    def close(self) -> None:
        """Close the executors."""
        for driver in self._drivers.values():
            driver.close()


class _HostAdapter(Adapter):
    family: ClassVar[str] = "serial host"

    def __init__(self, host: SerialHost) -> None:
        self.env = host
        self.spec = EnvSpec((LeafSpec(("observation",), (1,)),), (LeafSpec(("action",), (), "int64", Discrete(1)),))

    def reset(
        self, seed: int | None, options: Mapping[str, Any] | None = None, mask: np.ndarray | None = None
    ) -> list[Any]:
        raise NotImplementedError("this env is only called")

    def step(self, action: list[Any]) -> StepValues:
        raise NotImplementedError("this env is only called")
