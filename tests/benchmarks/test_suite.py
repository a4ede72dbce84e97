"""The suite: summaries of known slots, targets, a tiny run from the shell with two peers, and the page of it."""

import io
import json
import subprocess
import sys

from tests.extras import needs, skip_without

skip_without("cli")

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from benchmarks import bounds, ours, peers
from benchmarks.__main__ import bench
from benchmarks.page import render
from benchmarks.pools import Contender, Job, Pool
from benchmarks.report import sheet_of_targets, short, to_markdown
from benchmarks.rounds import Entry, Turn
from benchmarks.runner import Slot
from benchmarks.suite import NAMES, SCHEMA, Suite, SuiteRequest, load, save
from benchmarks.summary import summarise
from benchmarks.targets import judge
from benchmarks.work import SteadyFactory, drawn_iterations
from benchmarks.workloads import ALL, WORKLOADS

app = typer.Typer()
app.command()(bench)


def slot(steps: int, wall_ms: float, run_ms: float) -> Slot:
    """Return a slot of one pool."""
    return Slot(
        steps=steps, wall_ns=int(wall_ms * 1e6), run_ns=int(run_ms * 1e6), parent_run_ns=int(run_ms * 5e5), delay_ns=0,
        others=0.0, episodes=-1, batch_us=[float(i) for i in range(101)], num_calls=steps, num_processes=2,
    )  # fmt: skip


def unbuilt(_job: Job) -> Pool:
    raise AssertionError("it is not built here")


def entry(name: str, slots: list[Slot], *, is_open: bool = True) -> Entry:
    """Return an entry that ran."""
    job = Job(make_env=SteadyFactory())
    return Entry(
        Contender(name=name, build=unbuilt),
        job,
        [Turn(one, is_open, 0.0) for one in slots],
    )


def summary(*, is_open: bool = True) -> dict:
    fast = entry(
        "fast",
        [slot(1000, 100, 50), slot(2000, 100, 100), slot(1000, 100, 50)],
        is_open=is_open,
    )
    slow = entry(
        "slow",
        [slot(100, 100, 100), slot(200, 100, 200), slot(50, 100, 50)],
        is_open=is_open,
    )
    gone = entry("gone", [])
    gone.failure = "not installed"
    return summarise(
        [fast, slow, gone], "fast", judged_by="rounds", pressure_at_rest=0.0
    )


def test_ratios_are_those_of_the_rounds():
    slow = summary()["slow"]
    assert slow["wall_ratio"] == pytest.approx([10.0, 10.0, 15.0])
    assert slow["cpu_ratio"] == pytest.approx([20.0, 20.0, 20.0])
    assert slow["cpu_us_per_step"] == pytest.approx(1000.0)
    assert slow["batch_us"] == pytest.approx([10.0, 50.0, 99.0])
    assert summary()["gone"]["status"] == "not installed"
    closed = summary(is_open=False)["slow"]
    assert (closed["wall_ratio"], closed["cpu_ratio"], closed["noisy_slots"]) == (
        None,
        slow["cpu_ratio"],
        3,
    )


@pytest.mark.parametrize(
    ("wall", "cpu", "expected"),
    [
        ([28.0, 30.0, 32.0], [1.0, 1.0, 1.0], ("met", "wall clock")),
        ([10.0, 24.9, 32.0], [90.0, 90.0, 90.0], ("not met", "wall clock")),
        (None, [25.0, 25.0, 25.0], ("met", "CPU")),
        (None, [24.0, 24.0, 24.0], ("not met", "CPU")),
    ],
)
def test_a_target_is_judged_by_the_clock_where_that_may_be(wall, cpu, expected):
    mine = {
        "status": "measured",
        "cpu_ratio": [1, 1, 1],
        "wall_ratio": wall and [1, 1, 1],
    }
    theirs = {"status": "measured", "cpu_ratio": cpu, "wall_ratio": wall}
    results = {
        "workloads": {
            "tiny": {"contenders": {ours.AUTO: mine, peers.GYMNASIUM_ASYNC: theirs}}
        }
    }
    (verdict,) = [
        one
        for one in judge(results)
        if one.text.startswith("tiny:") and "Gymnasium" in one.text
    ]
    assert (verdict.status, verdict.basis) == expected


def test_targets_name_contenders_that_their_workload_has():
    known = {one.name: set(one.contenders) for one in WORKLOADS}
    assert len(known) == len(NAMES)
    for one in WORKLOADS:
        assert set(one.contenders) <= set(ALL), one.name
        assert one.reference in one.contenders
        assert len(one.contenders) == len(known[one.name]), (
            f"{one.name} has a contender twice"
        )
    missing = [
        one.measured
        for one in judge(
            {
                "workloads": {
                    n: {"contenders": {one: {} for one in c}} for n, c in known.items()
                }
            }
        )
    ]
    assert not [text for text in missing if text.endswith("was not run")]
    assert {one.status for one in judge({})} == {"not measured"}


@pytest.mark.parametrize("law", ["even", "lognormal", "spikes"])
def test_work_has_the_mean_that_was_asked_for(law):
    lengths = drawn_iterations(law, 5000.0)
    assert lengths.mean() == pytest.approx(5000.0, rel=0.001)
    assert (lengths == drawn_iterations(law, 5000.0)).all()
    if law == "spikes":
        assert lengths.max() / lengths.min() == pytest.approx(100.0, rel=0.01)


def test_results_are_kept_strangers_refused_and_other_files_not_touched(tmp_path):
    path = tmp_path / "bench.json"
    (tmp_path / "bench.tmp").write_text("precious")
    save({"schema": SCHEMA}, path)
    assert load(path) == {"schema": SCHEMA}
    assert {one.name: one.read_text() for one in tmp_path.iterdir() if one != path} == {
        "bench.tmp": "precious"
    }
    path.write_text("{}")
    for stranger in ("bench.json", "none.json"):
        with pytest.raises(ValueError, match="expected results"):
            load(tmp_path / stranger)


