"""Videos: frames written to an MP4 file one by one. imageio is imported only when it is needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from envherd.executor.show.camera import MediaError


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
            macro_block_size=2,
            ffmpeg_log_level="error",
        )

    def close(self) -> None:
        """Complete the file."""
        self._writer.close()

    def add(self, frame: np.ndarray) -> None:
        """Add a frame, uint8 `[H, W, 3]`."""
        height, width = (side - side % 2 for side in frame.shape[:2])
        self._writer.append_data(np.ascontiguousarray(frame[:height, :width]))


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
