"""Branches: envs that are replaced by copies of another one, in the middle of its episode."""

import contextlib
import dataclasses
import functools
import os
import random
import signal
import socket
import threading
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control import CartPoleEnv

from envherd.executor import (
    Busy,
    ExecutorOptions,
    ParallelEnv,
    ResetNeeded,
    SerialEnv,
    WorkerLost,
    WorkerTimeout,
)
from envherd.workers.guests import branching
from envherd.workers.seeding import episode_seed
from tests.envs.branch_envs import Unforkable, Walk
from tests.envs.counting_envs import PairEnv, TextEnv
from tests.executor.calls import act, begun, kill, only
from tests.executor.pools.test_lifecycle import is_running
from tests.faults.children import files_left
from tests.faults.test_interrupts import Interrupt, at_each, tracing
from tests.gates import wait_for
from tests.scale import scaled

pytestmark = pytest.mark.slow


def walks(num_envs: int = 3, *, make: Any = Walk, **options: Any) -> ParallelEnv:
    """Return an executor with a worker for each env, all of which have made some steps."""
    return stepped(
        ParallelEnv(
            num_envs,
            make,
            num_workers=num_envs,
            seed=5,
            options=ExecutorOptions(**options),
        )
    )


def stepped(env: Any, num_steps: int = 4) -> Any:
    env.reset()
    for step in range(num_steps):
        env.step_and_maybe_reset(acting(env, step))
    return env


def acting(env: Any, step: int, *, is_equal: bool = False) -> Any:
    """Return a batch with actions for a step, which differ unless `is_equal`."""
    action = (
        torch.full((env.num_envs,), step)
        if is_equal
        else step + torch.arange(env.num_envs)
    )
    return act(env).set("action", action % 3)


def data_of(env: Any, num_steps: int) -> list[torch.Tensor]:
    """Return the observations of steps with equal actions."""
    return [
        env.step_and_maybe_reset(acting(env, step, is_equal=True))[0][
            "next", "observation"
        ].clone()
        for step in range(num_steps)
    ]


def are_equal(data: list[torch.Tensor], one: int, other: int) -> bool:
    return all(
        torch.equal(observation[one], observation[other]) for observation in data
    )


