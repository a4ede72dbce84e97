"""Every example runs like a user's script, in an empty folder."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import command, descendants
from tests.extras import needs

EXAMPLES = Path(__file__).parents[1] / "examples"
TESTED = {
    "agents_hanging_grader",
    "agents_text_world",
    "async_rollout",
    "branch_explore",
    "branch_groups",
    "ctypes_env",
    "custom_env",
    "evaluate_suite",
    "first_steps",
    "gymnasium_vector_env",
    "meltingpot_ippo",
    "meltingpot_rollout",
    "meltingpot_torchrl",
    "ppo_cartpole",
    "ray_rollouts",
    "rebuild_tasks",
    "rllib_meltingpot",  # run by tests/executor/facades/test_rllib.py
    "sb3_meltingpot",
    "torchrl_collectors",
    "torchrl_ppo",
    "uncopyable_policy",
    "vmas_simulator",
    "vtrace_cartpole",
}


def test_no_example_is_forgotten():
    assert {
        path.stem for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb")
    } == TESTED


@pytest.mark.usefixtures("script_host")
def test_no_test_process_sees_the_scripts_of_others():
    assert not [
        name for name in map(command, descendants()) if "script_host.py" in name
    ]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "short", "number"),
    [
        ("branch_explore", ("--rounds", "16"), r"(\d+) cells"),
        ("branch_groups", ("--groups", "5"), r"gradients ([\d.]+)"),
    ],
)
def test_branches_do_better_than_the_same_steps_without(
    run_example, name, short, number
):
    without, with_branches = map(float, re.findall(number, run_example(name, *short)))
    assert with_branches > without


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "short", "expected"),
    [
        ("evaluate_suite", ("--episodes", "3"), r"all tasks .*\(\d/9\)"),
        (
            "rebuild_tasks",
            ("--tasks", "8", "--megabytes", "4"),
            r"tasks 4-7: .*\n.* scenes 16 MB",
        ),
        ("agents_text_world", (), r"32 episodes, mean score 1\.00"),
        ("agents_hanging_grader", (), "24 answers: 6 right, 12 wrong, 6 not graded"),
        pytest.param(
            "vmas_simulator",
            ("--rows", "4"),
            r"\(1, 120, 4\) transitions[\s\S]*\b[1-9]\d* episodes were truncated",
            marks=needs("vmas"),
        ),
        pytest.param(
            "sb3_meltingpot",
            ("--updates", "2"),
            r"2 envs, 4 rows; a row sees \(40, 40, 3\) and has 8 actions"
            r"[\s\S]*256 agent steps in 2 updates; episodes of \[60\] steps",
            marks=needs("sb3", "meltingpot"),
        ),
        pytest.param(
            "meltingpot_rollout",
            (),
            r"\(4, 200, 144, 192, 3\) torch.uint8\n"
            r".* \(4, 200, 7, 88, 88, 3\) torch.uint8\n"
            r".* \(4, 200, 7\) torch.int64\n"
            # Random players do eat apples.
            r"mean return per agent:(?=.*[1-9])(?: [\d.]+){7}\n",
            marks=[needs("meltingpot"), pytest.mark.full],
        ),
        pytest.param(
            "torchrl_collectors",
            (),
            r"(?:collected 400 frames[\s\S]*){2}"
            r"800 frames kept; a sample: observation \(32, 4\)",
            marks=[needs("torchrl"), pytest.mark.full],
        ),
        (
            "ctypes_env",
            (),
            (
                r"the contract holds: rules \(1, 5, 6, 7, 3, 2, 4, 8\), \d+ episodes ended"
                r"[\s\S]*\b4000 steps: [1-9]\d* crashes, [1-9]\d* flights"
            ),
        ),
    ],
)
def test_an_example_reports_what_it_has_done(run_example, name, short, expected):
    assert re.search(expected, run_example(name, *short))


@needs("meltingpot")
@pytest.mark.long
@pytest.mark.parametrize(
    "how",
    [(), pytest.param(("--separate",), marks=pytest.mark.full)],
    ids=["shared", "separate"],
)
def test_ippo_trains_saves_and_continues(script_host, tmp_path, how):
    short = (
        "--substrate",
        "prisoners_dilemma_in_the_matrix__repeated",
        "--episode",
        "100",
        "--seed",
        "1",
        *how,
    )
    command = [EXAMPLES / "meltingpot_ippo.py", *short, "--checkpoint", "agents.pt"]
    printed = []
    for more in (("--steps", "400"), ("--steps", "800", "--asynchronous")):
        run = script_host.run(*command, *more, folder=tmp_path, output=tmp_path)
        assert run.returncode == 0, run.stderr
        printed.append(
            [int(number) for number in re.findall(r"steps +(\d+)  return", run.stdout)]
        )
    assert printed == [[400], [800]]
    curve = json.loads((tmp_path / "agents.json").read_text())
    assert [steps for steps, _, _ in curve] == [400, 800]
    assert 0 < curve[0][2] < curve[1][2], "seconds go on where the first run ended"


@needs("meltingpot")
@pytest.mark.full
@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("arguments", "has_learned"),
    [
        ("--steps 60000", lambda returns: returns[-1] > 1.5 * returns[0]),
        (
            "--substrate prisoners_dilemma_in_the_matrix__repeated --episode 1000 --sparse --steps 1500000",
            lambda returns: returns[-1] > 5.0,  # random actions give 1.5
        ),
    ],
    ids=["harvest", "a game of two"],
)
def test_ippo_learns(run_example, arguments, has_learned):
    printed = run_example("meltingpot_ippo", *arguments.split(), timeout_s=1100)
    returns = re.findall(r"return per agent +([\d.]+)", printed)
    assert has_learned([*map(float, returns)]), returns


@needs("meltingpot", "torchrl")
@pytest.mark.long
@pytest.mark.parametrize(
    "steps",
    [800, pytest.param(40_000, marks=[pytest.mark.full, pytest.mark.timeout(1200)])],
    ids=str,
)
def test_torchrls_losses_train_on_melting_pot(run_example, steps):
    printed = run_example(
        "meltingpot_torchrl", "--steps", str(steps), "--episode", "200", timeout_s=1100
    )
    found = re.findall(r"steps +(\d+)  return per agent +([\d.]+)", printed)
    assert found[-1][0] == str(steps)
    if steps > 800:
        assert float(found[-1][1]) > 1.5 * float(found[0][1])


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("ppo_cartpole", r" over the last [2-9]\d episodes"),
        pytest.param("torchrl_ppo", "", marks=needs("torchrl")),
    ],
)
def test_ppo_solves_cartpole(run_example, name, more):
    printed = run_example(name, "--seed", "1", timeout_s=560)
    solved = re.search(rf"^solved: mean return ([\d.]+){more}", printed, re.MULTILINE)
    assert solved is not None, printed
    assert float(solved.group(1)) >= 475


@pytest.mark.long
@pytest.mark.parametrize(
    "frames",
    [2048, pytest.param(1_000_000, marks=[pytest.mark.full, pytest.mark.timeout(600)])],
    ids=str,
)
def test_vtrace_learns_from_older_data(run_example, frames):
    printed = run_example("vtrace_cartpole", "--frames", str(frames), timeout_s=560)
    found = re.search(r"^Return ([\d.]+) after ([\d,]+) frames", printed, re.MULTILINE)
    assert found is not None, printed
    if frames == 2048:
        assert found.group(2) == "2,048"
    else:
        assert float(found.group(1)) >= 475
    assert re.search(
        r"^Bound by the \w+; the data were [\d.]+ versions old", printed, re.MULTILINE
    )


@pytest.mark.long
def test_ppo_says_when_it_fails(tmp_path):
    command = [sys.executable, str(EXAMPLES / "ppo_cartpole.py"), "--max-steps", "1024"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "not solved" in done.stdout


@needs("torchrl")
@pytest.mark.full
@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_policy_that_cannot_be_copied_is_trained(run_example):
    printed = run_example("uncopyable_policy", timeout_s=380)
    returns = [
        float(number) for number in re.findall(r"mean return +([\d.]+)", printed)
    ]
    assert len(returns) == 4
    assert returns[-1] > 100


@pytest.mark.long
def test_custom_env_refuses_instances_and_runs_its_factory(run_example):
    printed = run_example("custom_env")
    refusals = [line for line in printed.splitlines() if line.startswith("refused:")]
    assert len(refusals) == 2
    assert "got an env" in refusals[0] or "got __main__.Marble" in refusals[0]
    assert "captured the variable `built_here`" in refusals[1]
    rows = re.findall(
        r"^(random pushes|pushing back) +wind ([\d.]+) +falls +(\d+) +cut off +(\d+)$",
        printed,
        re.MULTILINE,
    )
    falls = {(name, wind): int(count) for name, wind, count, _ in rows}
    assert len(falls) == 8
    assert all(
        falls["pushing back", wind] < falls["random pushes", wind]
        for wind in ("0.02", "0.04", "0.08", "0.16")
    )
    assert falls["random pushes", "0.02"] < falls["random pushes", "0.16"], (
        "each env got a wind of its own"
    )


def test_the_page_on_envs_of_ones_own_has_the_example_itself():
    example = (EXAMPLES / "ctypes_env.py").read_text()
    page = (EXAMPLES.parent / "docs" / "custom_envs.md").read_text()
    blocks = [
        block
        for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL)
        if "class Drone" in block
    ]
    assert len(blocks) == 2
    assert all(block.strip() in example for block in blocks)
    assert sum(len(block.strip().splitlines()) for block in blocks) < 60


@needs("gymnasium", "media", "progress", "box2d")
@pytest.mark.skipif(
    importlib.util.find_spec("nbclient") is None, reason="needs nbclient and ipykernel"
)
@pytest.mark.long
def test_the_notebook_runs_in_a_kernel(tmp_path):
    notebook = Path(shutil.copy(EXAMPLES / "first_steps.ipynb", tmp_path))
    homes = {
        name: str(tmp_path / "jupyter")
        for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR")
    }
    code = "from nbclient.cli import main; main()"
    command = [
        sys.executable,
        "-c",
        code,
        "--inplace",
        "--kernel_name=python3",
        "--timeout=120",
        str(notebook),
    ]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, **homes},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    cells = [
        cell
        for cell in json.loads(notebook.read_text())["cells"]
        if cell["cell_type"] == "code"
    ]
    assert [cell["execution_count"] for cell in cells] == list(range(1, 1 + len(cells)))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    printed = "".join(
        text
        for output in outputs
        for text in output.get("text", ())
        if output["name"] == "stdout"
    )
    assert re.search(
        r"^[1-9]\d* episodes, mean return \d+\.\d, mean length \d+\.\d$",
        printed,
        re.MULTILINE,
    )


@pytest.mark.long
def test_async_rollout_shows_both_ways_to_step(run_example):
    printed = run_example("async_rollout", "--transitions", "1800")
    rates = [float(rate) for rate in re.findall(r"(\d+) transitions/s", printed)]
    assert len(rates) == 2
    assert min(rates) > 0
    per_env = [
        int(count) for count in re.findall(r"per env: \[(.*)\]", printed)[0].split(", ")
    ]
    assert len(per_env) == 12
    assert min(per_env) > 0
    assert sum(per_env) >= 1800


@pytest.mark.long
def test_gymnasium_vector_env_prints_returns(run_example):
    printed = run_example("gymnasium_vector_env")
    num_episodes, mean_return = re.match(
        r"(\d+) episodes in 1200 steps, mean return ([\d.]+)", printed
    ).groups()
    assert int(num_episodes) > 20
    assert 10 < float(mean_return) < 60, (
        "random actions keep the pole up for some 20 steps"
    )
