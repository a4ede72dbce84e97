"""`evaluate` over tasks: a fixed set of episodes, failures, Ctrl-C, memory, and the command."""

import errno
import functools
import json
import math
import os
import re
import signal
import threading
import time

import numpy as np
import pytest
import torch
from gymnasium.spaces import MultiBinary
from typer.testing import CliRunner

from envherd import (
    EnvError,
    ExecutorOptions,
    FactoryError,
    ParallelEnv,
    PerPlayer,
    SerialEnv,
    WorkerLost,
    evaluate,
)
from envherd.executor.cli.app import app
from envherd.executor.show import playing
from envherd.executor.show.results import (
    Cast,
    EpisodeRecord,
    Evaluation,
    Evaluations,
    interval_of,
    rate_of,
)
from envherd.workers.seeding import episode_seed
from tests.envs.suite_envs import Clinging, Task, broken
from tests.envs.team_env import Team
from tests.executor.show.test_per_player import Always
from tests.extras import needs

EXECUTORS = [SerialEnv, functools.partial(ParallelEnv, num_workers=2)]
SEEDS = [episode_seed(0, number, 0) for number in range(8)]


class Net(torch.nn.Module):
    """Sample from a distribution, whose logits depend on what was seen."""

    def forward(self, td):
        logits = td["observation"].sum(-1, keepdim=True) * torch.tensor([1.0, -1.0])
        return td.set("action", torch.distributions.Categorical(logits=logits).sample())


def press(td):
    """Always 1."""
    return td.set("action", torch.ones(len(td), dtype=torch.int64))


def suite(**kwargs):
    return {
        f"size {size}": functools.partial(Task, size=size, **kwargs)
        for size in (2, 3, 4)
    }


def lines(path):
    return [line.split() for line in path.read_text().splitlines()]


# ---- measures -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numbers", "low", "high"),
    [
        ((0, 10), 0.0, 0.27753),
        ((10, 10), 0.72247, 1.0),
        ((5, 10), 0.23659, 0.76341),
        ((81, 263), 0.25529, 0.36621),
    ],
)
def test_success_has_wilsons_interval(numbers, low, high):
    """The last row is from Newcombe (1998), table I, method 3."""
    assert rate_of(*numbers) == pytest.approx(
        (numbers[0] / numbers[1], low, high, *numbers), abs=2e-5
    )


def test_no_episodes_have_no_rate():
    assert rate_of(0, 0) == pytest.approx(
        (math.nan, math.nan, math.nan, 0, 0), nan_ok=True
    )
    assert str(rate_of(0, 0)) == "undefined"


def test_mean_over_tasks_weighs_tasks_equally():
    values = [np.array([1.0, 1.0, 1.0, 1.0]), np.array([4.0, 6.0])]
    found = interval_of(*values)
    assert (found.mean, found.num_episodes) == (3.0, 6)
    assert (found.low, found.high) == (2.5, 3.5), "only the second task varies"
    assert math.isnan(interval_of(np.array([1.0]), np.array([2.0])).low)


def played(*outcomes):
    """Return results; of each episode True, False, None, or "failed"."""
    return Evaluation.of(
        Cast(env="x"),
        0,
        [
            EpisodeRecord(
                episode=number, seed=number, length=1, returns=(1.0,), error="broken"
            )
            if outcome == "failed"
            else EpisodeRecord(
                episode=number, seed=number, length=1, returns=(1.0,), success=outcome
            )
            for number, outcome in enumerate(outcomes)
        ],
    )


def test_failed_episodes_are_counted_separately():
    one = played(*(True, False, None, "failed"))
    assert (one.success.num_successes, one.success.num_episodes) == (1, 3)
    assert (one.num_episodes, one.num_failed, one.collective.num_episodes) == (3, 1, 3)
    silent, dead = played(None, "failed"), played("failed", "failed")
    assert silent.success is None
    both = Evaluations({"one": one, "silent": silent, "dead": dead})
    assert (both.success.num_successes, both.success.num_episodes, both.num_failed) == (
        1,
        3,
        4,
    )
    json.dumps(both.to_dict(), allow_nan=False)
    assert repr(both).splitlines() == [
        "Evaluations(",
        *(f"  {name!r}: {one!r}," for name, one in both.tasks.items()),
        ")",
    ]


