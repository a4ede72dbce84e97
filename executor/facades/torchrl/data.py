"""The data path of the TorchRL facades: tensordicts in, tensordicts out, by TorchRL's rules.

Plain steps of all envs go through the slab if their leaves have fixed shapes. Everything else (resets, `_step` masks,
values that the caller passes under `next`, dynamic and non-tensor leaves, different tasks) is a separate call to each
env; the envs work on these at the same time.

Guarantees: the caller owns all results. A reset returns the rows of envs that are not reset unchanged. An empty mask
has no effect. Keyword arguments of resets are never modified.
"""

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDictBase
from tensordict.utils import is_non_tensor
from torchrl.data import Composite, NonTensor
from torchrl.data.tensor_specs import Stacked
from torchrl.data.utils import contains_lazy_spec
from torchrl.envs import EnvBase
from torchrl.envs.batched_envs import BatchedEnvBase
from torchrl.envs.common import EnvMetaData

from envherd.executor.batches.fast_tensordict import (
    Shell,
    get_leaf,
    set_next,
    without_grad,
)
from envherd.executor.batches.hand_out import GroupBatch, StepBatches
from envherd.executor.facades.torchrl.worker import Call, dense_leaves, on_device
from envherd.executor.protocol.call_guard import StaleRoots
from envherd.executor.protocol.fast import FastStep
from envherd.workers.adapters.torchrl.private_api import (
    BatchedHooks,
    aggregate_ends,
    is_collected,
    is_compiled,
    merge_reset,
    place,
    skipped_step,
    without_collected,
)
from envherd.workers.errors import ActionError
from envherd.workers.protocol import Op

# ---- batched -----------------------------------------------------------------------------------
# The part of the facade that needs no running envs: arguments, specs, device.
#
# Instances pass isinstance checks for TorchRL's `BatchedEnvBase` and have its public attributes, but none of its code
# runs: this class uses only the public `EnvBase`, so it does not depend on how TorchRL's own batched envs work.

MakeEnv = Callable[..., EnvBase]

_SPECS = ("action_spec", "state_spec", "observation_spec", "reward_spec", "done_spec")
#: Arguments of TorchRL's constructor that change nothing here.
_WITHOUT_EFFECT = {
    "allow_step_when_done",
    "auto_wrap_envs",
    "consolidate",
    "daemon",
    "memmap",
    # No env is built in this process in any case.
    "metadata_from_workers",
    "non_blocking",
    "pin_memory",
    "policy_proof",
    "serial_for_single",
    "shared_memory",
}


