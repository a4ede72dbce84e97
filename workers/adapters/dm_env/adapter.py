"""dm_env: any `dm_env.Environment`, among them dm_control (suite, composer), raw dmlab2d and bsuite.

Keys, shapes and dtypes are in `dm_env/specs.py`.

Ends of episodes: LAST with a discount of 0 is `terminated`, LAST with a discount above
0 is `truncated` (dm_control ends by its time limit with discount 1). Raw dmlab2d ends every episode with
discount 0, whatever the reason, so that all its endings are `terminated` here: a frame cap cannot be distinguished
from a real end. The discount of a step inside an episode is not reported.

Seeds: dm_env has no API for seeding, so the adapter reseeds the generators of the known families in place:
`env.task.random` (dm_control's suite), `env.random_state` (composer), `env._rng`
(dmlab2d, bsuite), also behind wrappers. An env that keeps its generator elsewhere ignores the seed.
"""

import logging
from collections.abc import Iterator
from typing import Any, ClassVar

import dm_env
import numpy as np

from envherd.shm.specs import EnvSpec
from envherd.workers.adapters.base import Adapter, Mask, Options, StepValues
from envherd.workers.adapters.common.tree import builder, flattener, leaf_specs
from envherd.workers.adapters.dm_env import specs as dm_env_specs
from envherd.workers.errors import ResetNeeded, SpecError

_LOG = logging.getLogger(__name__)

_MID = dm_env.StepType.MID
_LAST = dm_env.StepType.LAST

#: Attributes in which wrappers of this family keep the env that they wrap.
_INNER = ("_env", "_environment", "env", "environment")


class DmEnvAdapter(Adapter):
    """One `dm_env.Environment`; see the module for endings and seeds.

    The adapter always resets it by `reset`. Stepping after the end, which in dm_env starts a new episode and drops the
    action, is not used.

    Args:
        env: what the factory returned; it is neither reset nor stepped here.

    Raises:
        SpecError: a spec is no dm_env spec, or an observation has a name that a batch uses itself.
    """

    family: ClassVar[str] = "dm_env"
    is_its_attributes = True

    def __init__(self, env: dm_env.Environment) -> None:
        self.env = env
        self._lab = _find_lab(env)
        self._can_draw = True
        observation = dm_env_specs.observation_tree(
            env.observation_spec(),
            has_dynamic=self._lab is not None,
        )
        action = dm_env_specs.described(
            env.action_spec(),
            ("action",),
            dm_env_specs.action_leaf,
        )
        reward = dm_env_specs.described(
            env.reward_spec(),
            ("reward",),
            dm_env_specs.reward_leaf,
        )
        self._flatten = flattener(observation, "observation")
        self._flatten_reward = flattener(reward, "reward")
        self._build = builder(action)
        self.spec = EnvSpec(
            observation=leaf_specs(observation),
            action=leaf_specs(action),
            reward=leaf_specs(reward),
            family=self.family,
            metadata=_metadata(env),
        )

    def reset(
        self,
        seed: int | None,
        options: Options = None,
        mask: Mask = None,  # noqa: ARG002
    ) -> list[Any]:
        """Start a new episode. The seed is for the generators that the env is known to keep.

        Raises:
            TypeError: any keyword: `dm_env.Environment.reset` takes none.
        """
        if options:
            raise TypeError(
                f"reset failed: expected no keyword for a dm_env env, got `{next(iter(options))}`. "
                f"Pass it to the factory instead, or set it with `set`."
            )
        if seed is not None:
            _seed_generators(self.env, seed)
        timestep = self.env.reset()
        if not hasattr(timestep, "observation"):
            raise SpecError(
                f"reset failed: expected a dm_env.TimeStep, got {type(timestep).__name__}. Fix the env."
            )
        return self._flatten(timestep.observation)

    def step(self, action: list[Any]) -> StepValues:
        """Make one transition.

        Raises:
            ResetNeeded: the env had ended or was never reset, and has begun a new episode by itself.
            SpecError: the env returned no TimeStep, no reward, or no discount at the end.
        """
        timestep = self.env.step(self._build(action))
        try:
            step_type = timestep.step_type
            reward = timestep.reward
            discount = timestep.discount
            observation = timestep.observation
        except AttributeError:
            raise SpecError(
                f"step failed: expected a dm_env.TimeStep, got {type(timestep).__name__}. Fix the env."
            ) from None
        terminated = truncated = False
        if step_type == _LAST:
            terminated = _is_zero(discount)
            truncated = not terminated
        elif step_type != _MID:
            raise ResetNeeded(
                f"step failed: expected a step inside an episode, got the first one of a new episode "
                f"(step_type {step_type!r}), for which the env dropped the action. Call reset() after an episode's end."
            )
        return (
            self._flatten(observation),
            self._flatten_reward(reward),
            terminated,
            truncated,
        )

    def render(self) -> Any:
        """Return a picture, uint8 `[H, W, 3]`, or None.

        dm_control: what `physics.render(camera_id=0)` draws, 240 x 320, if there is an OpenGL backend (set
        MUJOCO_GL, e.g. to "egl", before the worker imports dm_control); where that fails it is logged
        once. dmlab2d: its "WORLD.RGB", whether or not it is among the observations. Others: None.
        """
        if self._lab is not None:
            has_view = "WORLD.RGB" in self._lab.observation_names()
            return np.array(self._lab.observation("WORLD.RGB")) if has_view else None
        physics = _attribute(self.env, "physics")
        if physics is None or not self._can_draw:
            return None
        try:
            return physics.render(camera_id=0)
        except Exception as error:  # each backend fails with a different exception
            self._can_draw = False
            _LOG.warning(
                "rendering is off for this env (%s: %s); set MUJOCO_GL.",
                type(error).__name__,
                error,
            )
            return None


