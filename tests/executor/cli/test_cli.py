"""The command line: its output, files and exit codes in real runs."""

import importlib.metadata
import json
import os
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

from tests.extras import needs, skip_without

skip_without("cli", "media")

import pytest
import torch
from PIL import Image
from tensordict import TensorDict
from typer.testing import CliRunner, Result

from envherd.executor.cli.app import app
from envherd.executor.cli.commands import (
    RolloutStore,
    noting_interrupt,
)

COUNTING = "python:envherd.workers.testing:CountingEnv"
TEXT = "python:tests.envs.counting_envs:TextEnv"
PAIR = "python:tests.envs.counting_envs:PairEnv"

USER_MODULE = """
    import dataclasses
    import os
    import pathlib

    import numpy as np

    from envherd.shm.specs import Box
    from envherd.workers.testing import CountingEnv


    class Breaks(CountingEnv):
        def __init__(self):
            super().__init__(length=10)

        def step(self, action):
            if self.num_steps == 4:
                raise RuntimeError("the axle broke")
            return super().step(action)


    class Says(CountingEnv):
        '''Creates a file after 20 steps, for which the test waits.'''

        def __init__(self):
            super().__init__()
            self.total = 0

        def step(self, action):
            self.total += 1
            if self.total == 20:
                pathlib.Path(os.environ["ENVHERD_TEST_MARK"]).touch()
            return super().step(action)


    class Forgets(CountingEnv):
        '''Each episode is one step longer than the one before, whatever the seed.'''

        def reset(self, *args, **kwargs):
            self.length = 2 if self.length is None else self.length + 1
            return super().reset(*args, **kwargs)


    class Leaves(CountingEnv):
        '''Its observations leave their space.'''

        def __init__(self):
            super().__init__(size=2)
            first, counts = self.spec.observation
            bounded = dataclasses.replace(counts, domain=Box(np.array(0), np.array(1)))
            self.spec = dataclasses.replace(self.spec, observation=(first, bounded))


    def refuses():
        raise OSError("no such track")


    def forgets_to_return(env):
        env.rand_action


    def ones(env):
        def policy(td):
            td["action"] = env.rand_action()["action"] * 0 + 1
            td["extra"] = td["action"] * 10
            return td

        return policy


    def blocks(env):
        pathlib.Path("film.gif").mkdir()  # as another program may, after the command has checked the path
        return env.rand_action


    def acts(td):
        return td.set("action", td["done"].long())


    def by_player(env):
        return {"*": None}


    class Model:
        def predict(self, observation):
            return observation, None


    def model(env):
        return Model()


    def returns_a_dict(env):
        return lambda td: {"action": 0}


    def stubborn(env):
        return lambda td: td.set("action", 2 * td["done"][:, 0].long() + 2)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Run the test in a temporary folder that contains a user's module."""
    (tmp_path / "my_envs.py").write_text(textwrap.dedent(USER_MODULE))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_envs", raising=False)
    threads = torch.get_num_threads()
    yield tmp_path
    torch.set_num_threads(threads)
    sys.modules.pop("my_envs", None)


def rollout(*arguments: str) -> Result:
    """Run `envherd rollout` in this process."""
    return CliRunner().invoke(app, ["rollout", *arguments])


def figures_of(result: Result) -> dict:
    """Check that a run succeeded; return the JSON that it printed."""
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


