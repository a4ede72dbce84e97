"""Statistics of executors for monitoring: scalars by tag, and metrics for Prometheus."""

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from envherd.executor.batched import BatchedEnv
from envherd.executor.guests.monitor.statistics import Statistics, WorkerStatistics
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
