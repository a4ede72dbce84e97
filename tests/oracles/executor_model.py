"""An explorer of the real executor over simulated workers: calls, answers, ends, faults, losses, rebuilds, interrupts.

`env_model` explores the table of states; this explores what carries it out: `Flights`, `EnvStates`, `Positions`, the
fast step, and the sends and receives in C. In each state that it meets, it makes the call (every other time: a legal
call) that it has made least often there. Workers answer at once or late or, in every other walk, die. Interrupts come
at random lines of the executor. They check the numbered orders of `flight` (1 to 4, 6 to 8), `losses` (1 to 4),
`exchange` (1 to 4), `supervisor` (1 to 6), `worker_pool` (1 to 4) and `commands` (1 to 4), and those of the calls
in C, `native/exchange.c` (1 to 3).

Checked after every call:
- an instance was stepped only in an episode, and once for each row that a call returned;
- the row of a step that was lost, or that raised, repeats the env's root before it;
- the columns of a rollout follow from each other, and the first one from the root before it;
- a RUNNING env is in an episode, its factory is the one that the executor names, and the executor's root of it is its
  instance's latest row, without a done flag; its worker serves, unless it was found dead by a request or while an
  interrupt was got over: the next command is then answered by that loss, with an interrupted row;
- the root of an env that must be reset has a done flag;
- an env owes an answer only if its state says so; the row of an answer that was not taken is where the command says;
- at the end all envs run again.
"""

import collections
import contextlib
import functools
import itertools
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from envherd.executor import Busy, EnvError, FactoryError, ResetNeeded, WorkerLost
from envherd.executor.protocol.env_states import State
from envherd.workers.errors import InternalError
from tests.faults.test_interrupts import Interrupt
from tests.oracles.simulated import ENDS, GOES_ON, RAISES, RESET_RAISES, Fate, Scripted

ACTIONS = (GOES_ON,) * 5 + (ENDS,) * 3 + (RAISES, RESET_RAISES)
FATES = (Fate.PROMPT,) * 7 + (Fate.LATE,) * 2 + (Fate.DIES_BEFORE, Fate.DIES_AFTER)
EXPECTED = (EnvError, FactoryError, WorkerLost, ResetNeeded, Busy, TimeoutError)


