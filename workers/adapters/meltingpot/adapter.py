"""Melting Pot substrates and scenarios behind the partial-reset protocol.

Keys, shapes and dtypes are those of TorchRL's `MeltingpotEnv`: world observations at the root without
their "WORLD." prefix (`RGB`), what each agent sees under `("agents", "observation", ...)` stacked over
agents (scalars are `[P, 1]`), `("agents", "reward")` float64 `[P, 1]`, `("agents", "action")` int64 `[P]`.

Ends: Melting Pot reports every end alike, also at the frame cap. Here an end at the cap is `truncated`, any other
`terminated`. So a real end in the very step of the cap counts as truncated, and an env whose settings name no cap (not
built by Melting Pot's own builder) is always `terminated`.

Seeds: `reset(seed=s)` builds that very episode from `s`, also for a user's own `substrate.build(...)`. There the
build's own random seed is unused, so the first reset builds again (`MeltingPotFactory` builds from the first seed at
once). Melting Pot is not reproducible by its seed alone; see
`MeltingPotFactory(deterministic=True)`. An env in which no episode builder is found cannot be seeded:
`spec.metadata["can_seed"]` says so.

The adapter always resets by Melting Pot's own `reset`, never by a step after the end, which would restart the env in
place without rebuilding it.
"""

import contextlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from envherd.shm.specs import Discrete, EnvSpec, Key, LeafSpec
from envherd.workers.adapters.base import Adapter, Mask, Options, StepValues
from envherd.workers.adapters.common.generators import seeded_random
from envherd.workers.adapters.meltingpot.episodes import Episodes
from envherd.workers.adapters.meltingpot.fast_step import Views
from envherd.workers.errors import ActionError, ResetNeeded, SpecError

_WORLD = "WORLD."
_WORLD_RGB = "WORLD.RGB"
_GROUP = "agents"


