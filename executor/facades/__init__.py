"""Drop-in replacements for other libraries' vector envs, on top of the executor; import the one you need."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any


@contextlib.contextmanager
def needing(install: str, *packages: str) -> Iterator[None]:
    """Name what to install if an import in the block does not find a package; other errors of imports pass unchanged.

    Args:
        install: what brings the packages, for pip.
        *packages: which the block imports.
    """
    try:
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


def lazy_names(
    facade: str, homes: Mapping[str, str], install: str, *packages: str
) -> Callable[[str], Any]:
    """Return the `__getattr__` of a facade's package, which imports a public name when it is first used.

    Workers import the facade's other half from the same package, without the host library and without torch.

    Args:
        facade: name of the package.
        homes: public name -> the module of the package that has it.
        install: see `needing`.
        *packages: see `needing`.
    """

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {facade!r} has no attribute {name!r}")
        with needing(install, *packages):
            for package in packages:  # a module that others use too may do without one
                if (
                    package not in sys.modules
                    and importlib.util.find_spec(package) is None
                ):
                    raise ModuleNotFoundError(
                        f"No module named {package!r}", name=package
                    )
            value = getattr(importlib.import_module(f"{facade}.{homes[name]}"), name)
        setattr(sys.modules[facade], name, value)
        return value

    return find
