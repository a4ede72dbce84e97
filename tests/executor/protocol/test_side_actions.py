"""Actions without a fixed shape (text, sequences, ...) reach the env by every method, and are kept in the data."""

import functools

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv
from tensordict import NonTensorStack, TensorDict

from envherd.executor import ActionError, SerialEnv
from envherd.executor.rollouts.rollout import StepwiseRun
from tests.executor.calls import both

NUM_ROWS = 3


class Talking(gymnasium.Env):
    """Takes a word and a direction; observes the last word, or its name, and ends after three steps."""

    def __init__(self, size: int, name: str = "") -> None:
        self.observation_space = gymnasium.spaces.Dict(
            x=gymnasium.spaces.Box(-9, 9, (size,), np.float32),
            heard=gymnasium.spaces.Text(20),
        )
        self.action_space = gymnasium.spaces.Dict(
            word=gymnasium.spaces.Text(20), turn=gymnasium.spaces.Discrete(size)
        )
        self.size, self.name, self.num_steps = size, name, 0

    def _observe(self, heard):
        return {"x": np.full(self.size, self.num_steps, np.float32), "heard": heard}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.num_steps = 0
        return self._observe(f"{self.name}-"), {}

    def step(self, action):
        self.num_steps += 1
        return (
            self._observe(f"{action['word']}{action['turn']}"),
            1.0,
            self.num_steps == 3,
            False,
            {},
        )


def vector_env(size):
    return SyncVectorEnv(
        [functools.partial(Talking, size, str(row)) for row in range(NUM_ROWS)]
    )


def alone(*words):
    return list(words)


def in_rows(*words):
    """Return for each word those of the rows of a vector env."""
    return [[f"{row}{word}" for row in range(NUM_ROWS)] for word in words]


tasks = pytest.mark.parametrize(
    "sizes", [(2, 2), (2, 3)], ids=["one task", "different tasks"]
)
kinds = pytest.mark.parametrize("each", [alone, in_rows])


def factories(sizes, each=alone):
    make = {alone: Talking, in_rows: vector_env}[each]
    return [functools.partial(make, size) for size in sizes]


def acting(td, *words):
    """Return a batch with actions: a word for each env or the words of its rows, and turn 1."""
    stack = NonTensorStack.from_list([*words])
    turns = np.ones(td.batch_size, np.int64)
    return td.update(
        TensorDict({"action": {"word": stack, "turn": turns}}, td.batch_size)
    )


def heard(td):
    return [row["heard"] for row in td.unbind(0)]


def words_in(td):
    return [row["action", "word"] for row in td.unbind(0)]


@both
@tasks
@kinds
def test_steps_of_all(make, sizes, each):
    with make(2, factories(sizes, each), seed=0) as env:
        td = acting(env.reset(), *each("a", "b"))
        assert heard(env.step(td)["next"]) == each("a1", "b1")
        for words in (("c", "d"), ("e", "f")):
            data, root = env.step_and_maybe_reset(acting(td, *each(*words)))
            assert heard(data["next"]) == each(*(f"{word}1" for word in words))
        assert heard(root) == each("-", "-")


@both
@tasks
@kinds
def test_send_and_recv(make, sizes, each):
    with make(2, factories(sizes, each), seed=0) as env:
        env.send(acting(env.reset(), *each("a", "b")))
        received = env.recv(env_ids=[1, 0])
        assert words_in(received) == each("b", "a")
        env.send(acting(env.current([1]), *each("c")), [1])
        received = env.recv()
        assert (words_in(received), heard(received["next"])) == (each("c"), each("c1"))


@both
@tasks
@kinds
@pytest.mark.parametrize("run", [None, StepwiseRun])
def test_rollouts_keep_them(make, sizes, each, run):
    steps = iter("abcdef")
    with make(2, factories(sizes, each), seed=0) as env:
        env._rollouts._run_type = run
        data = env.rollout(
            5,
            lambda td: acting(td, *each(word := next(steps), word.upper())),
            break_when_any_done=False,
        )
    words = [
        [row["action", "word"] for row in env_rows.unbind(0)]
        for env_rows in data.unbind(0)
    ]
    assert words == [each(*"abcde"), each(*"ABCDE")]
    assert [heard(rows["next"]) for rows in data.unbind(0)] == [
        each(*(f"{word}1" for word in one)) for one in ("abcde", "ABCDE")
    ]
    assert [heard(rows) for rows in data.unbind(0)] == [
        each("-", f"{a}1", f"{b}1", "-", f"{d}1") for a, b, d in ("abd", "ABD")
    ]


def test_rows_without_a_value():
    with SerialEnv(1, functools.partial(vector_env, 2)) as env:
        assert env.current()["heard"] == [[None] * NUM_ROWS]
        assert env.current([])["heard"] == []


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
