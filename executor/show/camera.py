"""Pictures of envs: the world view, the result of `render`, or the observation of one agent; and videos of them.

imageio is imported only when it is needed.
"""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
from tensordict import TensorDictBase

from envherd.executor.batched import BatchedEnv
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
