"""The envs' data outside the slab: values of side-channel leaves, and infos."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from envherd.executor.protocol.info_reader import InfoReader
from envherd.shm.specs import EnvSpec


class SideData:
    """Side values and infos of each env's latest rows.

    Attributes:
        has_values: whether any env has side-channel leaves among its observation.
        next, root: env id -> one value per leaf of the observation (None for leaves in the slab), of the latest step
            and of the latest reset.
        infos: "next" and "root": the envs' infos of the step and of the reset of their latest command.
    """

    def __init__(self, specs: Sequence[EnvSpec], infos: InfoReader) -> None:
        self.has_values = any(
            leaf.is_side for spec in specs for leaf in spec.observation
        )
        # An env that was never reset has None for each leaf, just as its numbers are 0.
        blank: dict[int, list[Any]] = {
            i: [None] * len(spec.observation) for i, spec in enumerate(specs)
        }
        self.next = dict(blank)
        self.root = dict(blank)
        self.infos = infos

    def note_values(self, frames: Mapping[int, Mapping[str, Any]]) -> None:
        """Keep the side-channel values that came with the latest rows."""
        for env_id, frame in frames.items():
            # Otherwise a new instance that has made no step.
            if any(value is not None for value in frame["next"]):
                self.next[env_id] = frame["next"]
            self.root[env_id] = frame["root"]

    def latest(self, in_root: np.ndarray) -> dict[int, list[Any]]:
        """Return the values of each env's present root; a fresh dict.

        Args:
            in_root: bool `[N]`, of `Positions`.
        """
        return {
            i: self.root[i] if is_root else self.next[i]
            for i, is_root in enumerate(in_root.tolist())
        }
