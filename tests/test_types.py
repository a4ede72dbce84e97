"""What a type checker finds in a user's script, with the package installed as a wheel installs it."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
#: A user's script. Lines with `# wrong` have a mistake; all others are right, also for `mypy --strict`.
SCRIPT = """
from collections.abc import Callable
from typing import Any

import envherd
from envherd import Collector, EnvError, ExecutorOptions, MeltingPotFactory, ParallelEnv, SerialEnv, evaluate
from envherd.cleanrl import gym
from envherd.gymnasium import AsyncVectorEnv
from envherd.pettingzoo import ParallelVectorEnv
from envherd.sb3 import SubprocVecEnv
from envherd.torchrl import ParallelEnv as TorchRLParallelEnv
from envherd.executor.testing import check_env_contract
from envherd.workers.testing import CountingEnv
from envherd import ParalelEnv  # wrong: a name

make: Callable[[], Any] = CountingEnv
options = ExecutorOptions(on_worker_loss="restart", step_timeout_s=5.0)
with ParallelEnv(4, make, num_workers="auto", seed=0, options=options) as env:
    num_envs: int = env.num_envs
    data = env.rollout(20, env.rand_action, break_when_any_done=False)
    td, root = env.step_and_maybe_reset(env.rand_action(env.reset()))
    busy: float = env.statistics().workers[0].busy_s
    domain = env.action_spec[0].domain
    assert isinstance(domain, envherd.Discrete)
    num_actions: int = domain.n
    for batch in Collector(env, env.rand_action, frames_per_batch=64, total_frames=128):
        print(batch["next", "reward"], data, td, root, busy, num_envs)
    env.rolout(5)  # wrong: a method
    env.rollout("200")  # wrong: the type of an argument
    print(env.statistics().env_step)  # wrong: an attribute
    Collector(env, env.rand_action, frames_per_batch="8")  # wrong: the type of a keyword
    Collector(env, env.rand_action)  # wrong: a keyword is missing
try:
    SerialEnv([make, make]).close()
except EnvError as error:
    print(error.env_ids, error.remote_traceback)
check_env_contract(make, num_steps=20)
print(envherd.__version__, MeltingPotFactory("clean_up", deterministic=True), evaluate)
print(evaluate(None, make, 5, num_workers=2, success=lambda info, one: one.length > len(info)).returns)
print(evaluate(None, {"task": make}, seed=1)["task"].success)
evaluate(None, make, 5, num_worker=2)  # wrong: a keyword
print(gym, AsyncVectorEnv, ParallelVectorEnv, SubprocVecEnv, TorchRLParallelEnv)
ParallelEnv(4, make, num_worker=2)  # wrong: a keyword
ExecutorOptions(on_worker_loss="restrat")  # wrong: a word
"""
WRONG = {
    number for number, line in enumerate(SCRIPT.splitlines(), 1) if "# wrong" in line
}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with `script.py`, and with a fresh environment `venv` that has the files of the wheel."""
    folder = tmp_path_factory.mktemp("types")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("envherd", "executor", "shm", "workers"):
        shutil.copytree(
            ROOT / name,
            source / name,
            symlinks=True,
            ignore=shutil.ignore_patterns("__pycache__", "*.so"),
        )
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True
    )
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(site)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (folder / "script.py").write_text(SCRIPT)
    return folder


@pytest.mark.slow
def test_mypy_finds_all_mistakes_and_has_nothing_against_the_rest(installed):
    mypy = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--no-incremental",
        "--config-file=",
        "--show-column-numbers",
    ]
    command = [
        *mypy,
        "--python-executable",
        str(installed / "venv" / "bin" / "python"),
        "script.py",
    ]
    done = subprocess.run(
        command, cwd=installed, capture_output=True, text=True, check=False
    )
    found = {
        int(number)
        for number in re.findall(r"^script\.py:(\d+):", done.stdout, re.MULTILINE)
    }
    assert found == WRONG, f"{done.stdout}\n{done.stderr}"
    assert "py.typed" not in done.stdout
    assert 'did you mean "num_workers"?' in done.stdout
