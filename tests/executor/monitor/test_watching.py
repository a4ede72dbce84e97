"""Running executors are found and read from other processes; statistics are exported to monitoring tools."""

import json
import os
import re
import subprocess
import sys
from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest

from envherd.executor import ExecutorOptions, ParallelEnv, SerialEnv
from envherd.executor.guests.monitor import (
    Watch,
    plates,
    quantile,
    read_workers,
    stack_of,
)
from envherd.executor.pools.worker_pool import PLATE_LABEL
from envherd.executor.show.loggers import PrometheusCollector, to_scalars
from envherd.executor.start import zygote
from envherd.shm.segment import Segment, create_with_plate, find_plates
from envherd.shm.slab import NUM_BINS, WORDS, bin_of
from envherd.workers.testing import CountingEnv
from tests.extras import needs
from tests.gates import wait_for


def own_plates():
    """Return the nameplates of this process's executors: others may run on this machine."""
    return [one for one in plates() if one.pid == os.getpid()]


def rolled(env, steps=60):
    root = env.reset()
    for _ in range(steps):
        _, root = env.step_and_maybe_reset(env.rand_action(root))


def test_quantiles_of_a_histogram():
    bins = np.zeros(NUM_BINS, np.int64)
    assert quantile(bins, 0.5) is None
    for nanoseconds in [1000] * 98 + [1_000_000] * 2:
        bins[bin_of(nanoseconds)] += 1
    assert quantile(bins, 0.5) == pytest.approx(1e-6, rel=0.15)
    assert quantile(bins, 0.99) == pytest.approx(1e-3, rel=0.15)


class Stepping(np.ndarray):
    """Counts of envs that make a step at every look."""

    def __getitem__(self, ids):
        """Return the counts after one more step of each env."""
        self += 1
        return super().__getitem__(ids)


def test_workers_of_one_env_show_the_same_count_though_it_steps_meanwhile():
    words = {name: np.zeros(2, np.int64) for name in WORDS}
    words |= {
        "env_steps": np.zeros(1, np.int64).view(Stepping),
        "step_bins": np.zeros(2 * NUM_BINS, np.int64),
    }
    serving, spare = read_workers(words, [(0,), (0,)], now_ns=1)
    assert serving.env_steps == spare.env_steps


def test_a_stack_is_complete_though_the_worker_is_stopped_between_two_lines(
    monkeypatch,
):
    log, now_s = os.memfd_create("log"), 0.0
    lines = {
        0.03: b"one\n",
        0.04: b"two\n",
        0.11: b"three\n",
        9.0: b"what the env prints later\n",
    }

    def sleep(seconds):
        nonlocal now_s
        now_s += seconds
        for at_s in [at_s for at_s in lines if at_s <= now_s]:
            os.write(log, lines.pop(at_s))

    monkeypatch.setattr(
        zygote, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: now_s)
    )
    assert zygote.request_stacks(log, lambda: None) == "one\ntwo\nthree\n"
    assert zygote.request_stacks(log, lambda: None) == "(the process did not answer)"
    assert now_s < 3
    os.close(log)


@pytest.mark.slow
def test_statistics_and_a_watch_from_outside_agree():
    with ParallelEnv(3, CountingEnv, num_workers=2, seed=0) as env:
        (plate,) = own_plates()
        with closing(Watch(plate)) as watch:
            assert (watch.pid, watch.env, watch.num_envs) == (os.getpid(), "plain", 3)
            rolled(env)
            # Soon after the last answer.
            wait_for(
                lambda: {inner.phase for inner in env.statistics().workers} == {"idle"}
            )
            view, inside = watch.look(), env.statistics()
        for seen, inner in zip(view.workers, inside.workers, strict=True):
            same = (
                "pid",
                "env_ids",
                "generation",
                "env_steps",
                "resets",
                "step_p50_s",
                "step_p99_s",
                "phase",
            )
            assert [getattr(seen, name) for name in same] == [
                getattr(inner, name) for name in same
            ]
            assert seen.env_steps == 60 * len(seen.env_ids)
            assert 0 < inner.step_p50_s <= inner.step_p99_s < 1
            assert 0 < inner.reset_share <= inner.busy_share <= 1
            assert inner.busy_share + inner.wait_share == pytest.approx(1)
            assert (seen.phase, seen.generation) == ("idle", 0)
            # The executor was ready before the watch began.
            assert seen.steps_per_s > inner.steps_per_s > 0
            assert 0 < seen.uss_bytes <= seen.pss_bytes
        assert "loop.py" in stack_of(inside.workers[0].pid)
    assert own_plates() == []


@pytest.mark.slow
@pytest.mark.broken_pool
def test_a_restarted_worker_is_seen(tmp_path):
    options = ExecutorOptions(on_worker_loss="restart")
    with ParallelEnv(2, CountingEnv, num_workers=2, seed=0, options=options) as env:
        rolled(env, 3)
        before = env.statistics().workers[1].pid
        os.kill(before, 9)
        rolled(env, 3)
        (plate,) = own_plates()
        with closing(Watch(plate)) as watch:
            seen = watch.look().workers[1]
        assert seen.generation == 1
        assert seen.pid == env.statistics().workers[1].pid != before


