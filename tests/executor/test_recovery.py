"""After a loss, a fault or an interrupt, the state of every env is correct, and the executor remains usable."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from envherd.executor import EnvError, ExecutorOptions, ParallelEnv, ResetNeeded, SerialEnv, WorkerLost
from envherd.workers.protocol import RING, Op
from envherd.workers.testing import CountingEnv, FaultyEnv
from tests.faults.envs import HaltingEnv
from tests.gates import Gate, interrupt

pytestmark = pytest.mark.slow

ENDLESS = functools.partial(CountingEnv, 1_000_000)
RESTART = ExecutorOptions(on_worker_loss="restart")


def act(env: Any) -> TensorDict:
    leaf = env.action_spec[0]
    return TensorDict({leaf.key: torch.ones((env.num_envs, *leaf.shape), dtype=torch.int64)}, env.batch_size)


def only(env: Any, *env_ids: int) -> TensorDict:
    mask = torch.zeros(env.num_envs, dtype=torch.bool)
    mask[list(env_ids)] = True
    return TensorDict({"_reset": mask}, [env.num_envs])


def kill(env: Any, worker_id: int) -> None:
    pid = env.statistics().workers[worker_id].pid
    os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(OSError):  # the process ended before or during the read
        while Path(f"/proc/{pid}/cmdline").read_bytes():
            time.sleep(0.005)


def counters(td: Any) -> list[int]:
    return td["observation"][..., 1].tolist()


def flags(td: Any, key: str) -> list[bool]:
    return td["next", key].flatten().tolist()


class TestFaults:
    @pytest.mark.parametrize(("call", "ended"), [("step", (0, 1)), ("step_and_maybe_reset", (0,))])
    def test_a_failed_step_leaves_those_that_must_be_reset_to_the_caller(self, call, ended):
        make = [functools.partial(FaultyEnv, "value_error"), functools.partial(CountingEnv, 2), ENDLESS]
        with ParallelEnv(3, make, num_workers=1) as env:
            env.reset()
            env.step_and_maybe_reset(act(env))
            with pytest.raises(EnvError) as caught:
                getattr(env, call)(act(env))
            assert counters(caught.value.partial) == [1, 2, 2]
            with pytest.raises(ResetNeeded) as refused:
                getattr(env, call)(act(env))
            assert refused.value.env_ids == ended
            assert counters(env.reset(only(env, *ended))) == [0, 0, 2]
            assert counters(env.step_and_maybe_reset(act(env))[1]) == [1, 1, 3]

    def test_a_failed_reset_leaves_the_others_reset(self):
        make = [ENDLESS, functools.partial(FaultyEnv, "value_error", at="reset", episode=1)]
        with ParallelEnv(2, make, num_workers=1) as env:
            env.reset()
            env.step(act(env))
            with pytest.raises(EnvError, match="reset failed"):
                env.reset()
            assert counters(env.current())[0] == 0
            with pytest.raises(ResetNeeded) as caught:
                env.step(act(env))
            assert caught.value.env_ids == (1,)
            assert env.statistics().env_errors == 1


class TestInterrupts:
    def test_ctrl_c_in_a_reset_costs_nothing_that_was_sent(self, tmp_path):
        gate = Gate(tmp_path)

        class SlowReset(CountingEnv):
            def reset(self, seed: int | None, options: Any = None) -> list[Any]:
                if self.episode >= 0:
                    gate.pass_through()
                return super().reset(seed, options)

        with ParallelEnv(2, [ENDLESS, functools.partial(SlowReset, 1_000_000)], num_workers=2) as env:
            env.reset()
            env.send(act(env)[:1], [0])
            interrupt(gate, lambda: env.reset(only(env, 1)))
            td = env.recv()
            assert (td["env_ids"].tolist(), counters(td["next"])) == ([0], [1])
            with pytest.raises(ResetNeeded) as caught:
                env.step(act(env))
            assert caught.value.env_ids == (1,)

    def test_an_answer_to_an_interrupted_question_is_not_the_next_ones(self, tmp_path):
        gate = Gate(tmp_path)

        class Slow(CountingEnv):
            def slowly(self, value: int) -> int:
                gate.pass_through()
                return value

        with ParallelEnv(2, Slow, num_workers=2) as env:
            interrupt(gate, lambda: env.call("slowly", 1))
            assert env.call("echo", 2) == [[[2], {}]] * 2

    def test_ctrl_c_after_a_recv_does_not_have_sent_again(self, tmp_path):
        gate = Gate(tmp_path)

        class Slow(CountingEnv):
            def slowly(self) -> None:
                gate.pass_through()

        with ParallelEnv(2, functools.partial(Slow, 1_000_000), num_workers=2) as env:
            env.reset()
            env.send(act(env))
            env.recv()
            interrupt(gate, lambda: env.call("slowly"))
            with pytest.raises(ValueError, match="that were sent"):
                env.recv(env_ids=[0])
            env.send(act(env))
            assert sorted(counters(env.recv()["next"])) == [2, 2]

    def test_ctrl_c_in_an_env_of_this_process_is_ctrl_c(self):
        with SerialEnv(2, [functools.partial(FaultyEnv, "keyboard_interrupt", step=1), ENDLESS]) as env:
            env.reset()
            with pytest.raises(KeyboardInterrupt):
                env.step(act(env))
            with pytest.raises(ResetNeeded):
                env.step(act(env))
            assert counters(env.reset()) == [0, 0]


@pytest.mark.broken_pool
class TestLosses:
    def test_a_loss_noticed_by_a_question_still_interrupts_the_rows(self):
        with ParallelEnv(4, ENDLESS, num_workers=2, options=RESTART) as env:
            env.reset()
            env.step_and_maybe_reset(act(env))
            kill(env, 0)
            for _ in range(2):
                with pytest.raises(WorkerLost, match="SIGKILL"):
                    env.call("pid")
            td, root = env.step_and_maybe_reset(act(env))
            assert flags(td, "interrupted") == [True, True, False, False]
            assert counters(td["next"]) == [1, 1, 2, 2]
            assert counters(root) == [0, 0, 2, 2]
            assert len(set(env.call("pid"))) == 2
            assert env.statistics().worker_losses == 1

    @pytest.mark.parametrize("seeds", [7, [7, 8, 9, 10]])
    def test_a_reset_of_a_lost_worker_has_its_seeds(self, seeds):
        with (
            ParallelEnv(4, ENDLESS, num_workers=2, options=RESTART, seed=0) as env,
            SerialEnv(4, ENDLESS, seed=0) as serial,
        ):
            for one in (env, serial):
                one.reset()
            kill(env, 0)
            for _ in range(2):
                assert torch.equal(env.reset(seed=seeds)["observation"], serial.reset(seed=seeds)["observation"])

    def test_a_worker_that_dies_in_a_reset_is_reset_with_the_same_arguments(self, tmp_path):
        faulty = functools.partial(FaultyEnv, "kill", at="reset", episode=1, flag=str(tmp_path / "flag"))
        with ParallelEnv(2, [faulty, ENDLESS], num_workers=2, options=RESTART) as env:
            env.reset()
            env.reset(seed=[5, 6], level=3)
            assert env.get("seed") == [5, 6]
            assert env.get("options") == [{"level": 3}] * 2

    def test_bystanders_of_a_death_in_a_reset_are_said_to_have_ended(self, tmp_path):
        faulty = functools.partial(FaultyEnv, "kill", at="reset", episode=1, flag=str(tmp_path / "flag"))
        with ParallelEnv(3, [faulty, ENDLESS, ENDLESS], num_workers=2, options=RESTART) as env:
            env.reset()
            env.step(act(env))
            root = env.reset(only(env, 0))
            assert root["done"].flatten().tolist() == [False, True, False]
            assert root["truncated"].flatten().tolist() == [False, True, False]
            with pytest.raises(ResetNeeded) as caught:
                env.step(act(env))
            assert caught.value.env_ids == (1,)
            assert counters(env.reset(only(env, 1))) == [0, 0, 1]

    def test_a_reset_that_meets_the_loss_of_a_sent_env(self, tmp_path):
        faulty = functools.partial(FaultyEnv, "kill", step=1, flag=str(tmp_path / "flag"))
        with ParallelEnv(2, [faulty, ENDLESS], num_workers=1, options=RESTART) as env:
            env.reset()
            env.send(act(env)[:1], [0])
            time.sleep(0.2)
            assert counters(env.reset(only(env, 1)))[1] == 0
            td = env.recv(1)
            assert (td["env_ids"].tolist(), flags(td, "interrupted"), counters(td["next"])) == ([0], [True], [0])
            assert counters(env.step(act(env))["next"]) == [1, 1]

    @pytest.mark.parametrize("grace_s", [30.0, None])
    def test_a_loss_waits_for_the_others_as_long_as_the_grace_lasts(self, tmp_path, grace_s):
        gate = Gate(tmp_path)

        def let_through() -> None:
            gate.await_somebody()
            time.sleep(0.4)  # usually the loss is noticed in this time
            gate.open()

        make = [functools.partial(FaultyEnv, "kill", step=1), functools.partial(HaltingEnv, gate, 1)]
        thread = threading.Thread(target=let_through)
        with ParallelEnv(2, make, num_workers=2, options=ExecutorOptions(loss_grace_s=grace_s)) as env:
            env.reset()
            thread.start()
            with pytest.raises(WorkerLost, match="SIGKILL") as caught:
                env.step(act(env))
            assert (tmp_path / "open").exists()
            assert counters(caught.value.partial) == [0, 1]
        thread.join()

    def test_a_worker_that_cannot_be_replaced_is_lost_and_its_command_raises(self, monkeypatch):
        def refuse(worker_id: int) -> None:
            raise WorkerLost("no process can be started")

        with ParallelEnv(4, ENDLESS, num_workers=2, options=RESTART) as env:
            env.reset()
            kill(env, 0)
            pool: Any = env._pool
            with monkeypatch.context() as patched:
                patched.setattr(pool.crew, "replace", refuse)
                with pytest.raises(WorkerLost, match="no process can be started"):
                    env.step_and_maybe_reset(act(env))
                assert not pool.is_serving(0)
                assert list(pool.lost) == [0]
            assert counters(env.reset()) == [0] * 4

    @pytest.mark.parametrize("is_replaced", [False, True])
    def test_the_pool_gives_commands_only_to_workers_that_serve(self, is_replaced):
        with ParallelEnv(4, ENDLESS, num_workers=2, options=RESTART if is_replaced else None) as env:
            env.reset()
            kill(env, 0)
            with pytest.raises(WorkerLost):
                env.call("pid")
            pool: Any = env._pool
            number, env_ids = pool.number, np.array([0, 2])
            if is_replaced:
                pool.begin_restart(0)
                pool.submit(env_ids, Op.RESET, RING, np.array([1, 1]))
                assert pool.is_serving(0)
                pool.wait_all(None)
                assert pool.is_idle()
            else:
                with pytest.raises(WorkerLost):
                    pool.submit(env_ids, Op.RESET, RING, np.array([1, 1]))
                assert (pool.number, pool.is_idle()) == (number, True)
            assert not pool.outcome.faults

    def test_storages_given_back_while_a_worker_is_replaced(self):
        with ParallelEnv(2, ENDLESS, num_workers=2, options=RESTART) as env:
            kept = [env.rollout(length) for length in range(1, 6)]
            kill(env, 0)
            data = env.rollout(1, auto_reset=False)
            assert flags(data, "interrupted") == [True, False]
            del kept, data
            gc.collect()
            assert env.rollout(9)["next", "observation"][:, -1, 1].tolist() == [9, 9]

    @pytest.mark.parametrize("fault", ["wrong_reward", "kill"])
    def test_the_last_true_observation_survives_what_was_sent_before(self, fault, tmp_path):
        """Sends move an env to a ring column that the next step of all envs may overwrite."""

        class Breaks(FaultyEnv):
            def step(self, action: list[Any]) -> Any:
                observation, reward, *ends = super().step(action)
                is_due = fault == "wrong_reward" and self.num_steps == 2
                return observation, ["much"] if is_due else reward, *ends

        faulty = functools.partial(Breaks, fault if fault == "kill" else None, step=2, flag=str(tmp_path / "flag"))
        with ParallelEnv(2, [faulty, ENDLESS], num_workers=2, options=RESTART) as env:
            env.reset()
            env.send(act(env)[:1], [0])
            env.recv()
            if fault == "kill":
                nexts = env.step(act(env))["next"]
            else:
                with pytest.raises(EnvError, match="reward") as caught:
                    env.step(act(env))
                nexts = caught.value.partial
            assert counters(nexts) == [1, 1]


@pytest.mark.parametrize("ring_frames", [2, 4])
def test_resets_use_up_no_frame(ring_frames):
    """However often envs are reset, a batch of views is valid until its env has made `ring_frames` further steps."""
    with SerialEnv(2, ENDLESS, copy=False, options=ExecutorOptions(ring_frames=ring_frames)) as env:
        env.reset()
        view = env.step(act(env))["next"]
        before = view.clone()
        for _ in range(3):
            env.reset()
            env.reset(only(env, 0))
        env.send(act(env)[:1], [0])
        assert env.recv()["next", "observation"][0, 1] == 1
        env.reset(only(env, 0))
        for _ in range(ring_frames - 2):
            env.step(act(env))
        assert torch.equal(view["observation"], before["observation"])
        assert torch.equal(view["reward"], before["reward"])