class Batched(BatchedHooks, BatchedEnvBase):  # type: ignore[misc]  # untyped
    """Arguments and specs; the constructor's arguments are TorchRL's.

    A subclass has `_learn_specs`, which reads the envs' metadata and calls `_set_specs` with it.
    Its additional attributes have private names, because unknown public names are looked up in the envs.
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
        self._fixed_shapes = use_buffers
        self.share_individual_td = share_individual_td
        self.num_threads = num_threads
        self.num_sub_threads = num_sub_threads
        self._start_method = mp_start_method
        self.shutdown_timeout = float(shutdown_timeout)
        self._env_seeds: list[int | None] | None = None
        self._learn_specs()

    # ---- specs -------------------------------------------------------------------------------

    def _set_specs(self, found: list[EnvMetaData]) -> None:
        """Take over the envs' metadata.

        Args:
            found: metadata of each env; only one if all are of the same task.

        Raises:
            ValueError: the envs are on several devices and none was passed, or they must be stacked and cannot be.
            RuntimeError: an env has empty specs.
        """
        self._first_specs = found[0].specs
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


# ---- data --------------------------------------------------------------------------------------


class Shells:
    """The nesting of a slab's flat leaves in the `next` and root tensordicts of a batch.

    Args:
        env: with the specs, the device and a `fake_tensordict` of the batch.
        specs: of one env.

    Attributes:
        fast_steps: op -> the compiled step of the crew whose slab this is; empty if it has none.
        stale_roots: looks at batches that already have a `next`.
    """

    def __init__(self, env: Any, specs: Any) -> None:
        leaves = dense_leaves(specs)
        assert leaves is not None
        self._template = env.fake_tensordict()
        self.device = env.device
        self.is_on_cpu = env.device is None or env.device.type == "cpu"
        self.input_keys = [leaf.key for leaf in leaves["input"]]
        self.state_keys = set(
            env.full_state_spec.keys(include_nested=True, leaves_only=True)
        )
        self.has_own_state = not self.state_keys.issubset(
            env.full_observation_spec.keys(include_nested=True, leaves_only=True)
        )
        observed = [*leaves["observation"], *leaves["done"]]
        self._observed = {leaf.key: leaf.spec.key[0] for leaf in leaves["observation"]}
        self._leaves = {"next": [*observed, *leaves["reward"]], "root": observed}
        self.stale_roots = StaleRoots(
            [list(self._observed)] * env.num_workers,
            self.input_keys[:1] * env.num_workers,
        )
        #: The nesting over the leaves of a section, in their order.
        self._shells = {
            section: self._shell(
                section,
                {leaf.spec.key[0]: place for place, leaf in enumerate(own)},
            )
            for section, own in self._leaves.items()
        }
        self.batch_size = tuple(self._template.batch_size)
        self.fast_steps: dict[Op, FastStep] = {}

    def _shell(self, section: str, places: Mapping[str, int]) -> Shell:
        """Return the nesting of `next` or the root over a list of leaves, given the place of each name in that list."""
        template = self._template
        if section == "next":
            template = template.get("next")
        paths = {
            leaf.spec.key[0]: (leaf.key,) if isinstance(leaf.key, str) else leaf.key
            for leaf in self._leaves[section]
        }
        prefixes = {
            path[:depth] for path in paths.values() for depth in range(1, len(path))
        }
        groups = {prefix: tuple(template.get(prefix).batch_size) for prefix in prefixes}
        return Shell(
            {path: places[name] for name, path in paths.items()},
            groups,
            (),
            tuple(template.batch_size),
            self.device if self.is_on_cpu else None,
        )

    def over(self, batch: GroupBatch) -> StepBatches:
        """Return what makes these batches directly from the rows of a slab."""
        in_next = {key[0]: place for place, key in enumerate(batch.next_keys)}
        in_root = {key[0]: place for place, key in enumerate(batch.root_keys)}
        return StepBatches(
            batch,
            self._shell("next", in_next),
            self._shell("root", in_next),
            self._shell("root", in_root),
            is_copy=True,
        )

    def can_take(self, td: TensorDictBase) -> bool:
        """Return whether the inputs are there, and all envs are to be stepped."""
        return get_leaf(td, "_step") is None and all(
            td.get(key, None) is not None for key in self.state_keys
        )

    def nested(self, section: str, flat: TensorDictBase) -> TensorDictBase:
        """Return the `next` or the root over the leaves of a flat batch."""
        td = self._shells[section].build(
            [get_leaf(flat, leaf.spec.key[0]) for leaf in self._leaves[section]]
        )
        return td if self.is_on_cpu else td.to(self.device)

    def repeat_roots(
        self,
        flat: TensorDictBase,
        root: TensorDictBase,
        rows: torch.Tensor,
    ) -> None:
        """Write the roots into some rows (bool `[N]`) of a flat `next`: those without a step."""
        for key, name in self._observed.items():
            value = root.get(key, None)
            if value is not None:
                get_leaf(flat, name)[rows] = value.to(get_leaf(flat, name).device)[rows]


class BatchedData(Batched):
    """Steps and resets; see the module."""

    # ---- which way ---------------------------------------------------------------------------

    def _slab_shells(self, td: TensorDictBase) -> Shells | None:
        """Return the shells for a plain step of this tensordict through the slab; None if it is not plain."""
        shells: Shells | None = self.__dict__["_shells"]
        if shells is None:
            crew = self._open()
            if (
                # Envs with leaves of changing shapes are stepped by messages.
                not (self._fixed_shapes and crew.is_dense) or self.share_individual_td
            ):
                return None
            shells = Shells(self, self._first_specs)
            shells.fast_steps = crew.compile_steps(shells)
            self.__dict__["_shells"] = shells
        if get_leaf(td, "next") is None:
            return shells if shells.can_take(td) else None
        shells.stale_roots.look(td, np.arange(self.num_workers))
        return None

    # ---- step --------------------------------------------------------------------------------

    def step(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Step the envs once; see TorchRL's `EnvBase.step`.

        Args:
            tensordict: batch `[N, ...]` with the action; it gets the key `next`, in which entries other than the envs'
                are kept. With a bool mask `_step`, only those envs are stepped.

        Returns:
            `tensordict` itself. The caller owns the memory of `next`.

        Raises:
            EnvError: an env raised; all others were stepped.
            (WorkerLost, WorkerTimeout): see `BatchedEnv.step`.
        """
        if self._step_fast(tensordict, Op.STEP) is not None:
            return tensordict
        shells = (
            self._slab_shells(tensordict)
            if tensordict.batch_size == self.batch_size
            else None
        )
        if shells is None:
            return EnvBase.step(self, tensordict)
        flat, _ = self._step_slab(shells, tensordict, Op.STEP)
        set_next(tensordict, shells.nested("next", flat))
        return tensordict

    def _step_fast(
        self,
        tensordict: TensorDictBase,
        op: Op,
    ) -> tuple[TensorDictBase, TensorDictBase | None] | None:
        """Step all envs and set `next` of the batch; None if nothing was done, because the step is not plain."""
        shells: Shells | None = self.__dict__["_shells"]
        step = None if shells is None else shells.fast_steps.get(op)
        if (
            shells is None
            or step is None
            or is_compiled(self)
            or (shells.has_own_state and op == Op.STEP_RESET)
            or not shells.can_take(tensordict)
        ):
            return None
        try:
            pair = step(tensordict)
        except ActionError:  # the general way casts, and its error is the one to raise
            return None
        if pair is not None and op == Op.STEP_RESET and is_collected(self):
            set_next(tensordict, without_collected(self, tensordict.get("next")))
        return pair

    def _step_slab(
        self,
        shells: Shells,
        tensordict: TensorDictBase,
        op: Op,
    ) -> tuple[TensorDictBase, TensorDictBase | None]:
        """Step all envs through the slab; the row of an env whose worker was lost repeats its root.

        Resets do not go through the slab, so its latest row there may be of the previous episode.
        """
        crew = self._open()
        flat, root = crew.step_slab(tensordict, op)
        if crew.lost is not None:
            shells.repeat_roots(flat, tensordict, crew.lost)
        return flat, root

    @without_grad
    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self._open()
        shells = self._slab_shells(tensordict)
        if shells is not None:
            flat, _ = self._step_slab(shells, tensordict, Op.STEP)
            return shells.nested("next", flat)
        mask = tensordict.get("_step", None)
        if mask is not None and not mask.all():
            return self._step_some(tensordict, self._whole_envs(mask))
        return self._step_by_message(tensordict, range(self.num_workers))

    def _whole_envs(self, mask: torch.Tensor) -> torch.Tensor:
        """Return the envs that a `_step` mask selects, bool `[N]`.

        Raises:
            ValueError: it selects parts of an env that is itself a batch.
        """
        mask = mask.reshape(self.num_workers, -1)
        if not (mask == mask[:, :1]).all():
            raise ValueError(
                "A batched environment's _step mask must select whole workers. Place the partial-step transform "
                "inside each worker to select individual entries of its batch."
            )
        return mask[:, 0]

    def _step_some(self, td: TensorDictBase, mask: torch.Tensor) -> TensorDictBase:
        """Step some envs; the others' rows of `next` repeat their roots, with reward 0."""
        selected = mask.nonzero(as_tuple=True)[0].tolist()
        if not selected:
            return skipped_step(self, td)
        out = self._step_by_message(td, selected)
        if self._keys_without_tensors:
            skipped = skipped_step(self, td)
            # In any case, unlike `on_device`: leaves without tensors may have another device than their tensordict.
            if out.device is None:
                skipped.clear_device_()
            else:
                skipped = skipped.to(out.device)
            return self._stacked(
                [
                    out[selected.index(i)] if i in selected else skipped[i]
                    for i in range(self.num_workers)
                ]
            )
        # Zeros are the rewards and flags of envs that are not stepped.
        result = out.new_zeros(td.shape)
        result.update(
            td.select(
                *result.keys(include_nested=True, leaves_only=True),
                strict=False,
            ).clone()
        )
        result[mask] = out
        return result

    def _step_by_message(self, td: TensorDictBase, selected: Any) -> TensorDictBase:
        crew = self._open()
        calls = [
            Call(
                "step",
                (self._step_row(td[i]),),
                {"is_whole": not self._fixed_shapes},
            )
            for i in selected
        ]
        out = self._stacked(crew.tell(selected, calls))
        preset = td.get("next", None)
        if preset is not None:
            unknown = [
                key
                for key in preset.keys(include_nested=True, leaves_only=True)
                if key not in self._next_keys()
            ]
            if unknown:
                # TorchRL keeps them: a policy may have written its state there.
                kept = preset.select(*unknown)
                out.update(
                    kept if len(selected) == self.num_workers else kept[list(selected)]
                )
        return out

    def _step_row(self, row: TensorDictBase) -> TensorDictBase:
        """Return the row to send to an env for a step: its inputs, and the entries under `next` that its specs name."""
        if self._fixed_shapes:
            sent = row.select(*self.action_keys, *self.state_keys, strict=False)
        else:
            sent = row.exclude("next", "_step", *self.reset_keys)
        preset = row.get("next", None)
        if preset is not None:
            known = preset.select(*self._next_keys(), strict=False)
            if not known.is_empty():
                sent = sent.copy().set("next", known)
        return sent

    @property
    def _keys_without_tensors(self) -> list[Any]:
        """Keys of leaves that are not tensors."""
        leaves = [
            item
            for spec in (
                self.full_observation_spec,
                self.full_action_spec,
                self.full_state_spec,
            )
            for item in spec.items(include_nested=True, leaves_only=True)
        ]
        # Specs that differ between envs are a stack; one of them shows the kind of leaf.
        members = [
            (key, spec.unbind(spec.stack_dim)[0] if isinstance(spec, Stacked) else spec)
            for key, spec in leaves
        ]
        return [key for key, spec in members if isinstance(spec, NonTensor)]

    def _next_keys(self) -> set[Any]:
        return {*self.observation_keys, *self.reward_keys, *self.done_keys}

    def step_and_maybe_reset(
        self,
        tensordict: TensorDictBase,
    ) -> tuple[TensorDictBase, TensorDictBase]:
        """Step all envs and reset those that have ended, in one round trip.

        Returns:
            `(tensordict, root)`: `tensordict` with the true last observations under `next`, and the batch to act on
            next. Entries under `next` that the envs do not know are kept and copied to the root.
        """
        pair = self._step_fast(tensordict, Op.STEP_RESET)
        return self._step_in_general(tensordict) if pair is None else pair

    @without_grad
    def _step_in_general(
        self,
        tensordict: TensorDictBase,
    ) -> tuple[TensorDictBase, TensorDictBase]:
        if tensordict.device != self.device:
            # Without a device it would be changed in place; `to` copies.
            tensordict = on_device(
                tensordict.copy() if self.device is None else tensordict,
                self.device,
            )
        self._open()
        shells = self._slab_shells(tensordict)
        if shells is None or shells.has_own_state or is_compiled(self):
            if tensordict.get("_step", None) is not None or not self._fixed_shapes:
                return EnvBase.step_and_maybe_reset(self, tensordict)
            return self._step_and_maybe_reset_by_message(tensordict)
        flat, flat_root = self._step_slab(shells, tensordict, Op.STEP_RESET)
        set_next(tensordict, without_collected(self, shells.nested("next", flat)))
        return tensordict, shells.nested("root", flat_root)

    def _step_and_maybe_reset_by_message(
        self,
        td: TensorDictBase,
    ) -> tuple[TensorDictBase, TensorDictBase]:
        crew = self._open()
        rows = [self._step_row(td[i]) for i in range(self.num_workers)]
        answers = crew.tell(
            range(self.num_workers),
            [Call("step_and_maybe_reset", (row,)) for row in rows],
        )
        stepped, fresh = map(list, zip(*answers, strict=True))
        following = self._stacked(stepped)
        preset = td.get("next", None)
        if preset is not None:
            following.update(
                preset.exclude(*following.keys(include_nested=True, leaves_only=True))
            )
        td.set("next", following)
        root = self.step_mdp(td)
        if self.any_done(root):
            root = merge_reset(
                self._stacked(fresh),
                root,
                self.reset_keys,
            )
        return td, root

    # ---- reset -------------------------------------------------------------------------------

    @without_grad
    def _reset(
        self,
        tensordict: TensorDictBase | None = None,
        **kwargs: Any,
    ) -> TensorDictBase:
        crew = self._open()
        if (shells := self.__dict__["_shells"]) is not None:
            shells.stale_roots.forget()
        listed = kwargs.pop("list_of_kwargs", None) or [{}] * self.num_workers
        calls = []
        for i, is_reset in enumerate(self._reset_mask(tensordict)):
            if is_reset:
                row = None if tensordict is None else self._reset_row(tensordict[i])
                calls.append(Call("reset", (row, {**listed[i], **kwargs})))
            else:
                calls.append(Call("current"))
        return self._stacked(crew.tell(range(self.num_workers), calls))

    def _reset_mask(self, td: TensorDictBase | None) -> list[bool]:
        if td is None:
            return [True] * self.num_workers
        mask = td.get("_reset", None)
        if mask is None:
            mask = aggregate_ends(td, reset_keys=self.reset_keys)
        if not mask.ndim:
            mask = mask.expand(self.num_workers)
        rows: list[bool] = mask.reshape(self.num_workers, -1).any(-1).tolist()
        return rows

    def _reset_row(self, row: TensorDictBase) -> TensorDictBase | None:
        """Return the row to send to an env for a reset: its own leaves and masks."""
        if self._fixed_shapes:
            row = row.select(
                *self.observation_keys,
                *self.done_keys,
                *self.reset_keys,
                *self.action_keys,
                *self.state_keys,
                strict=False,
            )
        else:
            row = row.exclude("next")
        return None if row.is_empty() else row

    def _with_missing(self, td: TensorDictBase, rows: TensorDictBase) -> TensorDictBase:
        """Return all envs' rows to a caller that passed only masks."""
        have = set(td.keys(include_nested=True, leaves_only=True, is_leaf=_is_leaf))
        missing = [
            key
            for key in rows.keys(
                include_nested=True,
                leaves_only=True,
                is_leaf=_is_leaf,
            )
            if key not in have
        ]
        if missing and not isinstance(td, LazyStackedTensorDict):
            added = rows.select(*missing)
            if isinstance(added, LazyStackedTensorDict):
                td = LazyStackedTensorDict(*td.unbind(0))
            td.update(added.clone())
        return td

    # ---- batches -----------------------------------------------------------------------------

    def _stacked(self, rows: list[TensorDictBase]) -> TensorDictBase:
        """Return the rows of envs as one batch on this env's device."""
        if self.share_individual_td:
            # Rows of different shapes stay apart.
            batch = LazyStackedTensorDict.lazy_stack(rows, 0)
        else:
            batch = LazyStackedTensorDict.maybe_dense_stack(rows, 0)
        return on_device(batch, self.device)


def _is_leaf(cls: type) -> bool:
    return not issubclass(cls, TensorDictBase) or is_non_tensor(cls)
