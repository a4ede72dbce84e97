"""Direct ways: steps of a TorchRL env of an exact class without a tensordict for each step.

TorchRL's wrappers only convert values between another library's env and tensordicts. A direct way converts them between
that env and the slab; `FAMILIES` names the classes that have one. Guarantees: the same calls with the same values,
dtypes and types reach the env, and the same values and dtypes reach the slab, as through TorchRL; tests hold it to
that. A class, option or value for which this is not so keeps TorchRL's own code, and `direct_way` says why.
"""

import importlib
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torchrl.data import Bounded, Categorical, OneHot, TensorSpec, Unbounded
from torchrl.envs import EnvBase

from envherd.executor.batches.fast_tensordict import Shell
from envherd.workers.adapters.base import EnvCall, StepValues
from envherd.workers.adapters.torchrl.private_api import resets_itself

#: A key of TorchRL: a name, or the names on the way to a nested leaf.
TdKey = Any

_LIBS = "torchrl.envs.libs"
_WAYS = "envherd.executor.facades.torchrl.ways"
#: Exact class -> `module:Class` of its way.
FAMILIES = {
    f"{_LIBS}.gym.GymEnv": "gym:DirectGym",
    f"{_LIBS}.gym.GymWrapper": "gym:DirectGym",
    f"{_LIBS}.dm_control.DMControlEnv": "gym:DirectDMControl",
    f"{_LIBS}.dm_control.DMControlWrapper": "gym:DirectDMControl",
    f"{_LIBS}.meltingpot.MeltingpotEnv": "meltingpot:DirectMeltingPot",
    f"{_LIBS}.meltingpot.MeltingpotWrapper": "meltingpot:DirectMeltingPot",
    f"{_LIBS}.pettingzoo.PettingZooEnv": "pettingzoo:DirectPettingZoo",
    f"{_LIBS}.pettingzoo.PettingZooWrapper": "pettingzoo:DirectPettingZoo",
    "torchrl.envs.transforms._base.TransformedEnv": "transformed:DirectTransformed",
    # Before TorchRL 0.14.
    "torchrl.envs.transforms.transforms.TransformedEnv": "transformed:DirectTransformed",
}
#: What an instance must not replace: its way does not call them.
_METHODS = ("step", "reset", "_step", "_reset", "step_mdp", "any_done")

#: Values of a done leaf `[1]`; never written to.
FLAGS = (np.array([False]), np.array([True]))


class NotDirect(Exception):
    """An env has no direct way; the message says what prevents it."""


class DirectWay:
    """Steps one env.

    Args:
        env: the TorchRL env.
        inputs: keys of its inputs, in the order of `step`.
        observed: keys of its observation and done leaves, in the order of the values.
        rewards: keys of its rewards.

    Attributes:
        is_ahead: whether the env was stepped since `root` was last called.
        latest: values of `observed` after the latest step or reset, of ways that keep them.

    Raises:
        NotDirect: the env has an option that only TorchRL's own code handles.
    """

    #: Whether values that `step` returns are written again by the next call; other arrays are the env's own.
    reuses_buffers = False
    #: Whether it steps envs that are themselves a batch of rows.
    takes_batches = False

    def __init__(
        self,
        env: EnvBase,
        inputs: list[TdKey],
        observed: list[TdKey],
        rewards: list[TdKey],
    ) -> None:
        self.torchrl_env = env
        self.inputs = inputs
        self.observed = observed
        self.rewards = rewards
        self.is_ahead = False
        self.latest: list[Any] = []
        self._build: Callable[[list[Any]], TensorDict] | None = None
        require(self.takes_batches or not env.batch_size, "it is a batch")
        require(
            env.device in (None, torch.device("cpu")),
            f"its device is {env.device}",
        )
        require(not env.run_type_checks, "it checks types")
        require(not resets_itself(env), "it resets itself")
        require(
            not any(name in vars(env) for name in _METHODS),
            "a method of the instance was replaced",
        )
        require(
            os.environ.get("CHECK_SPEC_ENCODE", "0").lower() not in ("1", "true"),
            "CHECK_SPEC_ENCODE is set",
        )

    def step(self, action: list[Any]) -> StepValues:
        """Make one transition; observation values are those of `observed`."""
        raise NotImplementedError

    def reset(self) -> list[Any]:
        """Start the next episode as TorchRL does after an end; return values as `step` does."""
        raise NotImplementedError

    def env_call(self) -> EnvCall | None:
        """Return how C steps the env itself; None if it must call `step`."""
        return None

    def follow(self, root: Any) -> None:
        """Note a root that TorchRL's own code has made; called before a step unless `is_ahead`."""

    def root(self) -> Any:
        """Return the env's current root tensordict."""
        self.is_ahead = False
        if self._build is None:
            self._build = builder(self.torchrl_env, self.observed)
        # Copies: a way that reuses its buffers writes to these values again.
        return self._build([torch.from_numpy(np.array(value)) for value in self.latest])