SLOW = pytest.mark.slow
TASK, PRESS = (
    "python:tests.envs.suite_envs:Task",
    "--policy tests.executor.show.test_evaluate_tasks:make_press",
)
TEAM = "python:tests.envs.team_env:Team"
#: Command, exit code, stream, and texts that are in it.
OUTCOMES: list[Any] = [
    ("--version", 0, "stdout", ["envherd " + importlib.metadata.version("envherd")]),
    ("--help", 0, "stdout", ["--install-completion"]),
    (
        "rollout --help",
        0,
        "stdout",
        [
            "--envs",
            "--workers",
            "--steps",
            "--seed",
            "--policy",
            "--out",
            "--gif",
            "--png",
            "--json",
            "--mp4",
        ],
    ),
    pytest.param(
        "rollout meltingpot:clean_pu",
        2,
        "stderr",
        ["clean_up"],
        marks=needs("meltingpot"),
    ),
    ("rollout gymnasium:CartPol-v1", 2, "stderr", ["CartPole-v1"]),
    ("rollout gymnasum:CartPole-v1", 2, "stderr", ["gymnasium:"]),
    ("rollout python:my_envs:Break", 2, "stderr", ["Breaks"]),
    *(
        (f"rollout {COUNTING} {options}", 2, "stderr", [text])
        for options, text in [
            ("--policy my_envs:stubbor", "stubborn"),
            ("--policy stubborn", "MODULE:CALLABLE"),
            ("--out .", "expected a new or empty directory"),
            ("--envs 0", "--envs"),
            ("--steps many", "--steps"),
            ("--gif film.mp4", "ends in .gif"),
            ("--png sheet", "ends in .png"),
            ("--mp4 film.gif", "ends in .mp4"),
            ("--alone", "expected --mp4 or --gif, got neither"),
            ("--views --agent 1 --gif a.gif", "expected --views or --agent, got both"),
            ("--ray local --mp4 a.mp4", "expected envs on this machine, got --ray"),
            ("--ray local --png a.png", "expected envs on this machine, got --ray"),
            (
                "--ray local --gif a.gif --alone",
                "expected envs on this machine, got --ray",
            ),
            ("--env-kwargs '{length: 3}'", "JSON object"),
            ("--env-kwargs [3]", "JSON object"),
            ("--env-kwargs @none.json", "No such file"),
            ("--env-kwargs @/dev/zero", "a device, a pipe or a folder"),
            # Reading it waits for the kernel's next message.
            ("--env-kwargs @/proc/kmsg", "JSON object"),
            ("--gif none/film.gif", "there is no folder 'none'"),
            ("--json none/figures.json", "there is no folder 'none'"),
            ("--out none/data", "there is no folder 'none'"),
            (
                "--out my_envs.py",
                "expected a new or empty directory, got my_envs.py",
            ),
            ("--json .", "got the folder '.'"),
            ("--mp4 none/film.mp4", "there is no folder 'none'"),
        ]
    ),
    (
        "list gymnasium 'no such name'",
        1,
        "stderr",
        ["expected names that contain 'no such name', got none"],
    ),
    *(
        pytest.param(
            f"rollout {COUNTING} --env-kwargs {text * count}",
            2,
            "stderr",
            ["JSON object"],
            id=f"--env-kwargs of {count} times {text}",
        )
        for text, count in (("[", 10**5), ("9", 5000))
    ),
    ("list gymnasim", 2, "stderr", ["got 'gymnasim'. Did you mean gymnasium"]),
    ("size gymnasium:CartPol-v1", 2, "stderr", ["Did you mean CartPole-v1"]),
    (f"size {COUNTING} --cpus 64", 2, "stderr", ["Run envherd size on that machine"]),
    *(  # what no machine has, or no number is
        (f"{command} {option} {value}", 2, "stderr", [text or option])
        for command, option, value, text in [
            (
                f"rollout {COUNTING}",
                "--envs",
                10**9,
                "num_envs failed: expected at most",
            ),
            (f"rollout {COUNTING}", "--envs", "9" * 23, ""),
            (f"rollout {COUNTING}", "--workers", "9" * 400, ""),
            (f"rollout {COUNTING}", "--steps", "9" * 23, ""),
            (f"rollout {COUNTING}", "--seed", "9" * 5000, ""),
            (f"evaluate {COUNTING}", "--episodes", "9" * 23, ""),
            (
                f"check {COUNTING}",
                "--together",
                10**6,
                "num_envs failed: expected at most",
            ),
            (f"check {COUNTING}", "--steps", 10**9, ""),
            (f"size {COUNTING}", "--envs", 10**9, "num_envs failed: expected at most"),
            (
                f"size {COUNTING}",
                "--workers",
                10**9,
                "num_workers failed: expected at most",
            ),
            (f"size {COUNTING}", "--budget", "nan", ""),
            (f"size {COUNTING}", "--policy-ms", "inf", ""),
            (f"size {COUNTING}", "--target-steps-per-s", "nan", ""),
            ("top", "--interval", "nan", ""),
            ("top", "--interval", "1e300", ""),
        ]
    ),
    ("init my_env.py", 2, "stderr", ["no such command or option any more. Copy"]),
    (
        f"evaluate {COUNTING} --out=kept",
        2,
        "stderr",
        ["evaluate --out failed: there is no such command or option any more."],
    ),
    (
        f"evaluate {COUNTING} --json none/found.json",
        2,
        "stderr",
        ["there is no folder 'none'"],
    ),
    (
        f"size {COUNTING} --json none/setting.json",
        2,
        "stderr",
        ["there is no folder 'none'"],
    ),
    (
        "replay kept --env CartPole-v1",
        2,
        "stderr",
        ["no such command or option any more. Step a SerialEnv"],
    ),
    pytest.param(
        "rollout python:my_envs:refuses",
        1,
        "stderr",
        ["OSError: no such track", "my_envs.py"],
        marks=SLOW,
    ),
    pytest.param(
        f"rollout {PAIR} --steps 1000 --gif a.gif --out kept",
        1,
        "stderr",
        ["no picture of themselves"],
        marks=SLOW,
    ),
    pytest.param(
        f"rollout {COUNTING} --steps {10**13} --out kept",
        1,
        "stderr",
        ["expected room for"],
        marks=SLOW,
    ),
    *(
        pytest.param(
            f"{command} {env} --policy my_envs:{policy}",
            1,
            "stderr",
            [text],
            marks=[SLOW, needs("gymnasium")],
        )
        for command in ("rollout", "evaluate")
        for env, policy, text in [
            (
                "CartPole-v1",
                "by_player",
                "expected a callable as the policy of gymnasium envs of one agent, got dict. Wrap it",
            ),
            (
                "CartPole-v1",
                "model",
                "got Model. Wrap a model of Stable-Baselines3: lambda td: td.set('action', torch.as_tensor(",
            ),
            (
                "CartPole-v1",
                "returns_a_dict",
                "expected the policy to return a TensorDict with the action, got dict. Wrap it",
            ),
            # None stands for random actions, which nobody names a factory for.
            (
                COUNTING,
                "forgets_to_return",
                "expected a policy, got None. Return it from the function.",
            ),
        ]
    ),
    *(
        pytest.param(
            f"{command} pettingzoo:mpe2.simple_spread_v3 --policy my_envs:by_player --max-steps 3",
            0,
            "stdout",
            [],
            marks=[SLOW, needs("pettingzoo")],
        )
        for command in ("rollout", "evaluate")
    ),
    (
        f"check {COUNTING} --steps 20",
        0,
        "stdout",
        [
            "keeps the contract: 20 steps of 2 envs",
            *(f"ok {rule} " for rule in range(1, 10)),
        ],
    ),
    (
        "check my_envs:Forgets --steps 20",
        1,
        "stdout",
        ["broken 6 the same seed and actions", "ok 1 "],
    ),
    (
        "check my_envs:Leaves --steps 20",
        1,
        "stdout",
        ["broken 8 observations are within the bounds", "in [0, 1], got 2 at (0, 0)"],
    ),
    ("check my_envs:Forgets --steps 20 --random", 0, "stdout", ["skipped 6 "]),
    (
        f"check {COUNTING} --steps 20 --env-kwargs '{{\"length\": 100}}'",
        1,
        "stdout",
        ["Nothing was proved: make more steps"],
    ),
    ("check my_envs:Breaks --steps 20", 1, "stderr", ["the axle broke"]),
    (
        "check my_envs:refuses",
        1,
        "stderr",
        [
            "error: make_env failed: the factory raised OSError: no such track",
            "my_envs.py",
        ],
    ),
    ("check my_envs:refuse", 2, "stderr", ["refuses"]),
    (
        f"evaluate {TEAM} --focal 9 --workers 1",
        1,
        "stderr",
        ["expected focal agents among"],
    ),
    (
        f"evaluate {TASK} {TASK}",
        2,
        "stderr",
        [f"expected tasks of different names, got {TASK} twice"],
    ),
    (
        f'evaluate {TASK} {PRESS} --episodes 3 --workers 1 --env-kwargs \'{{"faults": [[1, "raise"]]}}\'',
        1,
        "stdout",
        [
            "episode 1 failed: EnvError",
            "success 1.00 [0.34, 1.00] (2/2)",
            "episodes that failed 1 success 1.00",
            " return ",
        ],
    ),
]


