"""Import Melting Pot without TensorFlow and JAX, which its substrates never use.

`import meltingpot` runs a package `__init__` that imports the bots, and with them TensorFlow; the
substrates' modules import chex, and with it JAX, for one decorator. Together that is 3 s and 750 MB in
every process. After `install_lazy_import()` both packages load on demand instead. Melting Pot's builder then uses the
copy of the Lua code that resets faster (`lua_tree`), also for envs of `substrate.build`.

Guarantees: everything that the real packages offer is available on access, from the real files. `meltingpot.scenario`
and `meltingpot.bot` are imported (with TensorFlow) on first access. When code other than Melting Pot's accesses chex,
its real `__init__` runs in the same module object. A package or builder that was imported before stays as it is. Names
that a package does not define raise `AttributeError` without loading it.

Limits: Melting Pot's observables are mappings here, as dm-tree needs them, but no JAX pytrees; a submodule that was not
imported (`meltingpot.utils.policies` after a bare `import meltingpot`) is missing until it is.
"""

import ast
import collections.abc
import dataclasses
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType
from typing import Any

_MELTINGPOT = "meltingpot"
_CHEX = "chex"
_BUILDER = "meltingpot.utils.substrates.builder"


def install_lazy_import() -> None:
    """Make the next `import meltingpot` of this process light; calling it again changes nothing."""
    if not any(isinstance(finder, _LazyFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _LazyFinder())


class _LazyFinder(importlib.abc.MetaPathFinder):
    """Finds the packages and the builder in the usual places, and replaces only their loader."""

    def find_spec(
        self,
        name: str,
        path: Any = None,
        target: ModuleType | None = None,
    ) -> Any:
        if name == _BUILDER:
            spec = self._find_elsewhere(name, path, target)
            if spec is not None:
                spec.loader = _BuilderLoader(spec.loader)
            return spec
        if name != _MELTINGPOT and not (
            name == _CHEX and _importer_name().startswith(f"{_MELTINGPOT}.")
        ):
            return None
        spec = self._find_elsewhere(name, path, target)
        source = None if spec is None else _init_source(spec)
        names = frozenset("*") if source is None else frozenset(_bindings(source))
        # What it defines cannot be seen: imported as usual.
        if source is None or "*" in names:
            return spec
        spec.loader = _LazyLoader(
            spec.loader,
            names,
            {"dataclass": mapping_dataclass} if name == _CHEX else {},
            ast.get_docstring(source),
        )
        return spec

    def _find_elsewhere(self, name: str, path: Any, target: ModuleType | None) -> Any:
        for finder in sys.meta_path:
            if finder is self:
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                return spec
        return None


class _LazyLoader(importlib.abc.Loader):
    """Creates the module but defers its code; delegates everything else to the real loader."""

    def __init__(
        self,
        real: Any,
        names: frozenset[str],
        special: dict[str, Any],
        doc: str | None,
    ) -> None:
        self.real = real
        self.names = names
        self.special = special
        self.doc = doc
        self.lock = threading.RLock()

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _LazyPackage(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__doc__ = self.doc
        old_name = f"{_MELTINGPOT}.python"
        if (
            module.__name__ == _MELTINGPOT
            and importlib.util.find_spec(old_name) is None
        ):
            # The package's own `__init__` keeps this name of earlier versions alive.
            sys.modules[old_name] = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


class _BuilderLoader(importlib.abc.Loader):
    """Loads Melting Pot's builder, and lets it build from the copy of the Lua code that resets faster."""

    def __init__(self, real: Any) -> None:
        self.real = real

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self.real.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        from envherd.workers.adapters.meltingpot.lua_tree import lua_root

        self.real.exec_module(module)
        root = lua_root(is_ordered=False)
        if root is not None and hasattr(module, "_MELTINGPOT_ROOT"):
            module._MELTINGPOT_ROOT = root  # type: ignore[attr-defined]  # noqa: SLF001  # its own constant

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


class _LazyPackage(ModuleType):
    """A package whose `__init__` has not run yet; `_LazyLoader` says what it will define."""

    def __getattr__(self, name: str) -> Any:
        # Python calls this only for names that are not there yet.
        spec = self.__spec__
        loader = None if spec is None else spec.loader
        if isinstance(loader, _LazyLoader) and not name.startswith("__"):
            if name in loader.special and _importer_name().startswith(
                f"{_MELTINGPOT}."
            ):
                return loader.special[name]
            submodule = f"{self.__name__}.{name}"
            if (
                self.__name__ == _MELTINGPOT
                and importlib.util.find_spec(submodule) is not None
            ):
                return importlib.import_module(submodule)
            if name in loader.names:
                _run_init(self, loader)
                return getattr(self, name)
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")

    def __dir__(self) -> list[str]:
        loader = getattr(self.__spec__, "loader", None)
        return sorted({*super().__dir__(), *getattr(loader, "names", ())})


def _run_init(module: ModuleType, loader: _LazyLoader) -> None:
    """Execute a package's real `__init__` in the module that stands for it."""
    with loader.lock:
        if type(module) is not _LazyPackage:
            return
        module.__class__ = ModuleType  # type: ignore[assignment]  # a module may change its class
        try:
            loader.real.exec_module(module)
        except BaseException:
            module.__class__ = _LazyPackage
            raise
        module.__loader__ = module.__spec__.loader = loader.real  # type: ignore[union-attr]  # it was found by its spec


def _init_source(spec: importlib.machinery.ModuleSpec) -> ast.Module | None:
    """Return a package's `__init__` as a syntax tree; None where it has no source."""
    try:
        source = spec.loader.get_source(spec.name)  # type: ignore[union-attr]  # loaders without one raise
    except (AttributeError, ImportError):
        return None
    return None if source is None else ast.parse(source)


def _bindings(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name.partition(".")[0]
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def _importer_name() -> str:
    """Return the name of the module whose code is importing or reading, past the import machinery and this file."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name.partition(".")[0] != "importlib" and name != __name__:
            return name
        frame = frame.f_back
    return ""


def mapping_dataclass(
    cls: type | None = None,
    /,
    *,
    frozen: bool = False,
    **options: Any,
) -> Any:
    """Decorate as `chex.dataclass` does, without JAX: a dataclass that is also a `Mapping` of its fields.

    Args:
        cls: the class, when used without parentheses.
        frozen: as in `dataclasses.dataclass`.
        **options: further ones of `dataclasses.dataclass`; chex's own `mappable_dataclass` is accepted.
    """
    options.pop("mappable_dataclass", None)

    def decorate(undecorated: type) -> type:
        return _as_mapping(dataclasses.dataclass(frozen=frozen, **options)(undecorated))

    return decorate if cls is None else decorate(cls)


def _as_mapping(cls: Any) -> type:
    real_init: Callable[..., None] = cls.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        real_init(self, **dict(*args, **kwargs))

    namespace = {
        name: value
        for name, value in cls.__dict__.items()
        if name not in ("__dict__", "__weakref__")
    }
    namespace.update(
        __init__=init,
        __getitem__=lambda self, name: self.__dict__[name],
        __len__=lambda self: len(self.__dict__),
        __iter__=lambda self: iter(self.__dict__),
        replace=dataclasses.replace,
        to_tuple=lambda self: tuple(
            getattr(self, field.name) for field in dataclasses.fields(self)
        ),
    )
    bases = tuple(base for base in cls.__bases__ if base is not object)
    is_mapping = any(issubclass(base, collections.abc.Mapping) for base in bases)
    made = type(
        cls.__name__,
        bases if is_mapping else (*bases, collections.abc.Mapping),
        namespace,
    )
    made.from_tuple = classmethod(  # type: ignore[attr-defined]  # added to the class on purpose
        lambda made_cls, values: made_cls(
            zip((f.name for f in dataclasses.fields(made_cls)), values, strict=True)
        )
    )
    return made