# ---- which episodes ------------------------------------------------------------------------------


@pytest.mark.slow
def test_results_do_not_depend_on_the_number_of_workers():
    found = [evaluate(Net(), suite(), 5, num_workers=workers) for workers in (1, 2, 3)]
    assert found[0].to_dict() == found[1].to_dict() == found[2].to_dict()
    one = found[0]["size 3"]
    assert one.lengths.tolist() == [3 + seed % 5 for seed in SEEDS[:5]]
    assert 0 < found[0].success.num_successes < 15
    assert one.success_once.num_successes >= one.success.num_successes
    alone = evaluate(Net(), functools.partial(Task, size=3), 5, num_workers=2)
    assert np.array_equal(alone.returns, one.returns), "nor on the other tasks"


def test_every_episode_is_played_once(tmp_path):
    log = tmp_path / "log"
    found = evaluate(press, suite(log=str(log)), 4, num_workers=2)
    assert [one.num_episodes for one in found.tasks.values()] == [4] * 3
    assert sorted(
        int(words[1]) for words in lines(log) if words[0] == "reset"
    ) == sorted(SEEDS[:4] * 3)


def test_no_more_envs_are_alive_than_workers(tmp_path):
    log = tmp_path / "log"
    tasks = {
        str(i): functools.partial(Task, log=str(log), build_s=0.05) for i in range(6)
    }
    evaluate(press, tasks, 2, num_workers=2)
    alive = np.cumsum(
        [{"build": 1, "close": -1, "reset": 0}[words[0]] for words in lines(log)]
    )
    assert alive.max() <= 2
    assert alive[-1] == 0


def test_a_task_with_many_episodes_left_gets_another_env():
    play = playing.Play(
        {"a": Task, "b": Task},
        playing.Rules(episodes=10, seed=0),
        None,
    )
    assert [play._choose().name for _ in range(3)] == ["a", "b", "a"]
    for task, episode_s in zip(play.tasks, (1.0, 0.1), strict=True):
        vars(task).update(episode_s=episode_s, build_s=2.0)
    assert play._choose().name == "a", "10 s of episodes for two seats"
    for _ in range(8):
        play.take(play.tasks[0])
    assert play._choose() is None, (
        "2 s of episodes for three seats, and another build takes 2 s"
    )


def test_a_seat_has_what_the_worker_of_its_number_would_have():
    each = playing._options_of_seats(
        ExecutorOptions(
            affinity=(0, 1), env_vars=lambda worker_id: {"PORT": str(worker_id)}
        ),
        3,
    )
    assert [one.affinity for one in each] == [(0,), (1,), (0,)]
    assert [one.env_vars["PORT"] for one in each] == ["0", "1", "2"]
    found = evaluate(
        press,
        Task,
        4,
        num_workers=2,
        options=ExecutorOptions(env_vars=[{"A": "1"}, {"A": "2"}]),
    )
    assert found.num_episodes == 4


def test_success_may_be_a_function_of_the_last_info_and_the_episode():
    found = evaluate(
        press,
        Task,
        4,
        success=lambda info, one: info["success"] and one.length > 4,
        num_workers=1,
    )
    assert [one.success for one in found.episodes] == [
        3 + seed % 5 > 4 for seed in SEEDS[:4]
    ]


def test_an_error_of_success_is_no_fault_of_the_env():
    def wrong(*_):
        raise EnvError("of an executor that it has.")

    with pytest.raises(RuntimeError, match="success raised EnvError: of an executor"):
        evaluate(press, Task, 2, success=wrong, num_workers=1)


# ---- policies --------------------------------------------------------------------------------------