@pytest.mark.parametrize(("command", "code", "stream", "texts"), OUTCOMES)
def test_failed_command_has_exit_code_and_message_and_leaves_no_file(
    folder, command, code, stream, texts
):
    result = CliRunner().invoke(app, shlex.split(command), env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    printed = " ".join(getattr(result, stream).replace("│", " ").split())
    assert [text for text in texts if text not in printed] == []
    assert code != 2 or "Traceback" not in result.output
    assert "contract.py" not in result.stderr
    assert sorted(
        path.name for path in folder.iterdir() if path.name != "__pycache__"
    ) == ["my_envs.py"]


#: Runs a command in a fork of the script host, after `how` has made the descriptors what a shell makes of them. The
#: streams are those that an interpreter makes of its descriptors at its start.
COMMAND = """
import os, shlex, sys
from pathlib import Path

def stream(fd, mode, errors):
    try:
        return open(fd, mode, encoding="ascii", errors=errors, closefd=False)
    except OSError:
        return None

{how}
sys.stdin = stream(0, "r", "strict")
sys.stdout = stream(1, "w", "strict")
sys.stderr = stream(2, "w", "backslashreplace")
sys.argv[1:] = shlex.split({command!r})
from envherd.executor.cli import main
sys.exit(main())
"""


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("is_hosted", "command", "how", "code", "line"),
    [
        (
            True,
            f"rollout {COUNTING} --steps 3 --workers 1 -q --json -",
            "os.close(1)",
            2,
            "got a closed one",
        ),
        (
            True,
            f"rollout {COUNTING} --steps 3 --workers 1 -q --json -",
            "os.dup2(os.open('/dev/full', os.O_WRONLY), 1)",
            1,
            "error: No space left on device.",
        ),
        (
            True,
            f"rollout {COUNTING} --steps 3 --workers 1 -q --json -",
            "reader, writer = os.pipe()\nos.close(reader)\nos.dup2(writer, 1)",
            1,
            "",
        ),
        (
            True,
            f"rollout {COUNTING} --steps 3 --workers 1",
            "os.closerange(0, 3)",
            0,
            "",
        ),
        (
            True,
            f"rollout {COUNTING} --json /dev/fd/9",
            "os.dup2(os.pipe()[1], 9)",
            0,
            "",
        ),
        (False, "list gymnasium", ">/dev/full", 1, "error: No space left on device."),
        (False, "list gymnasium", "| true", 1, ""),
        (False, "doctor --json", ">&-", 2, "got a closed one"),
        (False, "top --once --json", ">&-", 2, "got a closed one"),
        (False, "--version", ">/dev/full", 1, "error: No space left on device."),
        (False, "--version", ">&- 2>&- <&-", 0, ""),
        (False, f"rollout {COUNTING} --json pipe.py", "", 2, "'pipe.py': a pipe"),
        (False, f"rollout {COUNTING} --json loop", "", 2, "circular link"),
        (False, f"rollout {COUNTING} --out $'\\xff'", "", 2, "not UTF-8"),
        (False, "--help", "", 0, ""),
    ],
)
def test_an_output_that_is_closed_or_full_gives_one_line(
    script_host, is_hosted, command, how, code, line
):
    """Commands that import torch run in the script host."""
    if is_hosted:
        script = COMMAND.format(command=command, how=how)
        done = script_host.run_text(script, folder=Path.cwd(), COLUMNS="30")
    else:
        script = (
            "set -o pipefail; export PYTHONIOENCODING=ascii COLUMNS=30; mkfifo pipe.py; ln -s loop loop; "
            f"{Path(sys.executable).with_name('envherd')} {command} {how}"
        )
        done = subprocess.run(
            ["bash", "-c", script],
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=120,
        )
    assert done.returncode == code, done.stderr
    # A usage error has a frame, as wide as the terminal.
    printed = " ".join(done.stderr.replace("|", " ").split())
    assert line in printed
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.usefixtures("folder")
def test_json_is_printed_without_a_path_too():
    for value in ([], ["-"], ["found.json"]):
        result = CliRunner().invoke(
            app, ["check", COUNTING, "--steps", "20", "--json", *value]
        )
        assert result.exit_code == 0, result.output
        found = json.loads(
            Path("found.json").read_text() if "found.json" in value else result.stdout
        )
        assert (found["schema"], found["is_ok"]) == ("envherd.check/1", True)
        assert [rule["result"] for rule in found["rules"]] == ["ok"] * 9
    result = CliRunner().invoke(
        app, ["check", "my_envs:Forgets", "--steps", "20", "--json", "--random"]
    )
    assert json.loads(result.stdout)["rules"][5]["result"] == "skipped"


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
def test_stored_data_and_reported_figures_agree():
    result = rollout(
        COUNTING,
        "--envs",
        "3",
        "--workers",
        "2",
        "--steps",
        "40",
        "--out",
        "kept",
        "--json",
        "-",
    )
    plain = figures_of(result)
    data = TensorDict.load_memmap("kept")
    assert data.batch_size == (3, 40)
    assert (
        plain["num_envs"],
        plain["num_workers"],
        plain["steps_done"],
        plain["env_steps"],
    ) == (3, 2, 40, 120)
    ended = data["next", "done"].squeeze(-1)
    assert plain["episodes"] == ended.sum() > 0
    assert plain["resets"] == 3 + plain["episodes"]
    returns, running = [], torch.zeros(3, dtype=torch.float64)
    for step in range(40):
        running += data["next", "reward"][:, step, 0]
        returns += running[ended[:, step]].tolist()
        running[ended[:, step]] = 0
    assert plain["mean_return"] == {"agent": pytest.approx(sum(returns) / len(returns))}
    assert [worker["env_ids"] for worker in plain["workers"]] == [[0, 1], [2]]
    assert plain["memory"]["workers_pss_bytes"] > 0
    assert plain["files"] == {"out": "kept"}
    assert "env-steps/s" in result.stderr, (
        "the table must not be in the output of the JSON"
    )


