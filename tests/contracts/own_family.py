"""The example of a custom env, `examples/ctypes_env.py`, for the contract and the matrix."""

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from envherd.shm.specs import Key
from tests.oracles.plain_loops import Result, Values

_EXAMPLE = Path(__file__).parents[2] / "examples" / "ctypes_env.py"


def example() -> Any:
    """Import the example, once."""
    name = "_envherd_example_ctypes_env"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, _EXAMPLE)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def make_own() -> Any:
    """Build its env."""
    return example().make_drone()


class PlainOwn:
    """Its env, driven by hand."""

    def __init__(self) -> None:
        self.env = example().Drone()
        self.num_steps = 0

    def reset(self, seed: int, mask: np.ndarray | None = None) -> Values:
        self.num_steps = 0
        self.env.state.contents[:] = [0.0, 0.0]
        self.env.gusts.contents[:] = [0x330E, seed % 2**16, seed // 2**16]
        return self._observed()

    def step(self, action: Mapping[Key, np.ndarray]) -> Result:
        self.num_steps += 1
        is_flying = self.env.fly(int(action["action",]) - 1)
        return (
            self._observed(),
            {("reward",): float(is_flying)},
            not is_flying,
            self.num_steps == 50,
        )

    def _observed(self) -> Values:
        height, speed = self.env.state.contents
        return {("height",): height, ("speed",): speed}

    def close(self) -> None:
        pass
