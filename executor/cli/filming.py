"""The views of an env that `envherd record` films, and a player's path (`Timeline`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from tensordict import TensorDictBase

from envherd.executor.batched import BatchedEnv
from envherd.executor.cli.media import Sheet
from envherd.executor.cli.returns import Returns
from envherd.executor.show.camera import Camera, MediaError
from envherd.executor.show.video import enlarged

_WIDTH_PX = 1600


class SingleView:
    """Draws the world (or what `render` returns), or the observation of one agent.

    Args:
        env: an executor of one env.
        agent: index of the agent; None for the world.
    """

    def __init__(self, env: BatchedEnv, agent: int | None) -> None:
        self._camera = Camera(env, agent)

    def look(self, td: TensorDictBase, *, is_root: bool = True) -> np.ndarray:  # noqa: ARG002  # `Views` needs it
        """Return the picture of a reset or of a step, uint8 `[H, W, 3]`."""
        frame = enlarged(self._camera.look(td)[0])
        assert frame is not None  # `Camera` has refused envs without pictures
        return frame


class Views:
    """Draws the world and the view of each player in one picture, with the returns so far.

    Args:
        env: an executor of one env.

    Raises:
        MediaError: its players observe no pictures.
    """

    def __init__(self, env: BatchedEnv) -> None:
        self._world, self._players = Camera(env), Camera(env, 0).key
        self._returns = Returns(env.spec, 1)
        names, roles = self._returns.agents, list(env.spec.metadata.get("agent_roles") or ())
        has_roles = len(roles) == len(names) and set(roles) != {"default"}
        self._names = [f"{name} {role}" for name, role in zip(names, roles, strict=True)] if has_roles else names
        self._title = _title(env)
        self._step = 0
        self._sheet: Sheet | None = None

    def look(self, td: TensorDictBase, *, is_root: bool = True) -> np.ndarray:
        """Return the picture of a reset or of a step, uint8 `[H, W, 3]`, with the returns including the step."""
        self._step = 0 if is_root else self._step + 1
        returns = (self._returns.running if is_root else self._returns.add(td))[0]
        tiles: list[tuple[str, str, np.ndarray | None]] = [
            (self._title, f"step {self._step}  sum {returns.sum():.1f}", self._world.look(td)[0])
        ]
        views = td[self._players][0].numpy(force=True)
        tiles += [
            (name, f"return {value:.1f}", view) for name, value, view in zip(self._names, returns, views, strict=True)
        ]
        if self._sheet is None:
            shapes = [frame.shape for _, _, frame in tiles if frame is not None]
            largest = max(shape[0] for shape in shapes), max(shape[1] for shape in shapes)
            self._sheet = Sheet.for_grid(largest, count=len(tiles), width_px=_WIDTH_PX)
        picture = np.asarray(self._sheet.draw(tiles, ""))
        if not is_root and td["done"].any():
            self._step = 0
        return picture


class Timeline:
    """Records the path and the rewards of a player, and draws them.

    Args:
        env: an executor of one env.
        agent: index of the player.
    """

    def __init__(self, env: BatchedEnv, agent: int) -> None:
        self._names = Returns(env.spec, 1).agents
        if agent >= len(self._names):
            raise MediaError(f"--agent failed: expected an agent in 0..{len(self._names) - 1}, got {agent}.")
        self._agent = agent
        self._title = _title(env)
        self._cell_px = int(env.spec.metadata.get("cell_px") or 0)
        self._keys = [leaf.key for leaf in env.reward_spec]
        self._place = next((leaf.key for leaf in env.observation_spec if leaf.key[-1] == "POSITION"), None)
        self._world: Any = Camera(env)
        self._picture: np.ndarray | None = None
        self._places: list[np.ndarray] = []
        self._rewards: list[np.ndarray] = []
        self._ends: list[int] = []

    def start(self, root: TensorDictBase) -> None:
        """Record the first reset."""
        self._picture = self._world.look(root)[0]
        self._note_place(root)

    def add(self, following: TensorDictBase) -> None:
        """Record a step."""
        self._rewards.append(np.concatenate([following[key].numpy(force=True).ravel() for key in self._keys]))
        if following["done"].any():
            self._ends.append(len(self._rewards))
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


def _title(env: BatchedEnv) -> str:
    return str(env.spec.metadata.get("name") or env.spec.family)