@needs("gymnasium")
@pytest.mark.slow
@pytest.mark.usefixtures("folder")
def test_figures_are_printed_although_a_picture_cannot_be_written():
    command = (
        "CartPole-v1",
        "--workers",
        "1",
        "--steps",
        "5",
        "--policy",
        "my_envs:blocks",
        "--gif",
        "film.gif",
    )
    done = rollout(*command, "--json", "-")
    assert done.exit_code == 1
    assert json.loads(done.stdout)["steps_done"] == 5
    assert "error: accessing" in done.stderr
    assert "film.gif failed" in done.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
def test_quiet_prints_what_was_asked_for_and_errors_alone():
    done = rollout(
        COUNTING,
        "--workers",
        "1",
        "--steps",
        "5",
        "--out",
        "kept",
        "--quiet",
        "--json",
        "-",
    )
    assert figures_of(done)["steps_done"] == 5
    assert done.stderr == ""
    done = rollout("python:my_envs:Breaks", "--workers", "1", "--quiet")
    assert (done.exit_code, done.stdout) == (1, "")
    assert "the axle broke" in done.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("policy", "kept"),
    [("ones", {"action": 1, "extra": 10}), ("stubborn", {"action": 2})],
)
def test_a_policy_acts_and_what_it_adds_is_kept(policy, kept):
    done = rollout(
        COUNTING, "--steps", "6", "--policy", f"my_envs:{policy}", "--out", "kept"
    )
    assert done.exit_code == 0
    data = TensorDict.load_memmap("kept")
    for key, value in kept.items():
        assert (data[key] == value).all()


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("command", ["rollout", "evaluate"])
def test_a_policy_where_its_factory_is_expected_is_explained(command):
    result = CliRunner().invoke(app, [command, COUNTING, "--policy", "my_envs:acts"])
    assert isinstance(result.exception, TypeError)
    notes = [
        "--policy names a function that gets the executor and returns the policy; my_envs:acts raised."
    ]
    assert result.exception.__notes__ == notes


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
def test_values_without_a_fixed_shape_are_stored_too():
    assert rollout(TEXT, "--envs", "2", "--steps", "5", "--out", "kept").exit_code == 0
    data = TensorDict.load_memmap("kept")
    assert data.batch_size == (2, 5)
    texts = data["next", "text"]
    assert all(isinstance(text, str) and ":" in text for row in texts for text in row)
    assert texts[0][0] != texts[0][1]


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
def test_envs_that_are_batches_count_each_of_their_rows():
    plain = figures_of(
        rollout(
            PAIR,
            "--envs",
            "2",
            "--workers",
            "1",
            "--steps",
            "30",
            "--out",
            "kept",
            "--json",
            "-",
        )
    )
    done = TensorDict.load_memmap("kept")["next", "done"]
    assert done.shape[:3] == (2, 30, 2) or done.shape[:3] == (2, 2, 30)
    assert plain["episodes"] == done.sum() > 0


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
@needs("gymnasium")
def test_envs_are_made_with_the_keyword_arguments_of_the_command_line():
    Path("kwargs.json").write_text('{"length": 4}')
    for env, kwargs in (
        (COUNTING, '{"length": 4}'),
        (COUNTING, "@kwargs.json"),
        ("gymnasium:CartPole-v1", '{"max_episode_steps": 4}'),
    ):
        plain = figures_of(
            rollout(
                env,
                "--envs",
                "1",
                "--steps",
                "40",
                "--env-kwargs",
                kwargs,
                "--json",
                "-",
            )
        )
        assert plain["episodes"] == 10


