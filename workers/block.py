"""A block: the envs of one worker, and the rows of the slab that are theirs.

Guarantees:
- STEP is exactly one `env.step` and never a reset. A reset touches its own env alone.
- The terminal observation is in the slab before the env is reset (envs reuse their buffers).
- Every value is checked against the spec as it is written; what an env raises becomes a `Fault` of
  that env, and the block goes on.
Knows nothing of processes or doorbells: the worker's loop and `SerialEnv` drive it alike.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from envherd.shm.layout import Name
from envherd.shm.slab import Slab, Storage
from envherd.shm.specs import Discrete, EnvSpec, LeafSpec
from envherd.workers import seeding
from envherd.workers.adapters.base import Adapter
from envherd.workers.checks import Writer, writer_for
from envherd.workers.errors import SpecError
from envherd.workers.messages import Prepare
from envherd.workers.protocol import RING, Op, Status, pack_phase, unpack
from envherd.workers.reply import Fault, Notice, SideValues

#: Commands whose fields are kept; a ring has a handful, a storage one or two per column.
_MAX_REMEMBERED = 4096

# As plain ints: comparing and storing enum members costs more than the step of a small env.
_STEP_RESET, _RESET = int(Op.STEP_RESET), int(Op.RESET)
_OK, _FAILED, _SIDE = int(Status.OK), int(Status.FAILED), int(Status.SIDE)

Report = Callable[[dict[str, Any]], None]


class Sink:
    """Where one env writes: a writer per leaf, all indexed by column (of the ring or of a storage)."""

    def __init__(self, slot: Slot, arrays: Mapping[Name, np.ndarray], *, root_follows: bool) -> None:
        spec = slot.spec
        self.root_follows = root_follows
        self.num_columns = len(arrays["next", "done"])
        self.next_observation = [slot.writer(leaf, arrays, "next", i) for i, leaf in enumerate(spec.observation)]
        self.root_observation = [slot.writer(leaf, arrays, "root", i) for i, leaf in enumerate(spec.observation)]
        self.reward = [slot.writer(leaf, arrays, "next", -1) for leaf in spec.reward]
        self.next_done = [_flags(spec, arrays["next", *leaf.key]) for leaf in spec.done[:3]]
        self.root_done = [_flags(spec, arrays["root", *leaf.key]) for leaf in spec.done[:3]]
        self.next_nested = [slot.writer(leaf, arrays, "next", -1) for leaf in spec.done[3:]]
        self.root_nested = [slot.writer(leaf, arrays, "root", -1) for leaf in spec.done[3:]]


def _flags(spec: EnvSpec, array: np.ndarray) -> np.ndarray:
    """Return a root done leaf so that a single env stores one bool per column."""
    return array if spec.batch_shape else array[:, 0]


class Slot:
    """One env with its adapter, its inputs and its sinks."""

    def __init__(self, env_id: int, adapter: Adapter, *, check_finite: bool) -> None:
        self.env_id = env_id
        self.adapter = adapter
        self.spec = adapter.spec
        self.check_finite = check_finite
        self.place = (0, 0)
        self.sinks: dict[int, Sink] = {}
        self.action_readers: list[Callable[[], Any]] = []
        self.reset_mask: np.ndarray | None = None
        self.prepared: Prepare | None = None
        self.phase_words = [pack_phase(op, env_id) for op in range(len(Op) + 1)]
        self.rng_state: tuple[Any, ...] | None = None
        self.unwatched = {"reset", "step"}
        self.last_done: Any = False
        self.has_ended = False
        self.has_news = False
        self.has_side = any(leaf.is_side for leaf in self.spec.leaves())
        self.side = {section: [None] * len(self.spec.observation) for section in ("next", "root")}

    def writer(self, leaf: LeafSpec, arrays: Mapping[Name, np.ndarray], section: str, index: int) -> Writer:
        """Return the writer of a leaf: into its array, or into the side values."""
        if leaf.is_side and index < 0:
            raise SpecError(f"attach failed: expected rewards and done flags of fixed shape, got {leaf}.")
        if leaf.is_side:
            values = self.side[section]

            def write(_column: int, value: Any) -> None:
                values[index] = value

            return write
        return writer_for(leaf, arrays[section, *leaf.key], check_finite=self.check_finite)

    def bind_inputs(self, inputs: Mapping[Name, np.ndarray], row: int) -> None:
        """Prepare to read this env's action and state."""
        self.action_readers = []
        side_index = 0
        for leaf in (*self.spec.action, *self.spec.state):
            if leaf.is_side:
                self.action_readers.append(_side_reader(self, side_index))
                side_index += 1
            else:
                self.action_readers.append(_input_reader(leaf, inputs["input", *leaf.key], row))
        mask = inputs.get(("reset_mask",))
        self.reset_mask = None if mask is None else mask[row]


