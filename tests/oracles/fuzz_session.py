"""A session of a fuzzer with one executor: random operations and faults; every row is checked against the oracle."""

import contextlib
import functools
import itertools
import os
import random
import signal
import threading
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDict

from envherd.executor import (
    Busy,
    EnvError,
    ExecutorOptions,
    ParallelEnv,
    ResetNeeded,
    SerialEnv,
    WorkerLost,
)
from envherd.executor.guests.collectors.collector import Collector
from envherd.workers.errors import WorkerTimeout
from tests.executor.calls import await_death
from tests.oracles.fuzz_envs import NUM_ACTIONS, WIDTH, FuzzEnv, How, Kind, Traps, When
from tests.oracles.fuzzing import NOTHING, Given, Oracle, Place, Row, Transition, Watch


@dataclass
class Setting:
    """The arguments of an executor, and the option set that they are drawn for (`asked`)."""

    num_envs: int
    num_workers: int
    kinds: tuple[str, ...]
    lanes: int
    lengths: tuple[int | None, ...]
    is_serial: bool
    copy: bool
    root_seed: int
    options: dict[str, Any] = field(default_factory=dict)
    facade: str = ""
    asked: dict[str, Any] = field(default_factory=dict)

    @property
    def restarts(self) -> bool:
        """Whether lost workers are replaced."""
        return self.options.get("on_worker_loss") == "restart"

    @property
    def mends(self) -> bool:
        """Whether exceptions of envs end only their episodes."""
        return self.options.get("on_env_error") == "interrupt"


#: Operations that break workers.
DEADLY = ("trap", "kill")


class Stopped(Exception):
    """A call was broken off."""


