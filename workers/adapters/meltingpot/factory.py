"""A picklable description of a Melting Pot env, which builds it where it is called.

Importing this file, listing names and making a factory import neither Melting Pot nor TensorFlow nor JAX.
"""

import difflib
import functools
import importlib.util
import sys
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from envherd.workers.errors import FactoryError

_BUILD = "envherd.workers.adapters.meltingpot.build"

# Lua keeps references to pieces of the finished episode: clean_up then aborts the process (a failed check in C++),
# coop_mining raises, and in commons_harvest and hidden_agenda the last episode shows in the next.
_NOT_IN_PLACE = ("clean_up", "commons_harvest", "coop_mining", "hidden_agenda")


@dataclass(frozen=True)
class MeltingPotFactory:
    """Build a Melting Pot substrate or scenario; use it as `make_env`.

    Better than a hand-written `lambda: substrate.build(...)`: no TensorFlow or JAX in substrate workers,
    no build thrown away before the first seeded episode, only wanted observations read, and on request
    reproducible episodes.

    Attributes:
        name: of a substrate (`substrate_names()`) or a scenario (`scenario_names()`).
        roles: one per agent; None takes the substrate's default ones. Scenarios have their own.
        keys: per-agent observations to keep, e.g. `("RGB",)`; None keeps all. Others are never read.
        drop: per-agent observations to leave out, after `keys`.
        world_rgb: keep the world view, root key "RGB". `render` draws it in any case.
        positions: also observe where each agent is, `POSITION` int32 `[2]` (column and row of the map's cells), and
            its `ORIENTATION`, int32 (0 north, 1 east, 2 south, 3 west), which the substrates do not report.
        max_steps: end episodes as truncated after this number of steps, if they have not ended before.
        deterministic: same seed and same actions give identical bytes, in any process: Melting Pot's Lua
            runs with an ordered `pairs`, from a copy of your own installation in your cache folder. What
            a substrate's config draws from python's `random` (coins: map size, colours) is then drawn
            from each episode's seed. A scenario is as deterministic as its bots are.
        fast_reset: restart Melting Pot's env in place, 1.5 to 10 times faster, instead of rebuilding it.
            What it draws at random while being built then stays that of the first episode, which is why Melting Pot
            itself rebuilds. Refused for substrates that break (`must_rebuild`).
        bots: False builds a scenario without its bots: all its agents are in the batch, in the scenario's roles, and
            the spec's metadata `is_focal` says for which agents the scenario has no bot. No bot's model is needed.

    Raises:
        FactoryError: from the constructor for an unknown name (with the closest ones) or an option out of range; from
            `__call__` for what only the installed substrate knows (roles, keys, missing models).
    """

    name: str
    roles: tuple[str, ...] | None = None
    _: KW_ONLY
    keys: tuple[str, ...] | None = None
    drop: tuple[str, ...] = ()
    world_rgb: bool = True
    positions: bool = False
    max_steps: int | None = None
    deterministic: bool = False
    fast_reset: bool = False
    bots: bool = True

    def __post_init__(self) -> None:
        self._check_name()
        for option in ("roles", "keys", "drop"):
            object.__setattr__(self, option, self._checked_names(option))
        if self.roles is not None and self.is_scenario:
            raise self._refusal(
                "no roles for a scenario, which has its own",
                repr(self.roles),
                "Leave roles out.",
            )
        if self.positions and self.bots and self.is_scenario:
            raise self._refusal(
                "positions=False for a scenario with bots",
                "True",
                "Its agents may not observe them.",
            )
        steps = self.max_steps
        if steps is not None and (
            isinstance(steps, bool) or not isinstance(steps, int) or steps < 1
        ):
            raise self._refusal(
                "max_steps to be a positive integer",
                repr(steps),
                "None keeps the env's own cap.",
            )
        if self.fast_reset and must_rebuild(self.substrate):
            raise self._refusal(
                f"fast_reset=False for {self.substrate}",
                "True",
                "Restarted in place, its Lua crashes or carries state over. Rebuilding is the only safe reset here.",
            )

    def __call__(self) -> Any:
        """Return the native `Substrate` or `Scenario`; the adapter finds the options on it."""
        if installed() is None:
            raise self._refusal(
                "a package `meltingpot`",
                "none",
                "Install it: pip install 'envherd[meltingpot]'.",
            )
        # It imports Melting Pot, which the process that makes the factory need not have.
        build = importlib.import_module(_BUILD)
        env = (
            build.build_scenario(self)
            if self.is_scenario and self.bots
            else build.build_substrate(self)
        )
        env.envherd_options = self
        return env

    @property
    def is_scenario(self) -> bool:
        """Whether the name is a scenario's; False where Melting Pot is not installed."""
        return installed() is not None and self.name not in substrate_names()

    @property
    def substrate(self) -> str:
        """The substrate's name, also for a scenario."""
        return str(self.scenario_config.substrate) if self.is_scenario else self.name

    @property
    def scenario_config(self) -> Any:
        """Melting Pot's config of the scenario: its substrate, `roles`, `is_focal` and bots; None for a substrate."""
        scenarios = _config_module("scenarios")
        return None if scenarios is None else scenarios.SCENARIO_CONFIGS.get(self.name)

    @property
    def preload(self) -> tuple[str, ...]:
        """Modules worth importing before workers are forked; never TensorFlow."""
        if installed() is None:
            return ()
        return (
            _BUILD,
            "envherd.workers.adapters.meltingpot.adapter",
            f"meltingpot.configs.substrates.{self.substrate}",
        )

    def _check_name(self) -> None:
        known = substrate_names()  # enough for most, and cheaper than the scenarios
        if self.name in known or installed() is None:
            return
        known += scenario_names()
        if self.name not in known:
            close = difflib.get_close_matches(str(self.name), known, n=4, cutoff=0.5)
            hint = f"Did you mean {' or '.join(close)}? " if close else ""
            raise FactoryError(
                f"MeltingPotFactory failed: expected the name of a substrate or a scenario, got {self.name!r}. "
                f"{hint}substrate_names() and scenario_names() list them."
            )

    def _checked_names(self, option: str) -> Any:
        names = getattr(self, option)
        if names is None and option != "drop":
            return None
        if isinstance(names, str) or not isinstance(names, Iterable):
            raise self._refusal(
                f"{option} to be a tuple of names",
                repr(names),
                f"Write {option}=({names!r},).",
            )
        return tuple(names)

    def _refusal(self, expected: str, got: str, advice: str) -> FactoryError:
        return FactoryError(
            f"MeltingPotFactory({self.name!r}) failed: expected {expected}, got {got}. {advice}"
        )


