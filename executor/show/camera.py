"""Pictures of envs: the world view, the result of `render`, or the observation of one agent; and videos of them.

`VideoRecorder` records videos of episodes while a rollout or a collector runs. It must be called after each step of all
envs: a video lacks the steps after which it was not called.

imageio is imported only when it is needed.
"""

import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from tensordict import TensorDictBase

from envherd.executor.batched import BatchedEnv
from envherd.executor.batches.arguments import as_count
from envherd.shm.finalizer import ClosedAtEnd
from envherd.shm.specs import EnvSpec, Key

#: Longest side of an enlarged frame.
_SMALL_PX = 320


class MediaError(RuntimeError):
    """A picture could not be made: for example, a package is missing, or no env has a picture."""


class Camera:
    """Takes the pictures of an executor's envs.

    Args:
        env: the executor.
        agent: index of the agent whose observation is shown; None for the world view, or the env's `render`.

    Attributes:
        key: of the pictures in a batch; empty or None if the env renders them.

    Raises:
        MediaError: the agents of these envs observe no pictures, or there is no such agent.
    """

    def __init__(self, env: BatchedEnv, agent: int | None = None) -> None:
        self._env = env
        self._agent = agent
        found = (
            env.spec.metadata.get("frame_key")
            if agent is None
            else _agents_key(env.spec, agent)
        )
        self.key: Any = tuple(found) if isinstance(found, list) else found
        self._has_looked = False

    def look(
        self,
        td: TensorDictBase,
        env_ids: list[int],
    ) -> list[np.ndarray | None]:
        """Return a picture of some envs, uint8 `[H, W, 3]`, from a batch `[N]` or the env; None if an env has none.

        Args:
            td: the batch.
            env_ids: of the envs.

        Raises:
            MediaError: at the first call, if no env has a picture.
        """
        if self.key:
            # Their shapes may differ.
            seen: list[Any] = [td[i][self.key].numpy(force=True) for i in env_ids]
        else:
            seen = self._env.ask("render", env_ids)
        if not self._has_looked and all(frame is None for frame in seen):
            has_modes = "render_mode" in self._env.spec.metadata
            advice = " Build them with render_mode='rgb_array'." if has_modes else ""
            raise MediaError(
                f"drawing failed: {self._env.spec.family} envs like these have no picture of themselves.{advice}"
            )
        self._has_looked = True
        return seen if self._agent is None else [frame[self._agent] for frame in seen]