def test_policies_by_task():
    def idle(td):
        return td.set("action", torch.zeros(len(td), dtype=torch.int64))

    tasks = suite()
    policies = {"size 2": press, "size 3": idle, "size 4": None}
    found = evaluate(
        None,
        tasks,
        3,
        policy_for=lambda task, env: policies[task],
        num_workers=2,
    )
    assert [found[name].success.num_successes for name in tasks][:2] == [3, 0]


@needs("gymnasium")
def test_names_are_those_of_the_commands():
    found = evaluate(None, ["CartPole-v1", "gymnasium:CartPole-v1"], 1, num_workers=1)
    assert (
        found["CartPole-v1"].returns.tolist()
        == found["gymnasium:CartPole-v1"].returns.tolist()
    )
    assert evaluate(None, "CartPole-v1", 1, num_workers=1).env == "CartPole-v1"
    with pytest.raises(FactoryError, match="gymnasium:"):
        evaluate(None, "gymnasum:CartPole-v1", 1)


def test_a_function_makes_the_policy_of_each_task_once():
    made = []

    def policy_for(name, env):
        made.append((name, env.spec.observation[0].shape))
        return press

    found = evaluate(None, suite(), 2, policy_for=policy_for, num_workers=2)
    assert sorted(made) == [("size 2", (2,)), ("size 3", (3,)), ("size 4", (4,))]
    assert found.success.num_successes == 6


def count(td):
    """Alternate, by a recurrent state."""
    td["next", "count"] = td["count"] + 1
    return td.set("action", td["count"].long().squeeze(-1) % 2)


def test_recurrent_state_begins_anew_with_each_episode():
    expected = [(3 + seed % 5) % 2 == 0 for seed in SEEDS[:6]]
    primer = {"count": torch.zeros(1)}
    found = evaluate(count, Task, 6, primer=primer, num_workers=3)
    assert [one.success for one in found.episodes] == expected
    with SerialEnv(3, Task, seed=0, options=ExecutorOptions(infos="plain")) as env:
        assert [
            one.success for one in evaluate(count, env, 6, primer=primer).episodes
        ] == expected


def test_batch_env_refuses_policy_that_makes_its_first_state():
    def policy(td):
        td["next", "count"] = td.get("count", torch.zeros(len(td), 1)) + 1
        return press(td)

    assert evaluate(policy, Task, 5, num_workers=2).num_episodes == 5
    with (
        SerialEnv(3, Task, seed=0) as env,
        pytest.raises(ValueError, match="expected primer with the first state"),
    ):
        evaluate(policy, env, 5)


@pytest.mark.slow
def test_tasks_with_players_and_without_in_one_suite():
    found = evaluate(None, {"team": Team, "alone": Task}, 2, num_workers=2)
    assert found["team"].returns.shape == (2, 3)
    assert found["alone"].players == ("agent",)
    again = evaluate(
        None,
        {"team": Team, "alone": Task},
        2,
        policy_for=lambda _name, env: (
            PerPlayer({"*": Always(1)}, env.spec) if env.spec.groups else press
        ),
        num_workers=1,
    )
    assert again["team"].returns.tolist() == [[1.5, 3.0, 3.0]] * 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("is_executor", [False, True])
def test_a_policy_on_a_gpu_gets_its_inputs_and_its_state_there(is_executor):
    class Counter(torch.nn.Linear):
        def forward(self, td):
            assert td["observation"].device == td["count"].device == self.weight.device
            return count(td)

    policy, primer = Counter(1, 1).cuda(), {"count": torch.zeros(1)}
    with ParallelEnv(
        3, Task, num_workers=1, seed=0, options=ExecutorOptions(infos="plain")
    ) as env:
        found = evaluate(policy, env if is_executor else Task, 6, primer=primer)
    assert [one.success for one in found.episodes] == [
        (3 + seed % 5) % 2 == 0 for seed in SEEDS[:6]
    ]


