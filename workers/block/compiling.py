"""Decide which steps are plain enough for C, and collect the arguments for C.

Guarantees: a step in C has the effects of `slot.compile_step`, which is the specification. If a result is not plain, C
passes it to the same Python code before it writes anything; no env is stepped twice.

An env is plain if it is single, and its observations and rewards are arrays or int64 numbers of fixed shape. A `Step`
holds the buffers of its arrays, so their memory lives as long as it does.
"""

import reprlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from envherd.shm.specs import Discrete
from envherd.workers import native
from envherd.workers.adapters.base import EnvCall, StepValues
from envherd.workers.adapters.common.scalars import NUMBERS
from envherd.workers.block.slot import Sink, Slot, compile_keep
from envherd.workers.block.slot_states import NEXT, SlotEvent


def compile_native(
    slot: Slot,
    sink: Sink,
    words: Mapping[str, memoryview],
    step: Callable[[list[Any]], StepValues],
    *,
    notes_infos: bool = False,
) -> Any:
    """Return an env's step to a sink in C, a `Step`; None without the extension, or if the env is not plain.

    Args:
        slot: of the env; its inputs are bound.
        sink: where it writes.
        words: of the slab.
        step: steps the env, given the values of its action.
        notes_infos: whether the block reports infos that are not empty.
    """
    if why_not_stored(slot):
        return None
    # Around another step than the adapter's own, there is something to do that C would leave out.
    if step == slot.adapter.step:
        step = slot.adapter.env_call() or step
    return native.load().Step(
        step_facts(slot, sink, words, step) | {"notes_infos": notes_infos}
    )


def step_facts(
    slot: Slot,
    sink: Sink,
    words: Mapping[str, memoryview],
    step: Callable[[list[Any]], StepValues] | EnvCall,
) -> dict[str, Any]:
    """Return the arguments of `_native.Step` for a plain env's step to a sink.

    Args:
        slot: of the env.
        sink: where it writes.
        words: of the slab.
        step: steps the env, given the values of its action; or how to call the env itself.
    """
    spec = slot.spec
    keep = compile_keep(slot, sink, words)
    # A step in Python, which C calls instead of the env, returns the values themselves.
    call = EnvCall(lambda values: values, reads_number=False)
    in_python: Any = step
    if isinstance(step, EnvCall):
        call = step
        in_python = None
    read = call.read
    facts = {
        "slot": slot,
        "env_id": slot.env_id,
        "words": words,
        "adapter": slot.adapter,
        "step": in_python,
        "hand_over": lambda column, result: keep(column, read(result)),
        "reads_number": call.reads_number,
        "notes_infos": False,
        "schemas": slot.info_writer and slot.info_writer.schemas,
        "info_rows": slot.info_writer
        and slot.info_writer.rows.reshape(-1).view(np.int64),
        "give": call.give,
        "build": call.build,
        "flatten": call.flatten,
        "holder": call.holder,
        "flags": tuple(call.flags) or None,
        "flag_values": (np.array([False]), np.array([True])),
        "ready": tuple(call.ready) or None,
        "readers": tuple(slot.action_readers),
        "index": _index(slot),
        "seed_pool": slot.seed_pool,
        "journal": None,
        "journal_rows": 0,
        "kept": [],
        "sources": [],
        "state": slot.state,
        "if_stepped": NEXT[SlotEvent.STEP],
        "if_running": NEXT[SlotEvent.RUNS],
        "if_ended": NEXT[SlotEvent.ENDS],
        "num_columns": sink.num_columns,
        "root_follows": sink.root_follows,
        "observation": sink.arrays_of("next", spec.observation),
        "root": sink.arrays_of("root", spec.observation),
        "reward": sink.arrays_of("next", spec.reward),
        "done": sink.arrays_of("next", spec.done),
        "root_done": sink.arrays_of("root", spec.done),
        "array_type": np.ndarray,
        "bool_type": np.bool_,
        "integer_type": np.int64,
        "number_types": tuple(NUMBERS),
    }
    if slot.journal is not None:
        facts |= {
            "journal": slot.journal.facts,
            "journal_rows": slot.journal.num_rows,
            "kept": slot.journal.rows,
            "sources": slot.journal.sources,
        }
    return facts


def why_not_stored(slot: Slot) -> list[str]:
    """Return why C cannot step an env and store the result, in words for users; empty if it can."""
    spec = slot.spec
    side = [leaf.key for leaf in spec.leaves() if leaf.is_side]
    odd = [
        leaf.key
        for leaf in (*spec.observation, *spec.reward)
        if not leaf.is_side
        and (0 in leaf.shape or (leaf.shape == () and leaf.dtype != "int64"))
    ]
    reasons = {
        "check_finite=True": slot.check_finite,
        f"values without a fixed shape: {reprlib.repr(side)}": bool(side),
        "the envs take tensors": slot.adapter.takes_tensors,
        "each env is a batch of rows": bool(spec.batch_shape),
        "agents have done flags": len(spec.done) != 3,
        "the envs take no action": not (spec.action or spec.state),
        f"neither an int64 nor an array with values: {reprlib.repr(odd)}": bool(odd),
    }
    return [
        *native.why_not(),
        *(why for why, applies in reasons.items() if applies),
    ]


def _index(slot: Slot) -> np.ndarray | None:
    """Return the action as int64 `[1]` (VIEW) if it is a single index, else None."""
    leaves = (*slot.spec.action, *slot.spec.state)
    leaf = leaves[0]
    if (
        len(leaves) != 1
        or leaf.shape != ()
        or leaf.dtype != "int64"
        or not isinstance(leaf.domain, Discrete)
    ):
        return None
    row = slot.place.row
    return slot.inputs[("input", *leaf.key)][row : row + 1]
