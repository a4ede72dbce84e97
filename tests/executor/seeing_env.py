"""An env that tells of its process; this module imports little, as workers import it."""

from __future__ import annotations

import os
import subprocess
import sys

from envherd.workers.testing import CountingEnv


class Seeing(CountingEnv):
    """Tells what its process is; starts a process that has left its group."""

    def helper(self):
        return os.getppid()

    def has_imported(self, name):
        return name in sys.modules

    def variable(self, name):
        return os.environ.get(name)

    def folder(self):
        return os.getcwd()

    def leave_one(self):
        return subprocess.Popen(["sleep", "60"], start_new_session=True).pid