@pytest.mark.parametrize(
    ("argument", "notes"),
    [
        ("policies", ["The policy acted in step 0 of episode 0 of task 'a'."]),
        ("policy_for", []),
    ],
)
@pytest.mark.parametrize("kind", [ZeroDivisionError, EnvError])
def test_an_error_of_the_policy_ends_the_run(argument, notes, kind):
    def wrong(*_):
        raise kind("of an executor that the policy has.")

    how = {"policies": None, argument: wrong}
    with pytest.raises(kind) as caught:
        evaluate(**how, env={"a": Task}, episodes=1, num_workers=4)
    assert getattr(caught.value, "__notes__", []) == notes
    with pytest.raises(ValueError, match="action"):
        evaluate(
            lambda td: td.set("action", torch.full((len(td),), 7)),
            Task,
            2,
            num_workers=2,
        )


@pytest.mark.slow
@pytest.mark.broken_pool
def test_policy_error_ends_all_hanging_envs_at_once(monkeypatch):
    monkeypatch.setattr(playing, "_LAST_COMMAND_S", 2.0)
    hang = functools.partial(Task, size=3, faults={0: "hang"})
    sizes = {}  # of the observation, by the time of the call

    def policy(td):
        sizes[time.monotonic()] = td["observation"].shape[-1]
        if td["observation"].shape[-1] == 2 and [*sizes.values()].count(3) == 6:
            raise ZeroDivisionError("in the policy")
        return press(td)

    with pytest.raises(ZeroDivisionError):
        evaluate(
            policy,
            # The others may take long to start.
            [functools.partial(Task, step_s=0.02), hang, hang, hang],
            200,
            num_workers=4,
            options=ExecutorOptions(close_timeout_s=2.0),
        )
    assert time.monotonic() - max(sizes) < 7, "4 s; one after another 8"


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            {"policies": {"size 2": press}},
            "policy of gymnasium envs of one agent, got dict. Wrap it",
        ),
        (
            {"policies": dict.fromkeys(suite(), press)},
            "got a dict of them by task. Pass None, and policy_for=lambda task, env:",
        ),
        ({"focal": [0]}, "expected no focal for envs of one agent"),
        (
            {"env": ["CartPole-v1", "CartPole-v1"]},
            "expected tasks of different names, got CartPole-v1 twice",
        ),
        (
            {"env": {1: Task, "1": Task}},
            "expected tasks of different names, got 1 twice",
        ),
        ({"env": {}}, "expected tasks, got none"),
        (
            {"policy_for": lambda name, env: None},
            "expected policies=None with policy_for",
        ),
        ({"number": 3}, "it has no argument 'number'"),
        ({"videos": "films"}, "it has no argument 'videos'. Use VideoRecorder"),
        ({"out": "a.json"}, "it has no argument 'out'. Evaluate task by task"),
        ({"max_batch": 0}, "expected max_batch"),
        ({"max_batch": 1.5}, "expected max_batch"),
        ({"max_batch": 4, "deadline_s": -1}, "deadline_s"),
        ({"deadline_s": "soon"}, "deadline_s"),
    ],
)
def test_wrong_arguments_are_refused(how, message):
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        evaluate(
            **{
                "policies": press,
                "env": suite(),
                "episodes": 1,
                "num_workers": 1,
                **how,
            }
        )


# ---- failures --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.broken_pool
def test_an_env_that_raises_dies_or_hangs_costs_its_episode():
    faults = {0: "raise", 2: "kill", 3: "hang", 5: "reset"}
    # The other worker must not be late on a busy machine.
    options = ExecutorOptions(step_timeout_s=3.0)
    tasks = {"bad": functools.partial(Task, faults=faults), "good": Task}
    found = evaluate(press, tasks, 7, num_workers=2, options=options)
    bad = found["bad"]
    assert [one.episode for one in bad.failures] == sorted(faults)
    assert [one.error.partition(":")[0] for one in bad.failures] == [
        "EnvError", "WorkerLost", "WorkerTimeout", "EnvError",
    ]  # fmt: skip
    assert "broken arm" in bad.failures[0].error
    assert "SIGKILL" in bad.failures[1].error
    assert bad.failures[0].length == 1
    assert [one.episode for one in bad.episodes] == [1, 4, 6]
    assert np.array_equal(bad.returns[:, 0], found["good"].returns[[1, 4, 6], 0]), (
        "the others are as without faults"
    )
    assert (bad.success.num_episodes, found.num_failed) == (3, 4)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_an_executor_goes_on_after_a_failure(executor):
    faults = {0: "raise", 4: "reset"}
    with executor(3, functools.partial(Task, faults=faults), seed=0) as env:
        found = evaluate(press, env, 7)
    assert [one.episode for one in found.failures] == [0, 4]
    assert [one.episode for one in found.episodes] == [1, 2, 3, 5, 6]
    assert found.lengths.tolist() == [3 + SEEDS[i] % 5 for i in (1, 2, 3, 5, 6)]


