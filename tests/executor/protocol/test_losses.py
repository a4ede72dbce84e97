"""Losses of workers: what is refused, what is reset, what is replaced, and what the caller sees.

`tests/faults/test_matrix.py` has each fault in each state of the protocol, `tests/faults/test_executor_model.py` orders
of losses, faults and calls over simulated workers.
"""

import contextlib
import functools
import gc
import itertools
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import gymnasium
import numpy as np
import psutil
import pytest
import torch
from tensordict import TensorDict

from envherd.executor import (
    EnvError,
    ExecutorOptions,
    InternalError,
    ParallelEnv,
    ResetNeeded,
    SerialEnv,
    SpecError,
    WorkerLost,
    WorkerTimeout,
)
from envherd.executor.pools.commands import CommandWords
from envherd.executor.protocol.env_states import Event
from envherd.executor.rollouts.policy_state import Carried
from envherd.executor.rollouts.rollout import StepwiseRun
from envherd.shm.specs import EnvSpec, LeafSpec
from envherd.workers.protocol import RING, Op
from envherd.workers.seeding import episode_seed
from envherd.workers.testing import CountingEnv
from tests.envs.breaking_envs import FaultyEnv
from tests.envs.counting_envs import PairEnv, TextEnv
from tests.envs.disturbing_envs import HaltingEnv
from tests.executor.calls import (
    ENDLESS,
    RESTART,
    act,
    begun,
    counters,
    flags,
    kill,
    only,
)
from tests.faults.children import in_child
from tests.gates import Gate, interrupt

pytestmark = [pytest.mark.slow, pytest.mark.broken_pool]


def stepped(env, way):
    """Step all envs in one of three ways; return the transitions and the roots after them."""
    if way == "fused":
        return env.step_and_maybe_reset(env.current().update(act(env)))
    if way == "sent":
        env.send(env.current().update(act(env)))
        return env.recv(), env.current()
    data = env.rollout(2, auto_reset=False, break_when_any_done=False)
    return data[:, 0], data[:, 1]


def one_dies(gate):
    """Return factories of an env that dies in its first step, and of one that waits at a gate in it."""
    return [
        functools.partial(FaultyEnv, "kill", step=1),
        functools.partial(HaltingEnv, gate, 1),
    ]


class FlakyBuild(FaultyEnv):
    """Dies in a step; its first successor's process dies during the build."""

    def __init__(self, folder: str, step: int) -> None:
        builds = Path(folder, "builds")
        with builds.open("a") as file:
            file.write("b")
        if builds.stat().st_size == 2:
            os._exit(3)
        super().__init__("kill", step=step, flag=str(Path(folder, "died")))


@pytest.mark.parametrize("way", ["storage", "ring"])
def test_an_env_that_the_last_step_ends_is_not_reset(way):
    with ParallelEnv(
        2, [functools.partial(CountingEnv, 2), ENDLESS], num_workers=1, options=RESTART
    ) as env:
        engine = env.engine
        env.rollout(2, break_when_any_done=False)
        kill(env, 0)
        if way == "storage":
            data = env.rollout(1, auto_reset=False, break_when_any_done=False)
        else:  # as with a device
            carried = Carried(engine.known, None, None)
            with env._guard:
                run = StepwiseRun(
                    engine, env.rand_action, carried, None, break_when_any_done=False
                )
                data = run.collect(1, auto_reset=False)
        assert flags(data, "interrupted") == [False, True]
        words = engine.pool.slab.words
        assert words["resets"].tolist() == [2, 1]
        data = env.rollout(1, auto_reset=False, break_when_any_done=False)
        assert counters(data) == [[1], [0]]
        assert words["resets"].tolist() == [2, 2]


