"""Films and `envherd replay`; `--max-steps`; `top` in a narrow terminal."""

import io
import json
import subprocess
import sys
import textwrap
from contextlib import closing

from tests.extras import needs, skip_without

skip_without("cli", "media")

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console
from tensordict import NonTensorData, TensorDict
from typer.testing import CliRunner

from envherd import ParallelEnv
from envherd.executor.cli import media
from envherd.executor.cli.app import app
from envherd.executor.cli.commands import RolloutStore, load_rollout
from envherd.executor.cli.top import looks, screen
from envherd.workers.testing import CountingEnv
from tests.gates import wait_for

TEAM = "python:tests.envs.team_env:pictured"
COUNTING = "python:envherd.workers.testing:CountingEnv"


def envherd(*arguments):
    threads = torch.get_num_threads()
    try:
        return CliRunner().invoke(
            app, [str(one) for one in arguments], env={"COLUMNS": "120"}
        )
    finally:
        torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_stored_rollout_is_replayed_with_any_number_of_workers(tmp_path, workers):
    done = envherd(
        "rollout",
        COUNTING,
        "--envs",
        3,
        "--steps",
        30,
        "--seed",
        4,
        "--out",
        tmp_path / "data",
    )
    assert done.exit_code == 0, done.output
    again = envherd(
        "replay", tmp_path / "data", "--env", COUNTING, "--workers", workers
    )
    assert again.exit_code == 0, again.output
    assert "30 steps of 3 envs are equal" in again.output


@pytest.mark.slow
def test_a_replay_names_the_first_difference_and_draws(tmp_path):
    envherd(
        "rollout",
        COUNTING,
        "--envs",
        2,
        "--steps",
        12,
        "--seed",
        4,
        "--out",
        tmp_path / "data",
    )
    data, facts = load_rollout(tmp_path / "data")
    assert (facts["env"], facts["seed"]) == (COUNTING, 4)
    data["next", "reward"][1, 7] += 1  # memory-mapped, so this changes the file
    again = envherd(
        "replay", tmp_path / "data", "--env", COUNTING, "--gif", tmp_path / "again.gif"
    )
    assert again.exit_code == 1
    assert "next/reward of env 1 at step 7" in " ".join(again.output.split())
    assert (tmp_path / "again.gif").stat().st_size > 100


@pytest.mark.parametrize(
    ("name", "got"),
    [
        ("none", "no such folder"),
        (".", "a folder without envherd.json"),
        ("broken", "Expecting value"),
    ],
)
def test_a_folder_without_a_rollout_is_refused(tmp_path, name, got):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/envherd.json").touch()
    result = envherd("replay", tmp_path / name)
    assert result.exit_code == 2
    assert f"expected the folder of a stored rollout, got {got}" in result.stderr
    assert "`envherd rollout ENV --out DIR` writes one" in result.stderr


@pytest.fixture
def stored(tmp_path):
    """Return a function that stores a rollout of CartPole-v1 whose facts it changes."""

    def store(**facts):
        kept = RolloutStore(tmp_path / "data", 2)
        for _ in range(2):
            zeros = {
                name: torch.zeros(1, 1, dtype=torch.bool)
                for name in ("done", "terminated", "truncated")
            }
            root = TensorDict({"observation": torch.zeros(1, 4), **zeros}, [1])
            after = TensorDict({**root, "reward": torch.ones(1, 1)}, [1])
            kept.add(
                root.set("action", torch.zeros(1, dtype=torch.int64)).set("next", after)
            )
        usual = {
            "env": "gymnasium:CartPole-v1",
            "env_kwargs": {},
            "max_steps": None,
            "seed": 0,
        }
        kept.finish({**usual, **facts})
        return tmp_path / "data"

    return store


EVIL = """
    import pathlib
    pathlib.Path({mark!r}).touch()

    def make(*args, **kwargs):
        pathlib.Path({mark!r}).touch()
"""


