"""Play Melting Pot episodes and write a digest of each one's data; run as a program, in a fresh process.

    python -m tests.workers.meltingpot_digest OUT.json '{"name": "coins", "seeds": [1, 2], "steps": 20}' ...

Each further argument is one job; `options` are those of `MeltingPotFactory`, and `"wrapped": true` steps through
Melting Pot's own wrappers instead of directly. OUT gets, for each job, one digest per seed (the console is Lua's).
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from envherd.workers.adapters.meltingpot.lua_tree import lua_root
from tests.workers import meltingpot_equality


def play(
    name: str,
    seeds: Any = (1,),
    steps: int = 20,
    options: Any = None,
    *,
    wrapped: bool = False,
) -> list[str]:
    """Return a digest per episode; one env plays them one after the other."""

    def look(adapter: Any) -> Any:
        if wrapped:
            adapter._views._direct = None
        return zip(
            [*adapter.spec.observation, *adapter.spec.reward],
            [*adapter._values(), adapter._views.reward],
            strict=True,
        )

    digests: list[Any] = []
    played = meltingpot_equality.play(
        lua_root,
        name,
        seeds,
        steps,
        look,
        **{"deterministic": False, **(options or {})},
    )
    for is_reset, ends, seen in played:
        if is_reset:
            digests.append(hashlib.sha256())
        digests[-1].update(bytes(ends))
        for leaf, value in seen:
            array = np.asarray(value)  # images of players may be given as a tuple
            assert (array.shape, array.dtype.name) == (leaf.shape, leaf.dtype), leaf
            if ends or leaf.key[-1] != "reward":  # a reset gives no reward
                digests[-1].update(array.tobytes())
    return [digest.hexdigest() for digest in digests]


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(
        json.dumps([play(**json.loads(job)) for job in sys.argv[2:]])
    )
