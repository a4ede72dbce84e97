"""Limits and side effects of TorchRL's `ParallelEnv`, and problems with it that users have reported: not here."""

import os
import subprocess
import sys
import time
import warnings
from contextlib import closing

from tests.extras import needs, skip_without

skip_without("torchrl")

import gymnasium
import pytest
import torch
from gymnasium.vector import AutoresetMode
from tensordict import TensorDict
from torchrl.envs import (
    EnvBase,
    ExcludeTransform,
    GymEnv,
    GymWrapper,
    MeltingpotEnv,
    PettingZooWrapper,
    TransformedEnv,
)
from torchrl.envs import SerialEnv as OwnSerialEnv

from envherd.executor import ExecutorOptions
from envherd.torchrl import ParallelEnv
from envherd.workers.errors import EnvError, FactoryError, WorkerTimeout
from tests.conftest import gained_shm_names, shm_names
from tests.envs import torchrl_own as own
from tests.envs.torchrl_envs import Noisy
from tests.envs.torchrl_own import started

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(180),
    pytest.mark.preloads(*own.PRELOADED),
]

SUBSTRATE = "prisoners_dilemma_in_the_matrix__repeated"


# ---- envs that reset themselves ----------------------------------------------------------------


def vector_env(mode: AutoresetMode) -> EnvBase:
    return GymWrapper(
        gymnasium.make_vec(
            "CartPole-v1", 2, "sync", vector_kwargs={"autoreset_mode": mode}
        )
    )


def test_vector_envs_whose_resets_are_steps_are_refused():
    """TorchRL itself refuses them in the factory; if the `gym` package is its backend, the facade does."""
    with pytest.raises(
        (FactoryError, RuntimeError),
        match=r"NEXT_STEP.*AutoresetMode\.DISABLED|SAME_STEP or DISABLED",
    ):
        ParallelEnv(2, lambda: vector_env(AutoresetMode.NEXT_STEP))


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
def test_other_vector_envs_give_true_last_observations_and_no_step_too_many(mode):
    with closing(ParallelEnv(2, lambda: vector_env(mode))) as env:
        env.set_seed(0)
        torch.manual_seed(0)
        rollout = env.rollout(60, break_when_any_done=False)
    assert rollout.shape == (2, 2, 60)
    ended = rollout["next", "terminated"][..., 0]
    last = rollout["next", "observation"]
    fallen = (last[..., 0].abs() > 2.4) | (last[..., 2].abs() > 0.2095)
    assert ended.sum() > 4
    assert torch.equal(ended, fallen)
    assert (rollout["next", "reward"] == 1).all()
    following = rollout["observation"][..., 1:, :]
    assert (following[ended[..., :-1]].abs() <= 0.05).all()
    assert torch.equal(following[~ended[..., :-1]], last[..., :-1, :][~ended[..., :-1]])


class Reusing(own.CountingEnv):
    """Returns the same tensors at every step, changed in place, like GPU simulators."""

    def _step(self, tensordict):
        return self._reused("_stepped", super()._step(tensordict))

    def _reset(self, tensordict=None, **kwargs):
        return self._reused("_started", super()._reset(tensordict, **kwargs))

    def _reused(self, name, out):
        kept = self.__dict__.setdefault(name, out.clone())
        return kept.update_(out).copy()


def test_envs_that_write_to_the_same_tensors_for_ever():
    with closing(ParallelEnv(2, lambda: Reusing(max_steps=3))) as env:
        rollout = env.rollout(
            7, lambda td: td.set("action", torch.ones(2, 1)), break_when_any_done=False
        )
        assert rollout["next", "observation"][0].flatten().tolist() == [
            1,
            2,
            3,
            4,
            1,
            2,
            3,
        ]
        assert rollout["observation"][0].flatten().tolist() == [0, 1, 2, 3, 0, 1, 2]
        kept = [env.reset()]
        for _ in range(3):
            kept.append(
                env.step(kept[-1].copy().set("action", torch.ones(2, 1)))["next"]
            )
        assert [int(td["observation"][0]) for td in kept] == [0, 1, 2, 3]


