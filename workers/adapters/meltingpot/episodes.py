"""Access the innermost wrapper of a Melting Pot env, which holds its episodes' seed and frame cap.

Finds Melting Pot's `ResetWrapper`, or the one that `MeltingPotFactory` puts in its place, under any number
of wrappers, by its attributes: importing this file imports no Melting Pot.
"""

import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

_WORLD_RGB = "WORLD.RGB"
#: What Melting Pot's own build function closes over; see `meltingpot.utils.substrates.builder.builder`.
_SEEDS = "env_seeds"
_SETTINGS = "lab2d_settings_dict"


class Episodes:
    """Handle on the wrapper that builds dmlab2d anew for every episode.

    Attributes:
        wrapper: that wrapper; None where the env has none.
        max_frames: the frame cap; None if the env's settings do not name it.
        cell_px: side of a cell of the map in the pictures.
        level: the Lua level, e.g. "the_matrix", which several substrates share; empty where unknown.
        can_seed: whether `seed_next` has an effect.
    """

    def __init__(self, env: Any) -> None:
        self.wrapper: Any = next(
            (
                layer
                for layer in layers(env)
                # Asked of the layer alone: a wrapper passes other names on to the env inside.
                if hasattr(type(layer), "seed_next")
                or "_rebuild_environment" in getattr(layer, "__dict__", {})
            ),
            None,
        )
        self._cells = _closure(getattr(self.wrapper, "_rebuild_environment", None))
        settings = self._settings()
        cap = settings.get("maxEpisodeLengthFrames")
        self.max_frames = None if cap is None else int(cap)
        self.level = str(settings.get("levelName", "")).rpartition("/")[2]
        self.cell_px = int(settings.get("spriteSize", 8))  # of Melting Pot's maps
        self._is_ours = hasattr(type(self.wrapper), "seed_next")
        self.can_seed = self._is_ours or {_SEEDS, _SETTINGS} <= self._cells.keys()

    def seed_next(self, seed: int) -> None:
        """Make the next `reset` build its episode from a seed in `[0, 2**32)`; later seeds are derived from it."""
        if self._is_ours:
            self.wrapper.seed_next(seed)
        elif self.can_seed:
            seeds = spaced_seeds(seed)
            if not self.wrapper._reset:  # noqa: SLF001  # built, and no episode started: Melting Pot would start it as it is
                if self._settings().get("env_seed") == str(seed):
                    next(seeds)
                else:
                    self.wrapper._reset = True  # noqa: SLF001  # no public way to ask for a rebuild
            self._cells[_SEEDS].cell_contents = seeds

    def world_rgb(self) -> np.ndarray | None:
        """Draw the world now, uint8 `[H, W, 3]` (fresh memory); None before the first episode or without a view."""
        lab2d = vars(self.wrapper).get("_env") if self.wrapper is not None else None
        raw = getattr(lab2d, "_env", None)
        if raw is None:
            return None
        try:
            return np.asarray(raw.observation(_WORLD_RGB))
        except KeyError:
            return None

    def _settings(self) -> Mapping[str, Any]:
        if _SETTINGS in self._cells:
            settings: Mapping[str, Any] = self._cells[_SETTINGS].cell_contents
            return settings
        return getattr(self.wrapper, "settings", None) or {}


def layers(env: Any) -> Iterator[Any]:
    """Yield an env and what it wraps, outermost first, without touching what is built on demand."""
    while env is not None:
        yield env
        held = getattr(env, "__dict__", {})
        env = next(
            (held[name] for name in ("_env", "_substrate", "env") if name in held),
            None,
        )


def spaced_seeds(first: int) -> Iterator[int]:
    """Yield a seed and then, for episodes without an explicit seed, others that do not overlap a neighbour's."""
    yield first
    following = random.Random(first)
    while True:
        yield following.getrandbits(32)


def _closure(function: Any) -> dict[str, Any]:
    code = getattr(function, "__code__", None)
    cells = getattr(function, "__closure__", None)
    return (
        dict(zip(code.co_freevars, cells, strict=True))
        if code is not None and cells
        else {}
    )
