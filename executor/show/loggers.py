"""Episodes and statistics of executors for loggers: TensorBoard, Weights & Biases, Prometheus, a program's own prints.

with ParallelEnv(8, make_env, options=ExecutorOptions(episode_statistics=True)) as env:
    logger = EpisodeLogger(SummaryWriter("runs/first"))
    for data in Collector(env, policy, frames_per_batch=2048, total_frames=10**6):
        logger.add(data)
        logger.write(env.statistics())
"""

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from envherd.executor.batched import BatchedEnv
from envherd.executor.guests.monitor import Statistics, WorkerStatistics
from envherd.workers.errors import Closed

#: Counters, which only grow; all other fields are gauges.
_COUNTERS = {
    *("env_steps", "agent_steps", "resets"),
    *(
        "episodes",
        "env_errors",
        "worker_losses",
        "interrupted",
        "busy_s",
        "reset_s",
        "cpu_s",
        "generation",
    ),
}


class Episode(NamedTuple):
    """One episode that has ended.

    Attributes:
        returns: the sum of rewards; of a group, the mean over its agents, and each agent's; by name.
        length: in steps.
        seconds: from its first step to its last.
    """

    returns: dict[str, float]
    length: int
    seconds: float


class EpisodeLogger:
    """Takes batches of an executor with `episode_statistics`, and writes means over the episodes that ended in them.

    Args:
        *writers: each a TensorBoard `SummaryWriter` (anything with its `add_scalar`), or a Weights & Biases run
            (anything with its `log(dict, step=...)`). None is needed to use the attributes.
        window: number of last episodes for `mean_return` and `mean_length`.

    Attributes:
        num_steps: transitions of all batches, interrupted ones included.
        num_episodes: episodes that have ended in them, without those that were interrupted (a lost worker, or
            `on_env_error="interrupt"`).
        last: the last `window` of these.

    Raises:
        TypeError: an object that is neither kind of writer.
    """

    def __init__(self, *writers: Any, window: int = 100) -> None:
        for writer in writers:
            if not (
                callable(getattr(writer, "add_scalar", None))
                or callable(getattr(writer, "log", None))
            ):
                raise TypeError(
                    f"EpisodeLogger failed: expected writers with add_scalar (TensorBoard) or log (Weights & Biases), "
                    f"got a {type(writer).__name__}. Pass SummaryWriter(...) or wandb.init(...)."
                )
        if window < 1:
            raise ValueError(
                f"EpisodeLogger failed: expected window to be at least 1, got {window!r}."
            )
        self._writers = writers
        self._new: list[Episode] = []
        self.num_steps = self.num_episodes = 0
        self.last: deque[Episode] = deque(maxlen=window)

    def add(self, data: TensorDictBase) -> list[Episode]:
        """Take one batch of transitions, in any shape: of a rollout, a collector, a step or `recv`.

        Returns:
            The episodes that ended in it, in the order of its rows.

        Raises:
            ValueError: the batch has no statistics of episodes.
        """
        self.num_steps += data.numel()
        rows = data.tensordicts if isinstance(data, LazyStackedTensorDict) else [data]
        ended = [episode for row in rows for episode in _episodes_of(row)]
        self.num_episodes += len(ended)
        self.last.extend(ended)
        self._new.extend(ended)
        return ended

    @property
    def mean_return(self) -> float:
        """Mean return of the last episodes (of envs with agents: the mean of the first group); NaN before the first."""
        return _mean([next(iter(episode.returns.values())) for episode in self.last])

    @property
    def mean_length(self) -> float:
        """Mean length of the last episodes, in steps; NaN before the first."""
        return _mean([float(episode.length) for episode in self.last])

    def write(
        self,
        statistics: Statistics | None = None,
        *,
        step: int | None = None,
        **figures: float,
    ) -> dict[str, float]:
        """Write means over the episodes that ended since the last call, and the arguments, to all writers.

        Args:
            statistics: of the executor, `env.statistics()`; under `envherd/`.
            step: the horizontal axis; None for `num_steps`.
            **figures: further numbers, under their names.

        Returns:
            The written numbers by tag: `episode/return`, `episode/length`, `episode/time` (seconds), `episode/number`
            (how many); of agents `GROUP/episode/return` and `GROUP/episode/return/0`, ... .
        """
        scalars = {name: float(value) for name, value in figures.items()}
        if statistics is not None:
            scalars.update(to_scalars(statistics))
        scalars["episode/number"] = float(self.num_episodes)
        if self._new:
            for tag in dict.fromkeys(
                tag for episode in self._new for tag in episode.returns
            ):
                scalars[tag] = _mean(
                    [one.returns[tag] for one in self._new if tag in one.returns]
                )
            scalars["episode/length"] = _mean([float(one.length) for one in self._new])
            scalars["episode/time"] = _mean([one.seconds for one in self._new])
        self._new.clear()
        at = self.num_steps if step is None else step
        for writer in self._writers:
            if callable(getattr(writer, "add_scalar", None)):
                for tag, value in scalars.items():
                    writer.add_scalar(tag, value, at)
            else:
                writer.log(scalars, step=at)
        return scalars


