"""Workers that another Python interpreter executes; see `workers.guests.interpreters`."""

import functools
import itertools
import json
import os
import re
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from envherd.executor.sending.blueprint import Blueprint
from envherd.workers.errors import FactoryError
from envherd.workers.guests.interpreters import OLDEST
from envherd.workers.sending import surroundings
from envherd.workers.sending.importing import own_folders

#: The folder of this package.
_PACKAGE = str(Path(__file__).parents[2])
#: Packages that the worker side imports.
_NEEDED = ("numpy", "cloudpickle")
_TIMEOUT_S = 60.0
#: For any version of Python.
_ASK = """
import json, os, sys
fd, inode, package = sys.argv[1:4]
lost = [] if os.path.isdir(package) else ["the folder " + package]
try:
    lost += [] if os.fstat(int(fd)).st_ino == int(inode) else ["its descriptors"]
except OSError:
    lost.append("its descriptors")
if os.sep == "/" and not any(map(os.path.isdir, ("/proc/self/fd", "/dev/fd"))):
    lost.append("/proc")
lacks = {}
for name in sys.argv[4:]:
    try:
        __import__(name)
    except Exception as error:
        lacks[name] = "%s: %s" % (type(error).__name__, error)
name = sys.implementation.name if hasattr(sys, "implementation") else "cpython"
group = os.getpgrp() if hasattr(os, "getpgrp") else 0
answer = json.dumps({"version": list(sys.version_info[:3]), "name": name, "lacks": lacks, "lost": lost, "group": group})
os.write(1, ("<envherd>" + answer + "</envherd>").encode("ascii"))
"""
#: The answer, which a `sitecustomize` may surround with other output, or have sent to standard error.
_ANSWER = re.compile(rb"<envherd>(.*?)</envherd>", re.DOTALL)
#: Variables that would lead an interpreter to the packages of this one.
_OURS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")


@functools.cache
def check_interpreter(python: str) -> None:
    """Ask an interpreter for its version and packages.

    Raises:
        FactoryError: it cannot run workers; the message has the command that installs what is missing.
    """
    try:
        with tempfile.TemporaryFile() as file:
            seen = str(file.fileno()), str(os.fstat(file.fileno()).st_ino), _PACKAGE
            done = subprocess.run(
                [*shlex.split(python), "-c", _ASK, *seen, *_NEEDED],
                capture_output=True,
                timeout=_TIMEOUT_S,
                check=False,
                stdin=subprocess.DEVNULL,
                env=environment_for(dict(os.environ)),
                # Windows refuses `pass_fds`.
                pass_fds=(file.fileno(),) if hasattr(os, "fork") else (),
            )
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise FactoryError(
            f"InPython failed: expected a Python interpreter, got {python} ({error})."
        ) from None
    found = _ANSWER.search(done.stdout + done.stderr)
    if found is None:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        why = lines[-1] if lines else f"exit code {done.returncode}"
        raise FactoryError(
            f"InPython failed: expected a Python interpreter, got {python} ({why})."
        )
    answer: dict[str, Any] = json.loads(found.group(1))
    # 0 if the leader of the group is outside of its namespace, so the group is the caller's.
    others = answer.get("group", 0) not in (0, getattr(os, "getpgrp", int)())
    if lost := [
        *answer.get("lost", ()),
        *(["its process group, by which it is ended"] if others else []),
    ]:
        raise FactoryError(
            f"InPython failed: expected a command that leaves a worker what it needs, got {python}, which loses "
            f"{' and '.join(lost)}. See 'A command in front of the interpreter' in docs/custom_envs.md."
        )
    version = ".".join(map(str, answer["version"]))
    if tuple(answer["version"]) < OLDEST or answer["name"] != "cpython":
        raise FactoryError(
            f"InPython failed: expected CPython {'.'.join(map(str, OLDEST))} or newer, got {answer['name']} {version} "
            f"({python}). Make the virtual environment with a newer interpreter."
        )
    if answer["lacks"]:
        why = "; ".join(
            f"{name} ({reason})" for name, reason in answer["lacks"].items()
        )
        raise FactoryError(
            f"InPython failed: the workers of {python} (Python {version}) cannot import {why}. Run: {python} -m pip "
            f"install {' '.join(answer['lacks'])}"
        )


def start_in(python: str, config: dict[str, Any]) -> None:
    """Change the settings of a worker so that it executes an interpreter, imports this package, and has what it can."""
    config["python"] = {
        "executable": python,
        "command": shlex.split(python),
        "package": _PACKAGE,
        "path": own_folders(),
    }
    caller = surroundings.for_other_python(config["caller"])
    config["caller"] = {**caller, "environ": environment_for(caller["environ"])}


def environment_for(environ: dict[str, str]) -> dict[str, str]:
    """Return environment variables without those that concern this interpreter only."""
    return {name: value for name, value in environ.items() if name not in _OURS}


def in_interpreters(blueprint: Blueprint) -> Blueprint:
    """Return a blueprint whose workers execute the interpreters of their envs.

    Raises:
        FactoryError: see `check_interpreter`.
        ValueError: see `spread_apart`.
    """
    for python in {one for one in blueprint.interpreters if one is not None}:
        check_interpreter(python)
    starts = tuple(
        None if python is None else partial(start_in, python)
        for python in blueprint.interpreters
    )
    return replace(
        blueprint,
        blocks=spread_apart(blueprint.interpreters, len(blueprint.blocks)),
        starts=starts,
    )


def spread_apart(
    interpreters: Sequence[str | None],
    num_workers: int,
) -> tuple[tuple[int, ...], ...]:
    """Return contiguous blocks of env ids, one for each worker, each with envs of one interpreter.

    Raises:
        ValueError: there are too few workers.
    """
    runs = [
        list(run)
        for _, run in itertools.groupby(
            range(len(interpreters)),
            interpreters.__getitem__,
        )
    ]
    if num_workers < len(runs):
        raise ValueError(
            f"num_workers failed: expected at least {len(runs)}, got {num_workers}: envs of different interpreters "
            f"need different workers, and a worker has consecutive envs. Order the factories by interpreter."
        )
    counts = [1] * len(runs)
    # Each further worker goes where one has the most envs.
    for _ in range(num_workers - len(runs)):
        counts[max(range(len(runs)), key=lambda i: len(runs[i]) / counts[i])] += 1
    split = [
        block
        for run, count in zip(runs, counts, strict=True)
        for block in np.array_split(run, count)
    ]
    return tuple(tuple(block.tolist()) for block in split)
