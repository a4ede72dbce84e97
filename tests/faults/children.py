"""Run test bodies in a forked child, because they change limits, mounts or users, or end the process."""

import contextlib
import ctypes
import gc
import json
import os
import resource
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Linux/sched.h, linux/mount.h.
_CLONE_NEWNS, _MS_REC, _MS_PRIVATE = 0x00020000, 0x4000, 0x40000
_CAP_SYS_ADMIN, _CAP_SYS_RESOURCE = 21, 24  # linux/capability.h
_CAPABILITY_VERSION_3 = 0x20080522
_PR_CAPBSET_DROP = 24
NOBODY = 65534


def in_child(body: Callable[..., Any], *args: Any) -> Any:
    """Run a body in a forked child, and return its result (through JSON).

    Raises:
        AssertionError: it raised, with its traceback, or ended without a word.
    """
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        # What the host has let go of, such as handles of Ray, cannot be freed here: its threads are not in a fork.
        gc.freeze()
        os.close(read)
        try:
            answer = {"value": body(*args)}
        except BaseException:
            answer = {"error": traceback.format_exc()}
        with contextlib.suppress(BaseException):
            os.write(write, json.dumps(answer).encode())
        os._exit(0)
    os.close(write)
    # To its end: nothing that the child has started may hold the other one.
    with os.fdopen(read, "rb") as file:
        text = file.read()
    _, status = os.waitpid(pid, 0)
    assert text, (
        f"the child ended without a word: exit code {os.waitstatus_to_exitcode(status)}"
    )
    answer = json.loads(text)
    assert "error" not in answer, answer.get("error")
    return answer["value"]


@contextlib.contextmanager
def limited(what: int, limit: int) -> Iterator[None]:
    """Lower a limit of this process inside the block."""
    before = resource.getrlimit(what)
    resource.setrlimit(what, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(what, before)


def files_left(count: int) -> contextlib.AbstractContextManager[None]:
    """Return a context in which this process can open that many more descriptors."""
    first = os.dup(0)
    os.close(first)
    # The limit is on the number of a new descriptor.
    return limited(resource.RLIMIT_NOFILE, first + count)


def can_mount() -> bool:
    """Return whether a child may have private mounts."""

    def body() -> bool:
        with contextlib.suppress(OSError):
            mount_small("/dev/shm")
            return True
        return False

    return bool(in_child(body))


def mount_small(folder: str, options: str = "size=64k") -> None:
    """Mount a file system of a few pages over a folder, only for this process and its descendants."""
    libc = ctypes.CDLL(None, use_errno=True)
    calls = (
        lambda: libc.unshare(_CLONE_NEWNS),
        lambda: libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None),
        lambda: libc.mount(b"small", folder.encode(), b"tmpfs", 0, options.encode()),
    )
    for call in calls:
        if call():
            raise OSError(
                ctypes.get_errno(), "mounts of one's own are not allowed here"
            )


@contextlib.contextmanager
def memory_group(limit: int) -> Iterator[None]:
    """Run this process and its descendants in a control group with a memory limit in bytes.

    Raises:
        OSError: creating control groups is not allowed here.
    """
    root = next(
        Path(mount)
        for mount in ("/sys/fs/cgroup/memory", "/sys/fs/cgroup")
        if os.path.isdir(mount)
    )
    name = (
        "memory.limit_in_bytes"
        if (root / "memory.limit_in_bytes").exists()
        else "memory.max"
    )
    own, before = root / f"envherd-test-{os.getpid()}", _group_of_this(root)
    own.mkdir()
    try:
        (own / name).write_text(str(limit))
        (own / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        with contextlib.suppress(OSError):
            (before / "cgroup.procs").write_text(str(os.getpid()))
        own.rmdir()


def _group_of_this(root: Path) -> Path:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(",") or not controllers:
            return root / path.lstrip("/")
    return root


def can_limit_memory() -> bool:
    """Return whether a child may be in a new control group with a memory limit."""

    def body() -> bool:
        with contextlib.suppress(OSError), memory_group(2**28):
            return True
        return False

    return bool(in_child(body))


def fill(folder: str) -> None:
    """Fill a file system to its last byte."""
    with (
        contextlib.suppress(OSError),
        open(f"{folder}/full", "wb", buffering=0) as file,
    ):
        while file.write(b"x" * 4096):
            pass


def be_bound_by_process_limits() -> None:
    """Change to a user to whom RLIMIT_NPROC applies: root is exempt."""
    if os.getuid():
        return
    # The real user counts; the effective one may still read Python's files.
    os.setresuid(NOBODY, 0, 0)
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in (_CAP_SYS_ADMIN, _CAP_SYS_RESOURCE):
        libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    head = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    sets = (ctypes.c_uint32 * 6)()
    libc.capget(head, sets)
    for index in range(2):
        sets[index] &= ~(1 << _CAP_SYS_ADMIN | 1 << _CAP_SYS_RESOURCE)
    libc.capset(head, sets)