@pytest.mark.parametrize(
    ("facts", "named"),
    [
        ({"env": "python:evil:make"}, "--env python:evil:make"),
        ({"env": "evil:make"}, "--env evil:make"),
        ({"env": "torchrl:evil:make"}, "--env torchrl:evil:make"),
        ({"env": "gymnasium:evil:CartPole-v1"}, "--env gymnasium:evil:CartPole-v1"),
        (
            {"env": "gymnasium_vec:evil:CartPole-v1:4"},
            "--env gymnasium_vec:evil:CartPole-v1:4",
        ),
        ({"env": "pettingzoo:evil"}, "--env pettingzoo:evil"),
        ({"env": "evil.make"}, "--env evil.make"),
        ({"env": "CartPole-v1"}, "--env CartPole-v1"),
        (
            {"env": "python:evil:make", "env_kwargs": {"command": "it's"}},
            "--env python:evil:make --env-kwargs '{",
        ),
        (
            {"env_kwargs": {"config": [{"type": "evil.make"}]}},
            '--env gymnasium:CartPole-v1 --env-kwargs \'{"config": [{"type": "evil.make"}]}\'',
        ),
    ],
)
def test_names_in_a_stored_rollout_are_not_called(
    tmp_path, monkeypatch, stored, facts, named
):
    (tmp_path / "evil.py").write_text(
        textwrap.dedent(EVIL.format(mark=str(tmp_path / "ran")))
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    result = envherd("replay", stored(**facts))
    assert result.exit_code == 2, result.output
    assert "names an env that may run any code" in result.stderr
    assert f"envherd replay {tmp_path}/data {named}" in result.stderr
    assert not (tmp_path / "ran").exists()


@needs("gymnasium")
@pytest.mark.slow
def test_a_replay_searches_no_modules_in_the_current_folder(tmp_path, stored):
    stored()
    for name in ("gymnasium", "json", "numpy", "ale_py", "random"):
        (tmp_path / f"{name}.py").write_text(
            textwrap.dedent(EVIL.format(mark=str(tmp_path / "ran")))
        )
    command = [
        sys.executable,
        "-P",
        "-c",
        "import sys; from envherd.executor.cli import main; sys.exit(main())",
    ]
    done = subprocess.run(
        [*command, "replay", "data"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert not (tmp_path / "ran").exists()
    assert "differs" in done.stdout, done.stderr


@pytest.mark.parametrize(
    "facts",
    [
        {"env": 3},
        {"env": "a\x1b[2J"},
        {"env_kwargs": []},
        {"seed": "0"},
        {"max_steps": 0},
    ],
)
def test_facts_of_wrong_types_are_refused(stored, facts):
    result = envherd("replay", stored(**facts))
    assert result.exit_code == 2
    assert f"expected {next(iter(facts))} as " in result.stderr
    assert "\x1b[2J" not in result.stderr


def test_a_stored_rollout_with_pickles_is_refused(tmp_path, stored):
    facts = (stored() / "envherd.json").read_text()
    TensorDict({"x": NonTensorData(slice(2))}, []).memmap(tmp_path / "odd")
    (tmp_path / "odd/envherd.json").write_text(facts)
    result = envherd("replay", tmp_path / "odd")
    assert result.exit_code == 2
    assert "expected a memory-mapped TensorDict without pickles" in result.stderr


@needs("gymnasium")
@pytest.mark.slow
def test_a_replay_of_another_env_differs(stored):
    folder = stored()
    result = envherd("replay", folder, "--env", "gymnasium:Acrobot-v1")
    assert result.exit_code == 1
    assert "observation has shape [1, 6], stored was shape [1, 4]" in " ".join(
        result.output.split()
    )
    result = envherd("replay", folder, "--env", TEAM)
    assert (result.exit_code, "expected ('agents', 'action') in" in result.stderr) == (
        1,
        True,
    )


@needs("gymnasium")
@pytest.mark.slow
def test_the_steps_of_episodes_can_be_limited(tmp_path):
    done = envherd(
        "rollout",
        "CartPole-v1",
        "--envs",
        2,
        "--steps",
        20,
        "--max-steps",
        5,
        "--out",
        tmp_path / "data",
    )
    assert done.exit_code == 0, done.output
    data, _ = load_rollout(tmp_path / "data")
    assert data["next", "truncated"][:, [4, 9, 14, 19]].all()
    assert data["next", "done"].sum() == 8
    assert envherd("replay", tmp_path / "data").exit_code == 0
    for name in (
        "gymnasium.envs.classic_control:CartPoleEnv",
        "gymnasium.envs.classic_control:MountainCarEnv",
    ):
        done = envherd(
            "rollout", name, "--envs", 1, "--steps", 10, "--max-steps", 5, "--json", "-"
        )
        assert json.loads(done.stdout)["episodes"] == 2, done.output
    refused = envherd("rollout", COUNTING, "--max-steps", 5)
    assert refused.exit_code == 1
    assert "--max-steps failed: expected an env of Gymnasium from" in refused.output


def film(*arguments):
    """Show one episode of one env."""
    only = ("--alone", "--envs", 1, "--episodes", 1, "--steps", 1000)
    return envherd("rollout", *only, *arguments)


@needs("meltingpot")
@pytest.mark.slow
def test_an_agents_view_can_be_filmed(tmp_path):
    result = film(
        "clean_up",
        "--mp4",
        tmp_path / "film.mp4",
        "--steps",
        3,
        "--agent",
        2,
        "--max-steps",
        2,
    )
    assert result.exit_code == 0, result.output
    assert "2 of 3 (enough episodes) x 1 envs" in result.output
    refused = film("clean_up", "--mp4", tmp_path / "no.mp4", "--agent", 99)
    assert refused.exit_code == 1
    assert "expected an agent in 0..6" in refused.output
    assert not (tmp_path / "no.mp4").exists()


@pytest.mark.slow
def test_film_shows_the_world_each_players_view_and_the_returns(tmp_path):
    import imageio_ffmpeg

    files = {kind: str(tmp_path / f"film.{kind}") for kind in ("gif", "png", "mp4")}
    paths = [part for kind, path in files.items() for part in (f"--{kind}", path)]
    result = envherd(
        "rollout",
        TEAM,
        "--views",
        *paths,
        "--steps",
        6,
        "--envs",
        2,
        "--seed",
        1,
        "--json",
    )
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["files"] == files
    assert imageio_ffmpeg.count_frames_and_secs(files["mp4"]) == (7, 0.35)
    with Image.open(tmp_path / "film.gif") as shown:
        assert shown.n_frames == 7
        for frame, steps in enumerate([0, 1, 2, 3, 4, 1, 2]):
            shown.seek(frame)
            seen = {colour for _, colour in shown.convert("RGB").getcolors(1 << 20)}
            expected = [
                (40 * steps,) * 3,
                *(
                    tuple((60 + 30 * steps) * (i == j) for j in range(3))
                    for i in range(3)
                ),
            ]
            for colour in expected:  # up to the rounding of the GIF's palette
                assert (
                    min(
                        max(abs(a - b) for a, b in zip(colour, one, strict=True))
                        for one in seen
                    )
                    <= 8
                ), colour


@needs("gymnasium")
@pytest.mark.slow
def test_film_has_the_last_picture_of_an_episode(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        media,
        "save_animation",
        lambda path, pictures, **_: drawn.extend(map(np.asarray, pictures)),
    )
    name, kwargs = "tests.executor.cli.test_cli_recording:Shows", '{"length": 3}'
    result = film(
        name,
        "--gif",
        tmp_path / "a.gif",
        "--env-kwargs",
        kwargs,
        "--steps",
        5,
        "--episodes",
        9,
    )
    assert result.exit_code == 0, result.output
    assert [int(picture[0, 0, 0]) for picture in drawn] == [0, 1, 2, 3, 1, 2]


class Shows(CountingEnv):
    """Its pictures show the number of steps."""

    def render(self):
        return np.full((4, 4, 3), self.num_steps, np.uint8)


@pytest.mark.slow
def test_long_animations_leave_steps_out(tmp_path):
    result = film(
        TEAM,
        "--gif",
        tmp_path / "film.gif",
        "--steps",
        250,
        "--episodes=999",
        "--fps",
        40,
    )
    assert result.exit_code == 0, result.output
    with Image.open(tmp_path / "film.gif") as shown:
        assert shown.n_frames == 126
        assert shown.info["duration"] == 50


@pytest.mark.slow
@pytest.mark.parametrize("width", [80, 100, 200])
def test_the_identifiers_of_workers_stay_in_a_narrow_terminal(width):
    with (
        closing(looks()) as each_look,
        ParallelEnv(3, CountingEnv, num_workers=2, seed=0) as env,
    ):
        next(each_look)
        env.rollout(20, break_when_any_done=False)
        # Soon after the last answer.
        wait_for(lambda: {one.phase for one in env.statistics().workers} == {"idle"})
        pids = [worker.pid for worker in env.statistics().workers]
        views = [
            view
            for view in next(each_look)
            if {one.pid for one in view.workers} == set(pids)
        ]
        out = io.StringIO()
        Console(file=out, width=width).print(screen(views, "", width))
    head, rows = out.getvalue(), out.getvalue().splitlines()
    assert max(map(len, rows)) <= width
    for name in ("worker", "pid", "envs", "steps/s", "busy", "at"):
        assert f" {name} " in head
    for pid in pids:
        assert any(f" {pid} " in row and "idle" in row for row in rows)
    assert (" PSS " in head) == (width == 200)
