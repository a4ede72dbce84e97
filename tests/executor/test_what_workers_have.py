"""The table "What a worker has of its script" of docs/custom_envs.md, row by row."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

SCRIPT = """
import functools, json, logging, os, random, signal, sys, threading, warnings
import gymnasium, numpy as np, torch
from envherd import ExecutorOptions, ParallelEnv
import imported, registering

counter = {"built": 0}
handler = logging.StreamHandler()

class Locked:
    lock = threading.Lock()

Locked.lock.acquire()

@functools.lru_cache
def cached(n):
    return n + 1

cached(1)

def descriptors():
    return [fd for fd in os.listdir("/proc/self/fd") if os.path.islink(f"/proc/self/fd/{fd}")]

class Env(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (1,))
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self):
        counter["built"] += 1
        self.seen = {
            "variable": counter["built"],
            "cache": cached.cache_info().currsize,
            "lock": Locked.lock.locked(),
            "module": imported.VALUE,
            "registered": "FromImport-v0" in gymnasium.registry,
            "changed by an import": getattr(gymnasium, "changed_by_import", None),
            "path": "/somewhere/else" in sys.path,
            "folder": os.getcwd(),
            "before": os.environ.get("BEFORE"),
            "after": os.environ.get("AFTER"),
            "filters": any(one[2] is ImportWarning and one[0] == "error" for one in warnings.filters),
            "seterr": np.geterr()["divide"],
            "handlers": len(logging.getLogger("mine").handlers),
            "random": random.random(),
            "threads": threading.active_count(),
            "sigusr1": signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL,
            "file": any(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")) == "script.py" for fd in descriptors()),
            "script": sys.modules["__main__"].__dict__.get("counter") is not None,
        }

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, "float32"), {}

    def step(self, action):
        return np.zeros(1, "float32"), 0.0, False, False, {}

    def dtype(self):
        import torch
        return str(torch.get_default_dtype())

if __name__ == "__main__":
    sys.path.append("/somewhere/else")
    os.environ["BEFORE"] = "set"
    warnings.simplefilter("error", ImportWarning)
    np.seterr(divide="raise")
    torch.set_default_dtype(torch.float64)
    logging.getLogger("mine").addHandler(handler)
    signal.signal(signal.SIGUSR1, lambda *_: None)
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    random.seed(0)
    number = os.open("script.py", os.O_RDONLY)
    options = ExecutorOptions(on_worker_loss="restart", infos="plain")
    with ParallelEnv(2, Env, num_workers=1, options=options) as env:
        env.reset()
        os.environ["AFTER"] = "set"
        first = env.get("seen")
        os.kill(env.statistics().workers[0].pid, signal.SIGKILL)
        env.reset()
        env.reset()
        answer = {"first": first, "replaced": env.get("seen"), "dtype": env.call("dtype"), "own": random.random()}
        print(json.dumps(answer))
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """Run a script; return what its workers saw."""
    folder = tmp_path_factory.mktemp("script")
    (folder / "script.py").write_text(SCRIPT)
    (folder / "imported.py").write_text("VALUE = 'imported'\n")
    (folder / "registering.py").write_text(
        textwrap.dedent("""
        import gymnasium
        gymnasium.register("FromImport-v0", entry_point="imported:VALUE")
        gymnasium.changed_by_import = True
        """)
    )
    variables = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=folder, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return {**json.loads(done.stdout.splitlines()[-1]), "folder": str(folder)}


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("cache", 0),
        ("lock", False),
        ("module", "imported"),
        ("registered", True),
        ("changed by an import", None),
        ("path", True),
        ("before", "set"),
        ("after", None),
        ("filters", False),
        ("seterr", "warn"),
        ("handlers", 0),
        ("threads", 1),
        ("sigusr1", False),
        ("file", False),
        ("script", False),
    ],
)
def test_a_row_of_the_table(seen, what, expected):
    values = [one[what] for one in seen["first"] + seen["replaced"]]
    assert values == [expected] * 4


def test_variables_of_the_script_are_copies(seen):
    assert [one["variable"] for one in seen["first"]] == [1, 2]  # one copy in a worker
    assert [one["variable"] for one in seen["replaced"]] == [1, 2]


def test_it_has_the_folder_of_the_script(seen):
    assert {one["folder"] for one in seen["first"] + seen["replaced"]} == {seen["folder"]}


def test_the_default_dtype_is_that_of_torch(seen):
    assert set(seen["dtype"]) == {"torch.float32"}


def test_global_generators_are_seeded_for_each_env(seen):
    first, replaced = ([one["random"] for one in part] for part in (seen["first"], seen["replaced"]))
    assert first[0] != first[1]
    assert seen["own"] not in first
    assert len(set(replaced)) == 2
