"""`envherd top`: shows what running executors and their workers are doing."""

import contextlib
import time
from collections.abc import Generator
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from envherd.executor.cli.options import EXIT_INTERRUPTED, EXIT_USAGE, Top, write_json
from envherd.executor.guests.monitor import Watch, WorkerStatistics, plates, stack_of
from envherd.executor.sizing.rule import size_text, time_text
from envherd.executor.start.zygote import without_own_frames
from envherd.shm.platforms import missing

SCHEMA = "envherd.top/2"
#: Seconds in a phase other than idle after which it is shown in red.
_LONG_S = 5.0


def run(options: Top) -> int:
    """Show the running executors; return the exit code."""
    console = Console()
    with (
        contextlib.closing(looks(options.pid)) as each_look,
        contextlib.ExitStack() as until_end,
    ):
        if refusal := _refusal(options, next(each_look)):
            Console(stderr=True).print(
                f"error: top failed: {refusal}",
                soft_wrap=True,
                highlight=False,
            )
            return EXIT_USAGE
        live: Live | None = None
        # Elsewhere, one table after the other.
        if console.is_terminal and not (options.once or options.json):
            live = until_end.enter_context(
                Live(console=console, screen=True, auto_refresh=False)
            )
        try:
            while True:
                # Speeds and shares are those between two looks; the first look was made above.
                time.sleep(options.interval)
                watches = next(each_look)
                stack = _stack(watches, options.stack)
                if options.json:
                    plain = {
                        "schema": SCHEMA,
                        "executors": [watch.to_plain() for watch in watches],
                        **({"stack": stack} if stack else {}),
                    }
                    # One line for each reading, unless there is only one.
                    indent = 2 if options.once else None
                    write_json(options.json, plain, indent=indent)
                elif live is None:
                    console.print(
                        Text(stack),
                        soft_wrap=True,
                        end="\n" if stack else "",
                    )
                    console.print(screen(watches, "", console.width))
                else:
                    live.update(screen(watches, stack, console.width), refresh=True)
                if options.once:
                    return 0
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED


def _refusal(options: Top, watches: list[Watch]) -> str:
    """Return why there is nothing to show, or an empty string."""
    if lacks := missing():
        return f"expected Linux, got a system that lacks: {', '.join(lacks)}."
    if options.pid is not None and not watches:
        return f"process {options.pid} runs no executor of this user."
    num_workers = sum(len(watch.workers) for watch in watches)
    if options.stack is None or 0 <= options.stack < num_workers:
        return ""
    return (
        f"expected --stack as a row of the table, which has {num_workers} workers counted from 0, got "
        f"{options.stack}."
    )


def looks(pid: int | None = None) -> Generator[list[Watch], None, None]:
    """Yield the activity of each of this user's executors, or of those of process `pid`, since the previous time.

    Executors that have started or closed meanwhile are noticed; the activity of a new one is empty.
    """
    watches: dict[tuple[int, int], Watch] = {}
    try:
        while True:
            found = {
                (one.pid, one.inode): one
                for one in plates()
                if pid is None or one.pid == pid
            }
            for key in [key for key in watches if key not in found]:
                watches.pop(key).close()
            for key, plate in found.items():
                if key in watches:
                    watches[key].look()
                    continue
                with contextlib.suppress(OSError):  # it closed in the meantime
                    watches[key] = Watch(plate)
            yield list(watches.values())
    finally:
        for watch in watches.values():
            watch.close()


def _stack(watches: list[Watch], row: int | None) -> str:
    """Return the Python stack of the worker in a row of the table; empty without a row, or if there is no such row."""
    workers = [one for watch in watches for one in watch.workers]
    if row is None or not 0 <= row < len(workers):
        return ""
    worker = workers[row]
    return f"Stack of worker {worker.worker_id}, pid {worker.pid}\n{without_own_frames(stack_of(worker.pid))}"


def screen(watches: list[Watch], stack: str, width: int) -> RenderableType:
    """Return the executors as tables of at most `width` characters; a narrow table lacks the columns of `_DROPPED`."""
    if not watches:
        return Text(
            "no executor of this user is running (`SerialEnv` has no workers to show)",
            "dim",
        )
    return Group(
        *([Text(stack)] if stack else []),
        *(_executor(watch, width) for watch in watches),
    )


#: The columns that a narrow terminal drops, in the order in which they are dropped.
_DROPPED = ("PSS", "p50", "cpu", "errors", "restarts", "reset", "p99", "resets", "wait")


def _executor(watch: Watch, width: int) -> Table:
    rows = [_cells(worker) for worker in watch.workers]
    has_gpus = any(worker.gpu is not None for worker in watch.workers)
    names = [name for name in rows[0] if name != "gpu" or has_gpus]
    for name in _DROPPED:
        if _width_of(names, rows) > width:
            names.remove(name)
    table = Table(
        title=Text(
            f"{watch.env} x {watch.num_envs}, process {watch.pid}: {watch.steps_per_s:,.0f} env-steps/s   "
            f"{watch.command[:60]}",
            overflow="ellipsis",
            no_wrap=True,
        ),
        caption=watch.path,
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
    )
    for name in names:
        table.add_column(
            name,
            justify="left" if name == "at" else "right",
            no_wrap=name != "at",
        )
    for row in rows:
        table.add_row(*(row[name] for name in names))
    return table


def _width_of(names: list[str], rows: list[dict[str, Any]]) -> int:
    """Return the characters that a line of the table needs, with three between columns."""
    return (
        sum(3 + max(len(name), *(len(row[name]) for row in rows), 0) for name in names)
        + 2
    )


def _cells(worker: WorkerStatistics) -> dict[str, Any]:
    """Return the row of a worker, by column."""
    at = (
        worker.phase
        if worker.phase_env_id is None
        else f"{worker.phase} of env {worker.phase_env_id}"
    )
    is_long = worker.phase != "idle" and worker.phase_s > _LONG_S
    return {
        "worker": str(worker.worker_id),
        "pid": str(worker.pid or "-"),
        "envs": str(len(worker.env_ids)),
        "steps/s": f"{worker.steps_per_s:,.0f}",
        "busy": f"{worker.busy_share:.0%}",
        "reset": f"{worker.reset_share:.0%}",
        "wait": f"{worker.wait_share:.0%}",
        **{
            name: "-" if seconds is None else time_text(seconds)
            for name, seconds in (
                ("p50", worker.step_p50_s),
                ("p99", worker.step_p99_s),
            )
        },
        "resets": f"{worker.resets:,}",
        "errors": f"{worker.env_errors:,}",
        "restarts": str(worker.generation),
        "USS": size_text(worker.uss_bytes),
        "PSS": size_text(worker.pss_bytes),
        "cpu": "-" if worker.cpu is None else str(worker.cpu),
        "gpu": worker.gpu or "-",
        "at": Text(f"{at}, {worker.phase_s:,.1f} s", "bold red" if is_long else ""),
    }
