"""A slot passes separate inputs to its env, and writes its outputs to every leaf; in process."""

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from envherd.executor import EnvError, ExecutorOptions, SerialEnv
from envherd.shm.specs import LeafSpec
from envherd.workers.block.slot import Slot
from envherd.workers.errors import SpecError
from envherd.workers.testing import CountingEnv
from envherd.workers.testing.envs import PlainAdapter
from tests.envs.counting_envs import AgentsEnv, FlagsEnv

#: The step alone, and with the global generators swapped around it.
BOTH_WAYS = pytest.mark.parametrize("isolate_rng", [False, True])


class Keeping(FlagsEnv):
    """Keeps its action arrays, like replay wrappers, and overwrites the last one."""

    def __init__(self) -> None:
        super().__init__(50)
        self.kept: list[np.ndarray] = []

    def step(self, action: list[Any]) -> Any:
        self.kept.append(action[0])
        return super().step(action)

    def history(self) -> list[list[int]]:
        return [action.tolist() for action in self.kept]

    def spoil(self) -> None:
        self.kept[-1][:] = 9


def opened(make_env: Any, isolate_rng: bool) -> SerialEnv:  # noqa: FBT001  # a column of the tests' table
    return SerialEnv(
        2, make_env, seed=0, options=ExecutorOptions(isolate_rng=isolate_rng)
    )


@BOTH_WAYS
def test_an_action_that_an_env_keeps_is_the_envs_own(isolate_rng):
    actions = torch.tensor(
        [
            [[0, 0, 0, 1], [1, 0, 0, 0]],
            [[0, 1, 1, 0], [1, 1, 1, 1]],
            [[1, 0, 1, 0], [0, 0, 0, 0]],
        ]
    )
    with opened(Keeping, isolate_rng) as env:
        env.reset()
        for action in actions:
            env.step(TensorDict({"action": action}, [2]))
        assert env.call("history") == actions.transpose(0, 1).tolist()
        given = actions[0].to(torch.int8)
        env.step(TensorDict({"action": given}, [2]))
        env.call("spoil")
        assert torch.equal(given, actions[0].to(torch.int8)), "nor is it the caller's"


@BOTH_WAYS
def test_done_leaves_of_agents_are_written_in_every_row(isolate_rng):
    with opened(lambda: AgentsEnv(3), isolate_rng) as env:
        root = env.reset()
        seen, roots = [], []
        for _ in range(6):
            td, root = env.step_and_maybe_reset(env.rand_action(root))
            seen.append(td["next", "agents", "done"].flatten().tolist())
            roots.append(root["agents", "done"].any().item())
            for key in ("terminated", "truncated"):
                expected = td["next", key][:, None].expand(2, 3, 1)
                assert torch.equal(td["next", "agents", key], expected)
        assert seen == [[False] * 6, [False] * 6, [True] * 6] * 2
        assert roots == [False] * 6
        data = env.rollout(7, break_when_any_done=False)
        assert torch.equal(
            data["next", "agents", "done"],
            data["next", "done"][..., None].expand(2, 7, 3, 1),
        )
        assert not data["agents", "done"].any()


@BOTH_WAYS
@pytest.mark.parametrize("missing", ["observation", "reward", "done"])
def test_too_few_values_are_an_error_of_that_env(isolate_rng, missing):
    class Forgetful(AgentsEnv):
        def step(self, action: list[Any]) -> Any:
            observation, reward, *ends = super().step(action)
            if self.num_steps == 2:
                observation = [] if missing == "observation" else observation
                reward = [] if missing == "reward" else reward
            return observation, reward, *ends

        def done_values(self) -> list[Any]:
            return super().done_values()[
                : 1 if missing == "done" and self.num_steps == 2 else 3
            ]

    with opened(lambda: Forgetful(9), isolate_rng) as env:
        root = env.reset()
        root = env.step_and_maybe_reset(env.rand_action(root))[1]
        with pytest.raises(EnvError, match="expected"):
            env.step(env.rand_action(root))


def test_leaves_that_an_adapter_does_not_want_checked_may_be_nan():
    adapter = PlainAdapter(CountingEnv())
    adapter.unchecked = frozenset({("loose",)})
    slot = Slot(0, adapter, check_finite=True)
    arrays = {("next", key): np.zeros(2, np.float32) for key in ("loose", "tight")}
    loose, tight = slot.writers(
        "next",
        [LeafSpec((key,), (), "float32") for key in ("loose", "tight")],
        arrays,
    )
    loose(1, np.nan)
    assert np.isnan(arrays["next", "loose"]).tolist() == [False, True]
    with pytest.raises(SpecError, match="tight"):
        tight(1, np.nan)
