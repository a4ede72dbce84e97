"""Marks for tests that need one of this package's extras: `pip install envherd[EXTRA]`.

A test without its extra is skipped with the extra's name. A test that mentions none must pass with `[gymnasium,dev]`.
"""

import importlib.util

import pytest

#: Extra -> the packages that tests import because of it.
PACKAGES = {
    "all": ("moviepy",),
    "atari": ("ale_py",),
    "bench": ("matplotlib", "stable_baselines3", "torchrl"),
    "box2d": ("Box2D", "pygame"),
    "browsergym": ("browsergym", "miniwob"),
    "cli": ("typer", "rich"),
    "dev": ("sb3_contrib", "supersuit"),
    "dm-control": ("dm_control",),
    "docs": ("mkdocs", "mkdocstrings", "material"),
    "envpool": ("envpool",),
    "gymnasium": ("gymnasium",),
    "highway": ("highway_env",),
    "maniskill": ("mani_skill",),
    "media": ("matplotlib", "imageio", "PIL"),
    "meltingpot": ("meltingpot", "dmlab2d"),
    "metaworld": ("metaworld",),
    "minigrid": ("minigrid",),
    "mujoco": ("mujoco",),
    "nle": ("nle",),
    "pettingzoo": ("pettingzoo", "mpe2"),
    "progress": ("tqdm",),
    "prometheus": ("prometheus_client",),
    "ray": ("ray",),
    "rllib": ("ray", "tree", "lz4", "ormsgpack", "tensorboardX"),
    "robotics": ("gymnasium_robotics",),
    "sb3": ("stable_baselines3",),
    "tensorboard": ("tensorboard",),
    "torchrl": ("torchrl",),
    "vmas": ("vmas",),
    "wandb": ("wandb",),
}


def has_extra(extra: str) -> bool:
    """Return whether all that tests use of an extra is installed; nothing is imported."""
    return all(
        importlib.util.find_spec(package) is not None for package in PACKAGES[extra]
    )


def needs(*extras: str) -> pytest.MarkDecorator:
    """Return a mark for a test, a class or a parameter: skipped where one of the extras is not installed."""
    return pytest.mark.skipif(not all(map(has_extra, extras)), reason=_reason(extras))


def skip_without(*extras: str) -> None:
    """Skip what is being collected (a file, on its first lines) or run, where one of the extras is not installed."""
    if not all(map(has_extra, extras)):
        pytest.skip(_reason(extras), allow_module_level=True)


def _reason(extras: tuple[str, ...]) -> str:
    missing = [extra for extra in extras if not has_extra(extra)]
    return f"needs envherd[{','.join(missing)}]"
