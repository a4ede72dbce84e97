"""Isaac Sim's modules, emptied, so that IsaacLab's own classes run without it: `with_isaaclab()`.

Only modules of the simulator are replaced (`ROOTS`): every module below one of them exists, and each of its names is a
class that accepts any arguments and has any attribute. `_REAL` has the values that IsaacLab reads: the simulation
context (one per process), its device, the cloner's paths and origins, settings, and the version. Nothing of IsaacLab
is replaced: `DirectRLEnv`, `DirectMARLEnv`, `ManagerBasedRLEnv`, its scene, managers and noise models are its own.

`make test-isaaclab` installs IsaacLab 2.3 and runs the tests.
"""

import builtins
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any, ClassVar

#: Top-level packages that come with the simulator.
ROOTS = ("carb", "isaacsim", "omni", "pxr", "usdrt", "omni_physx", "hid")
_VERSION = "5.1.0"


class _AnyClass(type):
    """Creates attributes of a class, which are classes like it, on access."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _AnyClass(name, (Anything,), {"__module__": cls.__module__})
        setattr(cls, name, made)
        return made

    def __iter__(cls) -> Any:
        return iter(())

    def __int__(cls) -> int:
        return 0

    def __instancecheck__(cls, instance: Any) -> bool:
        """Return True for whatever a name of the simulator has given."""
        return type(type(instance)) is _AnyClass


class Anything(metaclass=_AnyClass):
    """Takes any arguments, has any attribute, can be called, is empty, false and zero."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __call__(self, *_: Any, **__: Any) -> Any:
        return Anything()

    def __iter__(self) -> Any:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __int__(self) -> int:
        return 0

    def __float__(self) -> float:
        return 0.0

    def __lt__(self, _: Any) -> bool:
        return False

    __gt__ = __le__ = __ge__ = __lt__

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def __getitem__(self, _: Any) -> Any:
        return Anything()

    def __setitem__(self, *_: Any) -> None:
        pass


class SimulationContext(Anything):
    """The simulator: one in a process."""

    _instance: ClassVar[Any] = None

    def __init__(self, *_: Any, **__: Any) -> None:
        if SimulationContext._instance is not None:
            raise RuntimeError("a simulation context exists already")
        SimulationContext._instance = self
        self._settings = Settings()

    @classmethod
    def instance(cls) -> Any:
        return SimulationContext._instance

    @classmethod
    def clear_instance(cls) -> None:
        SimulationContext._instance = None

    def step(self, *, render: bool = True) -> None:
        """Physics is the env's own."""

    def reset(self, *, soft: bool = False) -> None:
        """Physics starts."""

    def is_stopped(self) -> bool:
        return False

    def is_playing(self) -> bool:
        return True

    def clear_all_callbacks(self) -> None:
        """There are none."""


class SimulationManager(Anything):
    """Knows the device."""

    _device: ClassVar[str] = "cpu"

    @classmethod
    def set_physics_sim_device(cls, device: str) -> None:
        cls._device = device

    @classmethod
    def get_physics_sim_device(cls) -> str:
        return cls._device

    @classmethod
    def assets_loading(cls) -> bool:
        return False


class GridCloner(Anything):
    """Names the copies of an env, and puts all of them at the origin."""

    def generate_paths(self, root: str, num_paths: int) -> list[str]:
        return [f"{root}_{index}" for index in range(num_paths)]

    def clone(self, *, prim_paths: list[str], **_: Any) -> list[list[float]]:
        return [[0.0, 0.0, 0.0] for _ in prim_paths]


class Settings(Anything):
    """No setting is set."""

    def get(self, _: str) -> None:
        return None

    def get_as_bool(self, _: str) -> bool:
        return False


def get_version() -> tuple[str, ...]:
    """Return the version as Isaac Sim does: the first is the whole."""
    return (_VERSION, "", *_VERSION.split("."), "", "")


#: Module -> name -> what it is there.
_REAL: dict[str, dict[str, Any]] = {
    "isaacsim.core.api.simulation_context": {"SimulationContext": SimulationContext},
    "isaacsim.core.simulation_manager": {"SimulationManager": SimulationManager},
    "isaacsim.core.cloner": {"GridCloner": GridCloner},
    "isaacsim.core.version": {"get_version": get_version},
    "carb.settings": {"get_settings": Settings},
    "carb": {"log_info": print, "log_warn": print},
}


class _Module(types.ModuleType):
    """Has every name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _AnyClass(name, (Anything,), {"__module__": self.__name__})
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module of the simulator."""

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> Any:
        if name.partition(".")[0] not in ROOTS:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        vars(module).update(_REAL.get(module.__name__, {}))


FINDER = _Finder()


def is_there() -> bool:
    """Return whether IsaacLab's package is installed; nothing of it is imported."""
    return importlib.util.find_spec("isaaclab") is not None


def with_isaaclab() -> None:
    """Make `import isaaclab.envs` work in this process.

    The package's own `__init__` starts the simulator and puts its sources on the path, so they are put there instead.
    """
    if FINDER in sys.meta_path:
        return
    found = importlib.util.find_spec("isaaclab")
    assert found is not None, "IsaacLab is not installed"
    assert found.origin is not None, "IsaacLab is not installed"
    sources = Path(found.origin).parent / "source"
    if sources.exists():
        sys.path[:0] = [str(folder) for folder in sorted(sources.iterdir())]
    sys.meta_path.insert(0, FINDER)
    builtins.ISAAC_LAUNCHED_FROM_TERMINAL = False  # type: ignore[attr-defined]  # as the app launcher sets it