class TestCopies:
    @pytest.mark.parametrize("isolate_rng", [False, True])
    def test_copies_continue_with_the_data_of_the_source(self, isolate_rng):
        with walks(4, isolate_rng=isolate_rng) as env:
            before = env.current()["observation"].clone()
            env.branch(1, [3, 0])
            root = env.current()["observation"]
            assert torch.equal(root[0], before[1])
            assert torch.equal(root[3], before[1])
            assert torch.equal(root[[1, 2]], before[[1, 2]])
            data = data_of(env, 20)
            assert are_equal(data, 1, 0)
            assert are_equal(data, 1, 3)
            assert not are_equal(data, 1, 2)
            assert env.get("first_seed") == [
                episode_seed(5, i, 0) for i in (1, 1, 2, 1)
            ]

    def test_the_source_continues_as_without_a_branch(self):
        with walks(isolate_rng=True) as env, walks(isolate_rng=True) as other:
            env.branch(0, [1])
            for one, two in zip(data_of(env, 10), data_of(other, 10), strict=True):
                assert torch.equal(one[[0, 2]], two[[0, 2]])

    def test_the_next_episodes_of_a_target_follow_the_number_of_the_source(self):
        with walks() as env:
            env.reset(only(env, 0))
            env.branch(0, [1])
            env.reset()
            assert env.get("first_seed") == [
                episode_seed(5, i, n) for i, n in ((0, 2), (1, 2), (2, 1))
            ]
            env.set_seed(6)
            env.reset()
            assert env.get("first_seed") == [episode_seed(6, i, 0) for i in range(3)]

    def test_an_ended_source_gives_ended_copies(self):
        with walks(2, make=[functools.partial(Walk, 5), Walk]) as env:
            env.step(acting(env, 0))
            env.branch(0, [1])
            assert env.current()["done"].flatten().tolist() == [True, True]
            with pytest.raises(ResetNeeded, match=r"\[0, 1\]"):
                env.step(acting(env, 0))
            env.reset(only(env, 1))
            assert env.current()["done"].flatten().tolist() == [True, False]

    @pytest.mark.parametrize(
        "options",
        [
            {"start_method": "zygote"},
            {"start_method": "spawn"},
            # Threads that survive a fork.
            {"make": functools.partial(Unforkable, "blas"), "worker_threads": 2},
        ],
    )
    def test_workers_of_all_kinds(self, options):
        with walks(2, **options) as env:
            env.branch(0, [1])
            assert are_equal(data_of(env, 3), 0, 1)

    def test_infos_and_values_outside_the_slab_are_copied(self):
        with walks(2, infos="plain") as env:
            env.step(acting(env, 0))
            env.reset(only(env, 1))
            env.branch(0, [1])
            assert [info["t"] for info in env.infos()] == [5, 5]
        with begun(ParallelEnv(2, TextEnv, num_workers=2)) as env:
            env.step(env.rand_action(env.current()))
            env.branch(0, [1])
            texts = env.current()["text"]
            assert texts[0] == texts[1]

    def test_envs_that_are_batches(self):
        with ParallelEnv(2, PairEnv, num_workers=2) as env:
            td = env.reset()
            for _ in range(3):
                td = env.step_and_maybe_reset(env.rand_action(td))[1]
            env.branch(1, [0])
            root = env.current()
            assert torch.equal(root["observation"][0], root["observation"][1])
            env.step_and_maybe_reset(env.rand_action(root))

    @pytest.mark.parametrize("copy", [True, False])
    def test_rollouts_begin_with_the_copies(self, copy):
        options = ExecutorOptions(isolate_rng=True)
        with stepped(
            ParallelEnv(3, Walk, num_workers=3, copy=copy, options=options)
        ) as env:
            for source in (0, 2):
                env.branch(source, [1])
                actions = acting(env, 1, is_equal=True)
                data = env.rollout(
                    5,
                    lambda td: td.update(actions),  # noqa: B023
                    auto_reset=False,
                    break_when_any_done=False,
                )
                assert torch.equal(data["observation"][1], data["observation"][source])
                assert torch.equal(
                    data["next", "observation"][1], data["next", "observation"][source]
                )

    def test_a_chain_of_branches_keeps_no_descriptor_and_no_thread(self):
        with walks(2) as env:
            num_fds = set()
            for generation in range(30):
                one, other = generation % 2, 1 - generation % 2
                env.branch(one, [other])
                assert are_equal(data_of(env, 1), 0, 1)
                num_fds.add(env.call("who")[other][5])
            assert len(num_fds) == 1
            assert env.call("num_threads") == [1, 1]

    def test_without_descriptors_for_a_copy_nothing_has_changed(self):
        with walks(2) as env:
            for count in range(1, 7):  # 0: no import of a module
                with (
                    files_left(count),
                    pytest.raises(WorkerLost, match=r"starting a worker .*Too many"),
                ):
                    env.branch(0, [1])
            assert not are_equal(data_of(env, 1), 0, 1)
            env.branch(0, [1])
            assert are_equal(data_of(env, 1), 0, 1)


class TestPlaces:
    def test_a_copy_is_the_worker_of_its_place(self):
        with walks(3, worker_output="capture") as env:
            pids = [worker.pid for worker in env.statistics().workers]
            env.branch(0, [2])
            env.step(acting(env, 0))
            assert [who[:3] for who in env.call("who")] == [
                [0, 0, 0],
                [1, 1, 0],
                [2, 2, 1],
            ]
            assert all(pid == group for *_, pid, group, _ in env.call("who"))
            now = [worker.pid for worker in env.statistics().workers]
            assert now == [who[3] for who in env.call("who")]
            assert now[:2] == pids[:2]
            assert now[2] != pids[2]
            assert not is_running(pids[2])
            wait_for(lambda: env.worker_output(2).split() == ["step", "5"])
            assert env.worker_output(0).split() == [
                word for n in range(1, 6) for word in ("step", str(n))
            ]

    def test_other_envs_may_be_under_way(self):
        with walks(4) as env:
            env.send(acting(env, 0)[[2]], env_ids=[2])
            env.branch(0, [1])
            for pair in ((2, [0]), (0, [2])):
                with pytest.raises(Busy, match=r"branch failed: envs \[2\] still owe"):
                    env.branch(*pair)
            td = env.recv()
            assert td["env_ids"].tolist() == [2]
            env.send(acting(env, 1, is_equal=True), env_ids=range(4))
            td = env.recv(env_ids=[0, 1, 2, 3])
            assert torch.equal(
                td["next", "observation"][0], td["next", "observation"][1]
            )
            env.branch(0, [3])
            assert torch.equal(
                env.current([0])["observation"], env.current([3])["observation"]
            )
            env.branch(1, [0, 2])
            assert torch.equal(
                env.current(td["env_ids"])["observation"][2],
                env.current([1])["observation"][0],
            )