class MeltingPotAdapter(Adapter):
    """One `Substrate`, or one `Scenario`, whose rows are its focal agents.

    In a scenario the world view comes from the substrate inside: no focal agent is meant to act on it.
    Observations and rewards that `reset` and `step` return are buffers of this adapter, written again by
    the next call. World views are fresh, and so are the images of a stock env's step: tuples of the agents' arrays.

    Args:
        env: as built by the user's factory, or by `MeltingPotFactory`, whose options it carries.

    Raises:
        SpecError: agents that differ in their observations or actions.
    """

    family = "meltingpot"

    def __init__(self, env: Any) -> None:
        self.env = env
        self._options = options = getattr(env, "envherd_options", None)
        self._name = "" if options is None else str(options.name)
        self._max_steps = None if options is None else options.max_steps
        self._episodes = Episodes(env)
        self._is_scenario = "_is_focal" in vars(env)
        self._num_actions = _num_actions(env)
        observed = _player_specs(env)
        self._num_players = len(observed)
        players = {
            name: spec
            for name, spec in sorted(observed[0].items())
            if not name.startswith(_WORLD)
        }
        worlds = self._world_specs(observed[0])
        self._views = Views(
            env,
            {
                name: np.zeros((self._num_players, *(spec.shape or (1,))), spec.dtype)
                for name, spec in players.items()
                if self._keeps(name)
            },
            worlds,
            self._num_players,
        )
        self._num_steps = 0
        self._needs_reset = True
        self.spec = self._make_spec(worlds)
        if self._is_scenario and worlds:
            env.observables().substrate.timestep.subscribe(
                on_next=self._views.take_worlds
            )

    def reset(
        self,
        seed: int | None,
        options: Options = None,
        mask: Mask = None,  # noqa: ARG002
    ) -> list[Any]:
        """Build and start an episode, from the seed if there is one. Melting Pot takes no options."""
        if options:
            raise ValueError(
                f"reset failed: expected no arguments, as Melting Pot has none, got {sorted(options)}."
            )
        self._needs_reset = True
        self._views.forget()
        if seed is None:
            timestep = self.env.reset()
        else:
            self._episodes.seed_next(seed)
            # A scenario draws its bots from Python's global generator.
            with seeded_random(seed) if self._is_scenario else contextlib.nullcontext():
                timestep = self.env.reset()
        self._views.take(timestep)
        self._num_steps = 0
        self._needs_reset = False
        return self._values()

    def step(self, action: list[Any]) -> StepValues:
        """Make one transition.

        Raises:
            ActionError: not one integer in `[0, A)` per agent; the env was not touched.
            ResetNeeded: the episode has ended or none has begun; the env was not touched.
        """
        if self._needs_reset:
            raise ResetNeeded(
                "step failed: expected an episode under way, got a Melting Pot env that needs a reset."
            )
        has_ended = self._views.step(self._checked(action[0]))
        self._num_steps += 1
        truncated = (
            self._is_at(self._episodes.max_frames)
            if has_ended
            else self._is_at(self._max_steps)
        )
        self._needs_reset = has_ended or truncated
        return (
            self._values(),
            [self._views.reward],
            has_ended and not truncated,
            truncated,
        )

    def render(self) -> np.ndarray | None:
        """Return the world now, uint8 `[H, W, 3]`, also where the world view is not kept; None before a reset."""
        seen = self._views.worlds.get(_WORLD_RGB)
        return self._episodes.world_rgb() if seen is None else seen

    def _values(self) -> list[Any]:
        return [*self._views.worlds.values(), *self._views.players.values()]

    def _is_at(self, limit: int | None) -> bool:
        return limit is not None and self._num_steps >= limit

    def _checked(self, action: Any) -> np.ndarray:
        actions = np.asarray(action)
        if actions.shape != (self._num_players,) or actions.dtype.kind not in "iu":
            raise self._refusal(f"{actions.dtype} {actions.shape}")
        indices: list[int] = actions.tolist()
        if min(indices) < 0 or max(indices) >= self._num_actions:
            player = next(
                i
                for i, index in enumerate(indices)
                if not 0 <= index < self._num_actions
            )
            raise self._refusal(f"{indices[player]} for player_{player}")
        return actions.astype(np.int64, copy=False)

    def _refusal(self, got: str) -> ActionError:
        return ActionError(
            f"step failed: agents/action expected {self._num_players} integers in 0..{self._num_actions - 1}, "
            f"got {got} ({self._name or self._episodes.level}). The env was not stepped."
        )

    def _make_spec(self, worlds: Mapping[str, Any]) -> EnvSpec:
        seen: dict[Key, Any] = {
            (name.removeprefix(_WORLD),): spec for name, spec in worlds.items()
        } | {
            (_GROUP, "observation", name): stack
            for name, stack in self._views.stacks.items()
        }
        cap = self._episodes.max_frames
        return EnvSpec(
            observation=tuple(
                LeafSpec(key, like.shape, like.dtype.name) for key, like in seen.items()
            ),
            action=(
                LeafSpec(
                    (_GROUP, "action"),
                    (self._num_players,),
                    "int64",
                    Discrete(self._num_actions),
                ),
            ),
            reward=(LeafSpec((_GROUP, "reward"), (self._num_players, 1), "float64"),),
            groups=(((_GROUP,), (self._num_players,)),),
            family=self.family,
            metadata={
                "name": self._name,
                "level": self._episodes.level,
                "agent_names": [f"player_{i}" for i in range(self._num_players)],
                "agent_roles": list(getattr(self.env, "envherd_roles", ())),
                "is_focal": list(getattr(self.env, "envherd_is_focal", ())),
                "agent_count": self._num_players,
                "num_actions": self._num_actions,
                "frame_key": "RGB" if _WORLD_RGB in worlds else "",
                "cell_px": self._episodes.cell_px,
                "max_episode_steps": min(
                    (limit for limit in (cap, self._max_steps) if limit is not None),
                    default=None,
                ),
                "can_seed": self._episodes.can_seed,
            },
        )

    def _keeps(self, name: str) -> bool:
        options = self._options
        return options is None or (
            (options.keys is None or name in options.keys) and name not in options.drop
        )

    def _world_specs(self, observed: Mapping[str, Any]) -> dict[str, Any]:
        """Return the specs of the world views that are kept; a scenario hides its substrate's."""
        inner = self.env._substrate.observation_spec()[0] if self._is_scenario else {}  # noqa: SLF001  # no public way
        has_rgb = self._options is None or self._options.world_rgb
        return {
            name: spec
            for name, spec in sorted({**inner, **observed}.items())
            if name.startswith(_WORLD) and (has_rgb or name != _WORLD_RGB)
        }


def _player_specs(env: Any) -> list[dict[str, Any]]:
    specs = [dict(spec) for spec in env.observation_spec()]
    shapes = [
        {name: (spec.shape, spec.dtype) for name, spec in player.items()}
        for player in specs
    ]
    for i, player in enumerate(shapes):
        different = sorted(
            name
            for name in player.keys() | shapes[0].keys()
            if player.get(name) != shapes[0].get(name)
        )
        if different:
            raise SpecError(
                f"reading the specs failed: expected all agents to see the same, got player_0 and player_{i} "
                f"differing in {different[0]}. Agents with different observations cannot be stacked."
            )
    return specs


def _num_actions(env: Any) -> int:
    counts = {int(spec.num_values) for spec in env.action_spec()}
    if len(counts) != 1:
        raise SpecError(
            f"reading the specs failed: expected one number of actions for all, got {sorted(counts)}."
        )
    return counts.pop()