class TestReplacing:
    def test_interrupted_send_does_not_keep_flags_of_an_earlier_loss(self, monkeypatch):
        with begun(
            ParallelEnv(2, ENDLESS, num_workers=2, seed=0, options=RESTART)
        ) as env:
            kill(env, 0)
            assert flags(env.step_and_maybe_reset(act(env))[0], "interrupted") == [
                True,
                False,
            ]
            # The last thing that a send does.
            monkeypatch.setattr(
                env.engine.stale_roots, "look", Mock(side_effect=KeyboardInterrupt)
            )
            with pytest.raises(KeyboardInterrupt):
                env.send(act(env))
            monkeypatch.undo()
            td = env.recv()
            assert flags(td, "interrupted") == [False, False]
            assert counters(td["next"]) == [1, 2]

    def test_env_received_before_its_worker_was_lost_is_refused_and_done(
        self,
    ):
        with ParallelEnv(3, ENDLESS, num_workers=1, seed=0, options=RESTART) as env:
            td = env.reset()
            kill(env, 0)
            env.send(td.set("action", torch.ones(3, dtype=torch.int64))[:2], [0, 1])
            assert flags(env.recv(), "interrupted") == [True, True]
            with pytest.raises(
                ResetNeeded,
                match=r"^send failed: .* got envs \[2\] that have .* lost their episode",
            ):
                env.send(td[2:], [2])
            assert env.current()["done"].flatten().tolist() == [False, False, True]

    @pytest.mark.parametrize("seeds", [7, [7, 8, 9, 10]])
    def test_a_reset_of_a_lost_worker_has_its_seeds(self, seeds):
        with (
            begun(
                ParallelEnv(4, ENDLESS, num_workers=2, options=RESTART, seed=0)
            ) as env,
            begun(SerialEnv(4, ENDLESS, seed=0)) as serial,
        ):
            kill(env, 0)
            for _ in range(2):
                assert torch.equal(
                    env.reset(seed=seeds)["observation"],
                    serial.reset(seed=seeds)["observation"],
                )

    def test_successor_repeats_the_reset_with_its_arguments(self, tmp_path):
        faulty = functools.partial(
            FaultyEnv, "kill", at="reset", episode=1, flag=str(tmp_path / "flag")
        )
        with begun(
            ParallelEnv(2, [faulty, ENDLESS], num_workers=2, options=RESTART)
        ) as env:
            env.reset(seed=[5, 6], level=3)
            assert env.get("seed") == [5, 6]
            assert env.get("options") == [{"level": 3}] * 2

    @pytest.mark.parametrize("grace_s", [30.0, None])
    def test_a_loss_waits_for_the_others_as_long_as_the_grace_lasts(
        self, tmp_path, grace_s
    ):
        gate = Gate(tmp_path)

        def let_through() -> None:
            gate.await_somebody()
            time.sleep(0.4)  # usually the loss is noticed in this time
            gate.open()

        thread = threading.Thread(target=let_through)
        with begun(
            ParallelEnv(
                2,
                one_dies(gate),
                num_workers=2,
                options=ExecutorOptions(loss_grace_s=grace_s),
            )
        ) as env:
            thread.start()
            with pytest.raises(WorkerLost, match="SIGKILL") as caught:
                env.step(act(env))
            assert (tmp_path / "open").exists()
            assert counters(caught.value.partial) == [0, 1]
        thread.join()

    def test_a_worker_that_cannot_be_replaced_is_lost_and_its_command_raises(
        self, monkeypatch
    ):
        def refuse(worker_id: int) -> None:
            raise WorkerLost("no process can be started")

        with begun(ParallelEnv(4, ENDLESS, num_workers=2, options=RESTART)) as env:
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
        with begun(
            ParallelEnv(
                4, ENDLESS, num_workers=2, options=RESTART if is_replaced else None
            )
        ) as env:
            kill(env, 0)
            with pytest.raises(WorkerLost):
                env.call("pid")
            pool: Any = env._pool
            number, env_ids = pool.words.number[0], np.array([0, 2])
            if is_replaced:
                pool.begin_restart(0)
                pool.submit(env_ids, Op.RESET, RING, np.array([1, 1]))
                assert pool.is_serving(0)
                pool.wait_some(np.arange(4), 4, None)
                assert pool.words.has_answered().all()
            else:
                with pytest.raises(WorkerLost):
                    pool.submit(env_ids, Op.RESET, RING, np.array([1, 1]))
                assert (pool.words.number[0], pool.words.has_answered().all()) == (
                    number,
                    True,
                )
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


