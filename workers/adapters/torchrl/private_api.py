"""All that this package uses of TorchRL's private API, or fills in for it; docs/private_apis.md lists it by version.

Works with TorchRL 0.10 to 0.14: this module detects what a version lacks, and then behaves as that version does. No
other module imports a private name of TorchRL, reads one from a TorchRL env, or overrides one but
`_step`, `_reset` and `_set_seed`, which TorchRL's documentation has env authors write.
"""

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase
from torchrl.envs import Compose, EnvBase, Transform
from torchrl.envs.utils import _aggregate_end_of_traj, _update_during_reset

#: `(tensordict, reset_keys=)` -> bool tensor: which rows have ended or must be reset.
aggregate_ends = _aggregate_end_of_traj
#: `(rows after a reset, rows before it, reset keys)` -> the merged rows, without masks.
merge_reset = _update_during_reset


# ---- reading an env --------------------------------------------------------------------------


def supports_set_state(env: EnvBase) -> bool:
    """Return whether the env supports `reset(set_state=...)`; False before TorchRL 0.13."""
    return bool(getattr(env, "_supports_set_state", False))


def check_worker_env(env: EnvBase) -> None:
    """Raise if one of an env's transforms must not run in a worker; before TorchRL 0.13 none objects."""
    check = getattr(
        vars(env).get("_modules", {}).get("_transform"),
        "_check_batched_worker_compat",
        None,
    )
    if check is not None:
        check()


def wrapped_env(env: EnvBase) -> Any:
    """Return the env of another library that a TorchRL wrapper holds, or None."""
    return vars(env).get("_env")


def converts_actions(env: EnvBase) -> bool:
    """Return whether a `GymWrapper` passes numpy actions to its env."""
    return bool(getattr(env, "_convert_actions_to_numpy", False))


def resets_itself(env: EnvBase) -> bool:
    """Return whether TorchRL lets the env's own resets through; False before TorchRL 0.13."""
    return bool(vars(env).get("_torchrl_native_autoreset", False))


def inversions(transform: Transform) -> list[Callable[[Any], Any]]:
    """Return what `transform.inv` calls one after the other, on a copy of the input of a step."""
    if type(transform).inv is not Transform.inv or "inv" in vars(transform):
        return [transform.inv]
    if type(transform) is not Compose or "_inv_call" in vars(transform):
        return [transform._inv_call]  # noqa: SLF001
    calls: list[Callable[[Any], Any]] = []
    for part in reversed(transform.transforms):
        calls += inversions(part) if type(part) is Compose else [part._inv_call]  # noqa: SLF001
    return calls


def seeding_names(env: EnvBase) -> set[str] | None:
    """Return the global names and attributes that `_set_seed` uses; None if it is no python function."""
    code = getattr(type(env)._set_seed, "__code__", None)  # noqa: SLF001
    return None if code is None else set(code.co_names)


# ---- batched envs ----------------------------------------------------------------------------


def place(env: EnvBase, batch_size: torch.Size, device: torch.device | None) -> None:
    """Set the batch size and device of an env whose specs follow; its present specs are dropped.

    The public setters change the shape of the present specs, and set a device once only.
    """
    env.__dict__.update(
        _batch_size=batch_size,
        _device=device,
        _input_spec=None,
        _output_spec=None,
        _cache={},
    )


def is_compiled(env: EnvBase) -> bool:
    """Return whether the caller asked for a compiled `step_and_maybe_reset`; False before TorchRL 0.13."""
    return vars(env).get("_compiled_step_and_maybe_reset") is not None


def skipped_step(env: EnvBase, td: TensorDictBase) -> TensorDictBase:
    """Return the `next` of envs that were not stepped: their current values, and zeros for keys that `td` lacks."""
    return env._skip_tensordict(td)  # noqa: SLF001


def is_collected(env: EnvBase) -> bool:
    """Return whether a collector drops entries of `next`; before TorchRL 0.14 it does not."""
    return vars(env).get("_collector") is not None and hasattr(
        env,
        "_get_collector_next_keys_to_exclude",
    )


def without_collected(env: EnvBase, following: TensorDictBase) -> TensorDictBase:
    """Leave out of `next` what the env's collector would drop at once."""
    if not is_collected(env):
        return following
    keys = env._get_collector_next_keys_to_exclude()  # noqa: SLF001
    return following.exclude(*keys) if keys else following


class BatchedHooks(EnvBase):  # type: ignore[misc]  # untyped
    """The private names of batched envs that TorchRL, and programs that use it, access.

    Subclasses have `_fixed_shapes` (whether every leaf of every env has a fixed shape), `_one_task`, `_start_method`,
    `_keys_without_tensors`, `_worker_processes`, `meta_data` (of the envs, as TorchRL keeps it: one for all, or a
    list), and the method that raises here.
    """

    meta_data: Any

    #: Specs are set once, by the constructor, not on first access.
    _properties_set = True

    @property
    def _has_dynamic_specs(self) -> bool:
        return not self._fixed_shapes

    _use_buffers = property(attrgetter("_fixed_shapes"))
    _single_task = property(attrgetter("_one_task"))
    _mp_start_method = property(attrgetter("_start_method"))
    _non_tensor_keys = property(attrgetter("_keys_without_tensors"))
    #: The processes of a `ParallelEnv`: each has `pid` and `is_alive()`.
    _workers = property(attrgetter("_worker_processes"))

    @property
    def _supports_set_state(self) -> bool:
        found = self.meta_data if isinstance(self.meta_data, list) else [self.meta_data]
        return all(getattr(one, "supports_set_state", False) for one in found)

    def _skip_tensordic(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Exists for `EnvBase.step`, which misspells the name before TorchRL 0.13."""
        return skipped_step(self, tensordict)

    def _reset_proc_data(
        self,
        tensordict: TensorDictBase | None,
        tensordict_reset: TensorDictBase,
    ) -> TensorDictBase:
        """Return the result of `reset`; the envs themselves have checked and completed their rows."""
        if tensordict is None:
            return tensordict_reset
        tensordict = self._with_missing(tensordict, tensordict_reset)
        if isinstance(tensordict_reset, LazyStackedTensorDict) and not isinstance(
            tensordict,
            LazyStackedTensorDict,
        ):
            tensordict = LazyStackedTensorDict(*tensordict.unbind(0))
        result: TensorDictBase = merge_reset(
            tensordict_reset,
            tensordict,
            self.reset_keys,
        )
        return result

    def _with_missing(self, td: TensorDictBase, rows: TensorDictBase) -> TensorDictBase:
        """Return the tensordict given to a reset, with what it lacks of the rows of all envs."""
        raise NotImplementedError
