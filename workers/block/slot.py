"""A slot: one env with its adapter, its state, its inputs, and the places where it writes.

Guarantees: a `Sink` writes only its env's rows, and checks every value against the spec. A step is compiled for each
sink, because the attribute look-ups would cost more than a small env's step.
"""

import copy
import reprlib
from collections.abc import Callable, Iterable, Mapping
from enum import IntEnum
from typing import Any

import numpy as np

from envherd.shm.slab import Name, Place
from envherd.shm.specs import Discrete, EnvSpec, LeafSpec
from envherd.workers import native, protocol
from envherd.workers.adapters.base import Adapter, EnvCall, StepValues
from envherd.workers.adapters.common.values import NUMBERS
from envherd.workers.errors import EnvherdError, InternalError, SpecError
from envherd.workers.info_rows import InfoWriter
from envherd.workers.messages import Prepare
from envherd.workers.protocol import IMPOSSIBLE, Op, pack_phase
from envherd.workers.seeding import GlobalsState, episode_seed, seed_pool
from envherd.workers.writers import Writer, writer_for

# ---- slot states -------------------------------------------------------------------------------
# The states of an env in its worker: a table of transitions, which `step.c` reads too.
#
# Guarantees: the state of a `Slot` changes only by an entry of `FOLLOWS`. If the table has no entry for a STEP, an
# `InternalError` refuses it and the env is not stepped: the caller's table (`protocol.env_states`) lets none be sent.
#
# State         Meaning
# NEEDS_RESET   it was never reset, or its episode was broken off: its next reset is of all its rows
# RUNNING       in an episode
# ENDED         its latest row ended its episode; for an env that is a batch, the episodes of some of its rows
# FREE_NEW, FREE_RUNNING, FREE_ENDED
#               the same of an env that may be stepped in any of them: the env itself decides, or a user's code
#               drives it
# IN_FORK       this process is one that the env has forked; only the worker may answer, so nothing may follow
#
# `print(table())` prints the transitions.


class SlotState(IntEnum):
    """The state of an env, which moves only as `FOLLOWS` says."""

    NEEDS_RESET = 0
    RUNNING = 1
    ENDED = 2
    FREE_NEW = 3
    FREE_RUNNING = 4
    FREE_ENDED = 5
    IN_FORK = 6


class SlotEvent(IntEnum):
    """An event of an env.

    STEP: it is to be stepped.
    RUNS: its step or its reset has ended, or its state was restored, and it is in an episode.
    ENDS: its step has ended its episode; or after a reset of some of its rows, others must be reset still.
    IS_BROKEN_OFF: it raised, an interrupt came, or it was reset for an episode that may not be used.
    IS_ALLOWED: from now on it may be stepped in any state.
    """

    STEP = 0
    RUNS = 1
    ENDS = 2
    IS_BROKEN_OFF = 3
    IS_ALLOWED = 4


_GUARDED = {
    SlotEvent.RUNS: SlotState.RUNNING,
    SlotEvent.IS_BROKEN_OFF: SlotState.NEEDS_RESET,
}
_FREE = {
    SlotEvent.RUNS: SlotState.FREE_RUNNING,
    SlotEvent.ENDS: SlotState.FREE_ENDED,
    SlotEvent.IS_BROKEN_OFF: SlotState.FREE_NEW,
}