class TestSuccessorsThatFail:
    def test_the_reset_that_an_env_owes_is_made_by_the_next_one(self, tmp_path):
        make = [functools.partial(FlakyBuild, str(tmp_path), 2), ENDLESS]
        with begun(ParallelEnv(2, make, num_workers=2, options=RESTART, seed=0)) as env:
            env.step(act(env))
            env.send(act(env))
            td = env.recv(env_ids=[0, 1])
            assert flags(td, "interrupted") == [True, False]
            root = env.current()
            assert counters(root) == [0, 2]
            assert env.get("seed") == root["observation"][:, 0].tolist()
            env.send(act(env))
            assert counters(env.recv(env_ids=[0, 1])["next"]) == [1, 3]


class TestRefusals:
    def test_refused_reset_forgets_seed_and_options(self):
        with (
            begun(ParallelEnv(2, ENDLESS, num_workers=2, seed=0)) as env,
            begun(SerialEnv(2, ENDLESS, seed=0)) as expected,
        ):
            kill(env, 1)
            with pytest.raises(WorkerLost):
                env.step(act(env))
            with pytest.raises(WorkerLost):
                env.reset(seed=[123, 456], options={"x": 1})
            root = env.reset(only(env, 0))
            assert (
                root["observation"][0].tolist()
                == expected.reset()["observation"][0].tolist()
            )
            assert not env.get("options", [0])[0]

    def test_interrupted_reset_forgets_seed_and_options(self, monkeypatch):
        with (
            ParallelEnv(2, ENDLESS, num_workers=2, seed=0) as env,
            SerialEnv(2, ENDLESS, seed=0) as expected,
        ):
            monkeypatch.setattr(
                env.engine.pool, "submit", Mock(side_effect=KeyboardInterrupt)
            )
            with pytest.raises(KeyboardInterrupt):
                env.reset(seed=[123, 456])
            monkeypatch.undo()
            assert torch.equal(
                env.reset()["observation"], expected.reset()["observation"]
            )

    def test_an_episode_that_was_terminated_stays_so_if_its_reset_is_refused(self):
        with ParallelEnv(2, functools.partial(CountingEnv, 1), num_workers=2) as env:
            env.step(env.reset(seed=[2, 3]).update(act(env)))
            kill(env, 0)
            with pytest.raises(WorkerLost):
                env.reset()
            assert env.current()[0]["terminated"] > env.current()[0]["truncated"]

    def test_no_worker_steps_an_env_that_was_never_reset(self):
        for make in (functools.partial(ParallelEnv, num_workers=1), SerialEnv):
            with make(2, ENDLESS) as env:
                # Simulates a bug of the caller's side.
                env.engine.states.move(env.engine.all_ids, Event.IS_ALLOWED)
                with pytest.raises(
                    InternalError, match=r"was never reset, or .*\. Nothing of it was"
                ):
                    env.step(act(env))
                assert env.get("num_steps") == [0, 0]

    def test_a_refused_question_of_a_callback_does_not_end_the_rollout(self):
        seen: list[str] = []

        def callback(env: Any, _: Any) -> None:
            for call in (
                lambda: env.current([99]),
                lambda: env.get("num_steps"),
                env.reset,
            ):
                try:
                    call()
                except Exception as error:
                    seen.append(type(error).__name__)

        with SerialEnv(1, ENDLESS) as env:
            data = env.rollout(2, callback=callback)
            assert seen == ["ValueError", "Busy"] * 2
            assert counters(data["next"]) == [[1, 2]]