def benchmarks(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the suite's command."""
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Run one workload for one round with two peers, once for all tests of this file."""
    folder = tmp_path_factory.mktemp("bench")
    path = folder / "bench.json"
    arguments = (
        "--quick",
        "--only",
        "spikes",
        "--peers",
        "gymnasium,sb3",
        "--rounds",
        "1",
    )
    done = benchmarks(*arguments, "--json", str(path), "--plots", str(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    return done, path


@needs("bench")
@pytest.mark.long
def test_a_tiny_run_measures_everyone(run):
    done, path = run
    workload = json.loads(path.read_text())["workloads"]["spikes"]
    rows = workload["contenders"]
    wanted = {
        bounds.IDEAL,
        bounds.SERIAL,
        ours.OURS,
        ours.FIRST_K,
        peers.GYMNASIUM_ASYNC,
        peers.SB3_SUBPROC,
    }
    assert wanted <= set(rows)
    assert peers.TORCHRL_PARALLEL not in rows, "it was not asked for"
    for name in wanted:
        assert rows[name]["status"] == "measured", rows[name]
        assert rows[name]["steps_per_s"] > 0
        # Steps of 200 us on average, calibrated under whatever load there is: microseconds, and of one step.
        assert 20 < rows[name]["cpu_us_per_step"] < 40_000, name
        assert name in done.stdout
    assert rows[peers.GYMNASIUM_ASYNC]["processes"] == 8
    assert "at least 0.8 of the measured ideal" in done.stdout


@needs("bench")
def test_the_readmes_picture_has_a_bar_for_each_ratio_that_was_measured():
    from benchmarks.plots import THEMES, summary

    peer = {"wall_ratio": [1.9, 2.0, 2.1]}
    rows = {
        peers.GYMNASIUM_ASYNC: peer,
        peers.TORCHRL_PARALLEL: peer,
        peers.SB3_SUBPROC: {"wall_ratio": None},
    }
    for theme in THEMES.values():
        figure = summary(
            {
                "workloads": {
                    "tiny": {"contenders": rows},
                    "spikes": {"contenders": rows},
                }
            },
            *theme,
        )
        assert figure is not None
        assert [bar.get_width() for bar in figure.axes[0].patches] == [1.0, 1.0]
        assert summary({"workloads": {"spikes": {"contenders": rows}}}, *theme) is None


@needs("bench")
@pytest.mark.long
def test_the_page_says_what_was_measured_and_what_was_not(run):
    results = load(run[1])
    text = render(results)
    assert results["machine"]["cpu"] in text
    assert (
        "### spikes: 8 envs of 0.2 ms on average, 1 % of steps 100 times the others"
        in text
    )
    (row,) = [
        line
        for line in text.splitlines()
        if line.startswith(f"| {peers.SB3_SUBPROC} |")
    ]
    ratio = results["workloads"]["spikes"]["contenders"][peers.SB3_SUBPROC][
        "cpu_ratio"
    ][1]
    assert f"{short(ratio)}x" in row
    assert to_markdown(sheet_of_targets(results)).count("was not run") > 10
    assert "The gate never opened" in text or "passed the gate" in text


@needs("bench")
@pytest.mark.slow
def test_a_run_goes_on_where_it_was(run):
    _, path = run
    before = load(path)
    console = Console(file=io.StringIO(), width=200)
    results = Suite(
        SuiteRequest(names=("spikes",), is_resumed=True, path=path), console
    ).run()
    assert "spikes: there already" in console.file.getvalue()
    assert results == before


@needs("bench")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--only", "tiny,nothing"), "expected --only to be one of tiny,"),
        (("--only", "cartpol"), "Did you mean cartpole"),
        (("--peers", "gym"), "expected --peers to be one of gymnasium,"),
        (
            ("--render", "--json", "/nowhere.json"),
            "error: bench failed: expected results in /nowhere.json",
        ),
        (
            ("--render", "--json", "-"),
            "expected a file as --json with --render, got '-'",
        ),
        (
            ("--resume", "--json", "-"),
            "expected a file as --json with --resume, got '-'",
        ),
        (("--plots", __file__), "is a file"),
        (("--plots", "none/charts"), "there is no folder 'none'"),
        (("--json", "none/bench.json"), "there is no folder 'none'"),
    ],
)
def test_wrong_wishes_are_refused(arguments, message):
    done = CliRunner().invoke(app, [*arguments], env={"COLUMNS": "400"})
    assert done.exit_code == 2
    assert message in done.stderr


@needs("bench")
@pytest.mark.slow
def test_results_before_an_interrupt_are_printed(tmp_path, monkeypatch):
    def interrupted(suite, name):
        if name == "spikes":
            raise KeyboardInterrupt
        suite.results["workloads"][name] = {"contenders": {}}

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("benchmarks.suite.Suite._measure", interrupted)
    done = CliRunner().invoke(
        app, ["--only", "tiny,sleep", "--only", "spikes", "--json", "-"]
    )
    assert done.exit_code == 130, done.stderr
    assert [*json.loads(done.stdout)["workloads"]] == ["tiny", "sleep"]
    assert list(tmp_path.iterdir()) == []


@needs("bench")
def test_the_list_explains_every_name():
    done = CliRunner().invoke(app, ["--list"])
    assert done.exit_code == 0
    assert ".md" not in done.stdout  # an installed package has no such file
    assert all(name in done.stdout for name in NAMES)
