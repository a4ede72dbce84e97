"""The optional C extension `envherd.shm._native`: whether it is there, and wanted.

Everything that it does is also there in Python, which runs where it was not built, and with `ENVHERD_NATIVE=0`.
"""

from __future__ import annotations

import functools
import importlib
import os
from typing import Any


@functools.cache
def load() -> Any:
    """Return the extension module, or None where it was not built, cannot be loaded, or is switched off."""
    if os.environ.get("ENVHERD_NATIVE", "1") == "0":
        return None
    try:
        return importlib.import_module("envherd.shm._native")
    except ImportError:
        return None
