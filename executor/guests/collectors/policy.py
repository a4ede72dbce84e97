"""Run policies in place: they are never copied, pickled or moved unless the caller requests it.

Guarantees:
- A policy that need not move is called itself. A policy that must move and can be copied is copied once, and the
  copy follows the original's weights (`Placed.follow`). A policy that cannot be copied is not moved; the data is
  moved to it instead, and a warning names the obstacle.
- `uncopied` and `swapped_parameters` let losses that copy modules, or run them with other parameters,
  use a policy that must not be copied.
Does not know: what the policy does.
"""

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn
from torch.nn.parameter import is_lazy

from envherd.executor.batches.fast_tensordict import without_grad
from envherd.executor.batches.transfer import to_device
from envherd.executor.processes.error_messages import log
from envherd.executor.rollouts.policy_state import leaf_keys, run_policy

Policy = Callable[[TensorDictBase], TensorDictBase]


class Placed:
    """A policy and the device that its inputs go to.

    Args:
        policy: takes a root batch `[N]` and returns it with the action.
        device: on which to run it; None does not move it.
        is_apart: act with a copy of a module, to which its learner does not write.

    Attributes:
        policy: the callable in use: the policy itself, or its copy.
        device: of its inputs; None if inputs are not moved.
        is_copy: whether it is a copy.

    Raises:
        ValueError: with `is_apart`, the module cannot be copied.
    """

    def __init__(
        self,
        policy: Policy,
        device: torch.device | str | None = None,
        *,
        is_apart: bool = False,
    ) -> None:
        wanted = None if device is None else _with_index(torch.device(device))
        self._original = policy
        self.policy = policy
        self.is_copy = False
        self.device = home = _device_of(policy)
        is_moved = wanted is not None and wanted != home
        if is_moved:
            self.device = wanted
        # One without tensors need not be moved.
        if not (is_apart and isinstance(policy, nn.Module)) and not (is_moved and home):
            return
        clone, obstacle = try_copy(policy)
        if clone is not None:
            self.policy = clone.to(self.device)
            self.is_copy = True
        elif is_apart:
            raise ValueError(
                f"AsyncCollector failed: expected a policy that can be copied with in_background, but {obstacle}. "
                f"Collect with in_background=0."
            )
        else:
            self.device = home
            log.warning(
                "policy_device=%r was not followed: %s. The policy stays on %s and is not copied; batches are moved to "
                "it instead.",
                str(wanted),
                obstacle,
                home,
            )

    def __call__(self, root: TensorDictBase) -> TensorDictBase:
        """Run the policy; the keys that it adds are moved to the device of the batch."""
        home = root.device or torch.device("cpu")
        if self.device is None or self.device == home:
            return self.policy(root)
        moved = to_device(root, self.device)
        given = moved.copy()  # the policy may write into the batch itself
        versions = {key: _version(given.get(key)) for key in leaf_keys(given)}
        acted = run_policy(self.policy, moved)
        written = [
            key
            for key in leaf_keys(acted)
            if (value := acted.get(key)) is not given.get(key, None)
            or _version(value) != versions[key]
        ]
        # It waits for the copy, because the caller may read the batch at once.
        return root.update(acted.select(*written).to(home, non_blocking=False))

    def follow(self) -> None:
        """Copy the original's present weights and buffers to the copy, if there is one."""
        if self.is_copy:
            set_tensors(self.policy, tensors_of(self._original))


def _version(value: Any) -> Any:
    """Return a value that changes with every write to a tensor; a new object if torch does not count writes to it."""
    if isinstance(value, torch.Tensor) and value.is_inference():
        return object()
    return getattr(value, "_version", None)


def _with_index(device: torch.device) -> torch.device:
    """Return `cuda` as `cuda:0` or whichever is current, so that devices can be compared."""
    is_vague = str(device) == "cuda" and torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if is_vague else device


def _device_of(policy: Any) -> torch.device | None:
    """Return the device of a module's parameters and buffers; None if it has none, or is no module."""
    first = next(iter(tensors_of(policy)), None)
    return None if first is None else first.device


