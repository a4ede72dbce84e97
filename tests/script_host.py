"""Run each script in a fork of one process that has already imported most modules, which saves seconds.

A script runs as with `python SCRIPT ARGUMENTS`: it is `__main__`, its folder is first in `sys.path`, and it ends like a
process. `tests/test_examples.py` also runs one script in a fresh process.

    python script_host.py     reads one job per line, as JSON, and prints the exit code of each
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: The first makes the import of SB3 light, as in workers.
_IMPORTED = (
    *("envherd.workers.adapters.hosts.light_tensorboard", "torch", "tensordict", "gymnasium"),
    *("envherd.executor.parallel", "envherd.executor.serial"),
)


class ScriptHost:
    """The host process; created before the first count of a test's resources.

    Args:
        environment: of the scripts.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )

    def run(
        self, script: Path, *arguments: str, folder: Path, output: Path, timeout_s: float = 280
    ) -> subprocess.CompletedProcess[str]:
        """Run a script in `folder`; return its exit code, stdout and stderr, which it writes to files in `output`."""
        out, err = output / "stdout", output / "stderr"
        job = {"command": [str(script), *arguments], "folder": str(folder), "files": [str(out), str(err)]}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({**job, "timeout_s": timeout_s}) + "\n")
        self._process.stdin.flush()
        code = int(self._process.stdout.readline())
        return subprocess.CompletedProcess(job["command"], code, out.read_text(), err.read_text())

    def close(self) -> None:
        """End it."""
        self._process.communicate()


def serve() -> None:
    """Carry out jobs until there are no more; in the fork for a job, return after its script."""
    for name in _IMPORTED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            _run(**json.loads(line))
            return
        _, status = os.waitpid(pid, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


def _run(command: list[str], folder: str, files: list[str], timeout_s: float) -> Any:
    signal.alarm(int(timeout_s))  # ends the process
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.chdir(folder)
    sys.argv, sys.path[0] = command, str(Path(command[0]).parent)
    runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    serve()
