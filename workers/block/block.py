"""A block: the envs of one worker, and their rows of the slab.

Guarantees:
- STEP is exactly one `env.step` and never a reset. A reset touches its own env alone.
- The terminal observation is in the slab before the env is reset (envs reuse their buffers).
- Every value is checked against the spec as it is written. An exception of an env becomes a `Fault` of that env, and
  the block continues.
Knows nothing of processes or doorbells: both the worker's loop and `SerialEnv` drive it.
"""

import copy
import reprlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

from envherd.shm.slab import Slab, Storage
from envherd.workers import seeding
from envherd.workers.adapters.base import Adapter, StepValues
from envherd.workers.block.questions import answer
from envherd.workers.block.slot import (
    Begun,
    Sink,
    Slot,
    SlotEvent,
    SlotState,
    Step,
    compile_native,
    compile_step,
    store,
    why_not_stored,
)
from envherd.workers.errors import SpecError
from envherd.workers.info_rows import InfoWriter
from envherd.workers.infos import packer
from envherd.workers.messages import UNGUARDS, Ask, Prepare
from envherd.workers.options import BlockOptions, FactoryCall
from envherd.workers.protocol import RING, Flag, Op, Status, unpack
from envherd.workers.reply import Fault, InfosReply, LeftOut, Notice, SideValues

# Ints, because comparing and storing enum members costs more than the step of a small env.
_STEP_RESET = int(Op.STEP_RESET)
_RESET = int(Op.RESET)
_PREPARED = int(Flag.PREPARED)
_OK = int(Status.OK)
_STEP = int(SlotEvent.STEP)
_RUNS = int(SlotEvent.RUNS)

Report = Callable[[dict[str, Any]], None]
_Result = TypeVar("_Result")
#: The extras of a command for which the parent has sent none.
_NO_EXTRAS = Prepare(env_id=-1)