class Session:
    """One executor, from its opening to its closing.

    Args:
        rng: of the case.
        setting: of the executor.
        folder: an empty one, for diary and traps.
        watch: notified of every operation; ends the process when one hangs.
    """

    #: Operation -> its weight.
    WEIGHTS: ClassVar[dict[str, int]] = {
        "reset": 4,
        "reset_some": 5,
        "step": 6,
        "fused": 10,
        "send": 10,
        "recv": 10,
        "current": 3,
        "rollout": 6,
        "collect": 5,
        "get": 3,
        "echo": 2,
        "mark": 1,
        "set_seed": 1,
        "state": 1,
        "statistics": 1,
        "trap": 10,
        "kill": 8,
    }

    def __init__(
        self, rng: random.Random, setting: Setting, folder: str, watch: Watch
    ) -> None:
        self.rng, self.setting, self.watch = rng, setting, watch
        self.num_envs, self.lanes = setting.num_envs, max(1, setting.lanes)
        self.everyone = list(range(self.num_envs))
        self.marks = setting.restarts or setting.mends  # rows as `interrupted`
        self.places = [
            (i, lane) for i in range(self.num_envs) for lane in range(self.lanes)
        ]
        self.oracle = Oracle(folder, self.places)
        self.oracle.root_seed = setting.root_seed
        self.traps = Traps(folder, self.num_envs)
        # Env id -> maybe_reset, actions.
        self.pending: dict[int, tuple[bool, list[int]]] = {}
        # Envs that may be refused unexpectedly.
        self.doubt: set[int] = set(self.everyone)
        self.dead: set[int] = set()  # envs whose worker was lost, and is not replaced
        # What a send in progress will add to `pending`.
        self.sending: dict[int, tuple[bool, list[int]]] = {}
        self.weights = dict(self.WEIGHTS)
        self.saved: tuple[Any, Any, Any] | None = None
        self.is_calm = True  # nothing has been broken off, raised or lost
        self.kept: list[tuple[Any, Any]] = []
        self.view: tuple[Any, Any] | None = None
        self.collector: Collector | None = None
        self.has_collected = False
        self.num_kills = self.num_errors = self.num_asked = 0
        self.mark: Any = None
        self.timers: list[threading.Timer] = []
        self.env = self._open(folder)

    def _open(self, folder: str) -> Any:
        setting = self.setting
        make = [
            functools.partial(
                FuzzEnv,
                folder,
                self.num_envs,
                i,
                setting.lengths[i],
                setting.lanes,
                setting.kinds[i],
            )
            for i in range(self.num_envs)
        ]
        options = ExecutorOptions(**setting.options)
        common: dict[str, Any] = {
            "seed": setting.root_seed,
            "options": options,
            "copy": setting.copy,
        }
        self.watch.begin(f"open {setting}")
        if setting.is_serial:
            return SerialEnv(self.num_envs, make, **common)
        return ParallelEnv(
            self.num_envs, make, num_workers=setting.num_workers, **common
        )

    # ---- running -----------------------------------------------------------------------------

    def play(self, num_operations: int) -> None:
        """Apply `num_operations` random operations, and close."""
        if self.rng.random() < 0.15:  # without faults
            self.weights = {
                name: one for name, one in self.weights.items() if name not in DEADLY
            }
        names, weights = zip(*self.weights.items(), strict=True)
        for _ in range(num_operations):
            getattr(self, "_" + self.rng.choices(names, weights)[0])()
        self._finish()

    def _finish(self) -> None:
        for timer in self.timers:
            timer.join()
        self._statistics()
        if self.is_calm and not (self.pending or self.num_kills or self.num_sprung):
            made = sum(self.oracle.steps.values())
            assert made == self.oracle.num_transitions, (
                f"{made} steps were made, {self.oracle.num_transitions} were handed out"
            )
        self.watch.begin("close")
        self.close()

    def close(self) -> None:
        """Close the executor."""
        self.env.close()
        self.traps.close()

    @property
    def executor(self) -> Any:
        """The executor, below a facade if there is one."""
        return self.env

    @property
    def num_losses(self) -> int:
        """Workers that the executor has seen die."""
        return int(getattr(self.executor.engine.pool, "num_losses", 0))

    def attempt(self, what: str, call: Callable[[], Any], env_ids: Any = None) -> Any:
        """Make a call; return its result (True for none), or None if it was refused, raised or was broken off.

        Args:
            what: text for the log.
            call: the call.
            env_ids: the envs that it concerns; None for all.
        """
        ids = self.everyone if env_ids is None else list(env_ids)
        self.watch.begin(what)
        self.losses_before = self.num_losses
        try:
            result = self.guard(what, call)
            return True if result is None else result
        except Stopped:
            self.watch.begin("  it was broken off")
            self.recover()
        except ResetNeeded as error:
            self._note_refused(error.env_ids)
        except Busy:
            if not self.pending:
                raise
        except EnvError as error:
            self.num_errors += 1
            if self.num_errors > self.max_errors:
                raise
            self._note_broken(ids, error.env_ids)
        except (WorkerLost, WorkerTimeout) as error:
            if not (self.num_kills or self.num_sprung):
                raise
            if not self.setting.restarts:
                self.dead |= set(error.env_ids)
            self._note_broken(ids, error.env_ids)
        finally:
            self.oracle.read_diary()
        self.is_calm = False
        self.watch.note("  (refused or broken)")
        return None

    def guard(self, what: str, call: Callable[[], Any]) -> Any:
        """Make a call; raise `Stopped` where it was broken off."""
        return call()

    def recover(self) -> None:
        """After a call was broken off: require that the next one is answered, and forget where envs are.

        A loss that is found meanwhile answers requests until the next command.
        """
        if self.rng.random() < 0.3 and not self.dead:
            self.num_asked += 1
            with contextlib.suppress(
                WorkerLost if self.num_kills or self.num_sprung else Stopped
            ):
                self.ask_echo(self.num_asked)
        else:
            self.settle()
        under_way = self.executor.engine.states.under_way
        self.pending = {
            i: one for i, one in (self.pending | self.sending).items() if under_way[i]
        }
        self.doubt = set(self.everyone)
        self.oracle.forget(place for place in self.places if not under_way[place[0]])

    def settle(self) -> None:
        """Make an empty call, which recovers from a broken-off one."""
        self.env.set("mark", self.mark, env_ids=[])

    @property
    def max_errors(self) -> int:
        """Errors that envs may have raised."""
        return self.num_sprung

    @property
    def num_sprung(self) -> int:
        """Traps that were sprung."""
        return int(self.traps.words[:, 3].sum())

    def _has_lost(self) -> bool:
        return self.num_losses > 0 or (self.setting.mends and self.num_sprung > 0)

    def _note_refused(self, env_ids: Any) -> None:
        for env_id in env_ids:
            has_ended = any(
                self.oracle.ended[env_id, lane] for lane in range(self.lanes)
            )
            assert has_ended or env_id in self.doubt or self._has_lost(), (
                f"env {env_id} was refused, though it is at {self.oracle.at[env_id, 0]}"
            )
            self.doubt.add(env_id)

    def _note_broken(self, env_ids: list[int], concerned: Any) -> None:
        """Record that a call raised: its envs' positions are unknown."""
        under_way = self.executor.engine.states.under_way
        for env_id in [i for i in self.pending if not under_way[i]]:
            assert env_id in concerned or not self.setting.restarts, (
                f"env {env_id} was sent and is dropped, the error names envs {concerned}"
            )
            del self.pending[env_id]
            self.oracle.forget(self._places(env_id))
            self.doubt.add(env_id)
        for env_id in {*env_ids, *concerned}:
            if env_id not in self.pending:
                self.oracle.forget(self._places(env_id))
            self.doubt.add(env_id)

    def _places(self, env_id: int) -> list[tuple[int, int]]:
        return [(env_id, lane) for lane in range(self.lanes)]

    # ---- reading batches ---------------------------------------------------------------------

    def _parts(self, td: Any, env_ids: list[int]) -> list[Any]:
        """Return a batch as one TensorDict per env."""
        assert td.batch_size[0] == len(env_ids), (
            f"expected a batch of {len(env_ids)} envs, got {td.batch_size}"
        )
        return list(td.unbind(0))

    def _observed(self, part: Any, env_id: int) -> np.ndarray:
        key: Any = (
            ("place", "row") if self.setting.kinds[env_id] == "other" else "observation"
        )
        rows: np.ndarray = part.get(key).cpu().numpy().reshape(-1, self.lanes, WIDTH)
        if self.setting.kinds[env_id] == "text":
            reported = part.get("text")
            reported = reported.tolist() if hasattr(reported, "tolist") else reported
            reported = [reported] if isinstance(reported, str) else reported
            expected = [f"{row[2]}:{row[3]}:{row[4]}" for row in rows[:, 0].tolist()]
            assert reported == expected or not any(rows.flatten()), (
                f"env {env_id}: torn row, text {reported}, expected {expected}"
            )
        if self.setting.kinds[env_id] == "other":
            pixels = part.get("pixels").cpu().numpy().reshape(-1, 4)
            assert not (
                pixels != (rows[:, 0, 4] % 256).astype(np.uint8)[:, None]
            ).any(), (
                f"env {env_id}: torn row, pixels {pixels.tolist()}, {rows.tolist()}"
            )
        return rows

    def _flags(self, part: Any, key: str) -> np.ndarray:
        flags: np.ndarray = part.get(key).cpu().numpy().reshape(-1, self.lanes)
        return flags

    def _roots(
        self, td: Any, env_ids: list[int], but: Container[int] = ()
    ) -> Iterator[tuple[Place, Row, bool]]:
        """Yield place, row and done flag of each root, except those of the envs in `but`."""
        for env_id, part in zip(env_ids, self._parts(td, env_ids), strict=True):
            if env_id in but:
                continue
            rows, done = self._observed(part, env_id)[0], self._flags(part, "done")[0]
            for lane in range(self.lanes):
                yield (env_id, lane), Row.of(rows[lane]), bool(done[lane])

    def take_following(
        self, td: Any, env_ids: list[int], kept: Container[int] = ()
    ) -> None:
        """Check the roots after steps against the oracle; of the envs in `kept`, the steps have reset nothing."""
        for place, row, done in self._roots(td, env_ids):
            if self.oracle.ended[place] and place[0] not in kept:
                self.oracle.begin(place, row)
            self.oracle.root(place, row, done=done)

    def take_steps(
        self, td: Any, env_ids: list[int], *, has_root: bool = False
    ) -> None:
        """Check transitions, batch `[k]`, against the oracle."""
        for env_id, part in zip(env_ids, self._parts(td, env_ids), strict=True):
            for lane, _, one in self.transitions(part, env_id, has_root=has_root):
                self.oracle.follow((env_id, lane), one)
            self.doubt.discard(env_id)

    def transitions(
        self, part: Any, env_id: int, *, has_root: bool = True
    ) -> Iterator[tuple[int, int, Transition]]:
        """Yield lane, number and transition of each step in a batch `[T]` or `[]` of one env."""
        nexts, given = part.get("next"), part.get("action", None)
        roots = self._observed(part, env_id) if has_root else None
        observed = self._observed(nexts, env_id)
        done, terminated, truncated = (
            self._flags(nexts, key) for key in ("done", "terminated", "truncated")
        )
        is_lost = (
            self._flags(nexts, "interrupted") if self.marks else np.zeros_like(done)
        )
        rewards = nexts.get("reward").cpu().numpy().reshape(-1, self.lanes)
        sent = [self.pending[env_id][1]] if given is None else given.cpu().numpy()
        actions = np.reshape(sent, (-1, self.lanes))
        for lane, t in itertools.product(range(self.lanes), range(len(observed))):
            yield (
                lane,
                t,
                Transition(
                    root=None if roots is None else Row.of(roots[t, lane]),
                    action=int(actions[t, lane]),
                    next=Row.of(observed[t, lane]),
                    reward=float(rewards[t, lane]),
                    done=bool(done[t, lane]),
                    terminated=bool(terminated[t, lane]),
                    truncated=bool(truncated[t, lane]),
                    interrupted=bool(is_lost[t, lane]),
                ),
            )

    def _begins(
        self, place: tuple[int, int], root: Row, *, may: bool, is_first: bool
    ) -> bool:
        """Return whether a root must be the first of an episode."""
        before = self.oracle.at[place]
        if before is None:  # unknown after a broken-off call: the episode may continue
            return may and root.t == 0 and root.key[:2] not in self.oracle.begun
        return may and (root != before if is_first else self.oracle.ended[place])

    def as_made(self, one: Transition) -> Transition:
        """Return a transition that was marked truncated with the flags of the env itself."""
        made = self.oracle.made.get(one.next.key)
        truncated = made is not None and made[0] == Kind.TRUNCATED
        return one._replace(truncated=truncated, done=one.terminated or truncated)

    # ---- what operations need ----------------------------------------------------------------

    def _actions(self, num_envs: int) -> torch.Tensor:
        shape = (num_envs, self.lanes) if self.setting.lanes else (num_envs,)
        count = num_envs * self.lanes
        return torch.tensor(
            [self.rng.randrange(NUM_ACTIONS) for _ in range(count)]
        ).reshape(shape)

    def _acted(self, env_ids: list[int]) -> TensorDict:
        actions = self._actions(len(env_ids))
        return TensorDict({"action": actions}, actions.shape)

    def _idle(self) -> list[int]:
        return [i for i in range(self.num_envs) if i not in self.pending]

    def _drain(self) -> None:
        """Usually receive all sent envs; otherwise an operation on all envs is refused."""
        while self.pending and self.rng.random() < 0.9:
            self._recv(everything=True)

    def _learn(self, env_ids: list[int]) -> None:
        """Read the envs' positions."""
        td = self.attempt(
            f"current {env_ids}", lambda: self.env.current(env_ids), env_ids
        )
        if td is not None:
            lost = self._has_lost()
            for place, row, done in self._roots(td, env_ids):
                self.oracle.root(place, row, done=done, may_end=lost, may_begin=lost)

    def _begin_all(self, env_ids: list[int] | None = None) -> list[int]:
        """Reset ended envs until none has ended or a reset fails; return the running ones."""
        ids = self._idle() if env_ids is None else env_ids
        for _ in range(4):
            if unknown := [
                i
                for i in ids
                if any(self.oracle.at[p] is None for p in self._places(i))
            ]:
                self._learn(unknown)
            due = [
                i
                for i in ids
                if i in self.doubt or any(self.oracle.ended[p] for p in self._places(i))
            ]
            due = [i for i in due if i not in self.dead]
            if not due:
                break
            self._reset_ids(due, whole=True)
        return [
            i
            for i in ids
            if i not in self.dead
            and not any(self.oracle.ended[p] for p in self._places(i))
        ]

    # ---- operations --------------------------------------------------------------------------

    def _given(self) -> tuple[dict[str, Any], Given, int | None]:
        """Draw arguments of a reset: the arguments, what envs get of them, a new root seed."""
        seeds = tuple(
            self.rng.choice([None, self.rng.randrange(2**31)])
            for _ in range(self.num_envs)
        )
        root_seed, level = self.rng.randrange(1000), self.rng.randint(1, 9)
        levels = tuple(self.rng.randint(1, 9) for _ in range(self.num_envs))
        same = (level,) * self.num_envs
        cases: list[tuple[dict[str, Any], Given, int | None]] = [
            ({"seed": root_seed}, NOTHING, root_seed),
            ({"seed": list(seeds)}, Given(seeds=seeds), None),
            ({"level": level}, Given(levels=same), None),
            (
                {"list_of_kwargs": [{"level": one} for one in levels]},
                Given(levels=levels),
                None,
            ),
            ({"seed": list(seeds), "level": level}, Given(seeds, same), None),
        ]
        return self.rng.choice([*cases, *[({}, NOTHING, None)] * 3])

    def _reset(self) -> None:
        self._drain()
        self._reset_rows(np.ones((self.num_envs, self.lanes), bool), None)

    def _count_resets(
        self, before: dict[tuple[int, int], int], asked: set[tuple[int, int]]
    ) -> None:
        """Require that a reset has reset exactly the requested rows."""
        if self.num_losses > self.losses_before or self._has_lost():
            return
        for place in self.places:
            made = self.oracle.resets.get(place, 0) - before.get(place, 0)
            assert made == (place in asked), (
                f"{place} was reset {made} times, asked were {sorted(asked)}"
            )

    def _reset_some(self) -> None:
        idle = [i for i in self._idle() if i not in self.dead]
        self._reset_ids(
            self.rng.sample(idle, self.rng.randint(0, len(idle))),
            whole=self.rng.random() < 0.5,
        )

    def _reset_ids(self, env_ids: list[int], *, whole: bool) -> None:
        """Reset some envs; of envs that are batches, some of their rows."""
        mask = self._draw_mask(env_ids, whole=whole)
        self._reset_rows(mask, self._as_request(mask))

    def _reset_rows(self, mask: np.ndarray, request: TensorDict | None) -> None:
        """Reset the rows in a mask, and check all roots against the oracle."""
        arguments, given, root_seed = self._given()
        if root_seed is not None and self.pending:
            arguments, given, root_seed = {}, NOTHING, None
        if root_seed is not None:
            self.oracle.reseeded(root_seed)
        before = dict(self.oracle.resets)
        asked = {place for place in self.places if mask[place]}
        what = (
            f"reset {'' if request is None else np.argwhere(mask).tolist()} {arguments}"
        )
        root = self.attempt(
            what,
            lambda: self.env.reset(request, **arguments),
            sorted({i for i, _ in asked}),
        )
        if root is None:
            if root_seed is not None:
                self.oracle.reseeded(None)
            return
        if not self.pending:
            self._count_resets(before, asked)
        for place, row, done in self._roots(root, self.everyone, self.pending):
            is_new = (
                mask[place[0]].any()
                and self._has_lost()
                and row != self.oracle.at[place]
            )
            if place not in asked and not is_new:
                self.oracle.root(place, row, done=done, may_end=self._has_lost())
                continue
            # One that was asked, or all rows of an env that was lost.
            self.oracle.begin(place, row, given)
            assert not done, f"{place} was reset and is done"
        self.doubt -= {i for i, _ in asked}

    def _draw_mask(self, env_ids: list[int], *, whole: bool) -> np.ndarray:
        """Return the rows to reset, bool `[N, lanes]`: all or some of these envs', with those that must be reset."""
        mask = np.zeros((self.num_envs, self.lanes), bool)
        for env_id in env_ids:
            mask[env_id] = [whole or self.rng.random() < 0.6 for _ in range(self.lanes)]
        for env_id, lane in self.places:
            if mask[env_id].any() and (
                env_id in self.doubt or self.oracle.at[env_id, lane] is None
            ):
                mask[env_id, lane] = True
        return mask

    def _as_request(self, mask: np.ndarray) -> TensorDict:
        """Return a mask in one of the shapes that a reset takes."""
        shaped = torch.tensor(mask)
        is_plain = self.rng.random() < 0.5
        if self.setting.lanes:
            return TensorDict(
                {"_reset": shaped if is_plain else shaped[..., None]},
                [self.num_envs, self.lanes],
            )
        return TensorDict(
            {"_reset": shaped[:, 0] if is_plain else shaped}, [self.num_envs]
        )

    def _ready(self) -> bool:
        """Usually make all envs ready to be stepped; return whether to step."""
        self._drain()
        if self.pending or self.dead:
            return self.rng.random() < 0.3  # it is to be refused
        running = self._begin_all()
        return len(running) == self.num_envs or self.rng.random() < 0.1

    def _step(self) -> None:
        if self._ready() and (made := self._stepped("step")) is not None:
            self._keep_view(made)

    def _fused(self) -> None:
        if not self._ready():
            return
        for _ in range(self.rng.randint(1, 4)):
            made = self._stepped("step_and_maybe_reset")
            if made is None:
                return
            self.take_following(made[1], self.everyone)
            if self.setting.options.get("infos") == "plain":
                self._check_infos(*made)
            self._keep_view(made[0])

    def _stepped(self, name: str) -> Any:
        """Step all envs, check the transitions, and return the result; None if there is none."""
        td = self._acted(self.everyone)
        made = self.attempt(name, lambda: getattr(self.env, name)(td))
        if made is None:
            return None
        assert not self.pending, f"envs {list(self.pending)} were sent, and stepped"
        self._check_view()
        self.take_steps(made if name == "step" else made[0], self.everyone)
        return made

    def _keep_view(self, td: Any) -> None:
        if not self.setting.copy:
            self.view = (td.get("next"), td.get("next").clone())

    def _check_view(self) -> None:
        """Require that the previous step's batch is unchanged: it is still valid one step later."""
        if self.view is not None:
            was_same = _is_equal(*self.view)
            self.view = None
            assert was_same, (
                "a batch of `copy=False` has changed after one further step"
            )

    def _send(self) -> None:
        idle = [i for i in self._idle() if i not in self.dead]
        ids = self._begin_all(self.rng.sample(idle, self.rng.randint(0, len(idle))))
        self.rng.shuffle(ids)
        if not ids:
            return
        maybe_reset = self.rng.random() < 0.8
        td = self._acted(ids)
        actions = td["action"].reshape(len(ids), -1).tolist()
        self.sending = {
            env_id: (maybe_reset, acted)
            for env_id, acted in zip(ids, actions, strict=True)
        }
        send = functools.partial(self.env.send, td, ids, maybe_reset=maybe_reset)
        if self.attempt(f"send {ids} maybe_reset={maybe_reset}", send, ids):
            self.pending |= self.sending
        self.sending = {}

    def _recv(self, *, everything: bool = False) -> None:
        if not self.pending:
            return
        sent = list(self.pending)
        arguments = self._draw_recv(
            sent,
            "all" if everything else self.rng.choice(["all", "some", "these", "soon"]),
        )
        try:
            td = self.attempt(
                f"recv {arguments}", lambda: self.env.recv(**arguments), []
            )
        except WorkerTimeout:
            raise
        except TimeoutError:
            return
        except ValueError:
            if self.is_calm:
                raise
            return  # those that an error has dropped
        if td is not None:
            ids = td["env_ids"].reshape(len(td), -1)[:, 0].tolist()
            least = arguments.get("min_envs", len(arguments.get("env_ids", sent)))
            most = arguments.get("max_envs", least)
            assert least <= len(ids) == len({*ids} & {*sent}) <= most, (
                f"received {ids} of {sent} with {arguments}"
            )
            self.take_steps(td, ids, has_root=arguments["with_root"])
            self._take_current(td, ids)

    def _draw_recv(self, sent: list[int], how: str) -> dict[str, Any]:
        arguments: dict[str, Any] = {"with_root": self.rng.random() < 0.7}
        if how in ("some", "soon"):
            arguments["min_envs"] = self.rng.randint(1, len(sent))
            if self.rng.random() < 0.4:
                arguments["max_envs"] = self.rng.randint(
                    arguments["min_envs"], len(sent) + 1
                )
        if how == "soon":
            arguments["timeout_s"] = self.rng.choice([0.0, 0.001, 0.05])
        if how == "these":
            arguments["env_ids"] = self.rng.sample(sent, self.rng.randint(1, len(sent)))
        return arguments

    def _take_current(self, received: Any, ids: list[int]) -> None:
        """Read the received envs' roots, and check them against the oracle."""
        kept = [i for i in ids if not self.pending.pop(i)[0]]
        given_ids = (
            received["env_ids"]
            if self.rng.random() < 0.5 and not self.setting.lanes
            else ids
        )
        root = self.attempt(
            f"current {ids} after recv", lambda: self.env.current(given_ids), ids
        )
        if root is not None:
            self.take_following(root, ids, kept)

    def _current(self) -> None:
        if idle := self._idle():
            self._learn(idle)

    def _policy(self, seen: list[Any]) -> Any:
        def policy(td: Any) -> Any:
            actions = self._actions(self.num_envs)
            if isinstance(td, LazyStackedTensorDict):
                for part, action in zip(td.unbind(0), actions, strict=True):
                    part.set("action", action)
                return td
            seen.append(actions)
            return td.set("action", actions).set("drawn", actions.clone())

        return policy

    def _rollout(self) -> None:
        self._drain()
        auto_reset = self.rng.random() < 0.4
        if not auto_reset:
            self._current()
        breaks = self.rng.random() < 0.4
        is_cut = self.rng.random() < 0.15
        num_steps = self.rng.randint(1, 8)
        arguments: dict[str, Any] = {
            "auto_reset": auto_reset,
            "break_when_any_done": breaks,
            "set_truncated": is_cut,
        }
        if self.kept and self.rng.random() < 0.3:
            arguments["out"] = self.kept.pop(self.rng.randrange(len(self.kept)))[0]
            num_steps = min(num_steps, arguments["out"].batch_size[1])
        shown = {name: value for name, value in arguments.items() if name != "out"} | {
            "out": "out" in arguments
        }
        seen: list[Any] = []
        data = self.attempt(
            f"rollout {num_steps} {shown}",
            lambda: self.env.rollout(num_steps, self._policy(seen), **arguments),
        )
        if data is not None:
            self._take_rollout(
                data, num_steps, auto_reset=auto_reset, breaks=breaks, is_cut=is_cut
            )
            assert not seen or torch.equal(data["drawn"], data["action"]), (
                "what the policy kept is not of the steps that it was kept of"
            )

    def _take_rollout(
        self,
        data: Any,
        num_steps: int,
        *,
        auto_reset: bool,
        breaks: bool,
        is_cut: bool = False,
    ) -> None:
        assert breaks or data.batch_size[1] == num_steps, (
            f"expected {num_steps} steps, got {data.batch_size}"
        )
        may_begin = [
            auto_reset
            or i in self.doubt
            or self._has_lost()
            or any(
                self.oracle.ended[p] or self.oracle.at[p] is None
                for p in self._places(i)
            )
            for i in range(self.num_envs)
        ]
        before = {
            p: row.key[:2]
            for p, row in self.oracle.at.items()
            if row is not None and not self.oracle.ended[p]
        }
        for env_id, part in enumerate(self._parts(data, self.everyone)):
            for lane, t, one in self.transitions(part, env_id):
                place, root = (env_id, lane), one.root
                may = may_begin[env_id] if t == 0 else not breaks
                if root is not None and self._begins(
                    place, root, may=may, is_first=t == 0
                ):
                    self.oracle.begin(place, root)
                assert (
                    root is None
                    or not auto_reset
                    or t != 0
                    or before.get(place) != root.key[:2]
                ), f"{place} was not reset at the begin of a rollout"
                if is_cut and t == data.batch_size[1] - 1 and not one.interrupted:
                    assert (one.done, one.truncated) == (True, True), (
                        f"{place}: the last step of a cut rollout is not truncated: {one}"
                    )
                    one = self.as_made(one)  # noqa: PLW2901  # the same, without the cut
                self.oracle.follow(place, one)
            self.doubt.discard(env_id)
        self.kept.append((data, data.clone()))
        self._check_kept()

    def _check_kept(self) -> None:
        for data, copied in self.kept:
            assert _is_equal(data, copied), (
                "a rollout has changed after it was handed out"
            )
        del self.kept[:-2]

    def _collect(self) -> None:
        self._drain()
        num_steps = self.rng.randint(1, 6)
        is_new = self.collector is None or self.rng.random() < 0.2
        if is_new:
            frames = num_steps * self.num_envs
            always = self.rng.random() < 0.2
            self.collector = Collector(
                self.env,
                self._policy([]),
                frames_per_batch=frames,
                close_env=False,
                reset_at_each_iter=always,
            )
            self.always, self.has_collected = always, False
        collector = self.collector
        assert collector is not None
        auto_reset = self.always or not (self.has_collected or self.env.is_resumed)
        if not auto_reset:
            self._current()
        data = self.attempt(
            f"collect {collector.num_steps} auto_reset={auto_reset}", collector.collect
        )
        if data is not None:
            self.has_collected = True
            self._take_rollout(
                data, collector.num_steps, auto_reset=auto_reset, breaks=False
            )

    def _get(self) -> None:
        ids = [i for i in self._idle() if i not in self.dead]
        ids = self.rng.sample(ids, self.rng.randint(0, len(ids)))
        if not ids:
            return
        found = self.attempt(
            f"get where {ids}", lambda: self.ask("where", env_ids=ids), []
        )
        if found is None:
            return
        for env_id, where in zip(ids, found, strict=True):
            for lane in range(self.lanes):
                row, reported = (
                    self.oracle.at[env_id, lane],
                    tuple(where[3 * lane : 3 * lane + 3]),
                )
                is_open = (
                    env_id in self.doubt
                    or self.oracle.ended[env_id, lane]
                    or self._has_lost()
                )
                assert row is None or is_open or reported == row.key, (
                    f"env {env_id} is at {reported}, its row has {row}"
                )

    def _echo(self) -> None:
        ids = [i for i in range(self.num_envs) if i not in self.dead]
        self.num_asked += 1
        if ids:
            self.attempt(
                f"echo {self.num_asked}", lambda: self.ask_echo(self.num_asked, ids), []
            )

    def ask(self, name: str, *args: Any, env_ids: list[int] | None = None) -> list[Any]:
        """Call a method of some envs."""
        return list(self.env.call(name, *args, env_ids=env_ids))

    def ask_echo(self, number: int, env_ids: list[int] | None = None) -> None:
        """Call the envs' `echo` with a number."""
        answers = self.ask("echo", number, env_ids=env_ids)
        assert answers == [[[number], {}]] * (
            self.num_envs if env_ids is None else len(env_ids)
        ), f"asked {number}, got {answers}"

    def _mark(self) -> None:
        if self.dead:
            return
        marks = [self.rng.randrange(100) for _ in range(self.num_envs)]

        if self.attempt(f"set mark {marks}", lambda: self.env.set("mark", marks), []):
            losses = self.num_losses
            found = self.attempt("get mark", lambda: self.env.get("mark"), [])
            assert (
                found is None
                or found == marks
                or losses != self.num_losses
                or self.num_kills
            ), f"set {marks}, got {found}"

    def _set_seed(self) -> None:
        self._drain()
        if self.pending:
            return
        seed = self.rng.randrange(1000)
        if (
            self.attempt(f"set_seed {seed}", lambda: self.env.set_seed(seed), [])
            is None
        ):
            self.oracle.reseeded(None)
        else:
            self.oracle.reseeded(seed)

    def _state(self) -> None:
        """Save the envs' state, or load a saved one."""
        self._drain()
        if self.pending or self.dead or len(self._begin_all()) < self.num_envs:
            return
        if self.saved is None:
            losses = self.num_losses
            state = self.attempt("state_dict", self.env.state_dict, [])
            if state is not None and losses == self.num_losses:
                self.saved = (state, dict(self.oracle.at), dict(self.oracle.ended))
            return
        (state, at, ended), self.saved = self.saved, None

        self.oracle.reseeded(None)  # should the call be broken off
        if self.attempt("load_state_dict", lambda: self.env.load_state_dict(state)):
            kept = state["executor"]
            self.oracle.load(at, ended, kept["seed"], kept["episodes"])
            self.doubt.clear()
            self._learn(self._idle())

    def _check_infos(self, td: Any, root: Any) -> None:
        """Compare the infos of a step of all envs with its rows."""
        lost = td["next", "interrupted"].flatten().tolist()
        for section, batch in (("next", td["next"]), ("root", root)):
            infos = self.env.infos(section)
            for (env_id, _), row, _ in self._roots(batch, self.everyone):
                reported = infos[env_id].get("where")
                if reported is None and (section == "root" or lost[env_id]):
                    continue
                assert lost[env_id] or reported == [*row.key], (
                    f"the info of env {env_id} ({section}) is of {reported}, its row of {row}"
                )

    @property
    def slack(self) -> int:
        """Number of steps that may be uncounted, because their worker died in between or is still busy."""
        return (self.num_kills + self.num_sprung) * self.num_envs + len(self.pending)

    def _statistics(self) -> None:
        self.watch.begin("statistics")
        counts = self.executor.statistics()
        self.oracle.read_diary()
        made = sum(count for (_, lane), count in self.oracle.steps.items() if lane == 0)
        assert made - self.slack <= counts.env_steps <= made, (
            f"statistics() says {counts.env_steps} steps, made were {made} ({self.slack} may be missing)"
        )
        assert counts.interrupted * self.lanes >= self.oracle.num_interrupted, (
            f"statistics() says {counts.interrupted} interrupted rows, got {self.oracle.num_interrupted}"
        )
        assert self.num_errors <= counts.env_errors <= self.max_errors, (
            f"statistics() says {counts.env_errors} env errors, raised were {self.num_errors}"
        )

    # ---- faults ------------------------------------------------------------------------------

    def _trap(self) -> None:
        env_id = self.rng.randrange(self.num_envs)
        hows = (
            [How.RAISE, How.SLOW]
            if self.setting.is_serial
            else [How.KILL, How.KILL, How.EXIT, How.RAISE, How.SLOW]
        )
        if "step_timeout_s" in self.setting.options:
            hows += [How.HANG, How.STOP]
        how = self.rng.choice([*hows, *[How.RAISE] * (4 * self.setting.mends)])
        whens = [When.RESET, When.STEP, When.STEP, When.RESET_DONE, When.STEP_DONE]
        if how in (How.KILL, How.EXIT) and self.setting.restarts:
            whens.append(When.BUILD)
        when, countdown = self.rng.choice(whens), self.rng.randint(1, 4)
        if when == When.BUILD:
            countdown = 1
        self.watch.note(f"trap: env {env_id} {how.name} at {when.name} {countdown}")
        words = self.traps.words[env_id]
        words[0] = When.NEVER
        words[1], words[2] = how, countdown
        words[0] = when

    def _kill(self) -> None:
        """Kill a worker at once, or within the next calls."""
        if self.setting.is_serial:
            return
        pool = self.executor.engine.pool
        worker_id = self.rng.randrange(len(getattr(pool, "worker_ids", range(1))))
        pid = int(pool.pid_of(worker_id))
        delay_s = self.rng.choice([0.0, 0.01]) * self.rng.random()
        self.num_kills += 1
        self.watch.note(f"kill worker {worker_id} in {1000 * delay_s:.1f} ms")
        timer = threading.Timer(delay_s, _kill, (pid,))
        timer.start()
        self.timers = [one for one in self.timers if one.is_alive()] + [timer]
        if not delay_s and self.rng.random() < 0.6:
            timer.join()
            await_death(pid)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, LazyStackedTensorDict):
        return all(
            _is_equal(a, b) for a, b in zip(one.unbind(0), other.unbind(0), strict=True)
        )
    for key in other.keys(include_nested=True, leaves_only=True):
        value = one.get(key)
        if isinstance(value, torch.Tensor) and not torch.equal(value, other.get(key)):
            return False
    return True
