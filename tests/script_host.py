"""Run each script in a fork of one process that has already imported most modules, which saves seconds.

A script runs as with `python SCRIPT ARGUMENTS`: it is `__main__`, its folder is first in `sys.path`, and it ends like a
process. The same holds for `python FOLDER` and `python -m MODULE`. `tests/test_examples.py` also runs one script in a
fresh process.
All test processes of a run share the host. It ends when the last of them does.
With `FORKED_HELPERS` in its environment, a script's executors fork their helpers from it, as imports of torch take
seconds. The pages of the docs run so. Examples and the tests of helpers execute theirs.

    python script_host.py DESCRIPTOR     listens there; each connection brings a job as JSON, or stays open
"""

import contextlib
import ctypes
import fcntl
import gc
import importlib
import itertools
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

#: The first makes the import of SB3 light, as in workers.
_IMPORTED = (
    *("envherd.workers.adapters.light_tensorboard", "torch", "tensordict", "gymnasium"),
    *("torchrl.envs", "envherd.executor.parallel", "envherd.executor.serial"),
    # TensorDict's modules import it when they first compute.
    *("stable_baselines3", "pandas"),
)


_PR_SET_CHILD_SUBREAPER = 36
#: Seconds for what a script has started to end after it.
_GRACE_S = 8.0
#: Above the descriptors of any script.
_MAX_FD = 10_000


def adopt_orphans(*, is_on: bool) -> None:
    """Adopt orphans among the descendants of this process, or stop doing so."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(is_on), 0, 0, 0)


class ScriptHost:
    """A connection to the host process, which is started by the first; created before the first count of resources.

    Args:
        folder: the same for all test processes of a run, and for no others.
        environment: of the host.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._path = str(folder / "script_host")
        with open(f"{self._path}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                self._lease = self._connect()
            except OSError:
                self._start(environment)
                self._lease = self._connect()

    def _start(self, environment: Mapping[str, str]) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)
        listener = socket.socket(socket.AF_UNIX)
        with listener:
            listener.bind(self._path)
            listener.listen(64)
            command = [sys.executable, __file__, str(listener.fileno())]
            environ = {**os.environ, **environment}
            # This process would adopt the host, and see the scripts of all others as its own.
            adopt_orphans(is_on=False)
            try:
                subprocess.run(
                    command,
                    stdin=subprocess.DEVNULL,
                    env=environ,
                    pass_fds=[listener.fileno()],
                    check=True,
                )
            finally:
                adopt_orphans(is_on=True)

    def _connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(self._path)
        except OSError:
            connection.close()
            raise
        return connection

    def run(
        self,
        script: Path | str,
        *arguments: str,
        folder: Path,
        output: Path,
        timeout_s: float = 280,
        **environment: str,
    ) -> subprocess.CompletedProcess[str]:
        """Run a script in `folder`; return its exit code, stdout and stderr, which it writes to files in `output`.

        Args:
            script: its file, or a folder with a `__main__.py`, or "-m".
            arguments: its arguments; after "-m", the name of the module comes first.
            folder: its current folder.
            output: where its output is kept.
            timeout_s: seconds after which it is ended.
            environment: variables to set for it, beyond the host's.
        """
        out, err = output / "stdout", output / "stderr"
        job = {
            "command": [str(script), *arguments],
            "folder": str(folder),
            "files": [str(out), str(err)],
        }
        with self._connect() as connection, connection.makefile("rw") as file:
            file.write(
                json.dumps({**job, "timeout_s": timeout_s, "environment": environment})
                + "\n"
            )
            file.flush()
            code, left = json.loads(file.readline())
        assert not left, f"the script left processes behind: {left}"
        return subprocess.CompletedProcess(
            job["command"], code, out.read_text(), err.read_text()
        )

    def run_text(
        self,
        text: str,
        *arguments: str,
        folder: Path,
        timeout_s: float = 280,
        **environment: str,
    ) -> subprocess.CompletedProcess[str]:
        """Write a text to `script.py` in `folder`, and run it there, with its output.

        Args:
            text: of the script.
            arguments: its arguments.
            folder: of the script and its output, and its current folder.
            timeout_s: seconds after which it is ended.
            environment: variables to set for it, beyond the host's.
        """
        script = folder / "script.py"
        script.write_text(text)
        return self.run(
            script,
            *arguments,
            folder=folder,
            output=folder,
            timeout_s=timeout_s,
            **environment,
        )

    def close(self) -> None:
        """Drop this connection. Another test process may still use the host."""
        self._lease.close()


