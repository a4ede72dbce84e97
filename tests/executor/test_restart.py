"""A lost worker is replaced: only its rows are interrupted, and no step is retried."""

import contextlib
import functools
import itertools
import os
import signal
import time

import gymnasium
import pytest
import torch
from tensordict import TensorDict

from envherd.executor import ExecutorOptions, ParallelEnv, SerialEnv, SpecError, WorkerLost
from envherd.workers.testing import CountingEnv, FaultyEnv

pytestmark = [pytest.mark.slow, pytest.mark.broken_pool]

NUM_ENVS = 4
RESTART = ExecutorOptions(on_worker_loss="restart")


def factories(tmp_path, step=3):
    dies = functools.partial(FaultyEnv, "kill", step=step, flag=str(tmp_path / "broken"))
    return [functools.partial(CountingEnv, 1_000_000)] * (NUM_ENVS - 1) + [dies]


def act(td):
    return td.set("action", torch.ones(td.batch_size, dtype=torch.int64))


def undisturbed(num_steps):
    with SerialEnv(NUM_ENVS, functools.partial(CountingEnv, 1_000_000), seed=0) as env:
        return env.rollout(num_steps, act)


@pytest.mark.parametrize("call", ["steps", "rollout"])
def test_rows_of_a_lost_worker_are_interrupted(tmp_path, call):
    expected = undisturbed(8)
    with ParallelEnv(NUM_ENVS, factories(tmp_path), num_workers=2, seed=0, options=RESTART) as env:
        if call == "rollout":
            data = env.rollout(8, act, break_when_any_done=False)
        else:
            root, rows = env.reset(), []
            for _ in range(8):
                td, root = env.step_and_maybe_reset(act(root))
                rows.append(td)
            data = torch.stack(rows, 1)
        lost = [False, False, True] + [False] * 5
        for key in ("interrupted", "truncated", "done"):
            assert data["next", key].squeeze(-1).tolist() == [[False] * 8] * 2 + [lost] * 2
        assert not data["next", "terminated"].any()
        for key in ("observation", "reward"):
            assert torch.equal(data["next", key][:2], expected["next", key][:2])
        assert data["next", "reward"][2:, 2].tolist() == [[0.0]] * 2
        assert torch.equal(data["next", "observation"][2:, 2], data["observation"][2:, 2])
        assert data["observation"][2:, :, 1].tolist() == [[0, 1, 2, 0, 1, 2, 3, 4]] * 2
        assert data["next", "observation"][2:, :, 1].tolist() == [[1, 2, 2, 1, 2, 3, 4, 5]] * 2
        assert not env.current()["done"].any()
        assert env.rollout(2, act, auto_reset=False)["observation"][:, 0, 1].tolist() == [8, 8, 5, 5]
        counted = env.statistics()
    assert (counted.worker_losses, counted.interrupted) == (1, 2)
    assert [worker.generation for worker in counted.workers] == [0, 1]


def test_a_plain_step_leaves_the_reset_to_the_caller(tmp_path):
    with ParallelEnv(NUM_ENVS, factories(tmp_path, step=1), num_workers=2, seed=0, options=RESTART) as env:
        td = env.step(act(env.reset()))
        assert td["next", "interrupted"].squeeze(-1).tolist() == [False, False, True, True]
        mask = act(td.select()).set("_reset", td["next", "done"])
        root = env.reset(mask)
        assert root["observation"][:, 1].tolist() == [1, 1, 0, 0]
        assert env.step(act(root))["next", "observation"][:, 1].tolist() == [2, 2, 1, 1]


@pytest.mark.parametrize("policy", ["raise", "restart"])
def test_a_loss_noticed_later_changes_no_view_of_a_step_before_it(policy):
    options = ExecutorOptions(on_worker_loss=policy)
    make = functools.partial(CountingEnv, 1_000_000)
    with ParallelEnv(2, make, num_workers=2, seed=0, copy=False, options=options) as env:
        view = env.step(act(env.reset()))["next"]
        kept = view.clone()
        os.kill(env.engine.pool.pid_of(1), signal.SIGKILL)
        time.sleep(0.2)
        with pytest.raises(WorkerLost) if policy == "raise" else contextlib.nullcontext():
            env.reset(TensorDict({"_reset": torch.tensor([False, True])}, [2]))
        assert (view == kept).all()
        now = env.current()
        assert now["truncated"].flatten().tolist() == [False, policy == "raise"]
        assert now["observation"][:, 1].tolist() == [1, policy == "raise"]


