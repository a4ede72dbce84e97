"""Envs of another interpreter: what it needs, equal data, and the faults of such workers."""

import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import venv
from pathlib import Path
from types import SimpleNamespace

import cloudpickle
import numpy as np
import psutil
import pytest

from envherd import (
    ExecutorOptions,
    FactoryError,
    InPython,
    ParallelEnv,
    SerialEnv,
    WorkerLost,
    WorkerTimeout,
)
from envherd.executor.guests.interpreters import check_interpreter, spread_apart
from envherd.executor.guests.monitor import Watch, plates
from envherd.executor.sending.blueprint import num_runs
from tests.gates import wait_for

#: A module that both interpreters import: an env without any library of envs.
MODULE = """
import os, sys, time
import numpy as np
from envherd import Adapter, Box, Discrete, EnvSpec, LeafSpec, register

class Drift:
    def __init__(self, limit=9, table=None):
        self.limit, self.table = limit, table
        self.python = sys.executable

    def loaded(self):
        return sorted({name.partition(".")[0] for name in sys.modules})

class DriftAdapter(Adapter):
    family = "drift"

    def __init__(self, env):
        self.env = env
        self.spec = EnvSpec(
            observation=(LeafSpec(("observation",), (2,), "float32", Box(-np.ones(2), np.ones(2))),),
            action=(LeafSpec(("action",), (), "int64", Discrete(4)),),
            family=self.family,
        )

    def reset(self, seed, options=None, mask=None):
        self.rng = np.random.default_rng(seed)
        self.steps = 0
        return [self.rng.uniform(-1, 1, 2).astype("float32")]

    def step(self, action):
        self.steps += 1
        if self.env.limit == -1 and self.steps == 3:
            raise RuntimeError("the simulator broke")
        if self.env.limit == -2 and self.steps == 3:
            os._exit(7)
        if self.env.limit == -3 and self.steps == 3:
            time.sleep(600)
        value = self.rng.uniform(-1, 1, 2).astype("float32")
        return [value], [float(action[0])], False, self.steps == self.env.limit

def make(**kwargs):
    register(Drift, DriftAdapter)
    return Drift(**kwargs)

def fail():
    raise OSError("no licence")

def die():
    os._exit(3)
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """Return the interpreter of a new virtual environment that has numpy and cloudpickle alone."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=False, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for package in (Path(np.__file__).parent, Path(cloudpickle.__file__).parent):
        (packages / package.name).symlink_to(package)
    libraries = Path(np.__file__).parents[1] / "numpy.libs"
    if libraries.is_dir():
        (packages / "numpy.libs").symlink_to(libraries)
    return str(folder / "bin" / "python")


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Make `drift_module` importable here, as from the folder of a script."""
    (tmp_path / "drift_module.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "drift_module", None)
    del sys.modules["drift_module"]
    drift_module = importlib.import_module("drift_module")

    yield drift_module
    del sys.modules["drift_module"]


@pytest.mark.usefixtures("module")
def test_a_worker_needs_numpy_and_cloudpickle_alone(python):
    with ParallelEnv(2, InPython(python, "drift_module:make"), num_workers=1) as env:
        env.rollout(20, break_when_any_done=False)
        assert env.get("python") == [python, python]
        assert not {"torch", "tensordict", "gymnasium", "psutil"} & set(
            env.call("loaded")[0]
        )


def test_envs_of_two_interpreters_in_one_batch_have_the_data_of_one(python, module):
    other = InPython(python, "drift_module:make", {"limit": 9})
    table = {"limit": 9}
    with ParallelEnv(4, module.make, env_kwargs=table, num_workers=2, seed=5) as env:
        expected = env.rollout(40, break_when_any_done=False)
    with ParallelEnv(
        [module.make, module.make, other, other],
        env_kwargs=table,
        num_workers=2,
        seed=5,
    ) as env:
        mixed = env.rollout(40, break_when_any_done=False)
    assert (expected["observation"] == mixed["observation"]).all()
    assert (expected["next", "reward"] == mixed["next", "reward"]).all()
    assert mixed["next", "truncated"].sum() == 4 * 4


@pytest.mark.usefixtures("module")
def test_arguments_arrive_as_data(python):
    kwargs = {"table": {"a": [1, 2.5, "x"], "b": np.arange(3)}}
    more = [{"limit": np.int64(5)}, {"limit": 7}]
    with ParallelEnv(
        2, InPython(python, "drift_module:make", kwargs), env_kwargs=more, num_workers=1
    ) as env:
        data = env.rollout(35, break_when_any_done=False)
        assert data["next", "truncated"].sum((1, 2)).tolist() == [7, 5]


@pytest.mark.broken_pool
@pytest.mark.parametrize(
    ("limit", "error", "match"),
    [
        (-1, Exception, "the env raised RuntimeError: the simulator broke"),
        (-2, WorkerLost, r"ended with exit code 7 in step"),
        (
            -3,
            WorkerTimeout,
            r"(?s)gave no answer within 3 s in step.*It was stuck in:.*in step",
        ),
    ],
)
@pytest.mark.usefixtures("module")
@pytest.mark.long
def test_faults_of_its_envs_are_reported_as_those_of_others(
    python, limit, error, match
):
    options = ExecutorOptions(step_timeout_s=3 if error is WorkerTimeout else 60)
    make = InPython(python, "drift_module:make", {"limit": limit})
    with (
        ParallelEnv(2, make, num_workers=1, options=options) as env,
        pytest.raises(error, match=match),
    ):
        env.rollout(5)


@pytest.mark.broken_pool
@pytest.mark.usefixtures("module")
@pytest.mark.parametrize(
    ("target", "error", "match"),
    [
        ("drift_module:fail", FactoryError, "the factory raised OSError: no licence"),
        ("drift_module:die", WorkerLost, "ended with exit code 3 in build"),
        (
            "drift_module:nope",
            FactoryError,
            "module 'drift_module' has no attribute 'nope'",
        ),
        ("no_such_module:make", FactoryError, "No module named 'no_such_module'"),
        ("torch:zeros", FactoryError, "No module named 'torch'"),
    ],
)
def test_faults_of_its_factories_are_reported(python, target, error, match):
    with pytest.raises(error, match=match):
        ParallelEnv(2, InPython(python, target), num_workers=1)


def test_worker_of_another_interpreter_ends_with_its_owner(
    python, script_host, tmp_path
):
    (tmp_path / "drift_module.py").write_text(MODULE)
    done = script_host.run_text(
        textwrap.dedent(f"""
        import os, signal
        from envherd import InPython, ParallelEnv
        env = ParallelEnv(2, InPython({python!r}, "drift_module:make"), num_workers=2)
        env.reset()
        print(*(worker.pid for worker in env.statistics().workers), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """),
        folder=tmp_path,
    )
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2, done.stderr
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


def test_wrong_interpreters_and_targets_are_refused(python):
    for arguments, match in (
        (
            ("/no/such/python", "a:b"),
            "expected a Python interpreter, got '/no/such/python': no such program",
        ),
        ((python, "module"), "expected a target 'MODULE:CALLABLE', got 'module'"),
        ((python, "a b:c"), "expected a target 'MODULE:CALLABLE', got 'a b:c'"),
        (
            (python, len),
            "expected a target 'MODULE:CALLABLE', got <built-in function len>",
        ),
        (
            (python, "a:b", {"x": object()}),
            "expected kwargs of plain data .* Build other objects in a:b",
        ),
        (([], "a:b"), "no such program"),
        ((["no-such-program", "python"], "a:b"), "no such program"),
    ):
        with pytest.raises(FactoryError, match=match):
            InPython(*arguments)


@pytest.mark.parametrize(
    ("commands", "match"),
    [
        (
            "echo no python >&2; exit 3",
            r"expected a Python interpreter, got .*/python \(no python\)",
        ),
        *(
            (f"echo '<envherd>{{{answer}}}</envherd>'", match)
            for answer, match in (
                (
                    '"version": [3, 8, 1], "name": "cpython", "lacks": {}',
                    r"expected CPython 3\.10 or newer, got cpython 3\.8\.1",
                ),
                (
                    '"version": [3, 12, 1], "name": "pypy", "lacks": {}',
                    r"expected CPython 3\.10 or newer, got pypy 3\.12\.1",
                ),
                (
                    '"version": [3, 12, 1], "name": "cpython", "lacks": {"numpy": "ModuleNotFoundError: x"}',
                    r"cannot import numpy \(ModuleNotFoundError: x\)\. Run: .*python -m pip install numpy$",
                ),
            )
        ),
    ],
)
def test_an_interpreter_that_cannot_run_workers_is_refused_with_the_remedy(
    tmp_path, commands, match
):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{commands}\n")
    python.chmod(0o755)
    with pytest.raises(FactoryError, match=match):
        ParallelEnv(1, InPython(python, "a:b"))


@pytest.mark.parametrize(
    "code",
    [
        "import atexit; atexit.register(print, 'bye')",
        "import sys; sys.stdout.write('licence ok ')",
        "import os; os.dup2(2, 1)",
        "import atexit, os; atexit.register(os._exit, 3)",
        "import sys; sys.stdout.reconfigure(encoding='utf-16'); print('hello')",
    ],
)
@pytest.mark.usefixtures("module")
def test_output_of_an_interpreter_at_its_start_is_ignored(python, code, monkeypatch):
    (packages,) = Path(python).parents[1].glob("lib/python*/site-packages")
    site = packages / "sitecustomize.py"
    site.write_text(code)
    monkeypatch.setenv("PYTHONIOENCODING", "utf-16")
    check_interpreter.cache_clear()
    try:
        check_interpreter(python)
    finally:
        site.unlink()


@pytest.mark.usefixtures("module")
def test_factory_of_another_interpreter_is_refused_in_this_one(python):
    make = InPython(python, "drift_module:make")
    for build in (lambda: SerialEnv(1, make), lambda: ParallelEnv(1, lambda: make())):  # noqa: PLW0108
        with pytest.raises(
            FactoryError,
            match=r"expected drift_module:make to be built by .*, got a call in another",
        ):
            build()


#: Commands in front of an interpreter; those that are not installed are skipped.
COMMANDS = {
    "executes": ["env", "A=1"],
    "forks": ["bash", "-c", '"$0" "$@"; exit $?'],
    "a namespace": ["unshare", "--pid", "--fork"],
    "namespaces": [
        "bwrap",
        "--dev-bind",
        "/",
        "/",
        "--proc",
        "/proc",
        "--unshare-net",
        "--unshare-pid",
    ],
}


def _group(pid):
    """Return the processes of a group."""
    return [one for one in psutil.pids() if _group_of(one) == pid]


def _group_of(pid):
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


@pytest.mark.broken_pool
@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.usefixtures("module")
@pytest.mark.long
def test_a_command_in_front_of_an_interpreter(python, name, caplog):
    command = [*COMMANDS[name], python]
    if (
        shutil.which(command[0]) is None
        or subprocess.run([*command, "-c", "0"], check=False).returncode
    ):
        pytest.skip(f"{command[0]} is not installed, or not allowed here")
    options = ExecutorOptions(on_worker_loss="restart", step_timeout_s=3)
    with ParallelEnv(
        2, InPython(python, "drift_module:make"), num_workers=1, seed=5
    ) as env:
        expected = env.rollout(20, break_when_any_done=False)
    with ParallelEnv(
        2,
        InPython(command, "drift_module:make"),
        num_workers=2,
        seed=5,
        options=options,
    ) as env:
        assert (
            env.rollout(20, break_when_any_done=False)["observation"]
            == expected["observation"]
        ).all()
        (plate,) = (one for one in plates() if one.pid == os.getpid())
        shown = Watch(plate).look().workers[1]
        # A namespace that has its own /proc hides the id.
        is_worker = shown.pid == _group(env.engine.pool.pid_of(1))[-1]
        assert is_worker or (name == "namespaces" and shown.uss_bytes == 0)
        for which in (0, -1):  # the process that was started, and the worker
            pid = env.engine.pool.pid_of(1)
            os.kill(_group(pid)[which], signal.SIGKILL)
            wait_for(lambda pid=pid: not _group(pid))
            td, _ = env.step_and_maybe_reset(env.rand_action())
            assert td["next", "interrupted"].flatten().tolist() == [False, True]
        pids = [env.engine.pool.pid_of(worker) for worker in range(2)]
    assert not any(map(_group, pids))
    with ParallelEnv(
        1, InPython(command, "drift_module:make", {"limit": -3}), options=options
    ) as env:
        pid = env.engine.pool.pid_of(0)
        with caplog.at_level("WARNING", "envherd"):
            td = env.rollout(4, break_when_any_done=False)
        assert td["next", "interrupted"].flatten().tolist() == [
            False,
            False,
            True,
            False,
        ]
        assert re.search(r"drift_module\.py\", line \d+ in step", caplog.text), (
            "the stack of the env that hangs"
        )
        assert not _group(pid)


@pytest.mark.parametrize(
    ("command", "lost"),
    [
        (["setsid"], "its process group"),
        (
            [
                sys.executable,
                "-c",
                "import subprocess, sys; subprocess.call(sys.argv[1:])",
            ],
            "its descriptors",
        ),
    ],
)
@pytest.mark.usefixtures("module")
def test_a_command_that_loses_what_a_worker_needs_is_refused(python, command, lost):
    with pytest.raises(
        FactoryError, match=f"got .*{re.escape(command[0])}.* which loses {lost}"
    ):
        ParallelEnv(1, InPython([*command, python], "drift_module:make"))


def test_workers_have_envs_of_one_interpreter():
    a, b = None, "/b"
    assert spread_apart([a, a, b, b], 2) == ((0, 1), (2, 3))
    assert spread_apart([a] * 5 + [b], 3) == ((0, 1, 2), (3, 4), (5,))
    assert spread_apart([a] * 4, 3) == ((0, 1), (2,), (3,))
    assert (
        num_runs([SimpleNamespace(interpreter=python) for python in [a, b, b, a]]) == 3
    )
    with pytest.raises(
        ValueError,
        match=r"num_workers failed: expected at least 3, got 2: envs of different",
    ):
        spread_apart([a, b, a], 2)


OTHER = os.environ.get("ENVHERD_TEST_PYTHON", "")


@pytest.mark.skipif(
    not OTHER,
    reason="ENVHERD_TEST_PYTHON names no interpreter of another version, with gymnasium",
)
def test_an_env_of_another_version_of_python_and_gymnasium():
    with ParallelEnv(
        2,
        InPython(OTHER, "gymnasium:make", {"id": "CartPole-v1"}),
        num_workers=1,
        seed=1,
    ) as env:
        data = env.rollout(50, break_when_any_done=False)
    import gymnasium

    with ParallelEnv(
        2, gymnasium.make, env_kwargs={"id": "CartPole-v1"}, num_workers=1, seed=1
    ) as env:
        assert (
            env.rollout(50, break_when_any_done=False)["observation"]
            == data["observation"]
        ).all()
