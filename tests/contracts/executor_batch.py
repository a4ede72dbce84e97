"""The contract's `Batch` over an executor, to check it by the same rules as a bare block."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase

from envherd import EnvError
from envherd.executor import ExecutorOptions, ParallelEnv, SerialEnv
from envherd.executor.testing import BlockBatch, Row
from envherd.shm.specs import EnvSpec, LeafSpec


class ExecutorBatch:
    """See `envherd.executor.testing.Batch`."""

    enforces_rule_4 = True

    def __init__(self, executor: Any, make_env: Any, num_envs: int, num_workers: int, root_seed: int) -> None:
        self.env = executor(num_envs, make_env, num_workers=num_workers, seed=root_seed)
        self.specs = self.env.specs

    def seed(self, root_seed: int) -> None:
        self.env.set_seed(root_seed)

    def reset(self, mask: np.ndarray | None) -> list[Row]:
        if mask is None:
            return self._rows(self.env.reset(), "root")
        td = TensorDict({"_reset": torch.from_numpy(mask)}, self.env.batch_size)
        return self._rows(self.env.reset(td), "root")

    def step(self, actions: list[list[Any]], *, resets_ended: bool) -> tuple[list[Row], list[Row]]:
        td = TensorDict({}, self.env.batch_size)
        spec = self.specs[0]
        for index, leaf in enumerate((*spec.action, *spec.state)):
            td.set(leaf.key, _stack(leaf, [action[index] for action in actions]))
        if resets_ended:
            td, root = self.env.step_and_maybe_reset(td)
        else:
            td, root = self.env.step(td), self.env.current()
        return self._rows(td["next"], "next"), self._rows(root, "root")

    def save(self) -> list[Any] | None:
        try:
            return self.env.save()
        except EnvError as error:
            if error.context["type_name"] != "NotImplementedError":
                raise
            return None

    def restore(self, states: list[Any]) -> None:
        self.env.restore(states)

    def count_calls(self) -> tuple[int, int]:
        words = self.env._pool.slab.words  # statistics() would read the memory of every worker too
        return int(words["env_steps"].sum()), int(words["resets"].sum())

    def close(self) -> None:
        self.env.close()

    def _rows(self, td: TensorDictBase, section: str) -> list[Row]:
        return [_row(td[i], spec, section) for i, spec in enumerate(self.specs)]


def _row(td: TensorDictBase, spec: EnvSpec, section: str) -> Row:
    leaves = (*spec.observation, *spec.done, *(spec.reward if section == "next" else ()))
    return {leaf.key: td.get(leaf.key).data if leaf.is_side else td.get(leaf.key).numpy().copy() for leaf in leaves}


def _stack(leaf: LeafSpec, values: list[Any]) -> Any:
    if leaf.is_side:
        return NonTensorStack(*(NonTensorData(value) for value in values))
    return torch.from_numpy(np.stack([np.asarray(value, leaf.dtype) for value in values]))


PORTABLE = ExecutorOptions(start_method="portable")
#: The batches through which this folder runs the contract.
BATCHES: dict[str, Any] = {
    "block": BlockBatch,
    "serial": partial(ExecutorBatch, SerialEnv),
    "parallel": partial(ExecutorBatch, ParallelEnv),
    "portable": partial(ExecutorBatch, partial(ParallelEnv, options=PORTABLE)),
}


def batch_apart(make_env: Any, num_envs: int, num_workers: int, root_seed: int) -> ExecutorBatch:
    """Run envs that must be alone in their process: one worker per env, ignoring `num_workers`."""
    return ExecutorBatch(ParallelEnv, make_env, num_envs, num_envs, root_seed)