class TestRefusals:
    def test_wrong_arguments(self):
        with walks(3) as env:
            for arguments, words in (
                ((0, [0, 1]), "targets other than the source, got env 0 as both"),
                ((0, [3]), r"different env ids in 0\.\.2"),
                ((0, [1, 1]), r"different env ids in 0\.\.2"),
                ((3, [1]), r"different env ids in 0\.\.2"),
                ((None, [1]), "source_id as an int"),
            ):
                with pytest.raises(
                    ValueError, match=f"branch failed: expected {words}"
                ):
                    env.branch(*arguments)
            with pytest.raises(ValueError, match=r"no argument 'reseed'.* env\.call"):
                env.branch(0, [1], reseed=True)
            env.branch(0, [])
            env.reset()
            assert env.statistics().worker_losses == 0

    def test_a_source_without_an_episode(self):
        with ParallelEnv(2, Walk, num_workers=2) as env:
            env.reset(only(env, 1))
            with pytest.raises(
                ResetNeeded,
                match="branch failed: expected an env that was reset, got env 0",
            ):
                env.branch(0, [1])
            assert env.get("num_steps", env_ids=[1]) == [0]

    @pytest.mark.parametrize(
        ("make", "error", "words"),
        [
            (
                lambda: begun(ParallelEnv(3, Walk, num_workers=2)),
                ValueError,
                r"expected a worker process for each env, .* Pass num_workers=3\.",
            ),
            (
                lambda: walks(2, env_threads=True),
                ValueError,
                "got env_threads=True",
            ),
            (
                lambda: SerialEnv(2, Walk),
                AttributeError,
                "It is a method of ParallelEnv",
            ),
            (
                lambda: begun(ParallelEnv(2, [Walk, CartPoleEnv], num_workers=2)),
                ValueError,
                "branch failed: expected envs with the spec of env 0, got env 1",
            ),
        ],
    )
    def test_executors_whose_envs_cannot_be_copied(self, make, error, words):
        with make() as env, pytest.raises(error, match=words):
            env.branch(0, [1])

    @pytest.mark.parametrize(
        ("kind", "words"),
        [
            ("thread", "a thread 'renderer'"),
            ("socket", "an open socket"),
            ("process", r"a process 'sleep' \(pid \d+\) that the env has started"),
            ("native", "a thread 'envherd-worker' of a native library"),
        ],
    )
    def test_workers_that_cannot_be_forked(self, kind, words):
        with walks(2, make=functools.partial(Unforkable, kind)) as env:
            before = env.current()["observation"].clone()
            with pytest.raises(
                ValueError,
                match=rf"can be forked, got .*{words}.* \(worker 0, env 0, pid",
            ):
                env.branch(0, [1])
            assert torch.equal(env.current()["observation"], before)
            assert [who[2] for who in env.call("who")] == [0, 0]
            env.step(acting(env, 0))

    def test_devices_and_contexts(self, monkeypatch):
        own, given = socket.socketpair()
        with own, given, open("/dev/null") as file:
            assert file.readable()
            reasons = branching.reasons_against(own, given.fileno())
            assert not any(
                "device" in reason or "context" in reason for reason in reasons
            )
            monkeypatch.setattr(branching, "_DEVICES", ("/dev/null",))
            monkeypatch.setattr(branching, "_CONTEXTS", {"libc.so": "getpid"})
            reasons = branching.reasons_against(own, given.fileno())
            assert "the device /dev/null" in reasons
            assert "an OpenGL context of libc.so" in reasons
            assert (
                f"an open socket (descriptor {own.fileno()})"
                in branching.reasons_against(given, given.fileno())
            )


