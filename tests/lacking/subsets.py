"""Run a small program without random sets of what Linux has: `python -m tests.lacking.subsets --cases 50`.

Each case is a fork of this process, which has imported what takes long, but not envherd. It takes the set away from
envherd, imports the package's modules and runs `small`; a system ("windows", "macos", "sandbox") runs the script
`everything` instead, in Python alone. Its workers lack the same. Exit code 1: cases failed.
"""

import argparse
import contextlib
import faulthandler
import importlib
import multiprocessing.resource_tracker
import os
import random
import runpy
import signal
import sys
import time
import traceback
from pathlib import Path

HERE = Path(__file__).parent
#: What a Linux may lack or refuse, as `sitecustomize` names it.
CALLS = """
os.memfd_create os.memfd_create! os.pidfd_open os.pidfd_open! os.fork os.fork! os.register_at_fork os.sched_getaffinity
os.sched_getaffinity! os.sched_setaffinity os.sched_yield os.sched_yield! os.getpgid os.killpg os.killpg! os.setpgid
os.setpgid! os.eventfd os.pread os.pwrite os.posix_fallocate os.posix_fallocate! os.waitid os.waitid! os.pipe2
os.statvfs os.statvfs! os.getloadavg os.sysconf os.getuid os.geteuid os.uname os.getpriority os.nice os.O_ASYNC
os.set_blocking os.P_ALL os.WNOWAIT os.kill os.kill! os.getppid os.getppid!
signal.SIGKILL signal.SIGUSR1 signal.SIGUSR2 signal.SIGHUP signal.SIGQUIT signal.SIGALRM signal.SIGCHLD signal.SIGSTOP
signal.pthread_sigmask signal.pthread_sigmask! signal.setitimer signal.pidfd_send_signal signal.pidfd_send_signal!
signal.set_wakeup_fd
select.poll select.epoll socket.AF_UNIX socket.MSG_DONTWAIT socket.MSG_NOSIGNAL
socket.recv_fds socket.SCM_RIGHTS
mmap.MAP_SHARED mmap.MAP_PRIVATE mmap.PROT_READ faulthandler.register
libc.sem_init libc.sem_init! libc.sem_timedwait libc.sem_clockwait libc.prctl libc.prctl! libc.mmap libc
fcntl fcntl.10! fcntl.8! fcntl.F_SEAL_SHRINK fcntl.F_SETOWN fcntl.F_DUPFD_CLOEXEC resource termios pwd /proc
time.CLOCK_MONOTONIC time.clock_gettime resource.getrlimit!
""".split()
SYSTEMS = ("windows", "macos", "sandbox")
#: What `everything` prints, and what its first executor logs, once.
PRINTED = (
    "everything works\n",
    "in the portable pool, because this system lacks: memfd_create",
)
CASE_S = 240


def run_case(words: list[str], log: Path) -> str:
    """Run one case in a fork; return "" or what went wrong."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setsid()
            fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(fd, 1)
            os.dup2(fd, 2)
            faulthandler.dump_traceback_later(CASE_S - 10)
            os.environ["ENVHERD_LACKS"] = " ".join(words)
            os.environ |= {"ENVHERD_NATIVE": "0"} if words[0] in SYSTEMS else {}
            importlib.import_module("sitecustomize").take_away(
                os.environ["ENVHERD_LACKS"]
            )
            if words[0] in SYSTEMS:
                runpy.run_path(str(HERE / "everything.py"), run_name="__main__")
                os._exit(0)
            importlib.import_module("everything_imported").import_all()
            print("path:", importlib.import_module("small").main(), flush=True)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
            os._exit(code)
    end = time.monotonic() + CASE_S
    while time.monotonic() < end:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended and status == 0 and words[0] in SYSTEMS:
            counts = [log.read_text().count(text) for text in PRINTED]
            return "" if counts == [1, 1] else f"printed {PRINTED} {counts} times"
        if ended:
            return (
                "" if status == 0 else f"ended with {os.waitstatus_to_exitcode(status)}"
            )
        time.sleep(0.05)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "hung"


def main() -> int:
    """Run the cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--each", action="store_true", help="each call alone")
    parser.add_argument("--words", action="append", help="a case: what it lacks")
    asked = parser.parse_args()
    sys.path[:0] = [str(HERE), str(HERE.parents[1])]
    os.environ |= {
        "ENVHERD_NATIVE": os.environ.get("ENVHERD_NATIVE", "1"),
        "OMP_NUM_THREADS": "1",
    }
    os.environ["PYTHONPATH"] = os.pathsep.join(
        map(str, [HERE, HERE.parents[1], *sys.path])
    )
    for name in (
        "torch",
        "tensordict",
        "gymnasium",
        "psutil",
        "multiprocessing.shared_memory",
        "cloudpickle",
        "typer",
        "rich.console",
        "pytest",
    ):
        importlib.import_module(name)
    multiprocessing.resource_tracker.ensure_running()
    rng, num_failed = random.Random(asked.seed), 0
    cases = [[word] for word in CALLS] if asked.each else []
    cases += [
        rng.sample(CALLS, rng.choice([2, 3, 5, 8, 15, 30]))
        for _ in range(0 if asked.each else asked.cases)
    ]
    if asked.words:
        cases = [words.split() for words in asked.words]
    log = Path(f"/tmp/envherd-lacking-{os.getpid()}.log")
    for words in cases:
        began = time.monotonic()
        what = run_case(words, log)
        num_failed += bool(what)
        text = log.read_text()
        path = text.rpartition("path: ")[2].strip() if not what else ""
        print(
            f"{time.monotonic() - began:5.1f} s  {what or 'passed'}  {' '.join(words)}  ({path[:60]})",
            flush=True,
        )
        if what:
            print("    " + "\n    ".join(text.splitlines()[-25:]), flush=True)
    print(f"{len(cases) - num_failed} passed, {num_failed} failed")
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