def require(condition: object, otherwise: str) -> None:
    """Raise a `NotDirect` unless a condition holds."""
    if not condition:
        raise NotDirect(otherwise)


def leaves_of(spec: Any) -> dict[TdKey, TensorSpec]:
    """Return the leaves of a `Composite`, at any depth."""
    return dict(spec.items(include_nested=True, leaves_only=True))


def restarted(env: EnvBase, root: Any) -> Any:
    """Reset the parts of an env that have ended (all, if it has no root yet); return its root."""
    if root is not None and env.any_done(root):
        return env.reset(root, select_reset_only=True)
    return env.reset()


def direct_way(
    env: EnvBase,
    inputs: list[TdKey],
    observed: list[TdKey],
    rewards: list[TdKey],
) -> DirectWay | str:
    """Return the way that steps an env directly, or the reason why there is none.

    Args:
        env: any TorchRL env.
        inputs: keys of its inputs, in the adapter's order.
        observed: keys of observation and done leaves.
        rewards: keys of its rewards.
    """
    kind = type(env)
    found = FAMILIES.get(f"{kind.__module__}.{kind.__qualname__}")
    if found is None:
        return f"{kind.__qualname__} has no direct way"
    module, _, name = found.partition(":")
    make: Callable[..., DirectWay] = getattr(
        importlib.import_module(f"{_WAYS}.{module}"),
        name,
    )
    try:
        return make(env, inputs, observed, rewards)
    except NotDirect as reason:
        return f"{kind.__qualname__}: {reason}"


def leaf_keys(env: EnvBase) -> tuple[list[TdKey], list[TdKey], list[TdKey]]:
    """Return the arguments of `direct_way` for an env: the keys of its inputs, observed leaves and rewards."""

    def keys(*sources: str) -> list[TdKey]:
        return [
            key
            for source in sources
            for key in leaves_of(getattr(env, f"full_{source}_spec"))
        ]

    return keys("action", "state"), keys("observation", "done"), keys("reward")


# ---- values ----------------------------------------------------------------------------------


def encoder(spec: TensorSpec) -> Callable[[Any], np.ndarray]:
    """Return the function that converts a native value as the spec's `encode` does, to an array."""
    is_plain = isinstance(spec, (Bounded, Unbounded))
    ndarray = np.ndarray
    dtype = numpy_dtype(spec)
    shape = tuple(spec.shape)

    def encode(value: Any) -> np.ndarray:
        if (
            is_plain
            and value.__class__ is ndarray
            and value.dtype is dtype
            and value.shape == shape
        ):
            array: np.ndarray = value
        else:
            array = spec.encode(value, ignore_device=True).numpy()
        return array

    return encode


def numpy_dtype(spec: TensorSpec) -> np.dtype:
    """Return the numpy dtype of a spec."""
    return np.dtype(str(spec.dtype).removeprefix("torch."))


def action_reader(spec: Any) -> Callable[[Any], np.ndarray]:
    """Return the function that converts an action from the slab as the spec's `to_numpy` does.

    Raises:
        NotDirect: an action of another kind.
    """
    if type(spec) is OneHot and not spec.use_register:
        return lambda value: np.asarray(value.argmax(-1))
    require(
        type(spec) is Categorical or isinstance(spec, (Bounded, Unbounded)),
        f"its action is a {type(spec).__name__}",
    )
    return np.asarray


def builder(
    env: EnvBase,
    keys: Sequence[TdKey],
) -> Callable[[Sequence[Any]], TensorDict]:
    """Return the function that makes a tensordict of tensors aligned with keys, nested as the env's `next`."""
    members = {
        (key,) if isinstance(key, str) else key: index for index, key in enumerate(keys)
    }
    like = env.fake_tensordict().get("next")
    groups = {
        path[:depth]: tuple(like.get(path[:depth]).batch_size)
        for path in members
        for depth in range(1, len(path))
    }
    return Shell(members, groups, (), tuple(env.batch_size), env.device).build
