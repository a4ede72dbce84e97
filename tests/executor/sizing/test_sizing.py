"""Sizing: the probe measures, and survives failing envs; `envherd size` and "auto" end to end."""

import functools
import json

from tests.extras import skip_without

skip_without("cli")

import pytest
from typer.testing import CliRunner

from envherd.executor import ExecutorOptions, ParallelEnv, WorkerLost, WorkerTimeout
from envherd.executor.cli.app import app
from envherd.executor.sizing import probe as probing
from envherd.executor.sizing.probe import Subject
from envherd.workers.testing import CountingEnv
from tests.envs import sized_envs
from tests.envs.breaking_envs import BROKEN, FaultyEnv

MIB = 2**20


# ---- the probe -------------------------------------------------------------------------------------


def probed(make_env, budget_s=20.0, **options):
    """Return what a probe measures: it ends when it has enough, which takes long only on a busy machine."""
    subject = Subject(make_env, {}, ExecutorOptions(**options))
    with subject.helper():
        return probing.probe(subject, budget_s, lambda _stage: None)


@pytest.mark.long
@pytest.mark.usefixtures("own_helper")
def test_a_probe_measures_memory_and_growth():
    heavy = probed(sized_envs.HeavyMemoryEnv)
    # The rest is what a worker's first steps touch: pages that it no longer shares with the helper.
    assert 48 * MIB <= heavy.worker_bytes < 72 * MIB
    assert 48 * MIB <= heavy.further_env_bytes < 64 * MIB
    assert heavy.grown_per_1000_steps_bytes < MIB
    leaking = probed(sized_envs.LeakingEnv)
    assert 5 * MIB < leaking.grown_per_1000_steps_bytes < 9 * MIB


@pytest.mark.long
@pytest.mark.usefixtures("own_helper")
def test_memory_that_differs_between_episodes_is_taken_in_the_mean():
    # Steps are never enough: 3 s of them.
    breathing = probed(sized_envs.BreathingEnv, budget_s=8.0)
    # 8 or 40 after a reset, plus imports.
    assert 12 * MIB < breathing.worker_bytes < 46 * MIB
    assert 12 * MIB < breathing.further_env_bytes < 38 * MIB


@pytest.mark.long
def test_a_probe_has_a_time_though_one_step_takes_all_of_it():
    slow = probed(functools.partial(sized_envs.SleepingEnv, 0.4), budget_s=0.1)
    assert 1 <= slow.steps_measured <= 8
    assert 0.36 <= slow.step_mean_s < 4  # durations are known to 10 %


@pytest.mark.long
def test_a_probe_distinguishes_waiting_from_computing():
    sleeping, counting = (
        probed(make) for make in (sized_envs.SleepingEnv, CountingEnv)
    )
    assert sleeping.step_mean_s > 2.7e-3  # durations are known to 10 %
    assert sleeping.waits_share > 0.7
    assert counting.waits_share < 0.3
    assert 1 / 6 < counting.end_share < 1 / 2
    assert counting.num_threads == 0
    assert counting.step_p99_s >= counting.step_median_s > 0


@pytest.mark.long
@pytest.mark.broken_pool
def test_probe_has_one_process_with_any_options():
    with pytest.raises(
        WorkerLost, match="step failed: worker 0 ended with exit code 3"
    ):
        probed(lambda: FaultyEnv("exit"), on_worker_loss="restart")
    recycled = probed(CountingEnv, recycle_after=1, max_worker_memory=1)
    assert recycled.worker_bytes > recycled.further_env_bytes


@pytest.mark.long
def test_a_probe_counts_what_threads_of_an_env_compute():
    threaded = probed(sized_envs.ThreadedEnv)
    assert threaded.num_threads == 1
    assert threaded.hidden_cpu_share > 0.5
    # 1 if only its own thread counted; on a busy machine the other one waits too.
    assert threaded.waits_share < 0.85


@pytest.mark.long
@pytest.mark.broken_pool
def test_a_probe_that_hangs_is_ended_with_its_stack(monkeypatch):
    monkeypatch.setattr(probing, "PATIENCE_S", 4.0)
    with pytest.raises(
        WorkerTimeout, match=r"step failed: worker 0 gave no answer within 5.2 s"
    ) as raised:
        probed(lambda: FaultyEnv("sleep", step=3), budget_s=0.3)
    assert "in _sleep" in str(raised.value)


@pytest.mark.long
@pytest.mark.broken_pool
def test_an_env_that_cannot_be_built_twice_in_a_process_is_alone():
    assert probed(sized_envs.SingleEnv).why_alone
    assert not probed(CountingEnv).why_alone


# ---- the command -----------------------------------------------------------------------------------

