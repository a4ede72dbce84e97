"""TorchRL envs for the tests: TorchRL's own, and small ones for cases that those do not cover."""

import os
import sys
import types
from collections.abc import Callable

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict
from torchrl.data import Binary, Bounded, Composite, NonTensor, OneHot, Unbounded
from torchrl.envs import (
    CatFrames,
    Compose,
    DMControlEnv,
    DoubleToFloat,
    EnvBase,
    GymEnv,
    InitTracker,
    ObservationNorm,
    PendulumEnv,
    RewardSum,
    StepCounter,
    TensorDictPrimer,
    TransformedEnv,
    VmasEnv,
)

from tests.envs import torchrl_own

# dm_control loads an OpenGL driver whose LLVM and TensorFlow's abort a process that exits with both.
os.environ.setdefault("MUJOCO_GL", "off")
# TorchRL's GymEnv looks for stable-baselines3, which has tensorboard import TensorFlow; this is how to say no.
sys.modules.setdefault(
    "tensorboard.compat.notf", types.ModuleType("tensorboard.compat.notf")
)


class Episode(EnvBase):
    """Counts to `length`; subclasses add other entries."""

    length = 3

    def __init__(self, **kwargs) -> None:
        super().__init__(**kwargs)
        self.steps = 0
        self.full_observation_spec = Composite(count=Unbounded((1,), dtype=torch.int64))
        self.full_action_spec = Composite(action=Unbounded((1,)))
        self.full_reward_spec = Composite(reward=Unbounded((1,)))
        self.declare()

    def declare(self) -> None:
        """Change the specs."""

    def content(self) -> dict:
        """Return the entries besides the count and the reward."""
        return {}

    def _reset(self, tensordict=None, **kwargs):
        self.steps = 0
        return TensorDict({"count": torch.tensor([0]), **self.content()}, [])

    def _step(self, tensordict):
        self.steps += 1
        done = torch.tensor([self.steps >= self.length])
        return TensorDict(
            {
                "count": torch.tensor([self.steps]),
                "reward": tensordict["action"].clone(),
                "done": done,
                **self.content(),
            },
            [],
        )

    def _set_seed(self, seed):
        self.seeded = seed


class Noisy(Episode):
    """Draws from torch's global generator at every reset and step, and seeds it in `_set_seed`."""

    def declare(self) -> None:
        self.full_observation_spec = Composite(
            count=Unbounded((1,), dtype=torch.int64), noise=Unbounded((2,))
        )

    def content(self) -> dict:
        return {"noise": torch.randn(2)}

    def _set_seed(self, seed):
        torch.manual_seed(seed)


class Stalled(Episode):
    """Sets `done` but not `terminated` at its end, and has no key `truncated`."""

    def _step(self, tensordict):
        return super()._step(tensordict).set("terminated", torch.tensor([False]))


class UnlikeActions(Episode):
    """Two agents in one group: equal observations, actions of different size."""

    def declare(self) -> None:
        agents = Composite(position=Bounded(-5, 5, (2, 3)), shape=(2,))
        self.full_observation_spec = Composite(
            count=Unbounded((1,), dtype=torch.int64), agents=agents
        )
        actions = [Composite(action=OneHot(n, dtype=torch.int64)) for n in (2, 3)]
        self.full_action_spec = Composite(agents=torch.stack(actions, 0))

    def content(self) -> dict:
        return {
            "agents": TensorDict(
                {"position": torch.full((2, 3), float(self.steps))}, [2]
            )
        }

    def _step(self, tensordict):
        first, second = tensordict["agents"].unbind(0)
        chosen = first["action"].argmax() + 10 * second["action"].argmax()
        tensordict = tensordict.exclude("agents").set(
            "action", chosen.float().unsqueeze(-1)
        )
        return super()._step(tensordict)


class Forgetful(Episode):
    """Declares a leaf that its steps do not return."""

    def declare(self) -> None:
        self.full_observation_spec = Composite(
            count=Unbounded((1,), dtype=torch.int64), extra=Unbounded((2,))
        )

    def content(self) -> dict:
        return {"extra": torch.zeros(2)} if self.steps == 0 else {}


class Typed(Episode):
    """Declares one more observation and another reward; never run."""

    def __init__(self, observation, reward=None) -> None:
        self.added = observation
        self.other_reward = reward
        super().__init__()

    def declare(self) -> None:
        self.full_observation_spec = Composite(
            count=Unbounded((1,), dtype=torch.int64), added=self.added
        )
        if self.other_reward is not None:
            self.full_reward_spec = Composite(reward=self.other_reward)