@pytest.mark.broken_pool
@pytest.mark.parametrize(
    ("fault", "options"),
    [
        ("kill", {}),
        ("kill", {"on_worker_loss": "restart"}),
        ("raise", {"on_env_error": "interrupt"}),
    ],
    ids=["raise", "restart", "interrupt"],
)
def test_an_executor_goes_on_after_a_failure_that_interrupts_an_episode(fault, options):
    make = functools.partial(Task, faults={1: fault})
    with ParallelEnv(
        3, make, num_workers=3, seed=0, options=ExecutorOptions(**options)
    ) as env:
        if not options:
            with pytest.raises(WorkerLost, match="SIGKILL"):
                evaluate(press, env, 6)
            with pytest.raises(WorkerLost, match="SIGKILL"):  # not Busy
                env.reset()
            return
        found = evaluate(press, env, 6)
    assert [one.episode for one in found.failures] == [1]
    assert found.num_episodes == 5


def test_task_that_cannot_be_built_is_recorded_and_others_continue(monkeypatch):
    def build(num_envs, factory, **options):
        if factory is Clinging:
            raise OSError(errno.EMFILE, "no room")
        return ParallelEnv(num_envs, factory, **options)

    monkeypatch.setattr(playing, "ParallelEnv", build)
    huge = functools.partial(Task, space=MultiBinary(1 << 44))
    tasks = {"broken": broken, "huge": huge, "no room": Clinging, **suite()}
    found = evaluate(press, tasks, 2, num_workers=2)
    assert [found[name].num_episodes for name in found.tasks] == [0, 0, 0, 2, 2, 2]
    assert found["huge"].failures[0].error.startswith("MemoryError: ")
    assert "no room" in found["no room"].failures[0].error
    assert all("no assets" in one.error for one in found["broken"].failures)
    assert found["broken"].to_dict()["failed"] == 2
    for one, error in ((broken, FactoryError), (Clinging, OSError)):
        with pytest.raises(error, match=r"no assets|no room"):
            evaluate(press, {"one": one, "also": one}, 2, num_workers=2)


# ---- Ctrl-C ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("is_signal", [False, True])
def test_ctrl_c_ends_the_run(is_signal):
    calls = []

    def policy(td):
        calls.append(len(td))
        if len(calls) == 25 and not is_signal:
            raise KeyboardInterrupt
        if len(calls) == 25:
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
        return press(td)

    slow = suite(step_s=0.02)
    with pytest.raises(KeyboardInterrupt):
        evaluate(policy, slow, 10, num_workers=2)
    assert not any("evaluate" in one.name for one in threading.enumerate())


@pytest.mark.broken_pool
@pytest.mark.parametrize(
    ("close_timeout_s", "interrupt_s"), [(1.5, 60), (60, 0.3), (60, 1.5)]
)
def test_ctrl_c_leaves_no_env_that_closes(close_timeout_s, interrupt_s):
    timer = threading.Timer(interrupt_s, os.kill, (os.getpid(), signal.SIGINT))
    calls = []

    def policy(_):
        calls.append(time.monotonic())
        timer.start()
        raise KeyboardInterrupt

    options = ExecutorOptions(close_timeout_s=close_timeout_s)
    with pytest.raises(KeyboardInterrupt):
        evaluate(policy, Clinging, 4, num_workers=1, options=options)
    timer.cancel()
    assert time.monotonic() - calls[0] < 30
    assert not any("evaluate" in one.name for one in threading.enumerate())