class TestEnvsThatAreBatches:
    @pytest.mark.parametrize("way", ["fused", "sent", "rollout"])
    def test_are_reset_whole_when_they_are_lost_in_a_step(self, way):
        with begun(ParallelEnv(2, PairEnv, num_workers=2, options=RESTART)) as env:
            env.reset(
                TensorDict(
                    {"_reset": torch.tensor([[True, False], [False, False]])}, [2, 2]
                )
            )
            kill(env, 1)
            td, root = stepped(env, way)
            assert td["next", "interrupted"].shape == td["next", "done"].shape
            assert counters(root)[1] == [0, 0]
            assert (root["observation"][1, :, 0] != 0).all()  # their seeds

    @pytest.mark.parametrize("call", ["step", "idle"])
    def test_restarted_batch_envs_are_reset_as_a_whole_with_any_mask(self, call):
        with begun(ParallelEnv(2, PairEnv, num_workers=2, options=RESTART)) as env:
            env.step(act(env))
            kill(env, 1)
            if call == "step":
                env.step(act(env))
            root = env.reset(
                TensorDict(
                    {"_reset": torch.tensor([[False, False], [True, False]])}, [2, 2]
                )
            )
            assert counters(root)[1] == [0, 0]
            assert (root["observation"][1, :, 0] != 0).all()
            assert env.call("state")[1] == [0, 0]

    def test_are_not_replaced_in_mid_episode(self):
        options = ExecutorOptions(recycle_after=1)
        with (
            begun(
                ParallelEnv(1, PairEnv, num_workers=1, options=options, seed=0)
            ) as env,
            begun(SerialEnv(1, PairEnv, seed=0)) as same,
        ):
            for _ in range(12):
                results = [one.step_and_maybe_reset(act(one)) for one in (env, same)]
                for key in ("observation", "done"):
                    assert torch.equal(results[0][1][key], results[1][1][key])


class TestWhatTheCallerHears:
    @pytest.mark.parametrize("grace_s", [0.0, 0.4])
    def test_loss_is_logged_at_once_and_raised_during_another_envs_step(
        self, tmp_path, caplog, grace_s
    ):
        gate = Gate(tmp_path)
        with begun(
            ParallelEnv(
                2,
                one_dies(gate),
                num_workers=2,
                options=ExecutorOptions(loss_grace_s=grace_s),
            )
        ) as env:
            began = time.monotonic()
            with (
                caplog.at_level(logging.WARNING, "envherd"),
                pytest.raises(WorkerLost) as caught,
            ):
                env.step(act(env))
            assert time.monotonic() - began > grace_s
            assert not (tmp_path / "open").exists()  # the other one had not answered
            assert (
                "worker 0 ended with SIGKILL(-9) in step of env 0 (env 0, pid"
                in str(caught.value)
            )
            assert str(caught.value) in caplog.text
            assert caught.value.partial is None
            gate.open()
            assert counters(env.reset(only(env, 1)))[1] == 0
            env.send(act(env)[1:], [1])
            assert counters(env.recv()["next"]) == [1]

    def test_envs_of_other_workers_stay_sent_after_a_loss(self, tmp_path):
        gate = Gate(tmp_path)
        with begun(
            ParallelEnv(
                2,
                one_dies(gate),
                num_workers=2,
                options=ExecutorOptions(loss_grace_s=0.0),
            )
        ) as env:
            env.send(act(env))
            with pytest.raises(WorkerLost):
                env.recv()
            gate.open()
            assert env.recv()["env_ids"].tolist() == [1]


class SlowBuild(CountingEnv):
    """Is built in 1.5 s where a file is."""

    def __init__(self, flag: Path) -> None:
        super().__init__()
        time.sleep(1.5 * flag.exists())


