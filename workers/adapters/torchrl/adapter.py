"""TorchRL envs: any `EnvBase` that runs in one process.

Guarantees: one `step` is one `env.step`; keys, dtypes, encodings and values are TorchRL's. The adapter keeps the env's
current root tensordict and advances it with `env.step_mdp`, so transforms that read the previous root (StepCounter,
RewardSum, InitTracker, ...) and envs whose state is in the tensordict work as in TorchRL. State leaves from the caller
take precedence.

`terminated` and `truncated` are the env's own. An env without a `truncated` key that sets `done` but not `terminated`
is truncated. Done keys at the root take precedence. If there are only nested ones, the root's are true as soon as any
nested one is, which is also TorchRL's rule for resets.

Seeds: Gymnasium and PettingZoo envs get the seed with the reset itself, dm_control's generator is seeded in
place, all others get `env.set_seed(seed)`. Envs that cannot be seeded (`metadata["seedable"]` is False) are
reset without it. While any env runs, torch's global CPU generator holds the env's own state, seeded with the episode.
So envs and transforms that draw from it are reproducible whatever else draws in between, and `set_seed` never reseeds
the process (generators of other devices are shared).

Envs that are themselves a batch: a partial reset reseeds nothing, as one generator serves all rows. Gymnasium
vector envs in SAME_STEP mode take only masks that match their done rows, as in TorchRL.
"""

import contextlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any, ClassVar

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict, TensorDictBase
from torchrl.envs import EnvBase, TransformedEnv

from envherd.shm.specs import DONE_KEYS, EnvSpec, Unbounded, done_leaves
from envherd.workers.adapters.base import Adapter, Mask, Options, StepValues
from envherd.workers.adapters.common.values import OwnGenerators
from envherd.workers.adapters.torchrl.private_api import seeding_names, wrapped_env
from envherd.workers.adapters.torchrl.specs import (
    Member,
    Path,
    PlacedLeaf,
    ends_reader,
    group_shapes,
    place_leaves,
    reader,
    to_numpy,
    to_plain,
    topmost,
)
from envherd.workers.errors import FactoryError, ResetNeeded, SpecError

#: `(root tensordict, value)`: stores the value.
Write = Callable[[TensorDictBase, Any], None]

_GROUPS = ("observation", "action", "reward", "done", "state")


