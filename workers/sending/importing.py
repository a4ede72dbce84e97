"""What a process imports: whether a worker would get the same module, and what must not happen meanwhile.

Guarantees: `can_import` imports nothing. It asks the finders of this process, which workers also have, and the import
path, which workers get.
Does not know: changes of a module's file since its import.
"""

import contextlib
import importlib.machinery
import os
import sys
import sysconfig
import traceback
import types
from collections.abc import Iterator
from multiprocessing import process
from pathlib import Path
from typing import Any

import cloudpickle

from envherd.shm.interrupts import uninterrupted

#: Names of the script in `sys.modules`; the second one in a child of `multiprocessing`.
SCRIPT = ("__main__", "__mp_main__")
#: Folders of installed packages, whose files nobody edits.
_INSTALLED = ("site-packages", "dist-packages")
#: Packages that read the command line.
_PARSERS = {
    *(
        "absl",
        "argparse",
        "cappa",
        "click",
        "cyclopts",
        "docopt",
        "fire",
        "getopt",
        "hydra",
        "jsonargparse",
    ),
    *("optparse", "simple_parsing", "tap", "tyro", "typer"),
}
_GUARD = (
    "starting workers failed: expected a program that has been imported, got {}. Put what makes the executor into a "
    'function, or under `if __name__ == "__main__":`.'
)


#: What `can_import` has found. Cleared where the import path may have changed.
places: dict[tuple[Any, ...], bool] = {}
_is_child = False


def goes_by_name(name: str) -> bool:
    """Return whether workers import a module: they can, and it is not registered to be sent by value."""
    by_value = cloudpickle.list_registry_pickle_by_value()
    return can_import(name) and not any(
        name == one or name.startswith(f"{one}.") for one in by_value
    )


def can_import(name: str) -> bool:
    """Return whether a worker that imports a module gets the one that this process has under the name."""
    module = sys.modules.get(name)
    key = (name, id(module), *sys.path)
    if key not in places:
        # What a signal handler raises would be taken for the failure of a finder.
        with uninterrupted():
            places[key] = _can_import(name, module)
    return places[key]


def _can_import(name: str, module: types.ModuleType | None) -> bool:
    if module is None or name in SCRIPT or module is sys.modules.get("__main__"):
        return False
    own = getattr(module, "__spec__", None)
    # To import it, a worker would run what makes this executor.
    if getattr(own, "_initializing", False):
        return False
    path = None
    parent = name.rpartition(".")[0]
    if parent:
        if not can_import(parent):
            return False
        path = getattr(sys.modules[parent], "__path__", None)
    found = None if parent and path is None else _ask_finders(name, path)
    if found is None:
        is_of_python = any(
            isinstance(one, types.FunctionType) for one in vars(module).values()
        )
        is_made_by_parent = bool(parent) and not getattr(own, "has_location", False)
        return is_made_by_parent and not is_of_python
    origin = getattr(own, "origin", None) or getattr(module, "__file__", None)
    return _is_equal(found.origin, origin)


def _ask_finders(name: str, path: Any) -> importlib.machinery.ModuleSpec | None:
    for finder in list(sys.meta_path):
        kind = finder if isinstance(finder, type) else type(finder)
        if kind.__module__ in SCRIPT or not hasattr(finder, "find_spec"):
            continue
        with contextlib.suppress(Exception):  # a finder of somebody else
            found = finder.find_spec(name, path)
            if found is not None:
                return found
    return None


def _is_equal(found: str | None, own: str | None) -> bool:
    if found == own or found is None or own is None:
        return found == own
    with contextlib.suppress(OSError):
        return os.path.samefile(found, own)
    return False


def codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield the code of a function or module, and of the functions and classes in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_in(constant)


# ---- while a module is imported ----------------------------------------------------------------


def mark_child() -> None:
    """Note that this process is a helper or a worker."""
    global _is_child  # noqa: PLW0603
    _is_child = True


def refuse_at_import() -> None:
    """Refuse to start processes while a process that was started for the script imports a module.

    Each of them would import the module also, and start the next.

    Raises:
        RuntimeError: with the module, and what to do.
    """
    if getattr(process.current_process(), "_inheriting", False):
        raise RuntimeError(
            _GUARD.format(
                "a process that `multiprocessing` starts, which runs the script again"
            )
        )
    if _is_child:
        for frame, _ in traceback.walk_stack(sys._getframe()):
            if (
                frame.f_code.co_name == "<module>"
                and frame.f_globals.get("__name__") not in SCRIPT
            ):
                raise RuntimeError(
                    _GUARD.format(
                        f"the import of {frame.f_globals.get('__name__')} in a worker or its helper process "
                        f"({frame.f_code.co_filename}:{frame.f_lineno})"
                    )
                )


def explain_exit(error: SystemExit) -> str:
    """Return why code has ended the process, where a traceback shows it, for messages."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    text = f"SystemExit: {error.code}" if error.code is not None else "SystemExit"
    names = [
        str(one.f_globals.get("__name__"))
        for one in frames
        if one.f_code.co_name == "<module>"
    ]
    imported = [name for name in names if name not in SCRIPT]
    where = f"The import of {imported[-1]}" if imported else "It"
    packages = [str(one.f_globals.get("__name__")).partition(".")[0] for one in frames]
    parser = next((name for name in packages if name in _PARSERS), None)
    if parser is not None:
        return (
            f"{text}. {where} parses this program's arguments with {parser}, which refuses {sys.argv[1:]}. Parse them "
            f"in the script under `if __name__ == '__main__':`, or give the parser an empty list"
        )
    return f"{text}. {where} calls sys.exit"


def own_folders() -> list[str]:
    """Return the folders of the import path that belong to no interpreter and hold no installed packages."""
    paths = sysconfig.get_paths()
    theirs = tuple(
        os.path.join(os.path.realpath(path), "")
        for path in (sys.prefix, sys.base_prefix, paths["stdlib"], paths["purelib"])
    )
    folders = [os.path.realpath(entry or ".") for entry in sys.path]
    return [
        folder
        for folder in folders
        if os.path.isdir(folder)
        and not os.path.join(folder, "").startswith(theirs)
        and Path(folder).name not in _INSTALLED
    ]