def substrate_names() -> tuple[str, ...]:
    """Return the names of all substrates of the installed Melting Pot, sorted; empty where there is none."""
    module = _config_module("substrates")
    return () if module is None else tuple(sorted(module.SUBSTRATES))


def scenario_names() -> tuple[str, ...]:
    """Return the names of all scenarios of the installed Melting Pot, sorted; empty where there is none.

    Includes scenarios whose bots' saved models are not installed.
    """
    module = _config_module("scenarios")
    return () if module is None else tuple(sorted(module.SCENARIO_CONFIGS))


def must_rebuild(substrate: str) -> bool:
    """Return whether a substrate cannot be restarted in place, as found with dm-meltingpot 2.4.1."""
    return substrate.partition("__")[0] in _NOT_IN_PLACE


def installed() -> Path | None:
    """Return the folder of the installed Melting Pot, without an import of it; None if there is none."""
    spec = importlib.util.find_spec("meltingpot")
    locations = None if spec is None else spec.submodule_search_locations
    return Path(next(iter(locations))) if locations else None


@functools.cache
def _config_module(kind: str) -> ModuleType | None:
    """Load `meltingpot/configs/<kind>/__init__.py` by itself: its package's `__init__` imports TensorFlow."""
    root = installed()
    if root is None:
        return None
    spec = importlib.util.spec_from_file_location(
        f"_envherd_meltingpot_{kind}",
        root / "configs" / kind / "__init__.py",
    )
    if spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
