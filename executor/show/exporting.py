"""Statistics for monitoring: a plain dict, TensorBoard, and Prometheus (on this machine only)."""

from __future__ import annotations

import ipaddress
import signal
import threading
from dataclasses import asdict, fields
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol, Self

from envherd.executor.batched import BatchedEnv
from envherd.executor.monitor.statistics import Statistics, WorkerStatistics
from envherd.workers.errors import Closed

#: Counters, which only grow; all other fields are gauges.
_COUNTERS = {
    *("env_steps", "agent_steps", "resets", "resets_ahead", "resets_missed"),
    *("episodes", "env_errors", "worker_losses", "interrupted"),
}
_WORKER_COUNTERS = {"env_steps", "resets", "busy_s", "cpu_s", "generation"}
_PHASES = ("idle", "step", "reset")


class ScalarWriter(Protocol):
    """The interface of TensorBoard's `SummaryWriter` and similar writers."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> Any:
        """Write one number."""


def to_dict(statistics: Statistics) -> dict[str, Any]:
    """Return statistics as dicts, lists, numbers and text, ready for `json.dump`."""
    return asdict(statistics)


def to_scalars(statistics: Statistics, prefix: str = "envherd") -> dict[str, float]:
    """Return statistics as `{"envherd/env_steps": 3.0, "envherd/worker0/busy_share": 0.4, ...}`, known values only."""
    scalars = {f"{prefix}/{name}": float(value) for name, value in _numbers(statistics)}
    for worker in statistics.workers:
        for name, value in _numbers(worker):
            if name not in ("worker_id", "pid", "phase_env_id"):
                scalars[f"{prefix}/worker{worker.worker_id}/{name}"] = float(value)
    return scalars


def write_scalars(writer: ScalarWriter, statistics: Statistics, step: int, prefix: str = "envherd") -> None:
    """Write statistics to TensorBoard's `SummaryWriter`, or anything with its `add_scalar`."""
    for tag, value in to_scalars(statistics, prefix).items():
        writer.add_scalar(tag, value, step)


def to_prometheus(statistics: Statistics) -> str:
    """Return statistics in Prometheus's text format."""
    lines: list[str] = []
    for name, value in _numbers(statistics):
        _metric(lines, f"envherd_{name}", name in _COUNTERS, [("", float(value))])
    for name in _names(WorkerStatistics):
        rows = []
        for worker in statistics.workers:
            value = getattr(worker, name)
            if value is not None and name not in ("worker_id", "pid", "phase_env_id"):
                rows.append((f'{{worker="{worker.worker_id}"}}', float(value)))
        if rows:
            _metric(lines, f"envherd_worker_{name}", name in _WORKER_COUNTERS, rows)
    phases = [
        (f'{{worker="{worker.worker_id}",phase="{phase}"}}', float(worker.phase == phase))
        for worker in statistics.workers
        for phase in _PHASES
    ]
    _metric(lines, "envherd_worker_phase", False, phases)  # noqa: FBT003  # a private function, one line up
    return "\n".join(lines) + "\n"


def _metric(lines: list[str], name: str, is_counter: bool, rows: list[tuple[str, float]]) -> None:  # noqa: FBT001
    full = f"{name}_total" if is_counter else name
    lines.append(f"# TYPE {full} {'counter' if is_counter else 'gauge'}")
    lines.extend(f"{full}{labels} {value!r}" for labels, value in rows)


def _names(kind: Any) -> list[str]:
    return [field.name for field in fields(kind) if field.type in ("int", "float", "int | None", "float | None")]


def _numbers(one: Statistics | WorkerStatistics) -> list[tuple[str, Any]]:
    return [(name, getattr(one, name)) for name in _names(type(one)) if getattr(one, name) is not None]


class MetricsServer:
    """Serves an executor's statistics at `http://127.0.0.1:PORT/metrics`, until it is closed.

    Only this machine can reach it. Every request reads the statistics anew, in a separate thread, while training
    continues.

    Args:
        env: the executor; once it is closed, requests are answered with 503.
        port: of the server; 0 takes a free one.
        host: a loopback address of this machine.

    Attributes:
        port: the port in use.

    Raises:
        ValueError: other machines could reach the address.
    """

    def __init__(self, env: BatchedEnv, port: int = 0, host: str = "127.0.0.1") -> None:
        if not (host == "localhost" or _is_loopback(host)):
            raise ValueError(
                f"MetricsServer failed: expected a loopback address, got {host!r}. For security, only loopback "
                f"addresses are allowed; forward the port (ssh -L) to read it from another machine."
            )
        handler = type("Handler", (_Handler,), {"env": env})
        self._server = ThreadingHTTPServer((host, port), handler)
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="envherd-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        """Return the server; it is closed at the end of the `with`."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()


class _Handler(BaseHTTPRequestHandler):
    """Answers `GET /metrics`."""

    env: BatchedEnv

    def setup(self) -> None:
        """Block SIGPIPE in this thread: a client that disconnects must not end the program."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPIPE})
        super().setup()

    def do_GET(self) -> None:  # http.server's name
        """Answer."""
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(404, "only /metrics is served")
            return
        try:
            text = to_prometheus(self.env.statistics())
        except Closed:
            self.send_error(503, "the executor is closed")
            return
        body = text.encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Print nothing: the terminal belongs to the program."""


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
