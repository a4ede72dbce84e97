"""The optional C extension of a worker and of its caller: find and load it, unless it is switched off.

The Python code is the specification. C makes plain steps (see `block.slot`) and leaves everything else to Python;
both write the same bytes. `ENVHERD_NATIVE=0` in the environment switches C off. The caller's part is in
`executor/native/`.
Limits: Linux, and CPython with its GIL. `pip install` builds the extension where there is a compiler.
"""

import functools
import importlib
import os
import sys
import zlib
from pathlib import Path
from typing import Any

from envherd.shm import sync

#: The environment variable that switches C off, by "0".
SWITCH = "ENVHERD_NATIVE"
#: The extension module.
MODULE = "envherd.workers.native._native"
_NS = 1e9
#: Python 3.11, whose stable ABI the extension uses; a worker may be older (see `workers.guests.interpreters`).
_OLDEST = 0x030B0000


def load() -> Any:
    """Return the extension module, or None where it was not built, cannot be loaded, or is switched off."""
    return find()[0]


def why_not() -> list[str]:
    """Return why C is not used, in words for users; empty if it is."""
    module, why = find()
    return [] if module is not None else [why]


def waiting_facts() -> dict[str, int]:
    """Return the constants of `shm.sync` for waits in C, in nanoseconds and numbers of waits."""
    return {
        "brief_spin": int(sync.BRIEF_SPIN_S * _NS),
        "long_spin": int(sync.LONG_SPIN_S * _NS),
        "short_wait": int(sync.SHORT_WAIT_S * _NS),
        "overrun": int(sync.OVERRUN_S * _NS),
        "fewest_waits": sync.FEWEST_WAITS_WITHOUT_SPIN,
        "most_waits": sync.MOST_WAITS_WITHOUT_SPIN,
    }


@functools.cache
def find() -> tuple[Any, str]:
    """Return the extension module or None, and why it is None; looked for once."""
    if os.environ.get(SWITCH, "1") == "0":
        return None, f"{SWITCH}=0"
    if sys.hexversion < _OLDEST:
        return None, "the C extension is for Python 3.11 or newer"
    try:
        module = importlib.import_module(MODULE)
    except ModuleNotFoundError:
        return None, "the C extension is not built"
    except ImportError as error:
        return None, f"the C extension cannot be loaded: {error}"
    # In a checkout; an installed package has none.
    sources = sorted(Path(__file__).parents[2].glob("*/native/*.[ch]"))
    if sources and getattr(module, "sources", None) != zlib.crc32(
        b"".join(path.read_bytes() for path in sources)
    ):
        return (
            None,
            "the C extension was built from other sources; run: python setup.py build_ext --inplace",
        )
    return module, ""