class Blank(Noisy):
    """Has no last observation and returns NaN, like TorchRL's wrapper of Isaac Lab."""

    seen = (0.0, 0.0, 0.0, torch.nan)

    def content(self):
        return {"noise": torch.full((2,), self.seen[self.steps])}


def test_observations_that_are_missing_can_be_refused():
    with (
        started(2, Blank, options=ExecutorOptions(check_finite=True)) as env,
        pytest.raises(EnvError, match=r"noise failed.*got nan"),
    ):
        env.rollout(3)


class Misshapen(Noisy):
    """Grows at its second step."""

    sizes = (2, 2, 3)

    def content(self):
        return {"noise": torch.zeros(self.sizes[self.steps])}


def test_wrong_shapes_are_named_and_lose_no_worker():
    with closing(ParallelEnv(2, Misshapen, num_processes=2)) as env:
        td = env.rand_step(env.reset())
        again = td["next"].set("action", td["action"])
        with pytest.raises(EnvError, match="noise"):
            env.step(again)
        assert env.reset()["noise"].shape == (2, 2)


@needs("pettingzoo")
@own.since((0, 13), "masks of agents that are gone")
@pytest.mark.filterwarnings("ignore:PettingZoo in TorchRL")
def test_agents_that_leave_have_their_masks():
    from mpe2 import simple_tag_v3

    def make():
        return PettingZooWrapper(simple_tag_v3.parallel_env(max_cycles=5))

    with (
        closing(ParallelEnv(2, make, num_processes=2)) as ours,
        closing(OwnSerialEnv(2, make)) as theirs,
    ):
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


# ---- workers ------------------------------------------------------------------------------------


class OnlyOne(own.CountingEnv):
    """Can be built only once per process, like some simulators; reports on its process."""

    builder = None

    def __init__(self, **kwargs):
        if OnlyOne.builder is not None:
            raise RuntimeError("a second simulator in this process")
        OnlyOne.builder = os.getpid()
        super().__init__(**kwargs)

    def _step(self, tensordict):
        if bool((tensordict["action"] == 7).all()):
            time.sleep(1)
        return super()._step(tensordict)

    def process(self):
        return (
            os.getpid(),
            os.getppid(),
            hasattr(torch, "a_mark_of_the_caller"),
            torch.cuda.is_initialized(),
        )


def test_workers_are_not_forked_and_may_be_one_per_env(monkeypatch):
    """A CUDA context with its threads and locks is not forked, with any start method."""
    monkeypatch.setattr(torch, "a_mark_of_the_caller", True, raising=False)
    with started(2, OnlyOne, mp_start_method="fork", num_processes=2) as env:
        assert env.rollout(3).shape == (2, 3)
        assert len({os.getpid(), *(pid for pid, *_ in env.process())}) == 3
        for _, parent, has_mark, has_cuda in env.process():
            assert parent != os.getpid()
            assert not has_mark
            assert not has_cuda
        td = env.reset()
        td["action"] = torch.full_like(env.full_action_spec["action"].zero(), 7)
        before = time.process_time()
        env.step(td)
        # Processor time: TorchRL's workers poll continuously.
        assert time.process_time() - before < 0.5
    assert OnlyOne.builder is None  # none was built here


def test_outputs_keep_no_graph():
    """With a policy whose outputs require gradients, neither inputs nor outputs of workers keep a graph."""
    weight = torch.ones(1, requires_grad=True)
    with started(2, lambda: GymEnv("Pendulum-v1"), num_processes=1) as env:
        rollout = env.rollout(3, lambda td: td.set("action", weight * torch.ones(2, 1)))
        by_message = (
            env.reset()
            .set("action", weight * torch.ones(2, 1))
            .set("next", TensorDict({"kept": torch.ones(2)}, [2]))
        )
        by_message = env.step(by_message)  # by message
    for td in (rollout["next"], by_message["next"]):
        assert not any(
            leaf.requires_grad
            for leaf in td.values(include_nested=True, leaves_only=True)
        )


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="says what happens where there is no GPU"
)
def test_a_device_that_is_not_there_is_named():
    with pytest.raises((RuntimeError, AssertionError), match=r"CUDA|NVIDIA"):
        ParallelEnv(2, own.CountingEnv, device="cuda").rollout(2)


