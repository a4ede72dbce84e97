"""Reset-ahead: the same data from episodes begun ahead; failures affect no row."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from tensordict import TensorDict

from envherd.executor import (
    EnvError,
    ExecutorOptions,
    MeltingPotFactory,
    ParallelEnv,
    ResetNeeded,
    SerialEnv,
    WorkerLost,
    WorkerTimeout,
)
from envherd.executor.pools import ahead_pool
from envherd.executor.pools.turns import Turns
from envherd.workers.seeding import episode_seed
from envherd.workers.testing import AgentsEnv, CountingEnv, FaultyEnv, PairEnv, TextEnv
from tests.executor.ahead_envs import ROOT_SEED, BreakingEnv, GatedEnv, LevelEnv, telling
from tests.executor.calls import ENDLESS
from tests.executor.drives import DRIVES, act, fused, reset_by_hand
from tests.extras import needs
from tests.faults.envs import LeakyEnv
from tests.gates import Gate, wait_for

pytestmark = pytest.mark.slow

AHEAD = ExecutorOptions(reset_ahead=True)
RESTART = ExecutorOptions(reset_ahead=True, on_worker_loss="restart")
REUSING = functools.partial(CountingEnv, reuses_buffers=True)


def ahead(make: Any, num_envs: Any = 2, options: ExecutorOptions = AHEAD, **kwargs: Any) -> ParallelEnv:
    return ParallelEnv(num_envs, make, seed=ROOT_SEED, options=options, **kwargs)


def serial(make: Any, num_envs: int = 2, **kwargs: Any) -> SerialEnv:
    return SerialEnv(num_envs, make, seed=ROOT_SEED, **kwargs)


def assert_equal(got: list[Any], expected: list[Any]) -> None:
    assert len(got) == len(expected) > 0
    for one, other in zip(got, expected, strict=True):
        assert (one == other).all()  # raises if keys differ


def uninterrupted(rows: list[Any]) -> list[Any]:
    """Return batches without the flags that say that no row was interrupted."""
    assert not any(row.get("interrupted", torch.tensor(data=False)).any() for row in rows)
    return [row.exclude("interrupted") for row in rows]


def ones(env: Any) -> TensorDict:
    return TensorDict({"action": torch.ones(env.num_envs, dtype=torch.int64)}, [env.num_envs])


def is_ready(env: Any, episode: int, env_id: int = 0) -> bool:
    """Return whether an env's spare has prepared an episode."""
    spare = env._pool.turns.spare_of(env_id)
    return bool(env._pool.slab.words["ready"][spare] == episode + 1)


def are_built(env: Any) -> bool:
    """Return whether all workers that are being replaced have come up."""
    return all(env._pool.crew.has_answered(worker_id) for worker_id in env._pool.supervisor.absent)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(OSError):  # the process ended before or during the read
        wait_for(lambda: not Path(f"/proc/{pid}/cmdline").read_bytes())