COUNTING = "python:envherd.workers.testing:CountingEnv"
#: Of the documented JSON.
KEYS = {
    *(
        "schema",
        "env",
        "executor",
        "num_envs",
        "num_workers",
        "mode",
        "steps_per_s",
        "memory_bytes",
        "start_s",
    ),
    *(
        "binding",
        "why",
        "settings",
        "measured",
        "machine",
    ),
}


def size(*arguments, columns=80):
    return CliRunner().invoke(
        app, ["size", *arguments], env={"COLUMNS": str(columns)}, catch_exceptions=False
    )


@pytest.mark.long
def test_size_as_a_table_and_json(tmp_path):
    path = tmp_path / "size.json"
    done = size(COUNTING, "--budget", "60", "--envs", "2", "--json", str(path))
    assert done.exit_code == 0, done.output
    assert "why: " in done.stdout
    assert "…" not in done.stdout
    report = json.loads(path.read_text())
    assert report["schema"] == "envherd.size/8"
    assert set(report) == KEYS
    assert {one["num_workers"] for one in report["settings"]} == {0, 1, 2}
    for one in report["settings"]:
        assert one["refusal"] is None
        assert one["steps_per_s"] > 0
        assert 0 < one["busy_share"] <= 1
        assert one["rounds"] in (5, 15)
        assert (
            one["mode"] == "first-k" or str(f"{one['steps_per_s']:,.0f}") in done.stdout
        )


@pytest.mark.long
def test_json_on_stdout_is_alone_there():
    done = size(
        COUNTING, "--budget", "0.5", "--envs", "2", "--workers", "1", "--json", "-"
    )
    report = json.loads(done.stdout)
    assert (report["num_envs"], report["num_workers"], report["executor"]) == (
        2,
        1,
        "ParallelEnv",
    )
    assert "env-steps/s" in done.stderr


AFFINE = """
import os, sys
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from envherd.executor.cli.app import app
app(["size", "python:envherd.workers.testing:CountingEnv", "--budget", "0.5", "--envs", "4", "--json", "-"])
"""


@pytest.mark.long
def test_an_affinity_is_kept(script_host, tmp_path):
    done = script_host.run_text(AFFINE, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["machine"]["cores"] == 1
    assert report["num_envs"] == 4
    assert [one["num_workers"] for one in report["settings"]] == [0, 1]


@pytest.mark.long
@pytest.mark.broken_pool
@pytest.mark.parametrize(
    ("fault", "at", "expected_text"),
    [
        ("value_error", "step", f"the env raised ValueError: {BROKEN}"),
        ("exit", "step", "step failed: worker 0 ended with exit code 3"),
        ("exit", "construct", "worker 0 ended with exit code 3 in build"),
        ("value_error", "construct", f"the factory raised ValueError: {BROKEN}"),
    ],
)
def test_an_env_that_fails_is_exit_code_1_and_says_where(fault, at, expected_text):
    done = size(
        "python:tests.envs.breaking_envs:FaultyEnv",
        "--env-kwargs",
        json.dumps({"fault": fault, "at": at}),
        "--budget",
        "0.5",
        columns=300,
    )
    assert done.exit_code == 1
    assert expected_text in done.stderr
    assert done.stdout == ""


CTRL_C = """
import os, signal, sys
from envherd.executor.cli.app import app
from envherd.executor.sizing import recommending

def press(text, share):
    if text.startswith(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGINT)

original = recommending.recommend
recommending.recommend = lambda make_env, **given: original(make_env, **{**given, "progress": press})
app(["size", "python:envherd.workers.testing:CountingEnv", "--budget", "60", "--envs", "4"], standalone_mode=True)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "stage",
    [pytest.param("probe: step", marks=pytest.mark.full), "starting", "round 1"],
)
def test_ctrl_c_leaves_nothing_behind(stage, script_host, tmp_path):
    # Which fails where processes are left.
    done = script_host.run_text(CTRL_C, stage, folder=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.strip()) == (
        130,
        "",
        "interrupted",
    )


@pytest.mark.long
def test_auto_measures_and_decides(monkeypatch):
    monkeypatch.setattr("envherd.executor.sizing.recommending.AUTO_BUDGET_S", 0.5)
    with ParallelEnv(4, CountingEnv, num_workers="auto", seed=0) as env:
        assert env.num_envs == 4
        assert 1 <= env.num_workers <= 4
    with ParallelEnv("auto", CountingEnv, num_workers=1, seed=0) as env:
        assert (env.num_workers, env.num_envs > 0) == (1, True)
    with pytest.raises(
        ValueError, match="expected num_envs as an int of at least 1, got str 'many'"
    ):
        ParallelEnv("many", CountingEnv, num_workers="auto")