def enlarged(
    frame: np.ndarray,
    height: int = _SMALL_PX,
    width: int = _SMALL_PX,
) -> np.ndarray:
    """Return a frame `[H, W, 3]`, enlarged by the largest whole factor with which it fits a height and a width."""
    factor = max(1, min(height // frame.shape[0], width // frame.shape[1]))
    return frame if factor == 1 else frame.repeat(factor, 0).repeat(factor, 1)


def _agents_key(spec: EnvSpec, agent: int) -> Key:
    for group, shape in spec.groups:
        for leaf in spec.observation:
            is_picture = (
                leaf.dtype == "uint8"
                and len(leaf.shape) == len(shape) + 3
                and leaf.shape[-1] == 3
            )
            if leaf.key[: len(group)] == group and is_picture:
                if agent >= shape[-1]:
                    raise MediaError(
                        f"drawing failed: expected an agent in 0..{shape[-1] - 1}, got {agent}."
                    )
                return leaf.key
    raise MediaError(
        f"drawing failed: expected an env whose agents observe pictures, got {spec.family} without."
    )


class Video:
    """Writes frames to the MP4 file `path`, one by one."""

    def __init__(self, path: Path, fps: float) -> None:
        self.path = path
        self._writer = require_imageio().get_writer(
            path,
            format="FFMPEG",
            mode="I",
            fps=fps,
            codec="libx264",
            macro_block_size=1,
            # The encoder takes even sides only.
            output_params=["-vf", "crop=trunc(iw/2)*2:trunc(ih/2)*2:0:0"],
            ffmpeg_log_level="error",
        )

    def close(self) -> None:
        """Complete the file."""
        self._writer.close()

    def add(self, frame: np.ndarray) -> None:
        """Add a frame, uint8 `[H, W, 3]`."""
        self._writer.append_data(np.ascontiguousarray(frame))


def require_imageio() -> Any:
    """Return imageio, after checking that it can write MP4.

    Raises:
        MediaError: a package is missing.
    """
    return require("imageio.v2", "imageio_ffmpeg", extra="media")


def require(*modules: str, extra: str) -> Any:
    """Import some modules, and return the first.

    Raises:
        MediaError: one is missing.
    """
    try:
        found = [importlib.import_module(name) for name in modules]
    except ImportError as error:
        raise MediaError(
            f"making pictures failed: expected the modules {', '.join(modules)}, got {error}. "
            f"pip install 'envherd[{extra}]'"
        ) from None
    return found[0]


class VideoRecorder(ClosedAtEnd):
    """Writes episodes of some envs as `FOLDER/envI_episodeJ.mp4`; a `callback` for `rollout` and `Collector`.

    In a loop of steps, call `recorder(env, td)` after each step. J is the executor's number of the episode. A video is
    complete after the first call in the env's next episode, or after `close`, which the end of a `with` block calls.

    The first video of an env begins with the first recorded step, later ones with the reset. If pictures are
    observations (Melting Pot's world, an agent's view), a video ends with the last observation of the episode. Envs
    with a `render` method (Gymnasium's `render_mode="rgb_array"`) are drawn after each step. Their videos lack the last
    picture of an episode if the same step reset the env.

    Args:
        env: the executor.
        folder: created if it does not exist; files of the same names are replaced.
        every: record one of this many episodes of each env, the first one included. Other episodes cost nothing.
        env_ids: the envs to record.
        agent: index of the agent whose observation is recorded; None for the world view, or the env's `render`.
        fps: steps per second of video.

    Raises:
        ValueError: an argument does not fit the envs.
        RuntimeError: `envherd[media]` is not installed, the agents observe no pictures, or there is no such agent.
    """

    def __init__(
        self,
        env: BatchedEnv,
        folder: str | Path,
        *,
        every: int = 1,
        env_ids: int | Iterable[int] = 0,
        agent: int | None = None,
        fps: float = 30.0,
    ) -> None:
        require_imageio()
        self._every = as_count("VideoRecorder", "every", every)
        wanted = [env_ids] if isinstance(env_ids, int) else env_ids
        self._ids = [
            as_count("VideoRecorder", "env_ids", env_id, least=0) for env_id in wanted
        ]
        if any(env_id >= env.num_envs for env_id in self._ids):
            raise ValueError(
                f"VideoRecorder failed: expected env_ids in 0..{env.num_envs - 1}, got {self._ids}."
            )
        if len(env.batch_size) > 1:
            raise ValueError(
                f"VideoRecorder failed: expected envs of one row, got batch size {[*env.batch_size]}."
            )
        if not fps > 0:
            raise ValueError(
                f"VideoRecorder failed: expected fps above 0, got {fps!r}."
            )
        self._folder = Path(folder)
        self._fps = fps
        self._folder.mkdir(parents=True, exist_ok=True)
        self._camera = Camera(env, agent)
        self._films: dict[tuple[int, int], Video] = {}  # by env and episode

    def __call__(self, env: BatchedEnv, td: TensorDictBase) -> None:
        """Add the pictures of a step.

        Args:
            env: the executor.
            td: batch `[N]` with `next`; only read.

        Raises:
            RuntimeError: the envs have no pictures.
        """
        numbers = env.engine.pool.slab.words["episode"]  # of the next episodes
        now = {env_id: int(numbers[env_id]) - 1 for env_id in self._ids}
        is_observed = bool(self._camera.key)
        if is_observed:
            following: Any = td.get("next")
            is_over = following.get("done").flatten().tolist()
            self._add(
                [
                    (i, number)
                    for i, number in self._films
                    if now[i] - number in (0, is_over[i])
                ],
                following,
            )
        for episode in self._films.keys() - now.items():
            self._films.pop(episode).close()
        begun = [
            (i, number)
            for i, number in now.items()
            if (i, number) not in self._films
            and number >= 0
            and number % self._every == 0
        ]
        for i, number in begun:
            path = self._folder / f"env{i}_episode{number}.mp4"
            self._films[i, number] = Video(path, self._fps)
        self._add(
            begun if is_observed else list(self._films),
            env.current() if is_observed and begun else td,
        )

    def _add(self, episodes: list[tuple[int, int]], td: TensorDictBase) -> None:
        if episodes:
            frames = self._camera.look(td, [env_id for env_id, _ in episodes])
            for episode, frame in zip(episodes, frames, strict=True):
                if frame is not None:
                    self._films[episode].add(enlarged(frame))

    def close(self) -> None:
        """Complete the videos. Idempotent."""
        for episode in list(self._films):
            self._films.pop(episode).close()
