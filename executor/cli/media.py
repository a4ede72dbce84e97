"""Pictures of runs: a GIF of all envs side by side or of one, a contact sheet (PNG), and a video of the first env.

Each frame of an env, uint8 `[H, W, 3]`, becomes a tile with a caption. Small frames (sprites, grids) are enlarged
without smoothing, by the largest whole factor that fits the picture. Large frames are reduced by averaging areas.
Pillow is imported only when it is needed.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from tensordict import TensorDictBase

from envherd.executor.batched import BatchedEnv
from envherd.executor.show.camera import (
    Camera,
    MediaError,
    Video,
    enlarged,
    require,
    require_imageio,
)
from envherd.shm.specs import EnvSpec

if TYPE_CHECKING:
    from PIL import Image


# ---- returns -----------------------------------------------------------------------------------
# Returns of the agents of a batch of envs, summed while a command steps them.


class Returns:
    """Sums rewards; one column per agent, one row per env (or per row of envs that are batches).

    Args:
        spec: of each env.
        num_envs: N.

    Attributes:
        agents: names of the columns.
        running: float64 `[rows, agents]`, returns of the current episodes.
        num_episodes: number of episodes that ended, without those that the loss of a worker interrupted.
    """

    def __init__(self, spec: EnvSpec, num_envs: int) -> None:
        self.agents = spec.reward_names()
        self.running = np.zeros(
            (num_envs * int(np.prod(spec.batch_shape, dtype=int)), len(self.agents))
        )
        self.num_episodes = 0
        self._total = np.zeros(len(self.agents))
        self._keys = [leaf.key for leaf in spec.reward]

    def add(self, following: TensorDictBase) -> np.ndarray:
        """Count one step of all envs.

        Args:
            following: `next` of the step.

        Returns:
            float64 `[rows, agents]`, the returns of the episodes, this step included.
        """
        rows = len(self.running)
        rewards = [
            following[key].numpy(force=True).reshape(rows, -1) for key in self._keys
        ]
        returns = self.running + np.concatenate(rewards, axis=1)
        ended = following["done"].numpy(force=True).reshape(rows)
        counted = ended
        if (interrupted := following.get("interrupted", None)) is not None:
            counted = ended & ~interrupted.numpy(force=True).reshape(rows)
        self._total += returns[counted].sum(axis=0)
        self.num_episodes += int(counted.sum())
        self.running = np.where(ended[:, None], 0.0, returns)
        return returns

    def means(self) -> dict[str, float]:
        """Return the mean return of each agent over the episodes that ended; if none did, over the unfinished ones."""
        means = (
            self._total / self.num_episodes
            if self.num_episodes
            else self.running.mean(axis=0)
        )
        return dict(zip(self.agents, means.tolist(), strict=True))


# ---- media -------------------------------------------------------------------------------------

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
#: Most envs in a GIF and rows of a contact sheet; with more, tiles would be too small to see.
MAX_GIF_ENVS = 16
MAX_SHEET_ENVS = 8
SHEET_COLUMNS = 5
GIF_FRAMES_PER_S = 12.0
#: Most moments in a GIF of one env, and the longest side of its frames.
_ALONE_FRAMES = 240
_ALONE_PX = 1600

T = TypeVar("T")


class Tile(NamedTuple):
    """A part of a picture.

    Attributes:
        left: caption at the left.
        right: caption at the right.
        frame: uint8 `[H, W, 3]`; or None.
    """

    left: str
    right: str
    frame: np.ndarray | None


class Film:
    """Keeps frames of evenly spread steps: of every step, or if there are too many, of every second, fourth, ... .

    Args:
        max_frames: most frames to keep after the first.
        num_steps: requested steps; the frame of the last one is always kept.

    Attributes:
        stride: steps from one kept frame to the next.
        moments: step -> frame, in order.
    """

    def __init__(self, max_frames: int, num_steps: int) -> None:
        self._max_frames = max_frames
        self._num_steps = num_steps
        self.stride = 1
        self.moments: dict[int, Any] = {}

    def wants(self, step: int) -> bool:
        """Return whether to keep the frame of a step; step 0 is the reset."""
        return step % self.stride == 0 or step == self._num_steps

    def add(self, step: int, frame: Any) -> None:
        """Keep the frame of a step that `wants` accepts."""
        if len(self.moments) > self._max_frames:
            self.stride = 2 * self.stride
            self.moments = {
                step: kept
                for step, kept in self.moments.items()
                if step % self.stride == 0
            }
            if not self.wants(step):
                return
        self.moments[step] = frame


class Pictures:
    """Draws envs during a run, and writes a GIF and a contact sheet at its end, and a video, each if it has a path.

    GIF and sheet show the first envs side by side, or the first env alone. The video shows each step of the first env.

    Args:
        gif: path of the animation; None for none.
        png: path of the contact sheet; None for none.
        num_steps: requested steps.
        mp4: path of the video; None for none.
        alone: show the first env alone, with up to 240 moments in the GIF; implied by the next two.
        views: show the world and what each agent observes, with the returns so far.
        agent: index of the agent whose observation is shown; None for the world view, or the env's `render`.
        fps: steps per second of the video, and of a GIF of one env.

    Attributes:
        are_wanted: there is a path.
        are_drawn: the envs must draw the pictures themselves; agents observe theirs.

    Raises:
        MediaError: a package is missing.
    """

    def __init__(  # noqa: PLR0913  # the options of the command
        self,
        gif: Path | None,
        png: Path | None,
        num_steps: int,
        *,
        mp4: Path | None = None,
        alone: bool = False,
        views: bool = False,
        agent: int | None = None,
        fps: float = 20.0,
    ) -> None:
        self._gif = gif
        self._png = png
        self._mp4 = mp4
        self._has_views = views
        self._agent = agent
        self._fps = fps
        self._is_kept = gif is not None or png is not None
        self._is_alone = alone or views or agent is not None
        self.are_wanted = self._is_kept or mp4 is not None
        self.are_drawn = self.are_wanted and agent is None
        self._film = Film(_ALONE_FRAMES if self._is_alone else 120, num_steps)
        self._look: (
            Callable[[TensorDictBase, list[int]], list[np.ndarray | None]] | None
        ) = None
        self._video: Video | None = None
        self._latest: dict[int, np.ndarray] = {}
        if self._is_kept or views:
            require_pillow()
        if mp4 is not None:
            require_imageio()

    def look(self, env: BatchedEnv, step: int, td: TensorDictBase) -> None:
        """Keep the frames of a step, if they are wanted.

        Args:
            env: the executor.
            step: 0 for the reset, t after the t-th step.
            td: batch `[N]` of the reset, or the `next` of the step.

        Raises:
            MediaError: at the first call, if no env has a picture.
        """
        is_kept = self._is_kept and self._film.wants(step)
        # Views sum up the rewards of all steps.
        if not (is_kept or self._mp4 is not None or self._has_views):
            return
        if self._look is None:
            self._look = (
                _Views(env).look if self._has_views else Camera(env, self._agent).look
            )
        has_many = self._is_kept and not self._is_alone
        env_ids = list(range(min(env.num_envs, MAX_GIF_ENVS if has_many else 1)))
        frames = self._look(td, env_ids)
        if self._mp4 is not None and frames[0] is not None:
            # Made with its first frame: a run without any leaves no file.
            self._video = self._video or Video(self._mp4, self._fps)
            self._video.add(enlarged(frames[0]))
        if is_kept:
            for env_id, frame in zip(env_ids, frames, strict=True):
                # An env without a frame for a while keeps its last one.
                if frame is not None:
                    self._latest[env_id] = (
                        reduced(enlarged(frame), _ALONE_PX)
                        if self._is_alone
                        else reduced(frame)
                    )
            self._film.add(step, dict(self._latest))

    def close(self) -> None:
        """Complete the video. Idempotent."""
        if self._video is not None:
            self._video.close()

    def write(self, title: str) -> dict[str, str]:
        """Write the files, and complete the video; return name -> path."""
        self.close()
        moments = self._film.moments
        env_ids = sorted(self._latest)
        if self._gif is not None and self._is_alone:
            save_animation(
                self._gif,
                [
                    require_pillow().Image.fromarray(frames[0])
                    for frames in moments.values()
                ],
                frames_per_s=self._fps / self._film.stride,
            )
        elif self._gif is not None:
            frames = [
                grid(
                    [Tile(f"env {i}", f"step {step}", frames.get(i)) for i in env_ids],
                    title=title,
                    width_px=GIF_WIDTH_PX,
                    room_for=list(self._latest.values()),
                )
                for step, frames in moments.items()
            ]
            save_animation(self._gif, frames, frames_per_s=GIF_FRAMES_PER_S)
        if self._png is not None:
            picked = _spread(list(moments), SHEET_COLUMNS)
            tiles = [
                Tile(
                    f"env {i}",
                    f"step {step}",
                    frame if frame is None else reduced(frame),
                )
                for i in env_ids[:MAX_SHEET_ENVS]
                for step in picked
                for frame in [moments[step].get(i)]
            ]
            grid(
                tiles,
                columns=len(picked),
                title=title,
                width_px=SHEET_WIDTH_PX,
            ).save(self._png, optimize=True)
        return {
            name: str(path)
            for name, path in (
                ("gif", self._gif),
                ("png", self._png),
                ("mp4", self._mp4),
            )
            if path is not None
        }


class _Views:
    """Draws the world and the view of each agent of the first env in one picture, with the returns so far.

    Raises:
        MediaError: its agents observe no pictures.
    """

    def __init__(self, env: BatchedEnv) -> None:
        self._world = Camera(env)
        self._players = Camera(env, 0).key
        self._returns = Returns(env.spec, 1)
        self._reward = env.spec.reward[0].key
        names = self._returns.agents
        roles = list(env.spec.metadata.get("agent_roles") or ())
        has_roles = len(roles) == len(names) and set(roles) != {"default"}
        self._names = (
            [f"{name} {role}" for name, role in zip(names, roles, strict=True)]
            if has_roles
            else names
        )
        self._title = str(env.spec.metadata.get("name") or env.spec.family)
        self._step = 0

    def look(self, td: TensorDictBase, env_ids: list[int]) -> list[np.ndarray | None]:
        """Return the picture of a reset or of a step, uint8 `[H, W, 3]`, with the returns including the step."""
        is_root = td.get(self._reward, None) is None
        self._step = 0 if is_root else self._step + 1
        returns = (self._returns.running if is_root else self._returns.add(td[:1]))[0]
        caption = f"step {self._step}  sum {returns.sum():.1f}"
        tiles = [
            Tile(self._title, caption, world) for world in self._world.look(td, env_ids)
        ]
        tiles += [
            Tile(name, f"return {value:.1f}", view)
            for name, value, view in zip(
                self._names,
                returns,
                td[0][self._players].numpy(force=True),
                strict=True,
            )
        ]
        if td["done"][0].any():
            self._step = 0
        return [np.asarray(grid(tiles, width_px=_ALONE_PX))]


def reduced(frame: np.ndarray, largest_px: int = KEPT_PX) -> np.ndarray:
    """Return a frame whose sides are at most `largest_px`; a copy.

    Raises:
        MediaError: it is not uint8 `[H, W, 3]`, `[H, W, 4]` (alpha is dropped) or `[H, W]` (which becomes grey).
    """
    array = np.asarray(frame)
    if (
        array.dtype != np.uint8
        or array.ndim not in (2, 3)
        or array.shape[2:] not in ((), (3,), (4,))
        or 0 in array.shape
    ):
        raise MediaError(
            f"taking a frame failed: expected uint8 [H, W, 3], got {array.dtype} {list(array.shape)}."
        )
    pillow = require_pillow()
    picture = pillow.Image.fromarray(np.ascontiguousarray(array)).convert("RGB")
    picture.thumbnail((largest_px, largest_px), pillow.Image.BOX)
    return np.asarray(picture)


def grid(
    tiles: Sequence[Tile],
    *,
    width_px: int,
    columns: int | None = None,
    title: str = "",
    room_for: Sequence[np.ndarray] = (),
) -> "Image.Image":
    """Return the picture of some tiles in rows.

    Args:
        tiles: their frames are enlarged, each by a whole factor.
        width_px: most pixels of a row of enlarged frames.
        columns: tiles in a row; None for a picture of about 4:3.
        title: above the tiles.
        room_for: frames for the largest of which to leave room; none for those of the tiles.
    """
    pillow = require_pillow()
    frames = room_for or [tile.frame for tile in tiles if tile.frame is not None]
    height = max(frame.shape[0] for frame in frames)
    width = max(frame.shape[1] for frame in frames)
    columns = columns or _columns(len(tiles), height, width)
    factor = max(
        1,
        min(ENLARGED_PX // max(height, width), width_px // (columns * width)),
    )
    height = height * factor
    width = width * factor
    top = GAP_PX + (CAPTION_PX if title else 0)
    step_x = width + GAP_PX
    step_y = height + CAPTION_PX + GAP_PX
    canvas: Image.Image = pillow.Image.new(
        "RGB",
        (GAP_PX + columns * step_x, top + math.ceil(len(tiles) / columns) * step_y),
        BACKGROUND,
    )
    draw = pillow.ImageDraw.Draw(canvas)
    font = pillow.ImageFont.load_default(FONT_PX)
    draw.text((GAP_PX, GAP_PX / 2 + CAPTION_PX / 2), title, INK, font, anchor="lm")
    for index, tile in enumerate(tiles):
        row, column = divmod(index, columns)
        x = GAP_PX + column * step_x
        y = top + row * step_y
        draw.rectangle((x, y, x + width - 1, y + height + CAPTION_PX - 1), PANEL)
        draw.text((x + 6, y + CAPTION_PX / 2), tile.left, INK, font, anchor="lm")
        draw.text(
            (x + width - 6, y + CAPTION_PX / 2),
            tile.right,
            FAINT,
            font,
            anchor="rm",
        )
        if tile.frame is not None:
            picture = pillow.Image.fromarray(enlarged(tile.frame, height, width))
            canvas.paste(
                picture,
                (
                    x + (width - picture.width) // 2,
                    y + CAPTION_PX + (height - picture.height) // 2,
                ),
            )
    return canvas


def _columns(count: int, height: int, width: int) -> int:
    """Return the number of columns that makes a picture of tiles closest to 4:3, with few empty places."""

    def badness(columns: int) -> tuple[float, int]:
        rows = math.ceil(count / columns)
        shape = abs(
            math.log((columns * width) / (rows * (height + CAPTION_PX)) / (4 / 3))
        )
        return shape + 0.5 * (rows * columns - count), columns

    return min(range(1, count + 1), key=badness)


def save_animation(
    path: Path,
    pictures: "Sequence[Image.Image]",
    *,
    frames_per_s: float,
) -> None:
    """Write pictures of one size as a looping GIF.

    They share a palette: files are half as large, and colours do not flicker.
    """
    pillow = require_pillow()
    picked = _spread(pictures, 8)
    height = picked[0].height
    # An env's pictures may change their size: what lies outside is cut.
    strip = pillow.Image.new("RGB", (picked[0].width, height * len(picked)))
    for index, picture in enumerate(picked):
        strip.paste(picture, (0, height * index))
    palette = strip.quantize(method=pillow.Image.Quantize.MEDIANCUT)
    frames = [
        picture.quantize(palette=palette, dither=pillow.Image.Dither.NONE)
        for picture in pictures
    ]
    frames[0].save(
        path,
        save_all=True,
        append_images=frames[1:],
        duration=round(1000 / frames_per_s),
        loop=0,
    )


def _spread(items: Sequence[T], count: int) -> list[T]:
    """Return at most `count` of some items, evenly spread, the first and the last included."""
    places = np.linspace(0, len(items) - 1, count).round().astype(int)
    return [items[place] for place in np.unique(places)]


def require_pillow() -> Any:
    """Return Pillow, with the submodules that this file uses.

    Raises:
        MediaError: it is not installed.
    """
    return require("PIL", "PIL.Image", "PIL.ImageDraw", "PIL.ImageFont", extra="cli")