class TorchRLAdapter(Adapter):
    """One TorchRL env behind the partial-reset protocol; see the module.

    Args:
        env: what the factory returned.

    Raises:
        FactoryError: the env runs other processes, or resets itself and loses the last observation.
        SpecError: a leaf has a dtype that numpy lacks, or a reward or done leaf has no fixed shape.
    """

    family: ClassVar[str] = "torchrl"

    def __init__(self, env: EnvBase) -> None:
        self.env = env
        self._base = base = base_env(env)
        _refuse_unfit(base)
        full_specs = {group: getattr(env, f"full_{group}_spec") for group in _GROUPS}
        leaves = {group: place_leaves(spec) for group, spec in full_specs.items()}
        require_dense([*leaves["reward"], *leaves["done"]])
        leaves["state"] = _asked_state(leaves["state"], leaves["observation"])
        nested_done = [
            leaf for leaf in leaves["done"] if leaf.spec.key not in DONE_KEYS
        ]
        batch_shape = tuple(env.batch_size)
        self.spec = EnvSpec(
            observation=tuple(leaf.spec for leaf in leaves["observation"]),
            action=tuple(leaf.spec for leaf in leaves["action"]),
            reward=tuple(leaf.spec for leaf in leaves["reward"]),
            done=(*done_leaves(batch_shape), *(leaf.spec for leaf in nested_done)),
            state=tuple(leaf.spec for leaf in leaves["state"]),
            batch_shape=batch_shape,
            groups=group_shapes(
                full_specs.values(),
                chain.from_iterable(leaves.values()),
                batch_shape,
            ),
            family=self.family,
            metadata=_metadata(env, base),
        )
        self._read_observation = [reader(leaf) for leaf in leaves["observation"]]
        self._read_rewards = [reader(leaf) for leaf in leaves["reward"]]
        self._read_nested_done = [reader(leaf) for leaf in nested_done]
        self._read_ends = ends_reader(leaves["done"], batch_shape)
        self._write_input = [
            _writer(leaf, env, is_optional=False) for leaf in leaves["action"]
        ]
        self._write_input += [
            _writer(leaf, env, is_optional=True) for leaf in leaves["state"]
        ]
        self._seed = _seeder(env, base)
        self._generator = own_generators(env)
        self._input_nodes = _nodes_of(
            [*leaves["action"], *leaves["state"]],
            full_specs["action"],
            full_specs["state"],
        )
        shapes = {leaf.path[:-1]: leaf.spec.shape for leaf in leaves["done"]}
        self._reset_signals = {
            prefix: shapes[prefix] for prefix in topmost(leaves["done"])
        }
        self._root: TensorDictBase | None = None
        self._latest: TensorDictBase = TensorDict({}, env.batch_size)

    def reset(
        self,
        seed: int | None,
        options: Options = None,
        mask: Mask = None,
    ) -> list[Any]:
        """Start an episode, or one for the rows in `mask` (the first reset is of all rows).

        Returns:
            Values aligned with `spec.observation`: VIEWS of the env's tensors, floats for single floats.
        """
        kwargs = {
            name: dict(value) if isinstance(value, dict) else value
            for name, value in (options or {}).items()
        }
        with torch.no_grad(), self._generator:
            if mask is None or mask.all() or self._root is None:
                if seed is not None:
                    torch.default_generator.manual_seed(seed)
                    kwargs = {**self._seed(seed), **kwargs}
                root = self.env.reset(**kwargs)
            elif mask.any():
                root = self.env.reset(
                    self._masked_root(self._root, mask),
                    select_reset_only=True,
                    **kwargs,
                )
            else:
                root = self._root
            if self._input_nodes is not None:
                root.update(self._input_nodes.clone())
        self._root = self._latest = root
        return [read(root) for read in self._read_observation]

    def step(self, action: list[Any]) -> StepValues:
        """Make one transition.

        Args:
            action: aligned with `spec.action` and `spec.state`; arrays become the env's. None for a state leaf means
                the value in the env's current root.

        Returns:
            Values as of `reset`; terminated and truncated as bools, or bool arrays `[*batch_shape, 1]`.
        """
        root = self._root
        if root is None:
            raise ResetNeeded(
                "step failed: expected a reset first, got a step. Reset the env."
            )
        for write, value in zip(self._write_input, action, strict=True):
            write(root, value)
        with torch.no_grad(), self._generator:
            stepped = self.env.step(root)
            following = stepped.get("next")
            self._root = self.env.step_mdp(stepped)
        self._latest = following
        terminated, truncated = self._read_ends(following)
        return (
            [read(following) for read in self._read_observation],
            [read(following) for read in self._read_rewards],
            terminated,
            truncated,
        )

    @property
    def has_whole_state(self) -> bool:  # type: ignore[override]
        """Whether the env has a `state_dict` other than TorchRL's, which has the state of transforms alone."""
        return type(self._base).state_dict is not EnvBase.state_dict

    def done_values(self) -> list[Any]:
        """Return the values of `spec.done[3:]` after the last reset or step: VIEWS of the env's tensors."""
        return [read(self._latest) for read in self._read_nested_done]

    def render(self) -> Any:
        """Return what the wrapped env draws in render mode "rgb_array", else the root key `pixels` or `RGB`."""
        if getattr(self._base, "render_mode", None) == "rgb_array":
            return self._base.render()
        for key in ("pixels", "RGB"):
            picture = self._latest.get(key, None)
            if (
                isinstance(picture, torch.Tensor)
                and picture.dtype == torch.uint8
                and picture.ndim == 3
            ):
                # Transforms of TorchRL put the channels first.
                return to_numpy(
                    picture if picture.shape[-1] == 3 else picture.permute(1, 2, 0)
                )
        return None

    def state_dict(self) -> Any:
        """Return `env.state_dict()` with numpy arrays (copies) for tensors; of a TransformedEnv, its transforms'."""
        return to_plain(self.env.state_dict())

    def load_state_dict(self, state: Any) -> None:
        """Put back what `state_dict` returned."""
        self.env.load_state_dict(_from_plain(state))

    def _masked_root(self, root: TensorDictBase, mask: np.ndarray) -> TensorDictBase:
        """Return a copy of the root that asks for a reset of the masked rows (TorchRL writes into what it is given)."""
        root = root.clone()
        for path, shape in self._reset_signals.items():
            rows = mask.reshape(
                *self.spec.batch_shape,
                *(1,) * (len(shape) - len(self.spec.batch_shape)),
            )
            signal = torch.from_numpy(np.broadcast_to(rows, shape).copy())
            _store(
                root,
                (*path, "_reset"),
                signal.to(self.env.device) if self.env.device else signal,
            )
        return root


