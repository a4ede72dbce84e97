"""An env that reports on its process; this module imports little, because workers import it."""

import os
import signal
import subprocess
import sys

from envherd.workers.testing import CountingEnv


class Seeing(CountingEnv):
    """Reports on its process; can start a process outside its process group."""

    def helper(self):
        return os.getppid()

    def has_imported(self, name):
        return name in sys.modules

    def variable(self, name):
        return os.environ.get(name)

    def last_of_path(self):
        return sys.path[-1]

    def folder(self):
        return os.getcwd()

    def leave_one(self):
        return subprocess.Popen(["sleep", "60"], start_new_session=True).pid

    def leave_background(self, *, is_forked):
        """Start a process in a new session whose parent ends at once; return its pid."""
        if not is_forked:
            done = subprocess.run(
                ["sh", "-c", "setsid sleep 60 >/dev/null 2>&1 & echo $!"],
                stdout=subprocess.PIPE,
                check=True,
            )
            return int(done.stdout)
        read, write = os.pipe()
        between = os.fork()
        if between == 0:
            os.setsid()
            pid = os.fork()
            if pid:
                os.write(write, str(pid).encode())
                os._exit(0)
            while True:
                signal.pause()
        os.waitpid(between, 0)
        pid = int(os.read(read, 20))
        os.close(read)
        os.close(write)
        return pid
