"""Running executors are found and read from outside; statistics go to what watches training."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys
import urllib.error
import urllib.request

import numpy as np
import pytest

from envherd.executor import ParallelEnv, SerialEnv
from envherd.executor.exporting import MetricsServer, to_dict, to_prometheus, to_scalars, write_scalars
from envherd.executor.monitor.loads import quantile
from envherd.executor.monitor.running import FOLDER_VARIABLE, listings, stale_files
from envherd.executor.monitor.watching import Watch, stack_of
from envherd.shm.slab import NUM_BINS, bin_of
from envherd.workers.testing import CountingEnv
from tests.extras import needs
from tests.gates import wait_for


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "running"))


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


@pytest.mark.slow
def test_statistics_and_a_watch_from_outside_agree():
    with ParallelEnv(3, CountingEnv, num_workers=2, seed=0) as env:
        (listing,) = listings()
        assert (listing.pid, listing.env, listing.blocks) == (os.getpid(), "plain", ((0, 1), (2,)))
        mode = stat.S_IMODE(listing.path.stat().st_mode), stat.S_IMODE(listing.path.parent.stat().st_mode)
        assert mode == (0o600, 0o700)
        watch = Watch(listing)
        rolled(env)
        wait_for(lambda: {told.phase for told in env.statistics().workers} == {"idle"})  # soon after the last answer
        view, inside = watch.look(), env.statistics()
        watch.close()
        for seen, told in zip(view.workers, inside.workers, strict=True):
            assert (seen.load.pid, seen.load.env_steps, seen.load.resets) == (told.pid, told.env_steps, told.resets)
            assert seen.load.env_steps == 60 * len(seen.env_ids)
            assert seen.load.step_p50_s == told.step_p50_s
            assert 0 < told.step_p50_s <= told.step_p99_s < 1
            assert 0 < told.reset_share <= told.busy_share <= 1
            assert told.busy_share + told.wait_share == pytest.approx(1)
            assert (seen.load.phase, seen.load.restarts) == ("idle", 0)
            assert seen.steps_per_s > 0
            assert 0 < seen.uss_bytes <= seen.rss_bytes
        assert "loop.py" in stack_of(inside.workers[0].pid)
    assert list(listings()) == []
    assert not listing.path.exists()


@pytest.mark.slow
@pytest.mark.broken_pool
def test_a_restarted_worker_is_seen(tmp_path):
    from envherd.executor import ExecutorOptions

    options = ExecutorOptions(on_worker_loss="restart")
    with ParallelEnv(2, CountingEnv, num_workers=2, seed=0, options=options) as env:
        rolled(env, 3)
        before = env.statistics().workers[1].pid
        os.kill(before, 9)
        rolled(env, 3)
        (listing,) = listings()
        watch = Watch(listing)
        load = watch.look().workers[1].load
        watch.close()
        assert load.restarts == 1
        assert load.pid == env.statistics().workers[1].pid != before


def write_listing(path, **changes):
    """Write the file of an executor in this process that has gone."""
    gone = {"schema": "envherd.running/1", "pid": os.getpid(), "namespace": os.readlink("/proc/self/ns/pid")}
    gone |= {"started_at": 1, "made_at": 0, "env": "x", "blocks": [], "fd": 0, "inode": 0, "words": {}, "nbytes": 0}
    path.parent.mkdir(mode=0o700, exist_ok=True)
    path.write_text(json.dumps({**gone, **changes}))


def test_files_of_what_has_gone_are_not_believed(tmp_path):
    folder = tmp_path / "running"
    write_listing(folder / "7-1.json")
    write_listing(folder / "7-2.json", pid=2**22 + 1)
    write_listing(folder / "7-3.json", namespace="pid:[1]")
    assert {path.name for path in stale_files()} == {"7-1.json", "7-2.json"}
    assert list(listings()) == []
    assert [path.name for path in folder.iterdir()] == ["7-3.json"]


def test_files_that_are_not_of_executors_are_left_alone(tmp_path):
    folder = tmp_path / "running"
    write_listing(folder / "results.json")
    write_listing(folder / "7-1.json", schema="envherd.running/2")
    (folder / "8-1.json").write_text("{}")
    (folder / "package.json").write_text('{"name": "x"}')
    kept = sorted(path.name for path in folder.iterdir())
    assert stale_files() == []
    assert list(listings()) == []
    assert sorted(path.name for path in folder.iterdir()) == kept


@pytest.mark.parametrize("error", [errno.EMFILE, errno.EACCES])
def test_an_executor_of_which_nothing_can_be_found_out_stays_listed(tmp_path, monkeypatch, error):
    path = tmp_path / "running" / "7-1.json"
    write_listing(path)

    def fail(pid):
        raise OSError(error, "no")

    monkeypatch.setattr("envherd.executor.monitor.running.start_of", fail)
    assert stale_files() == []
    assert list(listings()) == []
    assert path.exists()


@pytest.mark.slow
def test_a_folder_that_others_may_write_to_is_left_alone(tmp_path):
    folder = tmp_path / "running"
    folder.mkdir()
    folder.chmod(0o777)
    with ParallelEnv(1, CountingEnv, seed=0) as env:
        rolled(env, 2)
    assert list(folder.iterdir()) == []
    assert list(listings()) == []


@pytest.mark.slow
def test_a_killed_owner_is_forgotten(tmp_path):
    script = (
        "import os, signal; from envherd.executor import ParallelEnv; from envherd.workers.testing import CountingEnv; "
        "env = ParallelEnv(1, CountingEnv); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", script], check=False)
    assert done.returncode == -9
    assert len(list((tmp_path / "running").iterdir())) == 1
    assert list(listings()) == []
    assert list((tmp_path / "running").iterdir()) == []


@needs("cli")
@pytest.mark.slow
def test_top_once_as_a_table_and_as_json():
    from typer.testing import CliRunner

    from envherd.executor.cli.app import app

    runner = CliRunner()
    with ParallelEnv(2, CountingEnv, num_workers=2, seed=0) as env:
        rolled(env)
        done = runner.invoke(app, ["top", "--once", "--interval", "0.1", "--stack", "0"], env={"COLUMNS": "200"})
        assert done.exit_code == 0
        assert f"process {os.getpid()}" in done.output
        assert "worker" in done.output
        assert "most recent call first" in done.output
        done = runner.invoke(app, ["top", "--once", "--json", "--interval", "0.1", "--pid", str(os.getpid())])
        (one,) = json.loads(done.stdout)["executors"]
        assert one["num_envs"] == 2
        assert [worker["env_steps"] for worker in one["workers"]] == [60, 60]
        assert runner.invoke(app, ["top", "--once", "--interval", "0.1", "--pid", "1"]).exit_code == 2
    done = runner.invoke(app, ["top", "--once", "--json", "--interval", "0.1"])
    assert json.loads(done.stdout) == {"schema": "envherd.top/1", "executors": []}


class Writer:
    """Keeps what is written, with `SummaryWriter`'s method."""

    def __init__(self):
        self.written = {}

    def add_scalar(self, tag, scalar_value, global_step=None):
        self.written[tag, global_step] = scalar_value


