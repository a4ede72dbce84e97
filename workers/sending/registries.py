"""Give workers the names of envs that the caller's program has registered.

A script, or a module that it imports, registers names in packages: `gymnasium.register(...)`, `import ale_py`,
`register_gym_spec_conversion` of TorchRL. A worker does not run the script, so it gets the entries of these registries.

Guarantees: a worker adds the entries of a package when the package is first imported there, and never imports it for
them. An entry that replaces the package's own replaces it in the worker also. An entry that cannot be pickled raises
with its reason when it is used.
Does not know: names that are registered after the executor was made.
"""

import contextlib
import functools
import importlib.abc
import pickle
import sys
import types
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import cloudpickle

from envherd.workers.errors import FactoryError
from envherd.workers.sending.pickling import dumps

#: Package -> name of an entry -> the entry, pickled.
_Entries = dict[str, dict[str, Any]]


class _Registry(NamedTuple):
    """How to read and fill the registry of a package.

    Attributes:
        read: yields the entries of this process, name and value.
        add: adds one.
    """

    read: Callable[[], Iterator[tuple[str, Any]]]
    add: Callable[[str, Any], None]


class _Refused(NamedTuple):
    """Stands for an entry that a worker cannot get; as a function that builds an env, it raises the reason."""

    name: str
    reason: str

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise FactoryError(
            f"make_env failed: the entry {self.name!r}, which this program registered, cannot be sent to workers: "
            f"{self.reason}. Register it in a module that workers import, or in the factory."
        )


_waiting: _Entries = {}  # entries of packages that this process has not imported


def collect() -> bytes:
    """Return the entries of all packages that this process has imported, and those that wait for a package, packed.

    600 entries have 200 KB, as much as a socket's buffer holds; packed they have 18. What does not fit into the buffer
    would be sent only when the caller waits for the worker, which it does not do for one that replaces another.
    """
    found: _Entries = {}
    for package, registry in _REGISTRIES.items():
        if package in sys.modules:
            found[package] = {
                name: _pickled(name, value) for name, value in registry.read()
            }
        elif package in _waiting:
            found[package] = _waiting[package]
    return zlib.compress(pickle.dumps(found, pickle.HIGHEST_PROTOCOL), 1)


def _pickled(name: str, value: Any) -> bytes:
    try:
        # Much faster for the usual entries, which are plain.
        data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception:
        data = b"__main__"
    by_value = ("__main__", *cloudpickle.list_registry_pickle_by_value())
    if not any(module.encode() in data for module in by_value):
        return data
    try:
        return dumps(value)
    except Exception as error:
        return dumps(_Refused(name, str(error)))


def install(packed: bytes) -> None:
    """Add what `collect` returned to this process's registries, at once or when a package is imported."""
    entries: _Entries = pickle.loads(zlib.decompress(packed))
    for package, named in entries.items():
        if package in sys.modules:
            _add(package, named)
        else:
            _waiting.setdefault(package, {}).update(named)
    if _waiting and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _add(package: str, named: dict[str, bytes]) -> None:
    for name, data in named.items():
        try:
            value = pickle.loads(data)
        except Exception as error:  # such as a module that cannot be imported here
            value = _Refused(name, f"{type(error).__name__}: {error}")
        _REGISTRIES[package].add(name, value)


class _Finder(importlib.abc.MetaPathFinder):
    """Adds the waiting entries of a package after its import."""

    def find_spec(
        self,
        name: str,
        path: Any = None,
        target: types.ModuleType | None = None,
    ) -> Any:
        if name not in _waiting:
            return None
        finders = [
            finder
            for finder in sys.meta_path
            if finder is not self and hasattr(finder, "find_spec")
        ]
        specs = (finder.find_spec(name, path, target) for finder in finders)
        spec: Any = next(filter(None, specs), None)
        if spec is not None and spec.loader is not None:
            spec.loader = types.SimpleNamespace(
                create_module=spec.loader.create_module,
                exec_module=functools.partial(_execute_and_add, spec.loader),
            )
        return spec


def _execute_and_add(loader: Any, module: Any) -> None:
    """Execute a package by its loader, whose place another object has taken, and add the waiting entries."""
    module.__spec__.loader = module.__loader__ = loader
    loader.exec_module(module)
    _add(module.__name__, _waiting.pop(module.__name__, {}))


#: Beginning of an entry point that names something of the script. A worker's `__main__` is not the script, and gets it.
_SCRIPT = "__main__:"
#: Beginning of the ids under which RLlib registers the env of a runner. To read one, a worker would import RLlib.
_RUNNERS = "rllib-"


# ---- Gymnasium, gym ----------------------------------------------------------------------------


def _specs(package: str) -> dict[str, Any]:
    """Return the dict from ids to specs."""
    registry = sys.modules[f"{package}.registration"].registry
    # An object before gym 0.26.
    specs: dict[str, Any] = getattr(registry, "env_specs", registry)
    return specs


def _add_spec(package: str, name: str, spec: Any) -> None:
    if name.startswith(_SCRIPT):
        setattr(sys.modules["__main__"], name.removeprefix(_SCRIPT), spec)
        return
    if isinstance(spec, _Refused):
        spec = sys.modules[f"{package}.registration"].EnvSpec(id=name, entry_point=spec)
    _specs(package)[name] = spec


def _read_specs(package: str) -> Iterator[tuple[str, Any]]:
    """Yield the specs by id; before them what they name in the script, as `__main__:Env`."""
    specs = {
        name: spec
        for name, spec in _specs(package).items()
        if not name.startswith(_RUNNERS)
    }
    for name in dict.fromkeys(
        name for spec in specs.values() for name in _names_in_script(spec)
    ):
        with contextlib.suppress(AttributeError):  # an entry that no process can use
            yield name, getattr(sys.modules["__main__"], name.removeprefix(_SCRIPT))
    yield from specs.items()


def _names_in_script(spec: Any) -> Iterator[str]:
    points = [
        getattr(one, "entry_point", None)
        for one in (spec, *getattr(spec, "additional_wrappers", ()))
    ]
    for point in (*points, getattr(spec, "vector_entry_point", None)):
        if isinstance(point, str) and point.startswith(_SCRIPT):
            yield point


# ---- TorchRL -----------------------------------------------------------------------------------


def _torchrl_entries() -> Iterator[tuple[str, Any]]:
    """Yield the conversions of spaces that are not TorchRL's own, and the backend of `set_gym_backend`."""
    gym = sys.modules["torchrl.envs.libs.gym"]
    for index, (space, convert) in enumerate(
        list(gym._conversion_registry.data.items())  # noqa: SLF001  # no public door
    ):
        if not convert.__module__.startswith("torchrl."):
            yield f"conversion {index}", (space, convert)
    if gym.DEFAULT_GYM is not None and gym.DEFAULT_GYM.__name__ != "gymnasium":
        yield "backend", gym.DEFAULT_GYM.__name__


def _add_to_torchrl(name: str, value: Any) -> None:
    gym = sys.modules["torchrl.envs.libs.gym"]
    if name == "backend":
        gym.set_gym_backend(value).set()
    elif not isinstance(value, _Refused):
        space, convert = value
        gym.register_gym_spec_conversion(space)(convert)


#: Package whose import completes the registry -> the registry.
_REGISTRIES = {
    **{
        package: _Registry(
            functools.partial(_read_specs, package),
            functools.partial(_add_spec, package),
        )
        for package in ("gymnasium.envs", "gym.envs")
    },
    "torchrl.envs.libs.gym": _Registry(_torchrl_entries, _add_to_torchrl),
}
