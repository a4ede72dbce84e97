"""Compare the Lua code that envs run with the installed code, byte for byte; run as a program.

    python -m tests.workers.meltingpot_equality [NAME ...] --seeds 3 --steps 1000

Both walk tables in one order (`deterministic=True`), play the same random actions, and must give the same
observations (all players, WORLD.RGB and the rest that the level offers, in the same order under the same names),
rewards, events and ends in each step. A name is a substrate's or a scenario's, played without its bots; none stands for
all substrates. `--prove` checks each read of a cached state against the grid. `--soak N` plays N episodes of the code
that envs run instead, and writes the memory and the time of steps.
"""

import argparse
import contextlib
import itertools
import time
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import numpy as np
import psutil

from envherd.workers.adapters.meltingpot import build, lua_edits, lua_tree
from envherd.workers.adapters.meltingpot.adapter import MeltingPotAdapter
from envherd.workers.adapters.meltingpot.factory import (
    MeltingPotFactory,
    substrate_names,
)

_PROOF = """if state ~= nil then
  local read = self:_deuniquifyState(self.gameObject._grid:state(self.gameObject:getPiece()))
  assert(state == read, 'the cached state is ' .. state .. ', and the grid has ' .. read)
  return state
end"""


def unedited_root(**_: bool) -> str:
    """Return a copy of the installed code that differs only in the order in which it walks tables."""
    files = lua_tree._read(lua_tree._installed_lua())
    first = " ".join(lua_tree._ORDERED_PAIRS.split())
    files[lua_tree._PREFIXED_FILE] = (
        f"{first} ".encode() + files[lua_tree._PREFIXED_FILE]
    )
    return lua_tree._placed(
        {f"meltingpot/lua/{name}": content for name, content in files.items()}
    )


def proving_root(**_: bool) -> str:
    """Return a copy of the code that envs run, in which each cached state must be the one that the grid has."""
    files = lua_tree._copied_files(lua_tree._installed_lua(), is_ordered=True)
    library = f"meltingpot/lua/{lua_edits.LIBRARY}"
    assert files[library].count(lua_edits.CACHED_STATE.encode()) == 1
    files[library] = files[library].replace(
        lua_edits.CACHED_STATE.encode(), " ".join(_PROOF.split()).encode()
    )
    return lua_tree._placed(files)


def play(
    root: Any,
    name: str,
    seeds: Iterable[int],
    steps: int,
    look: Callable[[Any], Any],
    **options: Any,
) -> Any:
    """Play an episode per seed; yield for each reset and step whether it is a reset, the ends, and what `look` returns.

    Args:
        root: in place of `lua_root`.
        name: of a substrate or a scenario.
        seeds: of the episodes.
        steps: the most in an episode.
        look: called with the adapter.
        **options: of `MeltingPotFactory`.
    """
    options = {"deterministic": True, "bots": name in substrate_names(), **options}
    with mock.patch.object(build, "lua_root", root):
        adapter = MeltingPotAdapter(MeltingPotFactory(name, **options)())
    with contextlib.closing(adapter):
        for seed in seeds:
            adapter.reset(seed)
            yield True, [], look(adapter)
            rng = np.random.default_rng(seed)
            for _ in range(steps):
                action = rng.integers(
                    0,
                    adapter.spec.metadata["num_actions"],
                    adapter.spec.metadata["agent_count"],
                )
                _, _, *ends = adapter.step([action])
                yield False, ends, look(adapter)
                if any(ends):
                    break


def everything(adapter: Any) -> list[Any]:
    """Return all that the level offers now: names, dtypes, shapes and bytes of observations, and events."""
    raw = adapter._episodes.wrapper._env._env
    values = [
        (name, np.asarray(raw.observation(name))) for name in raw.observation_names()
    ]
    seen = [
        (name, value.dtype.str, value.shape, value.tobytes()) for name, value in values
    ]
    events = [
        (name, [np.asarray(part).tobytes() for part in parts])
        for name, parts in raw.events()
    ]
    return [*seen, *events]


def compare(
    name: str,
    seeds: Iterable[int],
    steps: int,
    root: Any = lua_tree.lua_root,
    **options: Any,
) -> int:
    """Return the number of equal resets and steps; raise at the first that differs."""
    read_apart = {"keys": ("COLLECTIVE_REWARD",), "world_rgb": False}
    runs = [
        play(one, name, seeds, steps, everything, **read_apart, **options)
        for one in (unedited_root, root)
    ]
    count = 0
    for expected, got in zip(*runs, strict=True):
        assert expected == got, (
            f"{name}: {_difference(expected, got)} after {count} resets and steps"
        )
        count += 1
    return count


def _difference(expected: Any, got: Any) -> str:
    pairs = zip((*expected[:2], *expected[2]), (*got[:2], *got[2]), strict=False)
    return next(
        (f"{was!s:.200} became {now!s:.200}" for was, now in pairs if was != now),
        "the number of values",
    )


def soak(name: str, episodes: int, steps: int, **options: Any) -> str:
    """Play episodes; return each one's peak of memory in MiB, their slope, and the ms of a step in each fifth."""
    process, memory, times = psutil.Process(), [], []
    for is_reset, _, now in play(
        lua_tree.lua_root,
        name,
        range(episodes),
        steps,
        lambda _: time.process_time(),
        **options,
    ):
        memory += [0] if is_reset else []
        memory[-1] = max(memory[-1], process.memory_info().rss >> 20)
        times.append((is_reset, now))
    spent = [
        after - before
        for (_, before), (is_reset, after) in itertools.pairwise(times)
        if not is_reset
    ]
    fifths = [f"{1000 * np.median(part):.3f}" for part in np.array_split(spent, 5)]
    return f"MiB {memory} slope {np.polyfit(range(len(memory)), memory, 1)[0]:.2f}; ms per step {' '.join(fifths)}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", default=substrate_names())
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--prove", action="store_true")
    parser.add_argument(
        "--in-place", action="store_true", help="restart one build (fast_reset=True)"
    )
    parser.add_argument("--soak", type=int, default=0)
    asked = parser.parse_args()
    for one in asked.names:
        root = proving_root if asked.prove else lua_tree.lua_root
        if asked.soak:
            print(
                one,
                soak(one, asked.soak, asked.steps, fast_reset=asked.in_place),
                flush=True,
            )
        else:
            print(
                one,
                compare(
                    one,
                    range(asked.seeds),
                    asked.steps,
                    root,
                    fast_reset=asked.in_place,
                ),
                "equal",
                flush=True,
            )