#: State -> event -> state.
FOLLOWS: dict[SlotState, dict[SlotEvent, SlotState]] = {
    SlotState.NEEDS_RESET: {
        **_GUARDED,
        SlotEvent.IS_ALLOWED: SlotState.FREE_NEW,
    },
    SlotState.RUNNING: {
        SlotEvent.STEP: SlotState.RUNNING,
        SlotEvent.ENDS: SlotState.ENDED,
        **_GUARDED,
        SlotEvent.IS_ALLOWED: SlotState.FREE_RUNNING,
    },
    SlotState.ENDED: {
        SlotEvent.ENDS: SlotState.ENDED,
        **_GUARDED,
        SlotEvent.IS_ALLOWED: SlotState.FREE_ENDED,
    },
    SlotState.FREE_NEW: {
        SlotEvent.STEP: SlotState.FREE_NEW,
        **_FREE,
        SlotEvent.IS_ALLOWED: SlotState.FREE_NEW,
    },
    SlotState.FREE_RUNNING: {
        SlotEvent.STEP: SlotState.FREE_RUNNING,
        **_FREE,
        SlotEvent.IS_ALLOWED: SlotState.FREE_RUNNING,
    },
    SlotState.FREE_ENDED: {
        SlotEvent.STEP: SlotState.FREE_ENDED,
        **_FREE,
        SlotEvent.IS_ALLOWED: SlotState.FREE_ENDED,
    },
    SlotState.IN_FORK: {},
}
#: The exception that refuses a STEP in states for which `FOLLOWS` lacks it. Other missing pairs cannot occur.
REFUSED_WITH: dict[SlotState, type[EnvherdError]] = {
    SlotState.NEEDS_RESET: InternalError,
    SlotState.ENDED: InternalError,
    SlotState.IN_FORK: InternalError,
}
COMMANDS = (SlotEvent.STEP,)

#: `FOLLOWS` as bytes: int8 `[event, state]`, the state that follows; -1 where nothing can.
NEXT = protocol.table_as_bytes(FOLLOWS)
#: Its rows as plain lists, which Python reads faster.
AFTER: list[list[int]] = NEXT.tolist()
#: As ints, which Python compares faster: states of an env that was never reset since it was built, or since its episode
#: was broken off; and those after the end of an episode.
NEW = (
    int(SlotState.NEEDS_RESET),
    int(SlotState.FREE_NEW),
)
OVER = (
    int(SlotState.ENDED),
    int(SlotState.FREE_ENDED),
)


def table() -> str:
    """Return the table as text: a line per state and event."""
    return protocol.table_as_text(FOLLOWS, SlotEvent, COMMANDS, REFUSED_WITH)


# ---- slot --------------------------------------------------------------------------------------

#: Column -> the observation values of one `env.step`, which are written to that column.
Step = Callable[[int], list[Any]]
#: Returns the result of the reset that the loop in C has made, or raises its exception.
Begun = Callable[[], list[Any]]
#: `(column, result of env.step)` -> its observation values, which are written to that column.
Keep = Callable[[int, StepValues], list[Any]]


_IN_FORK = int(SlotState.IN_FORK)


class Sink:
    """Where one env writes: a writer per leaf, all indexed by column (of the ring or of a storage).

    Attributes:
        arrays: `("next" | "root", *key)` -> `[column, ...]` (VIEW).
        step: the env's step to a column.
        native: the `Step` in C that the loop in C may call itself; None where it leaves the whole command to the block.
    """

    def __init__(
        self,
        slot: "Slot",
        arrays: Mapping[Name, np.ndarray],
        *,
        root_follows: bool,
    ) -> None:
        spec = slot.spec
        self.arrays = arrays
        self.root_follows = root_follows
        self.num_columns = len(arrays["next", "done"])
        self.next_observation = slot.writers("next", spec.observation, arrays)
        self.root_observation = slot.writers("root", spec.observation, arrays)
        self.reward = slot.writers("next", spec.reward, arrays)
        self.next_done = self._flags("next", spec)
        self.root_done = self._flags("root", spec)
        self.next_nested = slot.writers("next", spec.done[3:], arrays)
        self.root_nested = slot.writers("root", spec.done[3:], arrays)
        self.step: Any = None  # until `Block` compiles it
        self.native: Any = None

    def arrays_of(self, section: str, leaves: Iterable[LeafSpec]) -> list[np.ndarray]:
        """Return the arrays of some leaves in a section."""
        return [self.arrays[(section, *leaf.key)] for leaf in leaves]

    def _flags(self, section: str, spec: EnvSpec) -> list[Any]:
        """Return what takes an env's done, terminated and truncated by column."""
        flags = self.arrays_of(section, spec.done[:3])
        if spec.batch_shape:
            return flags
        # Of a single env, one bool per column. Memoryviews store it faster than arrays.
        return [array[:, 0].data for array in flags]


