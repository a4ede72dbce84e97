"""Take from this package what another operating system lacks; Python imports this at its start.

`ENVHERD_LACKS` names the system: "windows", "macos", or "sandbox" for a Linux whose calls are refused. Or it lists what
a Linux lacks: "os.fork" is a name, "os.fork!" a call that is refused, "libc.prctl" and "libc.prctl!" a function of the
C library, "fcntl" a module, "fcntl.10!" a command of fcntl, "/proc" that folder and /sys. The modules of envherd get
stand-ins of the standard library's modules, without these names. All other modules keep the real ones, because the
standard library is that of Linux. Workers inherit the variable, and so lack the same.
"""

import builtins
import ctypes
import errno
import importlib
import os
import sys
import types

_POSIX_OS = """
fork forkpty register_at_fork pread pwrite killpg setpgid getpgid getpgrp getsid setsid getpriority setpriority
sched_yield sysconf getuid geteuid getgid waitid posix_fallocate pipe2 statvfs uname mkfifo O_NONBLOCK O_CLOEXEC P_ALL
getloadavg nice fchmod set_blocking wait WNOHANG WEXITED WNOWAIT
"""
_LINUX_OS = "memfd_create pidfd_open MFD_CLOEXEC MFD_ALLOW_SEALING sched_getaffinity sched_setaffinity posix_fallocate"
_POSIX_SIGNALS = """
SIGKILL SIGHUP SIGQUIT SIGUSR1 SIGUSR2 SIGALRM SIGCHLD SIGSTOP SIGCONT SIGTSTP pthread_sigmask setitimer alarm
siginterrupt set_wakeup_fd_ sigwait
"""
#: System -> module -> the names that it lacks.
LACKING = {
    "windows": {
        "os": _POSIX_OS + _LINUX_OS,
        "signal": _POSIX_SIGNALS + "pidfd_send_signal",
        "select": "poll epoll kqueue",
        "socket": "MSG_DONTWAIT MSG_NOSIGNAL recv_fds send_fds SCM_RIGHTS AF_UNIX SOCK_SEQPACKET",
        "faulthandler": "register unregister",
        "mmap": "MAP_SHARED MAP_PRIVATE PROT_READ PROT_WRITE",
        "time": "CLOCK_MONOTONIC clock_gettime",
    },
    "macos": {
        "os": _LINUX_OS + " waitid",
        "signal": "pidfd_send_signal",
        "select": "epoll",
        "socket": "MSG_NOSIGNAL",
    },
    "sandbox": {},
}
MISSING_MODULES = {
    "windows": {"fcntl", "resource", "termios", "pwd", "grp", "posix"},
    "macos": set(),
    "sandbox": set(),
}
PLATFORMS = {"windows": "win32", "macos": "darwin"}
#: More that the systems lack, as in `ENVHERD_LACKS`.
MORE = {
    "windows": "/proc libc libc.sem_init!",
    "macos": "/proc libc.sem_clockwait libc.prctl libc.sem_timedwait libc.sem_init! fcntl.10!",
    "sandbox": "os.memfd_create! os.pidfd_open! libc.sem_init!",
}
#: Modules through which envherd opens files.
_BETWEEN = ("pathlib", "contextlib", "io", "codecs", "tempfile")


def _is_ours(name):
    return name == "envherd" or name.startswith("envherd.")


def _called_by_us():
    frame = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(
        _BETWEEN
    ):
        frame = frame.f_back
    return frame is not None and _is_ours(frame.f_globals.get("__name__") or "")


class _Stand(types.ModuleType):
    """A module without some names, and with others replaced."""

    def __init__(self, real, lacking, replaced):
        super().__init__(real.__name__)
        object.__getattribute__(self, "__dict__").update(
            _real=real, _lacking=lacking, _replaced=replaced
        )

    def __getattribute__(self, name):
        own = object.__getattribute__(self, "__dict__")
        if name in own["_replaced"]:
            return own["_replaced"][name]
        if name in own["_lacking"]:
            raise AttributeError(
                f"module {own['_real'].__name__!r} has no attribute {name!r} on this system"
            )
        return getattr(own["_real"], name)

    def __setattr__(self, name, value):
        setattr(object.__getattribute__(self, "__dict__")["_real"], name, value)