class TestDeadlines:
    def test_the_build_of_a_successor_does_not_count_as_its_step(self, tmp_path):
        """While envs are sent, no call waits that long for it."""
        flag = tmp_path / "slow"
        options = ExecutorOptions(
            on_worker_loss="restart", step_timeout_s=1.0, reset_timeout_s=1.0
        )
        make = [functools.partial(SlowBuild, flag), CountingEnv]
        with begun(ParallelEnv(2, make, num_workers=2, options=options)) as env:
            flag.touch()
            kill(env, 0)
            env.send(act(env))
            received = torch.cat([env.recv(1), env.recv(1)])
            assert received["next", "interrupted"][
                received["env_ids"].argsort()
            ].flatten().tolist() == [True, False]
            assert env.engine.pool.num_losses == 1

    @pytest.mark.parametrize("call", ["step", "sent"])
    @pytest.mark.long
    def test_a_time_in_which_all_processes_are_stopped_does_not_count(
        self, tmp_path, call
    ):
        """A suspended job, or a machine that is paused: the worker had no chance to run."""
        gate, options = (
            Gate(tmp_path),
            ExecutorOptions(step_timeout_s=5.0, reset_timeout_s=5.0),
        )

        def body() -> list[int]:
            (tmp_path / "pid").write_text(str(os.getpid()))
            with begun(
                ParallelEnv(
                    1,
                    functools.partial(HaltingEnv, gate, 1),
                    num_workers=1,
                    options=options,
                )
            ) as env:
                if call == "step":
                    return counters(env.step(act(env))["next"])
                env.send(act(env))
                return counters(env.recv()["next"])

        def pause() -> None:
            gate.await_somebody()
            time.sleep(0.1)  # the caller waits, and has seen the worker at this step
            script = psutil.Process(int((tmp_path / "pid").read_text()))
            processes = [script, *script.children(recursive=True)]
            for process in processes:
                process.suspend()
            time.sleep(5.5)
            gate.open()
            script.resume()
            time.sleep(0.2)  # it looks at the clock before the worker answers
            for process in processes:
                process.resume()

        pauser = threading.Thread(target=pause)
        pauser.start()
        assert in_child(body) == [1]
        pauser.join()

    def test_ctrl_c_in_an_env_that_hangs_keeps_the_deadline(self, tmp_path):
        gate = Gate(tmp_path)
        make = functools.partial(HaltingEnv, gate, 1)
        with begun(
            ParallelEnv(
                1, make, num_workers=1, options=ExecutorOptions(step_timeout_s=2.0)
            )
        ) as env:

            def press() -> None:
                gate.await_somebody()
                os.kill(os.getpid(), signal.SIGINT)

            presser = threading.Thread(target=press)
            presser.start()
            with pytest.raises(KeyboardInterrupt):
                env.step(act(env))
            presser.join()
            with pytest.raises(WorkerTimeout):
                env.reset()
            gate.open()

    @pytest.mark.parametrize("call", ["fused", "rollout", "sent"])
    def test_reset_inside_a_step_has_reset_timeout(self, tmp_path, call):
        class Rests(CountingEnv):
            def reset(
                self, seed: int | None, options: Mapping[str, Any] | None = None
            ) -> Any:
                if self.episode == 0:
                    threading.Event().wait(1.5)
                return super().reset(seed, options)

        make = functools.partial(Rests, 1)
        with begun(
            ParallelEnv(
                1, make, num_workers=1, options=ExecutorOptions(step_timeout_s=1.0)
            )
        ) as env:
            assert counters(stepped(env, call)[1]) == [0]

    def test_a_late_worker_has_ended_before_rows_are_written_in_its_place(
        self, monkeypatch
    ):
        """It may be slow rather than stuck, and would write into the same rows."""

        class Heavy(FaultyEnv):
            def __init__(self) -> None:
                super().__init__("sleep", step=1)
                # Its memory is freed before a process counts as ended.
                self.ballast = np.ones(1 << 24)

        lose_answers, has_ended = CommandWords.lose_answers, []

        def watched(words: CommandWords, *args: Any) -> Any:
            has_ended.append(worker.has_exited())
            return lose_answers(words, *args)

        monkeypatch.setattr(CommandWords, "lose_answers", watched)
        with ParallelEnv(
            1, Heavy, num_workers=1, options=ExecutorOptions(step_timeout_s=0.3)
        ) as env:
            worker = env.engine.pool.crew.workers[0]
            env.reset()
            with pytest.raises(WorkerTimeout):
                env.step(act(env))
        assert has_ended
        assert all(has_ended)

    def test_a_reset_that_is_late_is_killed_in_a_step_too(self):
        class Hangs(FaultyEnv):
            def __init__(self) -> None:
                super().__init__("sleep", at="reset", episode=1, length=1)

        options = ExecutorOptions(step_timeout_s=1.5, reset_timeout_s=1.5)
        with (
            begun(ParallelEnv(1, Hangs, num_workers=1, options=options)) as env,
            pytest.raises(
                WorkerTimeout,
                match="reset failed: worker 0 gave no answer within 3 s in reset of env 0",
            ),
        ):
            env.step_and_maybe_reset(act(env))


