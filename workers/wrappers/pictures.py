"""`SmallPictures`: shrink pictures in the worker, before they are stored.

    ParallelEnv(4, SmallPictures(MeltingPotFactory("clean_up", keys=("RGB",), world_rgb=False), shrink=8))

A picture is a uint8 observation `[..., H, W, 3]`. Smaller pictures cost the caller less memory and time, and the policy
reads fewer numbers. The native env is not changed: it renders as before.
"""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import numpy as np

from envherd.shm.specs import LeafSpec
from envherd.workers.adapters.base import Adapter, Mask, Options, StepValues
from envherd.workers.adapters.registry import find_adapter
from envherd.workers.errors import FactoryError, SpecError
from envherd.workers.wrappers.leaves import Wrapping


@dataclass(frozen=True)
class SmallPictures:
    """Build an env with another factory and make its pictures smaller; use it as `make_env`.

    Attributes:
        make_env: builds the env, of any family.
        shrink: whole factor by which height and width are divided; a pixel is the mean of those that it replaces. The
            world view keeps its size.

    Raises:
        FactoryError: from the constructor: a number below 1.
        SpecError: from the worker: no such picture, or sides that `shrink` does not divide.
    """

    make_env: Callable[..., Any]
    _: KW_ONLY
    shrink: int

    def __post_init__(self) -> None:
        if (
            isinstance(self.shrink, bool)
            or not isinstance(self.shrink, int)
            or self.shrink < 1
        ):
            raise FactoryError(
                f"SmallPictures failed: expected shrink to be a positive integer, got {self.shrink!r}."
            )

    @property
    def preload(self) -> tuple[str, ...]:
        """Modules worth importing before workers are forked: those of the other factory."""
        return tuple(getattr(self.make_env, "preload", ()))

    def __call__(self, **kwargs: Any) -> Adapter:
        """Return the adapter of the env, with smaller pictures."""
        made = self.make_env(**kwargs)
        # The constructor of each family takes the env.
        return PictureLeaves(
            made if isinstance(made, Adapter) else find_adapter(made)(made),  # type: ignore[call-arg]
            self.shrink,
        )


class PictureLeaves(Wrapping):
    """Another adapter, whose pictures are made smaller.

    Args:
        inner: the adapter.
        shrink: see `SmallPictures`.

    Raises:
        SpecError: see `SmallPictures`.
    """

    def __init__(self, inner: Adapter, shrink: int) -> None:
        super().__init__(inner, (), (), "SmallPictures")
        self._shrink = shrink
        world = inner.spec.metadata.get("frame_key")
        world = world if isinstance(world, str) else "/".join(world or ())
        leaves = list(inner.spec.observation)
        self._at = [
            i
            for i, leaf in enumerate(leaves)
            if leaf.dtype == "uint8"
            and len(leaf.shape) >= 3
            and leaf.shape[-1] == 3
            and "/".join(leaf.key) != world
        ]
        if not self._at:
            raise SpecError(
                f"SmallPictures failed: expected uint8 observations [..., H, W, 3], got none among "
                f"{[str(leaf) for leaf in leaves]}."
            )
        for i in self._at:
            leaves[i] = _small_leaf(leaves[i], shrink)
        self.spec = replace(inner.spec, observation=tuple(leaves))

    def reset(
        self,
        seed: int | None,
        options: Options = None,
        mask: Mask = None,
    ) -> list[Any]:
        return self._small(self.inner.reset(seed, options, mask))

    def step(self, action: list[Any]) -> StepValues:
        observation, reward, terminated, truncated = self.inner.step(action)
        return self._small(observation), reward, terminated, truncated

    def _small(self, observation: Any) -> list[Any]:
        values = list(observation)
        for i in self._at:
            values[i] = shrunk(np.asarray(values[i]), self._shrink)
        return values


def _small_leaf(leaf: LeafSpec, factor: int) -> LeafSpec:
    *lead, height, width, channels = leaf.shape
    if height % factor or width % factor:
        raise SpecError(
            f"SmallPictures failed: expected sides that shrink={factor} divides, got {leaf}."
        )
    return LeafSpec(
        leaf.key,
        (*lead, height // factor, width // factor, channels),
        "uint8",
    )


def shrunk(picture: np.ndarray, factor: int) -> np.ndarray:
    """Return uint8 `[..., H, W, C]` with sides divided by a whole factor: means, rounded; itself for 1."""
    if factor == 1:
        return picture
    *lead, height, width, channels = picture.shape
    # Rows first, and slices added one by one: 15 times as fast as one sum over both axes.
    kind = np.uint16 if factor <= 16 else np.uint32
    down = _added(picture.reshape(-1, factor, width * channels), kind)
    sums = _added(down.reshape(-1, factor, channels), kind)
    means = ((sums + factor * factor // 2) // (factor * factor)).astype(np.uint8)
    return means.reshape(*lead, height // factor, width // factor, channels)


def _added(array: np.ndarray, dtype: Any) -> np.ndarray:
    """Return `[n, k, m]` summed over k."""
    total = array[:, 0].astype(dtype)
    for i in range(1, array.shape[1]):
        total += array[:, i]
    return total
