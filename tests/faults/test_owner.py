"""However the owner of an executor ends, nothing is left of it; workers do not run its script again."""

import signal

import psutil
import pytest

from envherd.executor import ParallelEnv
from tests.envs.counting_envs import ParentEnv
from tests.executor.calls import kill
from tests.executor.pools.test_lifecycle import is_running
from tests.gates import wait_for

pytestmark = pytest.mark.slow

_OWNER = """
import atexit, functools, os, signal, sys, threading, warnings
warnings.simplefilter("always")
import psutil
from envherd.executor import ParallelEnv
from envherd.executor.start import zygote
from envherd.workers.testing import CountingEnv
from tests.envs.breaking_envs import FaultyEnv
from tests.envs.counting_envs import ParentEnv

zygote._KEPT_CPU_S = 0.0  # the helper is kept although its imports were quick
kind, use, end = sys.argv[1:]
envs = {"idle": CountingEnv, "parent": ParentEnv, "hung": functools.partial(FaultyEnv, "gil")}
env = ParallelEnv(2, envs[kind], num_workers=2)
td = env.rand_action(env.reset())
pids = [worker.pid for worker in env.statistics().workers]
pids += [psutil.Process(pids[0]).ppid(), *(env.get("child") if kind == "parent" else [])]
if use == "closed":
    env.close()
print(*pids, flush=True)
die = functools.partial(os.kill, os.getpid(), signal.SIGKILL)
if kind == "hung":
    threading.Timer(0.5, die).start()
    for _ in range(3):
        td = env.rand_action(env.step_and_maybe_reset(td)[1])
elif end == "is killed":
    die()
elif end == "exits":
    os._exit(0)
elif end == "raises":
    raise RuntimeError("over")
elif end == "raises at exit":
    atexit.register(lambda: 1 / 0)
"""

ENDS = [
    *(("idle", "open", end) for end in ("is killed", "returns", "exits", "raises")),
    ("idle", "open", "raises at exit"),
    *(("parent", "open", "is killed"), ("hung", "open", "is killed")),
    *(("idle", "closed", end) for end in ("is killed", "returns", "exits")),
]


@pytest.mark.parametrize(("kind", "use", "end"), ENDS)
def test_an_owner_that_ends_leaves_nothing(kind, use, end, script_host, tmp_path):
    done = script_host.run_text(_OWNER, kind, use, end, folder=tmp_path)
    assert done.returncode == {"is killed": -signal.SIGKILL, "raises": 1}.get(end, 0)
    assert (done.stderr != "") == end.startswith("raises")
    assert done.stderr.count("Traceback") == end.startswith("raises")
    pids = list(map(int, done.stdout.split()))
    assert len(pids) == (5 if kind == "parent" else 3)
    wait_for(lambda: not any(map(is_running, pids)))


_FORKER = """
import gc, logging, multiprocessing, os, sys
from envherd.executor import ExecutorOptions, ParallelEnv
from envherd.workers.testing import CountingEnv

method, *hows = sys.argv[1:]
forked, logger = [], logging.getLogger("envherd")

def fork(*_):
    if not forked:
        forked.append(os.fork())
        if forked == [0]:
            sys.exit(0)
    return True

gc.freeze()  # or each fork would collect all modules at its end
options = ExecutorOptions(start_method=method)
logger.setLevel(logging.DEBUG)
logger.addFilter(fork)
with ParallelEnv(2, CountingEnv, num_workers=2, options=options) as env:
    logger.removeFilter(fork)
    logger.setLevel(logging.WARNING)
    for how in hows:
        root = env.reset()
        root = env.step_and_maybe_reset(env.rand_action(root))[1]
        kept = env.rollout(2, break_when_any_done=False)
        if how == "exits inside a rollout":
            env.rollout(2, lambda td: fork() and env.rand_action(td), break_when_any_done=False)
        elif how == "is a process of multiprocessing":
            child = multiprocessing.get_context("fork").Process(target=int)
            child.start()
            forked.append(child.pid)
        elif how != "exits inside a start":
            forked.append(os.fork())
        if forked == [0]:
            if how == "raises":
                raise RuntimeError("over")
            if how == "exits":
                sys.exit(0)
            if how == "exits at once":
                os._exit(0)
            if how == "closes":
                env.close()
            if how == "drops":
                pool, env, kept, root = env._pool, None, None, None
                del pool
                gc.collect()
            break
        os.waitpid(forked.pop(), 0)
        env.rollout(5, break_when_any_done=False)
        print(how, flush=True)
"""
HOWS = (
    "exits inside a start",
    *("returns", "raises", "exits", "exits at once", "closes", "drops"),
    # Whose end a later fork would wait for.
    *("exits inside a rollout", "is a process of multiprocessing"),
)


@pytest.mark.parametrize("start_method", ["zygote", "portable"])
@pytest.mark.long
def test_a_fork_of_the_owner_that_ends_leaves_the_workers_alone(
    start_method, script_host, tmp_path
):
    done = script_host.run_text(_FORKER, start_method, *HOWS, folder=tmp_path)
    assert (done.returncode, done.stdout.splitlines()) == (0, [*HOWS]), done.stderr
    assert done.stderr.count("Traceback") == 1, done.stderr  # of the one that raises


@pytest.mark.broken_pool
@pytest.mark.usefixtures("own_helper")
@pytest.mark.parametrize("ending", ["close", "kill"])
def test_processes_that_envs_started_end_with_their_worker(ending):
    env = ParallelEnv(2, ParentEnv, num_workers=2)
    env.reset()
    children = env.get("child")
    assert all(psutil.pid_exists(pid) for pid in children)
    if ending == "kill":
        for worker_id in range(2):
            kill(env, worker_id)
    env.close()
    assert not any(map(is_running, children))


def test_a_script_is_not_run_again(script_host, tmp_path):
    done = script_host.run_text(
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
        "env.close()\n",
        str(tmp_path / "log"),
        folder=tmp_path,
    )
    assert done.stdout.strip() == "[[], []]"
    assert (tmp_path / "log").read_text() == "ran "