def test_statistics_for_json_and_tensorboard():
    with SerialEnv(2, CountingEnv, seed=0) as env:
        rolled(env, 5)
        statistics = env.statistics()
    assert json.loads(json.dumps(to_dict(statistics)))["env_steps"] == 10
    writer = Writer()
    write_scalars(writer, statistics, step=7)
    assert writer.written["envherd/env_steps", 7] == 10.0
    assert writer.written["envherd/worker0/env_steps", 7] == 10.0
    assert set(to_scalars(statistics, "x")) == {tag.replace("envherd/", "x/") for tag, _ in writer.written}


@pytest.mark.slow
def test_prometheus_is_served_on_loopback_until_closed():
    with ParallelEnv(2, CountingEnv, num_workers=1, seed=0) as env:
        with pytest.raises(ValueError, match=r"expected a loopback address, got '0\.0\.0\.0'"):
            MetricsServer(env, host="0.0.0.0")
        with MetricsServer(env) as server:
            rolled(env, 5)
            url = f"http://127.0.0.1:{server.port}/metrics"
            text, idle = "", '\nenvherd_worker_phase{worker="0",phase="idle"} 1.0\n'
            while idle not in text:  # a worker answers first
                text = urllib.request.urlopen(url).read().decode()
            assert "envherd_env_steps_total 10.0\n" in text
            assert [line for line in text.splitlines() if line.startswith("# TYPE")] == [
                line for line in to_prometheus(env.statistics()).splitlines() if line.startswith("# TYPE")
            ]
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(url.replace("metrics", "else"))
            refused.value.close()
            assert refused.value.code == 404
            env.close()
            with pytest.raises(urllib.error.HTTPError) as closed:
                urllib.request.urlopen(url)
            closed.value.close()
            assert closed.value.code == 503
