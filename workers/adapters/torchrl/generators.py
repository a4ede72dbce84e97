"""The state of the generators that TorchRL envs of a process share."""

from __future__ import annotations

from typing import Any

import torch
from torchrl.envs import EnvBase

from envherd.workers.adapters.common.generators import OwnGenerators
from envherd.workers.adapters.torchrl.gym import base_env
from envherd.workers.adapters.torchrl.private_api import wrapped_env


def own_generators(env: EnvBase) -> OwnGenerators:
    """Return an env's own state of the generators that envs of a process share: torch's, and the one of VMAS."""
    torchs, base = torch.default_generator, base_env(env)
    if "VmasWrapper" not in {cls.__name__ for cls in type(base).__mro__}:
        return OwnGenerators(torchs.get_state, torchs.set_state)
    # One list for all VMAS envs of the process.
    shared: list[Any] = wrapped_env(base).vmas_random_state

    def restore(state: list[Any]) -> None:
        torchs.set_state(state[0])
        shared[:] = state[1:]

    return OwnGenerators(lambda: [torchs.get_state(), *shared], restore)
