"""Fuzz an `AsyncCollector`: envs raise, die, hang and are slow, and Ctrl-C breaks off calls, at random.

Every transition of every batch is compared with its env's diary (see `tests.oracles.fuzzing`): none is wrong, torn, out
of order or duplicated, and none is missing without an error.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import signal
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from envherd import AsyncCollector, EnvherdError, ExecutorOptions, InternalError, ParallelEnv
from tests.oracles import fuzzing
from tests.oracles.fuzz_envs import NUM_ACTIONS, FuzzEnv, How, Kind, Traps, When
from tests.oracles.fuzz_executor import STOPS, Interrupter
from tests.oracles.fuzzing import Oracle, Row, Transition, Violation, Watch

#: Option set -> its fixed options; the others are drawn.
VARIANTS: dict[str, dict[str, Any]] = {
    "rows": {"layout": "rows"},
    "flat": {"layout": "flat"},
    "background": {"in_background": 2},
    "threads": {"env_threads": True},
    "sizes": {"batch_sizes": (2, 5)},
    "interrupts": {"in_background": 0, "is_interrupted": True},
    "background interrupts": {"in_background": 1, "is_interrupted": True},
}
_STEP_TIMEOUT_S = 0.5
_TRAPS = {
    When.STEP: (How.KILL, How.EXIT, How.RAISE, How.HANG, How.SLOW, How.STOP),
    When.STEP_DONE: (How.KILL, How.RAISE, How.HANG),
    When.RESET: (How.KILL, How.RAISE, How.SLOW),
    When.RESET_DONE: (How.KILL, How.RAISE),
}


class Session:
    """One executor with its collector, and the oracle for their data."""

    def __init__(self, rng: random.Random, variant: str, folder: str, watch: Watch) -> None:
        asked = VARIANTS[variant]
        self._rng, self._watch = rng, watch
        self.num_envs = rng.randint(2, 5)
        num_workers = rng.randint(1, self.num_envs)
        self._traps = Traps(folder, self.num_envs)
        self._oracle = Oracle(folder, [(i, 0) for i in range(self.num_envs)])
        self._steps = np.full(self.num_envs, -1)
        self._is_cut = np.zeros(self.num_envs, bool)
        self._num_gaps, self._num_errors = 0, 0
        self._interrupter = Interrupter() if asked.get("is_interrupted") else None
        options = ExecutorOptions(
            on_worker_loss="restart",
            max_restarts=10_000,
            restart_window_s=0.001,
            step_timeout_s=_STEP_TIMEOUT_S,
            reset_timeout_s=2.0,  # a worker that stops while another of its envs resets has this long
            stall_log_s=5.0,
            close_timeout_s=2.0,
            env_threads=asked.get("env_threads", False),
        )
        layout = asked.get("layout", rng.choice(["rows", "flat"]))
        self._frames = rng.randint(1, 6) * (self.num_envs if layout == "rows" else 1)
        in_background = asked.get("in_background", rng.choice([0, 0, 1]))
        max_batch = rng.choice([None, rng.randint(1, self.num_envs)])
        watch.begin(f"open {self.num_envs} envs, {num_workers} workers, {layout}, {in_background=}, {max_batch=}")
        makes = [functools.partial(FuzzEnv, folder, self.num_envs, i) for i in range(self.num_envs)]
        self.env = ParallelEnv(
            self.num_envs, makes, num_workers=num_workers, seed=rng.randrange(2**31), options=options
        )
        self._oracle.reseeded(self.env.seed)
        self._actions = np.random.default_rng(rng.randrange(2**31))
        self._collector = AsyncCollector(
            self.env,
            self._act,
            frames_per_batch=self._frames,
            layout=layout,
            in_background=in_background,
            max_batch=max_batch,
            deadline_s=rng.choice([None, 0.002]),
            batch_sizes=asked.get("batch_sizes"),
            close_env=False,
        )

    def _act(self, root: TensorDictBase) -> TensorDictBase:
        return root.set("action", torch.from_numpy(self._actions.integers(0, NUM_ACTIONS, len(root))))

    def play(self, num_operations: int) -> None:
        """Apply random operations, and check the results."""
        for _ in range(num_operations):
            what = self._rng.choices(["collect", "trap", "kill", "look"], [60, 25, 5, 10])[0]
            if what == "trap":
                self._trap()
            elif what == "kill":
                self._kill()
            elif what == "look":
                self._watch.begin("statistics")
                assert self._collector.statistics().lag_max >= 0
            else:
                self._collect()
        self._watch.begin("close")
        self._collector.close()
        self.env.close()
        if self._num_gaps > self._num_errors * self.num_envs:
            raise Violation(f"{self._num_gaps} steps are missing after {self._num_errors} errors")

    def close(self) -> None:
        """Close everything after a failure."""
        with contextlib.suppress(Exception):
            self._collector.close()
        self.env.close()

    def _trap(self) -> None:
        env_id, when = self._rng.randrange(self.num_envs), self._rng.choice(list(_TRAPS))
        how, count = self._rng.choice(_TRAPS[when]), self._rng.randint(1, 4)
        self._watch.begin(f"trap of env {env_id}: {how.name} at {when.name}, in {count}")
        self._traps.words[env_id, 1:3] = how, count
        self._traps.words[env_id, 0] = when

    def _kill(self) -> None:
        workers = self.env.statistics().workers
        pid = self._rng.choice([worker.pid for worker in workers if worker.pid is not None])
        self._watch.begin(f"kill {pid}")
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        self._num_errors += 1

    def _collect(self) -> None:
        self._watch.begin("collect")
        data = None
        try:
            if self._interrupter is not None and self._rng.random() < 0.5:
                how, delay_s = self._rng.choice(Interrupter.HOWS), self._rng.uniform(0, 0.02)
                self._watch.note(f"interrupt: {how} after {delay_s:.4f}")
                self._num_errors += 2
                _, data = self._interrupter.call(self._collector.collect, how, delay_s)
            else:
                data = self._collector.collect()
        except InternalError:
            raise
        except (EnvherdError, *STOPS) as error:
            self._watch.note(f"{type(error).__name__}: {str(error)[:160]}")
            self._num_errors += 1
        if data is not None:
            self._take(data)

    def _take(self, data: TensorDictBase) -> None:
        self._num_errors += int(np.count_nonzero(self._traps.words[:, 3]))  # a loss is no error of a call
        self._traps.words[:, 3] = 0
        if data.numel() != self._frames:
            raise Violation(f"expected {self._frames} transitions, got {data.numel()}")
        self._oracle.read_diary()
        flat = data.reshape(-1)
        following = flat["next"]
        named = {name: following[name].reshape(-1).tolist() for name in ("reward", "done", "terminated", "truncated")}
        interrupted = following.get("interrupted", None)
        cut = [False] * len(flat) if interrupted is None else interrupted.reshape(-1).tolist()
        roots, nexts = fuzzing.rows_of(flat["observation"]), fuzzing.rows_of(following["observation"])
        ids, steps, actions = (flat[name].reshape(-1).tolist() for name in ("env_ids", "step", "action"))
        for i, env_id in enumerate(ids):
            one = Transition(
                root=roots[i],
                action=actions[i],
                next=nexts[i],
                reward=named["reward"][i],
                done=named["done"][i],
                terminated=named["terminated"][i],
                truncated=named["truncated"][i],
                interrupted=cut[i],
            )
            self._follow(env_id, steps[i], roots[i], one)

    def _follow(self, env_id: int, step: int, root: Row, one: Transition) -> None:
        place = (env_id, 0)
        gap = step - int(self._steps[env_id]) - 1
        if gap < 0:
            raise Violation(f"env {env_id}: step {step} after step {self._steps[env_id]}")
        if self._is_cut[env_id] and not gap:
            raise Violation(f"env {env_id}: its episode is cut before step {step}, and no step is missing")
        self._steps[env_id] = step
        self._num_gaps += gap
        before = self._oracle.at[place]
        # After a lost step, its episode has ended or continues.
        if gap or (before is not None and root != before and self._num_errors):
            self._oracle.ended[place] |= root.t == 0
            if root.t != 0:
                self._oracle.forget([place])
        if root.t == 0 and (root.nonce, root.episode) not in self._oracle.begun:
            self._oracle.begin(place, root)
        # The step before one that was lost is `truncated`: what follows it belongs to another episode.
        kind = self._oracle.made.get((one.next.nonce, one.next.episode, one.next.t), (None,))[0]
        self._is_cut[env_id] = one.truncated and not one.interrupted and kind == Kind.STEP
        if self._is_cut[env_id]:
            one = one._replace(truncated=False, done=False)
        self._oracle.follow(place, one)
        self._oracle.ended[place] |= bool(self._is_cut[env_id])


def run(seed: int, variant: str, watch: Watch, num_operations: int) -> None:
    """Run one case."""
    rng = random.Random(seed)
    with fuzzing.new_folder() as folder:
        session = Session(rng, variant, folder, watch)
        try:
            session.play(num_operations)
        except BaseException:
            watch.stop()
            session.close()
            raise
        watch.begin("leftovers")
    del session
    watch.check_leftovers()