class TestTheEnd:
    def test_envs_that_say_much_as_they_close_are_all_closed(self, tmp_path):
        class Verbose(CountingEnv):
            def close(self) -> None:
                (tmp_path / str(os.getpid())).open("a").write("closed ")
                raise ValueError("x" * 400_000)

        with ParallelEnv(6, Verbose, num_workers=1):
            pass
        (written,) = tmp_path.iterdir()
        assert written.read_text().split() == ["closed"] * 6

    def test_a_program_that_leaves_sigpipe_at_its_default_survives_a_dead_worker(self):
        def body() -> str:
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            with begun(ParallelEnv(1, ENDLESS, num_workers=1)) as env:
                kill(env, 0)
                try:
                    for _ in range(3):
                        env.call("pid")
                except WorkerLost:
                    return "lost"
                return "?"

        assert in_child(body) == "lost"


@pytest.mark.parametrize(
    ("when", "way"),
    [
        *itertools.product(
            ("in the step", "after its text was sent"), ("fused", "sent", "rollout")
        ),
        *itertools.product(("in a neighbour's step",), ("fused", "rollout")),
    ],
)
def test_an_interrupted_row_has_the_last_true_text(tmp_path, way, when):
    """Also the row of an env that had answered before its neighbour's step killed their worker."""

    def send_and_die(*args: Any, send: Any = socket.socket.sendall) -> None:
        send(*args)
        os._exit(3)

    class Dies(TextEnv):
        def step(self, action: list[Any]) -> Any:
            if self.num_steps == 1 and not (tmp_path / "died").exists():
                # What the other has sent is read.
                time.sleep(0.1 if when == "in a neighbour's step" else 0)
                (tmp_path / "died").touch()
                if when != "after its text was sent":
                    os.kill(os.getpid(), signal.SIGKILL)
                socket.socket.sendall = send_and_die  # type: ignore[method-assign]  # in the worker alone
            return super().step(action)

    make = [TextEnv, Dies] if when == "in a neighbour's step" else [Dies]
    with begun(ParallelEnv(len(make), make, num_workers=1, options=RESTART)) as env:
        stepped(env, "fused")
        data = stepped(env, way)[0]
        assert data["next", "interrupted"].all()
        for row in data.unbind(0):
            assert row["next", "text"] == row["text"] is not None


def test_root_after_answered_reset_and_loss_is_that_of_the_earlier_reset():
    """Numbers and text are those of the earlier reset, which the caller has seen; the row is marked as ended."""

    class Dies(TextEnv):
        def reset(self, *args: Any, **kwargs: Any) -> Any:
            if self.num_steps:
                time.sleep(0.1)  # what the other has sent is read
                os.kill(os.getpid(), signal.SIGKILL)
            return super().reset(*args, **kwargs)

    with begun(ParallelEnv(2, [TextEnv, Dies], num_workers=1)) as env:
        env.step(act(env))
        before = env.reset(only(env, 0))[0]
        with pytest.raises(WorkerLost):
            env.reset()
        now = env.current()[0]
        assert (
            now["text"]
            == before["text"]
            == ":".join(str(number) for number in now["observation"][:2].tolist())
        )
        assert now["truncated"].all()


def test_an_env_with_text_that_was_never_reset_has_none():
    with SerialEnv(2, TextEnv) as env:
        env.reset(only(env, 1))
        text = next(leaf.key for leaf in env.observation_spec if leaf.is_side)
        assert env.current().get(text).tolist()[0] is None


class OneEpisode(TextEnv):
    """Raises in every reset but that of episode 0 of a root seed of 0."""

    def reset(self, seed: int | None, *args: Any) -> Any:
        if seed != episode_seed(0, 0, 0):
            raise ValueError("no second episode")
        return super().reset(seed, *args)


