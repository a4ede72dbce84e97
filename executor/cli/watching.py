"""Implements `envherd top`, from its options to its exit code."""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from envherd.executor.cli.exit_codes import EXIT_INTERRUPTED, EXIT_USAGE
from envherd.executor.cli.sizing_report import size_text
from envherd.executor.monitor.running import listings
from envherd.executor.monitor.watching import ExecutorView, Watch, WorkerView, stack_of

SCHEMA = "envherd.top/1"
_KEYS = {"\x1b[A": "up", "k": "up", "\x1b[B": "down", "j": "down", "s": "stack", "q": "quit"}
#: Seconds in a phase other than idle after which it is shown in red.
_LONG_S = 5.0


@dataclass(frozen=True, kw_only=True)
class TopRequest:
    """The options of the command line."""

    is_once: bool = False
    is_json: bool = False
    interval_s: float = 1.0
    pid: int | None = None
    stack_worker: int | None = None


def run(request: TopRequest) -> int:
    """Show the running executors; return the exit code."""
    console = Console()
    with contextlib.closing(Watcher(request.pid)) as watcher:
        try:
            if refusal := _refusal(request, watcher.look()):
                Console(stderr=True).print(f"error: top failed: {refusal}", soft_wrap=True, highlight=False)
                return EXIT_USAGE
            if request.is_once:
                return _once(request, watcher, console)
            return _lines(request, watcher) if request.is_json else _live(request, watcher, console)
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED


class Watcher:
    """Watches this user's executors, or those of process `pid`; notices executors that start and close."""

    def __init__(self, pid: int | None = None) -> None:
        self._pid = pid
        self._watches: dict[tuple[int, int], Watch] = {}

    def look(self) -> list[ExecutorView]:
        """Return the activity of each executor since the previous call; that of a new executor is empty."""
        self.find()
        return [watch.look() for watch in self._watches.values()]

    def find(self) -> None:
        """Begin to watch new executors, and forget those that have closed."""
        found = {(one.pid, one.inode): one for one in listings() if self._pid is None or one.pid == self._pid}
        for key in [key for key in self._watches if key not in found]:
            self._watches.pop(key).close()
        for key, listing in found.items():
            if key not in self._watches:
                with contextlib.suppress(OSError):  # it closed in the meantime
                    self._watches[key] = Watch(listing)

    def close(self) -> None:
        """Stop watching all executors."""
        for watch in self._watches.values():
            watch.close()


def _refusal(request: TopRequest, views: list[ExecutorView]) -> str:
    """Return why there is nothing to show, or an empty string."""
    if request.pid is not None and not views:
        return f"process {request.pid} runs no executor of this user."
    num_workers = sum(len(view.workers) for view in views)
    if request.stack_worker is None or 0 <= request.stack_worker < num_workers:
        return ""
    if not num_workers:
        return f"expected a worker for --stack {request.stack_worker}, got none: no executor with workers is running."
    return f"expected --stack as a row of the table, 0 to {num_workers - 1}, got {request.stack_worker}."


def _once(request: TopRequest, watcher: Watcher, console: Console) -> int:
    time.sleep(request.interval_s)
    views = watcher.look()
    stack = _stack(views, request.stack_worker)
    if request.is_json:
        sys.stdout.write(json.dumps(_plain(views, stack), indent=2) + "\n")
        return 0
    console.print(screen(views, selected=-1, stack=stack, width=console.width))
    return 0


def _lines(request: TopRequest, watcher: Watcher) -> int:
    while True:
        time.sleep(request.interval_s)
        views = watcher.look()
        sys.stdout.write(json.dumps(_plain(views, _stack(views, request.stack_worker))) + "\n")
        sys.stdout.flush()


def _plain(views: list[ExecutorView], stack: str) -> dict[str, Any]:
    plain: dict[str, Any] = {"schema": SCHEMA, "executors": [view.to_plain() for view in views]}
    return {**plain, "stack": stack} if stack else plain


def _stack(views: list[ExecutorView], worker: int | None) -> str:
    rows = [one for view in views for one in view.workers]
    if worker is None or not 0 <= worker < len(rows):
        return ""
    return stack_of(rows[worker].load.pid)


