"""Problems that users have reported with TorchRL's `ParallelEnv` do not occur here."""

from __future__ import annotations

import subprocess
import sys

from tests.extras import needs, skip_without

skip_without("torchrl")

import pytest
import torch
from torchrl.envs import PettingZooWrapper
from torchrl.envs import SerialEnv as OwnSerialEnv

from envherd.executor.facades.torchrl import ParallelEnv
from envherd.workers.errors import EnvError
from tests import torchrl_own as own

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180), pytest.mark.preloads(*own.PRELOADED)]

SCRIPT = """
from torchrl.envs import GymEnv
from envherd.executor.facades.torchrl import ParallelEnv

print("the script runs")
env = ParallelEnv(2, lambda: GymEnv("CartPole-v1"), num_processes=1)
print(tuple(env.rollout(3).shape))
env.close()
"""


class Misshapen(own.CountingEnv):
    """Grows a dimension at its second step."""

    def _step(self, tensordict):
        out = super()._step(tensordict)
        if int(self.count.max()) == 2:
            out["observation"] = out["observation"].expand(3, 1).clone()
        return out


def act(env, value):
    td = env.reset()
    return td.set("action", torch.full_like(env.full_action_spec["action"].zero(), value))


@pytest.mark.full
def test_a_script_needs_no_main_guard_and_runs_once(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", script], capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:2] == ["the script runs", "(2, 3)"]


def test_wrong_shapes_are_named_and_kill_nobody():
    env = ParallelEnv(2, Misshapen, num_processes=2)
    try:
        td = env.step(act(env, 1))
        again = td["next"].set("action", td["action"])
        with pytest.raises(EnvError, match="observation"):
            env.step(again)
        assert env.reset()["observation"].shape == (2, 1)
    finally:
        env.close()


@needs("pettingzoo")
@pytest.mark.filterwarnings("ignore:PettingZoo in TorchRL")
def test_agents_that_leave_have_their_masks():
    from mpe2 import simple_tag_v3

    def make():
        return PettingZooWrapper(simple_tag_v3.parallel_env(max_cycles=5))

    ours, theirs = ParallelEnv(2, make, num_processes=2), OwnSerialEnv(2, make)
    try:
        for env in (ours, theirs):
            env.set_seed(0)
        torch.manual_seed(0)
        td_ours, td_theirs = ours.reset(), theirs.reset()
        for _ in range(12):
            acted = theirs.rand_action(td_theirs)
            td_ours.update(acted.select(*theirs.action_keys))
            after_ours, td_ours = ours.step_and_maybe_reset(td_ours)
            after_theirs, td_theirs = theirs.step_and_maybe_reset(acted)
            mine, other = after_ours["next"], after_theirs["next"]
            for key in other.keys(include_nested=True, leaves_only=True):
                if isinstance(other[key], torch.Tensor):
                    assert torch.equal(mine[key], other[key]), key
    finally:
        ours.close()
        theirs.close()