class Seeded(EnvBase):
    """Rows of a batch: counts up to 2, 3, 4, ...; the text says how far each row is."""

    def __init__(self, shape: tuple[int, ...] = (3,)) -> None:
        super().__init__(batch_size=shape)
        self.count = torch.zeros(*shape, 1, dtype=torch.int64)
        self.limit = torch.arange(2, 2 + self.count.numel()).reshape(*shape, 1)
        self.seeds: list[int | None] = []
        self.full_observation_spec = Composite(
            count=Unbounded((*shape, 1), dtype=torch.int64),
            text=NonTensor(shape),
            shape=shape,
        )
        self.full_action_spec = Composite(
            action=Binary(shape=(*shape, 1), dtype=torch.int8), shape=shape
        )
        self.full_reward_spec = Composite(reward=Unbounded((*shape, 1)), shape=shape)

    def _rows(self, **more):
        done = self.count >= self.limit
        rows = TensorDict(
            {"count": self.count.clone(), "done": done, **more}, self.batch_size
        )
        texts = np.char.add("at ", self.count.squeeze(-1).numpy().astype(str))
        return rows.set("text", NonTensorStack.from_list(texts.tolist()))

    def _reset(self, tensordict=None, **kwargs):
        mask = None if tensordict is None else tensordict.get("_reset", None)
        self.count[slice(None) if mask is None else mask] = 0
        return self._rows()

    def _step(self, tensordict):
        self.count = self.count + 1
        return self._rows(reward=tensordict["action"].float())

    def _set_seed(self, seed):
        self.seeds.append(seed)


def pendulum() -> EnvBase:
    return TransformedEnv(
        GymEnv("Pendulum-v1"),
        Compose(
            StepCounter(7),
            RewardSum(),
            InitTracker(),
            DoubleToFloat(),
            ObservationNorm(0.5, 2.0, in_keys=["observation"]),
            CatFrames(3, dim=-1, in_keys=["observation"]),
        ),
    )


def recurrent() -> EnvBase:
    return TransformedEnv(
        GymEnv("CartPole-v1"),
        Compose(
            InitTracker(), TensorDictPrimer(hidden=Unbounded((4,)), default_value=0.0)
        ),
    )


def batch_of_counters() -> EnvBase:
    env = torchrl_own.CountingBatchedEnv(
        batch_size=[3], max_steps=torch.tensor([2, 4, 6])
    )
    return TransformedEnv(env, Compose(StepCounter(), RewardSum(), InitTracker()))


#: name -> factory of an env whose data depend on the seed and the actions alone; all end within 30 steps.
SAME_DATA: dict[str, Callable[[], EnvBase]] = {
    "gym, one-hot": lambda: GymEnv("CartPole-v1"),
    "gym, categorical": lambda: GymEnv("CartPole-v1", categorical_action_encoding=True),
    "gym, six transforms": pendulum,
    "gym, recurrent": recurrent,
    "dm_control": lambda: TransformedEnv(
        DMControlEnv("cartpole", "swingup"), StepCounter(6)
    ),
    "state in the tensordict": lambda: TransformedEnv(PendulumEnv(), StepCounter(7)),
    "state not declared": torchrl_own.StateLessCountingEnv,
    "observed state": lambda: TransformedEnv(
        torchrl_own.MockBatchedLockedEnv(device="cpu"), StepCounter(5)
    ),
    "draws from torch": Noisy,
    "text": torchrl_own.CountingEnvWithString,
    "text both ways": lambda: TransformedEnv(torchrl_own.Str2StrEnv(), StepCounter(5)),
    "text as state": lambda: TransformedEnv(
        torchrl_own.EnvWithMetadata(), StepCounter(5)
    ),
    "tensorclass": torchrl_own.EnvWithTensorClass,
    "dynamic shape": torchrl_own.EnvWithDynamicSpec,
    "scalar action": lambda: TransformedEnv(
        torchrl_own.EnvWithScalarAction(), StepCounter(5)
    ),
    "done nested only": torchrl_own.NestedCountingEnv,
    "done nested only, batch": lambda: torchrl_own.NestedCountingEnv(batch_size=[2]),
    "several groups": torchrl_own.MultiKeyCountingEnv,
    "several groups, batch": lambda: torchrl_own.MultiKeyCountingEnv(batch_size=[2]),
    "several done groups": lambda: torchrl_own.MultiAgentCountingEnv(
        n_agents=3, max_steps=4
    ),
    "unlike agents": torchrl_own.HeterogeneousCountingEnv,
    "unlike agents, batch": lambda: torchrl_own.HeterogeneousCountingEnv(
        batch_size=[2]
    ),
    "unlike actions": UnlikeActions,
    "batch": batch_of_counters,
    "batch with text": Seeded,
    "vmas": lambda: VmasEnv("balance", num_envs=3, seed=0, max_steps=4),
}
#: Names of those that more than TorchRL is needed for -> the extra.
EXTRAS = {"dm_control": "dm-control", "vmas": "vmas"}
