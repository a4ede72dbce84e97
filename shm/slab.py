"""The meaning of the shared bytes: control words, doorbells, and a ring of frames for each group of equal envs.

    words      per env and per worker, int64 each, one writer per word at any time: `WORDS`
    bells      one `go` doorbell per worker, one `done` doorbell for the parent
    group      envs of equal spec share arrays `[num_rows, ...]`:
               inputs    what a step reads: action, state, reset mask         (parent writes)
               frames    a ring of K: `next/*` of a step, `root/*` of a reset  (workers write)
    infos      of each env, a row for the info of its latest step and one for that of its latest reset, if infos leave
               the workers: see `workers.info_rows`  (workers write)

A *column* is an index in time: frame `c` of the ring, or step `t` of a rollout storage. For one env, every array that a
worker writes is indexed `[column, ...]`, so the same code writes the ring and a rollout.

Guarantees: pure arithmetic up to `Slab`; a plan is picklable and means the same in every process.
"""

import math
import mmap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from envherd.shm.specs import EnvSpec, LeafSpec
from envherd.shm.sync import DOORBELL_BYTES

# ---- layout ------------------------------------------------------------------------------------
# Pure arithmetic: which bytes belong to which array.
#
# Guarantees: fields never overlap, each starts on a 128-byte boundary (two cache lines, so that no two
# writers share one, and any dtype view of it is legal), and the same requests give the same layout in
# every process. Knows nothing of memory, processes or envs.

#: Bytes. Two 64-byte lines: adjacent-line prefetchers fetch pairs, and torch views need at most 64.
ALIGNMENT = 128

Name = tuple[str, ...]


