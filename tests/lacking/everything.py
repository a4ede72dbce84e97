"""A user's script for any system: envs in workers, faults, loops and a facade. It has no main guard."""

import importlib.util
import os
import sys
from pathlib import Path

import numpy as np
from breaking import FaultyEnv  # type: ignore[import-not-found]  # it is in the folder of this script
from everything_imported import import_all  # type: ignore[import-not-found]  # it is in the folder of this script
from typer.testing import CliRunner

from envherd import (
    AsyncCollector,
    Collector,
    ExecutorOptions,
    ParallelEnv,
    SerialEnv,
    WorkerLost,
    preloaded,
)
from envherd.executor.cli.app import app
from envherd.executor.sizing import recommending
from envherd.gymnasium import AsyncVectorEnv
from envherd.shm import platforms
from envherd.workers.adapters.named import NamedFactory
from envherd.workers.testing import CountingEnv


def check(holds, what):
    """Fail, also under `python -O`."""
    if not holds:
        raise RuntimeError(f"{os.environ['ENVHERD_LACKS']}: {what}")


check("pidfd_open" in platforms.missing(), platforms.missing())
import_all()

with (
    ParallelEnv(4, CountingEnv, num_workers=2, seed=1) as env,
    SerialEnv(4, CountingEnv, seed=1) as serial,
):
    check("portable" in env.statistics().path, env.statistics().path)
    check((env.rollout(6) == serial.rollout(6)).all(), "rollouts differ")
    root = env.reset()
    env.send(env.rand_action(root))
    check(len(env.recv(4)) == 4, "recv")
    env.step_and_maybe_reset(env.rand_action(env.reset()))
    env.statistics()
    data = next(iter(Collector(env, None, frames_per_batch=16, total_frames=16)))
    check(data.numel() == 16, data)
    async_data = next(
        iter(AsyncCollector(env, None, frames_per_batch=16, total_frames=16))
    )
    check(async_data.numel() >= 16, async_data)

faults = [{"fault": "exit", "step": 2}, {"fault": "sleep", "step": 4}]
options = ExecutorOptions(on_worker_loss="restart", step_timeout_s=1.0)
with ParallelEnv(
    2, FaultyEnv, num_workers=2, env_kwargs=faults, options=options
) as env:
    root, interrupted = env.reset(), []
    for _ in range(4):
        batch, root = env.step_and_maybe_reset(env.rand_action(root))
        interrupted.append(batch["next", "interrupted"].flatten().tolist())
    check(
        interrupted[1][0] and interrupted[3][1] and sum(map(sum, interrupted)) >= 2,
        interrupted,
    )

kwargs = [{}, {"fault": "exit", "step": 3}]
lost = None
with ParallelEnv(2, FaultyEnv, num_workers=2, env_kwargs=kwargs) as env:
    env.reset()
    _, root = env.step_and_maybe_reset(env.rand_action(env.current()))
    saved = env.save([0])
    env.restore(saved, [0])
    try:
        env.branch(0, [1])
    except ValueError as error:
        check("portable pool" in str(error), error)
    else:
        raise RuntimeError("a branch was not refused")
    try:
        env.rollout(5)
    except WorkerLost as error:
        lost = error.env_ids
check(lost == (1,), lost)

vector = AsyncVectorEnv([NamedFactory("gymnasium", "CartPole-v1")] * 2, num_workers=1)
vector.reset(seed=1)
check(vector.step(np.zeros(2, np.int64))[0].shape == (2, 4), "the facade of Gymnasium")
vector.close()
if importlib.util.find_spec("pettingzoo") is not None:
    from envherd.pettingzoo import ParallelVectorEnv

    sys.path.append(str(Path(__file__).parents[2]))
    from tests.envs.counting_envs import AgentsEnv

    agents = ParallelVectorEnv([AgentsEnv] * 2, num_workers=1)
    by_agent, _infos = agents.reset(seed=1)
    check(
        all(rows.shape[0] == 2 for rows in by_agent.values()),
        "the facade of PettingZoo",
    )
    agents.close()

try:
    preloaded("json").__enter__()
except ValueError as error:
    check("lacks" in str(error), error)
else:
    raise RuntimeError("nothing was refused")
recommending.AUTO_BUDGET_S = 0.2  # of sizing, which computes for all of it
try:
    ParallelEnv("auto", CountingEnv).close()
except ValueError as error:
    check("got a system that lacks: /proc" in str(error), error)
else:
    check("/proc" not in platforms.missing(), "nothing was refused")
top = CliRunner().invoke(app, ["top", "--once"])
check(top.exit_code == 2 and "got a system that lacks" in top.output, top.output)
size = CliRunner().invoke(app, ["size", "gymnasium:CartPole-v1", "--budget", "0.5"])
check(size.exit_code == ("/proc" in platforms.missing()), size.output)
check(
    not size.exit_code or "got a system that lacks: /proc" in size.output, size.output
)
os.write(1, b"everything works\n")
