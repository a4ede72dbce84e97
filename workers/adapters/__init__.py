"""Env families behind one protocol: `base.Adapter`. `registry.register` adds a family."""

from envherd.workers.adapters.base import Adapter, StepValues
from envherd.workers.adapters.named import PettingZooFactory
from envherd.workers.adapters.registry import find_adapter, is_env_like, register

__all__ = [
    "Adapter",
    "PettingZooFactory",
    "StepValues",
    "find_adapter",
    "is_env_like",
    "register",
]
