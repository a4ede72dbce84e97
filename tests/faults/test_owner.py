"""However the owner ends, nothing is left; after any interrupt, no stale data are returned."""

import signal
import subprocess
import sys
import time

import psutil
import pytest

pytestmark = pytest.mark.slow

_OWNER = """
import functools, os, signal, sys, threading, time
from envherd.executor import ParallelEnv, ExecutorOptions
from envherd.workers.testing import CountingEnv, FaultyEnv, ParentEnv
envs = {{"idle": CountingEnv, "parent": ParentEnv, "hung": functools.partial(FaultyEnv, "gil")}}
env = ParallelEnv(2, envs[{kind!r}], num_workers=2)
td = env.rand_action(env.reset())
pids = [w.pid for w in env.statistics().workers]
pids += env.get("child") if {kind!r} == "parent" else []
print(*pids, flush=True)
end = functools.partial(os.kill, os.getpid(), signal.SIGKILL)
if {kind!r} == "hung":
    threading.Timer(0.5, end).start()
    for _ in range(3):
        td = env.rand_action(env.step_and_maybe_reset(td)[1])
{ending}
"""

ENDINGS = {"is killed": "end()", "returns": "", "exits": "os._exit(0)", "raises": "raise RuntimeError('over')"}
ENDS = [*((kind, "is killed") for kind in ("idle", "parent", "hung")), *(("idle", how) for how in [*ENDINGS][1:])]


def all_gone(pids, within_s):
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if not any(_runs(pid) for pid in pids):
            return True
        time.sleep(0.02)
    return False


def _runs(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(("kind", "ending"), ENDS)
def test_an_owner_that_ends_without_closing_leaves_nothing(kind, ending, script_host, tmp_path):
    script = tmp_path / "owner.py"
    script.write_text(_OWNER.format(kind=kind, ending=ENDINGS[ending]))
    done = script_host.run(script, folder=tmp_path, output=tmp_path)
    assert done.returncode == {"is killed": -signal.SIGKILL, "raises": 1}.get(ending, 0)
    pids = list(map(int, done.stdout.split()))
    assert len(pids) == (4 if kind == "parent" else 2)
    assert all_gone(pids, 5.0)


def test_a_script_is_not_run_again(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "open(sys.argv[1], 'a').write('ran ')\n"
        "from envherd.executor import ParallelEnv\n"
        "import torch\n"
        "from envherd.workers.testing import CountingEnv\n"
        "class Mine(CountingEnv):\n"
        "    def loaded(self):\n"
        "        return sorted({'torch', 'tensordict'} & set(sys.modules))\n"
        "env = ParallelEnv(2, lambda: Mine(3), num_workers=2)\n"
        "env.rollout(5, break_when_any_done=False)\n"
        "print(env.call('loaded'))\n"
        "env.close()\n"
    )
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "log")], capture_output=True, text=True, check=True
    )  # fmt: skip
    assert done.stdout.strip() == "[[], []]"
    assert (tmp_path / "log").read_text() == "ran "