@pytest.mark.usefixtures("folder")
def test_a_file_that_is_added_while_a_rollout_runs_stays():
    store = RolloutStore(Path("kept"), 3)
    for _ in range(2):  # it is cut, which writes its files twice
        store.add(TensorDict({"x": torch.arange(5), "next": {"y": torch.ones(5)}}, [5]))
        (Path("kept") / "notes.txt").write_text("precious")
    store.finish({})
    assert sorted(path.name for path in Path("kept").iterdir()) == [
        "envherd.json", "meta.json", "next", "notes.txt", "x.memmap",
    ]  # fmt: skip
    assert (Path("kept") / "notes.txt").read_text() == "precious"
    assert TensorDict.load_memmap("kept", allow_pickle=False).batch_size == (5, 2)


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
def test_an_env_that_breaks_ends_it_with_what_was_collected():
    result = rollout(
        "python:my_envs:Breaks",
        "--envs",
        "2",
        "--out",
        "kept",
        "--json",
        "figures.json",
    )
    assert result.exit_code == 1
    assert "RuntimeError: the axle broke" in result.stderr
    assert "my_envs.py" in result.stderr, (
        "the worker's traceback leads to the user's line"
    )
    plain = json.loads(Path("figures.json").read_text())
    assert plain["steps_done"] == 4
    assert "the axle broke" in plain["error"]
    assert plain["env_errors"] >= 1
    assert TensorDict.load_memmap("kept").batch_size == (2, 4)
    assert "4 of 200 (failed)" in result.stdout


