"""The owner's handle of the helper that forks workers (`workers.process.zygote`), shared helpers, processes' logs.

Guarantees:
- The user's process is never forked; its signal handlers, threads and `__main__` are untouched.
- `Helper.close` is bounded: one deadline for all workers, then SIGKILL to their process groups.
- If the user forks this process, the child closes its copies of the lifelines, so these still work.
- At most one helper without users is kept, only if its imports took long, and for at most `IDLE_S` seconds. It ends
  with this process, however that ends.
Assumes: Linux (pidfd, memfd, /proc).
"""

import atexit
import contextlib
import gc
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from envherd.executor.options import ExecutorOptions
from envherd.executor.sending.variables import common_variables
from envherd.executor.start.waiting import DeadlinePassed, seconds
from envherd.shm.interrupts import (
    close_descriptors,
    ignoring_refusals,
    uninterrupted,
)
from envherd.shm.platforms import (
    can_read,
    open_standard_descriptors,
    pread,
    register_at_fork,
    require,
    send_signal,
)
from envherd.workers.errors import InternalError, WorkerLost, WorkerTimeout
from envherd.workers.messages import Channel
from envherd.workers.process.zygote import flags, in_file
from envherd.workers.sending import importing, surroundings
from envherd.workers.sending.surroundings import TABLE, import_path

# ---- process log -------------------------------------------------------------------------------
# Read processes' logs, which are files in memory that outlive them.

#: A frame of this package's code but its test envs, as `traceback` and `faulthandler` write it; with the frame of the
#: command that starts a helper, and the list of C modules after a crash.
_OWN = re.compile(
    r'^  File "[^"]*[\\/]envherd[\\/](?:shm|executor|workers(?![\\/]testing))[\\/][^"]*", line .*\n(?:    .*\n)*'
    r'(?:  File "<string>", line \d+ in <module>\n)?'
    r"|^\nExtension modules: .*\n?",
    re.MULTILINE,
)
#: Seconds for a stuck process to have written its stack, and without a further line after which that is complete. It
#: writes line by line, in well under a millisecond in all, but a busy machine may stop it in between.
_STACK_WAIT_S = 2.0
_STACK_PAUSE_S = 0.1
#: Bytes that are read of a log, and of what a process wrote after a request of its stack: a call may print for hours.
_LOG_BYTES = 1 << 20
_STACK_BYTES = 1 << 16


def read_log(log_fd: int) -> str:
    """Return the end of a log; empty if there is none."""
    if log_fd < 0:
        return ""
    start = max(0, os.fstat(log_fd).st_size - _LOG_BYTES)
    return pread(log_fd, _LOG_BYTES, start).decode(errors="replace")


def has_frames_of_others(text: str) -> bool:
    """Return whether a worker's output or traceback has frames of other code than this package."""
    return '  File "' in _OWN.sub("", text)


def without_own_frames(text: str) -> str:
    """Return a worker's output or traceback without the frames of this package; the same if it has no others."""
    if has_frames_of_others(text):
        return _OWN.sub("", text)
    return text


def request_stacks(log_fd: int, request: Callable[[], Any]) -> str:
    """Make a process dump its stacks to its log, and return them."""
    before = size = os.fstat(log_fd).st_size
    request()
    now = changed_at = time.monotonic()
    end = now + _STACK_WAIT_S
    while now < end and (size == before or now < changed_at + _STACK_PAUSE_S):
        time.sleep(0.01)
        now = time.monotonic()
        if size != os.fstat(log_fd).st_size:
            size = os.fstat(log_fd).st_size
            changed_at = now
    text = pread(log_fd, _STACK_BYTES, before).decode(errors="replace")
    return text or "(the process did not answer)"


# ---- zygote ------------------------------------------------------------------------------------

