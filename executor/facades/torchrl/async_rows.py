"""How the rows of an `AsyncEnvPool` cross: through the slab, or as pickles where an env's leaves do not fit there.

Guarantees: what is kept of a row that was sent is a copy, so its caller may change it at once.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from torchrl.envs.common import EnvMetaData

from envherd.executor.facades.torchrl.data import Shells
from envherd.workers.adapters.hosts.torchrl_crossing import dumps, loads
from envherd.workers.adapters.hosts.torchrl_guest import dense_leaves
from envherd.workers.errors import ActionError

#: What TorchRL's pools call the index of an env in a tensordict.
ENV_INDEX = "env_index"


class SlabRows:
    """Rows of envs whose leaves have fixed shapes.

    Attributes:
        known: keys of the envs' leaves, without `next`.
        keys: keys of all leaves of a step, `next` included.
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
        self.keys = tuple(meta.tensordict.keys(include_nested=True, leaves_only=True))

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
    keys = ()
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


Rows = SlabRows | PickledRows


def _reward_keys(meta: EnvMetaData) -> list[Any]:
    return list(meta.specs["output_spec", "full_reward_spec"].keys(include_nested=True, leaves_only=True))


def rows_of(found: Sequence[EnvMetaData], specs: Sequence[Any]) -> list[Rows]:
    """Return how the rows of each env cross; envs of one spec share it.

    Args:
        found: metadata of each env.
        specs: `EnvSpec` of each env.
    """
    kinds: list[tuple[Any, Any, Rows]] = []
    rows: list[Rows] = []
    for meta, spec in zip(found, specs, strict=True):
        for kind in kinds:
            if kind[0] == spec and kind[1] == meta.specs:
                break
        else:
            kind = spec, meta.specs, SlabRows(meta) if spec.metadata["is_dense"] else PickledRows(meta)
            kinds.append(kind)
        rows.append(kind[2])
    return rows


class SentRows:
    """The rows that envs were last sent: stored by structure, so that many are written and read by one call a leaf."""

    def __init__(self, num_envs: int) -> None:
        self._stores: dict[Any, TensorDict] = {}
        self._of: list[TensorDictBase | None] = [None] * num_envs
        self._num_envs = num_envs

    def put(self, ids: list[int], rows: TensorDictBase) -> None:
        """Keep a copy of the rows `[k]` of some envs."""
        store = self._store_for(rows)
        if store is not None:
            store[torch.tensor(ids)] = rows
        for row, env_id in enumerate(ids):
            self._of[env_id] = rows[row].clone() if store is None else store

    def take(self, ids: list[int]) -> TensorDictBase:
        """Return the rows of some envs as a batch of the caller's own."""
        store = self._of[ids[0]]
        if all(self._of[i] is store for i in ids) and any(store is one for one in self._stores.values()):
            assert store is not None
            return store[torch.tensor(ids)]
        return stacked([self._row(i) for i in ids])

    def _row(self, env_id: int) -> TensorDictBase:
        kept = self._of[env_id]
        assert kept is not None
        return kept[env_id].clone() if any(kept is one for one in self._stores.values()) else kept

    def _store_for(self, rows: TensorDictBase) -> TensorDict | None:
        """Return the store for rows of this structure; None for what is not tensors of fixed shapes alone."""
        if type(rows) is not TensorDict:
            return None
        items = list(rows.items(include_nested=True))
        if any(type(value) is not TensorDict and not isinstance(value, torch.Tensor) for _, value in items):
            return None
        leaves = [(key, value) for key, value in items if isinstance(value, torch.Tensor)]
        structure = tuple((key, value.dtype, value.shape[1:], value.device) for key, value in leaves)
        store = self._stores.get(structure)
        if store is None:
            store = self._stores[structure] = rows[:1].expand(self._num_envs, *rows.batch_size[1:]).clone()
        return store


def without_index(td: TensorDictBase) -> TensorDictBase:
    """Return what an env is sent of a row or batch: all but `next` and the index; dense where it can be."""
    td = td.exclude("next", ENV_INDEX, "_step")
    return stacked(td.unbind(0)) if isinstance(td, LazyStackedTensorDict) else td


def stacked(rows: Iterable[TensorDictBase]) -> TensorDictBase:
    """Return rows as one batch: dense where they are alike, else a lazy stack."""
    batch: TensorDictBase = LazyStackedTensorDict.maybe_dense_stack(list(rows))
    return batch


def indices_in(td: TensorDictBase) -> list[int]:
    """Return the env of each row of a batch, as its `env_index` says: integers, nested for envs that are batches."""
    value = td.get(ENV_INDEX)
    listed = value.tolist() if hasattr(value, "tolist") else value
    return [_first(item) for item in listed] if isinstance(listed, list) else [int(listed)]


def set_indices(td: TensorDictBase, ids: Sequence[int]) -> TensorDictBase:
    """Write the env of each row of a batch, as non-tensor data."""
    rows: Any = NonTensorStack(*ids)
    while rows.batch_dims < td.batch_dims:
        rows = rows.unsqueeze(-1).expand(td.batch_size[: rows.batch_dims + 1])
    return td.set(ENV_INDEX, rows)


def _first(item: Any) -> int:
    return _first(item[0]) if isinstance(item, list) else int(item)