class Slot:
    """One env with its adapter, its inputs and its sinks."""

    def __init__(self, env_id: int, adapter: Adapter, *, check_finite: bool) -> None:
        self.adapter: Any = adapter  # None while it is not built
        # False while a new instance was not built yet, or could not be.
        self.is_built = True
        # The `FactoryCall` that `Prepare.call` has brought; None before the first.
        self.call: Any = None
        self.unchecked = adapter.unchecked
        self.spec = adapter.spec
        self.check_finite = check_finite
        self.place = Place(0, 0)
        self.sinks: dict[int, Sink] = {}
        self.inputs: Mapping[Name, np.ndarray] = {}
        self.action_readers: list[Callable[[], Any]] = []
        self.reset_mask: np.ndarray | None = None
        self.prepared: Prepare | None = None
        self.rename(env_id)
        self.rng_state: GlobalsState | None = None
        # Root seed and number of the env; None if the env's own generators continue.
        self._seeds: tuple[int, int] | None = None
        # `seeding.seed_pool` of them, for C.
        self.seed_pool: np.ndarray | None = None
        self.unwatched = {"reset", "step"}
        # The steps in C read and write it, too; `FOLLOWS` is the table of both.
        self.state = np.full(1, SlotState.NEEDS_RESET, np.int8)
        self._state = self.state.data
        # Which rows have ended, if the env is a batch.
        self.last_done: Any = not self.spec.batch_shape
        # Of the latest step in which rows have ended.
        self.last_terminated: Any = False
        self.last_truncated: Any = False
        self.has_news = False
        self.phase = "step"
        self.infos: dict[str, bytes] = {}
        # None if the slab has no rows for infos.
        self.info_writer: InfoWriter | None = None
        self.left_out: dict[str, str] = {}
        self.reported: set[str] = set()
        self.has_side = any(leaf.is_side for leaf in self.spec.leaves())
        self.side = {
            section: [None] * len(self.spec.observation) for section in ("next", "root")
        }

    def rename(self, env_id: int) -> None:
        """Take the id of an env."""
        self.env_id = env_id
        self.phase_words = [pack_phase(op, env_id) for op in range(len(Op) + 1)]

    def move(self, event: int) -> None:
        """Note that something has happened to the env.

        Raises:
            InternalError: it is a STEP that is refused.
        """
        following = AFTER[event][self._state[0]]
        if following == IMPOSSIBLE:
            raise InternalError(
                f"step failed: expected a running env, got env {self.env_id} that has ended, has raised, was never "
                f"reset, or is in a process that it has forked (end that with `os._exit`). Nothing of it was stored."
            )
        self._state[0] = following

    @property
    def is_new(self) -> bool:
        """Whether its next reset is of all its rows."""
        return self._state[0] in NEW

    @property
    def has_ended(self) -> bool:
        """Whether its latest row ended its episode, or those of some of its rows."""
        return self._state[0] in OVER

    def use_seeds(self, root_seed: int, number: int) -> None:
        """Draw the seeds of the env's episodes from a root seed and the env's number from now on."""
        self._seeds = (root_seed, number)
        pool = seed_pool(root_seed, number)
        if self.seed_pool is None:
            self.seed_pool = pool
        # Into the same array, because the reset in C reads it.
        self.seed_pool[:] = pool

    def seed_of(self, episode: int) -> int | None:
        """Return the seed of an episode, or None if the env's own generators continue."""
        if self._seeds is None:
            return None
        return episode_seed(*self._seeds, episode)

    def writers(
        self,
        section: str,
        leaves: Iterable[LeafSpec],
        arrays: Mapping[Name, np.ndarray],
    ) -> list[Writer]:
        """Return the writers of some leaves: into their arrays, or into the side values of the observation."""
        return [self._writer(section, leaf, arrays) for leaf in leaves]

    def _writer(
        self,
        section: str,
        leaf: LeafSpec,
        arrays: Mapping[Name, np.ndarray],
    ) -> Writer:
        if leaf.is_side and leaf not in self.spec.observation:
            raise SpecError(
                f"attach failed: expected rewards and done flags of fixed shape, got {leaf}."
            )
        if leaf.is_side:
            index = self.spec.observation.index(leaf)
            values = self.side[section]

            def write(_column: int, value: Any) -> None:
                values[index] = value

            return write
        check_finite = self.check_finite and leaf.key not in self.unchecked
        return writer_for(leaf, arrays[(section, *leaf.key)], check_finite=check_finite)

    def leave_out(self, entries: Mapping[str, str]) -> None:
        """Note info entries that are not passed on, as name -> reason, unless the parent knows of them."""
        for name, why in entries.items():
            if name not in self.reported:
                self.reported.add(name)
                self.left_out[name] = why
                self.has_news = True

    def clear_infos(self, *sections: str) -> None:
        """Note that the latest command has no infos of a section."""
        for section in sections:
            self.infos.pop(section, None)
            if self.info_writer is not None:
                self.info_writer.clear(section)

    def bind_inputs(self, inputs: Mapping[Name, np.ndarray], row: int) -> None:
        """Prepare to read this env's action and state."""
        self.inputs = inputs
        self.action_readers = []
        side_index = 0
        for leaf in (*self.spec.action, *self.spec.state):
            if leaf.is_side:
                self.action_readers.append(_side_reader(self, side_index))
                side_index += 1
            else:
                self.action_readers.append(
                    _input_reader(leaf, inputs[("input", *leaf.key)], row)
                )
        self.reset_mask = None
        if ("reset_mask",) in inputs:
            self.reset_mask = inputs[("reset_mask",)][row]