def base_env(env: EnvBase) -> EnvBase:
    """Return what is under an env's transforms."""
    while isinstance(env, TransformedEnv):
        env = env.base_env
    return env


def refuse_late_resets(env: EnvBase) -> None:
    """Refuse a Gymnasium vector env that spends a step on each of its resets.

    TorchRL refuses it too, unless the `gym` package is installed as well; then last observations are
    zeros, and every reset is in the data as a transition with reward 0.

    Raises:
        FactoryError: it is one. The env was closed.
    """
    base = base_env(env)
    if "GymWrapper" not in {cls.__name__ for cls in type(base).__mro__}:
        return
    mode = getattr(base, "autoreset_mode", None)
    if getattr(mode, "name", mode) == "NEXT_STEP":
        base.close()
        raise FactoryError(
            f"the factory failed: expected a vector env that does not reset itself, got a {type(base).__name__} of "
            f"one with autoreset_mode NEXT_STEP. Build it with autoreset_mode=AutoresetMode.DISABLED."
        )


def own_generators(env: EnvBase) -> OwnGenerators:
    """Return an env's own state of the generators that envs of a process share: torch's, and the one of VMAS."""
    torchs = torch.default_generator
    base = base_env(env)
    if "VmasWrapper" not in {cls.__name__ for cls in type(base).__mro__}:
        return OwnGenerators(torchs.get_state, torchs.set_state)
    # One list for all VMAS envs of the process.
    shared: list[Any] = wrapped_env(base).vmas_random_state

    def restore(state: list[Any]) -> None:
        of_torch, *of_vmas = state
        torchs.set_state(of_torch)
        shared[:] = of_vmas

    return OwnGenerators(lambda: [torchs.get_state(), *shared], restore)


def _class_names(base: EnvBase) -> set[str]:
    return {cls.__name__ for cls in type(base).__mro__}


def _refuse_unfit(base: EnvBase) -> None:
    name = type(base).__name__
    if _class_names(base) & {"BatchedEnvBase", "AsyncEnvPool"}:
        base.close(raise_if_closed=False)
        raise FactoryError(
            f"the factory failed: expected an env that runs in one process, got a torchrl {name}, which runs several. "
            f"Give the factory of one inner env instead, and as many num_envs as the {name} had."
        )
    refuse_late_resets(base)


def require_dense(leaves: list[PlacedLeaf]) -> None:
    """Refuse leaves without a fixed shape.

    Raises:
        SpecError: there is one.
    """
    for leaf in leaves:
        if leaf.spec.is_side:
            raise SpecError(
                f"reading the env's specs failed: expected rewards and done flags of fixed shape, got {leaf.spec}. "
                f"Reshape it with a transform in the factory."
            )


def _asked_state(
    state: list[PlacedLeaf],
    observation: list[PlacedLeaf],
) -> list[PlacedLeaf]:
    """Return the state leaves that a step takes: without observed side leaves, which the adapter keeps itself.

    They have no bounds: a state that the env returned must not be refused when it is passed back.
    """
    observed = {leaf.spec.key for leaf in observation if leaf.spec.is_side}
    return [
        replace(leaf, spec=replace(leaf.spec, domain=Unbounded()))
        for leaf in state
        if leaf.spec.key not in observed
    ]


def _metadata(env: EnvBase, base: EnvBase) -> dict[str, Any]:
    metadata: dict[str, Any] = {
        "env": f"{type(base).__module__}.{type(base).__qualname__}",
        "seedable": _is_seedable(base),
        "device": str(env.device) if env.device else "cpu",
    }
    agents = getattr(base, "group_map", None)
    if isinstance(agents, Mapping):
        metadata["group_map"] = {
            str(group): [str(name) for name in names] for group, names in agents.items()
        }
    return metadata


