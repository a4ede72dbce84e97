"""`VideoRecorder`: videos of episodes, made while a rollout or a collector runs.

Assumes: it is called after each step of all envs; an episode whose steps it is not shown has a shorter film.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

from tensordict import TensorDictBase

from envherd.executor.batched import BatchedEnv
from envherd.executor.batches.arguments import as_count
from envherd.executor.pictures.camera import Camera
from envherd.executor.pictures.video import Video, enlarged, require_imageio


class VideoRecorder:
    """Writes episodes of some envs as `FOLDER/envI_episodeJ.mp4`: a `callback` for `rollout` and `Collector`.

    In a loop of steps, call `recorder(env, td)` after each step. J is the executor's number of the episode. A film is
    complete once the env's next episode has begun, or after `close`, which the end of a `with` calls.

    The first film of an env begins with the first step that it is called for, later ones with the reset. Where pictures
    are observations (Melting Pot's world, an agent's view), a film ends with the true last one. Envs that draw
    themselves (Gymnasium's `render_mode="rgb_array"`) are drawn after each step: the last picture of an episode is
    missing if the same step has reset the env.

    Args:
        env: the executor.
        folder: created if it is not there; files of the same names are replaced.
        every: record the episodes 0, `every`, 2 `every`, ... of each env. The others cost nothing.
        env_ids: of the envs that are recorded.
        agent: index of the agent whose observation is recorded; None for the world view, or what the env draws.
        fps: steps per second of video.

    Raises:
        ValueError: an argument does not fit the envs.
        RuntimeError: `envherd[media]` is not installed, or no agent observes pictures.
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
        self._ids = [as_count("VideoRecorder", "env_ids", env_id, least=0) for env_id in wanted]
        if any(env_id >= env.num_envs for env_id in self._ids):
            raise ValueError(f"VideoRecorder failed: expected env_ids in 0..{env.num_envs - 1}, got {self._ids}.")
        if len(env.batch_size) > 1:
            raise ValueError(f"VideoRecorder failed: expected envs of one row, got batch size {[*env.batch_size]}.")
        if not fps > 0:
            raise ValueError(f"VideoRecorder failed: expected fps above 0, got {fps!r}.")
        self._folder, self._fps = Path(folder), fps
        self._folder.mkdir(parents=True, exist_ok=True)
        self._camera = Camera(env, agent)
        self._films: dict[int, tuple[int, Video]] = {}  # by env: its episode, and the film of it

    def __call__(self, env: BatchedEnv, td: TensorDictBase) -> None:
        """Add the pictures of a step.

        Args:
            env: the executor.
            td: batch `[N]` with `next`; only read.

        Raises:
            RuntimeError: the envs have no picture of themselves.
        """
        numbers = env.engine.pool.slab.words["episode"]  # of the episodes that come next
        now = {env_id: int(numbers[env_id]) - 1 for env_id in self._ids}
        is_observed = bool(self._camera.key)
        if is_observed:
            following: Any = td.get("next")
            is_over = following.get("done").flatten().tolist()
            self._add([i for i, (episode, _) in self._films.items() if now[i] - episode in (0, is_over[i])], following)
        for env_id in [i for i, (episode, _) in self._films.items() if episode != now[i]]:
            self._end(env_id)
        begun = [i for i, number in now.items() if i not in self._films and number >= 0 and number % self._every == 0]
        for env_id in begun:
            path = self._folder / f"env{env_id}_episode{now[env_id]}.mp4"
            self._films[env_id] = now[env_id], Video(path, self._fps)
        self._add(begun if is_observed else list(self._films), env.current() if is_observed and begun else td)

    def _add(self, env_ids: list[int], td: TensorDictBase) -> None:
        if env_ids:
            for env_id, frame in zip(env_ids, self._camera.look(td, env_ids), strict=True):
                if frame is not None:
                    self._films[env_id][1].add(enlarged(frame))

    def _end(self, env_id: int) -> None:
        _, film = self._films.pop(env_id)
        film.close()

    def close(self) -> None:
        """Complete the films. Idempotent."""
        for env_id in list(self._films):
            self._end(env_id)

    def __enter__(self) -> Self:
        """Return the recorder; it is closed at the end of the `with`."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()
