"""Films and pictures of one env: all views side by side (`Views`), animations (`Gif`), a player's path (`Timeline`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from tensordict import TensorDictBase

from envherd.executor.batched import BatchedEnv
from envherd.executor.cli.media import Sheet, require_pillow, save_animation
from envherd.executor.cli.returns import ReturnMeter
from envherd.executor.show.camera import Camera, MediaError
from envherd.shm.specs import EnvSpec, Key

_WIDTH_PX = 1600
#: Most frames of a GIF; longer films keep only every second, fourth, ... step.
_GIF_FRAMES = 240


class Views:
    """Draws the world and the view of each player in one picture, with the returns so far.

    Args:
        env: an executor of one env.

    Raises:
        MediaError: its players observe no pictures.
    """

    def __init__(self, env: BatchedEnv) -> None:
        self._world = Camera(env)
        self._players = Camera(env, 0).key
        self._names = [f"{name} {role}".strip() for name, role in zip(*players_of(env.spec), strict=True)]
        self._meter = ReturnMeter.for_spec(env.spec, 1)
        self._rewards = [leaf.key for leaf in env.reward_spec]
        self._title = str(env.spec.metadata.get("name") or env.spec.family)
        self._step = 0
        self._sheet: Sheet | None = None

    def first(self, root: TensorDictBase) -> np.ndarray:
        """Return the picture of a reset, uint8 `[H, W, 3]`."""
        self._step = 0
        return self._draw(root, self._meter.running[0])

    def next(self, following: TensorDictBase) -> np.ndarray:
        """Return the picture of a step, with the returns including it."""
        self._step += 1
        rewards = [following[key].numpy(force=True) for key in self._rewards]
        returns = self._meter.running[0] + _rewards_of(following, self._rewards)
        self._meter.add(rewards, following["done"].numpy(force=True))
        picture = self._draw(following, returns)
        self._step *= not bool(following["done"].any())
        return picture

    def _draw(self, td: TensorDictBase, returns: np.ndarray) -> np.ndarray:
        world = self._world.look(td)[0]
        views = td[self._players][0].numpy(force=True)
        tiles: list[tuple[str, str, np.ndarray | None]] = [
            (self._title, f"step {self._step}  sum {returns.sum():.1f}", world)
        ]
        tiles += [
            (name, f"return {value:.1f}", view) for name, value, view in zip(self._names, returns, views, strict=True)
        ]
        if self._sheet is None:
            shapes = [frame.shape for _, _, frame in tiles if frame is not None]
            largest = max(shape[0] for shape in shapes), max(shape[1] for shape in shapes)
            self._sheet = Sheet.for_grid(largest, count=len(tiles), width_px=_WIDTH_PX)
        return np.asarray(self._sheet.draw(tiles, ""))


class Gif:
    """Collects frames and writes them as an animation; see `_GIF_FRAMES` for long films.

    Attributes:
        size: width and height of the latest frame; (0, 0) before the first.
    """

    def __init__(self, path: Path, fps: float) -> None:
        require_pillow()
        self._path, self._fps = path, fps
        self._frames: list[np.ndarray] = []
        self._stride, self._count = 1, 0
        self.size = (0, 0)

    def __enter__(self) -> Gif:
        return self

    def __exit__(self, *_: object) -> None:
        if self._frames:
            images = [require_pillow().Image.fromarray(frame) for frame in self._frames]
            save_animation(self._path, images, frames_per_s=self._fps / self._stride)

    def add(self, frame: np.ndarray | None) -> None:
        """Add a frame, uint8 `[H, W, 3]`."""
        assert frame is not None  # `Camera` has refused envs without pictures
        self.size = (frame.shape[1], frame.shape[0])
        if self._count % self._stride == 0:
            self._frames.append(frame.copy())
            if len(self._frames) > _GIF_FRAMES:
                self._frames, self._stride = self._frames[::2], 2 * self._stride
        self._count += 1


class Timeline:
    """Records the path and the rewards of a player, and draws them.

    Args:
        env: an executor of one env.
        agent: index of the player.
    """

    def __init__(self, env: BatchedEnv, agent: int) -> None:
        names, _ = players_of(env.spec)
        if agent >= len(names):
            raise MediaError(f"--agent failed: expected an agent in 0..{len(names) - 1}, got {agent}.")
        self._agent, self._names = agent, names
        self._title = str(env.spec.metadata.get("name") or env.spec.family)
        self._cell_px = int(env.spec.metadata.get("cell_px") or 0)
        self._keys = [leaf.key for leaf in env.reward_spec]
        self._place = next((leaf.key for leaf in env.observation_spec if leaf.key[-1] == "POSITION"), None)
        self._world: Any = Camera(env)
        self._picture: np.ndarray | None = None
        self._places: list[np.ndarray] = []
        self._rewards: list[np.ndarray] = []
        self._ends: list[int] = []

    def first(self, root: TensorDictBase) -> None:
        """Record a reset."""
        if self._picture is None:
            self._picture = self._world.look(root)[0]
        self._note_place(root)

    def next(self, following: TensorDictBase) -> None:
        """Record a step."""
        self._rewards.append(_rewards_of(following, self._keys))
        if following["done"].any():
            self._ends.append(len(self._rewards))
        elif not self._ends:
            self._note_place(following)

    def _note_place(self, td: TensorDictBase) -> None:
        if self._place is not None and not self._ends:
            self._places.append(td[self._place][0, self._agent].numpy(force=True).copy())

    def write(self, path: Path) -> None:
        """Write the picture (PNG): the path over the world of the first episode, and the returns over time.

        Raises:
            MediaError: no step was recorded.
        """
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        if not self._rewards:
            raise MediaError("drawing failed: expected at least one step, got none.")
        figure = Figure(figsize=(13, 5), layout="constrained")
        FigureCanvasAgg(figure)
        figure.suptitle(f"{self._title}: {self._names[self._agent]}", fontsize=12)
        world, returns = figure.subplots(1, 2, width_ratios=(1.2, 1))
        self._draw_path(world)
        self._draw_returns(returns)
        figure.savefig(path, dpi=110)

    def _draw_path(self, axes: Any) -> None:
        axes.set_axis_off()
        if self._picture is not None:
            axes.imshow(self._picture)
        if not self._places:
            axes.set_title("these envs do not say where their players are", fontsize=9)
            return
        places = (np.array(self._places, float) + 0.5) * (self._cell_px or 1) - 0.5
        axes.plot(places[:, 0], places[:, 1], color="white", linewidth=1, alpha=0.6)
        points = axes.scatter(places[:, 0], places[:, 1], c=np.arange(len(places)), cmap="plasma", s=9, zorder=3)
        rewards = np.array(self._rewards)[: len(places) - 1, self._agent]
        got = np.flatnonzero(rewards) + 1
        axes.scatter(places[got, 0], places[got, 1], marker="o", s=40, facecolors="none", edgecolors="white", zorder=4)
        axes.get_figure().colorbar(points, ax=axes, label="step", shrink=0.7)
        axes.set_title("path in the first episode; circles: steps with a reward", fontsize=9)

    def _draw_returns(self, axes: Any) -> None:
        rewards = np.array(self._rewards)
        for player, name in enumerate(self._names):
            mine = player == self._agent
            line = {"color": "#3465a4", "linewidth": 2, "zorder": 3} if mine else {"color": "#bbbbbb", "linewidth": 0.8}
            axes.step(np.arange(1, len(rewards) + 1), rewards[:, player].cumsum(), where="post", label=name, **line)
        for end in self._ends:
            axes.axvline(end, color="#888888", linestyle="--", linewidth=0.8)
        axes.set(xlabel="step", ylabel="sum of rewards", title=f"{self._names[self._agent]} (blue) and the others")
        axes.title.set_fontsize(9)
        axes.grid(alpha=0.3)


def _rewards_of(following: TensorDictBase, keys: list[Key]) -> np.ndarray:
    """Return the rewards of a step, float64 `[P]`, one for each player."""
    return np.concatenate([np.asarray(following[key].numpy(force=True), float).ravel() for key in keys])


def players_of(spec: EnvSpec) -> tuple[list[str], list[str]]:
    """Return the names of the players, by column of the rewards, and their roles ("" if there are none)."""
    names = list(ReturnMeter.for_spec(spec, 1).agents)
    roles = list(spec.metadata.get("agent_roles") or ())
    shown = roles if len(roles) == len(names) and set(roles) != {"default"} else [""] * len(names)
    return names, shown
