"""`VideoRecorder`: which episodes and pictures are in its films, in rollouts, collectors and loops of steps."""

import functools

from tests.extras import needs, skip_without

skip_without("media")

import gymnasium
import pytest

from envherd import Collector, ParallelEnv, SerialEnv, VideoRecorder
from tests.envs.team_env import Team, film_into, pictured


@pytest.fixture
def films(monkeypatch):
    """Return the films that are made; see `film_into`."""
    found = {}
    monkeypatch.setattr("envherd.executor.show.camera.Video", film_into(found))
    return found


WHOLE = [0, 40, 80, 120, 160]


@pytest.mark.parametrize(
    ("make", "options", "num_steps", "expected"),
    [
        *(
            (
                functools.partial(executor, 3, pictured),
                {"env_ids": (0, 2), "every": 2},
                9,
                {
                    "env0_episode0": WHOLE[1:],
                    "env2_episode0": WHOLE[1:],
                    "env0_episode2": [0, 40],
                    "env2_episode2": [0, 40],
                },
            )
            for executor in (SerialEnv, ParallelEnv)
        ),
        (
            functools.partial(SerialEnv, [pictured, functools.partial(Team, 3, 16)]),
            {"env_ids": (0, 1)},
            4,
            {
                "env0_episode0": WHOLE[1:],
                "env1_episode0": WHOLE[1:4],
                "env1_episode1": [0, 40],
            },
        ),
    ],
    ids=["serial", "parallel", "pictures of different sizes"],
)
def test_observed_pictures_are_complete_up_to_the_true_last_one(
    make, options, num_steps, expected, films, tmp_path
):
    """Episodes have four steps, those of the other task three."""
    with (
        make(seed=0) as env,
        VideoRecorder(env, tmp_path, **options) as recorder,
    ):
        env.rollout(num_steps, break_when_any_done=False, callback=recorder)
    assert films == expected


def test_a_reset_that_the_recorder_is_not_shown_begins_another_film(films, tmp_path):
    with (
        SerialEnv(1, pictured, seed=0) as env,
        VideoRecorder(env, tmp_path) as recorder,
    ):
        env.rollout(2, break_when_any_done=False, callback=recorder)
        env.rollout(9, callback=recorder, break_when_any_done=True)
    assert films == {"env0_episode0": [40, 80], "env0_episode1": [40, 80, 120, 160]}


def test_a_collector_takes_a_callback(films, tmp_path):
    with (
        SerialEnv(2, pictured, seed=0) as env,
        VideoRecorder(env, tmp_path, agent=1) as recorder,
    ):
        collector = Collector(
            env, frames_per_batch=6, total_frames=12, close_env=False, callback=recorder
        )
        for _ in collector:
            pass
    assert {name: len(frames) for name, frames in films.items()} == {
        "env0_episode0": 4,
        "env0_episode1": 3,
    }


def test_a_loop_of_steps_can_be_recorded(films, tmp_path):
    with (
        SerialEnv(1, pictured, seed=0) as env,
        VideoRecorder(env, tmp_path) as recorder,
    ):
        root = env.reset()
        for _ in range(5):
            td, root = env.step_and_maybe_reset(env.rand_action(root))
            recorder(env, td)
    assert films == {"env0_episode0": [40, 80, 120, 160], "env0_episode1": [0, 40]}


@needs("gymnasium")
@pytest.mark.slow
def test_gymnasiums_pictures_are_written_as_mp4(tmp_path):
    import imageio_ffmpeg

    make_env = functools.partial(gymnasium.make, "CartPole-v1", render_mode="rgb_array")
    with (
        ParallelEnv(2, make_env, num_workers=2, seed=0) as env,
        VideoRecorder(env, tmp_path, env_ids=(1,), fps=50) as recorder,
    ):
        data = env.rollout(40, break_when_any_done=False, callback=recorder)
    ends = [-1, *data["next", "done"][1, :, 0].nonzero().flatten().tolist()]
    assert len(ends) > 2
    counted = {
        path.stem: imageio_ffmpeg.count_frames_and_secs(str(path))[0]
        for path in tmp_path.glob("*.mp4")
    }
    lengths = [end - begin for begin, end in zip(ends, [*ends[1:], 39], strict=True)]
    # No reset of the first; the last is not over.
    expected = [lengths[0] - 1, *lengths[1:-1], lengths[-1] + 1]
    assert counted == {
        f"env1_episode{number}": count for number, count in enumerate(expected) if count
    }


def test_unrecordable_envs_are_refused(tmp_path):
    with SerialEnv(2, Team, seed=0) as env:
        for wrong, words in (
            ({"every": 0}, "every"),
            ({"env_ids": (2,)}, r"env_ids in 0\.\.1"),
            ({"fps": 0}, "fps"),
        ):
            with pytest.raises(ValueError, match=words):
                VideoRecorder(env, tmp_path, **wrong)
        with pytest.raises(RuntimeError, match="whose agents observe pictures"):
            VideoRecorder(env, tmp_path, agent=0)
        with pytest.raises(RuntimeError, match="have no picture of themselves"):
            env.rollout(2, callback=VideoRecorder(env, tmp_path))
    assert not list(tmp_path.iterdir())


@needs("gymnasium")
def test_the_message_says_how_to_let_an_env_draw(tmp_path):
    with (
        SerialEnv(1, lambda: gymnasium.make("CartPole-v1"), seed=0) as env,
        pytest.raises(
            RuntimeError,
            match=r"no picture of themselves\. Build them with render_mode='rgb_array'\.$",
        ),
    ):
        env.rollout(2, callback=VideoRecorder(env, tmp_path))
