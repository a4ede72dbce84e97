"""The asynchronous collector returns every step once and in order, whichever env is ready first."""

import contextlib
import functools
import gc
import itertools
import random
import threading
import time
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from envherd import Closed, EnvError, ExecutorOptions, ParallelEnv, SerialEnv
from envherd.executor.batches.transfer import as_array
from envherd.executor.guests.collectors import async_collector
from envherd.executor.guests.collectors.async_collector import (
    LOST,
    AsyncCollector,
    _Background,
)
from envherd.workers.testing import CountingEnv
from tests.envs.breaking_envs import FaultyEnv
from tests.envs.counting_envs import AgentsEnv, TextEnv
from tests.gates import alarm, wait_for

N, LENGTH = 4, 5
MakeEnv = functools.partial(CountingEnv, LENGTH)


def policy(root: Any) -> Any:
    """Act on the env's own step, so that its data do not depend on the order of the others."""
    return root.set("action", (root["observation"][:, 1] + root["env_ids"]) % 4)


def expected_rows(num_steps: int, seed: int) -> dict[int, torch.Tensor]:
    """Return what each env observes before and after each of its steps, int64 `[T, 2, 3]`."""
    rows: dict[int, list[torch.Tensor]] = {i: [] for i in range(N)}
    with SerialEnv(N, MakeEnv, seed=seed) as env:
        root = env.reset()
        for _ in range(num_steps):
            acted = policy(root.set("env_ids", torch.arange(N)))
            td, after = env.step_and_maybe_reset(acted)
            for i in range(N):
                rows[i].append(
                    torch.stack([td["observation"][i], td["next", "observation"][i]])
                )
            root = after.clone()
    return {i: torch.stack(row) for i, row in rows.items()}


@pytest.mark.slow
@pytest.mark.parametrize("in_background", [0, 2])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"min_batch": 2},
        {"max_batch": 1},
        {"max_batch": 3, "deadline_s": 0.0005},
        {"batch_sizes": (2, 4)},
    ],
    ids=str,
)
def test_every_step_is_there_once_and_as_it_would_be_alone(options, in_background):
    num_batches, frames = 20, 24
    with ParallelEnv(N, MakeEnv, num_workers=2, seed=3) as env:
        with AsyncCollector(
            env, policy, frames_per_batch=frames, in_background=in_background, **options
        ) as collector:
            batches = [collector.collect() for _ in range(num_batches)]
        assert env.is_closed
    seen: dict[int, dict[int, torch.Tensor]] = {i: {} for i in range(N)}
    for data in batches:
        assert data.batch_size == (4, 6)
        assert data.names[-1] == "time"
        assert (data["env_ids"] == data["env_ids"][:, :1]).all()
        assert (data["step"].diff(dim=1) == 1).all()
        for row in data.unbind(0):
            for one in row.unbind(0):
                rows = torch.stack([one["observation"], one["next", "observation"]])
                assert (
                    seen[int(one["env_ids"])].setdefault(int(one["step"]), rows) is rows
                ), "a step came twice"
                assert one["next", "done"] == (one["next", "observation"][1] == LENGTH)
    most = max(max(steps) for steps in seen.values() if steps)
    wanted = expected_rows(most + 1, 3)
    for env_id, steps in seen.items():
        gaps = set(range(max(steps, default=-1) + 1)) - steps.keys()
        # Full rows that were not handed out yet are whole rows older than the env's other rows.
        assert len(gaps) % 6 == 0, (env_id, gaps)
        for step, rows in steps.items():
            assert torch.equal(rows, wanted[env_id][step])
    assert sum(map(len, seen.values())) == num_batches * frames


@pytest.mark.slow
def test_the_policy_sees_batches_of_the_given_sizes_alone():
    sizes: list[tuple[int, int]] = []

    def padded(root: Any) -> Any:
        sizes.append((len(root), int(root["valid"].sum())))
        assert not root["valid"][sizes[-1][1] :].any()
        return policy(root)

    with (
        ParallelEnv(N, MakeEnv, num_workers=2, seed=0) as env,
        AsyncCollector(
            env, padded, frames_per_batch=40, batch_sizes=(3, 1)
        ) as collector,
    ):
        data = collector.collect()
        assert collector.statistics().frames >= 40
    assert {size for size, _ in sizes} <= {1, 3}
    assert all(valid <= size for size, valid in sizes)
    assert "valid" not in data


