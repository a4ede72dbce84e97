"""Imports the package's modules."""

import importlib
import pkgutil

import envherd

#: Parts that import packages which take long; test_portable.py reads their sources instead.
HEAVY = (
    "rllib",
    "sb3",
    "torchrl",
    "cluster",
    "meltingpot",
    "_native",
    "plotting",
)
OPTIONAL = (
    "vmas",
    "envpool",
    "imageio",
    "prometheus_client",
    "matplotlib",
    "dm_control",
    "dm_env",
    "pettingzoo",
)


def import_all():
    """Import the package's modules."""
    for module in pkgutil.walk_packages(envherd.__path__, "envherd."):
        if any(name in module.name for name in HEAVY):
            continue
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:  # an optional package
            if error.name not in OPTIONAL:
                raise
