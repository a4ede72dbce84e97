"""Pictures: which are kept, the layout of tiles, and that files decode to the drawn pictures."""

import sys
from types import SimpleNamespace

from tests.extras import skip_without

skip_without("media")

from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image

from envherd import SerialEnv
from envherd.executor.cli import media
from envherd.executor.cli.media import Film, Pictures, Tile, grid, reduced
from envherd.executor.show.camera import MediaError
from tests.envs.team_env import film_into, pictured


def sprite(colour: tuple[int, int, int], height: int = 6, width: int = 8) -> np.ndarray:
    """Return a frame of one colour with one white pixel in its corner."""
    frame = np.full((height, width, 3), colour, np.uint8)
    frame[0, 0] = 255
    return frame


class Rendered:
    """An executor whose envs render the frames of a list, one list of frames for each look."""

    spec = SimpleNamespace(metadata={}, family="drawn")

    def __init__(self, looks: list[list[np.ndarray | None]]) -> None:
        self.num_envs, self._looks = len(looks[0]), iter(looks)

    def ask(self, what: str, env_ids: list[int]) -> list[np.ndarray | None]:
        assert (what, env_ids) == ("render", list(range(self.num_envs)))
        return next(self._looks)


def pictures_of(
    looks: list[list[np.ndarray | None]], gif=None, png=None, **how
) -> Pictures:
    """Return the pictures of a run in which the envs rendered these frames."""
    pictures, env = Pictures(gif, png, len(looks) - 1, **how), Rendered(looks)
    for step in range(len(looks)):
        pictures.look(cast("Any", env), step, None)
    return pictures


def moving(num_envs: int, num_moments: int = 5) -> list[list[np.ndarray | None]]:
    """Return frames in which each env has a different shade, and a dot moves."""
    looks: list[list[np.ndarray | None]] = []
    for step in range(num_moments):
        frames = [
            np.full((12, 16, 3), 40 * env_id + 20, np.uint8)
            for env_id in range(num_envs)
        ]
        for frame in frames:
            frame[3, step] = (255, 0, 0)
        looks.append([*frames])
    return looks


@pytest.mark.parametrize(
    ("num_steps", "kept"),
    [
        (5, [0, 1, 2, 3, 4, 5]),
        (10, [0, 2, 4, 6, 8, 10]),
        (11, [0, 4, 8, 11]),
        (20, [0, 4, 8, 12, 16, 20]),
        (1, [0, 1]),
    ],
)
def test_a_film_keeps_evenly_spread_steps_and_the_last(num_steps, kept):
    film = Film(5, num_steps)
    for step in range(num_steps + 1):
        if film.wants(step):
            film.add(step, None)
    assert list(film.moments) == kept


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((6, 8, 3), (6, 8, 3)),
        ((6, 8), (6, 8, 3)),
        ((6, 8, 4), (6, 8, 3)),
        ((400, 640, 3), (200, 320, 3)),
    ],
)
def test_frames_are_reduced_to_what_fits_a_tile(shape, expected):
    assert reduced(np.zeros(shape, np.uint8)).shape == expected


def test_pictures_of_a_gif_may_change_their_size(tmp_path):
    pictures = [Image.new("RGB", (width, 6)) for width in (4, 8, 3)]
    media.save_animation(tmp_path / "a.gif", pictures, frames_per_s=9)
    with Image.open(tmp_path / "a.gif") as found:
        assert found.size == (4, 6)


@pytest.mark.parametrize(
    "frame",
    [np.zeros((4, 4, 3)), np.zeros((4, 4, 2), np.uint8), np.zeros((0, 4, 3), np.uint8)],
)
def test_values_that_are_no_frame_are_refused(frame):
    with pytest.raises(MediaError, match=r"expected uint8 \[H, W, 3\]"):
        reduced(frame)


@pytest.mark.parametrize(
    ("count", "shape", "columns"),
    [
        *(
            (count, (144, 192), columns)
            for count, columns in (
                (1, 1),
                (2, 2),
                (4, 2),
                (6, 3),
                (8, 4),
                (9, 3),
                (16, 4),
            )
        ),
        (4, (300, 100), 4),  # tall tiles go side by side
    ],
)
def test_a_grid_is_about_as_wide_as_a_screen(count, shape, columns):
    frame = np.full((*shape, 3), 200, np.uint8)
    picture = np.asarray(grid([Tile("", "", frame)] * count, width_px=1))
    shown = (
        (picture == 200).all(axis=(0, 2))
        if count == 1
        else (picture == 200).all(axis=2).any(axis=0)
    )
    assert (np.diff(np.flatnonzero(shown)) > 1).sum() + 1 == columns