#: Seconds that a helper without users waits for the next executor. One of a sweep, of tests or of a cell that is run
#: again follows soon, and a helper that has torch holds 200 MB or more.
IDLE_S = 10.0
# Processor time of imports for which a helper is kept; without torch, most need less.
_KEPT_CPU_S = 1.0
_RESUME_S = 2.0  # for an idle helper to answer
_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)
_FAREWELL_S = 5.0  # for the helper to kill remaining processes and end
_RECEIVE_S = 0.02  # between looks for an answer, which another thread may have received
#: Environment variables that change while a program runs and that no import reads.
_PASSING = {"PYTEST_CURRENT_TEST", "PWD", "OLDPWD", "_"}
_LIMITS = "Use fewer workers, or raise the limit (ulimit -n, ulimit -u; pids.max of the control group)."
#: The first import is of a built-in module, then the current folder leaves the path: else the import of json would take
#: a json.py there. -P would do so too, but workers would have that flag of which their script may know nothing.
_BOOT = """# envherd helper: imports modules, forks workers; see docs/faq.md
import sys
sys.path[:] = filter(None, sys.path)
import gc, json
gc.disable()  # until all is imported: makes that a fifth faster
fd, log_fd, path_fd = map(int, sys.argv[1:])
with open(path_fd) as file:
    sys.path[:] = json.load(file)
from envherd.workers.process.zygote import main
main(fd, log_fd)
"""

_zygotes: "weakref.WeakSet[Helper]" = weakref.WeakSet()
_idle: "list[Helper]" = []
_is_exiting = False
_pauses_gc = False  # in a thread that a fork does not have
#: Held by every fork of this process, while descriptors are created and registered that a fork must close, and while
#: users of helpers are counted. Its holder takes no other lock.
_fork_lock = threading.RLock()


def _let_go_in_fork() -> None:
    _fork_lock.release()
    if _pauses_gc:
        gc.enable()
    for zygote in list(_zygotes):
        zygote.let_go()
    _idle.clear()


register_at_fork(
    before=_fork_lock.acquire,
    after_in_parent=_fork_lock.release,
    after_in_child=_let_go_in_fork,
)


@atexit.register
def _exit() -> None:
    """End the idle helper; executors that are closed later than this keep none."""
    global _is_exiting  # noqa: PLW0603
    _is_exiting = True
    end_idle()


def end_idle(*, must_have_ended: bool = False) -> None:
    """End the helper that waits for an executor, if there is one; or only reap one that has ended by itself."""
    with _fork_lock:
        ended = [
            zygote for zygote in _idle if zygote.has_ended() or not must_have_ended
        ]
        _idle[:] = [zygote for zygote in _idle if zygote not in ended]
    for zygote in ended:
        zygote.end()


def shared(
    user: object,
    key: tuple[object, ...],
    options: ExecutorOptions,
    preload: list[str],
) -> "Helper":
    """Return a helper with that key: an existing one, or a new one.

    Args:
        user: of the helper, from now on.
        key: everything that executors must have in common to share a helper.
        options: of a new one.
        preload: modules that a new one imports.
    """
    end_idle(must_have_ended=True)
    while True:
        with _fork_lock:
            found = next(
                (
                    zygote
                    for zygote in _zygotes
                    if zygote.key == key and zygote.join(user)
                ),
                None,
            )
            if found is None:
                return Helper(options, preload, key, user=user)
        if found.resume():
            return found
        # Before it is closed: then no other executor joins, and it is not kept.
        found.key = None
        found.close(user)