class Explorer:
    """Explores one executor after another.

    Args:
        make: returns an executor from `simulated`.
        seed: of all that is random.

    Attributes:
        tries: state -> event -> how often it was tried there.
        num_interrupted, num_refused: calls that were broken off, and that ended by an error.
        num_repeated: rows that repeat a root that is known.
    """

    def __init__(self, make: Callable[[], Any], seed: int) -> None:
        self._make, self._rng = make, random.Random(seed)
        self.tries: dict[Any, collections.Counter[str]] = {}
        self.num_interrupted = self.num_refused = self.num_repeated = 0
        # Of the longest call so far.
        self._lines: collections.Counter[str] = collections.Counter()
        self._trail: list[str] = []

    def explore(self, num_walks: int, num_calls: int) -> None:
        """Make walks of some calls each.

        Raises:
            AssertionError: with the calls that have led there.
        """
        for _ in range(num_walks):
            self._trail.clear()
            self._is_recovering = False  # whether the latest call was interrupted
            # Workers that were found dead while an interrupt was got over.
            self._unreported: set[int] = set()
            with contextlib.closing(self._make()) as env:
                self._env = env
                self._received: Any = None
                self._known: list[tuple[int, bool] | None] = [
                    None
                ] * env.num_envs  # root of each env, and whether it must be reset
                self._may_die = self._rng.random() < 0.5
                self._events = self._events_of(env.num_envs)
                try:
                    while (
                        num_calls > len(self._trail)
                        and len(env._pool.lost) < env.num_workers
                    ):
                        self._make_call()
                    self._check_that_all_run_again()
                except AssertionError as error:
                    raise AssertionError(
                        f"{error}, after {self._trail[-12:]}"
                    ) from error

    # ---- events ------------------------------------------------------------------------------

    def _events_of(self, num_envs: int) -> dict[str, Callable[[], Any]]:
        everyone = range(num_envs)
        subsets = [
            ids for k in everyone for ids in itertools.permutations(everyone, k + 1)
        ]
        events: dict[str, Callable[[], Any]] = {
            "step": self._step,
            "fused": self._fused,
            "rollout": functools.partial(self._rollout, break_when_any_done=False),
            "rollout that goes on": functools.partial(self._rollout, auto_reset=False),
            "rollout of a part": functools.partial(
                self._rollout, auto_reset=False, break_when_any_done=False
            ),
            "current": self._current,
            "reset": self._env.reset,
        }
        for ids in subsets:
            for fused in (False, True):
                events[f"send {ids} {fused}"] = functools.partial(
                    self._send, ids, maybe_reset=fused
                )
            events[f"recv {ids}"] = functools.partial(self._recv, env_ids=list(ids))
            if ids == tuple(sorted(ids)):
                events[f"rebuild {ids}"] = functools.partial(self._rebuild, ids)
                events[f"reset {ids}"] = functools.partial(
                    self._env.reset, self._mask(ids)
                )
        for least in range(1, num_envs + 1):
            events[f"recv at least {least}"] = functools.partial(self._recv, least)
            events[f"recv up to {least}"] = functools.partial(
                self._recv, 1, max_envs=least
            )
        events["recv in no time"] = lambda: self._recv(1, timeout_s=0.0)
        events["recv all"] = self._recv
        if self._may_die:
            events["death"] = lambda: self._rng.choice(
                self._env._pool.crew.workers
            ).kill()
        return events

    def _act(self, td: Any) -> Any:
        return td.set("action", torch.tensor(self._rng.choices(ACTIONS, k=len(td))))

    def _batch(self, count: int) -> TensorDict:
        return self._act(TensorDict({}, [count]))

    def _mask(self, ids: Any) -> TensorDict:
        mask = torch.zeros(self._env.num_envs, dtype=torch.bool)
        mask[list(ids)] = True
        return TensorDict({"_reset": mask}, [self._env.num_envs])

    def _step(self) -> None:
        self._check_rows(
            self._env.step(self._batch(self._env.num_envs)), range(self._env.num_envs)
        )

    def _fused(self) -> None:
        td, root = self._env.step_and_maybe_reset(self._batch(self._env.num_envs))
        self._check_rows(td, range(self._env.num_envs))
        self._check_roots(root)

    def _rollout(
        self, *, auto_reset: bool = True, break_when_any_done: bool = True
    ) -> None:
        data = self._env.rollout(
            2, self._act, auto_reset=auto_reset, break_when_any_done=break_when_any_done
        )
        roots, nexts = (
            data["observation"].squeeze(-1).tolist(),
            data["next", "observation"].squeeze(-1).tolist(),
        )
        done = data["next", "done"].squeeze(-1).tolist()
        # No env truncates itself.
        interrupted = (
            data["next"].get("interrupted", data["next", "truncated"]).squeeze(-1)
        )
        assert not data["next", "reward"].squeeze(-1)[interrupted].any()
        for env_id, known in enumerate(self._known):
            before = known and (known[0], known[1] or auto_reset)
            for t, (root, row, is_lost) in enumerate(
                zip(
                    roots[env_id],
                    nexts[env_id],
                    interrupted[env_id].tolist(),
                    strict=True,
                )
            ):
                what = f"env {env_id}, column {t}: after {before}, the root is {root}, and the row {row}"
                if before is not None:
                    goes_on = root == before[0] and (is_lost or not before[1])
                    assert goes_on or (before[1] and root > before[0]), what
                assert (row == root and done[env_id][t]) if is_lost else row > root, (
                    what
                )
                before = row, done[env_id][t]

    def _send(self, ids: tuple[int, ...], *, maybe_reset: bool) -> None:
        self._env.send(self._batch(len(ids)), np.array(ids), maybe_reset=maybe_reset)

    def _recv(self, min_envs: int | None = None, **how: Any) -> None:
        with contextlib.suppress(ValueError):  # fewer were sent, or none
            td = self._env.recv(min_envs, **how)
            self._received = td["env_ids"]
            self._check_rows(td, td["env_ids"].tolist())

    def _rebuild(self, ids: tuple[int, ...]) -> None:
        made = [functools.partial(Scripted, self._rng.random()) for _ in ids]
        if self._rng.random() < 0.3:
            made[-1] = functools.partial(Scripted)  # raises: it lacks the argument
        self._env.rebuild(list(ids), factories=made)
        assert not self._env._pool.slab.words["episode"][list(ids)].any()

    def _current(self) -> None:
        if self._received is None or self._rng.random() < 0.3:
            self._check_roots(self._env.current())
        else:
            self._env.current(self._received)

    # ---- calls -------------------------------------------------------------------------------

    def _make_call(self) -> None:
        rng, pool = self._rng, self._env._pool
        tries = self.tries.setdefault(self._state(), collections.Counter())
        names = self._legal() if rng.random() < 0.5 else self._events
        name = min(names, key=lambda name: (tries[name], rng.random()))
        tries[name] += 1
        num_fates = len(FATES) - rng.choice((0, 2, 2) if self._may_die else (2,))
        pool.fates = {
            worker.worker_id: rng.choice(FATES[:num_fates])
            for worker in pool.crew.workers
        }
        line = rng.randint(1, self._lines[name] + 10) if rng.random() < 0.4 else 0
        self._trail.append(
            f"{name} at line {line} with {[fate.name for fate in pool.fates.values()]}"
        )
        self._stepped = [env.stepped for env in pool.envs]
        interrupt = Interrupt(line or 10_000)
        sys.settrace(interrupt)
        try:
            self._events[name]()
        except KeyboardInterrupt:
            self.num_interrupted += 1
        except InternalError as error:
            raise AssertionError(str(error)) from error
        except EXPECTED as error:
            self.num_refused += 1
            sys.settrace(None)
            if isinstance(error, EnvError):
                self._check_partial(error)
        finally:
            sys.settrace(None)
            pool.fates = {}
        if not interrupt.where:
            self._lines[name] = max(
                self._lines[name], (line or 10_000) - interrupt.left
            )
        self._trail[-1] += f" ({interrupt.where})"
        lost = set(pool.lost)
        is_over_an_interrupt = self._is_recovering or bool(interrupt.where)
        # A request that finds a loss raises it; with "restart", the envs' next command reports it once more.
        self._unreported = (
            lost
            if is_over_an_interrupt or name.startswith("rebuild")
            else self._unreported & lost
        )
        self._is_recovering = bool(interrupt.where)
        self._check()

    def _legal(self) -> list[str]:
        """Return calls that the states of the envs allow."""
        states = self._env._engine.states
        if states.under_way.any():
            return ["recv at least 1", "recv all", "rebuild (0,)"]
        if (states.needs_reset & (states.values != State.CUT)).any():
            return ["reset"]
        return [
            "step",
            "fused",
            "rollout that goes on",
            "rollout of a part",
            "rebuild (0,)",
        ]

    def _state(self) -> Any:
        """Return what tells states apart, as far as that decides what a call does."""
        engine, pool = self._env._engine, self._env._pool
        flights, positions = engine.flights, engine.positions
        return (
            engine.states.values.tobytes(),
            engine.is_dirty,
            bool(engine.guard._holder),
            flights.current
            and (flights.current.is_parked, flights.current.ids.tobytes()),
            positions.is_mixed,
            pool.words.has_answered().tobytes(),
            pool.words.answers_lost.tobytes(),
            tuple(worker.is_alive for worker in pool.crew.workers),
            tuple(
                (w, absence.condition) for w, absence in pool.supervisor.absent.items()
            ),
            tuple(env.is_in_episode for env in pool.envs),
            engine.received is None,
        )

    # ---- checks ------------------------------------------------------------------------------

    def _check_rows(self, td: TensorDict, ids: Any) -> None:
        """Check the transitions of a call: those that the envs' latest steps have returned."""
        interrupted = (
            td["next"].get("interrupted", td["next", "truncated"]).flatten().tolist()
        )
        for i, env_id in enumerate(ids):
            env = self._env._pool.envs[env_id]
            row = td["next", "observation"][i].item()
            if interrupted[i]:
                self._check_repeated(env_id, row)
            else:
                assert row == env.stepped or row in Scripted.unreset, (
                    f"env {env_id} made step {env.stepped}, the row is {row}"
                )
            Scripted.unreset.discard(row)
            assert td["next", "done"][i] or not interrupted[i], (
                f"env {env_id} was interrupted, and goes on"
            )
            env.stepped = None  # each is handed out once

    def _check_repeated(self, env_id: int, row: int) -> None:
        known = self._known[env_id]
        self.num_repeated += known is not None
        assert known is None or row == known[0], (
            f"env {env_id} was at {known}, and its row repeats {row}"
        )

    def _check_partial(self, error: EnvError) -> None:
        """Check the rows of a step of all that raised: those of the envs that were stepped, and of the others."""
        pool = self._env._pool
        for env_id, row in enumerate(
            []
            if error.partial is None
            else error.partial["observation"].flatten().tolist()
        ):
            stepped = pool.envs[env_id].stepped
            if not pool.is_serving(int(pool.worker_of[env_id])):
                continue
            if stepped in (None, self._stepped[env_id]):
                self._check_repeated(env_id, row)
            else:
                assert row == stepped, (
                    f"env {env_id} made step {stepped}, the partial row is {row}"
                )

    def _check_roots(self, td: TensorDict) -> None:
        for env_id, env in enumerate(self._env._pool.envs):
            if self._env._engine.states.values[env_id] == State.RUNNING:
                assert td["observation"][env_id].item() == env.latest, (
                    f"env {env_id} is at {env.latest}"
                )

    def _check(self) -> None:
        engine, pool = self._env._engine, self._env._pool
        faults = [fault for env in pool.envs for fault in env.faults]
        assert not faults, faults
        # The next call begins by getting over an interrupt.
        if engine.is_dirty or engine.guard._holder:
            self._known = [None] * len(pool.envs)
            return
        assert not engine.is_in_flight
        is_owed = ~pool.words.has_answered()
        for env_id, env in enumerate(pool.envs):
            self._check_env(env_id, env, is_owed=bool(is_owed[env_id]))

    def _check_env(self, env_id: int, env: Scripted, *, is_owed: bool) -> None:
        engine, pool = self._env._engine, self._env._pool
        state, worker_id = (
            State(int(engine.states.values[env_id])),
            int(pool.worker_of[env_id]),
        )
        what = f"env {env_id}, {state.name}"
        if state >= State.STEPPING:
            has_row = not (
                is_owed
                or pool.words.answers_lost[env_id]
                or env_id in pool.outcome.faults
            )
            if (
                has_row
                and pool.is_serving(worker_id)
                and not pool.words.status[env_id]
                and env.stepped is not None
            ):
                row = engine.positions.where.row(
                    env_id, int(engine.states.columns[env_id])
                )
                row_number, is_cut = (
                    int(row["next", "observation"][0]),
                    bool(row["next", "truncated"][0]),
                )
                assert is_cut or row_number == env.stepped, (
                    f"{what}: its step is {env.stepped}, the row {row_number}"
                )
            return
        assert not is_owed or worker_id in pool.lost, f"{what} owes an answer"
        root = engine.positions.latest_root(env_id)
        row, is_done = int(root["observation",][0]), bool(root["done",][0])
        self._known[env_id] = row, state is not State.RUNNING
        if state is State.RUNNING:
            assert pool.is_serving(worker_id) or worker_id in self._unreported, (
                f"{what}: its worker was lost"
            )
            assert env.is_in_episode, f"{what}: its instance is not in an episode"
            assert (env.task,) == pool.blueprint.calls[env_id].factory.args, (
                f"{what}: its instance is of another task"
            )
            assert (row, is_done) == (env.latest, False), (
                f"{what}: at {env.latest}, the root is {row, is_done}"
            )
        elif state is State.ENDED or (row and state is not State.CUT):
            assert is_done, f"{what}: its root does not say so"

    def _check_that_all_run_again(self) -> None:
        env = self._env
        with contextlib.suppress(*EXPECTED):
            env.current()  # gets over an interrupt
        while env._engine.states.under_way.any():
            with contextlib.suppress(EnvError, WorkerLost):
                env.recv(1)
        # A loss may be noticed only now, and a reset may still raise.
        for _ in range(4):
            with contextlib.suppress(WorkerLost, EnvError):
                env.reset()
                td, root = env.step_and_maybe_reset(
                    TensorDict(
                        {"action": torch.full((env.num_envs,), GOES_ON)}, [env.num_envs]
                    )
                )
                self._check_rows(td, range(env.num_envs))
                self._check_roots(root)
        self._check()
        if not env._pool.lost:
            assert (env._engine.states.values == State.RUNNING).all()