@pytest.mark.parametrize(
    "kind", [SerialEnv, functools.partial(ParallelEnv, num_workers=1)]
)
def test_the_last_observation_is_complete_where_the_reset_after_it_raises(kind):
    """Numbers and text are of the step that ended the episode."""
    with begun(kind(1, functools.partial(OneEpisode, 2), seed=0)) as env:
        env.step_and_maybe_reset(act(env))
        with pytest.raises(EnvError, match="no second episode") as caught:
            env.step_and_maybe_reset(act(env))
        for last in (caught.value.partial[0], env.current()[0]):
            assert last["text"] == ":".join(
                str(number) for number in last["observation"][:2].tolist()
            )
            assert last["observation"][1] == 2
        assert env.current()["done"].all()


class HalfReset(TextEnv):
    """Its second reset returns correct numbers, and a second leaf of a wrong shape."""

    def __init__(self) -> None:
        super().__init__()
        self.num_resets = 0
        size = LeafSpec(("size",), (1,), "int64")
        self.spec = EnvSpec(
            observation=(*self.spec.observation, size),
            action=self.spec.action,
            family="plain",
        )

    def _observe(self, action: int) -> list[Any]:
        return [
            *super()._observe(action),
            np.array([self.seed] * (2 if self.num_resets == 2 else 1)),
        ]

    def reset(self, *args: Any, **kwargs: Any) -> Any:
        self.num_resets += 1
        return super().reset(*args, **kwargs)


@pytest.mark.parametrize("num_envs", [1, 2])
def test_a_reset_that_is_broken_off_leaves_the_row_before_it(num_envs):
    with SerialEnv(num_envs, HalfReset) as env:
        before = env.reset()[0]
        with pytest.raises(EnvError, match="writing size failed"):
            env.reset(only(env, 0))
        now = env.current()[0]
        assert now["observation"].tolist() == before["observation"].tolist()
        assert now["text"] == before["text"]
        assert (
            now["size"].tolist()
            == before["size"].tolist()
            == before["observation"][:1].tolist()
        )
        assert (
            env.reset(only(env, 0))[0]["size"]
            == env.current()[0]["observation"][0]
            != before["size"]
        )


@pytest.mark.parametrize("policy", ["raise", "restart"])
def test_a_loss_noticed_later_changes_no_view_of_a_step_before_it(policy):
    options = ExecutorOptions(on_worker_loss=policy)
    with begun(
        ParallelEnv(2, ENDLESS, num_workers=2, seed=0, copy=False, options=options)
    ) as env:
        view = env.step(act(env))["next"]
        kept = view.clone()
        kill(env, 1)
        with (
            pytest.raises(WorkerLost) if policy == "raise" else contextlib.nullcontext()
        ):
            env.reset(only(env, 1))
        assert (view == kept).all()
        now = env.current()
        assert now["truncated"].flatten().tolist() == [False, policy == "raise"]
        assert counters(now) == [1, policy == "raise"]


def test_a_crash_loop_ends_in_an_error():
    make = [ENDLESS, ENDLESS, ENDLESS, functools.partial(FaultyEnv, "kill", step=1)]
    options = ExecutorOptions(on_worker_loss="restart", max_restarts=2)
    with begun(ParallelEnv(4, make, num_workers=2, seed=0, options=options)) as env:
        for _ in range(2):
            env.step_and_maybe_reset(act(env))
        with pytest.raises(WorkerLost, match="SIGKILL") as caught:
            env.step_and_maybe_reset(act(env))
        assert env.statistics().worker_losses == 3
    assert (
        "is not replaced: ExecutorOptions.max_restarts=2 within restart_window_s=60 allows"
        in caught.value.message
    )
    assert "on_worker_loss='restart'" not in caught.value.message  # which it is
    assert caught.value.context["exit_code"] == -9
    assert caught.value.env_ids == (2, 3)