class TestData:
    @pytest.mark.parametrize("make", [REUSING, AgentsEnv, TextEnv], ids=["reusing", "agents", "text"])
    def test_they_are_those_of_a_run_without_it(self, make):
        with serial(make) as env, ParallelEnv(2, make, num_workers=2) as parallel, ahead(make) as other:
            for drive in DRIVES:
                rows = []
                for one in (env, parallel, other):
                    one.set_seed(ROOT_SEED)
                    rows.append(drive(one, 18))
                assert_equal(rows[1], rows[0])
                assert_equal(rows[2], rows[0])
            counted = other.statistics()
        assert counted.resets_ahead > len(DRIVES)
        assert counted.resets_ahead + counted.resets_missed == counted.resets
        assert (counted.worker_losses, counted.interrupted, counted.env_errors) == (0, 0, 0)

    @pytest.mark.parametrize("copy", [True, False])
    def test_resets_by_random_masks(self, copy):
        def play(env: Any) -> list[Any]:
            masks, rows, root = np.random.default_rng(0), [], env.reset()
            for _ in range(60):
                td = env.step(act(root))
                rows.append(td["next"].clone())
                mask = td["next", "done"][:, 0] | torch.from_numpy(masks.random(3) < 0.2)
                root = env.reset(TensorDict({"_reset": mask}, [3]))
                rows.append(root.clone())
            return rows

        with serial(CountingEnv, 3) as env, ahead(CountingEnv, 3, copy=copy) as other:
            assert_equal(play(other), play(env))
            assert other.statistics().resets_ahead > 0

    def test_of_different_tasks(self):
        make = [CountingEnv, functools.partial(CountingEnv, 3, size=4), functools.partial(CountingEnv, 2)]
        with serial(make, 3) as env, ahead(make, 3) as other:
            for one, two in zip(fused(env, 12), fused(other, 12), strict=True):
                for row, same in zip(one.unbind(0), two.unbind(0), strict=True):
                    assert (row == same).all()

    @pytest.mark.parametrize("is_async", [False, True])
    def test_infos(self, is_async):
        def play(env: Any) -> list[Any]:
            env.reset()
            said = [env.infos("root")]
            for _ in range(7):
                action = TensorDict({"action": torch.zeros(2, dtype=torch.int64)}, [2])
                if is_async:
                    env.send(action)
                    env.recv()
                else:
                    env.step_and_maybe_reset(action)
                said += [env.infos("next"), env.infos("root")]
            return said

        with serial(telling, options=ExecutorOptions(infos="plain")) as env:
            expected = play(env)
        with ahead(telling, options=ExecutorOptions(infos="plain", reset_ahead=True)) as env:
            assert play(env) == expected
            assert env.statistics().resets_ahead > 0
        assert expected[5] == [{"count": 3}] * 2
        assert [info["fresh"] for info in expected[6]] == [episode_seed(ROOT_SEED, env_id, 1) for env_id in range(2)]

    @needs("meltingpot")
    def test_a_melting_pot_over_ends_of_episodes(self):
        make = MeltingPotFactory("coins", max_steps=4, deterministic=True)

        def play(env: Any) -> list[Any]:
            root, rows = env.reset(), []
            for _ in range(10):
                td, root = env.step_and_maybe_reset(env.rand_action(root))
                rows += [td["next"].clone(), root.clone()]
            return rows

        with serial(make, 1) as env:
            expected = play(env)
        with ahead(make, 1) as env:
            assert_equal(play(env), expected)
            assert env.statistics().resets_ahead + env.statistics().resets_missed == 3
        assert sum(bool(row["truncated"].any()) for row in expected[::2]) == 2


