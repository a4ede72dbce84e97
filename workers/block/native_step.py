"""The step of a plain env in C, where the extension is there: see `shm/_native.c`.

Guarantees: it has the effects of `slot.compile_step`, which is the specification. What an env returns that is not
plain is handed to the same Python code as it is, before anything was written; no env is stepped twice.

An env is plain if it has one observation array, one float32 reward, one action, and no done leaves of agents or rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from envherd.shm import native
from envherd.shm.layout import Name
from envherd.shm.specs import Discrete, EnvSpec
from envherd.workers.adapters.base import StepValues
from envherd.workers.block.slot import Sink, Slot, Step, compile_keep

_TYPES = (np.ndarray, np.float64, np.bool_)


def compile_native(
    slot: Slot, sink: Sink, words: Mapping[str, memoryview], step: Callable[[list[Any]], StepValues]
) -> Step | None:
    """Return what `compile_step` returns, in C; None without the extension, or if the env is not plain.

    Args:
        slot: of the env; its inputs are bound.
        sink: where it writes.
        words: of the slab.
        step: steps the env, given the values of its action.
    """
    module, adapter, spec = native.load(), slot.adapter, slot.spec
    if module is None or not _is_plain(slot):
        return None
    keep = compile_keep(slot, sink, words)
    direct = adapter.direct() if step == adapter.step else None
    if direct is None:
        give, ready, hand_over = None, (), keep
    else:
        give, ready, accept = direct

        def hand_over(column: int, result: Any) -> list[Any]:
            return keep(column, accept(result))

    leaf = spec.action[0]
    is_index = isinstance(leaf.domain, Discrete) and leaf.shape == () and leaf.dtype == "int64"
    observation = spec.observation[0].key
    flags = [leaf.key for leaf in spec.done]
    compiled: Step = module.Step(
        slot=slot,
        step=step if direct is None else None,
        adapter=None if direct is None else adapter,
        give=give,
        ready=ready,
        read=None if is_index else slot.action_readers[0],
        hand_over=hand_over,
        types=_TYPES,
        next=_arrays(sink, "next", observation, [spec.reward[0].key, *flags]),
        root=_arrays(sink, "root", observation, flags) if sink.root_follows else None,
        env_steps=words["env_steps"],
        ends=words["ends"],
        actions=slot.inputs["input", *leaf.key] if is_index else None,
        env_id=slot.env_id,
        row=slot.place[1],
    ).run
    return compiled


def _is_plain(slot: Slot) -> bool:
    spec, adapter = slot.spec, slot.adapter
    if slot.check_finite or adapter.takes_tensors or adapter.gives_tensors:
        return False
    return not slot.has_side and _has_plain_spec(spec)


def _has_plain_spec(spec: EnvSpec) -> bool:
    counts = (len(spec.observation), len(spec.reward), len(spec.action), len(spec.state), len(spec.done))
    if spec.batch_shape or counts != (1, 1, 1, 0, 3) or spec.action[0].is_side:
        return False
    observation, reward = spec.observation[0], spec.reward[0]
    return 0 not in observation.shape != () and (reward.shape, reward.dtype) == ((1,), "float32")


def _arrays(sink: Sink, section: str, observation: Name, scalars: list[Name]) -> tuple[np.ndarray, ...]:
    """Return a section's observation as it is, and leaves of shape (1,) as one value per column."""
    return sink.arrays[section, *observation], *(sink.arrays[section, *key][:, 0] for key in scalars)
