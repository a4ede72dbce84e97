"""TorchRL's own test envs (`torchrl.testing.mocking_classes`), and differences of TorchRL's versions for tests.

TorchRL 0.10 does not ship them. For 0.10, this module has short versions of those that other test envs need; building
any other skips the test.
"""

import contextlib
import importlib.metadata
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Binary, Categorical, Composite, NonTensor, Unbounded
from torchrl.envs import EnvBase

#: Modules that workers with TorchRL's envs import, in order: Gym wrappers import SB3, which imports TensorBoard.
PRELOADED = (
    "envherd.workers.adapters.light_tensorboard",
    "torchrl.envs",
    "stable_baselines3",
)

_INSTALLED = importlib.metadata.version("torchrl")  # 0.10's own version string is wrong
#: Version of the installed TorchRL, e.g. `(0, 14)`.
VERSION = tuple(int(part) for part in _INSTALLED.split(".")[:2])


def since(first: tuple[int, int], what: str) -> pytest.MarkDecorator:
    """Return a mark: skipped with a TorchRL that lacks something.

    Args:
        first: the version that has it.
        what: it.
    """
    return pytest.mark.skipif(first > VERSION, reason=lacks(first, what))


def lacks(first: tuple[int, int], what: str) -> str:
    """Return why a test is skipped."""
    return f"TorchRL {_INSTALLED} has no {what}, which is new in {first[0]}.{first[1]}"


@contextlib.contextmanager
def started(*args: Any, **kwargs: Any) -> Iterator[Any]:
    """Yield the facade's `ParallelEnv`, and close it if it is open then."""
    from envherd.torchrl import ParallelEnv

    env = ParallelEnv(*args, **kwargs)
    try:
        yield env
    finally:
        env.close(raise_if_closed=False)


class CountingEnv(EnvBase):
    """Counts up its actions, and has ended above `max_steps`."""

    def __init__(self, max_steps: int = 5, start_val: int = 0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.max_steps, self.start_val = max_steps, start_val
        shape = (*self.batch_size, 1)
        observation = Unbounded(shape, dtype=torch.int32, device=self.device)
        self.observation_spec = Composite(
            observation=observation, shape=self.batch_size, device=self.device
        )
        self.reward_spec = Unbounded(shape, device=self.device)
        self.done_spec = Categorical(
            2, dtype=torch.bool, shape=shape, device=self.device
        )
        self.action_spec = Binary(n=1, shape=shape, device=self.device)
        self.register_buffer(
            "count", torch.zeros(shape, device=self.device, dtype=torch.int)
        )

    def _set_seed(self, seed: int | None) -> None:
        torch.manual_seed(seed)

    def _reset(
        self, tensordict: TensorDictBase | None = None, **_: Any
    ) -> TensorDictBase:
        mask = None if tensordict is None else tensordict.get("_reset", None)
        self.count[... if mask is None else mask] = self.start_val
        return self._row()

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.count += tensordict["action"].to(torch.int)
        return self._row().set(
            "reward", torch.zeros(self.count.shape, device=self.device)
        )

    def _row(self) -> TensorDictBase:
        done = self.count > self.max_steps
        source = {
            "observation": self.count.clone(),
            "done": done,
            "terminated": done.clone(),
        }
        return TensorDict(source, self.batch_size, device=self.device)


class CountingEnvWithString(CountingEnv):
    """Observes a text, too."""

    def __init__(self, max_steps: int = 5, **kwargs: Any) -> None:
        super().__init__(max_steps, **kwargs)
        self.observation_spec["string"] = NonTensor(
            shape=self.batch_size, device=self.device, example_data="none"
        )

    def _row(self) -> TensorDictBase:
        return super()._row().set_non_tensor("string", f"text {random.randrange(99)}")


class NestedCountingEnv(CountingEnv):
    """Has everything under `data`, for three agents."""

    num_agents = 3

    def __init__(self, max_steps: int = 5, **kwargs: Any) -> None:
        super().__init__(max_steps, **kwargs)
        self.observation_spec = self._nested(
            states=self.full_observation_spec["observation"]
        )
        self.action_spec = self._nested(action=self.full_action_spec["action"])
        self.reward_spec = self._nested(reward=self.full_reward_spec["reward"])
        done = self.full_done_spec
        self.done_spec = self._nested(done=done["done"], terminated=done["terminated"])

    def _nested(self, **leaves: Any) -> Composite:
        shape = (*self.batch_size, self.num_agents)
        each = {
            name: leaf.unsqueeze(-1).expand(*shape, 1) for name, leaf in leaves.items()
        }
        return Composite({"data": Composite(each, shape=shape)}, shape=self.batch_size)

    def _reset(
        self, tensordict: TensorDictBase | None = None, **_: Any
    ) -> TensorDictBase:
        mask = None if tensordict is None else tensordict.get(("data", "_reset"), None)
        self.count[... if mask is None else mask.any(-2)] = self.start_val
        return self._row()

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.count += tensordict["data", "action"].amax(-2).to(torch.int)
        row = self._row()
        row["data", "reward"] = torch.zeros(*self.batch_size, self.num_agents, 1)
        return row

    def _row(self) -> TensorDictBase:
        flat = super()._row()
        shape = (*self.batch_size, self.num_agents)
        names = {"observation": "states", "done": "done", "terminated": "terminated"}
        each = {
            to: flat[name].unsqueeze(-1).expand(*shape, 1).clone()
            for name, to in names.items()
        }
        return TensorDict({"data": TensorDict(each, shape)}, self.batch_size)


def __getattr__(name: str) -> Any:
    def skip(*_: Any, **__: Any) -> Any:
        pytest.skip(lacks((0, 11), f"torchrl.testing.mocking_classes.{name}"))

    return skip


if VERSION >= (0, 11):
    from torchrl.testing.mocking_classes import *  # noqa: F403