@pytest.mark.broken_pool
class TestLosses:
    def test_the_death_of_a_copy_has_its_cause(self):
        with walks(2) as env:
            env.branch(0, [1])
            kill(env, 1)
            with pytest.raises(
                WorkerLost, match=r"worker 1 ended with SIGKILL\(-9\).*generation 1"
            ):
                env.step(acting(env, 0))
            env.branch(0, [1])  # a copy takes the place of a lost worker, too
            assert are_equal(data_of(env, 3), 0, 1)
            with pytest.raises(
                WorkerLost, match=r"worker 1 ended with exit code 3 in call"
            ):
                env.call("end", env_ids=[1])

    def test_a_lost_copy_is_built_by_the_factory(self):
        make = [functools.partial(Walk, scale=scale) for scale in (1.0, 0.0)]
        with walks(2, make=make, on_worker_loss="restart") as env:
            env.branch(0, [1])
            assert env.get("scale") == [1.0, 1.0]
            kill(env, 1)
            data = env.step_and_maybe_reset(acting(env, 0))[0]
            assert data["next", "interrupted"].flatten().tolist() == [False, True]
            assert env.get("scale") == [1.0, 0.0]
            assert [who[2] for who in env.call("who")] == [0, 2]

    @pytest.mark.parametrize("on_worker_loss", ["raise", "restart"])
    def test_a_lost_source_leaves_the_targets(self, on_worker_loss):
        with walks(2, on_worker_loss=on_worker_loss) as env:
            kill(env, 0)
            with pytest.raises(
                WorkerLost, match=r"branch failed: worker 0 ended with SIGKILL"
            ):
                env.branch(0, [1])
            assert env.call("who", env_ids=[1])[0][2] == 0
            if on_worker_loss == "restart":
                env.reset()
                env.branch(0, [1])
                assert are_equal(data_of(env, 3), 0, 1)

    def test_a_source_that_hangs_is_killed(self):
        with walks(2) as env:
            crew: Any = env._pool.crew
            # Enough for a fork, not for a build.
            crew.options = dataclasses.replace(crew.options, build_timeout_s=1.0)
            pid = env.call("who")[0][3]
            os.kill(pid, signal.SIGSTOP)
            with pytest.raises(
                WorkerTimeout,
                match=r"branch failed: worker 0 gave no answer within 1 s",
            ):
                env.branch(0, [1])
            assert not is_running(pid)
            assert env.call("who", env_ids=[1])[0][2] == 0

    def test_a_copy_that_dies_before_it_serves(self, monkeypatch):
        with walks(3, on_worker_loss="restart") as env:
            crew: Any = env._pool.crew
            attach = crew.equipment.attach

            def kill_first(worker: Any) -> None:
                if worker.worker_id == 1:
                    worker.kill()
                attach(worker)

            with monkeypatch.context() as patched:
                patched.setattr(crew.equipment, "attach", kill_first)
                with pytest.raises(
                    WorkerLost, match=r"attach failed: worker 1 ended with SIGKILL"
                ):
                    env.branch(0, [1, 2])
            with pytest.raises(ResetNeeded):
                env.step(acting(env, 0))
            env.reset(only(env, 1, 2))
            env.step(acting(env, 0))

    def test_a_fork_that_the_system_refuses(self, monkeypatch):
        """It changes nothing."""
        found = []
        for is_refused in (True, False):
            with walks(2) as env, monkeypatch.context() as patched:
                crew: Any = env._pool.crew
                error = WorkerLost("no such child")
                patched.setattr(
                    crew._zygote,
                    "adopt",
                    lambda *_, error=error: (_ for _ in ()).throw(error),
                )
                if is_refused:
                    with pytest.raises(WorkerLost, match="no such child"):
                        env.branch(0, [1])
                    assert [who[2] for who in env.call("who")] == [0, 0]
                patched.undo()
                env.branch(0, [1])
                found.append(torch.stack(data_of(env, 3)))
        assert torch.equal(*found)


class Strike(Interrupt):
    """Sends SIGINT at the n-th line."""

    def strike(self) -> None:
        signal.raise_signal(signal.SIGINT)


