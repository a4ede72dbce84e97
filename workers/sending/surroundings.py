"""What a worker has of the process that started it: one table, for every way in which a worker is started.

It is what `multiprocessing` gives to a process that it spawns, and the environment variables. The helper gets none of
it but the import path, because executors with different surroundings share a helper; each worker gets its own at its
start. The flags of the interpreter (-O, -W, -X ...) are on the command lines of the helper and of executed workers.

Not in it: states of random generators, filters of warnings that code has added, signal handlers, threads, open files.
"""

import importlib.machinery
import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing import process, resource_tracker, util
from typing import Any, NamedTuple

from envherd.shm.interrupts import ignoring_refusals
from envherd.shm.platforms import parent_id
from envherd.workers.current import MARK, mark_of
from envherd.workers.sending import importing, pickling

_TRACKER: Any = resource_tracker._resource_tracker  # noqa: SLF001  # no public door


class Row(NamedTuple):
    """One thing that a worker has.

    Attributes:
        read: returns it in the owner, as JSON.
        apply: sets it in the worker.
        is_of_this_python: it means nothing to another interpreter.
    """

    read: Callable[[], Any]
    apply: Callable[[Any], None]
    is_of_this_python: bool = False


def import_path() -> list[str]:
    """Return `sys.path` for a process in another folder."""
    return [
        os.path.abspath(entry) if os.path.exists(entry or ".") else entry
        for entry in sys.path
    ]


def _set_path(path: list[str]) -> None:
    sys.path[:] = path


def _folder() -> str | None:
    with ignoring_refusals():  # it may have been deleted
        return os.getcwd()
    return None


def _enter_folder(folder: str | None) -> None:
    if folder is not None:
        os.chdir(folder)


def _set_environ(environ: dict[str, str]) -> None:
    for name in set(os.environ) - set(environ):
        del os.environ[name]
    os.environ.update(environ)
    os.environ[MARK] = mark_of(parent_id(), os.getpid())


def _log() -> list[Any]:
    logger = util._logger  # type: ignore[attr-defined]  # noqa: SLF001  # None until a program asks for it
    return [util._log_to_stderr, logger and logger.getEffectiveLevel()]  # type: ignore[attr-defined]  # noqa: SLF001


def _set_log(value: list[Any]) -> None:
    is_to_stderr, level = value
    if is_to_stderr:
        util.log_to_stderr()
    if level is not None:
        util.get_logger().setLevel(level)


def _tracker() -> list[int] | None:
    """Return where the process that removes shared memory reads, if it runs."""
    fd = _TRACKER._fd  # noqa: SLF001
    return None if fd is None else [os.getpid(), fd]


def _join_tracker(value: list[int] | None) -> None:
    """Use the owner's tracker: one of a worker's own would remove the owner's memory when the worker ends."""
    if value is not None and _TRACKER._fd is None:  # noqa: SLF001
        with ignoring_refusals():  # no /proc, or the tracker has ended
            _TRACKER._fd = os.open(  # noqa: SLF001  # as `multiprocessing` does
                "/proc/{}/fd/{}".format(*value),
                os.O_WRONLY | os.O_CLOEXEC,
            )


def _script() -> dict[str, Any]:
    """Return attributes of the script's module."""
    script = sys.modules["__main__"]
    file = getattr(script, "__file__", None)
    if file is not None:
        file = os.path.normpath(os.path.join(process.ORIGINAL_DIR or "", file))  # type: ignore[attr-defined]
    return {
        "__file__": file,
        "__package__": getattr(script, "__package__", None),
        "__doc__": script.__doc__,
    }


def _make_script(attributes: dict[str, Any]) -> None:
    """Replace `__main__`. A process that an env spawns does not run the script either: it has this module's spec."""
    script = pickling.Script("__main__")
    for name, value in attributes.items():
        if value is not None:
            setattr(script, name, value)
    script.__spec__ = importlib.machinery.ModuleSpec("__main__", None)
    pickling.enter_script(script)


TABLE = {
    "folder": Row(_folder, _enter_folder),
    "path": Row(import_path, _set_path, is_of_this_python=True),
    "environ": Row(lambda: dict(os.environ), _set_environ),
    "argv": Row(
        lambda: [str(one) for one in getattr(sys, "argv", [""])],
        partial(setattr, sys, "argv"),
    ),
    "first_folder": Row(
        lambda: process.ORIGINAL_DIR,  # type: ignore[attr-defined]
        partial(setattr, process, "ORIGINAL_DIR"),
    ),
    "authkey": Row(
        lambda: process.current_process().authkey.hex(),  # noqa: PLW0108  # of the process that calls it
        lambda key: setattr(process.current_process(), "authkey", bytes.fromhex(key)),
    ),
    "name": Row(
        lambda: process.current_process().name,
        lambda name: setattr(process.current_process(), "name", name),
    ),
    "start_method": Row(
        # Without the argument, the call itself would set the default, and a script could not set another one.
        lambda: multiprocessing.get_start_method(allow_none=True),
        lambda name: multiprocessing.set_start_method(name, force=True),
    ),
    "log": Row(_log, _set_log),
    "tracker": Row(_tracker, _join_tracker),
    "script": Row(_script, _make_script, is_of_this_python=True),
}


def read() -> dict[str, Any]:
    """Return what a worker that is started now has, as JSON."""
    return {name: row.read() for name, row in TABLE.items()}


def for_other_python(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part that a worker of another interpreter can have."""
    return {
        name: value
        for name, value in values.items()
        if not TABLE[name].is_of_this_python
    }


def enter(values: Mapping[str, Any]) -> None:
    """Make this process a worker that has these things."""
    importing.mark_child()
    for name, row in TABLE.items():
        if name in values:
            row.apply(values[name])


def enter_before_exec(values: Mapping[str, Any]) -> None:
    """Set what a program inherits that this process executes next."""
    enter({name: values[name] for name in ("folder", "environ")})
