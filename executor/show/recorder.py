"""`VideoRecorder`: records videos of episodes while a rollout or a collector runs.

Assumes: it is called after each step of all envs. A video lacks the steps after which it was not called.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from tensordict import TensorDictBase

from envherd.executor.batched import BatchedEnv
from envherd.executor.batches.arguments import as_count
from envherd.executor.show.camera import Camera, Video, enlarged, require_imageio
from envherd.shm.finalizer import ClosedAtEnd


class _Film(NamedTuple):
    """The recording of an episode.

    Attributes:
        episode: its number.
        video: of its pictures.
    """

    episode: int
    video: Video


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
        self._films: dict[int, _Film] = {}  # by env

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
                    i
                    for i, film in self._films.items()
                    if now[i] - film.episode in (0, is_over[i])
                ],
                following,
            )
        for env_id in [i for i, film in self._films.items() if film.episode != now[i]]:
            self._films.pop(env_id).video.close()
        begun = [
            i
            for i, number in now.items()
            if i not in self._films and number >= 0 and number % self._every == 0
        ]
        for env_id in begun:
            path = self._folder / f"env{env_id}_episode{now[env_id]}.mp4"
            self._films[env_id] = _Film(now[env_id], Video(path, self._fps))
        self._add(
            begun if is_observed else list(self._films),
            env.current() if is_observed and begun else td,
        )

    def _add(self, env_ids: list[int], td: TensorDictBase) -> None:
        if env_ids:
            for env_id, frame in zip(
                env_ids,
                self._camera.look(td, env_ids),
                strict=True,
            ):
                if frame is not None:
                    self._films[env_id].video.add(enlarged(frame))

    def close(self) -> None:
        """Complete the videos. Idempotent."""
        for env_id in list(self._films):
            self._films.pop(env_id).video.close()