class Recurrent(nn.Module):
    """Counts its own steps in a hidden state."""

    def forward(self, root: Any) -> Any:
        hidden = root.get("hidden", None)
        hidden = torch.zeros(len(root), 1) if hidden is None else hidden
        policy(root)
        root["seen"] = hidden.clone()
        return root.set("next", TensorDict({"hidden": hidden + 1}, root.batch_size))


@pytest.mark.slow
def test_the_state_of_a_recurrent_policy_is_its_envs_own():
    primer = TensorDict({"hidden": torch.full((N, 1), 10.0)}, [N])
    with (
        ParallelEnv(N, MakeEnv, num_workers=2, seed=0) as env,
        AsyncCollector(
            env, Recurrent(), frames_per_batch=60, primer=primer
        ) as collector,
    ):
        for _ in range(3):
            data = collector.collect()
            assert torch.equal(data["seen"][..., 0], 10.0 + data["observation"][..., 1])
    # Without a primer the state continues from episode to episode.
    with (
        ParallelEnv(N, MakeEnv, num_workers=2, seed=0) as env,
        AsyncCollector(env, Recurrent(), frames_per_batch=60) as collector,
    ):
        data = collector.collect()
        assert torch.equal(data["seen"][..., 0].long(), data["step"])


def steps_of(batches: list[Any]) -> dict[int, list[tuple[int, int, int]]]:
    """Return each env's steps: its number, what the env observed before it, and the action."""
    found: dict[int, list[tuple[int, int, int]]] = {i: [] for i in range(N)}
    for data in batches:
        for i, at, before, action in zip(
            *(data[key].reshape(-1).tolist() for key in ("env_ids", "step")),
            data["observation"][..., 1].reshape(-1).tolist(),
            data["action"].reshape(-1).tolist(),
            strict=True,
        ):
            found[i].append((at, before, action))
    return found