class Helper:
    """The owner's handle of the helper that forks workers (see the module).

    Several users may share it, from any thread: each calls `join` and `close`, and the last `close` ends it, or lets it
    wait for another user. A user is an object, so that one that repeats a `close` is not counted twice; one that was
    freed needs no `close`.

    Args:
        options: for its environment variables, output, start method and deadline.
        preload: modules to import.
        key: by which `shared` finds it; None if it ends with its last user.
        must_import: a module that cannot be imported is an error.
        user: the first one; None for the helper itself.

    Attributes:
        pid: its process id.
    """

    _log_fd = lifeline_read = _lifeline_write = -1

    def __init__(
        self,
        options: ExecutorOptions,
        preload: list[str],
        key: tuple[object, ...] | None = None,
        *,
        must_import: bool = False,
        user: object = None,
    ) -> None:
        self.key = key
        self._must_import = must_import
        self._users = weakref.WeakSet([user or self])
        self._lock = threading.RLock()
        self._options = options
        self._environ = environment_of(options)
        self._set_by_imports: dict[str, str] = {}
        self._owner = os.getpid()
        path = surroundings.import_path()
        importing.refuse_at_import()
        open_standard_descriptors()
        try:
            with _fork_lock:
                _zygotes.add(self)
                self.lifeline_read, self._lifeline_write = os.pipe()
                self._sock, self._theirs = socket.socketpair()
            self._channel = Channel(self._sock)
            self._log_fd = os.memfd_create("envherd-log-zygote", os.MFD_CLOEXEC)
            output = self._log_fd if options.worker_output == "capture" else None
            # An argument has at most 128 KiB.
            with in_file(json.dumps(path).encode()) as file:
                theirs = (self._theirs.fileno(), self._log_fd, file.fileno())
                self._process = subprocess.Popen(
                    [sys.executable or "", *flags(), "-c", _BOOT, *map(str, theirs)],
                    pass_fds=theirs,
                    env=self._environ,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    # Another group in the same session: the kernel may schedule another session apart from this.
                    process_group=0,
                )
        except BaseException as error:
            self._release()
            # Without a number, a signal handler has raised it.
            if isinstance(error, OSError) and error.errno is not None:
                advice = _LIMITS
                if isinstance(error, (FileNotFoundError, PermissionError)):
                    advice = f"Set sys.executable, which is {sys.executable!r}, to the path of a Python interpreter."
                raise WorkerLost(
                    f"starting a worker failed: its helper process cannot be started ({error}). {advice}",
                    phase="start",
                ) from error
            raise
        self._theirs.close()
        self.pid = self._process.pid
        self._start = {
            # Imports see what those of the script see; the environment variables are there from the start.
            "caller": {
                name: value
                for name, value in surroundings.read().items()
                if name not in ("environ", "name")
            },
            "preload": preload,
            "must_exec": options.start_method == "spawn",
        }
        self._is_ready = self._is_costly = False
        self._start_number: int | None = None
        self.failed_preloads: dict[str, str] = {}
        self.num_threads = 1

    def join(self, user: object) -> bool:
        """Register another user, which must `close` it later; return whether it is usable."""
        with _fork_lock:
            is_usable = (
                self._owner == os.getpid()
                and self._sock.fileno() >= 0
                and not self.has_ended()
            )
            if is_usable and self in _idle:
                _idle.remove(self)
            elif not self._users:  # another thread ends it
                return False
            if is_usable:
                self._users.add(user)
            return is_usable

    def has_ended(self) -> bool:
        """Return whether its process has ended."""
        return self._process.poll() is not None

    def begin(self) -> None:
        """Make it import the modules, without waiting; idempotent."""
        with self._lock:
            if self._start_number is None:
                self._start_number = self._post(self._start, [])

    def wait_ready(self) -> None:
        """Wait until it has imported the modules; idempotent. After an error it can only be closed.

        Raises:
            WorkerLost: the helper has ended.
            WorkerTimeout: it is still importing after `options.build_timeout_s`, and was killed.
            ImportError: a module cannot be imported, and the helper was made with `must_import`.
        """
        # Other users wait for the same answer.
        with self._lock:
            if not self._is_ready:
                self._receive_start()
        if self._must_import and self.failed_preloads:
            name, why = next(iter(self.failed_preloads.items()))
            raise ImportError(
                f"preloaded failed: expected modules that can be imported, got {name!r} ({why})."
            )

    def _receive_start(self) -> None:
        self.begin()
        assert self._start_number is not None
        # It takes seconds. After a Ctrl-C, the executor that waits closes this.
        try:
            answer = self._answer(self._start_number, self._options.build_timeout_s)
        except DeadlinePassed:
            raise self._late() from None
        self.failed_preloads = answer["failed"]
        self.num_threads = answer["num_threads"]
        self._set_by_imports = answer["environ"]
        self._is_costly = answer["cpu_s"] >= _KEPT_CPU_S
        self._is_ready = True

    def resume(self) -> bool:
        """Return whether it still serves, and a new one would import the same: nothing that imports read has changed.

        That is the files of its modules, and environment variables. Imports set some themselves, here as there.
        """
        environ = environment_of(self._options)
        changed = {
            name for name, _ in environ.items() ^ self._environ.items()
        } - _PASSING
        if any(
            name not in environ or environ[name] != self._set_by_imports.get(name)
            for name in changed
        ):
            return False
        if not self._is_ready:
            return True
        with contextlib.suppress(WorkerLost, DeadlinePassed):
            return bool(
                self._request({"op": "resume"}, timeout_s=_RESUME_S)["is_current"]
            )
        return False

    def _late(self) -> WorkerTimeout:
        """Read the helper's stack, kill it, and return the error."""
        stack = request_stacks(
            self._log_fd, lambda: send_signal(self.pid, signal.SIGUSR2)
        )
        self._kill()
        return WorkerTimeout(
            f"starting workers failed: their helper process had not imported its modules within "
            f"{self._options.build_timeout_s:g} s and was killed (pid {self.pid}, phase start). Raise "
            f"ExecutorOptions.build_timeout_s if imports may take so long.\nIt was stuck in:\n{stack}",
            remote_traceback=read_log(self._log_fd) or None,
            pid=self.pid,
            phase="start",
        )

    def _kill(self) -> None:
        """Kill the helper and its imports' processes, and wait for its end."""
        if self._process.returncode is None:  # not reaped yet, so the id was not reused
            with ignoring_refusals():
                send_signal(self.pid, signal.SIGKILL, is_group=True)
        self._process.wait()

    def fork(self, config: dict[str, Any], fds: list[int]) -> int:
        """Start a worker and return its pid.

        Raises:
            WorkerLost: the helper has ended, or the system allows no further process.
        """
        self.wait_ready()
        # Crews give the caller as it was when they were made.
        config = {"caller": surroundings_of(self._options), **config}
        answer = self._request({"op": "fork", "config": config}, fds)
        if "error" in answer:
            raise WorkerLost(
                f"starting a worker failed: {answer['error']}. {_LIMITS}",
                phase="start",
            )
        return int(answer["pid"])

    def adopt(self, pid: int, log_fd: int) -> int:
        """Take a worker's copy for a worker, as one that `fork` has started; return its pid.

        Raises:
            WorkerLost: the copy or the helper has ended.
        """
        if not self._request(
            {"op": "adopt", "pid": pid, "log": os.fstat(log_fd).st_ino}
        )["is_child"]:
            raise WorkerLost(
                f"branch failed: the copy (pid {pid}) ended before it could serve.",
                pid=pid,
            )
        return pid

    def exit_code(self, pid: int, timeout_s: float = 0.5) -> int | None:
        """Return a worker's exit code, or None if it lives or the zygote has ended."""
        end = time.monotonic() + timeout_s
        with contextlib.suppress(WorkerLost), ignoring_refusals():
            while (
                status := self._request({"op": "status", "pid": pid})["status"]
            ) is None:
                if time.monotonic() > end:
                    return None
                time.sleep(0.002)
            return int(status)
        return None

    def close(self, user: object = None) -> None:
        """Give it up. It ends with its last user, and so do all its workers, unless it is kept for another executor.

        After an error it must be repeated; it continues where it has failed.
        """
        if self._owner != os.getpid() or self not in _zygotes:
            return
        with uninterrupted():  # a helper that is kept has its limit
            with _fork_lock:
                self._users.discard(user or self)
                is_used = len(self._users) > 0
                is_kept = self._is_costly and not (
                    is_used
                    or self.key is None
                    or _is_exiting
                    or self.has_ended()
                    or self._sock.fileno() < 0
                )
                is_left = is_kept or is_used
                replaced = [one for one in _idle if is_kept and one is not self]
                if is_kept:
                    _idle[:] = [self]
            sweep = None
            if is_left and self._is_ready:
                with ignoring_refusals():
                    sweep = self._post(
                        {"op": "sweep", "idle_s": IDLE_S if is_kept else None},
                        [],
                    )
        for zygote in replaced:
            zygote.end()
        if sweep is not None:
            with contextlib.suppress(WorkerLost), ignoring_refusals():
                self._answer(sweep, None)
        elif not is_left:
            self.end()

    def end(self) -> None:
        """End it and all its workers."""
        self._channel.close()
        close_descriptors(self, "lifeline_read", "_lifeline_write")
        with ignoring_refusals():  # EMFILE: then do not wait for its cleanup
            if self._process.returncode is None:
                _wait_exit(self.pid, _FAREWELL_S)
        self._kill()
        self._release()

    def _release(self) -> None:
        """Close this process's descriptors of it. Idempotent."""
        for name in ("_channel", "_sock", "_theirs"):
            if name in vars(self):
                getattr(self, name).close()
        close_descriptors(self, "lifeline_read", "_lifeline_write", "_log_fd")
        with _fork_lock:
            _zygotes.discard(self)

    def __del__(self) -> None:
        """Make its process end, if a failure inside `close` has lost it."""
        self._release()

    def let_go(self) -> None:
        """In a forked copy of the owner, close descriptors that would keep workers alive after the owner's death."""
        self._release()
        if "_process" in vars(self):
            # Not this process's child, so Popen must neither wait nor warn.
            self._process.returncode = 0

    def _request(
        self,
        request: dict[str, Any],
        fds: list[int] | None = None,
        timeout_s: float | None = None,
    ) -> dict[str, Any]:
        """Send a request and wait for its answer; from any thread, also while the same thread waits for another's.

        Answers carry the number of their request; nothing takes the answer to an interrupted request.

        Raises:
            DeadlinePassed: no answer came within `timeout_s` seconds.
        """
        return self._answer(self._post(request, fds or []), timeout_s)

    def _post(self, request: dict[str, Any], fds: list[int]) -> int:
        """Send a request; return its number, for `_answer`."""
        with self._lock, _undisturbed():
            if self._sock.fileno() < 0:
                raise InternalError("the zygote was used after it was closed")
            self._channel.queue_message(request, fds)
            number = self._channel.num_queued
            # What the socket has no room for is sent while `_answer` waits, which explains the end of the helper.
            with contextlib.suppress(ConnectionError):
                self._channel.flush_nowait()
            return number

    def _answer(self, number: int, timeout_s: float | None) -> dict[str, Any]:
        end = time.monotonic() + seconds(timeout_s)
        while True:
            # Both before the look: what it wrote before its end is there by then, and this process may have been
            # stopped while the answer came.
            has_ended = self.has_ended()
            is_late = time.monotonic() > end
            answer = self._take(number)
            if answer is not None:
                return answer
            if has_ended:
                raise WorkerLost(
                    "starting a worker failed: the helper process that forks workers has ended "
                    f"(exit code {self._process.poll()}, sys.executable {sys.executable!r}). Make a new executor.",
                    remote_traceback=read_log(self._log_fd) or None,
                    phase="start",
                )
            if is_late:
                raise DeadlinePassed
            can_read(self._sock, _RECEIVE_S * 1000)

    def _take(self, number: int) -> dict[str, Any] | None:
        """Return the answer of that number, if it has come; never blocks."""
        with self._lock, _undisturbed():
            with contextlib.suppress(ConnectionError):
                self._channel.flush_nowait()
            answers = self._channel.drain_nowait()
            found = next((one for one in answers if one["number"] == number), None)
            if found is not None:
                answers.remove(found)
            return found


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Keep out signal handlers, and finalizers of garbage: one may close an executor, over the same channel."""
    global _pauses_gc  # noqa: PLW0603
    with uninterrupted():
        was_enabled = gc.isenabled()
        try:
            if was_enabled:
                _pauses_gc = True
                gc.disable()
            yield
        finally:
            if was_enabled:
                gc.enable()
                _pauses_gc = False


def _wait_exit(pid: int, timeout_s: float) -> None:
    """Wait for a child to end, without reaping it."""
    with open(os.pidfd_open(pid), "rb", buffering=0) as process:
        can_read(process, timeout_s * 1000)


def surroundings_of(options: ExecutorOptions) -> dict[str, Any]:
    """Return what a worker gets at its start: what `workers.sending.surroundings` reads, with its variables."""
    return {**surroundings.read(), "environ": environment_of(options)}


def environment_of(options: ExecutorOptions) -> dict[str, str]:
    """Return the environment variables that workers start with."""
    environment = dict(os.environ)
    # Makes `torch.cuda.is_available()` ask the driver's library: torch refuses CUDA in forks of a process that has
    # asked CUDA itself, and modules that the helper imports ask, as TorchRL does.
    environment.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    if options.worker_threads is not None:
        environment.update(
            dict.fromkeys(_THREAD_VARIABLES, str(options.worker_threads))
        )
    environment.update(common_variables(options))
    return environment


# ---- preloading --------------------------------------------------------------------------------
# Helpers that executors share, so that modules are imported once for all of them.
#
# A helper process (`workers.process.zygote`) imports what envs need and forks the workers. Where imports are slow
# (torch, torchrl, dm_control), they take most of a start. Executors of one program share a helper if a new one would be
# equal: same modules, arguments, import path and environment variables, and everything else that a process inherits. So
# its imports have seen what those of a new one would see, and each worker gets the folder that its executor was made
# in. `preloaded` makes executors share one whose modules differ from theirs.

#: Fields of /proc/PID/status that a process inherits: all that concern users, processors, signals and privileges.
_INHERITED = (
    "Umask",
    "Uid",
    "Gid",
    "Groups",
    "SigBlk",
    "SigIgn",
    "Cap",
    "NoNewPrivs",
    "Seccomp",
    "Cpus",
    "Mems",
)

#: The helpers of open blocks, the innermost last, each with the settings that its workers inherit.
_open: dict[Helper, tuple[object, ...]] = {}


@contextlib.contextmanager
def preloaded(*modules: str, options: ExecutorOptions | None = None) -> Iterator[None]:
    """Make executors created in this block start their workers from one helper that imports `modules`.

        with preloaded("torchrl.envs", "gymnasium"):
            from my_training import settings, make_env   # imports TorchRL, while the helper does too
            for setting in settings:
                with ParallelEnv(8, make_env) as env:    # starts in milliseconds instead of seconds
                    ...

    The helper begins at once, and the first executor waits until it has imported all modules.
    Modules that executors would preload by themselves are imported by their workers, unless they are among `modules`.
    Each module is imported once, so workers of this block do not see later changes of its file. An executor still uses
    another helper if its start method, `env_vars`, `worker_threads` or `worker_output` differ from those of `options`
    here. A worker has the environment variables, current folder and import path of the time when its executor was
    made, but `modules` are imported with those at the beginning of the block. The block has no effect in processes
    forked from this one.

    The helper ends with the block, or with the last executor created in it. As usual, closing an executor ends all its
    workers and the processes of their envs.

    Args:
        *modules: full names.
        options: of the executors; only start method, `env_vars`, `worker_threads` and `worker_output` are used.

    Raises:
        ImportError: an executor was made, and a module cannot be imported.
        ValueError: there are no modules, or the start method is not "zygote".
    """
    require("preloaded")
    options = options or ExecutorOptions()
    if not modules or options.start_method != "zygote":
        raise ValueError(
            "preloaded failed: expected names of modules and the start method 'zygote', got "
            f"{modules!r} and {options.start_method!r}."
        )
    with preloading(*modules, options=options, must_import=True):
        yield


@contextlib.contextmanager
def preloading(
    *modules: str,
    options: ExecutorOptions,
    must_import: bool = False,
) -> Iterator[Helper]:
    """As `preloaded`; unless `must_import`, modules that cannot be imported are left to the workers."""
    surroundings = _surroundings(options)
    zygote = Helper(options, list(modules), must_import=must_import)
    try:
        zygote.begin()
        _open[zygote] = surroundings
        try:
            yield zygote
        finally:
            del _open[zygote]
    finally:
        zygote.close()


def helper_for(
    user: object,
    options: ExecutorOptions,
    modules: Sequence[str],
) -> Helper:
    """Return a helper for an executor, its `user`: that of the innermost block which fits, a kept one, or a new one."""
    if options.start_method == "zygote":
        wanted = _surroundings(options)
        # A copy: another thread may open or leave a block meanwhile.
        for zygote, surroundings in reversed(list(_open.items())):
            if surroundings == wanted and zygote.join(user):
                return zygote
    if options.start_method != "zygote" or options.worker_output != "capture":
        return Helper(options, list(modules), user=user)
    key = (
        *_surroundings(options),
        options.build_timeout_s,
        tuple(modules),
        sys.executable,
        tuple(import_path()),
        tuple(flags()),
        tuple(TABLE["argv"].read()),
        # What a new process would inherit.
        *(one for one in _read("status").splitlines() if one.startswith(_INHERITED)),
        *(_read(name) for name in ("limits", "cgroup", "oom_score_adj")),
        os.getpriority(os.PRIO_PROCESS, 0),
        os.getsid(0),
    )
    return shared(user, key, options, list(modules))


def _surroundings(options: ExecutorOptions) -> tuple[object, ...]:
    """Return the settings that workers inherit from a helper and cannot get at their start."""
    return (
        os.getpid(),
        common_variables(options),
        options.worker_threads,
        options.worker_output,
    )


def _read(name: str) -> str:
    """Return a file of this thread in /proc, "" where the kernel has none."""
    with contextlib.suppress(OSError):
        return Path("/proc/thread-self", name).read_text()
    return ""
