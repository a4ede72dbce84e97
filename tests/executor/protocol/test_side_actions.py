"""Actions without a fixed shape (text, sequences, ...) reach the env by every method, and are kept in the data."""

import functools

import gymnasium
import numpy as np
import pytest
from tensordict import NonTensorData, NonTensorStack, TensorDict

from envherd.executor import ActionError, SerialEnv
from tests.executor.calls import both

tasks = pytest.mark.parametrize(
    "sizes", [(2, 2), (2, 3)], ids=["one task", "different tasks"]
)


class Talking(gymnasium.Env):
    """Takes a word and a direction; observes the last word, and ends after `length` steps."""

    def __init__(self, size: int, length: int = 3) -> None:
        self.observation_space = gymnasium.spaces.Dict(
            x=gymnasium.spaces.Box(-9, 9, (size,), np.float32),
            heard=gymnasium.spaces.Text(20),
        )
        self.action_space = gymnasium.spaces.Dict(
            word=gymnasium.spaces.Text(20), turn=gymnasium.spaces.Discrete(size)
        )
        self.size, self.length, self.num_steps = size, length, 0

    def _observe(self, heard):
        return {"x": np.full(self.size, self.num_steps, np.float32), "heard": heard}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.num_steps = 0
        return self._observe("-"), {}

    def step(self, action):
        self.num_steps += 1
        return (
            self._observe(f"{action['word']}{action['turn']}"),
            1.0,
            self.num_steps == self.length,
            False,
            {},
        )


def factories(sizes):
    return [functools.partial(Talking, size) for size in sizes]


def acting(td, *words):
    """Return a batch with actions: a word for each env, and turn 1."""
    stack = NonTensorStack(*map(NonTensorData, words))
    turns = np.ones(len(words), np.int64)
    return td.update(
        TensorDict({"action": {"word": stack, "turn": turns}}, [len(words)])
    )


def heard(td):
    return [row["heard"] for row in td.unbind(0)]


def words_in(td):
    return [row["action", "word"] for row in td.unbind(0)]


@both
@tasks
def test_steps_of_all(make, sizes):
    with make(2, factories(sizes), seed=0) as env:
        td = acting(env.reset(), "a", "b")
        assert heard(env.step(td)["next"]) == ["a1", "b1"]
        for words in (("c", "d"), ("e", "f")):
            data, root = env.step_and_maybe_reset(acting(td, *words))
            assert heard(data["next"]) == [f"{word}1" for word in words]
        assert heard(root) == ["-", "-"]


@both
@tasks
def test_send_and_recv(make, sizes):
    with make(2, factories(sizes), seed=0) as env:
        env.send(acting(env.reset(), "a", "b"))
        received = env.recv()
        words = dict(zip(received["env_ids"].tolist(), words_in(received), strict=True))
        assert words == {0: "a", 1: "b"}
        env.send(acting(env.current([1]), "c"), [1])
        received = env.recv()
        assert (words_in(received), heard(received["next"])) == (["c"], ["c1"])


@both
@tasks
def test_rollouts_keep_them(make, sizes):
    steps = iter("abcdef")
    with make(2, factories(sizes), seed=0) as env:
        data = env.rollout(
            5,
            lambda td: acting(td, word := next(steps), word.upper()),
            break_when_any_done=False,
        )
    words = [
        [row["action", "word"] for row in env_rows.unbind(0)]
        for env_rows in data.unbind(0)
    ]
    assert words == [list("abcde"), list("ABCDE")]
    assert [heard(rows["next"]) for rows in data.unbind(0)] == [
        [f"{word}1" for word in one] for one in words
    ]
    assert [heard(rows) for rows in data.unbind(0)] == [
        ["-", f"{a}1", f"{b}1", "-", f"{d}1"] for a, b, _, d, _ in words
    ]


@tasks
def test_a_missing_one_is_refused_before_any_env_is_stepped(sizes):
    with SerialEnv(2, factories(sizes), seed=0) as env:
        td = env.reset()
        with pytest.raises(ActionError, match="action/word expected a key"):
            env.step(
                td.update(TensorDict({"action": {"turn": np.ones(2, np.int64)}}, [2]))
            )
        assert heard(env.step(acting(env.current(), "a", "b"))["next"]) == ["a1", "b1"]
        assert [row["x"].tolist() for row in env.current().unbind(0)] == [
            [1.0] * size for size in sizes
        ]


@tasks
def test_side_actions_cannot_be_drawn(sizes):
    with SerialEnv(2, factories(sizes), seed=0) as env:
        td = env.reset()
        with pytest.raises(
            ValueError,
            match=r"got action/word without one .* Pass a policy that sets it",
        ):
            env.rand_action(td)