@pytest.mark.parametrize("layout", ["rows", "flat"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_interrupted_send_leaves_no_step_without_root_and_action(
    when, layout, monkeypatch
):
    with ParallelEnv(N, MakeEnv, num_workers=2, seed=3) as env:
        collector = AsyncCollector(env, policy, frames_per_batch=24, layout=layout)
        send, count = env.send, 0

        def interrupted(*args: Any, **kwargs: Any) -> None:
            nonlocal count
            count += 1
            if when == "after":
                send(*args, **kwargs)
            if count % 7 == 0:
                raise KeyboardInterrupt
            if when == "before":
                send(*args, **kwargs)

        monkeypatch.setattr(env, "send", interrupted)
        batches = []
        while len(batches) < 12:
            with contextlib.suppress(KeyboardInterrupt):
                batches.append(collector.collect())
        for i, steps in steps_of(batches).items():
            numbers = [at for at, _, _ in steps]
            assert numbers == sorted(set(numbers))
            assert all(action == (before + i) % 4 for _, before, action in steps)
            if when == "after":
                assert numbers == list(range(len(numbers)))
                assert [before for _, before, _ in steps] == [
                    at % LENGTH for at in numbers
                ]


@pytest.mark.parametrize("layout", ["rows", "flat"])
@pytest.mark.parametrize("steps_per_row", [1, 2])
def test_an_interrupt_that_loses_steps_ends_their_episodes_in_the_data(
    layout, steps_per_row, monkeypatch
):
    with ParallelEnv(N, MakeEnv, num_workers=2, seed=3) as env:
        options = {} if layout == "flat" else {"steps_per_row": steps_per_row}
        collector = AsyncCollector(
            env, policy, frames_per_batch=steps_per_row, layout=layout, **options
        )
        recv, count = env.recv, itertools.count(1)

        def interrupted(*args: Any, **kwargs: Any) -> Any:
            received = recv(*args, **kwargs)
            if next(count) % 7 == 0:
                raise KeyboardInterrupt
            return received

        monkeypatch.setattr(env, "recv", interrupted)
        latest: dict[int, Any] = {}
        num_lost = num_collected = 0
        while num_collected < 200:
            with contextlib.suppress(KeyboardInterrupt):
                for one in collector.collect().reshape(-1):
                    before = latest.get(int(one["env_ids"]))
                    if before is not None and not before["next", "done"]:
                        assert one["step"] == before["step"] + 1
                        assert torch.equal(
                            one["observation"], before["next", "observation"]
                        )
                    if one["policy_version"] == LOST:
                        num_lost += 1
                        assert torch.equal(
                            one["observation"], one["next", "observation"]
                        )
                        assert (
                            one["next", "truncated"]
                            & one["next", "done"]
                            & (one["next", "reward"] == 0)
                        )
                    latest[int(one["env_ids"])] = one
                    num_collected += 1
        assert num_lost
        assert collector.statistics().lag_max == 0


def test_a_policy_may_use_the_memory_of_its_result_again():
    memory = torch.zeros(N, dtype=torch.int64)

    def act(root: Any) -> Any:
        memory[: len(root)] = policy(root)["action"]
        return root.set("action", memory[: len(root)])

    with (
        ParallelEnv(N, MakeEnv, num_workers=2, seed=3) as env,
        AsyncCollector(env, act, frames_per_batch=24) as collector,
    ):
        for i, steps in steps_of([collector.collect() for _ in range(10)]).items():
            assert all(action == (before + i) % 4 for _, before, action in steps)


class Weighted(nn.Module):
    """Writes its weight into what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, root: Any) -> Any:
        return policy(root).set("weight", self.weight.expand(len(root)).clone())


@pytest.mark.slow
@pytest.mark.parametrize("in_background", [0, 1])
def test_each_step_says_which_weights_have_acted(in_background):
    learner = Weighted()
    with (
        ParallelEnv(N, MakeEnv, num_workers=2, seed=0) as env,
        AsyncCollector(
            env, learner, frames_per_batch=24, in_background=in_background
        ) as collector,
    ):
        assert (collector.policy is learner) == (not in_background)
        lags = []
        for step in range(6):
            data = collector.collect()
            assert torch.equal(data["weight"].long(), data["policy_version"])
            lags.append(step - data["policy_version"])
            with torch.no_grad():
                learner.weight.add_(1)
            way = (None, learner.state_dict(), TensorDict.from_module(learner))[
                step % 3
            ]
            assert collector.update_policy_(way) == step + 1
        statistics = collector.statistics()
        assert statistics.version == 6
        assert statistics.lag_max == max(int(lag.max()) for lag in lags) >= 0
        assert statistics.lag_mean == pytest.approx(
            float(torch.stack(lags).double().mean())
        )
    assert not [one for one in threading.enumerate() if one.name == "envherd-collector"]


@pytest.mark.slow
@pytest.mark.parametrize("in_background", [0, 1])
def test_weights_may_be_updated_by_the_policy_itself_and_by_any_thread(in_background):
    learner = Weighted()

    class Updating(nn.Module):
        def forward(self, root):
            if int(root["observation"][0, 1]) == 1:
                collector.update_policy_()
            return learner(root)

    with (
        ParallelEnv(N, MakeEnv, num_workers=2, seed=0) as env,
        AsyncCollector(
            env, Updating(), frames_per_batch=24, in_background=in_background
        ) as collector,
    ):
        collector.collect()
        others = [threading.Thread(target=collector.update_policy_) for _ in range(4)]
        for thread in others:
            thread.start()
        versions = torch.cat(
            [collector.collect()["policy_version"].flatten() for _ in range(3)]
        )
        for thread in others:
            thread.join()
        assert versions.max() > 4


class Versioned(Weighted):
    """Acts by its weight and the observation."""

    def forward(self, root: Any) -> Any:
        return root.set("action", (root["observation"][:, 1] + self.weight.long()) % 4)


@pytest.mark.slow
@pytest.mark.parametrize("in_background", [0, 1])
@pytest.mark.parametrize("layout", ["rows", "flat"])
def test_async_steps_equal_those_of_a_serial_executor_with_equal_versions(
    layout, in_background
):
    """Each env's data depend only on the seed and the versions that acted, whichever env was ready first."""
    learner = Versioned()
    steps: list[dict[int, Any]] = [{} for _ in range(N)]
    with (
        ParallelEnv(N, MakeEnv, num_workers=2, seed=5) as env,
        AsyncCollector(
            env,
            learner,
            frames_per_batch=24,
            layout=layout,
            in_background=in_background,
        ) as collector,
    ):
        for _ in range(12):
            data = collector.collect()
            assert data.batch_size == ((24,) if layout == "flat" else (4, 6))
            for one in data.reshape(-1).unbind(0):
                steps[int(one["env_ids"])][int(one["step"])] = one
            with torch.no_grad():
                learner.weight.add_(1)
            collector.update_policy_()
    assert sum(map(len, steps)) == 12 * 24
    # Of the rows not handed out.
    last = [
        next(step for step in range(10**6) if step not in of_env) for of_env in steps
    ]
    assert layout == "rows" or last == [len(of_env) for of_env in steps], (
        "flat batches have no gaps"
    )
    with SerialEnv(N, MakeEnv, seed=5) as env:
        root = env.reset()
        for step in range(max(last)):
            seen = [steps[i][step] if step < last[i] else None for i in range(N)]
            versions = torch.tensor(
                [0 if one is None else int(one["policy_version"]) for one in seen]
            )
            td = root.set("action", (root["observation"][:, 1] + versions) % 4)
            td, root = env.step_and_maybe_reset(td)
            for i, one in enumerate(seen):
                if one is not None:
                    for key in (
                        "observation",
                        "action",
                        ("next", "observation"),
                        ("next", "reward"),
                        ("next", "done"),
                    ):
                        assert torch.equal(one[key], td[i][key])


@pytest.mark.parametrize(
    "later",
    [
        torch.zeros(2, 1),
        torch.zeros(2, 1, dtype=torch.bfloat16),
        torch.zeros(2, dtype=torch.int64),
    ],
)
def test_a_policy_whose_results_change_dtype_or_shape_is_refused(later):
    """They are not rounded, read as integers by their bits, or repeated for the whole row."""
    given = iter([torch.zeros(2, 3), *[later] * 9])

    def act(root):
        return root.update(
            {"action": torch.ones(2, dtype=torch.int64), "value": next(given)}
        )

    with (
        AsyncCollector(
            SerialEnv(2, CountingEnv, seed=0), act, frames_per_batch=8, min_batch=2
        ) as collector,
        pytest.raises(
            ValueError, match=r"expected 'value' to stay torch.float32 \[3\], got"
        ),
    ):
        collector.collect()


def test_after_a_result_that_was_refused_the_collector_goes_on():
    is_wrong = iter([False, False, True, *[False] * 99])

    def act(root):
        value = root["observation"].double().mean(1)
        return policy(root).set("value", value.float() if next(is_wrong) else value)

    with AsyncCollector(
        SerialEnv(2, MakeEnv, seed=0),
        act,
        frames_per_batch=8,
        layout="flat",
        min_batch=2,
    ) as collector:
        with pytest.raises(ValueError, match="expected 'value' to stay"):
            collector.collect()
        for data in (collector.collect(), collector.collect()):
            assert torch.equal(data["value"], data["observation"].double().mean(1))
            assert torch.equal(data["action"], policy(data)["action"])


@pytest.mark.slow
@pytest.mark.parametrize("num_ahead", [1, 2])
def test_no_more_batches_are_collected_ahead_than_asked_for(num_ahead):
    frames = 12
    with (
        ParallelEnv(N, MakeEnv, num_workers=2, seed=0) as env,
        AsyncCollector(
            env, policy, frames_per_batch=frames, layout="flat", in_background=num_ahead
        ) as collector,
    ):
        collector.collect()
        wait_for(lambda: collector.statistics().frames >= (1 + num_ahead) * frames)
        threading.Event().wait(0.3)  # for more, which would be wrong
        assert collector.statistics().frames <= (1 + num_ahead) * frames + N - 1
        assert len(collector.collect()) == frames


@pytest.mark.slow
def test_statistics_say_how_long_answers_waited_for_the_policy():
    def slow(root: Any) -> Any:
        threading.Event().wait(0.02)
        return policy(root)

    with (
        ParallelEnv(N, MakeEnv, num_workers=2, seed=0) as env,
        AsyncCollector(
            env, slow, frames_per_batch=24, max_batch=1, layout="flat"
        ) as collector,
    ):
        for _ in range(3):
            collector.collect()
        found = collector.statistics()
    # The policy acts for one env at a time, so an answer waits while it acts for others.
    assert 0.02 < found.queue_p50_s <= found.queue_p99_s < sum(found.spent.values())
    assert found.bound_by == "policy"
    assert found.policy_s > sum(found.spent.values()) / 2
    assert set(found.batch_sizes) == {1}


@pytest.mark.slow
@pytest.mark.parametrize("in_background", [0, 1])
def test_an_env_that_raises_loses_that_step_alone(in_background):
    make = [
        functools.partial(FaultyEnv, "value_error", step=4, length=LENGTH),
        MakeEnv,
        MakeEnv,
        MakeEnv,
    ]
    with ParallelEnv(N, make, num_workers=2, seed=0) as env:
        with AsyncCollector(
            env, policy, frames_per_batch=24, in_background=in_background
        ) as collector:
            batches, failed = [], []
            while len(batches) < 6:
                try:
                    batches.append(collector.collect())
                except EnvError as error:
                    failed += error.env_ids
        assert set(failed) == {0}
    numbers = sorted(
        int(step)
        for data in batches
        for row in data
        for step in row["step"][row["env_ids"] == 0]
    )
    assert {3, 4} & set(numbers) == ({4} if 4 in numbers else set()), (
        "the step that was lost has no transition"
    )
    for data in batches:
        follows = data["next", "observation"][:, :-1] == data["observation"][:, 1:]
        is_done = data["next", "done"][:, :-1, 0]
        assert (follows.all(-1) | is_done).all()
        assert (
            data["next", "observation"][..., 1] == data["observation"][..., 1] + 1
        ).all()
        assert (
            data["next", "done"][..., 0]
            == (data["next", "terminated"] | data["next", "truncated"])[..., 0]
        ).all()


@pytest.mark.slow
@pytest.mark.broken_pool
def test_a_lost_worker_gives_an_interrupted_row(tmp_path):
    make = [
        functools.partial(FaultyEnv, "kill", step=3, flag=str(tmp_path / "died")),
        MakeEnv,
    ]
    with ParallelEnv(
        2, make, num_workers=2, options=ExecutorOptions(on_worker_loss="restart")
    ) as env:
        with AsyncCollector(env, policy, frames_per_batch=20) as collector:
            batches = [collector.collect() for _ in range(8)]
            # The successor is being built.
            while not any(data["next", "interrupted"].any() for data in batches):
                batches.append(collector.collect())
        assert sum(int(data["next", "interrupted"].sum()) for data in batches) == 1
        for data in batches:
            follows = (
                data["next", "observation"][:, :-1] == data["observation"][:, 1:]
            ).all(-1)
            assert (follows | data["next", "done"][:, :-1, 0]).all()


@pytest.mark.slow
@pytest.mark.broken_pool
@pytest.mark.parametrize("deadline_s", [None, 0.002])
def test_an_env_that_hangs_is_given_up_while_others_answer(tmp_path, deadline_s):
    make = [
        functools.partial(FaultyEnv, "sleep", step=3, flag=str(tmp_path / "hung")),
        MakeEnv,
    ]
    options = ExecutorOptions(on_worker_loss="restart", step_timeout_s=0.3)
    with (
        ParallelEnv(2, make, num_workers=2, options=options) as env,
        AsyncCollector(
            env, policy, frames_per_batch=20, deadline_s=deadline_s
        ) as collector,
    ):
        end = time.monotonic() + 60
        is_given_up = False
        while not is_given_up:  # on a busy machine the other one may also be late
            assert time.monotonic() < end, "the env that hangs was never given up"
            data = collector.collect()
            is_given_up = data["next", "interrupted"][data["env_ids"] == 0].any()


@pytest.mark.slow
def test_ended_episode_is_not_truncated_by_a_later_loss(tmp_path):
    flag = str(tmp_path / "raised")
    make = functools.partial(
        FaultyEnv, "value_error", step=1, episode=1, flag=flag, length=LENGTH
    )
    with (
        ParallelEnv(1, make, seed=0) as env,
        AsyncCollector(
            env, policy, frames_per_batch=4 * LENGTH, steps_per_row=4 * LENGTH
        ) as collector,
    ):
        with pytest.raises(EnvError):
            collector.collect()
        (data,) = collector.collect()
        ends = data["next", "done"].flatten().nonzero().flatten().tolist()
        assert data["step"][ends[0] : ends[0] + 2].tolist() == [LENGTH - 1, LENGTH + 1]
        assert not (data["next", "terminated"] & data["next", "truncated"]).any()


@pytest.mark.slow
def test_an_executor_that_is_the_callers_is_left_without_a_command():
    with ParallelEnv(N, MakeEnv, num_workers=2, seed=0) as env:
        for in_background in (0, 1):
            with AsyncCollector(
                env,
                None,
                frames_per_batch=10,
                total_frames=30,
                in_background=in_background,
                close_env=False,
            ) as collector:
                assert [len(data) for data in collector] == [5, 5, 5]
                assert collector.num_frames == 30
            assert not env.engine.states.under_way.any()
        env.reset()
        assert env.rollout(3)["action"].shape == (N, 3)


@pytest.mark.slow
def test_close_does_not_raise_the_error_of_a_step_that_fails_meanwhile():
    with ParallelEnv(
        1, functools.partial(FaultyEnv, "value_error", step=4), num_workers=1
    ) as env:
        collector = AsyncCollector(env, policy, frames_per_batch=3, close_env=False)
        assert collector.collect()["step"].tolist() == [[0, 1, 2]]
        collector.close()
        assert env.reset()["observation"][0, 1] == 0


@pytest.mark.parametrize("is_closed", ["no", "before", "after"])
@pytest.mark.parametrize("is_failing", [False, True])
def test_a_collector_that_is_dropped_frees_its_thread_and_its_env(
    is_closed, is_failing
):
    def act(td: Any) -> Any:
        if is_failing:
            raise ValueError("no action")
        return policy(td)

    env = ParallelEnv(2, MakeEnv, num_workers=1, seed=0)
    collector = AsyncCollector(env, act, frames_per_batch=4, in_background=1)
    batches = iter(collector)
    with (
        pytest.raises(ValueError, match="no action")
        if is_failing
        else contextlib.nullcontext()
    ):
        next(batches)
    background: Any = collector._background
    wait_for(background._batches.__len__)  # the next one, or its error
    thread, gone = background._thread, weakref.ref(env)
    if is_closed == "before":
        env.close()
        thread.join(10)
        assert not thread.is_alive()
        with contextlib.suppress(ValueError):
            collector.collect()
        for _ in range(2):
            with pytest.raises(Closed):
                collector.collect()
    del batches, collector, background
    gc.collect()
    if is_closed == "after":
        env.close()
    thread.join(10)
    assert not thread.is_alive()
    del env
    gc.collect()
    assert gone() is None


def test_close_ends_a_wait_for_a_batch():
    background = _Background(TensorDict().clone, 1, set())
    background.begin_close()
    with pytest.raises(Closed):
        background.first()


@pytest.mark.parametrize("in_background", [0, 1])
def test_an_interrupt_after_a_batch_is_complete_does_not_lose_it(
    in_background, monkeypatch
):
    calls = itertools.count()

    def interrupted(tensor: Any) -> Any:
        if next(calls) % 2:
            raise KeyboardInterrupt
        return as_array(tensor)

    monkeypatch.setattr(async_collector, "as_array", interrupted)
    with (
        ParallelEnv(N, MakeEnv, num_workers=2, seed=3) as env,
        AsyncCollector(
            env, policy, frames_per_batch=12, layout="flat", in_background=in_background
        ) as collector,
    ):
        batches = []
        while len(batches) < 6:
            with contextlib.suppress(KeyboardInterrupt):
                batches.append(collector.collect())
        assert collector.num_frames == 6 * 12
    for steps in steps_of(batches).values():
        assert [at for at, _, _ in steps] == list(range(len(steps)))


@pytest.mark.slow
def test_alarms_at_any_time_lose_no_batch_of_a_thread():
    rng, num_alarms = random.Random(0), 0
    batches: list[Any] = []
    with (
        ParallelEnv(N, MakeEnv, num_workers=2, seed=3) as env,
        AsyncCollector(
            env, policy, frames_per_batch=4, layout="flat", in_background=1
        ) as collector,
    ):
        collector.collect()
        while len(batches) < 400:
            try:
                with alarm(rng.uniform(1e-4, 2e-3)):
                    batches.append(collector.collect())
            except TimeoutError:
                num_alarms += 1
    assert num_alarms > 20
    for steps in steps_of(batches).values():
        assert [at for at, _, _ in steps] == list(
            range(steps[0][0], steps[0][0] + len(steps))
        )


@pytest.mark.parametrize("deadline_s", [None, 0.01])
def test_a_timeout_of_the_program_is_raised(deadline_s, monkeypatch):
    with (
        SerialEnv(N, MakeEnv) as env,
        AsyncCollector(
            env, policy, frames_per_batch=8, deadline_s=deadline_s
        ) as collector,
    ):
        collector.collect()
        with monkeypatch.context() as patch:
            patch.setattr(
                env, "recv", mock.Mock(side_effect=TimeoutError("of a signal handler"))
            )
            with pytest.raises(TimeoutError, match="of a signal handler"):
                collector.collect()
        assert collector.collect().shape == (4, 2)


@pytest.mark.long
@pytest.mark.parametrize("in_background", [0, 1])
@pytest.mark.parametrize("close_env", [False, True])
def test_a_close_while_an_env_hangs_returns_in_time(in_background, close_env, caplog):
    make = [functools.partial(FaultyEnv, "sleep", step=3), MakeEnv]
    with ParallelEnv(
        2, make, num_workers=2, options=ExecutorOptions(close_timeout_s=2.0)
    ) as env:
        collector = AsyncCollector(
            env,
            policy,
            frames_per_batch=4,
            in_background=in_background,
            close_env=close_env,
        )
        while not (collector.collect()["env_ids"] == 0).any():
            pass  # then env 0 has been sent the step in which it hangs
        began = time.monotonic()
        collector.close()
        assert time.monotonic() - began < 20
        assert env.is_closed == close_env
        assert [record.message for record in caplog.records] == (
            [] if close_env else [mock.ANY]
        )
        if not close_env:
            assert (
                "close failed: expected all envs to answer within 2 s (close_timeout_s)"
                in caplog.text
            )
            assert "no answer from envs [0]" in caplog.text


def weighted(**attributes):
    learner = Weighted()
    vars(learner).update(attributes)
    return learner


@pytest.mark.parametrize(
    ("kinds", "learner", "options", "error", "message"),
    [
        *(
            (MakeEnv, policy, options, ValueError, "")
            for options in (
                {"frames_per_batch": 0},
                {"min_batch": 3, "max_batch": 2},
                {"max_batch": 9},
                {"max_batch": 0, "batch_sizes": (2, 4)},
                {"layout": "flat", "steps_per_row": 2},
                {"layout": "columns"},
                {"steps_per_row": 0},
                {"steps_per_row": 2.5},
                {"min_batch": True},
                {"max_batch": 2.0},
                {"batch_sizes": [-1, 2]},
                {"batch_sizes": [1.5]},
                {"in_background": -1},
                {"in_background": 1.5},
                {"in_background": True},
                {"primer": TensorDict({"h": torch.zeros(2)}, [2])},
                {"policy_device": "gpu"},
                {"storing_device": 1.5},
            )
        ),
        *(
            (MakeEnv, policy, options, TypeError, "")
            for options in ({"batch_sizes": 4}, {"primer": 42}, {"postproc": 3})
        ),
        (
            [MakeEnv, AgentsEnv, MakeEnv, MakeEnv],
            policy,
            {},
            ValueError,
            "envs of one kind, got 2",
        ),
        (TextEnv, policy, {}, ValueError, "leaves of fixed shapes, got text"),
        (
            MakeEnv,
            weighted(copyable=False),
            {"in_background": 1},
            ValueError,
            ".* Collect with in_background=0",
        ),
        (
            MakeEnv,
            weighted(lock=threading.Lock()),
            {"in_background": 1},
            ValueError,
            r".* the attribute lock \(_thread.lock\)",
        ),
    ],
    ids=lambda value: None if callable(value) else str(value),
)
def test_what_a_collector_cannot_have_is_refused(
    kinds, learner, options, error, message
):
    with (
        SerialEnv(N, kinds) as env,
        pytest.raises(error, match=f"AsyncCollector failed: expected {message}"),
    ):
        AsyncCollector(env, learner, **{"frames_per_batch": 8, **options})


@pytest.mark.parametrize("call", ["collect", "close"])
def test_a_thread_that_the_system_refuses_is_started_by_the_next_call(call):
    with AsyncCollector(
        SerialEnv(N, MakeEnv, seed=0), policy, frames_per_batch=4, in_background=1
    ) as collector:
        with (
            mock.patch.object(
                threading.Thread, "start", side_effect=RuntimeError("no")
            ),
            pytest.raises(RuntimeError, match="no"),
        ):
            collector.collect()
        getattr(collector, call)()