@needs("meltingpot")
@pytest.mark.slow
@pytest.mark.usefixtures("folder")
def test_melting_pot_is_reported_per_player_and_drawn_from_its_world_view():
    name = "meltingpot:collaborative_cooking__cramped"
    result = rollout(
        name,
        "--envs",
        "2",
        "--steps",
        "8",
        "--png",
        "envs.png",
        "--out",
        "kept",
        "--json",
        "-",
    )
    plain = figures_of(result)
    assert list(plain["mean_return"]) == ["player_0", "player_1"]
    assert plain["agent_steps_per_s"] == pytest.approx(2 * plain["env_steps_per_s"])
    world = TensorDict.load_memmap("kept")["next", "RGB"]
    assert world.shape == (2, 8, 40, 72, 3)
    with Image.open("envs.png") as sheet:
        drawn = set(sheet.convert("RGB").get_flattened_data())
    assert {
        tuple(colour) for colour in world[:, -1].reshape(-1, 3).unique(dim=0).tolist()
    } <= drawn


@pytest.mark.long
@pytest.mark.usefixtures("folder")
def test_ctrl_c_ends_it_with_what_was_collected(tmp_path):
    mark = tmp_path / "mark"
    command = [
        str(Path(sys.executable).with_name("envherd")),
        "rollout",
        "python:my_envs:Says",
        "--steps",
        "1000000",
    ]
    process = subprocess.Popen(
        [*command, "--envs", "2", "--out", "kept", "--json", "-"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "ENVHERD_TEST_MARK": str(mark)},
        start_new_session=True,
    )
    try:
        while not mark.exists():
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGINT)  # to the whole group, as a terminal does
        printed, complaints = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert "Traceback" not in complaints
    plain = json.loads(printed)
    assert plain["interrupted"] is True
    assert 10 <= plain["steps_done"] < 1_000_000
    data = TensorDict.load_memmap("kept")
    assert data.batch_size == (2, plain["steps_done"])
    assert data["next", "done"].sum() == plain["episodes"]


def test_the_first_ctrl_c_is_noted_and_the_second_one_raises():
    before = signal.getsignal(signal.SIGINT)
    with noting_interrupt() as pressed:
        signal.raise_signal(signal.SIGINT)
        assert pressed
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.slow
def test_the_package_is_a_command():
    command = [sys.executable, "-m", "envherd", "--version"]
    assert subprocess.check_output(command, text=True).startswith("envherd ")