def dies_and_is_another(flag):
    if os.path.exists(flag):
        return gymnasium.make("Pendulum-v1")
    return FaultyEnv("kill", step=3, flag=flag)


def test_an_env_with_another_spec_after_a_restart_is_its_factorys_fault(tmp_path):
    make = functools.partial(dies_and_is_another, str(tmp_path / "broken"))
    with (
        begun(ParallelEnv(1, make, options=RESTART)) as env,
        pytest.raises(
            SpecError, match="restart failed: expected env 0 with the spec that it had"
        ),
    ):
        env.rollout(5, break_when_any_done=False)


@pytest.mark.quiet
def test_a_crash_loop_slows_down_while_the_others_go_on():
    make = [ENDLESS, functools.partial(FaultyEnv, "kill", step=1)]
    options = ExecutorOptions(on_worker_loss="restart", max_restarts=3)
    with begun(ParallelEnv(2, make, num_workers=2, seed=0, options=options)) as env:
        env.send(act(env))
        counts, began, times = [0, 0], time.monotonic(), []
        while counts[1] < 3:
            td = env.recv(min_envs=1)
            for env_id in td["env_ids"].tolist():
                counts[env_id] += 1
                if env_id == 1:
                    times.append(time.monotonic() - began)
            env.send(act(env)[: len(td)], td["env_ids"])
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    # Of 0.1 and 0.2 s.
    assert all(gap > least for gap, least in zip(gaps, (0.08, 0.16), strict=True))
    assert counts[0] > 2 * counts[1]


def test_episodes_go_on_counting(tmp_path):
    """A successor does not replay the episodes of the worker it replaces."""
    make = [
        ENDLESS,
        functools.partial(FaultyEnv, "kill", step=3, flag=str(tmp_path / "broken")),
    ]
    with ParallelEnv(2, make, num_workers=2, seed=0, options=RESTART) as env:
        seeds = env.rollout(6, break_when_any_done=False)["observation"][
            1, :, 0
        ].tolist()
    assert seeds == [episode_seed(0, 1, 0)] * 3 + [episode_seed(0, 1, 1)] * 3


def test_ctrl_c_after_a_recv_does_not_have_sent_again(tmp_path):
    gate = Gate(tmp_path)

    class Slow(CountingEnv):
        def slowly(self) -> None:
            gate.pass_through()

    with begun(
        ParallelEnv(2, functools.partial(Slow, 1_000_000), num_workers=2)
    ) as env:
        env.send(act(env))
        env.recv()
        interrupt(gate, lambda: env.call("slowly"))
        with pytest.raises(ValueError, match="that were sent"):
            env.recv(env_ids=[0])
        env.send(act(env))
        assert sorted(counters(env.recv()["next"])) == [2, 2]


@pytest.mark.parametrize("auto_reset", [False, True])
def test_rows_that_are_taken_over_continue_as_those_of_lost_workers(auto_reset):
    def policy(td):
        return td.set("action", td["observation"][:, 1] % 5)

    factories = [functools.partial(CountingEnv, length) for length in (4, 5, 100)]
    how = {
        "num_workers": 3,
        "seed": 1,
        "options": ExecutorOptions(on_worker_loss="restart"),
    }
    with ParallelEnv(factories, **how) as lost, ParallelEnv(factories, **how) as heir:
        lost.rollout(4, policy, break_when_any_done=False)
        heir.load_state_dict(lost.state_dict(with_envs=False))
        heir.engine.take_over(
            lost.engine.batches.roots(lost.engine.all_ids),
            lost.engine.states.needs_reset.copy(),
        )
        for worker_id in range(3):
            kill(lost, worker_id)
        cut = [
            [False] * 3,
            [not auto_reset, False, False],
            [not auto_reset, False, False],
        ]
        for is_reset, is_cut in ((auto_reset, cut), (False, [[False] * 3] * 3)):
            how = {"auto_reset": is_reset, "break_when_any_done": False}
            expected, found = (env.rollout(3, policy, **how) for env in (lost, heir))
            assert (found == expected).all()
            assert found["next", "interrupted"].squeeze(-1).tolist() == is_cut
