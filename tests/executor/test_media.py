"""Pictures: which are kept, the layout of tiles, and that files decode to the drawn pictures."""

from __future__ import annotations

import sys

from tests.extras import skip_without

skip_without("media")

import numpy as np
import pytest
from PIL import Image

from envherd.executor.cli import media
from envherd.executor.cli.media import FrameLog, reduced, write_contact_sheet, write_gif
from envherd.executor.show.camera import MediaError


def sprite(colour: tuple[int, int, int], height: int = 6, width: int = 8) -> np.ndarray:
    """Return a frame of one colour with one white pixel in its corner."""
    frame = np.full((height, width, 3), colour, np.uint8)
    frame[0, 0] = 255
    return frame


def moving_log(num_envs: int, num_moments: int = 5) -> FrameLog:
    """Return a log in which each env has a different shade, and a dot moves."""
    log = FrameLog(num_moments - 1)
    for step in range(num_moments):
        frames = []
        for env_id in range(num_envs):
            frame = np.full((12, 16, 3), 40 * env_id + 20, np.uint8)
            frame[3, step] = (255, 0, 0)
            frames.append(frame)
        log.add(step, frames)
    return log


@pytest.mark.parametrize(
    ("num_steps", "kept"),
    [(5, [0, 1, 2, 3, 4, 5]), (10, [0, 2, 4, 6, 8, 10]), (11, [0, 4, 8, 11]), (20, [0, 4, 8, 12, 16, 20]), (1, [0, 1])],
)
def test_log_keeps_evenly_spread_steps_and_the_last(num_steps, kept):
    log = FrameLog(num_steps, max_frames=5)
    for step in range(num_steps + 1):
        if log.wants(step):
            log.add(step, [None])
    assert [step for step, _ in log.moments] == kept


def test_log_copies_frames():
    frame = sprite((1, 2, 3))
    log = FrameLog(1)
    log.add(0, [frame])
    frame[:] = 9
    assert log.moments[0][1][0][1, 1].tolist() == [1, 2, 3]


def test_log_keeps_the_first_envs_and_knows_which_have_pictures():
    log = FrameLog(1, num_envs=3)
    log.add(0, [None, sprite((0, 0, 0)), None, sprite((1, 1, 1))])
    log.add(1, [None, None, sprite((0, 0, 0)), None])
    assert log.env_ids == [1, 2]


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((6, 8, 3), (6, 8, 3)), ((6, 8), (6, 8, 3)), ((6, 8, 4), (6, 8, 3)), ((400, 640, 3), (200, 320, 3))],
)
def test_frames_are_reduced_to_what_fits_a_tile(shape, expected):
    assert reduced(np.zeros(shape, np.uint8)).shape == expected


@pytest.mark.parametrize("frame", [np.zeros((4, 4, 3)), np.zeros((4, 4, 2), np.uint8), np.zeros((0, 4, 3), np.uint8)])
def test_what_is_no_frame_is_refused(frame):
    with pytest.raises(MediaError, match=r"expected uint8 \[H, W, 3\]"):
        reduced(frame)


@pytest.mark.parametrize(("count", "columns"), [(1, 1), (2, 2), (4, 2), (6, 3), (8, 4), (9, 3), (16, 4)])
def test_grid_is_about_as_wide_as_a_screen(count, columns):
    assert media._grid_columns(count, (144, 192)) == columns


def test_tall_tiles_go_side_by_side():
    assert media._grid_columns(4, (300, 100)) == 4


def test_small_frames_are_enlarged_by_a_whole_factor_without_smoothing(tmp_path):
    log = FrameLog(1)
    log.add(0, [sprite((10, 200, 30))])
    path = tmp_path / "sheet.png"
    write_contact_sheet(path, log, title="a title")
    picture = np.asarray(Image.open(path))
    greens = (picture == (10, 200, 30)).all(axis=2)
    whites = (picture == 255).all(axis=2)
    factor = media.ENLARGED_PX // 8
    assert greens.sum() == (6 * 8 - 1) * factor**2
    rows, columns = np.nonzero(greens)
    assert (np.ptp(rows) + 1, np.ptp(columns) + 1) == (6 * factor, 8 * factor)
    assert whites[rows.min() : rows.min() + factor, columns.min() : columns.min() + factor].all()


@pytest.mark.slow
def test_contact_sheet_has_a_row_for_each_env_and_a_column_for_each_moment(tmp_path):
    path = tmp_path / "sheet.png"
    write_contact_sheet(path, moving_log(num_envs=3, num_moments=9))
    picture = np.asarray(Image.open(path))
    for env_id in range(3):
        shade = (picture == 40 * env_id + 20).all(axis=2)
        rows, columns = np.nonzero(shade)
        runs = np.flatnonzero(np.diff(np.unique(columns)) > 1)
        assert len(runs) + 1 == media.SHEET_COLUMNS
        assert np.diff(np.unique(rows)).max() == 1


@pytest.mark.slow
def test_gif_decodes_to_every_frame_that_was_drawn(tmp_path):
    log = moving_log(num_envs=4)
    path = tmp_path / "envs.gif"
    write_gif(path, log, title="four envs")
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
    log = FrameLog(2)
    for step, frame in enumerate([sprite((200, 0, 0)), None, sprite((0, 0, 200))]):
        log.add(step, [frame, sprite((0, 200, 0))])
    path = tmp_path / "envs.gif"
    write_gif(path, log)
    with Image.open(path) as gif:
        gif.seek(1)
        assert (np.asarray(gif.convert("RGB")) == (200, 0, 0)).all(axis=2).any()


@pytest.mark.parametrize("write", [write_gif, write_contact_sheet])
def test_no_frames_no_file(tmp_path, write):
    log = FrameLog(1)
    log.add(0, [None, None])
    with pytest.raises(MediaError, match="no picture of themselves"):
        write(tmp_path / "x", log)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(MediaError, match="pip install pillow"):
        media.require_pillow()