def _is_seedable(base: EnvBase) -> bool:
    """Whether `_set_seed` has an effect, judged by the names it uses: a call would reset or reseed the env."""
    names = seeding_names(base)
    return names is None or not names <= {"NotImplementedError"}


def _seeder(env: EnvBase, base: EnvBase) -> Callable[[int], dict[str, Any]]:
    """Return the function that seeds the env: called right before a reset, it returns keyword arguments for it."""
    names = _class_names(base)
    if not _is_seedable(base):
        return lambda _seed: {}
    if "PettingZooWrapper" in names or (
        "GymWrapper" in names and _reset_takes_seed(base)
    ):
        return lambda seed: {"seed": seed}

    def seed_dm_control(seed: int) -> dict[str, Any]:
        base.task.random.seed(seed)  # what set_seed does, less its reset
        return {}

    def set_seed(seed: int) -> dict[str, Any]:
        with contextlib.suppress(NotImplementedError):
            env.set_seed(seed)
        return {}

    return seed_dm_control if "DMControlWrapper" in names else set_seed


def _reset_takes_seed(base: EnvBase) -> bool:
    try:
        return "seed" in inspect.signature(base.unwrapped.reset).parameters
    except (
        AttributeError,
        TypeError,
        ValueError,
    ):  # no Gymnasium env inside, or one without a signature
        return False


def _nodes_of(
    leaves: list[PlacedLeaf],
    action: Any,
    state: Any,
) -> TensorDictBase | None:
    """Return the empty tensordicts in which nested inputs lie, with their batch shapes; None if all are at the root."""
    if all(len(leaf.path) == 1 for leaf in leaves):
        return None
    nodes = _empty(action)
    nodes.update(_empty(state))
    return nodes


def _empty(composite: Any) -> TensorDictBase:
    if hasattr(composite, "stack_dim"):
        return LazyStackedTensorDict.lazy_stack(
            [_empty(member) for member in composite.unbind(composite.stack_dim)],
            composite.stack_dim,
        )
    return TensorDict(
        {
            name: _empty(item)
            for name, item in composite.items()
            if hasattr(item, "items")
        },
        composite.shape,
    )


def _writer(leaf: PlacedLeaf, env: EnvBase, *, is_optional: bool) -> Write:
    """Return the function that writes one input into the root tensordict; an array on the CPU is not copied."""
    path = leaf.path
    device = env.device
    is_batch = bool(env.batch_size)
    dtype = np.dtype(leaf.tensor_dtype) if leaf.tensor_dtype else None
    key: Any = path[0] if len(path) == 1 else path
    is_plain = (
        dtype is not None
        and device in (None, torch.device("cpu"))
        and all(isinstance(s, str) for s in path)
    )

    def write(root: TensorDictBase, value: Any) -> None:
        if value is not None or not is_optional:
            root.set(key, torch.from_numpy(np.asarray(value, dtype)))

    def write_any(root: TensorDictBase, value: Any) -> None:
        if value is None and is_optional:
            return
        if dtype is not None:
            tensor = torch.from_numpy(np.asarray(value, dtype))
            _store(root, path, tensor.to(device) if device else tensor)
        elif is_batch and isinstance(value, list):
            _store(root, path, NonTensorStack.from_list(value))
        else:
            parent, name = _descend(root, path)
            parent.set_non_tensor(name, value)

    return write if is_plain else write_any


def _store(root: TensorDictBase, path: Path, value: Any) -> None:
    parent, name = _descend(root, path)
    parent.set(name, value)


def _descend(root: TensorDictBase, path: Path) -> tuple[TensorDictBase, str]:
    """Return the tensordict that holds a leaf; dense ones on the way become lazy stacks where members differ."""
    node = root
    for depth, step in enumerate(path[:-1]):
        if isinstance(step, Member):
            if not isinstance(node, LazyStackedTensorDict):
                node = LazyStackedTensorDict.lazy_stack(
                    list(node.unbind(step.dim)),
                    step.dim,
                )
                _store(root, path[:depth], node)
            node = node.unbind(step.dim)[step.index]
        else:
            node = node.get(step)
    return node, str(path[-1])


def _from_plain(value: Any) -> Any:
    """Return data with tensors (copies) for numpy arrays."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    if isinstance(value, Mapping):
        return {key: _from_plain(item) for key, item in value.items()}
    return value
