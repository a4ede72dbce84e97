"""Replace classes of a host library for a block, for programs that do not name the class themselves."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping


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