def serve(listener: socket.socket) -> None:
    """Fork a process for each connection until all have ended; in the fork for a job, return after its script."""
    for name in _IMPORTED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    # The end of a script would take 1.2 s of a processor's time to collect what was imported here.
    gc.collect()
    gc.freeze()
    path = listener.getsockname()
    with open(f"{path}.lock") as lock:
        while True:
            if select.select([listener], [], [], 0.1)[0]:
                connection, _ = listener.accept()
                if not os.fork():
                    listener.close()
                    answer(connection)
                    return
                connection.close()
            fcntl.flock(lock, fcntl.LOCK_EX)  # nobody else connects for the first time
            if not has_children() and not select.select([listener], [], [], 0)[0]:
                os.unlink(path)
                os._exit(0)
            fcntl.flock(lock, fcntl.LOCK_UN)


def has_children() -> bool:
    """Reap children that have ended; return whether any is left."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def answer(connection: socket.socket) -> None:
    """Carry out the job of a connection, and wait for the processes that its script leaves; return in the script."""
    with connection, connection.makefile("rw") as file:
        line = file.readline()
        if not line:
            os._exit(0)
        adopt_orphans(is_on=True)
        script = os.fork()
        if script:
            code = os.waitstatus_to_exitcode(os.waitpid(script, 0)[1])
            end = time.monotonic() + _GRACE_S
            while has_children() and time.monotonic() < end:
                time.sleep(0.01)
            left = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
            for pid in left:
                os.kill(int(pid), signal.SIGKILL)
            file.write(f"{json.dumps([code, left])}\n")
            file.flush()
            os._exit(0)
    adopt_orphans(is_on=False)
    _run(**json.loads(line))


def _run(
    command: list[str],
    folder: str,
    files: list[str],
    timeout_s: float,
    environment: dict[str, str],
) -> None:
    signal.alarm(int(timeout_s))  # ends the process
    if environment.pop("FORKED_HELPERS", None):
        from envherd.executor.start import zygote

        vars(zygote)["subprocess"] = SimpleNamespace(
            **{**vars(subprocess), "Popen": _Forked}
        )
    os.environ.update(environment)
    for number, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.chdir(folder)
    sys.argv = command
    sys.path[0] = folder
    if command[0] == "-m":
        del command[0]
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)
        return
    if os.path.isdir(command[0]):
        del sys.path[0]  # `runpy` puts the folder that it runs there
    else:
        command[0] = os.path.abspath(command[0])
        sys.path[0] = os.path.dirname(command[0])
    runpy.run_path(command[0], run_name="__main__")


class _Forked(subprocess.Popen[bytes]):
    """A fork of this process that does what `python FLAGS -c CODE ARGUMENTS` would do."""

    def _execute_child(self, command: list[str], *others: Any) -> None:
        """Take the place of the method of this name, whose arguments are nearly those of `fork_exec`."""
        standard = {0: others[8], 1: others[11], 2: others[13]}
        passed = standard | {fd: fd for fd in others[3]}
        # An executor that was forked closes its descriptors.
        copies = {number: os.dup(fd) for number, fd in passed.items() if fd >= 0}
        self.pid = os.fork()
        if not self.pid:
            _become(command, others[5], copies)
        self._child_created = True
        for fd in copies.values():
            os.close(fd)
        self._close_pipe_fds(*others[8:14])  # type: ignore[attr-defined]


def _become(
    command: list[str], environ: dict[str, str], descriptors: dict[int, int]
) -> None:
    """Be a helper of executors; `descriptors` has copies of its descriptors by their numbers."""
    os.setpgid(0, 0)
    for number, fd in descriptors.items():
        os.dup2(fd, number)
    for low, high in itertools.pairwise(sorted({0, 1, 2, *descriptors, _MAX_FD})):
        os.closerange(low + 1, high)
    os.environ.clear()
    os.environ.update(environ)
    code = command.index("-c") + 1
    sys.argv = ["-c", *command[code + 1 :]]
    sys.modules["__main__"] = ModuleType("__main__")
    exec(command[code], vars(sys.modules["__main__"]))
    os._exit(0)


if __name__ == "__main__":
    if os.fork():  # an orphan: no descendant of the test process that starts it
        os._exit(0)
    serve(socket.socket(fileno=int(sys.argv[1])))