def test_nameplates_that_are_not_of_executors_are_left_out():
    """Slabs of another version, of another process (a fork holds its parent's), and segments with only the label."""
    plain = {
        "schema": "envherd.slab/2",
        "pid": os.getpid(),
        "namespace": "pid:[1]",
        "made_at": 0,
        "env": "x",
    }
    plain |= {"blocks": [], "words": {}, "nbytes": 0}
    contents = [plain, {**plain, "schema": "envherd.slab/2"}, {**plain, "pid": 1}, {}]
    kept = [create_with_plate(100, PLATE_LABEL, content) for content in contents]
    kept.append(Segment.create(100, PLATE_LABEL))
    found = [
        plate.content for plate in find_plates(PLATE_LABEL) if plate.pid == os.getpid()
    ]
    assert sorted(found, key=str) == sorted(contents, key=str)
    assert own_plates() == []
    for segment in kept:
        segment.close()
    assert [
        plate for plate in find_plates(PLATE_LABEL) if plate.pid == os.getpid()
    ] == []


@pytest.mark.long
def test_executors_of_other_processes_are_found_until_they_end():
    script = (
        "import sys; from envherd.executor import ParallelEnv; from envherd.workers.testing import CountingEnv; "
        "env = ParallelEnv(2, CountingEnv, num_workers=1); print('made', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert other.stdout.readline() == b"made\n"
        (plate,) = (one for one in plates() if one.pid == other.pid)
        with closing(Watch(plate)) as watch:
            assert (watch.num_envs, watch.env) == (2, "plain")
            assert "CountingEnv" in watch.command
            # Soon after its last answer.
            wait_for(lambda: watch.look().workers[0].phase == "idle")
    finally:
        other.kill()
        other.communicate()
    assert other.pid not in {one.pid for one in plates()}
    with pytest.raises(OSError, match=str(other.pid)):
        Watch(plate)


@needs("cli")
@pytest.mark.slow
def test_top_once_as_a_table_and_as_json():
    from typer.testing import CliRunner

    from envherd.executor.cli.app import app

    runner = CliRunner()
    with ParallelEnv(2, CountingEnv, num_workers=2, seed=0) as env:
        rolled(env)
        # The machine's first executor may belong to another test and end now.
        own = ["--pid", str(os.getpid())]
        done = runner.invoke(
            app,
            ["top", "--once", "--interval", "0.1", "--stack", "0", *own],
            env={"COLUMNS": "200"},
        )
        assert done.exit_code == 0
        assert f"process {os.getpid()}" in done.output
        assert "worker" in done.output
        assert "most recent call first" in done.output
        own_stack = ["top", "--once", "--interval", "0.1", "--stack", "0", *own]
        done = runner.invoke(app, own_stack, env={"COLUMNS": "40"})
        # Paths are not broken.
        assert re.search(r'File "[^"\n]*entry\.py", line \d+', done.output)
        done = runner.invoke(
            app, ["top", "--once", "--json", "--interval", "0.1", *own]
        )
        (one,) = json.loads(done.stdout)["executors"]
        assert one["num_envs"] == 2
        assert [worker["env_steps"] for worker in one["workers"]] == [60, 60]
        assert (
            runner.invoke(
                app, ["top", "--once", "--interval", "0.1", "--pid", "1"]
            ).exit_code
            == 2
        )
        for form in (["--once"], ["--once", "--json"], ["--json"], []):
            done = runner.invoke(
                app, ["top", "--interval", "0.1", "--stack", "9", *form, *own]
            )
            assert done.exit_code == 2
            assert (
                "expected --stack as a row of the table, which has 2 workers counted from 0, got 9"
                in done.stderr
            )
    done = runner.invoke(app, ["top", "--once", "--json", "--interval", "0.1"])
    shown = json.loads(done.stdout)
    assert shown["schema"] == "envherd.top/2"
    # Other processes may have some.
    assert os.getpid() not in {one["pid"] for one in shown["executors"]}


@needs("cli")
@pytest.mark.slow
def test_top_into_a_file_writes_each_reading(tmp_path):
    path = tmp_path / "log"
    command = [
        sys.executable,
        "-m",
        "envherd",
        "top",
        "--interval",
        "0.1",
        "--pid",
        str(os.getpid()),
    ]
    with (
        ParallelEnv(1, CountingEnv),
        path.open("w") as log,
        subprocess.Popen(command, stdout=log) as top,
    ):
        try:
            wait_for(lambda: path.read_text().count(f"process {os.getpid()}") >= 2)
        finally:
            top.kill()


def test_statistics_as_scalars():
    with SerialEnv(2, CountingEnv, seed=0) as env:
        rolled(env, 5)
        statistics = env.statistics()
    scalars = to_scalars(statistics)
    assert (scalars["envherd/env_steps"], scalars["envherd/worker0/env_steps"]) == (
        10.0,
        10.0,
    )
    assert "envherd/worker0/pid" not in scalars
    assert set(to_scalars(statistics, "x")) == {
        tag.replace("envherd/", "x/") for tag in scalars
    }


@needs("prometheus")
def test_prometheus_collects_until_the_executor_is_closed():
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    with (
        SerialEnv(2, CountingEnv, seed=0) as env,
        SerialEnv(1, CountingEnv, seed=0) as other,
    ):
        registry.register(PrometheusCollector(env))
        registry.register(PrometheusCollector(other, "other"))
        rolled(env, 5)
        assert registry.get_sample_value("envherd_env_steps_total") == 10
        assert (
            registry.get_sample_value("envherd_worker_env_steps_total", {"worker": "0"})
            == 10
        )
        assert registry.get_sample_value("other_env_steps_total") == 0
        text = generate_latest(registry).decode()
        assert "# TYPE envherd_worker_busy_s_total counter" in text
        assert "# TYPE envherd_worker_busy_share gauge" in text
    assert generate_latest(registry) == b""
