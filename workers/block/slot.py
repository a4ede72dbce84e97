"""A slot: one env with its adapter, the arrays of its inputs, and the places where it writes.

Guarantees: a `Sink` writes only its env's rows, and checks every value against the spec. A step is compiled for each
sink, because the attribute look-ups would cost more than a small env's step.
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from envherd.shm.layout import Name
from envherd.shm.slab import Place
from envherd.shm.specs import Discrete, EnvSpec, LeafSpec
from envherd.workers.adapters.base import Adapter, StepValues
from envherd.workers.block.journal import Journal
from envherd.workers.block.slot_states import AFTER, NEW, OVER, SlotEvent, SlotState
from envherd.workers.errors import InternalError, SpecError
from envherd.workers.info_rows import InfoWriter
from envherd.workers.messages import Prepare
from envherd.workers.protocol import Op, pack_phase
from envherd.workers.seeding import EpisodeSeeds, GlobalsState
from envherd.workers.state_tables import IMPOSSIBLE
from envherd.workers.writers import Writer, writer_for

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
        self.journal: Journal | None = None
        self.prepared: Prepare | None = None
        self.rename(env_id)
        self.rng_state: GlobalsState | None = None
        # `seeding.EpisodeSeeds.pool`, for C; None if the env's own generators continue.
        self.seed_pool: np.ndarray | None = None
        self._seeds: EpisodeSeeds | None = None
        self.unwatched = {"reset", "step"}
        # The steps in C read and write it, too; `slot_states` has the table of both.
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

    def use_seeds(self, seeds: EpisodeSeeds) -> None:
        """Use these seeds for the env's episodes from now on."""
        self._seeds = seeds
        if self.seed_pool is None:
            self.seed_pool = seeds.pool
        # Into the same array, because the reset in C reads it.
        self.seed_pool[:] = seeds.pool

    def seed_of(self, episode: int) -> int | None:
        """Return the seed of an episode, or None if the env's own generators continue."""
        if self._seeds is None:
            return None
        return self._seeds[episode]

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

    journal = slot.journal
    if journal is None:
        return run

    def run_and_keep(column: int) -> list[Any]:
        # Before the step: if that ends the process, the journal has the input that did so.
        journal.keep()
        return run(column)

    return run_and_keep


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
