"""A hosted env: a TorchRL env that a worker runs for the TorchRL facade, as TorchRL's own batched envs run theirs.

`TorchRLAdapter` puts TorchRL envs behind the executor's protocol. The facade keeps TorchRL's instead:
resets take tensordicts, masks at any nesting and keyword arguments, an env that has ended may be stepped,
seeds are TorchRL's chain. Plain steps of envs whose leaves have fixed shapes go through the slab (`HostedAdapter`); all
other requests name a method of the hosted env (`HostedEnv.perform`).

What such a request and its answer hold are pickles, unlike everything else that a worker sends: TorchRL's batched envs
return what their envs hold (specs, tensordicts with any data in them, attributes), and trust them. Classes that the
user's script defines are pickled by value, tensors as arrays on the CPU.

Guarantees: the hosted env's root tensordict is always its env's current one, whichever call advanced the env. An
exception affects only the answer of its env. Each hosted env keeps its own state of torch's CPU generator, as if it had
its own process.
"""

import contextlib
import copy
import functools
import importlib
import io
import pickle
import weakref
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Composite
from torchrl.envs import EnvBase
from torchrl.envs.common import EnvMetaData

from envherd.executor.facades.torchrl.ways.direct import (
    DirectWay,
    direct_way,
    restarted,
)
from envherd.shm.specs import EnvSpec, Key, LeafSpec, done_leaves
from envherd.workers.adapters.base import Adapter, EnvCall, Mask, Options, StepValues
from envherd.workers.adapters.torchrl.adapter import (
    own_generators,
    refuse_late_resets,
)
from envherd.workers.adapters.torchrl.private_api import (
    check_worker_env,
    supports_set_state,
)
from envherd.workers.adapters.torchrl.specs import (
    DTYPES,
    to_numpy,
)
from envherd.workers.errors import FactoryError
from envherd.workers.reply import Fault
from envherd.workers.sending.pickling import Pickler


class Call(NamedTuple):
    """A request to a hosted env: which of its methods is called, with what."""

    name: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}  # never written to


class DenseLeaf(NamedTuple):
    """A leaf of an env that the slab holds.

    Attributes:
        key: in the env's tensordicts.
        spec: in the slab.
    """

    key: Any
    spec: LeafSpec


class HostedFactory:
    """Builds hosted envs in a worker, from the pickled factory of their envs.

    Args:
        pickled: the user's factory.
        name: what messages call it.
        preload: modules for the helper process to import.
        num_threads: for torch in the worker, set before an env is built; None leaves them.
    """

    def __init__(
        self,
        pickled: bytes,
        name: str,
        preload: tuple[str, ...],
        num_threads: int | None,
    ) -> None:
        self._pickled = pickled
        self.__qualname__ = name
        self.preload = preload
        self._num_threads = num_threads
        self._make: Callable[..., Any] | None = None

    def __call__(self, **kwargs: Any) -> Adapter:
        """Build an env and return it as a hosted env, behind its adapter."""
        if self._make is None:
            # First: unpickling the factory may import Stable-Baselines3, and with it TensorBoard.
            importlib.import_module("envherd.workers.adapters.light_tensorboard")
            if self._num_threads is not None:
                torch.set_num_threads(self._num_threads)
            self._make = pickle.loads(self._pickled)
        env = own_env(self._make(**kwargs), self.__qualname__)
        return HostedAdapter(HostedEnv(env))


# The envs of this process that are hosted.
_known: weakref.WeakSet[EnvBase] = weakref.WeakSet()


def own_env(env: Any, origin: str) -> EnvBase:
    """Return an env that no other hosted env has: a deep copy if a factory returned the same one twice.

    Raises:
        FactoryError: it is no TorchRL env, or one whose resets would be steps.
    """
    if not isinstance(env, EnvBase):
        raise FactoryError(
            f"make_env failed: the factory {origin} returned {f'{env!r}'[:80]}, expected a TorchRL env (an EnvBase). "
            f"Wrap it, e.g. in GymWrapper."
        )
    refuse_late_resets(env)
    if env in _known:
        # An env that cannot be copied is shared.
        with contextlib.suppress(Exception):
            env = copy.deepcopy(env)
    _known.add(env)
    return env


