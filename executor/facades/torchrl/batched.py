"""The part of the facade that needs no running envs: arguments, specs, device, views.

Instances pass isinstance checks for TorchRL's `BatchedEnvBase` and have its public attributes, but none of its code
runs: this class uses only the public `EnvBase`, so it does not depend on how TorchRL's own batched envs work.
"""

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase
from torchrl.data import Composite
from torchrl.data.utils import contains_lazy_spec
from torchrl.envs import EnvBase
from torchrl.envs.batched_envs import BatchedEnvBase
from torchrl.envs.common import EnvMetaData

from envherd.workers.adapters.torchrl.private_api import BatchedHooks, place

MakeEnv = Callable[..., EnvBase]

_SPECS = ("action_spec", "state_spec", "observation_spec", "reward_spec", "done_spec")
#: Arguments of TorchRL's constructor that change nothing here.
_WITHOUT_EFFECT = {
    "allow_step_when_done",
    "consolidate",
    "daemon",
    "memmap",
    "non_blocking",
    "pin_memory",
    "policy_proof",
    "shared_memory",
}


class Batched(BatchedHooks, BatchedEnvBase):  # type: ignore[misc]  # untyped
    """Arguments, specs and views; the constructor's arguments are TorchRL's.

    A subclass has `_learn_specs`, which reads the envs' metadata and calls `_set_specs` with it, and `_begin`.
    Its additional attributes have private names, because unknown public names are looked up in the envs: `_env_ids` (of
    a view: the ids of its envs in the whole), `_is_whole` (it is no view), `_whole` (of an open view: the whole).
    """

    def __init__(  # noqa: PLR0913  # TorchRL's
        self,
        num_workers: int,
        create_env_fn: MakeEnv | Sequence[MakeEnv],
        *,
        create_env_kwargs: Mapping[str, Any] | Sequence[dict[str, Any]] | None = None,
        device: Any = None,
        use_buffers: bool | None = None,
        share_individual_td: bool | None = None,
        metadata_from_workers: bool = False,
        num_threads: int | None = None,
        num_sub_threads: int = 1,
        mp_start_method: str | None = None,
        shutdown_timeout: float = 10.0,
        **without_effect: Any,
    ) -> None:
        unknown = without_effect.keys() - _WITHOUT_EFFECT
        if unknown:
            raise TypeError(
                f"{type(self).__name__} failed: expected TorchRL's arguments, got {min(unknown)!r}."
            )
        EnvBase.__init__(self, device=device)
        self.is_closed = True
        self.num_workers = num_workers
        self._one_task = callable(create_env_fn) or len(set(create_env_fn)) == 1
        if callable(create_env_fn):
            create_env_fn = [create_env_fn] * num_workers
        _check_count("create_env_fn", create_env_fn, num_workers)
        self.create_env_fn = list(create_env_fn)
        if create_env_kwargs is None or isinstance(create_env_kwargs, Mapping):
            create_env_kwargs = [
                copy.deepcopy(dict(create_env_kwargs or {})) for _ in range(num_workers)
            ]
        _check_count("create_env_kwargs", create_env_kwargs, num_workers)
        self.create_env_kwargs = create_env_kwargs
        self._fixed_shapes = False if metadata_from_workers else use_buffers
        self.share_individual_td = share_individual_td
        self._asks_all = metadata_from_workers
        self.num_threads = num_threads
        self.num_sub_threads = num_sub_threads
        self._start_method = mp_start_method
        self.shutdown_timeout = float(shutdown_timeout)
        self._env_seeds: list[int | None] | None = None
        self._is_whole = True
        self.__dict__["_whole"] = None  # not a submodule
        self._env_ids = list(range(num_workers))
        self._learn_specs()
        if metadata_from_workers:
            self._begin()

    # ---- specs -------------------------------------------------------------------------------

    def _set_specs(self, found: list[EnvMetaData]) -> None:
        """Take over the envs' metadata.

        Args:
            found: metadata of each env; only one if all are of the same task.

        Raises:
            ValueError: the envs are on several devices and none was passed, or they must be stacked and cannot be.
            RuntimeError: an env has empty specs, or envs of one task differ.
        """
        if self._asks_all:
            _require_alike(found)
        self._per_env = (
            found if len(found) == self.num_workers else found * self.num_workers
        )
        self._choose_layout(found)
        if self._one_task:
            first = found[0]
            self.meta_data = first.expand(self.num_workers, *first.batch_size)
            batch_size = self.meta_data.batch_size
            specs = [_not_empty(self.meta_data.specs, type(self))]
            self._env_text = first.env_str
        else:
            self.meta_data = found
            batch_size = torch.Size([self.num_workers, *found[0].batch_size])
            specs = [_not_empty(one.specs, type(self)) for one in found]
            self._env_text = str(found[0])
        place(
            self,
            batch_size,
            self.device if self.device is not None else self._common_device(found),
        )
        for name in _SPECS:
            # Actions and states are inputs.
            side = "input_spec" if name in _SPECS[:2] else "output_spec"
            parts = [one[side][f"full_{name}"] for one in specs]
            setattr(self, name, parts[0] if self._one_task else torch.stack(parts, 0))
        self.has_lazy_inputs = contains_lazy_spec(self.input_spec)

    def _common_device(self, found: list[EnvMetaData]) -> torch.device | None:
        devices: set[torch.device | None] = {one.device for one in found}
        if len(devices) > 1:
            raise ValueError(
                f"The device wasn't passed to {type(self)}, but more than one device was found in the "
                f"sub-environments. Please indicate a device to be used for collection."
            )
        return devices.pop()

    def _choose_layout(self, found: list[EnvMetaData]) -> None:
        """Choose `use_buffers` and `share_individual_td` unless the caller has."""
        if self._fixed_shapes is not False:
            is_fixed = not any(one.has_dynamic_specs for one in found)
            if self._fixed_shapes and not is_fixed:
                warnings.warn(
                    "A value of use_buffers=True was passed but this is incompatible with the list of environments "
                    "provided. Turning use_buffers to False.",
                    stacklevel=2,
                )
            self._fixed_shapes = is_fixed
        if self._one_task:
            self.share_individual_td = bool(self.share_individual_td)
        elif self.share_individual_td is not True:
            is_unlike = not _can_be_stacked([one.tensordict for one in found])
            if is_unlike and self.share_individual_td is False:
                raise ValueError(
                    "share_individual_td=False was provided but share_individual_td must be True to accommodate "
                    "non-stackable tensors."
                )
            self.share_individual_td = is_unlike

    def __repr__(self) -> str:
        # A missing attribute would be looked up in the envs.
        crew = self.__dict__.get("_crew")
        ways = (
            f", \n\tsteps={'; '.join(crew.ways)}"
            if crew is not None and crew.ways
            else ""
        )
        return f"{type(self).__name__}(\n\tenv={self._env_text}, \n\tbatch_size={self.batch_size}{ways})"

    def _set_seed(self, seed: int | None) -> None:
        """Unused: TorchRL requires this method; `set_seed` of a batched env calls its envs."""

    # ---- views -------------------------------------------------------------------------------

    def _indices(self, item: Any) -> list[int]:
        """Return the ids of the envs that an index selects.

        Raises:
            NotImplementedError: it is a boolean mask.
            IndexError: it is out of bounds, empty or of several dimensions.
        """
        index = item if isinstance(item, slice) else torch.as_tensor(item, device="cpu")
        if getattr(index, "dtype", None) == torch.bool:
            raise NotImplementedError(
                "Boolean masks are not supported for batched envs."
            )
        found = torch.arange(self.num_workers, device="cpu")[index]
        if found.ndim > 1 or not found.numel():
            raise IndexError(
                f"Batched env indices must be scalar or 1D and not empty, got shape {found.shape}."
            )
        return found.reshape(-1).tolist()

    def _view_of(self, indices: list[int]) -> Any:
        """Return a view: a separate env that shows some of this one's envs, and ends with it."""
        # Without the constructor, which would start workers.
        view = type(self).__new__(type(self))
        view.__dict__.update(
            self.__dict__,
            _is_whole=False,
            _whole=self.__dict__["_whole"] or self,
        )
        view.num_workers = len(indices)
        for name in ("_env_ids", "create_env_fn", "create_env_kwargs", "_env_seeds"):
            listed = getattr(self, name)
            setattr(view, name, listed and [listed[i] for i in indices])
        Batched._set_specs(
            view,
            self._per_env[:1]
            if self._one_task
            else [self._per_env[i] for i in indices],
        )
        return view