@pytest.mark.parametrize("executor", EXECUTORS)
def test_ctrl_c_leaves_an_executor_whose_envs_can_be_reset(executor):
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))

    def policy(td):
        if timer.ident is None:  # one that is late must not come after the run
            timer.start()
        return press(td)

    with executor(2, functools.partial(Task, step_s=0.3), seed=0) as env:
        with pytest.raises(KeyboardInterrupt):
            evaluate(policy, env, 2)
        root = env.reset()
        assert not root["done"].any()
        assert env.step(press(root))["next", "reward"].any()


# ---- the command ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_plays_several_envs():
    given = "python:tests.envs.suite_envs:Task"
    team = "python:tests.envs.team_env:pictured"
    command = [
        "evaluate",
        team,
        given,
        "--episodes",
        "2",
        "--workers",
        "2",
        "--max-steps",
        "3",
    ]
    done = CliRunner().invoke(app, [*command, "--json", "-"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert list(found["tasks"]) == [team, given]
    assert found["tasks"][given]["success"]["num_episodes"] == 2
    assert "2 tasks" in CliRunner().invoke(app, command).output


def make_press(_env):
    return press


# ---- batched policies -----------------------------------------------------------------------------


class Slow:
    """Presses 1 for each row alone; takes some time for a call, and notes how many rows it had."""

    def __init__(self, call_s=0.0, row_s=0.0):
        self.call_s, self.row_s, self.sizes = call_s, row_s, []

    def __call__(self, td):
        self.sizes.append(len(td))
        time.sleep(self.call_s + self.row_s * len(td))
        state = td.get("count", torch.zeros(len(td), 1))
        td.set(("next", "count"), state + 1)
        return td.set("action", (state[:, 0] % 2).long())


def test_one_call_acts_for_the_envs_that_wait():
    tasks = {f"task {i}": Task for i in range(6)}
    primer = {"count": torch.zeros(1)}
    alone, together = Slow(), Slow(0.02)
    expected = evaluate(alone, tasks, 4, num_workers=3, primer=primer)
    found = evaluate(
        together, tasks, 4, num_workers=3, primer=primer, max_batch=2, deadline_s=0.5
    )
    assert set(alone.sizes) == {1}
    assert sum(together.sizes) == sum(alone.sizes)
    assert max(together.sizes) == 2
    assert len(together.sizes) < 0.8 * len(alone.sizes)
    # This policy does not depend on who waits together.
    assert found.to_dict() == expected.to_dict()


def test_envs_of_other_observations_or_policies_have_separate_calls():
    policies = {"size 2": Slow(), "size 3": (one := Slow()), "size 4": one}
    how = {"num_workers": 3, "max_batch": 8, "deadline_s": 0.05}
    evaluate(None, suite(), 4, policy_for=lambda task, env: policies[task], **how)
    assert {size for policy in policies.values() for size in policy.sizes} == {1}


@pytest.mark.broken_pool
def test_failures_of_envs_are_recorded_with_batched_policies():
    faults = {1: "raise", 2: "kill", 3: "hang", 4: "reset"}
    options = ExecutorOptions(infos="plain", step_timeout_s=2)
    found = evaluate(
        Slow(0.01),
        {"good": Task, "bad": functools.partial(Task, faults=faults)},
        6,
        num_workers=2,
        max_batch=8,
        deadline_s=0.2,
        options=options,
    )
    assert found["good"].num_failed == 0
    assert sorted(one.episode for one in found["bad"].failures) == [1, 2, 3, 4]


def test_batches_of_an_executor_are_refused():
    with (
        SerialEnv(2, Task) as env,
        pytest.raises(ValueError, match="expected no max_batch with an executor"),
    ):
        evaluate(press, env, 1, max_batch=2)