class TestHandOver:
    def test_steps_go_on_while_an_episode_is_begun(self, tmp_path):
        """The reset for episode 1 waits for the test; without reset-ahead no step would be possible."""
        with ahead([functools.partial(GatedEnv, str(tmp_path)), ENDLESS]) as env:
            root = env.reset()
            Gate(tmp_path).await_somebody()
            before = [worker.pid for worker in env.statistics().workers]
            for _ in range(2):
                root = env.step_and_maybe_reset(act(root))[1]
            spare = env.statistics().spares[0]
            assert (spare.phase, spare.phase_env_id) == ("reset", 0)
            assert env.statistics().steps_per_env == (2, 2)
            Gate(tmp_path).open()
            wait_for(lambda: is_ready(env, 1))
            root = env.step_and_maybe_reset(act(root))[1]
            assert root["observation"][:, 1].tolist() == [0, 3]
            counted = env.statistics()
            after = [worker.pid for worker in counted.workers]
            assert (after[0], after[1]) == (spare.pid, before[1])
            assert counted.spares[0].pid == before[0]
            assert (counted.resets_ahead, counted.resets_missed) == (1, 2)

    def test_the_first_that_are_ready_do_not_wait_for_an_episode_that_is_not(self, tmp_path):
        with ahead([functools.partial(GatedEnv, str(tmp_path), 2), ENDLESS]) as env:
            env.reset()
            env.send(ones(env))
            env.recv()
            env.send(ones(env))
            for _ in range(5):
                assert env.recv(1)["env_ids"].tolist() == [1]
                env.send(ones(env)[:1], [1])
            wait_for(lambda: 1 not in env.engine.pool.outstanding())
            with pytest.raises(TimeoutError, match=r"expected 2 envs within 0\.05 s, got 1"):
                env.recv(2, timeout_s=0.05)
            Gate(tmp_path).open()
            td = env.recv(2)
            assert sorted(td["env_ids"].tolist()) == [0, 1]
            row = td["env_ids"].tolist().index(0)
            assert td["next", "observation"][row, 1] == 2
            assert td["next", "done"][row].all()
            assert env.current([0])["observation"][0, 1] == 0
            assert env.statistics().resets_per_env == (2, 1)

    @pytest.mark.broken_pool
    def test_an_episode_that_is_not_ready_is_waited_for_up_to_the_deadline(self, tmp_path):
        options = ExecutorOptions(reset_ahead=True, reset_timeout_s=3)
        with ahead([functools.partial(GatedEnv, str(tmp_path), 2), ENDLESS], options=options) as env:
            root = env.step_and_maybe_reset(act(env.reset()))[1]
            Gate(tmp_path).await_somebody()
            with pytest.raises(WorkerTimeout, match=r"reset failed.* 3 s") as caught:
                env.step_and_maybe_reset(act(root))
            assert caught.value.env_ids == (0,)
            assert caught.value.partial["observation"][:, 1].tolist() == [1, 2]  # the step was lost with its reset
            assert caught.value.partial["done"].flatten().tolist() == [True, False]
            assert env.statistics().interrupted == 0

    def test_a_spare_that_waits_takes_no_processor(self):
        with ahead(ENDLESS) as env:
            env.reset()
            wait_for(lambda: is_ready(env, 1) and is_ready(env, 1, 1))
            spares = [psutil.Process(spare.pid) for spare in env.statistics().spares]
            wait_for(lambda: {spare.status() for spare in spares} == {psutil.STATUS_SLEEPING})
            before = [spare.num_ctx_switches().voluntary for spare in spares]
            env.rollout(500, auto_reset=False)
            for spare, num_waits in zip(spares, before, strict=True):
                assert spare.num_ctx_switches().voluntary - num_waits < 50, "it is woken by steps"

    def test_closing_while_an_episode_is_prepared(self, tmp_path):
        options = ExecutorOptions(reset_ahead=True, close_timeout_s=0.5)
        env = ahead(functools.partial(GatedEnv, str(tmp_path)), 1, options)
        env.reset()
        Gate(tmp_path).await_somebody()
        env.close()
        assert env.is_closed


