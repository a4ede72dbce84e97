"""Values without a fixed shape (sequences, graphs, ...) are the caller's own, as tensors are."""

import copy

import gymnasium
import numpy as np
from tensordict import NonTensorData, NonTensorStack, TensorDict

from envherd.executor import ParallelEnv
from tests.executor.calls import both

NUM_ENVS = 2
numbers = gymnasium.spaces.Sequence(gymnasium.spaces.Box(-99, 99, (1,), np.float64))


class Writing(gymnasium.Env):
    """Observes the number of steps and its last action, as sequences; writes to its action, and to its observation."""

    observation_space = gymnasium.spaces.Dict(steps=numbers, acted=numbers)
    action_space = gymnasium.spaces.Dict(
        values=numbers, turn=gymnasium.spaces.Discrete(2)
    )

    def _observe(self, number):
        self.seen = {
            "steps": (np.full(1, float(self.num_steps)),),
            "acted": (np.full(1, float(number)),),
        }
        return self.seen

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.num_steps = 0
        return self._observe(-1), {}

    def step(self, action):
        (value,) = action["values"]
        number = value[0]
        value[:] = -3
        for own in self.seen.values():
            own[0][:] = -4
        self.num_steps += 1
        return self._observe(number), 1.0, self.num_steps == 3, False, {}

    def state_dict(self):
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state):
        self.num_steps = state["num_steps"]


def made(make: type[ParallelEnv]) -> ParallelEnv:
    return make(NUM_ENVS, Writing, seed=0)


class Acting:
    """Adds actions 1, 2, ... to batches, all of them in the same array."""

    def __init__(self):
        self.values = (np.zeros(1),)

    def __call__(self, td):
        self.values[0][:] += 1
        stack = NonTensorStack(*[NonTensorData(self.values)] * NUM_ENVS)
        action = {"values": stack, "turn": np.zeros(NUM_ENVS, np.int64)}
        return td.update(TensorDict({"action": action}, [NUM_ENVS]))


def shown(stack):
    """Return the numbers of a stack of sequences, as nested lists."""
    return [shown(row) if isinstance(row, list) else float(row[0][0]) for row in stack]


def overwrite(stack):
    for row in stack:
        if isinstance(row, list):
            overwrite(row)
        else:
            row[0][:] = -9


@both
def test_writes_to_a_batch_change_no_later_one(make):
    act = Acting()
    with made(make) as env:
        root = env.reset()
        overwrite(root["steps"])
        assert shown(env.current()["steps"]) == [0, 0]
        data, root = env.step_and_maybe_reset(act(root))
        overwrite(data["next", "steps"])
        assert shown(root["steps"]) == shown(env.current()["steps"]) == [1, 1]
        env.send(act(env.current()))
        overwrite(env.recv()["next", "steps"])
        assert shown(env.current()["steps"]) == [2, 2]
        data = env.rollout(4, act, auto_reset=False, break_when_any_done=False)
        overwrite(data["next", "steps"])
        assert shown(data["steps"]) == [[2, 0, 1, 2]] * NUM_ENVS
        assert shown(env.current()["steps"]) == [3, 3]


@both
def test_writes_to_a_state_change_no_later_batch(make):
    with made(make) as env:
        env.step(Acting()(env.reset()))
        states = env.save()
        kept = copy.deepcopy(states)
        overwrite([state["root"]["steps"] for state in states])
        assert shown(env.current()["steps"]) == [1, 1]
        env.restore(kept)
        overwrite([state["root"]["steps"] for state in kept])
        assert shown(env.current()["steps"]) == [1, 1]


@both
def test_actions_in_the_data_are_those_of_their_step(make):
    act = Acting()
    with made(make) as env:
        data = env.rollout(3, act)
        assert shown(data["next", "acted"]) == [[1, 2, 3]] * NUM_ENVS
        assert shown(data["action", "values"]) == [[1, 2, 3]] * NUM_ENVS
        env.send(act(env.reset()))
        act.values[0][:] = 50
        received = env.recv()
        assert (
            shown(received["action", "values"])
            == shown(received["next", "acted"])
            == [4, 4]
        )


@both
def test_an_env_that_writes_to_its_action_changes_no_batch(make):
    act = Acting()
    with made(make) as env:
        data = env.step(act(env.reset()))
        assert shown(data["action", "values"]) == shown(data["next", "acted"]) == [1, 1]