def _input_reader(leaf: LeafSpec, array: np.ndarray, row: int) -> Callable[[], Any]:
    if isinstance(leaf.domain, Discrete) and leaf.shape == ():
        values = array.data
        return lambda: values[row]
    source = array[row]
    return source.copy if leaf.shape else lambda: array[row]


def _side_reader(slot: Slot, index: int) -> Callable[[], Any]:
    def read() -> Any:
        if slot.prepared is None or slot.prepared.side is None:
            raise SpecError("step failed: expected a value for a non-tensor action, got none.")
        return slot.prepared.side[index]

    return read


class Block:
    """The envs of one worker; see the module.

    Args:
        worker_id: whose words to write.
        adapters: env id -> adapter, ascending by env id.
        root_seed: see `workers.seeding`.
        report: called with plain messages for the parent (faults, side values, notices).
        isolate_rng: swap the global generators' state in and out around every call of an env.
        check_finite: refuse NaN and infinities in observations and rewards.

    Attributes:
        passes: exceptions that are the caller's and not an env's: a Ctrl-C, where the envs run in its process.
    """

    def __init__(
        self,
        worker_id: int,
        adapters: Mapping[int, Adapter],
        root_seed: int,
        report: Report,
        *,
        isolate_rng: bool = False,
        check_finite: bool = False,
    ) -> None:
        self.passes: tuple[type[BaseException], ...] = ()
        self.worker_id = worker_id
        self.root_seed = root_seed
        self.slots = {env_id: Slot(env_id, adapter, check_finite=check_finite) for env_id, adapter in adapters.items()}
        self._report = report
        self._isolate_rng = isolate_rng
        self._words: dict[str, memoryview] = {}
        self._unpacked: dict[int, tuple[int, int, int, int]] = {}

    def attach(self, slab: Slab) -> None:
        """Take these envs' rows of a slab."""
        self._words = {name: array.data for name, array in slab.words.items()}
        self._phase, self._env_steps = self._words["phase"], self._words["env_steps"]
        for slot in self.slots.values():
            group_index, row = slot.place = slab.plan.place(slot.env_id)
            group = slab.groups[group_index]
            slot.sinks = {RING: Sink(slot, group.of_row(row), root_follows=False)}
            slot.bind_inputs(group.inputs, row)

    def attach_storage(self, target: int, storage: Storage) -> None:
        """Take these envs' rows of a rollout storage, addressed as `target` from now on."""
        for slot in self.slots.values():
            slot.sinks[target] = Sink(slot, storage.of_row(*slot.place), root_follows=True)

    def detach_storage(self, target: int) -> None:
        """Forget a rollout storage."""
        for slot in self.slots.values():
            slot.sinks.pop(target, None)

    def seed(self, root_seed: int) -> None:
        """Use a new root seed; the next reset of every env is its episode 0."""
        self.root_seed = root_seed
        for env_id, slot in self.slots.items():
            self._words["episode"][env_id] = 0
            slot.rng_state = None

    def prepare(self, message: Prepare) -> None:
        """Keep the extras of an env's next command."""
        self.slots[message.env_id].prepared = message

    def execute(self, env_id: int, command: int) -> int:
        """Carry out one command for one env and say how it ended; what the env raises is reported."""
        op, target, column, _ = self._unpacked.get(command) or self._unpack(command)
        slot = self.slots[env_id]
        self._phase[self.worker_id] = slot.phase_words[op]
        phase = "reset" if op == _RESET else "step"
        try:
            sink = slot.sinks[target]
            if op == _RESET:
                self._reset(slot, sink, column, slot.reset_mask)
            else:
                observation = self._step(slot, sink, column)
                if op == _STEP_RESET and slot.has_ended:
                    phase = "reset"
                    if slot.has_side:  # the env may write to what it gave
                        slot.side["next"][:] = copy.deepcopy(slot.side["next"])
                    self._reset(
                        slot, sink, column + sink.root_follows, slot.last_done if slot.spec.batch_shape else None
                    )
                elif sink.root_follows and column + 1 < sink.num_columns:
                    self._write_root(slot, sink, column + 1, observation)
            if slot.has_side:
                self._report(SideValues(env_id, slot.side["next"], slot.side["root"]).to_plain())
                return _SIDE
            if slot.has_news:
                slot.has_news = False
                return _SIDE
            return _OK
        except self.passes:
            slot.prepared = None
            raise
        except BaseException as error:  # whatever it is, SystemExit too, it is this env's and not the worker's
            slot.prepared = None
            if isinstance(error, SpecError) and slot.adapter.origin:
                error = SpecError(f"{error} Built by {slot.adapter.origin}.").with_traceback(error.__traceback__)
            self._report(Fault.from_exception(env_id, phase, error).to_plain())
            return _FAILED

    def _unpack(self, command: int) -> tuple[int, int, int, int]:
        """Unpack a command, and remember it: the same few come again and again."""
        if len(self._unpacked) > _MAX_REMEMBERED:
            self._unpacked.clear()
        unpacked = self._unpacked[command] = unpack(command)
        return unpacked

    def _step(self, slot: Slot, sink: Sink, column: int) -> list[Any]:
        adapter = slot.adapter
        action = [read() for read in slot.action_readers]
        slot.prepared = None
        if slot.unwatched or self._isolate_rng:
            values = self._with_own_rng(slot, "step", lambda: adapter.step(action))
        else:
            values = adapter.step(action)
        observation, reward, terminated, truncated = values
        self._env_steps[slot.env_id] += 1
        if len(observation) != len(sink.next_observation) or len(reward) != len(sink.reward):
            raise _wrong_count(slot, observation, reward)
        for write, value in zip(sink.next_observation, observation):  # noqa: B905  # lengths were compared
            write(column, value)
        for write, value in zip(sink.reward, reward):  # noqa: B905
            write(column, value)
        done, terminated_column, truncated_column = sink.next_done
        terminated_column[column] = terminated
        truncated_column[column] = truncated
        done[column] = slot.last_done = terminated | truncated
        slot.has_ended = bool(slot.last_done.any()) if slot.spec.batch_shape else slot.last_done
        if sink.next_nested:
            _store(sink.next_nested, column, adapter.done_values(), "done")
        if slot.has_ended:
            self._words["ends"][slot.env_id] += 1
        return observation

    def _reset(self, slot: Slot, sink: Sink, column: int, mask: np.ndarray | None) -> None:
        prepared, slot.prepared = slot.prepared, None
        episodes = self._words["episode"]
        episode = episodes[slot.env_id]
        seed: int | None = seeding.episode_seed(self.root_seed, slot.env_id, episode)
        if prepared is not None and prepared.has_seed:
            seed = prepared.seed
        options = None if prepared is None else prepared.options
        inner = None if mask is None or mask.all() else mask.copy()
        adapter = slot.adapter
        episodes[slot.env_id] = episode + 1
        observation = self._with_own_rng(slot, "reset", lambda: adapter.reset(seed, options, inner))
        self._words["resets"][slot.env_id] += 1
        slot.last_done = False if inner is None else slot.last_done & ~inner
        slot.has_ended = inner is not None and bool(slot.last_done.any())
        if column < sink.num_columns:
            self._write_root(slot, sink, column, observation)

    def _write_root(self, slot: Slot, sink: Sink, column: int, observation: list[Any]) -> None:
        _store(sink.root_observation, column, observation, "observation")
        for flag, source in zip(sink.root_done, self._root_flags(slot, sink, column), strict=True):
            flag[column] = source
        if sink.root_nested:
            _store(sink.root_nested, column, slot.adapter.done_values(), "done")

    def _root_flags(self, slot: Slot, sink: Sink, column: int) -> list[Any]:
        """Return done, terminated, truncated of a root: all False unless (part of) the env has ended."""
        if not slot.has_ended:
            return [False, False, False]
        if sink.root_follows and column > 0:
            return [flag[column - 1] & slot.last_done for flag in sink.next_done]
        return [slot.last_done, slot.last_done, False]

    def _with_own_rng(self, slot: Slot, phase: str, call: Callable[[], Any]) -> Any:
        """Call an env, its global generators' state swapped in (isolated) or watched (first call only)."""
        is_watched = phase in slot.unwatched
        if not (is_watched or self._isolate_rng):
            return call()
        slot.unwatched.discard(phase)
        outer = before = seeding.globals_state()
        if self._isolate_rng:
            if slot.rng_state is None:
                seeding.seed_globals(seeding.build_seed(self.root_seed, slot.env_id))
            else:
                seeding.restore_globals(slot.rng_state)
            before = seeding.globals_state()
        result = call()
        after = seeding.globals_state()
        drawn = seeding.drawn_between(before, after)
        if self._isolate_rng:
            slot.rng_state = after
            seeding.restore_globals(outer)
        elif drawn:
            slot.has_news = True
            self._report(Notice(slot.env_id, phase, drawn).to_plain())
        return result


def _wrong_count(slot: Slot, observation: list[Any], reward: list[Any]) -> SpecError:
    expected = len(slot.spec.observation), len(slot.spec.reward)
    return SpecError(
        f"step failed: expected {expected[0]} observation and {expected[1]} reward values from the adapter, "
        f"got {len(observation)} and {len(reward)}."
    )


def _store(writers: list[Writer], column: int, values: list[Any], group: str) -> None:
    if len(values) != len(writers):
        raise SpecError(f"writing {group} failed: expected {len(writers)} values, got {len(values)}.")
    for write, value in zip(writers, values):  # noqa: B905  # lengths were compared
        write(column, value)