class TestOrdinaryResets:
    def test_seeds_and_arguments_of_the_callers_own(self):
        def play(env: Any) -> list[Any]:
            rows = fused(env, 7)
            rows += [env.reset(seed=[7, 8]), env.reset(bonus=3), env.reset(list_of_kwargs=[{}, {"bonus": 9}])]
            rows += [env.reset(seed=9), *fused(env, 7)]
            env.set_seed(10)
            rows += [env.step(act(env.current())).clone() for _ in range(1)]
            return rows + reset_by_hand(env, 9) + [env.rollout(20, act, break_when_any_done=False)]

        with serial(LevelEnv) as env, ahead(LevelEnv) as other:
            assert_equal(play(other), play(env))
            assert other.statistics().resets_ahead > 0

    def test_what_changes_an_env_reaches_both_its_instances(self):
        def play(env: Any) -> list[Any]:
            rows = fused(env, 7)
            env.set("level", [20, 30])
            rows += fused(env, 12)
            assert env.call("raise_level") == [21, 31]
            rows += fused(env, 12)
            assert env.get("level") == [21, 31]
            state = env.state_dict()
            env.set("level", 0, env_ids=[1])
            rows += fused(env, 12)
            env.load_state_dict(state)
            return rows + fused(env, 12)

        with serial(LevelEnv) as env, ahead(LevelEnv) as other:
            assert_equal(play(other), play(env))
            assert other.statistics().resets_ahead > 0

    def test_recycling(self):
        with serial(CountingEnv) as env:
            expected = fused(env, 40)
        options = ExecutorOptions(reset_ahead=True, recycle_after=2)
        with ahead(CountingEnv, options=options) as env:
            assert_equal(fused(env, 40), expected)
            counted = env.statistics()
        assert counted.recycled >= 2
        assert (counted.worker_losses, counted.interrupted) == (0, 0)

    def test_recycling_after_one_episode(self):
        with ahead(functools.partial(CountingEnv, 1), 1, ExecutorOptions(reset_ahead=True, recycle_after=1)) as env:
            root = env.reset()
            wait_for(lambda: is_ready(env, 1))
            env.step_and_maybe_reset(act(root))
            assert env.statistics().recycled == 1

    def test_memory_that_is_shared_recycles_nobody(self, monkeypatch):
        monkeypatch.setattr(ahead_pool, "memory_of", lambda _: {"uss": 100, "pss": 1 << 40})
        with ahead(CountingEnv, 1, ExecutorOptions(reset_ahead=True, max_worker_memory=200)) as env:
            fused(env, 8)
            assert env.statistics().recycled == 0

    def test_recycling_by_memory(self):
        make = functools.partial(LeakyEnv, 30 << 20, 2)
        options = ExecutorOptions(reset_ahead=True, max_worker_memory=100 << 20)
        with ahead(make, 1, options) as env:
            root = env.reset()
            for _ in range(30):
                root = env.step_and_maybe_reset(act(root))[1]
            counted = env.statistics()
            assert counted.recycled >= 1
            assert all(worker.uss_bytes < 220 << 20 for worker in (*counted.workers, *counted.spares))


class TestFaults:
    def test_a_reset_that_takes_longer_than_a_step_may_is_waited_for(self):
        class Slow(CountingEnv):
            num_resets = 0

            def reset(self, seed: int | None, options: Any = None) -> list[Any]:
                self.num_resets += 1
                time.sleep(1.2 * (self.num_resets == 2))
                return super().reset(seed, options)

        options = ExecutorOptions(reset_ahead=True, step_timeout_s=1.0)
        with ahead(functools.partial(Slow, 2), options=options) as env:
            env.rollout(6, break_when_any_done=False)
            root = env.reset()
            env.send(env.rand_action(root))
            for _ in range(6):
                td = env.recv(1)
                env.send(env.rand_action(env.current(td["env_ids"])))
            env.recv()
            assert env.statistics().worker_losses == 0

    def test_what_a_prepared_reset_raised_is_raised_when_its_episode_is_asked_for(self):
        make = [functools.partial(BreakingEnv, "", (1, 3)), functools.partial(CountingEnv, 4)]

        def play(env: Any) -> list[Any]:
            rows, raised, root = [], [], env.reset()
            for _ in range(20):
                try:
                    td, root = env.step_and_maybe_reset(act(root))
                    rows.append(td["next"].clone())
                except EnvError as error:
                    raised.append((str(error).partition(" (env 0, worker")[0], error.env_ids))
                    rows.append(error.partial.clone())
                    with pytest.raises(ResetNeeded) as caught:
                        env.step(ones(env))
                    assert caught.value.env_ids == (0,)
                    root = env.reset(TensorDict({"_reset": torch.tensor([True, False])}, [2]))
                rows.append(root.clone())
            said = "reset failed: the env raised ValueError: no episode begins with "
            assert raised == [(f"{said}{episode_seed(ROOT_SEED, 0, episode)}", (0,)) for episode in (1, 3)]
            assert env.statistics().env_errors == 2
            return rows

        with serial(make) as env, ahead(make) as other:
            expected = play(env)
            assert_equal(play(other), expected)

    def test_an_env_that_raises_in_its_step_leaves_the_others_reset(self):
        make = [functools.partial(FaultyEnv, "value_error"), functools.partial(CountingEnv, 2), ENDLESS]
        with ahead(make, 3) as env:
            root = env.step_and_maybe_reset(act(env.reset()))[1]
            with pytest.raises(EnvError) as caught:
                env.step_and_maybe_reset(act(root))
            assert caught.value.partial["observation"][:, 1].tolist() == [1, 2, 2]
            root = env.reset(TensorDict({"_reset": torch.tensor([True, False, False])}, [3]))
            assert root["observation"][:, 1].tolist() == [0, 0, 2]

    def test_an_interrupt_between_a_turn_and_what_the_parent_notes_of_it(self, monkeypatch):
        def interrupt(*_: Any) -> None:
            raise KeyboardInterrupt

        with serial(functools.partial(CountingEnv, 2)) as plain, ahead(functools.partial(CountingEnv, 2)) as env:
            for one in (plain, env):
                root = one.step_and_maybe_reset(act(one.reset()))[1]
            with monkeypatch.context() as patched:
                patched.setattr(Turns, "note_server", interrupt)
                with pytest.raises(KeyboardInterrupt):
                    env.step_and_maybe_reset(act(root))
            plain.step_and_maybe_reset(act(root))  # like the interrupted call, which is completed
            with pytest.raises(ResetNeeded):
                env.step_and_maybe_reset(act(root))
            assert_equal(reset_by_hand(env, 7), reset_by_hand(plain, 7))


