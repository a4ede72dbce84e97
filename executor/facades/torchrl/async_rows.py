"""Transfer the rows of an `AsyncEnvPool` through the slab, or as pickles if an env's leaves do not fit there.

Guarantees: sent rows are kept as copies, so the caller may change them at once.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from torchrl.envs.common import EnvMetaData

from envherd.executor.batches.transfer import put_rows, take_rows
from envherd.executor.facades.torchrl.data import Shells
from envherd.shm.specs import EnvSpec
from envherd.workers.adapters.hosts.torchrl_crossing import dumps, loads
from envherd.workers.adapters.hosts.torchrl_guest import dense_leaves
from envherd.workers.errors import ActionError

#: TorchRL's key for the index of an env in a tensordict.
ENV_INDEX = "env_index"


class SlabRows:
    """Rows of envs whose leaves have fixed shapes.

    Attributes:
        known: keys of the envs' leaves, without `next`.
        reward_keys: keys of the rewards.
    """

    def __init__(self, meta: EnvMetaData) -> None:
        specs = meta.specs
        sides = {"action": "input", "state": "input", "observation": "output", "reward": "output", "done": "output"}
        full = {f"full_{name}_spec": specs[f"{side}_spec"][f"full_{name}_spec"] for name, side in sides.items()}
        row = SimpleNamespace(**full, device=meta.device, fake_tensordict=lambda: meta.tensordict)
        leaves = dense_leaves(row)
        assert leaves is not None
        self._inputs = [(key, leaf.key, getattr(torch, leaf.dtype)) for key, leaf in leaves["input"]]
        self._shells = functools.cache(lambda count: Shells(row, (count,)))
        self.known = {key for name in ("input", "observation", "done") for key, _ in leaves[name]}
        self.has_state = bool(list(full["full_state_spec"].keys(include_nested=True, leaves_only=True)))
        self.reward_keys = _reward_keys(meta)

    def inputs_of(self, rows: TensorDictBase) -> TensorDict:
        """Return the batch to send for some rows `[k]`.

        Raises:
            ActionError: the rows lack an input.
        """
        td = TensorDict({}, [len(rows)])
        for key, name, dtype in self._inputs:
            value = rows.get(key, None)
            if value is None:
                raise ActionError(
                    f"step failed: expected a key {key!r}, got none among {sorted(map(str, rows.keys()))}."
                )
            td.set(name, value.to("cpu", dtype))
        return td

    def next_of(self, received: TensorDictBase) -> TensorDictBase:
        """Return the `next` of a batch that was received."""
        return self._shells(len(received)).next_of(received.get("next"))

    def root_of(self, current: TensorDictBase) -> TensorDictBase:
        """Return the root of a batch that says where envs are."""
        return self._shells(len(current)).root_of(current)


class PickledRows:
    """Rows of envs that are `CrossingGuest`s; batches of them are lazy stacks where they must be."""

    known: frozenset[Any] = frozenset()
    has_state = True

    def __init__(self, meta: EnvMetaData) -> None:
        self.reward_keys = _reward_keys(meta)

    def inputs_of(self, rows: TensorDictBase) -> TensorDict:
        """Return the batch to send for some rows `[k]`."""
        requests = NonTensorStack(*(NonTensorData(dumps(row)) for row in rows.unbind(0)))
        return TensorDict({"request": requests}, [len(rows)])

    def next_of(self, received: TensorDictBase) -> TensorDictBase:
        """Return the `next` of a batch that was received."""
        return self.root_of(received.get("next"))

    def root_of(self, current: TensorDictBase) -> TensorDictBase:
        """Return the root of a batch that says where envs are."""
        return stacked([loads(answer) for answer in current.get("answer").tolist()])


def rows_of(meta: EnvMetaData, spec: EnvSpec) -> SlabRows | PickledRows:
    """Return how the rows of an env cross."""
    return SlabRows(meta) if spec.metadata["is_dense"] else PickledRows(meta)


def _reward_keys(meta: EnvMetaData) -> list[Any]:
    return list(meta.specs["output_spec", "full_reward_spec"].keys(include_nested=True, leaves_only=True))


class SentRows:
    """The rows that envs were last sent: stored by structure, so that many are written and read by one call a leaf."""

    def __init__(self, num_envs: int) -> None:
        self._num_envs = num_envs
        self._stores: dict[Any, TensorDict] = {}
        self._places: list[tuple[TensorDictBase, int]] = [(TensorDict(), 0)] * num_envs  # a batch, and the row in it

    def put(self, ids: list[int], rows: TensorDictBase) -> None:
        """Keep a copy of the rows `[k]` of some envs."""
        store = self._store_for(rows)
        if store is None:
            kept = rows.clone()
            places = [(kept, row) for row in range(len(ids))]
        else:
            put_rows(store, ids, rows)
            places = [(store, env_id) for env_id in ids]
        for env_id, place in zip(ids, places, strict=True):
            self._places[env_id] = place

    def take(self, ids: list[int]) -> TensorDictBase:
        """Return the rows of some envs as a batch in memory of the caller's own."""
        places = [self._places[i] for i in ids]
        kept = places[0][0]
        if isinstance(kept, TensorDict) and all(place[0] is kept for place in places):
            rows = [row for _, row in places]
            is_store = any(store is kept for store in self._stores.values())
            return take_rows(kept, rows) if is_store else kept[torch.tensor(rows)]  # with non-tensor data
        return stacked([kept[row].clone() for kept, row in places])

    def _store_for(self, rows: TensorDictBase) -> TensorDict | None:
        """Return the store for rows of this structure; None unless all leaves are tensors of fixed shapes."""
        if type(rows) is not TensorDict:
            return None
        leaves = list(rows.items(include_nested=True, leaves_only=True, is_leaf=_is_leaf))
        if not all(isinstance(value, torch.Tensor) for _, value in leaves):
            return None
        structure = tuple((key, value.dtype, value.shape[1:], value.device) for key, value in leaves)
        if structure not in self._stores:
            self._stores[structure] = rows[:1].expand(self._num_envs, *rows.batch_size[1:]).clone()
        return self._stores[structure]


def _is_leaf(cls: type) -> bool:
    return not issubclass(cls, TensorDict)


def without_index(td: TensorDictBase) -> TensorDictBase:
    """Return a row or batch without `next` and the index, to be sent to envs; dense if possible."""
    td = td.exclude("next", ENV_INDEX, "_step")
    return stacked(td.unbind(0)) if isinstance(td, LazyStackedTensorDict) else td


def stacked(rows: Iterable[TensorDictBase]) -> TensorDictBase:
    """Return rows as one batch: dense where they are alike, else a lazy stack."""
    batch: TensorDictBase = LazyStackedTensorDict.maybe_dense_stack(list(rows))
    return batch


def indices_in(td: TensorDictBase) -> list[int]:
    """Return the env of each row of a batch, as its `env_index` says: integers, nested for envs that are batches."""
    value = td.get(ENV_INDEX)
    listed = np.array(value.tolist() if hasattr(value, "tolist") else value, ndmin=1)
    return list(map(int, listed.reshape(len(listed), -1)[:, 0]))


def set_indices(td: TensorDictBase, ids: Sequence[int]) -> TensorDictBase:
    """Write the env of each row of a batch, as non-tensor data."""
    rows: Any = NonTensorStack(*ids)
    while rows.batch_dims < td.batch_dims:
        rows = rows.unsqueeze(-1).expand(td.batch_size[: rows.batch_dims + 1])
    return td.set(ENV_INDEX, rows)