class HostedEnv:
    """One TorchRL env and its current root.

    Args:
        env: what the factory returned.

    Attributes:
        env: the same, its specs locked.
        root: its present root tensordict, or None before the first reset.
        reset_names: keys that a reset returns: those of observation and done leaves.
        step_names: keys that a step returns: the same and the rewards.
        generator: its own state of the generators that envs of a process share.
        direct: steps it without tensordicts; None if that is not possible.
    """

    def __init__(self, env: EnvBase) -> None:
        check_worker_env(env)
        self.env = env.set_spec_lock_()
        self.root: TensorDictBase | None = None
        self.direct: DirectWay | None = None
        self.reset_names = [*env.observation_keys, *env.done_keys]
        self.step_names = [*self.reset_names, *env.reward_keys]
        self.generator = own_generators(env)

    def perform(self, request: bytes) -> bytes:
        """Make a `Call` of one of the methods below and return its result, or the exception that it raised."""
        call: Call = loads(request)
        try:
            with self.on_stage():
                return dumps(
                    (True, getattr(self, call.name)(*call.args, **call.kwargs))
                )
        except Exception as error:
            return dumps((False, Fault.from_exception(-1, call.name, error).to_plain()))

    @contextlib.contextmanager
    def on_stage(self) -> Any:
        """Run as if the process were this env's own: no gradients, and its own random generator."""
        if self.direct is not None and self.direct.is_ahead:
            self.root = self.direct.root()
        with torch.no_grad(), self.generator:
            yield

    # ---- what it is --------------------------------------------------------------------------

    def describe(self) -> EnvMetaData:
        """Return the metadata that TorchRL's batched envs keep of their envs."""
        return EnvMetaData.metadata_from_env(self.env)

    # ---- reset and step ----------------------------------------------------------------------

    def reset(
        self,
        row: TensorDictBase | None,
        kwargs: dict[str, Any],
    ) -> TensorDictBase:
        """Reset the env, or the parts of it that the row's masks name; return observation and done leaves."""
        if row is not None:
            row = on_device(row, self.env.device)
            masks = [row.get(key, None) for key in self.env.reset_keys]
            if self.root is not None and any(
                mask is not None and not mask.all() for mask in masks
            ):
                row = (
                    self.root.select(*self.reset_names, strict=False)
                    .clone()
                    .update(row)
                )
                if "set_state" not in kwargs and supports_set_state(self.env):
                    kwargs = {**kwargs, "set_state": False}
        self.root = self.env.reset(row, **kwargs)
        return self.root.select(*self.reset_names, strict=False)

    def step(self, row: TensorDictBase, *, is_whole: bool) -> TensorDictBase:
        """Step the env and return its `next`.

        Args:
            row: the inputs, and under `next` what the env gets before the step.
            is_whole: return all of `next`, not just the leaves that the specs name.
        """
        stepped = self.env.step(self._advanced(row))
        self.root = self.env.step_mdp(stepped)
        following = stepped.get("next")
        return (
            following if is_whole else following.select(*self.step_names, strict=False)
        )

    def step_and_maybe_reset(
        self,
        row: TensorDictBase,
    ) -> tuple[TensorDictBase, TensorDictBase]:
        """Step the env, and reset it where it has ended; return its `next` and its new root."""
        stepped, self.root = self.env.step_and_maybe_reset(self._advanced(row))
        following = stepped.get("next").select(*self.step_names, strict=False)
        return following, self.root.select(*self.reset_names, strict=False)

    def current(self) -> TensorDictBase:
        """Return the current root: observation and done leaves."""
        if self.root is None:
            return self.env.fake_tensordict().select(*self.reset_names, strict=False)
        return self.root.select(*self.reset_names, strict=False)

    def _advanced(self, row: TensorDictBase) -> TensorDictBase:
        return self.copied_root().update(on_device(row, self.env.device))

    def copied_root(self) -> TensorDictBase:
        """Return a copy of the current root, without copies of its tensors; an empty one before the first reset."""
        if self.root is None:
            return TensorDict({}, self.env.batch_size, device=self.env.device)
        return self.root.copy()

    # ---- everything else ---------------------------------------------------------------------

    def seed(self, seed: int | None, *, static: bool) -> int | None:
        """Seed the env as TorchRL's workers do; return the seed for the next env."""
        if seed is not None:
            torch.default_generator.manual_seed(seed)
        return self.env.set_seed(seed, static_seed=static)

    def state_dict(self) -> Any:
        """Return the env's state dict, without locks."""
        return _without_locks(self.env.state_dict())

    def load_state_dict(self, state: Any, kwargs: dict[str, Any]) -> None:
        """Put back what `state_dict` returned."""
        self.env.load_state_dict(state, **kwargs)

    def look_up(self, path: tuple[str, ...]) -> list[Any]:
        """Return an attribute as a list of one; an empty list for a method, and for what cannot be pickled."""
        found = self.find(path)
        if not callable(found):
            # Pickling runs the object's own code.
            with contextlib.suppress(Exception):
                dumps(found)
                return [found]
        return []

    def call(
        self,
        path: tuple[str, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call a method of the env; a result that cannot be pickled (that of `to`) becomes None."""
        result = self.find(path)(*args, **kwargs)
        return None if isinstance(result, EnvBase) else result

    def find(self, path: tuple[str, ...]) -> Any:
        """Return an attribute of the env by its path."""
        return functools.reduce(getattr, path, self.env)

    def close(self) -> None:
        """Close the env."""
        self.env.close(raise_if_closed=False)


def _without_locks(state: Any) -> Any:
    """Return a state dict with None in place of each lock."""
    if isinstance(state, dict):
        return {key: _without_locks(item) for key, item in state.items()}
    # Of multiprocessing: such a lock can be pickled only while a process is started.
    return None if type(state).__name__ == "Lock" else state


def on_device(td: TensorDictBase, device: torch.device | None) -> TensorDictBase:
    """Return a tensordict on a device; with None it has no device, and its leaves stay where they are."""
    if td.device == device:
        return td
    return td.clear_device_() if device is None else td.to(device)


# ---- the way to the slab ---------------------------------------------------------------------


def dense_leaves(specs: Composite) -> dict[str, list[DenseLeaf]] | None:
    """Return the leaves that the slab would hold, by group, or None where it cannot hold all of them.

    Observation and done leaves have separate flat names, because the executor's `done` at the root is not the env's.

    Args:
        specs: of one env. The parent has those of each env; the specs of the batch are stacks where tasks differ in
            their bounds.
    """
    groups: dict[str, list[DenseLeaf]] = {
        "input": [],
        "observation": [],
        "done": [],
        "reward": [],
    }
    for name, composite in (
        ("input", specs["input_spec", "full_action_spec"]),
        ("input", specs["input_spec", "full_state_spec"]),
        ("observation", specs["output_spec", "full_observation_spec"]),
        ("done", specs["output_spec", "full_done_spec"]),
        ("reward", specs["output_spec", "full_reward_spec"]),
    ):
        for key, spec in composite.items(include_nested=True, leaves_only=True):
            path = (key,) if isinstance(key, str) else key
            shape = tuple(spec.shape)
            dtype = str(spec.dtype).removeprefix("torch.")
            if (
                type(spec).__name__ in ("NonTensor", "Stacked")
                # -1 stands for a size that changes.
                or -1 in shape
                or dtype not in DTYPES
            ):
                return None
            flat: Key = path if name == "input" else (f"{name}:{'/'.join(path)}",)
            groups[name].append(DenseLeaf(key, LeafSpec(flat, shape, dtype)))
    has_lazy_nodes = any(
        hasattr(item, "stack_dim") for item in specs.values(include_nested=True)
    )
    shapes = {leaf.key: leaf.spec.shape for leaf in groups["observation"]}
    # as state and as observed
    disagrees = any(
        shapes.get(leaf.key, leaf.spec.shape) != leaf.spec.shape
        for leaf in groups["input"]
    )
    # As `place_leaves`.
    groups["reward"].sort(
        key=lambda leaf: (leaf.spec.key[0].count("/"), leaf.spec.key[0].split("/"))
    )
    return None if has_lazy_nodes or disagrees else groups


class HostedAdapter(Adapter):
    """The plain steps of a hosted env, through the slab; an env whose leaves do not fit there has an empty spec."""

    family: ClassVar[str] = "torchrl"

    def __init__(self, hosted: HostedEnv) -> None:
        self.env = hosted
        env = hosted.env
        leaves = dense_leaves(env.specs)
        groups = leaves or {"input": [], "observation": [], "done": [], "reward": []}
        observed = [*groups["observation"], *groups["done"]]
        self._input_dtypes = {
            leaf.key: getattr(torch, leaf.spec.dtype) for leaf in groups["input"]
        }
        self._observed = [leaf.key for leaf in observed]
        self._rewards = [leaf.key for leaf in groups["reward"]]
        way: DirectWay | str = "its leaves do not fit into the slab"
        if leaves is not None:
            way = direct_way(
                env,
                list(self._input_dtypes),
                self._observed,
                self._rewards,
            )
        hosted.direct = None if isinstance(way, str) else way
        self.spec = EnvSpec(
            observation=tuple(leaf.spec for leaf in observed),
            action=tuple(leaf.spec for leaf in groups["input"]),
            reward=tuple(leaf.spec for leaf in groups["reward"]),
            done=done_leaves(),
            family=self.family,
            metadata={
                "is_dense": leaves is not None,
                #: How steps through the slab reach the env.
                "way": f"TorchRL's own code, because {way}"
                if hosted.direct is None
                else "direct",
            },
        )
        self._is_on_cpu = env.device is None or env.device.type == "cpu"

    def reset(
        self,
        seed: int | None,  # noqa: ARG002
        options: Options = None,  # noqa: ARG002
        mask: Mask = None,  # noqa: ARG002
    ) -> list[Any]:
        """Reset the env; see `restarted`. Seeds, options and masks reach it by name alone."""
        hosted = self.env
        direct = hosted.direct
        if direct is not None:
            if not direct.is_ahead:
                direct.follow(hosted.root)
            with hosted.generator:
                return direct.reset()
        with hosted.on_stage():
            hosted.root = root = restarted(hosted.env, hosted.root)
        return [to_numpy(root.get(key)) for key in self._observed]

    def step(self, action: list[Any]) -> StepValues:
        """Make one transition; see `Adapter.step`. It counts as terminated when TorchRL would reset the env."""
        hosted = self.env
        direct = hosted.direct
        if direct is not None:
            if not direct.is_ahead:
                direct.follow(hosted.root)
            with hosted.generator:
                return direct.step(action)
        env = hosted.env
        with hosted.on_stage():
            root = hosted.copied_root()
            inputs = self._input_dtypes.items()
            for (key, dtype), value in zip(inputs, action, strict=True):
                tensor = torch.from_numpy(np.asarray(value)).to(dtype)
                root.set(key, tensor if self._is_on_cpu else tensor.to(env.device))
            stepped = env.step(root)
            following = stepped.get("next")
            hosted.root = env.step_mdp(stepped)
            has_ended = bool(env.any_done(hosted.root))
            if has_ended:
                # `any_done` has written the masks of a reset into it.
                hosted.root = hosted.root.exclude(*env.reset_keys)
        return (
            [to_numpy(following.get(key)) for key in self._observed],
            [to_numpy(following.get(key)) for key in self._rewards],
            has_ended,
            False,
        )

    def env_call(self) -> EnvCall | None:
        direct = self.env.direct
        return None if direct is None else direct.env_call()

    def close(self) -> None:
        """Close the env."""
        self.env.close()


class _Pickler(Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if (
            # Subclasses have more state than their values, and numpy lacks bfloat16.
            type(obj) is torch.Tensor
            and not obj.is_nested
            and obj.dtype is not torch.bfloat16
        ):
            return _tensor, (
                obj.detach().cpu().numpy(),
                str(obj.device) if obj.device.type != "cpu" else None,
            )
        return super().reducer_override(obj)


def _tensor(array: Any, device: str | None) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor.to(device) if device else tensor


def dumps(value: Any) -> bytes:
    """Return any picklable value as bytes (a tensor takes a few microseconds; torch's own pickling about fifty)."""
    file = io.BytesIO()
    _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()


#: Returns the value that `dumps` packed.
loads = pickle.loads
