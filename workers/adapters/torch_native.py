"""The adapters of simulators that step on tensors, for families built on them."""

from envherd.workers.adapters.simulators.native import (
    IsaacLabAdapter,
    ManiSkillAdapter,
    TorchNativeAdapter,
)

__all__ = ["IsaacLabAdapter", "ManiSkillAdapter", "TorchNativeAdapter"]