def tensors_of(policy: Any) -> list[torch.Tensor]:
    """Return the parameters and buffers of a module; none of another callable."""
    if not isinstance(policy, nn.Module):
        return []
    return [*policy.parameters(), *policy.buffers()]


@without_grad
def set_tensors(policy: Any, values: Iterable[torch.Tensor]) -> None:
    """Write the parameters and buffers of a module; the values are those of a module of the same form."""
    for mine, value in zip(tensors_of(policy), values, strict=True):
        mine.copy_(value)


def try_copy(policy: Any) -> tuple[Any, str]:
    """Return a deep copy of a module, or None and why it cannot be copied."""
    if getattr(policy, "copyable", True) is False:
        return (
            None,
            f"{type(policy).__name__} declares that it cannot be copied (copyable = False)",
        )
    for name, parameter in policy.named_parameters():
        if is_lazy(parameter):
            return (
                None,
                f"{name} is not initialised yet, and a copy would initialise itself differently",
            )
    for name, module in policy.named_modules():
        # Torch leaves it out of copies.
        if getattr(module, "_compiled_call_impl", None) is not None:
            what = name or type(module).__name__
            return (
                None,
                f"{what} was compiled in place, and a copy would not be compiled: use torch.compile(module)",
            )
    try:
        # The copy's weights are written to later.
        with torch.inference_mode(mode=False):
            return copy.deepcopy(policy), ""
    except Exception as error:  # whatever the copying of its parts raises
        return (
            None,
            f"{_find_obstacle(policy)} cannot be copied ({type(error).__name__}: {error})",
        )


def _find_obstacle(policy: nn.Module) -> str:
    """Return the name and type of the first attribute that cannot be copied."""
    for prefix, module in policy.named_modules():
        for name, value in vars(module).items():
            if name in ("_parameters", "_buffers", "_modules"):
                continue
            try:
                copy.deepcopy(value)
            except Exception:
                path = f"{prefix}.{name}" if prefix else name
                return f"the attribute {path} ({type(value).__module__}.{type(value).__qualname__})"
    return type(policy).__name__


@contextlib.contextmanager
def uncopied(*modules: nn.Module) -> Iterator[None]:
    """Make `copy.deepcopy` return these modules themselves inside the `with`.

    For losses that deep-copy their modules and run them with other parameters, as TorchRL's do in their constructor:
    `with uncopied(policy): loss = ClipPPOLoss(actor, critic)`, where `policy` is `actor` or a part of it. The loss then
    runs the module itself, and TensorDict swaps its parameters.

    Thread-safety: one thread at a time may run the loss or the policy.
    """
    present = [module for module in modules if "__deepcopy__" not in vars(module)]
    for module in present:
        vars(module)["__deepcopy__"] = lambda _memo, module=module: module
    try:
        yield
    finally:
        for module in present:
            del vars(module)["__deepcopy__"]


@contextlib.contextmanager
def swapped_parameters(
    module: nn.Module,
    parameters: TensorDictBase,
) -> Iterator[nn.Module]:
    """Run a module with other parameters inside the `with`; its own are restored at the end, also after an exception.

    Args:
        module: not copied.
        parameters: as `TensorDict.from_module(module)` returns them: a target network's, an averaged
            copy, a functional call's. Gradients flow to them.

    Yields:
        The module itself.

    Raises:
        KeyError: a parameter of the module is missing in `parameters`.
    """
    own = TensorDict.from_module(module)
    names = set(own.keys(include_nested=True, leaves_only=True))
    missing = sorted(
        map(str, names - set(parameters.keys(include_nested=True, leaves_only=True)))
    )
    if missing:
        raise KeyError(
            f"swapped_parameters failed: expected all parameters of the module, got none for {missing[0]}."
        )
    parameters.to_module(module)
    try:
        yield module
    finally:
        # TensorDict's own context manager leaves the others in place after an exception.
        own.to_module(module)