def test_small_frames_are_enlarged_by_a_whole_factor_without_smoothing():
    picture = np.asarray(
        grid(
            [Tile("left", "right", sprite((10, 200, 30)))],
            title="a title",
            width_px=2000,
        )
    )
    greens = (picture == (10, 200, 30)).all(axis=2)
    whites = (picture == 255).all(axis=2)
    factor = media.ENLARGED_PX // 8
    assert greens.sum() == (6 * 8 - 1) * factor**2
    rows, columns = np.nonzero(greens)
    assert (np.ptp(rows) + 1, np.ptp(columns) + 1) == (6 * factor, 8 * factor)
    assert whites[
        rows.min() : rows.min() + factor, columns.min() : columns.min() + factor
    ].all()


@pytest.mark.slow
def test_contact_sheet_has_envs_as_rows_and_moments_as_columns(tmp_path):
    path = tmp_path / "sheet.png"
    assert pictures_of(moving(num_envs=3, num_moments=9), png=path).write(
        "three envs"
    ) == {"png": str(path)}
    picture = np.asarray(Image.open(path))
    for env_id in range(3):
        shade = (picture == 40 * env_id + 20).all(axis=2)
        rows, columns = np.nonzero(shade)
        runs = np.flatnonzero(np.diff(np.unique(columns)) > 1)
        assert len(runs) + 1 == media.SHEET_COLUMNS
        assert np.diff(np.unique(rows)).max() == 1


@pytest.mark.slow
def test_a_gif_decodes_to_every_frame_that_was_drawn(tmp_path):
    path = tmp_path / "envs.gif"
    assert pictures_of(moving(num_envs=4), gif=path).write("four envs") == {
        "gif": str(path)
    }
    with Image.open(path) as gif:
        assert gif.n_frames == 5
        dots = []
        for index in range(gif.n_frames):
            gif.seek(index)
            pixels = np.asarray(gif.convert("RGB"))
            reds = (pixels == (255, 0, 0)).all(axis=2)
            dots.append(np.nonzero(reds)[1].min())
            assert reds.sum() == 4 * (reds.sum() // 4)
            assert reds.any()
            for env_id in range(4):
                assert (pixels == 40 * env_id + 20).all(axis=2).any()
    assert (np.diff(dots) == dots[1] - dots[0]).all()
    assert dots[1] > dots[0]


def test_an_env_without_a_frame_for_a_while_keeps_its_last_one(tmp_path):
    frames, other = (
        [sprite((200, 0, 0)), None, sprite((0, 0, 200))],
        sprite((0, 200, 0)),
    )
    path = tmp_path / "envs.gif"
    pictures_of([[frame, other, None] for frame in frames], gif=path).write("")
    frames[0][:] = 9  # they were copied
    with Image.open(path) as gif:
        gif.seek(1)
        assert (np.asarray(gif.convert("RGB")) == (200, 0, 0)).all(axis=2).any()


def test_a_video_leaves_out_the_steps_without_a_picture(tmp_path, monkeypatch):
    films: dict[str, list[int]] = {}
    monkeypatch.setattr(media, "Video", film_into(films))
    frames = [
        np.full((4, 4, 3), value, np.uint8) if value else None for value in (10, 0, 20)
    ]
    pictures = pictures_of([[frame] for frame in frames], mp4=tmp_path / "film.mp4")
    assert pictures.write("") == {"mp4": str(tmp_path / "film.mp4")}
    assert films == {"film": [10, 20]}


def test_the_returns_of_views_include_the_steps_that_the_gif_leaves_out(
    tmp_path, monkeypatch
):
    captions: list[str] = []
    monkeypatch.setattr(media, "_ALONE_FRAMES", 2)
    monkeypatch.setattr(
        media,
        "grid",
        lambda tiles, **_: captions.append(tiles[0][1]) or Image.new("RGB", (4, 4)),
    )
    pictures = Pictures(tmp_path / "film.gif", None, 8, views=True)
    with SerialEnv(1, pictured, seed=0) as env:
        root = env.reset()
        pictures.look(env, 0, root)
        for step in range(1, 9):
            td = env.step(
                root.set(("agents", "action"), torch.ones(1, 3, dtype=torch.int64))
            )
            pictures.look(env, step, td["next"])
            root = env.current() if step % 4 else env.reset()
    assert captions[-1] == "step 4  sum 10.0"


def test_no_frames_no_file(tmp_path):
    with pytest.raises(MediaError, match="no picture of themselves"):
        pictures_of([[None, None]], gif=tmp_path / "x.gif")
    assert pictures_of([[None, None]]).write("") == {}
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(MediaError, match=r"pip install 'envherd\[cli\]'"):
        media.require_pillow()