def _is_zero(discount: Any) -> bool:
    if discount is None:
        raise SpecError(
            "step failed: expected a discount with the last step of an episode, got None. Fix the env."
        )
    return not np.any(discount)


def _chain(env: Any) -> Iterator[dm_env.Environment]:
    """Yield an env and the dm_envs that it wraps, outermost first."""
    # A list: an env may define equality and have no hash.
    seen: list[Any] = []
    while isinstance(env, dm_env.Environment) and not any(
        env is outer for outer in seen
    ):
        yield env
        seen.append(env)
        inner = (getattr(env, name, None) for name in _INNER)
        env = next(
            (
                candidate
                for candidate in inner
                if isinstance(candidate, dm_env.Environment)
            ),
            None,
        )


def _attribute(env: dm_env.Environment, name: str) -> Any:
    """Return an attribute of the first env of the chain that has one, or None."""
    found = (getattr(layer, name, None) for layer in _chain(env))
    return next((value for value in found if value is not None), None)


def _find_lab(env: dm_env.Environment) -> Any:
    """Return the `dmlab2d.Lab2d` of a raw dmlab2d env, or None."""
    for layer in _chain(env):
        native = getattr(layer, "_env", None)
        if type(layer).__module__.partition(".")[0] == "dmlab2d" and hasattr(
            native,
            "observation_names",
        ):
            return native
    return None


def _generators(env: dm_env.Environment) -> Iterator[Any]:
    """Yield the generators that the known families keep, outermost first, possibly the same one repeatedly."""
    for layer in _chain(env):
        task = getattr(layer, "task", None)
        yield getattr(task, "random", None)
        yield getattr(task, "_random", None)
        yield getattr(layer, "random_state", None)
        yield getattr(layer, "_rng", None)


def _seed_generators(env: dm_env.Environment, seed: int) -> None:
    """Seed them in place: the first with the seed itself, further ones with seeds derived from it."""
    seeded: list[Any] = []
    for generator in _generators(env):
        if any(generator is other for other in seeded):
            continue
        own = (
            seed
            if not seeded
            else int(np.random.SeedSequence((seed, len(seeded))).generate_state(1)[0])
        )
        if isinstance(generator, np.random.RandomState):
            generator.seed(own)
        elif isinstance(generator, np.random.Generator):
            # In place, because parts of the env share the generator.
            bits = generator.bit_generator
            bits.state = type(bits)(own).state
        else:  # None, or of a kind that is not known
            continue
        seeded.append(generator)


def _metadata(env: dm_env.Environment) -> dict[str, Any]:
    task = _attribute(env, "task")
    named = env if task is None else task
    facts: dict[str, Any] = {
        "env_id": f"{type(named).__module__}.{type(named).__qualname__}"
    }
    control_timestep = _attribute(env, "control_timestep")
    if callable(control_timestep):
        facts["render_fps"] = 1.0 / float(control_timestep())
    return facts
