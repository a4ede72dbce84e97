"""Features that a worker imports by name when it is asked for them: the kernel imports no guest."""

import importlib
from typing import Any

#: What a worker can be asked for -> the module that does it.
GUESTS = {
    "branching": "envherd.workers.guests.branching",
    "env_threads": "envherd.workers.guests.env_threads",
    "saving": "envherd.workers.guests.saving.snapshot",
}


def guest(name: str) -> Any:
    """Return the module of `GUESTS`."""
    return importlib.import_module(GUESTS[name])