class Block:
    """The envs of one worker; see the module.

    Args:
        worker_id: whose words to write.
        adapters: env id -> adapter, ascending by env id.
        root_seed: from which the seeds of episodes are drawn.
        report: called with messages (dicts) for the parent (faults, side values, notices).
        options: of the executor that concern envs.
        passes: exceptions that reach the caller instead of counting as an env's: Ctrl-C, if the envs run in its
            process.

    Attributes:
        build_again: builds the env of an id by a factory call, and returns the new adapter.
        forget: `(adapter)`: that env is closed, and another one may take its place.
    """

    build_again: Callable[[int, FactoryCall], Adapter]
    forget: Callable[[Adapter], None]

    def __init__(
        self,
        worker_id: int,
        adapters: Mapping[int, Adapter],
        root_seed: int,
        report: Report,
        options: BlockOptions,
        *,
        passes: tuple[type[BaseException], ...] = (),
    ) -> None:
        self._passes = passes
        self.worker_id = worker_id
        self.slots = {
            i: Slot(i, adapter, check_finite=options.check_finite)
            for i, adapter in adapters.items()
        }
        self._report = report
        self._options = options
        for slot in self.slots.values():
            self._listen(slot)
        self.use_root_seed(root_seed)
        self._pack_info = packer(options.infos)
        self._words: dict[str, memoryview] = {}

    def _listen(self, slot: Slot) -> None:
        """Let an adapter report the entries of infos that it leaves out."""
        if self._options.info_keys is not None:
            slot.adapter.on_left_out = slot.leave_out

    def attach(self, slab: Slab) -> None:
        """Take these envs' rows of a slab."""
        self._words = {name: array.data for name, array in slab.words.items()}
        self._phase = self._words["phase"]
        for slot in self.slots.values():
            slot.place = slab.plan.place(slot.env_id)
            row = slot.place.row
            group = slab.groups[slot.place.group]
            slot.sinks = {RING: Sink(slot, group.of_row(row), root_follows=False)}
            slot.bind_inputs(group.inputs, row)
            if slab.infos is not None:
                slot.info_writer = InfoWriter(
                    slab,
                    slot.env_id,
                    partial(self._report_news, slot),
                )
            self._compile(slot, slot.sinks[RING])

    def _report_news(self, slot: Slot, message: dict[str, Any]) -> None:
        """Send a message, which the env's answer announces."""
        slot.has_news = True
        self._report(message)

    def attach_storage(self, target: int, storage: Storage) -> None:
        """Take these envs' rows of a rollout storage, addressed as `target` from now on."""
        for slot in self.slots.values():
            sink = slot.sinks[target] = Sink(
                slot,
                storage.of_row(*slot.place),
                root_follows=True,
            )
            if slot.is_built:
                self._compile(slot, sink)

    def _compile(self, slot: Slot, sink: Sink) -> None:
        """Compile the step of an env to a sink."""
        adapter = slot.adapter
        step = adapter.step
        # Only then, because reading the generators' states takes longer than the step of a small env.
        if slot.unwatched or self._options.isolate_rng:

            def step(action: list[Any]) -> StepValues:
                return self._with_own_rng(slot, "step", lambda: adapter.step(action))

        native = compile_native(
            slot,
            sink,
            self._words,
            step,
            notes_infos=self._pack_info is not None,
        )
        sink.native = native
        if native is None:
            sink.step = compile_step(slot, sink, self._words, step)
        else:
            sink.step = native.run
        # The loop in C calls the env itself, without what this block does around the call.
        if slot.unwatched or self._why_python(slot):
            sink.native = None

    def why_python(self) -> list[str]:
        """Return why the loop in Python steps the envs, in words for users; empty if the loop in C does."""
        return [
            *dict.fromkeys(
                why for slot in self.slots.values() for why in self._why_python(slot)
            )
        ]

    def _why_python(self, slot: Slot) -> list[str]:
        """Return why a step of one env does more than to call it and to write the result.

        Such a step reports at most an info; C leaves infos of unknown schemas to this block.
        """
        own = {
            "isolate_rng=True": self._options.isolate_rng,
            f"infos={reprlib.repr(self._options.info_keys)}": slot.adapter.on_left_out
            is not None,
        }
        return [
            *why_not_stored(slot),
            *(why for why, applies in own.items() if applies),
        ]

    def detach_storage(self, target: int) -> None:
        """Forget a rollout storage."""
        for slot in self.slots.values():
            slot.sinks.pop(target, None)

    def seed(self, root_seed: int, episodes: Sequence[int] | None = None) -> None:
        """Use a new root seed; the next reset of an env begins episode `episodes[env_id]`, or episode 0."""
        self.use_root_seed(root_seed)
        words = self._words["episode"]
        episodes = episodes or [0] * len(words)
        for env_id, slot in self.slots.items():
            words[env_id] = episodes[env_id]
            slot.rng_state = None
            if slot.is_built:
                slot.adapter.reseeded()

    def use_root_seed(self, root_seed: int) -> None:
        """Draw the seeds of episodes from a root seed."""
        self.root_seed = root_seed
        if self._options.episode_seeds:
            for env_id, slot in self.slots.items():
                number = self._options.first_env_id + env_id
                slot.use_seeds(root_seed, number)

    def take_place(
        self,
        worker_id: int,
        env_id: int,
        state: np.ndarray,
    ) -> None:
        """In a copy of the process, become the block of another worker's only env; `attach` must follow.

        Args:
            worker_id: of the worker.
            env_id: of its env, whose next episodes have that env's seeds.
            state: of the env before the fork.
        """
        (slot,) = self.slots.values()
        slot.state[:] = state
        slot.rename(env_id)
        self.worker_id = worker_id
        self.slots = {env_id: slot}
        self.use_root_seed(self.root_seed)

    def prepare(self, message: Prepare) -> None:
        """Keep the extras of an env's next command, and close an env that is to be built anew, if it is not closed.

        No reference to it remains: two instances at once may take more memory than there is.
        """
        slot = self.slots[message.env_id]
        slot.prepared = message
        if message.call is None:
            return
        # First: after an interrupt of the close, a reset builds by it.
        slot.call = message.call
        slot.move(SlotEvent.IS_BROKEN_OFF)
        if slot.is_built:
            # Before the env is closed, because C would otherwise step and reset an instance that is closed.
            for sink in slot.sinks.values():
                sink.native = sink.step = None
            slot.is_built = False
            # For the error about a worker that hangs or dies in the close.
            self._phase[self.worker_id] = slot.phase_words[_RESET]
            try:
                slot.adapter.close()
            except self._passes:
                raise
            # Some envs end their program, or are cancelled.
            except BaseException:
                pass
            # Refuses a process that the env has forked.
            slot.move(SlotEvent.IS_BROKEN_OFF)
            self._phase[self.worker_id] = 0
            self.forget(slot.adapter)
            slot.adapter = None

    def ask(self, message: Ask) -> dict[str, Any]:
        """Do something with envs that is not a step; return the answer."""
        reply = answer(
            message,
            self._adapter_of,
            pickles=self._options.infos == "pickle",
            passes=self._passes,
        )
        for position, env_id in enumerate(message.env_ids):
            slot = self.slots[env_id]
            if message.what in UNGUARDS:
                slot.move(SlotEvent.IS_ALLOWED)
            elif message.what == "save" and reply["kind"] == "values":
                reply["values"][position] |= {
                    "episode": int(self._words["episode"][env_id]),
                    "generators": slot.rng_state and seeding.as_plain(slot.rng_state),
                    "is_whole": slot.adapter.has_whole_state,
                }
            elif message.what == "restore" and reply["kind"] == "values":
                self._note_restored(slot, message.args[position])
        return reply

    def _adapter_of(self, env_id: int) -> Adapter:
        slot = self.slots[env_id]
        if not slot.is_built:
            self._rebuild(slot)
        adapter: Adapter = slot.adapter
        return adapter

    def _note_restored(self, slot: Slot, saved: Mapping[str, Any]) -> None:
        slot.move(SlotEvent.RUNS)
        if slot.spec.batch_shape:
            slot.last_done = np.zeros(slot.spec.batch_shape, bool)
        if saved.get("episode") is not None:
            self._words["episode"][slot.env_id] = saved["episode"]
        if saved.get("generators") is not None:
            slot.rng_state = seeding.from_plain(saved["generators"])

    def execute(
        self,
        env_id: int,
        command: int,
        begun: Step | None = None,
        reset: Begun | None = None,
    ) -> int:
        """Carry out one command for one env and return how it ended; report what the env raises.

        Args:
            env_id: which env.
            command: as `workers.protocol.pack` returns it.
            begun: if the loop in C has stepped the env: completes that step instead of making one.
            reset: if the loop in C has reset the env: returns the result of that reset.

        Returns:
            A `Status`, as an int.
        """
        op, target, column, flags = unpack(command)
        slot = self.slots[env_id]
        if slot.state[0] == SlotState.IN_FORK:
            # Raises, before anything is written: only the worker may answer.
            slot.move(_RUNS)
        # Extras that an interrupted call has sent for another reset.
        if op == _RESET and not flags & _PREPARED:
            slot.prepared = None
        self._phase[self.worker_id] = slot.phase_words[op]
        try:
            self._carry_out(
                slot,
                slot.sinks[target],
                op,
                column,
                begun,
                reset,
            )
            if slot.has_news or slot.has_side or slot.infos:
                return self._report_extras(slot)
            return _OK
        # Also SystemExit: it concerns this env, not the worker.
        except BaseException as error:
            slot.prepared = None
            slot.move(SlotEvent.IS_BROKEN_OFF)
            if isinstance(error, self._passes):
                raise
            self._keep_step(slot, op)
            if isinstance(error, SpecError) and slot.is_built and slot.adapter.origin:
                error = SpecError(
                    f"{error} Built by {slot.adapter.origin}."
                ).with_traceback(error.__traceback__)
            self._report(Fault.from_exception(env_id, slot.phase, error).to_plain())
            return int(Status.FAILED)

    def _carry_out(
        self,
        slot: Slot,
        sink: Sink,
        op: int,
        column: int,
        begun: Step | None,
        reset: Begun | None,
    ) -> None:
        """Carry out a command, unpacked; what the env raises passes."""
        if self._pack_info is not None:
            self._forget_infos(slot, op)
        if op == _RESET:
            # Without an episode to continue, no row can be left out.
            mask = None if slot.is_new else slot.reset_mask
            self._reset(slot, sink, column, mask, reset)
            return
        slot.phase = "step"
        if begun is None:
            slot.move(_STEP)
            observation = sink.step(column)
        else:
            observation = begun(column)
        # If C has also reset the env, it has noted the step's info before, and `adapter.info` is that of the reset.
        if self._pack_info is not None and reset is None:
            self._note_info(slot, "next")
        if op == _STEP_RESET and slot.has_ended:
            # They wait for the reset, in which the env may change them.
            if slot.has_side:
                slot.side["next"][:] = copy.deepcopy(slot.side["next"])
            mask = slot.last_done if slot.spec.batch_shape else None
            self._reset(slot, sink, column + sink.root_follows, mask, reset)
        elif sink.root_follows and slot.has_ended and column + 1 < sink.num_columns:
            self._write_root(slot, sink, column + 1, observation)

    def _forget_infos(self, slot: Slot, op: int) -> None:
        """Forget the info that a command will not note; but a RESET that completes a step keeps the step's."""
        if op != _RESET:
            slot.clear_infos("root")
        elif slot.prepared is None or slot.prepared.call is None:
            slot.clear_infos("next")

    def _keep_step(self, slot: Slot, op: int) -> None:
        """If only the reset after a step has raised, report the step's data besides its row; otherwise drop them."""
        if op != _STEP_RESET or slot.phase != "reset":
            slot.clear_infos("next", "root")
            # Otherwise the report of the next reset would have the values of this step.
            slot.side["next"][:] = [None] * len(slot.side["next"])
            return
        slot.clear_infos("root")
        if slot.infos or slot.has_side:
            self._report_extras(slot)

    def _report_extras(self, slot: Slot) -> int:
        """Report an env's data for the parent besides its rows."""
        if slot.infos:
            self._report(
                InfosReply(
                    slot.env_id,
                    slot.infos.pop("next", None),
                    slot.infos.pop("root", None),
                ).to_plain()
            )
        if slot.has_side:
            self._report(
                SideValues(
                    slot.env_id,
                    slot.side["next"],
                    slot.side["root"],
                ).to_plain()
            )
        if slot.left_out:
            self._report(LeftOut(slot.env_id, slot.left_out).to_plain())
            slot.left_out = {}
        slot.has_news = False
        return int(Status.SIDE)

    def _reset(
        self,
        slot: Slot,
        sink: Sink,
        column: int,
        mask: np.ndarray | None,
        begun: Begun | None = None,
    ) -> None:
        slot.phase = "reset"
        self._phase[self.worker_id] = slot.phase_words[_RESET]
        inner = None
        if mask is not None and not mask.all():
            inner = mask.copy()
        observation = self._next_episode(slot, inner, begun)
        slot.move(_RUNS)
        # After the env has returned: the loop tells by this word that a command included a reset.
        self._words["resets"][slot.env_id] += 1
        if self._pack_info is not None:
            self._note_info(slot, "root")
        if slot.spec.batch_shape:
            slot.last_done = inner is not None and slot.last_done & ~inner
            # Other rows have ended and still wait for their reset.
            if np.any(slot.last_done):
                slot.move(SlotEvent.ENDS)
        if column < sink.num_columns:
            self._write_root(slot, sink, column, observation)

    def _next_episode(
        self,
        slot: Slot,
        mask: np.ndarray | None,
        begun: Begun | None,
    ) -> list[Any]:
        """Reset an env, or the rows of it that a mask names, for its next episode; return its observation."""
        # The loop in C has made the reset, with all that follows here.
        if begun is not None:
            return begun()
        prepared = slot.prepared or _NO_EXTRAS
        # Before anything that may raise: extras are for one reset.
        slot.prepared = None
        if not slot.is_built:
            self._rebuild(slot)
        episodes = self._words["episode"]
        episode = episodes[slot.env_id]
        seed = slot.seed_of(episode)
        if prepared.has_seed:
            seed = prepared.seed
            slot.adapter.reseeded()
        options = prepared.options
        # Before the reset, as in C: one that raises has used up its number and its seed.
        episodes[slot.env_id] = episode + 1
        adapter = slot.adapter
        return self._with_own_rng(
            slot, "reset", lambda: adapter.reset(seed, options, mask)
        )

    def _rebuild(self, slot: Slot) -> None:
        """Put a new instance in the place of a closed env. If that fails, what needs the env next tries again."""
        outer = seeding.caller_state()
        self._seed_globals(slot)
        try:
            adapter = self.build_again(slot.env_id, slot.call)
        finally:
            seeding.restore_globals(outer)
        # Refuses a process that the factory has forked.
        slot.move(SlotEvent.IS_BROKEN_OFF)
        if adapter.spec != slot.spec:
            adapter.close()
            self.forget(adapter)
            raise SpecError(
                f"expected a new instance with the spec of the one before, got another: "
                f"{slot.spec.difference(adapter.spec)}. Make the factory build equal envs at every call."
            )
        slot.adapter = adapter
        slot.rng_state = None
        self._listen(slot)
        for sink in slot.sinks.values():
            self._compile(slot, sink)
        slot.is_built = True

    def _seed_globals(self, slot: Slot) -> None:
        """Seed the global generators as for the constructor of an env."""
        seeding.seed_globals(
            seeding.build_seed(
                self.root_seed,
                self._options.first_env_id + slot.env_id,
            )
        )

    def _note_info(self, slot: Slot, section: str) -> None:
        """Keep the env's info of the step or reset just made."""
        assert self._pack_info is not None
        slot.clear_infos(section)
        info = slot.adapter.info
        # Most infos are rows or empty, and need no message.
        if (slot.info_writer is not None and slot.info_writer.write(section, info)) or (
            info.__class__ is dict and not info
        ):
            return
        packed, left_out = self._pack_info(info)
        if packed is not None:
            slot.infos[section] = packed
        if left_out:
            slot.leave_out(left_out)

    def _write_root(
        self,
        slot: Slot,
        sink: Sink,
        column: int,
        observation: list[Any],
    ) -> None:
        store(sink.root_observation, column, observation, "observation")
        for flag, source in zip(
            sink.root_done,
            self._root_flags(slot, sink, column),
            strict=True,
        ):
            flag[column] = source
        if sink.root_nested:
            store(sink.root_nested, column, slot.adapter.done_values(), "done")

    def _root_flags(self, slot: Slot, sink: Sink, column: int) -> list[Any]:
        """Return a root's done, terminated and truncated: all False unless (part of) the env has ended."""
        if not slot.has_ended:
            return [False, False, False]
        if sink.root_follows and column > 0:
            return [flag[column - 1] & slot.last_done for flag in sink.next_done]
        return [
            slot.last_done,
            slot.last_terminated & slot.last_done,
            slot.last_truncated & slot.last_done,
        ]

    def _with_own_rng(
        self,
        slot: Slot,
        phase: str,
        call: Callable[[], _Result],
    ) -> _Result:
        """Call an env, its global generators' state swapped in (isolated) or watched (first call only)."""
        is_watched = phase in slot.unwatched
        if not (is_watched or self._options.isolate_rng):
            return call()
        slot.unwatched.discard(phase)
        if is_watched and not slot.unwatched:
            for sink in slot.sinks.values():
                self._compile(slot, sink)
        outer = before = seeding.globals_state()
        if self._options.isolate_rng:
            if slot.rng_state is None:
                self._seed_globals(slot)
            else:
                seeding.restore_globals(slot.rng_state)
            before = seeding.globals_state()
        result = call()
        after = seeding.globals_state()
        drawn = seeding.drawn_between(before, after)
        if self._options.isolate_rng:
            slot.rng_state = after
            seeding.restore_globals(outer)
        elif drawn:
            slot.has_news = True
            self._report(Notice(slot.env_id, phase, drawn).to_plain())
        return result
