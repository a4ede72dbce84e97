"""Rollouts of one simulator: its tensors are copied once into `[1, T, ...]`, on their device.

Guarantees and result are those of `rollout`.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from envherd.executor.batches.memory import Leaves
from envherd.executor.batches.transfer import as_array
from envherd.executor.guests.simulator.engine import SimulatorEngine
from envherd.executor.guests.simulator.rows import Row
from envherd.executor.progress import counted
from envherd.executor.rollouts.policy_state import run_policy
from envherd.executor.rollouts.run import Run
from envherd.shm.slab import Storage, plan_storage
from envherd.workers.errors import EnvError
from envherd.workers.protocol import Op


class SimulatorRun(Run[SimulatorEngine]):
    """One rollout of a simulator in progress."""

    def collect(self, max_steps: int, *, auto_reset: bool) -> TensorDictBase:
        """Return `[1, t]`."""
        self._rows = self._engine.batches
        self._fresh = self._engine.reset_for_rollout(auto_reset=auto_reset)
        plan = plan_storage(self._engine.pool.plan, max_steps)
        place = self._rows.place
        tensors = {
            name: torch.from_numpy(array)
            if place.type == "cpu"
            else torch.from_numpy(array).to(place)
            for name, array in Storage(plan, np.empty(plan.nbytes, np.uint8))
            .columns[0]
            .items()
        }
        sections = {
            "root": self._rows.root_keys,
            "next": self._rows.next_keys,
            "input": [leaf.key for leaf in self._engine.intake.leaves],
        }
        self._leaves = {
            section: [tensors[section, *key] for key in keys]
            for section, keys in sections.items()
        }
        #: Section -> for each step its leaves, `[1, ...]` (VIEWS).
        self._at = {
            section: list(zip(*(leaf.unbind(1) for leaf in leaves), strict=True))
            for section, leaves in self._leaves.items()
        }
        num_steps = self._go(max_steps)
        if num_steps < max_steps:
            self._leaves = {
                name: [leaf[:, :num_steps].clone() for leaf in own]
                for name, own in self._leaves.items()
            }
        data: TensorDict = self._rows.shell("root", (1, num_steps)).build(
            self._leaves["root"]
        )
        data.set(
            "next",
            self._rows.shell("next", (1, num_steps)).build(self._leaves["next"]),
        )
        for leaf, value in zip(
            self._engine.intake.leaves,
            self._leaves["input"],
            strict=True,
        ):
            data.set(leaf.key, value)
        return self._finished(data)

    def _go(self, max_steps: int) -> int:
        """Step until the end; return how many steps were made."""
        for step in counted(max_steps, "rollout"):
            present = self._rows.present
            _put(self._at["root"][step], [*present.observation, *present.flags])
            acted = self._act(step)
            # Rows that end in the last step are reset by the next rollout, if there is one.
            op = Op.STEP if self._breaks or step == max_steps - 1 else Op.STEP_RESET
            outcome = self._engine.carry_out(
                op,
                self._inputs,
                partial(self._take, step),
            )
            try:
                self._engine.note_outcome(
                    outcome,
                    self._at["next"][step],
                    is_shared=False,
                )
            except EnvError:
                self._carried.renew(np.zeros(1, bool))
                raise
            if self._callback is not None:
                with self._engine.rolling():
                    next_td = self._rows.next_td(self._at["next"][step])
                    self._callback(self._with_next(acted, next_td))
            if self._breaks and outcome.has_ended:
                return step + 1
        return max_steps

    def _act(self, step: int) -> TensorDictBase:
        root = self._rows.shells["root"].build(self._at["root"][step])
        self._carried.hand_over(root, self._fresh)
        with self._engine.rolling():
            acted = run_policy(self._policy, root)
        self._inputs = self._engine.intake.tensors(acted)
        self._carried.keep(acted)
        _put(self._at["input"][step], self._inputs)
        self._keep_extras(acted, self._engine.known)
        return acted

    def _take(self, step: int, row: Row, rewards: Leaves, _: bool) -> None:  # noqa: FBT001  # as `Take` has it
        _put(self._at["next"][step], [*row.observation, *rewards, *row.flags])
        # These rows are reset, unless it is the last step.
        self._fresh = row.flags[0][None, ..., 0]


def _put(places: Sequence[torch.Tensor], values: Sequence[Any]) -> None:
    """Copy rows to their places in a rollout, `[1, ...]` each."""
    for place, value in zip(places, values, strict=True):
        if place.is_cpu:  # numpy takes half the time of torch
            np.copyto(
                as_array(place),
                value if isinstance(value, np.ndarray) else as_array(value.cpu()),
            )
        else:
            place.copy_(torch.as_tensor(value))
