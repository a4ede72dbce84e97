"""An executor whose worker processes are simulated in this process: real words, doorbells, blocks and loops.

A test decides when each worker carries out its commands, and when it dies, so every order of events can be repeated.
The caller's side is the real one, with the C extension if that was built.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np

from envherd.executor import ExecutorOptions
from envherd.executor.batched import BatchedEnv
from envherd.executor.guests.portable import PortableCrew, PortablePool
from envherd.executor.pools import commands, worker_pool
from envherd.executor.pools.worker_pool import WorkerPool
from envherd.executor.processes.mail import Equipment, await_frame
from envherd.executor.sending.blueprint import Blueprint, serial_blueprint
from envherd.shm.slab import Slab, SlabPlan, Storage
from envherd.shm.specs import Discrete, EnvSpec, LeafSpec
from envherd.shm.sync import Bell, Bells, Doorbell
from envherd.workers import messages
from envherd.workers.adapters.base import Adapter, StepValues
from envherd.workers.block.block import Block
from envherd.workers.current import WorkerInfo
from envherd.workers.process.loop import Loop, loop_class
from envherd.workers.testing.envs import PlainAdapter, PlainEnv

LEAF = LeafSpec(("observation",), (1,), "int64")
GOES_ON, ENDS, RAISES, RESET_RAISES = range(4)  # actions


class Fate(Enum):
    """What a worker does with the commands of one call: at once, or when the waiting caller looks at the workers."""

    PROMPT = "at once"
    LATE = "late"
    DIES_BEFORE = "dies before it carries them out"
    DIES_AFTER = "carries them out, and dies"


class Scripted(PlainEnv):
    """Observes a number that no other row has; its actions say what it does.

    Attributes:
        latest: the number of its latest row; None before the first.
        is_in_episode: whether it was reset, and has neither ended nor raised since.
        has_ended: whether its latest row is done.
        stepped: the number of its latest step's row; None if it raised, or was handed out.
        faults: calls that it must not get, but got.
        task: a number; its factory passes it.
    """

    spec = EnvSpec(
        observation=(LEAF,),
        action=(LeafSpec(("action",), (), "int64", Discrete(4)),),
        family="plain",
    )
    num_rows = 0
    #: Rows of steps after which the reset raised. The worker may have died then, and a new instance knows no step.
    unreset: ClassVar[set[int | None]] = set()

    def __init__(self, task: float) -> None:
        self.task = task
        self.latest: int | None = None
        self.stepped: int | None = None
        self.is_in_episode = self.has_ended = self._reset_raises = False
        self.faults: list[str] = []

    def _row(self) -> list[Any]:
        Scripted.num_rows += 1
        self.latest = Scripted.num_rows
        return [np.array([self.latest])]

    def reset(
        self, seed: int | None, options: Mapping[str, Any] | None = None
    ) -> list[Any]:
        self.is_in_episode = False
        if self._reset_raises:
            self._reset_raises = False
            Scripted.unreset.add(self.stepped)
            raise ValueError("a reset that raises")
        self.is_in_episode, self.has_ended = True, False
        return self._row()

    def step(self, action: list[Any]) -> StepValues:
        if not self.is_in_episode:
            self.faults.append("a step of an instance that is not in an episode")
        self._reset_raises = action[0] == RESET_RAISES
        if action[0] == RAISES:
            # An earlier step may not have been handed out.
            self.is_in_episode, self.stepped = False, None
            raise ValueError("a step that raises")
        self.has_ended = bool(action[0] in (ENDS, RESET_RAISES))
        self.is_in_episode = not self.has_ended
        row = self._row()
        self.stepped = self.latest
        return row, [0.0], self.has_ended, False

    def close(self) -> None:
        self.is_in_episode = False


class SimulatedWorker:
    """In place of a `WorkerProcess`, its channel, and the process.

    Attributes:
        envs: env id -> env.
        is_alive: whether it has not died.
        frames: what it has written; first that it has built its envs.
    """

    root_seed = pid = num_queued = 0
    is_attached = is_in_frame = False
    gpu: str | None = None
    wake: Callable[[], None]

    def __init__(self, worker_id: int, generation: int, crew: "SimulatedCrew") -> None:
        block = crew.blueprint.blocks[worker_id]
        self.worker_id = worker_id
        self.generation = generation
        self.info = WorkerInfo(
            worker_id=worker_id,
            generation=generation,
            num_workers=len(crew.blueprint.blocks),
            env_ids=block,
        )
        self.channel = self
        self.on_row_frame = crew.on_row_frame
        self._crew = crew
        self.is_alive = True
        self._factories = {i: crew.blueprint.calls[i].factory for i in block}
        self.envs = {env_id: factory() for env_id, factory in self._factories.items()}
        self.frames: list[dict[str, Any]] = [{"kind": "specs"}]
        self._inbox: deque[tuple[Any, Any]] = deque()
        self._num_read = 0
        adapters = {env_id: PlainAdapter(env) for env_id, env in self.envs.items()}
        self._block = Block(
            worker_id, adapters, 0, self.frames.append, crew.options.for_block()
        )
        self._block.build_again, self._block.forget = self._build_again, lambda _: None

    def cut_log(self) -> None:
        """Do nothing: it has no log."""

    def _build_again(self, env_id: int, call: Any) -> Adapter:
        before, rebuilt = self.envs[env_id], call.factory()
        # The row of a step is not handed out yet.
        rebuilt.stepped, rebuilt.faults = before.stepped, before.faults
        self.envs[env_id] = rebuilt
        return PlainAdapter(rebuilt)

    def queue_message(self, message: Any, _: Any = ()) -> None:
        """Keep a message for the loop, with the memory that it names: a process keeps what it has mapped."""
        memory = None
        if isinstance(message, messages.AttachStorage):
            memory = self._crew.equipment._storages[message.target].segment.array()
        self._inbox.append((message, memory))
        self.num_queued += 1
        if isinstance(message, messages.Attach):
            self._attach(message.plan)

    def _attach(self, plan: SlabPlan) -> None:
        """Map the slab, and make the loop that serves from then on."""
        segment: Any = self._crew.equipment._segment
        slab = Slab(plan, segment.array())
        self._block.attach(slab)
        done = self._crew.done
        self._go: Bell = (
            self._crew.go[self.worker_id]
            if done
            else Doorbell(slab.buffer, plan.go_offset(self.worker_id))
        )
        ring: Bell = done or Doorbell(slab.buffer, plan.bells_offset)
        self._serve = (Loop if done else loop_class())(
            self._block, slab, Bells(self._go, ring), self._read, lambda: None, 0
        ).server()
        self.frames.append({"kind": "attached"})

    def _read(self) -> int:
        message, memory = self._inbox.popleft()
        if isinstance(message, messages.Prepare):
            self._block.prepare(message)
        elif isinstance(message, messages.Ask):
            self.frames.append(self._block.ask(message))
        elif isinstance(message, messages.AttachStorage):
            self._block.attach_storage(message.target, Storage(message.plan, memory))
        elif isinstance(message, messages.DetachStorage):
            self._block.detach_storage(message.target)
        self._num_read += 1
        return self._num_read

    def serve(self) -> None:
        """Carry out what its doorbell has announced."""
        while self.is_alive and self.is_attached and self._go.try_wait():
            self._serve()

    def flush_nowait(self) -> bool:
        return True

    def drain_nowait(self) -> list[dict[str, Any]]:
        return self.frames

    def kill(self) -> None:
        self.is_alive = False

    def has_exited(self) -> bool:
        return not self.is_alive

    def exit_description(self) -> str:
        return "exit code 3"

    def exit_code(self) -> int:
        return 3

    def last_lines(self) -> str:
        return ""

    def wait_for_any(self, *_: Any) -> None:
        """Raise: the caller waits for an answer that nobody will give."""
        raise AssertionError(f"worker {self.worker_id} does not answer")

    stack = wait_for_any

    def release(self) -> None:
        """Do nothing: it has no descriptors."""


class SimulatedCrew:
    """In place of a `Crew`."""

    is_closing = False
    # Of the portable pool: the doorbells of the workers, and the caller's.
    go: Sequence[Any] = ()
    done: Any = None

    def __init__(
        self,
        blueprint: Blueprint,
        options: ExecutorOptions,
        on_row_frame: Callable[[Any], None],
    ) -> None:
        self.blueprint, self.options, self.on_row_frame = (
            blueprint,
            options,
            on_row_frame,
        )
        self.workers: list[Any] = []
        self.equipment = Equipment(self.workers, 0, options)
        self.workers += [
            SimulatedWorker(worker_id, 0, self)
            for worker_id in range(len(blueprint.blocks))
        ]
        self.envs_in_python: list[str] = []

    def start(self) -> list[EnvSpec]:
        return [
            spec
            for worker_id in range(len(self.workers))
            for spec in self.collect_specs(worker_id)
        ]

    def collect_specs(self, worker_id: int) -> list[EnvSpec]:
        await_frame(self.workers[worker_id], "build", None)
        return [Scripted.spec for _ in self.blueprint.blocks[worker_id]]

    def replace(self, worker_id: int) -> None:
        generation = self.workers[worker_id].generation + 1
        self.workers[worker_id] = SimulatedWorker(worker_id, generation, self)

    def close(self, timeout_s: float) -> None:
        self.equipment.close()
        for bell in (*self.go, self.done) if self.done else ():
            bell.close()


class SimulatedPool(WorkerPool):
    """A `WorkerPool` over a `SimulatedCrew`.

    Attributes:
        fates: worker id -> what it does with the commands of the next calls; PROMPT unless it has an entry.
    """

    crew: Any

    def __init__(
        self, blocks: Sequence[Sequence[int]], options: ExecutorOptions
    ) -> None:
        plan = serial_blueprint([partial(Scripted, 0)] * sum(map(len, blocks)), None, 0)
        blueprint = replace(plan, blocks=tuple(map(tuple, blocks)))
        super().__init__(blueprint, options)
        crew = self.crew
        self.crew = SimulatedCrew(blueprint, options, self.outcome.take)
        if isinstance(crew, PortableCrew):
            self.crew.go = crew.go
            self.crew.done = crew.done
        self.fates: dict[int, Fate] = {}
        self.start()
        restarts: Any = self.supervisor._restarts
        restarts.next_delay_s = lambda _: 0.0

    def run_prompt(self) -> None:
        """Let the workers that answer at once carry out their commands."""
        for worker in self.crew.workers:
            if self.fates.get(worker.worker_id, Fate.PROMPT) is Fate.PROMPT:
                worker.serve()

    def _run_late(self) -> None:
        for worker in list(self.crew.workers):
            fate = self.fates.pop(worker.worker_id, Fate.PROMPT)
            if fate is not Fate.DIES_BEFORE:
                worker.serve()
            if fate in (Fate.DIES_BEFORE, Fate.DIES_AFTER):
                worker.kill()

    def _look_around(self) -> None:
        self._run_late()
        super()._look_around()

    def _answer(self, *question: Any) -> Any:
        self._run_late()
        return super()._answer(*question)

    def _after(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that makes a call, and lets workers answer it."""

        def called(*args: Any) -> Any:
            result = call(*args)
            self.run_prompt()
            return result

        return called

    def submit(self, *args: Any) -> None:
        self._after(super().submit)(*args)

    def compile(self, facts: Mapping[str, Any]) -> Any:
        exchange = super().compile(facts)

        def step(*given: Any) -> Any:
            draft = self._after(given[-1] or (lambda _: None))
            return exchange.step(*given[:-1], draft)

        own = {
            name: getattr(exchange, name)
            for name in ("may_step", "land", "wait", "take", "roots")
        }
        return SimpleNamespace(
            **own,
            step=step,
            give=self._after(exchange.give),
            send=self._after(exchange.send),
        )

    @property
    def envs(self) -> list[Scripted]:
        """The present instance of each env."""
        return [env for worker in self.crew.workers for env in worker.envs.values()]


class SimulatedPortablePool(SimulatedPool, PortablePool):
    """A `PortablePool` over a `SimulatedCrew`."""


def simulated(
    monkeypatch: Any,
    blocks: Sequence[Sequence[int]],
    *,
    pool: type[SimulatedPool] = SimulatedPool,
    **options: Any,
) -> Any:
    """Return an executor whose workers are simulated: those of `blocks`, the env ids of each."""
    for module in (commands, worker_pool):  # nobody else answers meanwhile
        monkeypatch.setattr(module, "LOOK_S", 1e-6)
    monkeypatch.setattr(worker_pool, "_LOOK_NS", 1000)
    monkeypatch.setattr(worker_pool, "_LOOK_ANYWAY_S", 1e9)
    # Far above any pause of a busy machine.
    settings = ExecutorOptions(stall_log_s=20.0, **options)
    return BatchedEnv(
        pool(blocks, settings), seed=0, device=None, copy=True, options=settings
    )
