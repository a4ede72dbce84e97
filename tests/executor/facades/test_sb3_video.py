"""SB3's video recorder over the facade writes the envs' pictures."""

import functools

from tests.extras import skip_without

skip_without("sb3", "all")

import numpy as np
import pytest
from stable_baselines3.common.vec_env import VecMonitor, VecVideoRecorder
from tqdm import tqdm

from envherd.sb3 import DummyVecEnv, SubprocVecEnv
from tests.envs.gymnasium_envs import Horizon

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore::SyntaxWarning", "ignore::DeprecationWarning"
    ),  # of moviepy, when it is compiled
]

NUM_FRAMES = 8
FPS = 5


class Brighter(Horizon):
    """Draws a square that becomes brighter with every step; a second one identifies the env."""

    render_mode = "rgb_array"

    def __init__(self, env_id: int) -> None:
        self.metadata = {"render_modes": ["rgb_array"], "render_fps": FPS}
        self.env_id = env_id
        self.count = 0

    def render(self):
        return np.full((32, 32, 3), 10 + 12 * self.count + 100 * self.env_id, np.uint8)


@pytest.mark.parametrize(
    "make",
    [DummyVecEnv, functools.partial(SubprocVecEnv, num_workers=2)],
    ids=["own", "workers"],
)
def test_a_video_has_a_frame_for_every_step(make, tmp_path, monkeypatch):
    from moviepy.video.io.VideoFileClip import VideoFileClip

    # Moviepy's progress bar would leave a thread behind.
    monkeypatch.setattr(tqdm, "monitor_interval", 0)
    env = make([functools.partial(Brighter, 0), functools.partial(Brighter, 1)])
    env = VecVideoRecorder(
        VecMonitor(env),
        str(tmp_path),
        lambda step: step == 0,
        video_length=NUM_FRAMES - 1,
    )
    env.reset()
    for _ in range(NUM_FRAMES + 3):
        env.step([0, 1])
    env.close()
    (path,) = tmp_path.glob("*.mp4")
    with VideoFileClip(str(path)) as clip:
        assert clip.fps == FPS
        frames = list(clip.iter_frames())
    assert len(frames) == NUM_FRAMES
    for step, frame in enumerate(frames):
        assert frame.shape == (64, 32, 3)
        seen = [int(frame[:28].mean()), int(frame[36:].mean())]
        # Lossy.
        assert np.allclose(seen, [10 + 12 * step, 110 + 12 * step], atol=4), step
