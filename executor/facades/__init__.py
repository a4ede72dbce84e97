"""Drop-in replacements for other libraries' vector envs, on top of the executor; import the one you need."""

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping


@contextlib.contextmanager
def needing(install: str, *packages: str) -> Iterator[None]:
    """Name what to install if an import in the block does not find a package; other errors of imports pass unchanged.

    Args:
        install: what brings the packages, for pip.
        *packages: which the block imports. They must be there even if what it imports can do without one.
    """
    try:
        for package in packages:
            if package not in sys.modules and importlib.util.find_spec(package) is None:
                # Raises the error that names the package.
                importlib.import_module(package)
        yield
    except Exception as error:
        # Ray raises others from those of its imports.
        for one in (error, error.__cause__):
            if isinstance(one, ModuleNotFoundError) and one.name in packages:
                raise ModuleNotFoundError(
                    f"importing a facade failed: expected the package {one.name}, which is not installed. Install it: "
                    f'pip install "{install}".',
                    name=one.name,
                ) from error
        raise


@contextlib.contextmanager
def replaced(package: str, kinds: Mapping[type, type]) -> Iterator[None]:
    """Replace some classes under every name that the package's imported modules have for them.

    Args:
        package: the name of the host library.
        kinds: class -> the class that takes its place until the end of the block.
    """
    names = [
        (module, name, value)
        for module_name, module in list(sys.modules.items())
        if module_name.partition(".")[0] == package
        for name, value in list(vars(module).items())
        if isinstance(value, type) and value in kinds
    ]
    try:
        for module, name, kind in names:
            setattr(module, name, kinds[kind])
        yield
    finally:
        for module, name, kind in names:
            setattr(module, name, kind)
