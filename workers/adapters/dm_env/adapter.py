"""dm_env: any `dm_env.Environment`, among them dm_control (suite, composer), raw dmlab2d and bsuite.

Keys, shapes and dtypes are described under "specs".

Ends of episodes: LAST with a discount of 0 is `terminated`, LAST with a discount above
0 is `truncated` (dm_control ends by its time limit with discount 1). Raw dmlab2d ends every episode with
discount 0, whatever the reason, so that all its endings are `terminated` here: a frame cap cannot be distinguished
from a real end. The discount of a step inside an episode is not reported.

Seeds: dm_env has no API for seeding, so the adapter reseeds the generators of the known families in place:
`env.task.random` (dm_control's suite), `env.random_state` (composer), `env._rng`
(dmlab2d, bsuite), also behind wrappers. An env that keeps its generator elsewhere ignores the seed.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import dm_env
import numpy as np
from dm_env import specs

from envherd.shm.specs import (
    Binary,
    Discrete,
    Domain,
    EnvSpec,
    Key,
    LeafSpec,
    Unbounded,
)
from envherd.workers.adapters.base import Adapter, Mask, Options, StepValues
from envherd.workers.adapters.common.tree import (
    Branch,
    Convert,
    Leaf,
    Node,
    array_leaf,
    builder,
    dict_branch,
    flattener,
    interval,
    leaf_specs,
    refuse_reserved,
    side_leaf,
)
from envherd.workers.adapters.common.values import as_float, snapshot
from envherd.workers.errors import ResetNeeded, SpecError

# ---- specs -------------------------------------------------------------------------------------
# Describe dm_env specs as trees of leaves: the keys, shapes, dtypes and domains of an env's values.
#
# Keys, shapes and dtypes follow TorchRL's `DMControlWrapper`: entries of a dict become root keys, a single
# array is `("observation",)`, entries of a list are "0", "1", ... (at the root: below "observation"); a
# 0-d array has shape (1,); dtypes are the spec's, float64 for dm_control's observations and reward. An
# action is `("action",)`, or nested below it where the env takes a dict or a list (dmlab2d takes a dict by
# action name); a DiscreteArray is an int64 index, a BoundedArray a Box of the same dtype, integers included.
# Arrays of strings or objects (dmlab2d's texts), and observations of dmlab2d with a dynamic dimension,
# are side-channel values.

_MakeLeaf = Callable[[specs.Array, Key], Leaf]


def observation_tree(spec: Any, *, has_dynamic: bool) -> Node:
    """Describe an observation spec.

    Args:
        spec: what `env.observation_spec()` returned.
        has_dynamic: a dimension of 0 stands for one that varies (dmlab2d) rather than for an empty array.

    Raises:
        SpecError: no dm_env spec, or a root name that a batch uses itself.
    """

    def make_leaf(leaf: specs.Array, key: Key) -> Leaf:
        return (
            _text_leaf(key)
            if has_dynamic and 0 in leaf.shape
            else _observation_leaf(leaf, key)
        )

    if not isinstance(spec, Mapping):
        return described(spec, ("observation",), make_leaf)
    operation = "reading observation_spec"
    refuse_reserved(map(str, spec), operation)
    return dict_branch(
        spec, (), lambda inner, key: described(inner, key, make_leaf), operation
    )


def described(spec: Any, key: Key, make_leaf: _MakeLeaf) -> Node:
    """Describe a spec, or a dict or list of specs.

    Args:
        spec: what the env returned.
        key: of its leaf, or below which those of a dict or list are.
        make_leaf: describes one array, such as `action_leaf`.

    Raises:
        SpecError: no dm_env spec.
    """
    if isinstance(spec, Mapping):
        return dict_branch(
            spec,
            key,
            lambda inner, at: described(inner, at, make_leaf),
            f"reading the spec of {'/'.join(key)}",
        )
    if isinstance(spec, (list, tuple)):
        kind = tuple if isinstance(spec, tuple) else list
        return Branch(
            kind,
            tuple(
                (i, described(inner, (*key, str(i)), make_leaf))
                for i, inner in enumerate(spec)
            ),
        )
    if not isinstance(spec, specs.Array):
        raise SpecError(
            f"reading the spec of {'/'.join(key)} failed: expected a dm_env.specs.Array or a dict or list of them, "
            f"got {type(spec).__module__}.{type(spec).__qualname__}. Fix the env."
        )
    return make_leaf(spec, key)


def _observation_leaf(spec: specs.Array, key: Key) -> Leaf:
    dtype = np.dtype(spec.dtype)
    if dtype.kind not in "biufc":
        return _text_leaf(key)
    if isinstance(spec, specs.DiscreteArray):
        return Leaf(LeafSpec(key, (), dtype.name, Discrete(int(spec.num_values))))
    return array_leaf(key, tuple(spec.shape), dtype, _domain(spec, dtype))


def _text_leaf(key: Key) -> Leaf:
    where = "/".join(key)
    return Leaf(side_leaf(key), take=lambda value: snapshot(value, where))


def action_leaf(spec: specs.Array, key: Key) -> Leaf:
    """Describe an array of an action spec."""
    dtype = np.dtype(spec.dtype)
    if dtype.kind not in "biufc":
        return Leaf(side_leaf(key))
    if isinstance(spec, specs.DiscreteArray):
        scalar: Convert = dtype.type
        return Leaf(
            LeafSpec(key, (), "int64", Discrete(int(spec.num_values))),
            give=scalar,
        )
    return array_leaf(key, tuple(spec.shape), dtype, _domain(spec, dtype))


def reward_leaf(spec: specs.Array, key: Key) -> Leaf:
    """Describe an array of a reward spec: a single reward is a float leaf of shape (1,)."""
    dtype = np.dtype(spec.dtype)
    shape = tuple(spec.shape)
    if shape in ((), (1,)) and dtype.kind == "f":
        return Leaf(
            LeafSpec(key, (1,), dtype.name),
            take=lambda value: (
                value if value.__class__ is float else as_float(value, "reward")
            ),
        )
    return array_leaf(key, shape, dtype, Unbounded())


def _domain(spec: specs.Array, dtype: np.dtype) -> Domain:
    if dtype.kind == "b":
        return Binary()
    if isinstance(spec, specs.BoundedArray):
        return interval(spec.minimum, spec.maximum, dtype)
    return Unbounded()


# ---- adapter -----------------------------------------------------------------------------------

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
        observation = observation_tree(
            env.observation_spec(),
            has_dynamic=self._lab is not None,
        )
        action = described(
            env.action_spec(),
            ("action",),
            action_leaf,
        )
        reward = described(
            env.reward_spec(),
            ("reward",),
            reward_leaf,
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