def _live(request: TopRequest, watcher: Watcher, console: Console) -> int:
    selected = request.stack_worker or 0
    with _keys() as read_key, Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
        views = watcher.look()
        stack = _stack(views, request.stack_worker)
        next_look = time.monotonic()
        while True:
            if time.monotonic() >= next_look:
                views = watcher.look()
                next_look = time.monotonic() + request.interval_s
            num_rows = sum(len(view.workers) for view in views)
            selected = max(0, min(selected, num_rows - 1))
            live.update(screen(views, selected=selected, stack=stack, width=console.width), refresh=True)
            key = read_key(max(0.0, next_look - time.monotonic()))
            if key == "quit":
                return 0
            if key == "stack":
                stack = "" if stack else _stack(views, selected)
            if key in ("up", "down"):
                selected, stack = selected + (1 if key == "down" else -1), ""  # hide the stack of the previous worker


@contextlib.contextmanager
def _keys() -> Iterator[Any]:
    """Yield a function that waits for a key and returns its meaning; without a terminal, it only sleeps."""
    if not sys.stdin.isatty():

        def wait(seconds: float) -> str:
            time.sleep(seconds)
            return ""

        yield wait
        return
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    tty.setcbreak(fd)

    def read(seconds: float) -> str:
        if not select.select([fd], [], [], seconds)[0]:
            return ""
        return _KEYS.get(os.read(fd, 8).decode(errors="replace"), "")

    try:
        yield read
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def screen(views: list[ExecutorView], *, selected: int, stack: str, width: int = 200) -> RenderableType:
    """Return the executors as tables of at most `width` characters; a narrow table lacks the columns of `_DROPPED`."""
    if not views:
        return Text("no executor of this user is running (`SerialEnv` has no workers to show)", "dim")
    parts: list[RenderableType] = []
    row = 0
    for view in views:
        parts.append(_executor(view, selected - row, width))
        if stack and 0 <= selected - row < len(view.workers):  # below its executor, as others may fill the screen
            load = view.workers[selected - row].load
            parts += [Text(f"Stack of worker {load.worker_id}, pid {load.pid}", "bold"), Text(stack)]
        row += len(view.workers)
    if stack and selected < 0:
        parts.append(Text(stack))
    return Group(*parts)


#: The columns of a table, and those that a narrow terminal drops, in the order in which they are dropped.
_COLUMNS = (
    *("worker", "pid", "envs", "steps/s", "busy", "reset", "wait", "p50", "p99", "resets", "restarts", "USS", "RSS"),
    *("cpu", "at"),
)
_DROPPED = ("RSS", "p50", "cpu", "restarts", "reset", "p99", "resets", "wait")


def _executor(view: ExecutorView, selected: int, width: int) -> Table:
    one = view.listing
    title = f"{one.env} x {one.num_envs}, process {one.pid}: {view.steps_per_s:,.0f} env-steps/s   {one.command[:60]}"
    rows = [dict(zip(_COLUMNS, _cells(worker), strict=True)) for worker in view.workers]
    names = list(_COLUMNS)
    for name in _DROPPED:
        if _width_of(names, rows) > width:
            names.remove(name)
    heading = Text(title, overflow="ellipsis", no_wrap=True)
    table = Table(title=heading, caption=one.path, title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD)
    for name in names:
        table.add_column(name, justify="left" if name == "at" else "right", no_wrap=name != "at")
    for index, row in enumerate(rows):
        table.add_row(*(row[name] for name in names), style="reverse" if index == selected else "")
    return table


def _width_of(names: list[str], rows: list[dict[str, Any]]) -> int:
    """Return the characters that a line of the table needs, with three between columns."""
    return sum(3 + max(len(name), *(len(row[name]) for row in rows), 0) for name in names) + 2


def _cells(worker: WorkerView) -> list[Any]:
    load = worker.load
    at = load.phase if load.phase_env_id is None else f"{load.phase} of env {load.phase_env_id}"
    is_long = load.phase != "idle" and load.phase_s > _LONG_S
    return [
        str(load.worker_id),
        str(load.pid or "-"),
        str(len(worker.env_ids)),
        f"{worker.steps_per_s:,.0f}",
        f"{worker.busy_share:.0%}",
        f"{worker.reset_share:.0%}",
        f"{worker.wait_share:.0%}",
        _time(load.step_p50_s),
        _time(load.step_p99_s),
        f"{load.resets:,}",
        str(load.restarts),
        size_text(worker.uss_bytes),
        size_text(worker.rss_bytes),
        "-" if worker.cpu is None else str(worker.cpu),
        Text(f"{at}, {load.phase_s:,.1f} s", "bold red" if is_long else ""),
    ]


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1e6:,.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:,.1f} ms"