def align(nbytes: int, alignment: int = ALIGNMENT) -> int:
    """Return the smallest multiple of `alignment` that is at least `nbytes`."""
    return -(-nbytes // alignment) * alignment


@dataclass(frozen=True)
class Field:
    """One array: its name, shape, dtype name, and offset in bytes from the start of its layout, once it has one."""

    name: Name
    shape: tuple[int, ...]
    dtype: str
    offset: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the array, without padding."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Layout:
    """Fields in order of offset, and the bytes they take together (a multiple of `ALIGNMENT`)."""

    fields: tuple[Field, ...]
    nbytes: int

    def __iter__(self) -> Iterator[Field]:
        return iter(self.fields)


def lay_out(wanted: Iterable[Field], start: int = 0) -> Layout:
    """Place arrays one after the other, each aligned.

    Args:
        wanted: the arrays, without offsets; they may have no elements.
        start: offset of the first field, bytes; itself aligned up.

    Returns:
        The layout; `nbytes` counts from offset 0 and so includes `start`.

    Raises:
        ValueError: a name came twice, or a dimension is negative.
    """
    fields: list[Field] = []
    seen: set[Name] = set()
    offset = align(start)
    for field in wanted:
        if field.name in seen:
            raise ValueError(
                f"lay_out failed: expected unique names, got {field.name} twice."
            )
        if any(n < 0 for n in field.shape):
            raise ValueError(
                f"lay_out failed: expected dimensions >= 0, got {field.shape} for {field.name}."
            )
        seen.add(field.name)
        fields.append(replace(field, dtype=np.dtype(field.dtype).name, offset=offset))
        offset = align(offset + field.nbytes)
    return Layout(tuple(fields), offset)


def view(buffer: np.ndarray, field: Field, base: int = 0) -> np.ndarray:
    """Return a field as an array: a VIEW of `buffer` (uint8, 1-d), `base` bytes further on."""
    return np.ndarray(field.shape, field.dtype, buffer, base + field.offset)


def strided_view(
    buffer: np.ndarray,
    field: Field,
    base: int,
    count: int,
    stride: int,
) -> np.ndarray:
    """Return `count` repetitions of a field, `stride` bytes apart, as one array `[count, *shape]` (VIEW)."""
    inner = np.ndarray(field.shape, field.dtype).strides
    return np.ndarray(
        (count, *field.shape),
        field.dtype,
        buffer,
        base + field.offset,
        (stride, *inner),
    )


# ---- slab --------------------------------------------------------------------------------------


class Word(NamedTuple):
    """A control word.

    Attributes:
        length: one for each "env", "worker" or "bin", or two for each env ("info").
        writer: who writes it. The parent also writes a worker's words while the worker does not: those of an idle
            worker ("both"), and of one that is lost, copied or replaced.
        meaning: in words.
    """

    length: str
    writer: str
    meaning: str


WORDS = {
    "command_seq": Word(
        "env",
        "parent",
        "number of the latest command for the env; written last",
    ),
    "command": Word("env", "parent", "what to do: see workers.protocol.pack"),
    "reply_seq": Word(
        "env",
        "worker",
        "number of the latest command that is finished; written last",
    ),
    "status": Word(
        "env",
        "both",
        "how it ended: see workers.protocol.Status; the parent clears it once it has read it",
    ),
    "episode": Word(
        "env",
        "both",
        "resets since the root seed was set (which zeroes it); the next begins this episode",
    ),
    "env_steps": Word(
        "env", "worker", "steps of the env whose rows were written, ever"
    ),
    "errors": Word(
        "env", "parent", "exceptions of the env that ended its episode, ever"
    ),
    "resets": Word("env", "worker", "resets that returned, ever"),
    "info_ids": Word(
        "info",
        "both",
        "ids of the schemas of the infos in its rows, of step and reset; 0 for none",
    ),
    "ends": Word(
        "env",
        "worker",
        "steps after which the env (or a part of it) had ended, ever",
    ),
    "mail_seq": Word(
        "worker",
        "parent",
        "number of the latest message that it is to read from its socket; `workers.protocol.LEAVE` once it must end",
    ),
    "answered_ns": Word(
        "env",
        "worker",
        "when it last answered a command that was sent to it alone: monotonic clock",
    ),
    "answered": Word(
        "worker", "worker", "answers that it has counted, ever: see tally"
    ),
    "ring_at": Word(
        "worker",
        "parent",
        "how many answers of all workers together are worth a ring",
    ),
    "busy_ns": Word("worker", "worker", "nanoseconds spent on commands, ever"),
    "pid": Word("worker", "worker", "its process id"),
    "starts": Word("worker", "worker", "processes that have taken this place, ever"),
    "since_ns": Word(
        "worker",
        "worker",
        "when it last began, or finished, what it found to do: monotonic clock",
    ),
    "cpu": Word(
        "worker",
        "worker",
        "processor on which it began what it found to do last, plus 1; 0 if that is not noted",
    ),
    "reset_ns": Word(
        "worker",
        "worker",
        "nanoseconds spent on commands with a reset, ever; estimated from samples",
    ),
    "step_bins": Word(
        "bin",
        "worker",
        "sampled steps by duration, `NUM_BINS` words of each worker: see `bin_of`",
    ),
    "phase": Word(
        "worker",
        "worker",
        "the command and env being worked on, 0 when idle: see workers.protocol",
    ),
}


#: Bins of a histogram of durations: four for each doubling, up to two hours.
NUM_BINS = 176


def bin_of(nanoseconds: int) -> int:
    """Return the bin of a duration, `0 .. NUM_BINS - 1`."""
    # Below 8, a doubling has no four different durations.
    if nanoseconds < 8:
        return nanoseconds
    octave = nanoseconds.bit_length()
    return min((octave << 2) - 4 + (nanoseconds >> octave - 3 & 3), NUM_BINS - 1)


def bin_middle(index: int) -> float:
    """Return nanoseconds in the middle of a bin."""
    if index < 8:
        return float(index)
    octave, quarter = divmod(index + 4, 4)
    return float((4 + quarter + 0.5) * 2 ** (octave - 3))


def next_leaves(spec: EnvSpec) -> tuple[LeafSpec, ...]:
    """Return the leaves of a transition's `next` that live in shared memory."""
    return tuple(
        leaf
        for leaf in (*spec.observation, *spec.reward, *spec.done)
        if not leaf.is_side
    )


def root_leaves(spec: EnvSpec) -> tuple[LeafSpec, ...]:
    """Return the leaves of a root (the result of a reset) that live in shared memory."""
    return tuple(leaf for leaf in (*spec.observation, *spec.done) if not leaf.is_side)


def input_leaves(spec: EnvSpec) -> tuple[LeafSpec, ...]:
    """Return the leaves that a step reads from shared memory."""
    return tuple(leaf for leaf in (*spec.action, *spec.state) if not leaf.is_side)


def fields_of(
    section: str,
    leaves: Iterable[LeafSpec],
    lead: tuple[int, ...],
) -> list[Field]:
    """List the arrays of some leaves in a section, with leading dimensions."""
    return [
        Field((section, *leaf.key), (*lead, *leaf.shape), leaf.dtype) for leaf in leaves
    ]


def section_fields(spec: EnvSpec, lead: tuple[int, ...]) -> list[Field]:
    """List the arrays of one frame (lead `[n]`) or one storage (lead `[n, T]`): all `next`, then all `root`."""
    return [
        *fields_of("next", next_leaves(spec), lead),
        *fields_of("root", root_leaves(spec), lead),
    ]


def input_fields(spec: EnvSpec, lead: tuple[int, ...]) -> list[Field]:
    """List the input arrays; envs that are themselves a batch also have a reset mask."""
    fields = fields_of("input", input_leaves(spec), lead)
    if spec.batch_shape:
        fields.append(Field(("reset_mask",), (*lead, *spec.batch_shape, 1), "bool"))
    return fields


@dataclass(frozen=True)
class GroupPlan:
    """Where a group of equal envs lives.

    Attributes:
        env_ids: ascending; row r of every array is env `env_ids[r]`.
        spec: of each env.
        frame: layout of one frame, offsets from its start.
        next_nbytes: bytes from a frame's start to the end of its `next` part.
        base: offset of frame 0 in the segment; frame k is `k * frame.nbytes` further.
        inputs: layout of the inputs, offsets from the segment's start.
    """

    env_ids: tuple[int, ...]
    spec: EnvSpec
    frame: Layout
    next_nbytes: int
    base: int
    inputs: Layout


class Place(NamedTuple):
    """The index of an env's group, and the env's row in the arrays of the group."""

    group: int
    row: int


@dataclass(frozen=True)
class SlabPlan:
    """Where everything lives in one segment of `nbytes` bytes.

    Attributes:
        num_frames: of each group, lendable ones included.
        num_lendable: frames after those of the ring, which can be lent to the caller; only the infos follow them, and
            each begins at a page.
        infos: layout of `("infos",)`, uint8 `[N, 2, INFO_BYTES]`: rows of step and reset; None without them. Of these
            last bytes of the segment, pages that nothing has reached take no memory.
    """

    num_envs: int
    num_workers: int
    num_frames: int
    words: Layout
    bells_offset: int
    groups: tuple[GroupPlan, ...]
    nbytes: int
    num_lendable: int = 0
    infos: Layout | None = None

    @property
    def ring_nbytes(self) -> int:
        """Bytes up to the first lendable frame, or to the end of the last frame if none is."""
        last = self.groups[-1]
        return last.base + (self.num_frames - self.num_lendable) * last.frame.nbytes

    def go_offset(self, worker_id: int) -> int:
        """Return the offset of a worker's `go` doorbell."""
        return self.bells_offset + (1 + worker_id) * DOORBELL_BYTES

    def place(self, env_id: int) -> Place:
        """Return the place of an env."""
        for index, group in enumerate(self.groups):
            if env_id in group.env_ids:
                return Place(index, group.env_ids.index(env_id))
        raise KeyError(env_id)


#: Bytes of a `next` from which copying it takes longer than checking whether a frame is still held (2 us).
_LENT_FROM = 1 << 15
#: Largest `next` that is lent, so that lendable frames take at most four times this address space, or ...
_LARGEST_LENT = 1 << 28
#: ... as much as this, in bytes. A loop that keeps two batches needs four frames.
_LENDABLE_BYTES = 1 << 26
_FEWEST_LENDABLE = 4
_MOST_LENDABLE = 12

#: Bytes of an env's row for an info: those of 4096 numbers.
INFO_BYTES = 1 << 15


def plan_slab(
    specs: Sequence[EnvSpec],
    num_workers: int,
    num_ring: int,
    *,
    lends: bool = False,
    has_infos: bool = False,
) -> SlabPlan:
    """Lay out a slab for envs with the given specs (one per env); equal specs share arrays.

    Args:
        specs: of the envs.
        num_workers: that have words.
        num_ring: frames of the ring.
        lends: add lendable frames, if the envs are equal and their batches large.
        has_infos: add rows for infos.
    """
    num_envs = len(specs)
    counts = {
        "env": num_envs,
        "info": 2 * num_envs,
        "worker": num_workers,
        "bin": num_workers * NUM_BINS,
    }
    words = lay_out(
        Field((name,), (counts[word.length],), "int64") for name, word in WORDS.items()
    )
    offset = words.nbytes + (1 + num_workers) * DOORBELL_BYTES
    groups: list[GroupPlan] = []
    num_lendable = 0
    for env_ids in _group_equal(specs):
        spec = specs[env_ids[0]]
        lead = (len(env_ids),)
        inputs = lay_out(input_fields(spec, lead), start=offset)
        frame = lay_out(section_fields(spec, lead))
        first_root = next(
            (f.offset for f in frame if f.name[0] == "root"),
            frame.nbytes,
        )
        alignment = ALIGNMENT
        if (
            lends
            and len(env_ids) == num_envs
            and _LENT_FROM <= first_root <= _LARGEST_LENT
        ):
            # Whether a caller has written to a lent frame is known by pages, so no two frames may share one.
            alignment = mmap.PAGESIZE
            frame = replace(frame, nbytes=align(frame.nbytes, alignment))
            num_lendable = max(
                _FEWEST_LENDABLE,
                min(_MOST_LENDABLE, _LENDABLE_BYTES // frame.nbytes),
            )
        base = align(inputs.nbytes, alignment)
        groups.append(GroupPlan(tuple(env_ids), spec, frame, first_root, base, inputs))
        offset = base + (num_ring + num_lendable) * frame.nbytes
    infos = None
    if has_infos:
        # Sparse, and therefore last: `Segment.create` does not touch the end of its memory.
        infos = lay_out(
            [Field(("infos",), (num_envs, 2, INFO_BYTES), "uint8")],
            start=align(offset, mmap.PAGESIZE),
        )
        offset = infos.nbytes
    return SlabPlan(
        num_envs=num_envs,
        num_workers=num_workers,
        num_frames=num_ring + num_lendable,
        words=words,
        bells_offset=words.nbytes,
        groups=tuple(groups),
        nbytes=offset,
        num_lendable=num_lendable,
        infos=infos,
    )


def _group_equal(specs: Sequence[EnvSpec]) -> list[list[int]]:
    """Return the ids of the envs of each spec."""
    # Not by a dict, because specs whose bounds are arrays have no hash.
    groups: list[list[int]] = []
    for env_id, spec in enumerate(specs):
        for env_ids in groups:
            if specs[env_ids[0]] == spec:
                env_ids.append(env_id)
                break
        else:
            groups.append([env_id])
    return groups


class GroupSlab:
    """The arrays of one group: VIEWS of the segment.

    Attributes:
        plan: their layout.
        columns: `("next" | "root", *key)` -> `[num_frames, num_rows, ...]`.
        inputs: `("input", *key)` and `("reset_mask",)` -> `[num_rows, ...]`.
        buffer: the whole segment, uint8.
    """

    def __init__(self, plan: GroupPlan, num_frames: int, buffer: np.ndarray) -> None:
        self.plan = plan
        self.spec = plan.spec
        self.columns = {
            field.name: strided_view(
                buffer,
                field,
                plan.base,
                num_frames,
                plan.frame.nbytes,
            )
            for field in plan.frame
        }
        self.inputs = {field.name: view(buffer, field) for field in plan.inputs}
        self.buffer = buffer

    def next_bytes(self, column: int) -> np.ndarray:
        """Return the bytes of a frame's `next` part: uint8 `[next_nbytes]`, a VIEW."""
        start = self.plan.base + column * self.plan.frame.nbytes
        return self.buffer[start : start + self.plan.next_nbytes]

    def of_row(self, row: int) -> dict[Name, np.ndarray]:
        """Return one env's arrays as `[column, ...]` VIEWS."""
        return {name: array[:, row] for name, array in self.columns.items()}


class Slab:
    """A plan over real bytes (shared or not): named arrays, all VIEWS of `buffer`.

    Attributes:
        infos: rows for infos, uint8 `[N, 2, INFO_BYTES]`; None without them.
    """

    def __init__(self, plan: SlabPlan, buffer: np.ndarray) -> None:
        self.plan = plan
        self.buffer = buffer
        self.words: dict[str, np.ndarray] = {
            field.name[0]: view(buffer, field) for field in plan.words
        }
        self.groups = tuple(
            GroupSlab(group, plan.num_frames, buffer) for group in plan.groups
        )
        self.infos = None if plan.infos is None else view(buffer, *plan.infos)


@dataclass(frozen=True)
class StoragePlan:
    """Layout of a rollout of `num_columns` steps: one per group, with leading dimensions `[num_rows, num_columns]`."""

    num_columns: int
    groups: tuple[Layout, ...]
    nbytes: int


def plan_storage(slab: SlabPlan, num_columns: int) -> StoragePlan:
    """Lay out a rollout storage for the envs of a slab."""
    layouts: list[Layout] = []
    offset = 0
    for group in slab.groups:
        lead = (len(group.env_ids), num_columns)
        inputs = fields_of("input", input_leaves(group.spec), lead)
        layout = lay_out(section_fields(group.spec, lead) + inputs, start=offset)
        layouts.append(layout)
        offset = layout.nbytes
    return StoragePlan(num_columns, tuple(layouts), offset)


class Storage:
    """A rollout storage over real bytes; `columns[g]` maps a name to `[num_rows, num_columns, ...]` (VIEW)."""

    def __init__(self, plan: StoragePlan, buffer: np.ndarray) -> None:
        self.plan = plan
        self.columns = tuple(
            {field.name: view(buffer, field) for field in layout}
            for layout in plan.groups
        )

    def of_row(self, group: int, row: int) -> dict[Name, np.ndarray]:
        """Return one env's arrays as `[column, ...]` VIEWS."""
        return {name: array[row] for name, array in self.columns[group].items()}