def test_an_interrupted_row_has_the_last_true_observation_also_after_a_partial_reset(tmp_path):
    faulty = functools.partial(FaultyEnv, "kill", step=2, flag=str(tmp_path / "broken"))
    with ParallelEnv(2, [functools.partial(CountingEnv, 1), faulty], num_workers=1, seed=0, options=RESTART) as env:
        td = env.step(act(env.reset()))
        root = env.reset(td.select().set("_reset", td["next", "done"]))
        seen = root["observation"].clone()
        td, _ = env.step_and_maybe_reset(act(root))  # env 0 ends and is reset before its worker dies in env 1's step
        assert td["next", "interrupted"].flatten().tolist() == [True, True]
        assert torch.equal(td["next", "observation"], seen)


def test_a_crash_loop_ends_in_an_error():
    make = [functools.partial(CountingEnv, 1_000_000)] * 3 + [functools.partial(FaultyEnv, "kill", step=1)]
    options = ExecutorOptions(on_worker_loss="restart", max_restarts=2)
    with ParallelEnv(NUM_ENVS, make, num_workers=2, seed=0, options=options) as env:
        root = env.reset()
        for _ in range(2):
            root = env.step_and_maybe_reset(act(root))[1]
        with pytest.raises(WorkerLost, match="SIGKILL") as caught:
            env.step_and_maybe_reset(act(root))
        assert env.statistics().worker_losses == 3
    assert "is not replaced: ExecutorOptions.max_restarts=2 within restart_window_s=60 allows" in caught.value.message
    assert "on_worker_loss='restart'" not in caught.value.message  # which it is
    assert caught.value.context["exit_code"] == -9
    assert caught.value.env_ids == (2, 3)


def dies_and_is_another(flag):
    if os.path.exists(flag):
        return gymnasium.make("Pendulum-v1")
    return FaultyEnv("kill", step=3, flag=flag)


def test_an_env_with_another_spec_after_a_restart_is_its_factorys_fault(tmp_path):
    make = functools.partial(dies_and_is_another, str(tmp_path / "broken"))
    with ParallelEnv(1, make, options=RESTART) as env:
        env.reset()
        with pytest.raises(SpecError, match="restart failed: expected env 0 with the spec that it had"):
            env.rollout(5, act, break_when_any_done=False)


def test_a_crash_loop_slows_down_while_the_others_go_on():
    make = [functools.partial(CountingEnv, 1_000_000), functools.partial(FaultyEnv, "kill", step=1)]
    options = ExecutorOptions(on_worker_loss="restart", max_restarts=3)
    with ParallelEnv(2, make, num_workers=2, seed=0, options=options) as env:
        env.send(act(env.reset()))
        counts, began, times = [0, 0], time.monotonic(), []
        while counts[1] < 3:
            td = env.recv(min_envs=1)
            for env_id in td["env_ids"].tolist():
                counts[env_id] += 1
                if env_id == 1:
                    times.append(time.monotonic() - began)
            env.send(act(env.current(td["env_ids"])), td["env_ids"])
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert all(gap > least for gap, least in zip(gaps, (0.08, 0.16), strict=True))  # of 0.1 and 0.2 s
    assert counts[0] > 20 * counts[1]


def test_episodes_go_on_counting(tmp_path):
    """A successor does not replay the episodes of the worker it replaces."""
    with ParallelEnv(NUM_ENVS, factories(tmp_path), num_workers=2, seed=0, options=RESTART) as env:
        data = env.rollout(6, act, break_when_any_done=False)
        seeds = data["observation"][3, :, 0].tolist()
        assert seeds[0] == seeds[2]
        assert len(set(seeds)) == 2
        with SerialEnv(NUM_ENVS, CountingEnv, seed=0) as serial:
            serial.reset()
            assert serial.reset()["observation"][3, 0].item() == seeds[3]