class Sleeper(own.CountingEnv):
    """Warns when it is built, and hangs in one method."""

    def __init__(self, **kwargs):
        warnings.warn("the level is deprecated", stacklevel=2)
        super().__init__(**kwargs)

    def sleep(self):
        time.sleep(600)

    def _set_seed(self, seed):
        self.sleep()

    @property
    def level(self):
        return self.sleep()


@pytest.mark.broken_pool
@pytest.mark.long
def test_warnings_are_shown_and_calls_of_envs_have_a_deadline(capfd):
    calls = (
        lambda env: env.set_seed(7),
        lambda env: env.level,
    )
    options = ExecutorOptions(
        reset_timeout_s=2.0,
        close_timeout_s=1.0,
        on_worker_loss="restart",
        max_restarts=9,
        worker_output="inherit",
    )
    with started(1, Sleeper, options=options) as env:
        env.reset()
        assert "the level is deprecated" in capfd.readouterr().err
        for call in calls:
            with pytest.raises(WorkerTimeout, match="in sleep"):
                call(env)
            assert env.rollout(2).shape == (1, 2)


# ---- what the machine has -------------------------------------------------------------------------


def test_several_executors_share_nothing_and_use_few_descriptors():
    before = shm_names(), set(os.listdir("/proc/self/fd"))
    with (
        started(16, lambda: GymEnv("CartPole-v1"), num_processes=2) as first,
        started(16, lambda: GymEnv("CartPole-v1"), num_processes=1) as second,
    ):
        roots = []
        for env in (first, second):
            env.set_seed(7)
            roots.append(env.reset())
        assert not gained_shm_names(before[0])
        assert len(set(os.listdir("/proc/self/fd")) - before[1]) < 32
        for _ in range(5):
            action = first.rand_action(roots[0].clone())["action"]
            stepped = [
                env.step(td.set("action", action))
                for env, td in zip((first, second), roots, strict=True)
            ]
            assert torch.equal(
                stepped[0]["next", "observation"], stepped[1]["next", "observation"]
            )
            roots = [td["next"].copy() for td in stepped]


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("env_threads", True, "env_threads=False, got True: .* Use more num_processes"),
        ("infos", "plain", "infos=drop, got plain: .* auto_register_info_dict"),
        (
            "episode_statistics",
            True,
            "episode_statistics=False, got True: .*RewardSum",
        ),
    ],
)
def test_options_without_a_place_in_torchrl_are_refused_before_anything_is_started(
    name, value, expected
):
    with pytest.raises(ValueError, match=f"expected options with {expected}"):
        ParallelEnv(2, Sleeper, options=ExecutorOptions(**{name: value}))


# ---- Melting Pot ------------------------------------------------------------------------------------


@needs("meltingpot")
@pytest.mark.long
def test_unrequested_pictures_stay_in_the_worker():
    with started(
        2,
        lambda: TransformedEnv(MeltingpotEnv(SUBSTRATE), ExcludeTransform("RGB")),
        num_processes=1,
    ) as env:
        rollout = env.rollout(3)
        assert "RGB" not in rollout["next"]
        assert rollout["next", "agents", "observation", "RGB"].any()
        assert len(env._workers) == 1
        leaves = env._crew_at_work().spec.observation
        assert "observation:RGB" not in {leaf.key[0] for leaf in leaves}


# ---- scripts --------------------------------------------------------------------------------------

CELLS = """
from torchrl.envs import GymEnv
from envherd.torchrl import ParallelEnv
class Longer(GymEnv):
    def level(self): return LEVEL

LEVEL = 3
make = lambda: Longer("CartPole-v1")
env = ParallelEnv(2, make)
print(tuple(env.rollout(3).shape), env.level())
env.close()
"""


@pytest.mark.full
@pytest.mark.parametrize("flags", [["-"], ["-i"]])
def test_code_typed_at_a_prompt_works(flags):
    command = [sys.executable, "-W", "ignore", *flags]
    done = subprocess.run(
        command, input=CELLS, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[0] == "(2, 3) [3, 3]", done.stderr
