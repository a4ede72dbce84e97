"""Pictures of a rollout: one animated GIF of all envs side by side, and one contact sheet (PNG).

Each frame of an env, uint8 `[H, W, 3]`, becomes a tile with a caption. Small frames (sprites, grids) are enlarged
without smoothing, by the largest whole factor that fits the picture. Large frames are reduced by averaging areas.
Frames of one picture may differ in size. Pillow is imported only when it is needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from envherd.executor.show.camera import MediaError

if TYPE_CHECKING:
    from PIL import Image, ImageFont

#: Longest side of a frame in a grid.
KEPT_PX = 320
#: Longest side of an enlarged frame. The widths of whole pictures also limit the factor.
ENLARGED_PX = 480
GIF_WIDTH_PX = 1280
SHEET_WIDTH_PX = 2000
GAP_PX = 10
CAPTION_PX = 22
FONT_PX = 14
BACKGROUND = (24, 26, 32)
PANEL = (38, 41, 50)
INK = (226, 229, 236)
FAINT = (140, 146, 160)
LAST_FRAME_MS = 1500
#: Most envs in a GIF and rows of a contact sheet; with more, tiles would be too small to see.
MAX_GIF_ENVS = 16
MAX_SHEET_ENVS = 8
SHEET_COLUMNS = 5


@dataclass
class FrameLog:
    """Frames of some envs at some steps, reduced when they are added. Of many steps it keeps every second, fourth, ...

    Attributes:
        num_steps: requested steps; the frames of the last one are always kept.
        max_frames: most moments to keep after the first.
        num_envs: keep frames of the first `num_envs` envs.
        largest_px: longest side of a kept frame; larger frames are reduced to it.
        stride: steps from one kept moment to the next.
        moments: `(step, one tile or None for each env)`, in order.
    """

    num_steps: int
    max_frames: int = 120
    num_envs: int = MAX_GIF_ENVS
    largest_px: int = KEPT_PX
    stride: int = 1
    moments: list[tuple[int, list[np.ndarray | None]]] = field(default_factory=list)

    def wants(self, step: int) -> bool:
        """Return whether to keep the frames of a step; step 0 is the reset."""
        return step % self.stride == 0 or step == self.num_steps

    def add(self, step: int, frames: Iterable[np.ndarray | None]) -> None:
        """Keep the frames of a step that `wants` accepts.

        Args:
            step: 0 for the reset, t after the t-th step.
            frames: uint8 `[H, W, 3]` for each env (copied), or None where an env has no picture.
        """
        if len(self.moments) > self.max_frames:
            self.moments, self.stride = self.moments[::2], 2 * self.stride
            if not self.wants(step):
                return
        kept = zip(range(self.num_envs), frames, strict=False)
        tiles = [None if frame is None else reduced(frame, self.largest_px) for _, frame in kept]
        self.moments.append((step, tiles))

    @property
    def env_ids(self) -> list[int]:
        """The envs that have at least one frame."""
        width = max((len(frames) for _, frames in self.moments), default=0)
        return [i for i in range(width) if any(frames[i] is not None for _, frames in self.moments)]


def reduced(frame: np.ndarray, largest_px: int = KEPT_PX) -> np.ndarray:
    """Return a frame whose sides are at most `largest_px`; a copy.

    Raises:
        MediaError: it is not uint8 `[H, W, 3]`, `[H, W, 4]` (alpha is dropped) or `[H, W]` (which becomes grey).
    """
    array = np.asarray(frame)
    if array.ndim == 2:
        array = np.repeat(array[:, :, None], 3, axis=2)
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] not in (3, 4) or 0 in array.shape:
        raise MediaError(f"taking a frame failed: expected uint8 [H, W, 3], got {array.dtype} {list(array.shape)}.")
    array = array[:, :, :3]
    longest = max(array.shape[:2])
    if longest <= largest_px:
        return array.copy()
    pillow = require_pillow()
    height, width = (max(1, round(side * largest_px / longest)) for side in array.shape[:2])
    return np.asarray(pillow.Image.fromarray(np.ascontiguousarray(array)).resize((width, height), pillow.Image.BOX))


def write_gif(path: Path, log: FrameLog, *, title: str = "", frames_per_s: float = 12.0) -> None:
    """Write an animation of all envs in a grid, each tile with its env id and step.

    Raises:
        MediaError: Pillow is missing, or there is no frame.
    """
    env_ids = _require_frames(log, path)
    largest = _largest(log)
    sheet = Sheet.for_grid(largest, count=len(env_ids), width_px=GIF_WIDTH_PX)
    pictures = []
    last: dict[int, np.ndarray] = {}
    for step, frames in log.moments:
        last.update({i: frame for i in env_ids if (frame := frames[i]) is not None})
        tiles = [(f"env {i}", f"step {step}", last.get(i)) for i in env_ids]
        pictures.append(sheet.draw(tiles, title))
    save_animation(path, pictures, frames_per_s=frames_per_s)


def save_animation(path: Path, pictures: Sequence[Image.Image], *, frames_per_s: float) -> None:
    """Write pictures of one size as a looping GIF with one palette."""
    palette = _shared_palette(pictures)
    dither = require_pillow().Image.Dither.NONE
    first, *rest = (picture.quantize(palette=palette, dither=dither) for picture in pictures)
    durations = [round(1000 / frames_per_s)] * len(pictures)
    durations[-1] = LAST_FRAME_MS
    first.save(path, save_all=True, append_images=rest, duration=durations, loop=0)


def write_contact_sheet(path: Path, log: FrameLog, *, title: str = "") -> None:
    """Write one picture with a row for each env and a column for each of a few moments of the rollout.

    Raises:
        MediaError: Pillow is missing, or there is no frame.
    """
    env_ids = _require_frames(log, path)[:MAX_SHEET_ENVS]
    picked = np.unique(np.linspace(0, len(log.moments) - 1, SHEET_COLUMNS).round().astype(int))
    moments = [log.moments[i] for i in picked]
    count = len(moments) * len(env_ids)
    sheet = Sheet.for_tiles(_largest(log), columns=len(moments), count=count, width_px=SHEET_WIDTH_PX)
    tiles = [(f"env {i}", f"step {step}", frames[i]) for i in env_ids for step, frames in moments]
    sheet.draw(tiles, title).save(path, optimize=True)


def write_pictures(frames: FrameLog | None, gif: Path | None, png: Path | None, title: str) -> dict[str, str]:
    """Write the frames of a rollout as a GIF and as a contact sheet, each if it has a path; return name -> path."""
    files = {}
    for name, path, write in (("gif", gif, write_gif), ("png", png, write_contact_sheet)):
        if frames is not None and path is not None:
            write(path, frames, title=title)
            files[name] = str(path)
    return files


@dataclass(frozen=True)
class Sheet:
    """A grid of captioned tiles of one size, with a title above."""

    tile: tuple[int, int]  # height, width of its picture
    columns: int
    rows: int

    @classmethod
    def for_grid(cls, largest: tuple[int, int], *, count: int, width_px: int) -> Sheet:
        """Return a sheet of about 4:3; `largest` is the height and width of the largest frame."""
        return cls.for_tiles(largest, columns=_grid_columns(count, largest), count=count, width_px=width_px)

    @classmethod
    def for_tiles(cls, largest: tuple[int, int], *, columns: int, count: int, width_px: int) -> Sheet:
        """Return a sheet with a number of columns."""
        factor = max(1, min(ENLARGED_PX // max(largest), width_px // (columns * largest[1])))
        height, width = (side * factor for side in largest)
        return cls((height, width), columns, math.ceil(count / columns))

    def draw(self, tiles: Sequence[tuple[str, str, np.ndarray | None]], title: str) -> Image.Image:
        """Return the picture of some tiles, each a left caption, a right caption and a frame or None."""
        pillow = require_pillow()
        top = GAP_PX + (CAPTION_PX if title else 0)
        cell_h, cell_w = self.tile[0] + CAPTION_PX, self.tile[1]
        size = (GAP_PX + self.columns * (cell_w + GAP_PX), top + self.rows * (cell_h + GAP_PX))
        canvas = pillow.Image.new("RGB", size, BACKGROUND)
        draw = pillow.ImageDraw.Draw(canvas)
        font = _font()
        if title:
            draw.text((GAP_PX, GAP_PX / 2 + CAPTION_PX / 2), title, INK, font, anchor="lm")
        for index, (left, right, frame) in enumerate(tiles):
            row, column = divmod(index, self.columns)
            x, y = GAP_PX + column * (cell_w + GAP_PX), top + row * (cell_h + GAP_PX)
            draw.rectangle((x, y, x + cell_w - 1, y + cell_h - 1), PANEL)
            middle = y + CAPTION_PX / 2
            draw.text((x + 6, middle), left, INK, font, anchor="lm")
            draw.text((x + cell_w - 6, middle), right, FAINT, font, anchor="rm")
            if frame is not None:
                picture = self._enlarged(frame)
                offset = ((cell_w - picture.width) // 2, CAPTION_PX + (self.tile[0] - picture.height) // 2)
                canvas.paste(picture, (x + offset[0], y + offset[1]))
        return canvas

    def _enlarged(self, frame: np.ndarray) -> Image.Image:
        factor = max(1, min(self.tile[0] // frame.shape[0], self.tile[1] // frame.shape[1]))
        pixels = frame.repeat(factor, axis=0).repeat(factor, axis=1)
        picture: Image.Image = require_pillow().Image.fromarray(pixels)
        return picture


def _grid_columns(count: int, tile: tuple[int, int]) -> int:
    """Return the number of columns that makes the grid closest to 4:3."""
    height, width = tile

    def badness(columns: int) -> tuple[float, int]:
        rows = math.ceil(count / columns)
        shape = abs(math.log((columns * width) / (rows * (height + CAPTION_PX)) / (4 / 3)))
        return shape + 0.5 * (rows * columns - count), columns

    return min(range(1, count + 1), key=badness)


def _largest(log: FrameLog) -> tuple[int, int]:
    shapes = [frame.shape for _, frames in log.moments for frame in frames if frame is not None]
    return max(shape[0] for shape in shapes), max(shape[1] for shape in shapes)


def _require_frames(log: FrameLog, path: Path) -> list[int]:
    require_pillow()
    if not log.env_ids:
        raise MediaError(f"writing {path} failed: expected frames, got none: these envs have no picture of themselves.")
    return log.env_ids


def _shared_palette(pictures: Sequence[Image.Image]) -> Image.Image:
    """Return one palette for all frames, so that colours do not flicker."""
    pillow = require_pillow()
    picked = [pictures[i] for i in np.unique(np.linspace(0, len(pictures) - 1, 8).round().astype(int))]
    strip = pillow.Image.new("RGB", (picked[0].width, sum(picture.height for picture in picked)))
    y = 0
    for picture in picked:
        strip.paste(picture, (0, y))
        y += picture.height
    palette: Image.Image = strip.quantize(method=pillow.Image.Quantize.MEDIANCUT)
    return palette


def _font() -> ImageFont.ImageFont | ImageFont.FreeTypeFont:
    font: ImageFont.ImageFont | ImageFont.FreeTypeFont = require_pillow().ImageFont.load_default(FONT_PX)
    return font


def require_pillow() -> Any:
    """Return Pillow, with the submodules that this file uses.

    Raises:
        MediaError: it is not installed.
    """
    try:
        import PIL.Image
        import PIL.ImageDraw
        import PIL.ImageFont
    except ImportError as error:
        raise MediaError("making pictures failed: expected the package Pillow, got none. pip install pillow") from error
    return PIL


def require_matplotlib() -> None:
    """Check that charts can be drawn.

    Raises:
        MediaError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise MediaError("drawing failed: expected the package matplotlib, got none. pip install 'envherd[media]'")