@pytest.mark.broken_pool
class TestLosses:
    @pytest.mark.parametrize("options", [AHEAD, RESTART], ids=["raise", "restart"])
    @pytest.mark.parametrize("drive", [fused, DRIVES[3]], ids=lambda drive: drive.__name__)
    def test_of_a_spare(self, options, drive):
        with serial(CountingEnv) as env:
            expected = drive(env, 8) + drive(env, 30)
        with ahead(CountingEnv, options=options) as env:
            first = drive(env, 8)
            kill(env.statistics().spares[1].pid)
            rows = first + drive(env, 30)
            counted = env.statistics()
            assert_equal(uninterrupted(rows), expected)
            assert (counted.worker_losses, counted.interrupted) == (1, 0)
            if options is RESTART:
                assert sum(worker.generation for worker in (*counted.workers, *counted.spares)) == 1
                wait_for(lambda: are_built(env))
                fused(env, 12)
                assert env.statistics().resets_ahead > counted.resets_ahead

    @pytest.mark.parametrize("options", [AHEAD, RESTART], ids=["raise", "restart"])
    def test_of_a_spare_that_was_given_its_episode(self, options, tmp_path):
        """It dies while the caller waits for it: the old instance resets instead."""
        make = [functools.partial(GatedEnv, str(tmp_path), 2), ENDLESS]
        with ahead(make, options=options) as env:
            root = env.step_and_maybe_reset(act(env.reset()))[1]
            Gate(tmp_path).await_somebody()
            spare = env.statistics().spares[0]

            def kill_it() -> None:
                wait_for(lambda: env._pool.worker_of[0] == spare.worker_id)
                kill(spare.pid)
                Gate(tmp_path).open()

            killer = threading.Thread(target=kill_it)
            killer.start()
            td, root = env.step_and_maybe_reset(act(root))
            killer.join()
            assert td["next", "done"].flatten().tolist() == [True, False]
            assert root["observation"][:, 1].tolist() == [0, 2]
            counted = env.statistics()
            assert (counted.worker_losses, counted.interrupted, counted.resets_per_env) == (1, 0, (2, 1))
            assert root["observation"][0, 0] == episode_seed(ROOT_SEED, 0, 1)

    def test_of_one_whose_preparation_is_fatal(self, tmp_path):
        make = [functools.partial(BreakingEnv, str(tmp_path), (1,), is_fatal=True), ENDLESS]
        with serial([functools.partial(CountingEnv, 3), ENDLESS]) as plain, ahead(make, options=RESTART) as env:
            expected = fused(plain, 12)
            rows = fused(env, 12)
            assert_equal(uninterrupted(rows), expected)
            assert env.statistics().worker_losses == 1

    def test_of_a_server_raises(self):
        with ahead(ENDLESS) as env:
            root = env.reset()
            kill(env.statistics().workers[0].pid)
            with pytest.raises(WorkerLost, match="SIGKILL"):
                env.step_and_maybe_reset(act(root))
            with pytest.raises(WorkerLost):
                env.reset()

    @pytest.mark.parametrize("is_rollout", [False, True])
    def test_of_a_server_interrupts_its_row_and_the_spare_goes_on(self, is_rollout):
        with ahead(ENDLESS, options=RESTART) as env, serial(ENDLESS) as plain:
            root = env.reset()
            wait_for(lambda: is_ready(env, 1))
            spare = env.statistics().spares[0]
            kill(env.statistics().workers[0].pid)
            if is_rollout:
                data = env.rollout(3, act, auto_reset=False, break_when_any_done=False)
                nexts, root = data["next"][:, 0], data[:, 1]
            else:
                td, root = env.step_and_maybe_reset(act(root))
                nexts = td["next"]
            assert nexts["interrupted"].flatten().tolist() == [True, False]
            assert nexts["truncated"].flatten().tolist() == [True, False]
            assert root["observation"][:, 1].tolist() == [0, 1]
            plain.reset()
            assert root["observation"][0, 0] == plain.reset()["observation"][0, 0]
            counted = env.statistics()
            assert counted.workers[0].pid == spare.pid  # no call has waited for a worker's build
            assert (counted.worker_losses, counted.interrupted, counted.resets_ahead) == (1, 1, 1)
            wait_for(lambda: are_built(env))
            env.rollout(2)
            wait_for(lambda: is_ready(env, 3))
            assert sum(worker.generation for worker in (*env.statistics().workers, *env.statistics().spares)) == 1

    @pytest.mark.parametrize("way", ["fused", "sent", "rollout"])
    def test_of_a_server_leaves_the_last_true_text_in_its_row(self, way):
        """The other instance has made steps of an earlier episode and still has their text."""
        make = functools.partial(TextEnv, 2)
        with ahead(make, 1, RESTART) as env:
            root = env.reset()
            for _ in range(5):  # three episodes, one of them served by the other instance
                root = env.step_and_maybe_reset(act(root))[1]
            wait_for(lambda: is_ready(env, 3))
            kill(env.statistics().workers[0].pid)
            text = root["text"]
            assert text == [f"{episode_seed(ROOT_SEED, 0, 2)}:1"]
            if way == "fused":
                row = env.step_and_maybe_reset(act(root))[0]["next"]
            elif way == "sent":
                env.send(act(root))
                row = env.recv()["next"]
            else:
                row = env.rollout(2, act, auto_reset=False, break_when_any_done=False)["next"][:, 0]
            assert row["interrupted"].all()
            assert row["text"] == text
            assert env.current()["text"] != text

    def test_of_a_server_that_was_sent(self, tmp_path):
        make = [functools.partial(FaultyEnv, "kill", step=1, flag=str(tmp_path / "flag")), ENDLESS]
        with ahead(make, options=RESTART) as env:
            env.reset()
            wait_for(lambda: is_ready(env, 1))
            spare = env.statistics().spares[0]
            env.send(ones(env))
            td = env.recv()
            ended = dict(zip(td["env_ids"].tolist(), td["next", "interrupted"].flatten().tolist(), strict=True))
            assert ended == {0: True, 1: False}
            assert env.current()["observation"][:, 1].tolist() == [0, 1]
            assert env.statistics().workers[0].pid == spare.pid

    def test_of_both_instances_of_an_env_that_was_sent(self):
        with ahead(ENDLESS, 3, RESTART) as env:
            root = env.step_and_maybe_reset(act(env.reset()))[1]
            wait_for(lambda: is_ready(env, 1, 1))
            counted = env.statistics()
            for worker in (counted.spares[0], counted.workers[0], counted.workers[1]):
                kill(worker.pid)
            env.send(act(root))
            td = env.recv()
            ended = dict(zip(td["env_ids"].tolist(), td["next", "interrupted"].flatten().tolist(), strict=True))
            assert ended == {0: True, 1: True, 2: False}
            root = env.current()["observation"]
            assert root[:, 1].tolist() == [0, 0, 2]
            assert root[:2, 0].tolist() == [episode_seed(ROOT_SEED, env_id, 1) for env_id in (0, 1)]
            assert env.statistics().worker_losses == 3

    @pytest.mark.timeout(60)
    def test_an_interrupt_while_a_spare_is_replaced(self, monkeypatch):
        with serial(CountingEnv) as env:
            expected = reset_by_hand(env, 30)
        with ahead(CountingEnv, options=RESTART) as env:
            crew: Any = env._pool.crew
            replace = crew.replace

            def interrupt(worker_id: int) -> None:
                replace(worker_id)
                raise KeyboardInterrupt

            fused(env, 8)
            kill(env.statistics().spares[1].pid)
            with monkeypatch.context() as patched:
                patched.setattr(crew, "replace", interrupt)
                with pytest.raises(KeyboardInterrupt):
                    fused(env, 30)
            env.set_seed(ROOT_SEED)
            assert_equal(uninterrupted(reset_by_hand(env, 30)), expected)
            assert env.statistics().worker_losses == 1

    def test_of_a_spare_for_which_no_process_can_be_started(self, monkeypatch):
        def refuse(worker_id: int) -> None:
            raise WorkerLost("no process can be started")

        with serial(CountingEnv) as env:
            expected = fused(env, 30)
        with ahead(CountingEnv, options=RESTART) as env:
            monkeypatch.setattr(env._pool.crew, "replace", refuse)
            kill(env.statistics().spares[1].pid)
            assert_equal(uninterrupted(fused(env, 30)), expected)
            assert env.statistics().worker_losses == 1


