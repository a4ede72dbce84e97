"""Processor time is counted correctly for processes with a known load, and for no others."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.accounting import Meter, Usage, busy_ns, started_by, usage_of
from tests.gates import wait_for

#: Uses a number of seconds of processor time in two threads, reports that, and sleeps.
BURNER = """
import sys, threading, time
def burn(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass
threads = [threading.Thread(target=burn, args=(float(sys.argv[1]) / 2,)) for _ in range(2)]
print("waits", flush=True)
sys.stdin.readline()
for thread in threads: thread.start()
for thread in threads: thread.join(0.0)
while any(thread.is_alive() for thread in threads): time.sleep(0.01)
burn(float(sys.argv[1]))
print("done", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def burner():
    """Start a burner of 0.1 s in each of: two threads together, and the main thread."""
    process = subprocess.Popen(
        [sys.executable, "-c", BURNER, "0.1"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    assert process.stdout.readline() == "waits\n"
    yield process
    process.kill()
    process.communicate()


def wait_until_idle(pid: int) -> None:
    """Wait until all threads of a process sleep; one that only waits for a processor does not."""
    files = [*Path(f"/proc/{pid}/task").glob("*/stat")]
    wait_for(
        lambda: all(
            file.read_text().rpartition(")")[2].split()[0] == "S" for file in files
        )
    )


@pytest.mark.slow
@pytest.mark.quiet
def test_processor_time_of_a_process_is_counted(burner):
    wait_until_idle(burner.pid)
    idle = usage_of([burner.pid])
    time.sleep(0.2)
    before, busy = usage_of([burner.pid]), busy_ns()
    assert before.since(idle).run_ns < 2e6
    meter = Meter([burner.pid])
    metered = meter.run_ns()
    burner.stdin.write("\n")
    assert burner.stdout.readline() == "done\n"
    used = usage_of([burner.pid]).since(before)
    # The ended threads' time is gone: the main thread's 100 ms and the cost of waiting remain.
    assert 90e6 < used.run_ns < 160e6
    assert 90e6 < meter.run_ns() - metered < 160e6
    assert busy_ns() - busy > 150e6, "the machine has worked for all of it"
    meter.close()


@pytest.mark.quiet
def test_our_own_time_agrees_with_the_interpreters():
    before, clock = usage_of([os.getpid()]), time.process_time_ns()
    while time.process_time_ns() - clock < 50e6:
        pass
    used, own = (
        usage_of([os.getpid()]).since(before).run_ns,
        time.process_time_ns() - clock,
    )
    assert used == pytest.approx(own, abs=12e6), (
        "a running thread's account lags by a tick"
    )


def test_processes_that_have_gone_count_nothing():
    assert Usage(5, 1).since(Usage(7, 0)) == Usage(0, 1), (
        "nor does an account that is less than before"
    )
    process = subprocess.Popen(["true"])
    process.wait()
    assert usage_of([process.pid]) == Usage(0, 0)
    assert started_by(process.pid) == []


def test_grandchildren_are_found():
    command = ["sh", "-c", "sh -c 'echo up; read line' & wait"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        script = ["sh", "-c", "sleep 30 & echo $!; wait"]
        with subprocess.Popen(script, stdout=subprocess.PIPE, text=True) as parent:
            grandchild = int(parent.stdout.readline())
            assert {process.pid, parent.pid, grandchild} <= set(started_by(os.getpid()))
            os.kill(grandchild, 9)
        process.stdin.close()