def _episodes_of(data: TensorDictBase) -> Iterator[Episode]:
    """Yield the episodes that ended in a batch."""
    following = data.get("next")
    length = following.get(("episode", "length"), None)
    if length is None:
        raise ValueError(
            "add failed: expected a batch with next/episode/return, got one without. Make the executor with "
            "options=ExecutorOptions(episode_statistics=True)."
        )
    is_over = following.get("done").clone()
    interrupted = following.get("interrupted", None)
    if interrupted is not None:
        is_over &= ~interrupted
    mask = is_over.squeeze(-1)
    keys = [
        key
        for key in following.keys(include_nested=True, leaves_only=True)
        if isinstance(key, tuple)
        and "episode" in key[:-1]
        and key[-1].endswith("return")
    ]
    sums = {"/".join(key): following.get(key)[mask].double().flatten(1) for key in keys}
    lengths = length[mask].flatten().tolist()
    seconds = following.get(("episode", "time"))[mask].flatten().tolist()
    for row, (steps, elapsed) in enumerate(zip(lengths, seconds, strict=True)):
        yield Episode(
            _by_tag({tag: values[row] for tag, values in sums.items()}),
            steps,
            elapsed,
        )


def _by_tag(sums: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return the mean over the agents of each sum, under its tag, and then each agent's own, if there are several."""
    means = {tag: float(values.mean()) for tag, values in sums.items()}
    each = {
        f"{tag}/{agent}": value
        for tag, values in sums.items()
        if len(values) > 1
        for agent, value in enumerate(values.tolist())
    }
    return means | each


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def to_scalars(statistics: Statistics, prefix: str = "envherd") -> dict[str, float]:
    """Return statistics as `{"envherd/env_steps": 3.0, "envherd/worker0/busy_share": 0.4, ...}`, known values only."""
    scalars = {f"{prefix}/{name}": value for name, value in _numbers(statistics)}
    for worker in statistics.workers:
        scalars |= {
            f"{prefix}/worker{worker.worker_id}/{name}": value
            for name, value in _numbers(worker)
        }
    return scalars


class PrometheusCollector:
    """Collects an executor's statistics for `prometheus_client`: `REGISTRY.register(PrometheusCollector(env))`.

    Each request to the server of `prometheus_client` reads the statistics anew. Once the executor is closed, there are
    none. Executors that are registered at the same time need different prefixes.

    Args:
        env: the executor.
        prefix: of the names of the metrics.
    """

    def __init__(self, env: BatchedEnv, prefix: str = "envherd") -> None:
        self._env = env
        self._prefix = prefix

    def collect(self) -> Iterator[Any]:
        """Yield the metrics: `PREFIX_env_steps_total`, `PREFIX_worker_busy_share{worker="0"}`, ... ."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        try:
            statistics = self._env.statistics()
        except Closed:
            return
        metrics: dict[str, Any] = {}

        def add(prefix: str, one: Statistics | WorkerStatistics, **labels: str) -> None:
            for name, value in _numbers(one):
                kind = CounterMetricFamily if name in _COUNTERS else GaugeMetricFamily
                full = f"{prefix}_{name}"
                metric = metrics.setdefault(full, kind(full, name, labels=[*labels]))
                metric.add_metric([*labels.values()], value)

        add(self._prefix, statistics)
        for worker in statistics.workers:
            add(f"{self._prefix}_worker", worker, worker=str(worker.worker_id))
        yield from metrics.values()


def _numbers(one: Statistics | WorkerStatistics) -> Iterator[tuple[str, float]]:
    """Yield name and value of each number that is known, except ids."""
    for field in fields(one):
        value = getattr(one, field.name)
        if (
            isinstance(value, (int, float))
            and not isinstance(value, bool)
            and field.name not in ("worker_id", "pid", "phase_env_id")
        ):
            yield field.name, float(value)