# Freed at the end of a `with`.
@pytest.mark.filterwarnings("ignore:Exception ignored in. <_io.FileIO")
@pytest.mark.timeout(280)
@pytest.mark.long
def test_an_interrupt_leaves_targets_unchanged_copied_or_to_be_reset():
    with walks(3, isolate_rng=True) as env:
        for interrupt in at_each(Strike, scaled(47, full=7), least=3):
            env.reset()
            stale = data_of(env, 1)[0].clone()
            with tracing(interrupt):
                env.branch(0, [1, 2])
            root = env.current()
            needs_reset = env.engine.states.needs_reset
            assert not needs_reset[0]
            for env_id in (1, 2):
                shown = root["observation"][env_id].tolist()
                assert shown in (stale[0].tolist(), stale[env_id].tolist())
                assert (
                    needs_reset[env_id]
                    or shown == env.get("place", [env_id])[0].tolist()
                )
            if not needs_reset.any():
                data_of(env, 1)
        assert are_equal(data_of(env, 3), 0, 2)


_OWNER = """
import os, signal, sys, threading
import psutil
from envherd.executor import ParallelEnv
from tests.envs.branch_envs import Walk
env = ParallelEnv(3, Walk, num_workers=3)
env.reset()
env.branch(0, [1, 2])
env.branch(1, [0])
pids = [worker.pid for worker in env.statistics().workers]
print(*pids, psutil.Process(pids[1]).ppid(), flush=True)
if sys.argv[1] == "is killed":
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[1] == "is killed in a branch":
    threading.Timer(float(sys.argv[2]), os.kill, (os.getpid(), signal.SIGKILL)).start()
    while True:
        env.branch(0, [1, 2])
"""


@pytest.mark.parametrize(
    ("end", "after_s"),
    [
        ("is killed", 0),
        ("returns", 0),
        *(
            ("is killed in a branch", time_s)
            for time_s in scaled((0.17,), full=(0.1, 0.17, 0.23, 0.31))
        ),
    ],
)
def test_copies_end_with_their_owner(end, after_s, script_host, tmp_path):
    done = script_host.run_text(_OWNER, end, str(after_s), folder=tmp_path)
    assert done.returncode == (0 if end == "returns" else -signal.SIGKILL), done.stderr
    pids = list(map(int, done.stdout.split()))
    assert len(pids) == 4
    wait_for(lambda: not any(map(is_running, pids)))


@pytest.mark.broken_pool
@pytest.mark.timeout(280)
@pytest.mark.long
def test_random_branches_while_workers_die():
    rng, most = random.Random(0), scaled(30, full=200)
    num_envs, num_branches = 4, 0
    options = ExecutorOptions(
        on_worker_loss="restart", max_restarts=10_000, restart_window_s=0.001
    )
    with stepped(
        ParallelEnv(num_envs, Walk, num_workers=num_envs, seed=0, options=options), 0
    ) as env:
        timers: list[threading.Timer] = []
        while num_branches < most:
            if rng.random() < 0.3:
                pid = env.statistics().workers[rng.randrange(num_envs)].pid
                timers.append(
                    threading.Timer(rng.random() * 0.05, kill_one, (pid, env))
                )
                timers[-1].start()
            needs_reset = np.flatnonzero(env.engine.states.needs_reset).tolist()
            if needs_reset:
                env.reset(only(env, *needs_reset))
            source, *targets = rng.sample(range(num_envs), rng.randint(2, num_envs))
            roots = env.current()["observation"].clone()
            try:
                env.branch(source, targets)
            except (WorkerLost, ResetNeeded):
                continue
            num_branches += 1
            expected = roots[[source if i in targets else i for i in range(num_envs)]]
            check_step(env, source, targets, expected)
        for timer in timers:
            timer.join()


def check_step(
    env: Any, source: int, targets: list[int], expected: torch.Tensor
) -> None:
    """Check the roots after a branch, and that the next rows of source and copies are equal, if no worker is lost."""
    assert torch.equal(env.current()["observation"], expected)
    data = env.step_and_maybe_reset(acting(env, 1, is_equal=True))[0]["next"]
    is_cut = data["interrupted"].flatten()
    assert torch.equal(data["observation"][is_cut], expected[is_cut])
    intact = [i for i in (source, *targets) if not is_cut[i]]
    assert all(
        torch.equal(data["observation"][i], data["observation"][intact[0]])
        for i in intact
    )
    assert not any(torch.equal(data["observation"][i], expected[i]) for i in intact)


def kill_one(pid: int, env: Any) -> None:
    """Kill a worker, unless it has been replaced."""
    if any(worker.pid == pid for worker in env._pool.crew.workers):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
