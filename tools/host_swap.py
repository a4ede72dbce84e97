"""A pytest plugin that replaces a host library's classes by this project's facades.

To run a host library's own tests on them, from a checkout of that library:
`ENVHERD_HOST=sb3 python -m pytest -p tools.host_swap tests/test_vec_envs.py`. See docs/contributing.md.
"""

from __future__ import annotations

import importlib
import os
import sys

#: Host -> its package, modules to import first, the module with the facades, and the classes they replace.
HOSTS: dict[str, tuple[str, tuple[str, ...], str, tuple[str, ...]]] = {
    "gymnasium": (
        "gymnasium",
        (
            "gymnasium.vector",
            "gymnasium.wrappers.vector",
            "gymnasium.envs.registration",
        ),
        "envherd.gymnasium",
        ("AsyncVectorEnv",),
    ),
    "sb3": (
        "stable_baselines3",
        ("stable_baselines3.common.vec_env", "stable_baselines3.common.env_util"),
        "envherd.sb3",
        ("SubprocVecEnv",),
    ),
    "torchrl": (
        "torchrl",
        (
            "torchrl.envs",
            "torchrl.envs.batched_envs",
            "torchrl.collectors",
            "torchrl.testing",
        ),
        "envherd.torchrl",
        ("ParallelEnv",),
    ),
}


def swap(host: str) -> int:
    """Replace a host's classes in all of its modules that are imported; return how many names were replaced."""
    package, imported, facades, names = HOSTS[host]
    for name in imported:
        importlib.import_module(name)
    ours = importlib.import_module(facades)
    entry = importlib.import_module(imported[0])
    replaced = {id(getattr(entry, name)): getattr(ours, name) for name in names}
    count = 0
    for module_name, module in list(sys.modules.items()):
        if module_name.split(".")[0] != package:
            continue
        for attribute, value in list(vars(module).items()):
            if id(value) in replaced:
                setattr(module, attribute, replaced[id(value)])
                count += 1
    return count


if "ENVHERD_HOST" in os.environ:
    swap(os.environ["ENVHERD_HOST"])
