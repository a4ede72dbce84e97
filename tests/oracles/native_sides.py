"""Programs of commands, run by the specification in Python and by C, and compared after every command."""

import copy
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from unittest.mock import patch

import gymnasium
import numpy as np

from envherd.shm.slab import Slab, Storage, plan_slab, plan_storage
from envherd.shm.sync import DOORBELL_BYTES, Bells, Doorbell
from envherd.workers.adapters.base import Adapter
from envherd.workers.block import block as block_module
from envherd.workers.block.block import Block
from envherd.workers.info_rows import InfoWriter, Schema
from envherd.workers.options import BlockOptions
from envherd.workers.process.loop import Loop, NativeLoop
from envherd.workers.protocol import pack

#: The specification; the loop in Python with steps in C, as in a `SerialEnv`; the loop in C.
WAYS = ("python", "step", "loop")
ROOT_SEED = 7
NUM_FRAMES, NUM_COLUMNS, TARGET = 3, 4, 5
#: Words with durations or process ids, which differ between runs.
_CLOCKS = {"busy_ns", "since_ns", "answered_ns", "reset_ns", "step_bins", "pid"}


class Side:
    """Worker 1 of two, which serves all envs but the first; the test is the parent.

    Args:
        adapters: of its envs, whose ids are 1, 2, ...
        way: one of `WAYS`.
        options: of the block.

    Attributes:
        executed: ids of the commands that `Block.execute` carries out, also in part.
    """

    def __init__(
        self,
        adapters: list[Adapter],
        way: str = "loop",
        options: BlockOptions | None = None,
    ) -> None:
        self.adapters = dict(enumerate(adapters, start=1))
        self.envs = [adapter.env for adapter in adapters]
        options = options or BlockOptions()
        plan = plan_slab(
            [adapters[0].spec] + [adapter.spec for adapter in adapters],
            num_workers=2,
            num_ring=NUM_FRAMES,
            has_infos=options.infos != "drop",
        )
        self.slab = Slab(plan, np.zeros(plan.nbytes, np.uint8))
        self.words = self.slab.words
        self.reports: list[Any] = []
        self.executed: list[int] = []
        self.block = _NotedBlock(
            1, self.adapters, ROOT_SEED, self.reports.append, options
        )
        self.block.is_in_c, self.block.executed = way != "python", self.executed
        self.block.attach(self.slab)
        self.storage_plan = plan_storage(plan, NUM_COLUMNS)
        self.storage_bytes = np.zeros(self.storage_plan.nbytes, np.uint8)
        self.block.attach_storage(
            TARGET, Storage(self.storage_plan, self.storage_bytes)
        )
        self.bells = np.zeros(2 * DOORBELL_BYTES, np.uint8)
        self.go, self.done = (
            Doorbell.create(self.bells, at) for at in (0, DOORBELL_BYTES)
        )
        self.mail: list[Any] = []
        self.num_read = self.num_tidied = 0
        kind = NativeLoop if way == "loop" else Loop
        self.loop = kind(
            self.block,
            self.slab,
            Bells(self.go, self.done),
            self._read_mail,
            self._tidy,
        )
        self.native = self.loop.make() if isinstance(self.loop, NativeLoop) else None
        for env in self.envs:
            env.phase = lambda phase=self.words["phase"]: int(phase[1])

    def _read_mail(self) -> int | None:
        self.num_read += 1
        message = self.mail.pop(0)
        return None if message is None else (message(), self.num_read)[1]

    def _tidy(self) -> None:
        self.num_tidied += 1

    def send(self, *messages: Callable[[], Any] | None) -> None:
        """Send functions, or None to leave."""
        self.mail += messages
        self.words["mail_seq"][1] += len(messages)

    def act(self, env_id: int, values: Iterable[np.ndarray]) -> None:
        """Write the action of an env, leaf by leaf."""
        group, row = self.slab.plan.place(env_id)
        for leaf, value in zip(self.adapters[env_id].spec.action, values, strict=True):
            self.slab.groups[group].inputs["input", *leaf.key][row] = value

    def command(
        self,
        op: int,
        env_ids: list[int],
        target: int = 0,
        column: int = 0,
        flags: int = 0,
    ) -> None:
        """Write commands, in the order of the ids."""
        for env_id in env_ids:
            self.words["command"][env_id] = pack(op, target, column, flags)
            self.words["command_seq"][env_id] = self.words["command_seq"].max() + 1

    def do(self, deed: Any, seed: int = 0) -> list[int]:
        """Send a function of this side; or write random actions and a command, and serve it.

        Returns:
            The ids of the envs whose commands Python has carried out.
        """
        self.executed.clear()
        if callable(deed):
            self.send(functools.partial(deed, self))
            return []
        for env_id, adapter in self.adapters.items():
            rng = np.random.default_rng(seed)
            self.act(env_id, [_action(rng, leaf) for leaf in adapter.spec.action])
        self.command(*deed)
        self.serve()
        return [*self.executed]

    def serve(self, num_tokens: int = 1) -> bool:
        """Let the loop use some tokens; return whether it goes on."""
        serve = self.loop.server() if self.native is None else self.native.serve
        return all(serve() for _ in range(num_tokens))

    def num_rings(self) -> int:
        """Return how often the loop has rung since the last time."""
        return sum(1 for _ in iter(self.done.try_wait, False))  # noqa: FBT003  # the value that ends it

    def owing(self) -> list[int]:
        """Return the envs whose commands have no answer yet."""
        return np.flatnonzero(
            self.words["command_seq"] != self.words["reply_seq"]
        ).tolist()

    def state(self) -> dict[str, Any]:
        """Return all state that a parent can see, what the envs were passed, and the number of rings."""
        state: dict[str, Any] = {
            name: word.tolist()
            for name, word in self.words.items()
            if name not in _CLOCKS
        }
        state["samples"] = int(self.words["step_bins"].sum())
        start = self.slab.plan.groups[0].inputs.nbytes
        state["frames"] = self.slab.buffer[start : self.slab.plan.ring_nbytes].tobytes()
        state["storage"] = self.storage_bytes.tobytes()
        state["reports"] = [
            {k: v for k, v in report.items() if k != "traceback"}
            for report in self.reports
        ]
        state["rings"] = self.num_rings()
        slots = self.block.slots.values()
        state["slots"] = [(int(s.state[0]), s.prepared) for s in slots]
        state["rows"] = self._infos()
        state["passed"] = [env.seen for env in self.envs]
        state["infos"] = [
            (type(adapter.info), adapter.info) for adapter in self.adapters.values()
        ]
        return state

    def _infos(self) -> list[Any]:
        """Return the infos in rows of the slab."""
        news = [report for report in self.reports if report["kind"] == "schema"]
        schemas = {
            schema.id: schema
            for schema in (Schema(report["root"], report["nbytes"]) for report in news)
        }
        found = []
        for place, schema_id in enumerate(self.words["info_ids"].tolist()):
            if schema_id:
                schema, row = (
                    schemas[schema_id],
                    self.slab.infos[place // 2, place % 2 : place % 2 + 1],  # type: ignore[index]  # there are infos
                )
                found.append((place, fingerprint(schema.infos(schema.records(row)))))
        return found


class _NotedBlock(Block):
    """Notes the commands that it carries out; steps in Python if that is wanted."""

    is_in_c: bool
    executed: list[int]

    def _compile(self, slot: Any, sink: Any) -> None:
        if self.is_in_c:
            super()._compile(slot, sink)
            return
        with patch.object(block_module, "compile_native", lambda *_, **__: None):
            super()._compile(slot, sink)

    def attach(self, slab: Slab) -> None:
        super().attach(slab)
        if not self.is_in_c:
            for slot in self.slots.values():
                slot.info_writer = slot.info_writer and _PythonWriter(
                    slab, slot.env_id, slot.info_writer._report
                )

    def execute(self, env_id: int, *command: Any) -> int:
        self.executed.append(env_id)
        return super().execute(env_id, *command)


class _PythonWriter(InfoWriter):
    """Writes infos in Python."""

    def write(self, section: str, info: Any) -> bool:
        with patch.object(Schema, "in_c", lambda self: self):
            return super().write(section, info)


def _action(rng: np.random.Generator, leaf: Any) -> np.ndarray:
    is_index = np.dtype(leaf.dtype).kind in "iu"
    return (
        rng.integers(0, 2, leaf.shape) if is_index else rng.random(leaf.shape)
    ).astype(leaf.dtype)


# Takes long, and tracebacks differ between ways.
@patch("traceback.format_exception", lambda error: [str(error)])
def run(
    make: Callable[[], list[Adapter]],
    program: Iterable[Any],
    options: BlockOptions | None = None,
) -> list[Any]:
    """Run a program in all ways, and require that nothing differs after any of its commands.

    Args:
        make: creates the adapters of one way.
        program: of commands (see `Side.command`), and of functions that a message brings before the next command.
        options: of the blocks.

    Returns:
        The side in C, and for each command the ids of the envs for which its loop has called Python.
    """
    sides = [Side(make(), way, options) for way in WAYS]
    executed = []
    for seed, deed in enumerate(program):
        executed += [side.do(deed, seed) for side in sides][-1:]
        if callable(deed):
            executed.pop()
            continue
        expected = sides[0].state()
        for side in sides[1:]:
            got = side.state()
            for name, value in expected.items():
                assert got[name] == value, name
    assert all(is_as_passed(env) for side in sides for env in side.envs)
    return [sides[-1], executed]


def fingerprint(value: Any) -> Any:
    """Return a fingerprint of a value, including its types and bits."""
    if isinstance(value, dict):
        return "dict", [(key, fingerprint(item)) for key, item in value.items()]
    if isinstance(value, (tuple, list)):
        return type(value).__name__, [fingerprint(item) for item in value]
    if isinstance(value, (np.ndarray, np.generic)):
        array = np.asarray(value)
        flags = (
            (value.flags.writeable, value.flags.owndata)
            if isinstance(value, np.ndarray)
            else ()
        )
        return (
            type(value).__name__,
            array.dtype.str,
            array.shape,
            array.strides,
            array.tobytes(),
            flags,
        )
    return type(value).__name__, value


class Scripted(gymnasium.Env[Any, Any]):
    """Returns random values of its space; a script changes the results of steps.

    Args:
        observation_space: of its observations.
        action_space: of its actions.
        script: takes each step's five values and returns what the env does; used up from the front, then none.
        length: steps of an episode.
        resets: the same as `script` for the two values of each reset.

    Attributes:
        seen: what it was passed, with the worker's phase at that time.
        kept: the actions.
        phase: returns the worker's phase.
    """

    def __init__(
        self,
        observation_space: Any,
        action_space: Any,
        script: Sequence[Callable[[Any], Any]] = (),
        length: int = 5,
        resets: Sequence[Callable[[Any], Any]] = (),
    ) -> None:
        self.observation_space, self.action_space = (
            copy.deepcopy(observation_space),
            copy.deepcopy(action_space),
        )
        self.script, self.resets = list(script), list(resets)
        self.np_random = np.random.default_rng(0)  # for episodes without a seed
        self.length = length
        self.seen: list[Any] = []
        self.kept: list[Any] = []
        self.phase: Callable[[], int] = int
        self.num_steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.observation_space.seed(int(self.np_random.integers(2**31)))
        self.seen.append(("reset", seed, options, self.phase()))
        self.num_steps = 0
        given = self.observation_space.sample(), {"seed": seed}
        return self.resets.pop(0)(given) if self.resets else given

    def step(self, action: Any) -> Any:
        self.seen.append((fingerprint(action), self.phase()))
        self.kept.append(action)
        self.num_steps += 1
        ended = self.num_steps >= self.length
        result = (
            self.observation_space.sample(),
            float(self.num_steps) / 3,
            ended,
            False,
            {"at": self.num_steps},
        )
        return self.script.pop(0)(result) if self.script else result


def is_as_passed(env: Any) -> bool:
    """Whether nothing has changed the actions of an env since: an env may keep them."""
    steps = [
        seen for seen in env.seen if isinstance(seen, tuple) and seen[0] != "reset"
    ]
    return [fingerprint(action) for action in getattr(env, "kept", ())] == [
        seen for seen, _phase in steps
    ]
