"""Sessions of an `AsyncCollector` for the fuzzers: envs raise, die, hang and are slow, and Ctrl-C breaks off calls.

Every transition of every batch is compared with its env's diary (see `tests.oracles.fuzzing`): none is wrong, torn, out
of order or duplicated, and none is missing without an error.
"""

from typing import Any, ClassVar

import numpy as np
import torch
from tensordict import TensorDictBase

from envherd import AsyncCollector
from envherd.executor.guests.collectors.async_collector import LOST
from tests.oracles.fuzz_envs import NUM_ACTIONS, Kind
from tests.oracles.fuzz_session import Session
from tests.oracles.fuzzing import Transition


class CollectorSession(Session):
    """One executor with its collector.

    Attributes:
        num_failures: calls that have returned no batch.
        num_gaps: steps that are in no batch.
    """

    WEIGHTS: ClassVar[dict[str, int]] = {
        "collect": 60,
        "trap": 25,
        "kill": 5,
        "look": 10,
    }

    def _open(self, folder: str) -> Any:
        env, rng, asked = super()._open(folder), self.rng, self.setting.asked
        self.num_failures = self.num_gaps = 0
        self._steps = np.full(self.num_envs, -1)
        self._is_cut = np.zeros(self.num_envs, bool)
        self._draws = np.random.default_rng(rng.randrange(2**31))
        layout = asked.get("layout", rng.choice(["rows", "flat"]))
        settings: dict[str, Any] = {
            "frames_per_batch": rng.randint(1, 6)
            * (self.num_envs if layout == "rows" else 1),
            "layout": layout,
            "in_background": asked.get("in_background", rng.choice([0, 0, 1])),
            "max_batch": rng.choice([None, rng.randint(1, self.num_envs)]),
            "deadline_s": rng.choice([None, 0.002]),
            "batch_sizes": asked.get("batch_sizes"),
        }
        self.watch.note(f"collect with {settings}")
        self._frames = settings["frames_per_batch"]
        self._collector = AsyncCollector(env, self._act, close_env=False, **settings)
        return env

    def _act(self, root: TensorDictBase) -> TensorDictBase:
        return root.set(
            "action", torch.from_numpy(self._draws.integers(0, NUM_ACTIONS, len(root)))
        )

    def _finish(self) -> None:
        self.watch.begin("close the collector")
        self._collector.close()
        self.is_calm = False  # the latest steps are in no batch
        super()._finish()
        assert self.num_gaps <= self._num_causes * self.num_envs, (
            f"{self.num_gaps} steps are missing after {self._num_causes} errors"
        )

    def close(self) -> None:
        """Close the collector and the executor."""
        self._collector.close()
        super().close()

    @property
    def slack(self) -> int:
        """See `Session.slack`; all envs may be under way."""
        return super().slack + self.num_envs

    @property
    def _num_causes(self) -> int:
        """Events that may have lost a step of each env."""
        return self.num_failures + self.num_kills + self.num_sprung

    def recover(self) -> None:
        """Do nothing: the next call recovers, and its batch may have steps from before."""

    def _note_broken(self, env_ids: list[int], concerned: Any) -> None:
        """Do nothing: batches have steps from before."""

    def _look(self) -> None:
        self.watch.begin("statistics")
        assert self._collector.statistics().lag_max >= 0

    def _collect(self) -> None:
        data = self.attempt("collect", self._collector.collect)
        if data is None:
            self.num_failures += 1
            return
        assert data.numel() == self._frames, (
            f"expected {self._frames} transitions, got {data.numel()}"
        )
        flat = data.reshape(-1)
        env_ids, steps, versions = (
            flat[name].reshape(-1).tolist()
            for name in ("env_ids", "step", "policy_version")
        )
        for env_id, step, version, (_, _, one) in zip(
            env_ids, steps, versions, self.transitions(flat, 0), strict=True
        ):
            self._follow(env_id, step, one)
            # The collector itself has marked it, for a step that Ctrl-C has lost. The executor's statistics lack it.
            self.oracle.num_interrupted -= one.interrupted and version == LOST

    def _follow(self, env_id: int, step: int, one: Transition) -> None:
        place, root = (env_id, 0), one.root
        assert root is not None
        gap = step - int(self._steps[env_id]) - 1
        assert gap >= 0, f"env {env_id}: step {step} after step {self._steps[env_id]}"
        assert not self._is_cut[env_id] or gap, (
            f"env {env_id}: its episode is cut before step {step}, and no step is missing"
        )
        self._steps[env_id] = step
        self.num_gaps += gap
        before = self.oracle.at[place]
        # After a lost step, its episode has ended or continues.
        if gap or (before is not None and root != before and self._num_causes):
            self.oracle.ended[place] |= root.t == 0
            if root.t != 0:
                self.oracle.forget([place])
        if root.t == 0 and root.key[:2] not in self.oracle.begun:
            self.oracle.begin(place, root)
        # The step before one that was lost is `truncated`: what follows it belongs to another episode.
        made = self.oracle.made.get(one.next.key)
        self._is_cut[env_id] = (
            one.truncated
            and not one.interrupted
            and made is not None
            and made[0] == Kind.STEP
        )
        self.oracle.follow(place, self.as_made(one) if self._is_cut[env_id] else one)
        self.oracle.ended[place] |= bool(self._is_cut[env_id])
