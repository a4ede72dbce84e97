"""Films; `--max-steps`; `top` in a narrow terminal."""

import io
import json
from contextlib import closing

from tests.extras import needs, skip_without

skip_without("cli", "media")

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console
from tensordict import TensorDict
from typer.testing import CliRunner

from envherd import ParallelEnv
from envherd.executor.cli import media
from envherd.executor.cli.app import app
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
    data = TensorDict.load_memmap(tmp_path / "data")
    assert data["next", "truncated"][:, [4, 9, 14, 19]].all()
    assert data["next", "done"].sum() == 8
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