def _input_reader(leaf: LeafSpec, array: np.ndarray, row: int) -> Callable[[], Any]:
    if isinstance(leaf.domain, Discrete) and leaf.shape == ():
        values = array.data
        return lambda: values[row]
    # A copy, because the env may keep its action, and the caller writes the next one to the same place.
    if leaf.shape:
        return array[row].copy
    return lambda: array[row]


def _side_reader(slot: Slot, index: int) -> Callable[[], Any]:
    def read() -> Any:
        if slot.prepared is None or slot.prepared.side is None:
            raise SpecError(
                "step failed: expected a value for a non-tensor action, got none."
            )
        # A copy, because the env may write to it.
        return copy.deepcopy(slot.prepared.side[index])

    return read


def compile_step(
    slot: Slot,
    sink: Sink,
    words: Mapping[str, memoryview],
    step: Callable[[list[Any]], StepValues],
) -> Step:
    """Return the function that steps an env once and writes its `next` to a column of a sink (1 us).

    In a storage it also writes the root of the next column, unless the env has ended.

    Args:
        slot: of the env; its inputs are bound.
        sink: where it writes.
        words: of the slab.
        step: steps the env, given the values of its action.
    """
    readers = slot.action_readers
    keep = compile_keep(slot, sink, words)
    # One leaf is the usual case, and a list display takes half the time of a comprehension.
    read_only = _only(readers)

    def run(column: int) -> list[Any]:
        action = [read() for read in readers] if read_only is None else [read_only()]
        # After the readers, which take side inputs from it, and before the env, which may raise.
        slot.prepared = None
        return keep(column, step(action))

    return run


def compile_keep(slot: Slot, sink: Sink, words: Mapping[str, memoryview]) -> Keep:
    """Return the function that writes the result of a step: the part of `compile_step` after the step."""
    # Locals of the closure, because look-ups of attributes and words would cost more than a small env's step.
    env_id = slot.env_id
    env_steps = words["env_steps"]
    ends = words["ends"]
    observe = sink.next_observation
    give_reward = sink.reward
    num_observations = len(observe)
    num_rewards = len(give_reward)
    done, terminated_flags, truncated_flags = sink.next_done
    observe_only = _only(observe)
    reward_only = _only(give_reward)
    note_ends = _ends_noter(slot, sink)
    follow = _follower(slot, sink)
    state = slot.state.data
    if_running = AFTER[SlotEvent.RUNS]
    if_ended = AFTER[SlotEvent.ENDS]

    def keep(column: int, values: StepValues) -> list[Any]:
        observation, reward, terminated, truncated = values
        # Before anything is written.
        if (
            state[0] == _IN_FORK
            or len(observation) != num_observations
            or len(reward) != num_rewards
        ):
            raise _refusal(slot, len(observation), len(reward))
        if observe_only is None:
            for write, value in zip(observe, observation):  # noqa: B905  # lengths were compared
                write(column, value)
        else:
            observe_only(column, observation[0])
        if reward_only is None:
            for write, value in zip(give_reward, reward):  # noqa: B905
                write(column, value)
        else:
            reward_only(column, reward[0])
        terminated_flags[column] = terminated
        truncated_flags[column] = truncated
        if note_ends is None:
            done[column] = ended = terminated or truncated
        else:
            ended = note_ends(column, terminated, truncated)
        # As `Slot.move`, without its call.
        state[0] = (if_ended if ended else if_running)[state[0]]
        # After the row: `env_steps` counts rows that can be read.
        env_steps[env_id] += 1
        if ended:
            ends[env_id] += 1
        elif follow is not None:
            follow(column + 1, observation)
        return observation

    return keep


