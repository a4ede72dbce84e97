"""The batch of envs that the contract drives, and an implementation that runs in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from envherd.shm.slab import Slab, plan_slab
from envherd.shm.specs import EnvSpec, Key
from envherd.workers import plain, seeding
from envherd.workers.block.block import Block
from envherd.workers.build import Builder
from envherd.workers.errors import EnvError
from envherd.workers.messages import Ask, Prepare
from envherd.workers.options import BlockOptions
from envherd.workers.protocol import RING, Op, pack

#: One env's leaves: copies of arrays, and side-channel values.
Row = dict[Key, Any]

MakeEnv = Callable[[], Any]


class Batch(Protocol):
    """N envs under test, wherever they run.

    Attributes:
        specs: one for each env.
        enforces_rule_4: whether it refuses to step an ended env (as the executor does).
    """

    specs: Sequence[EnvSpec]
    enforces_rule_4: bool

    def seed(self, root_seed: int) -> None:
        """Use a new root seed: the next reset of every env begins its episode 0."""

    def reset(self, mask: np.ndarray | None) -> list[Row]:
        """Reset the envs in `mask` (bool `[N, *batch_shape, 1]`; None for all); return the roots of ALL envs."""

    def step(self, actions: list[list[Any]], *, resets_ended: bool) -> tuple[list[Row], list[Row]]:
        """Step all envs; return `(next rows, root rows)`: the roots after the step (and reset)."""

    def save(self) -> list[Any] | None:
        """Return the states of all envs, or None if they cannot be saved."""

    def restore(self, states: list[Any]) -> None:
        """Put all envs back into the states that `save` has returned."""

    def count_calls(self) -> tuple[int, int] | None:
        """Return how often the native envs were stepped and reset so far; None if that cannot be counted."""

    def close(self) -> None:
        """Close the envs."""


#: `(make_env, num_envs, num_workers, root seed) -> Batch`
MakeBatch = Callable[[MakeEnv, int, int, int], Batch]


class BlockBatch:
    """Runs envs in this process as a worker runs them: adapters, blocks and a slab, but no processes.

    Args:
        make_env: builds one env.
        num_envs: N.
        num_workers: over how many blocks they are spread.
        root_seed: see `envherd.workers.seeding`.
        options: of the blocks.

    Attributes:
        envs: as the factory has returned them.
        generators: global generators that the envs have drawn from.
        is_alone: whether a process can have only one such env.
    """

    enforces_rule_4 = False
    _NUM_FRAMES = 4

    def __init__(
        self,
        make_env: MakeEnv,
        num_envs: int,
        num_workers: int,
        root_seed: int,
        options: BlockOptions = BlockOptions(),  # noqa: B008  # frozen
    ) -> None:
        self._options = options
        self.generators: set[str] = set()
        self._calls = _CallCounter()
        self._faults: list[dict[str, Any]] = []
        self._side: dict[int, dict[str, Any]] = {}
        self._columns = [0] * num_envs
        self._in_root = [True] * num_envs
        blocks = np.array_split(np.arange(num_envs), num_workers)
        adapters = self._build(make_env, blocks, root_seed)
        self._adapters = [adapters[i] for i in range(num_envs)]
        self.envs = [adapter.env for adapter in self._adapters]
        self.is_alone = self._adapters[0].is_alone
        self.specs = [adapter.spec for adapter in self._adapters]
        plan = plan_slab(self.specs, num_workers, self._NUM_FRAMES)
        self._slab = Slab(plan, np.zeros(plan.nbytes, np.uint8))
        self._places = [plan.place(env_id) for env_id in range(num_envs)]
        self._block_of: dict[int, Block] = {}
        for worker_id, ids in enumerate(blocks):
            block = Block(worker_id, {i: adapters[i] for i in ids.tolist()}, root_seed, self._take, options)
            block.attach(self._slab)
            self._block_of.update(dict.fromkeys(ids.tolist(), block))

    def _build(self, make_env: MakeEnv, blocks: list[np.ndarray], root_seed: int) -> dict[int, Any]:
        adapters = {}
        before = seeding.caller_state()
        try:
            for ids in blocks:
                builder = Builder()
                for env_id in ids.tolist():
                    seeding.seed_globals(seeding.build_seed(root_seed, self._options.first_env_id + env_id))
                    adapters[env_id] = builder.adopt(make_env, {})
                    self._calls.watch(adapters[env_id].env)
        finally:
            seeding.restore_caller(before)
        return adapters

    def seed(self, root_seed: int) -> None:
        for block in set(self._block_of.values()):
            block.seed(root_seed)

    def reset(self, mask: np.ndarray | None) -> list[Row]:
        for env_id in range(len(self.specs)):
            rows = True if mask is None else mask[env_id]
            if np.any(rows):
                self._write_mask(env_id, rows)
                self._columns[env_id] = (self._columns[env_id] + 1) % self._NUM_FRAMES
                self._execute(env_id, Op.RESET)
                self._in_root[env_id] = True
        return self._roots()

    def step(self, actions: list[list[Any]], *, resets_ended: bool) -> tuple[list[Row], list[Row]]:
        nexts = []
        for env_id, action in enumerate(actions):
            self._columns[env_id] = (self._columns[env_id] + 1) % self._NUM_FRAMES
            self._write_action(env_id, action)
            self._execute(env_id, Op.STEP_RESET if resets_ended else Op.STEP)
            row = self._row(env_id, "next")
            nexts.append(row)
            self._in_root[env_id] = resets_ended and bool(row[("done",)].any())
        return nexts, self._roots()

    def save(self) -> list[Any] | None:
        states = []
        for env_id in range(len(self.specs)):
            answer = self._ask("save", env_id, is_whole=True)
            if answer["kind"] == "fault" and answer["type_name"] == "NotImplementedError":
                return None
            states.append(self._value(answer))
        return states

    def restore(self, states: list[Any]) -> None:
        for env_id, value in enumerate(states):
            self._value(self._ask("restore", env_id, {"env": value["plain"], **value}))

    def _ask(self, what: str, env_id: int, *args: Any, **kwargs: Any) -> dict[str, Any]:
        question = Ask(what=what, env_ids=(env_id,), args=args, kwargs=kwargs)
        answer: dict[str, Any] = plain.decode(plain.encode(self._block_of[env_id].ask(question)))
        return answer

    def _value(self, answer: dict[str, Any]) -> Any:
        if answer["kind"] == "fault":
            self._faults.append(answer)
            self._raise_fault(answer["env_id"])
        return answer["values"][0]

    def render(self, env_id: int) -> Any:
        """Return an env's picture, uint8 `[height, width, 3]`, or what else its `render` returns."""
        return self._adapters[env_id].render()

    def count_calls(self) -> tuple[int, int] | None:
        return self._calls.totals()

    def close(self) -> None:
        for adapter in self._adapters:
            adapter.close()

    def _execute(self, env_id: int, op: Op) -> None:
        self._block_of[env_id].execute(env_id, pack(op, RING, self._columns[env_id]))
        self._raise_fault(env_id)

    def _raise_fault(self, env_id: int) -> None:
        if self._faults:
            fault = self._faults.pop()
            raise EnvError(
                f"{fault['phase']} failed: the env raised {fault['type_name']}: {fault['message']} (env {env_id}).",
                remote_traceback=fault["traceback"],
                env_ids=(env_id,),
            )

    def _take(self, frame: dict[str, Any]) -> None:
        frame = plain.decode(plain.encode(frame))  # as if sent to another process
        if frame["kind"] == "fault":
            self._faults.append(frame)
        elif frame["kind"] == "notice":
            self.generators.update(frame["generators"])
        elif frame["kind"] == "side":
            self._side[frame["env_id"]] = {section: list(frame[section]) for section in ("next", "root")}

    def _write_action(self, env_id: int, action: list[Any]) -> None:
        group, row = self._places[env_id]
        spec = self.specs[env_id]
        side = []
        for leaf, value in zip((*spec.action, *spec.state), action, strict=True):
            if leaf.is_side:
                side.append(value)
            else:
                self._slab.groups[group].inputs[("input", *leaf.key)][row] = value
        if side:
            self._block_of[env_id].prepare(Prepare(env_id=env_id, side=side))

    def _write_mask(self, env_id: int, rows: Any) -> None:
        group, row = self._places[env_id]
        mask = self._slab.groups[group].inputs.get(("reset_mask",))
        if mask is not None:
            mask[row] = rows

    def _roots(self) -> list[Row]:
        return [self._row(i, "root" if self._in_root[i] else "next") for i in range(len(self.specs))]

    def _row(self, env_id: int, section: str) -> Row:
        group, row = self._places[env_id]
        column = self._columns[env_id]
        arrays = self._slab.groups[group].columns
        values = {name[1:]: array[column, row].copy() for name, array in arrays.items() if name[0] == section}
        for index, leaf in enumerate(self.specs[env_id].observation):
            if leaf.is_side:
                values[leaf.key] = self._side[env_id][section][index]
        return values


class _CallCounter:
    """Counts the calls of `step` and `reset` of native envs whose methods can be replaced."""

    def __init__(self) -> None:
        self._is_complete = True
        self._counts = {"step": 0, "reset": 0}

    def watch(self, env: Any) -> None:
        for name in self._counts:
            try:
                setattr(env, name, self._counted(name, getattr(env, name)))
            except (AttributeError, TypeError):
                self._is_complete = False

    def _counted(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self._counts[name] += 1
            return method(*args, **kwargs)

        return counted

    def totals(self) -> tuple[int, int] | None:
        """Return the counts; None if an env could not be watched, or its adapter calls it in other ways."""
        is_used = all(self._counts.values())
        return (self._counts["step"], self._counts["reset"]) if self._is_complete and is_used else None
