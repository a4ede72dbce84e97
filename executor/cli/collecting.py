"""The loop of `envherd rollout`: steps, counts, keeps pictures and data, shows progress, stops cleanly on Ctrl-C."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text
from tensordict import TensorDictBase

from envherd.executor.batched import BatchedEnv
from envherd.executor.cli.interrupts import DeferredInterrupt
from envherd.executor.cli.media import FrameLog
from envherd.executor.cli.returns import ReturnMeter, ReturnSummary
from envherd.executor.cli.storing import RolloutStore
from envherd.executor.monitor.statistics import Statistics
from envherd.executor.show.camera import Camera
from envherd.workers.errors import EnvherdError
from envherd.workers.processes import memory_of

Policy = Callable[[TensorDictBase], TensorDictBase]
#: Seconds between updates of the progress bar; few updates, so that they do not slow down fast envs.
_REFRESH_S = 0.1


@dataclass(frozen=True)
class Collected:
    """The result of the loop; `Figures` documents the fields of the same names.

    Attributes:
        failure: the error that ended the loop after at least one step, or None.
    """

    steps_done: int
    collect_s: float
    keep_s: float
    is_interrupted: bool
    failure: EnvherdError | None
    returns: ReturnSummary
    statistics: Statistics
    parent_uss_bytes: int
    parent_pss_bytes: int


@dataclass
class Collector:
    """Collects a number of steps of a batch of envs; envs whose episode ends are reset and continue.

    Attributes:
        env: the executor; it is reset first.
        num_steps: T.
        policy: takes a root batch `[N]` and returns it with the action; None draws random actions.
        frames: receives the pictures, or None.
        store: receives the data, or None.
    """

    env: BatchedEnv
    num_steps: int
    policy: Policy | None = None
    frames: FrameLog | None = None
    store: RolloutStore | None = None
    _camera: Camera | None = None

    def run(self, console: Console) -> Collected:
        """Collect the steps. Ctrl-C, or an error after the first step, ends the loop; complete steps are kept.

        Raises:
            MediaError: `frames` is set, but no env has a picture. Raised before the first step.
            EnvherdError: an env or a worker failed in the first reset or step.
        """
        env, meter = self.env, ReturnMeter.for_spec(self.env.spec, self.env.num_envs)
        act = self.policy or env.rand_action
        num_done, collect_s, keep_s = 0, 0.0, 0.0
        is_interrupted, failure = False, None
        clock = time.perf_counter
        with _progress(console, env, self.num_steps) as bar, torch.no_grad(), DeferredInterrupt() as interrupts:
            try:
                root = env.reset()
                self._look(0, root)
                for step in range(self.num_steps):
                    start = clock()
                    td, following = env.step_and_maybe_reset(act(root))
                    interrupts.hold()
                    stepped = clock()
                    self._keep(step, td, meter)
                    root = following
                    num_done = step + 1
                    collect_s += stepped - start
                    keep_s += clock() - stepped
                    bar.show(num_done, meter.num_episodes, collect_s)
                    interrupts.release()
            except KeyboardInterrupt:
                is_interrupted = True
            except EnvherdError as error:
                if num_done == 0:
                    raise
                failure = error
        memory = memory_of(os.getpid(), is_alone=True)
        return Collected(
            steps_done=num_done,
            collect_s=collect_s,
            keep_s=keep_s,
            is_interrupted=is_interrupted,
            failure=failure,
            returns=meter.summary(),
            statistics=env.statistics(),
            parent_uss_bytes=memory["uss"],
            parent_pss_bytes=memory["pss"],
        )

    def _keep(self, step: int, td: TensorDictBase, meter: ReturnMeter) -> None:
        after = td["next"]
        rewards = [_numpy(after[leaf.key]) for leaf in self.env.reward_spec]
        interrupted = after.get("interrupted", None)
        meter.add(rewards, _numpy(after["done"]), None if interrupted is None else _numpy(interrupted))
        if self.store is not None:
            self.store.add(td)
        if self.frames is not None and self.frames.wants(step + 1):
            self._look(step + 1, after)

    def _look(self, step: int, td: TensorDictBase) -> None:
        if self.frames is None:
            return
        if self._camera is None:
            self._camera = Camera(self.env)
        self.frames.add(step, self._camera.look(td))


def _numpy(tensor: torch.Tensor) -> np.ndarray:
    array: np.ndarray = tensor.numpy(force=True)
    return array


class _Bar:
    """The progress bar. The loop calls `show` at every step; the bar is redrawn at most ten times a second."""

    def __init__(self, progress: Progress, env: BatchedEnv, num_steps: int) -> None:
        self._progress = progress
        self._num_steps = num_steps
        self._num_envs = env.num_envs
        self._task = progress.add_task("steps", total=num_steps, rate=0.0, episodes=0)
        self._shown = 0.0

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, num_done: int, episodes: int, collect_s: float) -> None:
        """Show the number of steps and episodes so far, and the speed."""
        now = time.perf_counter()
        if now - self._shown < _REFRESH_S and num_done < self._num_steps:
            return
        self._shown = now
        rate = num_done * self._num_envs / collect_s
        self._progress.update(self._task, completed=num_done, rate=rate, episodes=episodes)


class _RateColumn(ProgressColumn):
    """Env-steps per second and episodes."""

    def render(self, task: Task) -> Text:
        rate, episodes = task.fields["rate"], task.fields["episodes"]
        return Text(f"{rate:,.0f} env-steps/s  {episodes} episodes", "green")


def _progress(console: Console, env: BatchedEnv, num_steps: int) -> _Bar:
    columns = (
        SpinnerColumn(),
        BarColumn(bar_width=None),
        TextColumn("{task.completed:.0f}/{task.total:.0f} steps", table_column=Column(no_wrap=True)),
        _RateColumn(table_column=Column(no_wrap=True)),
        TimeRemainingColumn(compact=True, elapsed_when_finished=True),
    )
    return _Bar(Progress(*columns, console=console, expand=True), env, num_steps)