def _refusal(slot: Slot, num_observations: int, num_rewards: int) -> Exception:
    """Return the error for wrong numbers of values; in a process that the env has forked, raise that for it."""
    slot.move(SlotEvent.RUNS)
    return SpecError(
        f"step failed: expected {len(slot.spec.observation)} observation and {len(slot.spec.reward)} reward values "
        f"from the adapter, got {num_observations} and {num_rewards}."
    )


def _only(parts: list[Any]) -> Any:
    """Return the part of a list that has one, which is called without a loop; else None."""
    if len(parts) == 1:
        return parts[0]
    return None


def _ends_noter(slot: Slot, sink: Sink) -> Callable[[int, Any, Any], bool] | None:
    """Return the function that writes an env's done flags; None for envs without done leaves of agents or rows.

    It takes a column and what the env returned as terminated and truncated, and returns whether (part of) it has ended.
    """
    is_batch = bool(slot.spec.batch_shape)
    nested = sink.next_nested
    if not (is_batch or nested):
        return None
    done_values = slot.adapter.done_values
    done = sink.next_done[0]

    def note(column: int, terminated: Any, truncated: Any) -> bool:
        done[column] = ended = terminated | truncated
        if is_batch:
            slot.last_done = ended
            ended = bool(ended.any())
        # Copies, because the env may change its arrays before a root needs them.
        if is_batch and ended:
            slot.last_terminated = np.array(terminated)
            slot.last_truncated = np.array(truncated)
        if nested:
            store(nested, column, done_values(), "done")
        return bool(ended)

    return note


def _follower(slot: Slot, sink: Sink) -> Callable[[int, list[Any]], None] | None:
    """Return the function that writes the root after a step in which no episode ended; None if none follows."""
    if not sink.root_follows:
        return None
    observe = sink.root_observation
    nested = sink.root_nested
    num_columns = sink.num_columns
    done, terminated, truncated = sink.root_done
    observe_only = _only(observe)
    done_values = slot.adapter.done_values

    def follow(column: int, observation: list[Any]) -> None:
        if column == num_columns:
            return
        if observe_only is None:
            for write, value in zip(observe, observation):  # noqa: B905  # lengths were compared
                write(column, value)
        else:
            observe_only(column, observation[0])
        done[column] = terminated[column] = truncated[column] = False
        if nested:
            store(nested, column, done_values(), "done")

    return follow


def store(writers: list[Writer], column: int, values: list[Any], group: str) -> None:
    """Write one value per writer to a column."""
    if len(values) != len(writers):
        raise SpecError(
            f"writing {group} failed: expected {len(writers)} values, got {len(values)}."
        )
    for write, value in zip(writers, values):  # noqa: B905  # lengths were compared
        write(column, value)


# ---- compiling ---------------------------------------------------------------------------------
# Decide which steps are plain enough for C, and collect the arguments for C.
#
# Guarantees: a step in C has the effects of `compile_step`, which is the specification. If a result is not plain,
# C passes it to the same Python code before it writes anything; no env is stepped twice.
#
# An env is plain if it is single, and its observations and rewards are arrays or int64 numbers of fixed shape. A `Step`
# holds the buffers of its arrays, so their memory lives as long as it does.


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
    return {
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
