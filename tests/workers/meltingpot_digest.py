"""Play Melting Pot episodes and write a digest of each one's data; run as a program, in a fresh process.

    python meltingpot_digest.py OUT.json '{"name": "coins", "seeds": [1, 2], "steps": 20}' ...

Each further argument is one job; `options` are those of `MeltingPotFactory`, and `"wrapped": true` steps through
Melting Pot's own wrappers instead of directly. OUT gets, for each job, one digest per seed (the console is Lua's).
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from envherd.workers.adapters.meltingpot.adapter import MeltingPotAdapter
from envherd.workers.adapters.meltingpot.factory import MeltingPotFactory


def play(
    name: str,
    seeds: tuple[int, ...] = (1,),
    steps: int = 20,
    options: dict[str, Any] | None = None,
    *,
    wrapped: bool = False,
) -> list[str]:
    """Return a digest per episode; one env plays them one after the other, with the same random actions in each."""
    adapter = MeltingPotAdapter(MeltingPotFactory(name, **(options or {}))())
    if wrapped:
        adapter._views._direct = None
    digests = []
    for seed in seeds:
        digest = hashlib.sha256()
        rng = np.random.default_rng(0)
        _add(digest, adapter, adapter.reset(seed))
        for _ in range(steps):
            action = rng.integers(0, adapter.spec.metadata["num_actions"], adapter.spec.metadata["agent_count"])
            observation, reward, terminated, truncated = adapter.step([action])
            _add(digest, adapter, [*observation, *reward])
            digest.update(bytes([terminated, truncated]))
            if terminated or truncated:
                break
        digests.append(digest.hexdigest())
    adapter.close()
    return digests


def _add(digest: Any, adapter: MeltingPotAdapter, values: list[Any]) -> None:
    leaves = [*adapter.spec.observation, *adapter.spec.reward]
    for leaf, value in zip(leaves, values):  # noqa: B905  # a reset gives no reward
        array = np.asarray(value)  # images of players may be given as a tuple
        assert (array.shape, array.dtype.name) == (leaf.shape, leaf.dtype), leaf
        digest.update(array.tobytes())


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps([play(**json.loads(job)) for job in sys.argv[2:]]))