class _Library:
    """The C library of the process, without some functions, and with others that answer with an error."""

    def __init__(self, real, lacking, refused):
        self.__dict__.update(_real=real, _lacking=lacking, _refused=refused)

    def __getattr__(self, name):
        if name in self._lacking:
            raise AttributeError(name)
        return (
            _answer_with_error if name in self._refused else getattr(self._real, name)
        )


def _answer_with_error(*_):
    ctypes.set_errno(errno.ENOSYS)
    return -1


def _refuse(*_args, **_kwargs):
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


def _without_commands(function, commands):
    def checked(fd, command, *args):
        return _refuse() if command in commands else function(fd, command, *args)

    return checked


def _without_proc(function):
    def checked(path, *args, **kwargs):
        if isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(
            ("/proc", "/sys/")
        ):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return function(path, *args, **kwargs)

    return checked


def _load_library(lacking, refused):
    def load(name, *args, **kwargs):
        if name is None and "" in lacking:
            raise TypeError("bad argument type for built-in operation")
        return _Library(ctypes.CDLL(name, *args, **kwargs), lacking, refused)

    return load


def _take_proc_away():
    """Make `open` refuse /proc and /sys to envherd; return such functions of `os`."""
    real_open = builtins.open

    def opened(file, *args, **kwargs):
        if _called_by_us():
            return _without_proc(real_open)(file, *args, **kwargs)
        return real_open(file, *args, **kwargs)

    builtins.open = importlib.import_module("io").open = opened
    names = ("open", "listdir", "scandir", "readlink", "stat")
    return {name: _without_proc(getattr(os, name)) for name in names}


def _parse(words):
    """Return module -> names that it lacks, module -> names that are refused, and modules that are missing."""
    lacking, refused, missing = {}, {}, set()
    for word in words:
        module, dot, name = word.rstrip("!").partition(".")
        if dot or module == "libc":
            (refused if word.endswith("!") else lacking).setdefault(module, set()).add(
                name
            )
        elif module != "/proc":
            missing.add(module)
    return lacking, refused, missing


def _stand_ins(system):
    """Return module -> its stand-in, and the modules that are missing."""
    words = MORE.get(system, system).split()
    lacking, refused, missing = _parse(words)
    for module, names in LACKING.get(system, {}).items():
        lacking.setdefault(module, set()).update(names.split())
    library = _load_library(lacking.pop("libc", set()), refused.pop("libc", set()))
    replaced = {
        module: dict.fromkeys(names, _refuse) for module, names in refused.items()
    }
    if commands := {int(name) for name in refused.get("fcntl", ()) if name.isdecimal()}:
        replaced["fcntl"]["fcntl"] = _without_commands(
            importlib.import_module("fcntl").fcntl, commands
        )
    replaced |= {
        "ctypes": {"CDLL": library},
        "sys": {"platform": PLATFORMS.get(system, sys.platform)},
    }
    if "/proc" in words:
        replaced["os"] = {**_take_proc_away(), **replaced.get("os", {})}
    missing |= MISSING_MODULES.get(system, set())
    names = {*lacking, *replaced} - missing
    stands = {
        name: _Stand(
            importlib.import_module(name),
            lacking.get(name, set()),
            replaced.get(name, {}),
        )
        for name in names
    }
    return stands, missing


def take_away(system):
    """Give the modules of envherd stand-ins from now on."""
    stands, missing = _stand_ins(system)
    really_import, import_module = builtins.__import__, importlib.import_module

    def import_(name, space=None, *others, **keywords):
        space = keywords.get("globals", space)
        if space is not None and _is_ours(space.get("__name__") or ""):
            if name in missing:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
            if name in stands:
                return stands[name]
        return really_import(
            name, *((space,) if "globals" not in keywords else ()), *others, **keywords
        )

    def imported(name, package=None):
        if _called_by_us():
            if name in missing:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
            if name in stands:
                return stands[name]
        return import_module(name, package)

    builtins.__import__, importlib.import_module = import_, imported


if os.environ.get("ENVHERD_LACKS"):
    take_away(os.environ["ENVHERD_LACKS"])
