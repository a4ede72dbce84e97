"""Videos: frames written to an MP4 file one by one. imageio is imported only when it is needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from envherd.executor.show.camera import MediaError

#: Longest side of an enlarged frame.
_SMALL_PX = 320


class Video:
    """Writes frames to an MP4 file, one by one.

    Attributes:
        size: width and height of the latest frame; (0, 0) before the first.
    """

    def __init__(self, path: Path, fps: float) -> None:
        self._writer = require_imageio().get_writer(
            path, format="FFMPEG", mode="I", fps=fps, codec="libx264", macro_block_size=2, ffmpeg_log_level="error"
        )
        self.size = (0, 0)

    def __enter__(self) -> Video:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Complete the file."""
        self._writer.close()

    def add(self, frame: np.ndarray | None) -> None:
        """Add a frame, uint8 `[H, W, 3]`."""
        assert frame is not None  # `Camera` has refused envs without pictures
        height, width = (side - side % 2 for side in frame.shape[:2])
        self.size = (width, height)
        self._writer.append_data(np.ascontiguousarray(frame[:height, :width]))


def enlarged(frame: np.ndarray | None) -> np.ndarray | None:
    """Return a frame, enlarged by a whole factor if it is small."""
    factor = 1 if frame is None else max(1, _SMALL_PX // max(frame.shape[:2]))
    return frame if frame is None or factor == 1 else frame.repeat(factor, 0).repeat(factor, 1)


def require_imageio() -> Any:
    """Return imageio, after checking that it can write MP4.

    Raises:
        MediaError: a package is missing.
    """
    try:
        import imageio.v2 as imageio
        import imageio_ffmpeg  # noqa: F401  # imageio needs it for MP4
    except ImportError as error:
        raise MediaError(
            f"recording failed: expected the packages imageio and imageio-ffmpeg, got {error}. "
            f"pip install 'envherd[media]'"
        ) from None
    return imageio