def _check_count(name: str, given: Sequence[Any], num_workers: int) -> None:
    if len(given) != num_workers:
        raise RuntimeError(
            f"len({name}) and num_workers mismatch, got {len(given)} and {num_workers}."
        )


def _not_empty(specs: Composite, cls: type) -> Composite:
    for side in ("input_spec", "output_spec"):
        for key, item in specs[side].items(include_nested=True):
            if (
                isinstance(item, Composite)
                and isinstance(key, tuple)
                and item.is_empty()
            ):
                raise RuntimeError(
                    f"The environment passed to {cls.__name__} has empty specs in {key[-1]}. Consider using "
                    f"torchrl.envs.transforms.RemoveEmptySpecs to remove the empty specs."
                )
    return specs


def _can_be_stacked(tds: list[TensorDictBase]) -> bool:
    if (
        len({frozenset(td.keys(include_nested=True, leaves_only=True)) for td in tds})
        > 1
    ):
        return False
    try:
        # A lazy stack takes any shapes; only a contiguous one needs equal ones.
        LazyStackedTensorDict(*tds, stack_dim=0).contiguous()
    except RuntimeError:
        return False
    return True


def _require_alike(found: list[EnvMetaData]) -> None:
    schemas = [_schema(one) for one in found]
    for worker, schema in enumerate(schemas):
        if schema != schemas[0]:
            raise RuntimeError(
                f"ParallelEnv worker metadata are incompatible: worker {worker} has a different tensor schema from "
                f"worker 0."
            )


def _schema(one: EnvMetaData) -> tuple[Any, ...]:
    leaves = [
        (key, type(spec), tuple(spec.shape), getattr(spec, "dtype", None))
        for key, spec in one.specs.items(include_nested=True, leaves_only=True)
    ]
    return one.batch_size, one.device, one.batch_locked, leaves
