"""`envherd top`: shows what running executors and their workers are doing."""

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
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from envherd.executor.cli.exit_codes import EXIT_INTERRUPTED, EXIT_USAGE

if TYPE_CHECKING:
    from envherd.executor.monitor.watching import ExecutorView, Watch, WorkerView

SCHEMA = "envherd.top/1"
_KEYS = {"\x1b[A": "up", "k": "up", "\x1b[B": "down", "j": "down", "s": "stack", "q": "quit"}
#: Seconds in a phase other than idle after which it is shown in red.
_LONG_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Top:
    """Watch this user's running executors: speed, load, memory and current command of each worker.

    Keys: up and down select a worker, s shows its Python stack, q quits.
    """

    once: Annotated[bool, typer.Option("--once", help="Print once and exit.")] = False
    json: Annotated[
        bool, typer.Option("--json", help="Print JSON: one object with --once, otherwise one per line.")
    ] = False
    interval: Annotated[float, typer.Option(min=0.1, help="Refresh interval in seconds.")] = 1.0
    pid: Annotated[int | None, typer.Option(help="Show only the executors of this process.")] = None
    stack: Annotated[
        int | None, typer.Option(metavar="WORKER", help="Also show the Python stack of the worker in this row, from 0.")
    ] = None

    def run(self) -> int:
        """Show the running executors; return the exit code."""
        console = Console()
        with contextlib.closing(Watcher(self.pid)) as watcher:
            try:
                if refusal := self._refusal(watcher.look()):
                    Console(stderr=True).print(f"error: top failed: {refusal}", soft_wrap=True, highlight=False)
                    return EXIT_USAGE
                if not (self.once or self.json):
                    return self._live(watcher, console)
                while True:
                    time.sleep(self.interval)
                    self._print(watcher.look(), console)
                    if self.once:
                        return 0
            except KeyboardInterrupt:
                return EXIT_INTERRUPTED

    def _refusal(self, views: list[ExecutorView]) -> str:
        """Return why there is nothing to show, or an empty string."""
        if self.pid is not None and not views:
            return f"process {self.pid} runs no executor of this user."
        num_workers = sum(len(view.workers) for view in views)
        if self.stack is None or 0 <= self.stack < num_workers:
            return ""
        if not num_workers:
            return f"expected a worker for --stack {self.stack}, got none: no executor with workers is running."
        return f"expected --stack as a row of the table, 0 to {num_workers - 1}, got {self.stack}."

    def _print(self, views: list[ExecutorView], console: Console) -> None:
        stack = _stack(views, self.stack)
        if not self.json:
            console.print(screen(views, selected=-1, stack=stack, width=console.width))
            return
        plain: dict[str, Any] = {"schema": SCHEMA, "executors": [view.to_plain() for view in views]}
        plain |= {"stack": stack} if stack else {}
        sys.stdout.write(json.dumps(plain, indent=2 if self.once else None) + "\n")
        sys.stdout.flush()

    def _live(self, watcher: Watcher, console: Console) -> int:
        selected = self.stack or 0
        with _keys() as read_key, Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
            views = watcher.look()
            stack = _stack(views, self.stack)
            next_look = time.monotonic()
            while True:
                if time.monotonic() >= next_look:
                    views = watcher.look()
                    next_look = time.monotonic() + self.interval
                num_rows = sum(len(view.workers) for view in views)
                selected = max(0, min(selected, num_rows - 1))
                live.update(screen(views, selected=selected, stack=stack, width=console.width), refresh=True)
                key = read_key(max(0.0, next_look - time.monotonic()))
                if key == "quit":
                    return 0
                if key == "stack":
                    stack = "" if stack else _stack(views, selected)
                if key in ("up", "down"):
                    selected, stack = selected + (1 if key == "down" else -1), ""  # hide that of the previous worker


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
        from envherd.executor.monitor.running import listings
        from envherd.executor.monitor.watching import Watch

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


def _stack(views: list[ExecutorView], worker: int | None) -> str:
    from envherd.executor.monitor.watching import stack_of

    rows = [one for view in views for one in view.workers]
    if worker is None or not 0 <= worker < len(rows):
        return ""
    return stack_of(rows[worker].load.pid)


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
    from envherd.executor.cli.sizing_report import size_text

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