class TestRefusals:
    @pytest.mark.parametrize("num_workers", [2, None, "auto"])
    def test_the_number_of_workers_is_that_of_envs(self, num_workers):
        with ahead(CountingEnv, num_workers=num_workers) as env:
            assert env.num_workers == len(env.statistics().workers) == len(env.statistics().spares) == 2

    @pytest.mark.parametrize(
        ("make", "text"),
        [
            *(
                (
                    functools.partial(ahead, CountingEnv, num_workers=number),
                    f"expected 2 .one for each env. or None with reset_ahead, got {number}",
                )
                for number in (1, 3)
            ),
            (functools.partial(ahead, CountingEnv, "auto"), "expected a number with reset_ahead, got 'auto'"),
            (functools.partial(ahead, PairEnv), "expected envs of one row, got batches"),
        ],
    )
    def test_what_cannot_be(self, make, text):
        with pytest.raises(ValueError, match=text):
            make()

    @needs("sb3")
    def test_facades_which_keep_their_hosts_seeding(self):
        from envherd.executor.facades.gymnasium import vector_env as gymnasium
        from envherd.executor.facades.sb3 import vec_env as sb3

        for kind in (gymnasium.AsyncVectorEnv, sb3.SubprocVecEnv):
            with pytest.raises(ValueError, match=r"expected episode_seeds=True with reset_ahead.*facades"):
                kind([telling], options=AHEAD)

    def test_a_serial_env_has_nothing_to_do_with_it(self):
        with serial(CountingEnv, options=AHEAD) as env, serial(CountingEnv) as other:
            assert_equal(fused(env, 12), fused(other, 12))
            assert env.statistics().resets_ahead == 0
