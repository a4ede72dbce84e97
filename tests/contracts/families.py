"""The families of envs, as the contract and the matrix (docs/reports/families.md) run them: one line for each."""

import functools
from typing import Any

import numpy as np

from envherd.workers.adapters.meltingpot.factory import MeltingPotFactory
from tests.contracts import own_family
from tests.contracts.batched_families import BATCHED
from tests.contracts.family import IS_FULL, Family
from tests.contracts.optional_families import OPTIONAL
from tests.oracles import plain_loops


def gymnasium_env(
    env_id: str,
    max_steps: int | None = None,
    *,
    module: str = "",
    draws: bool = True,
    **kwargs: Any,
) -> Any:
    """Make an env of Gymnasium's registry; `Taxi` has the version that this Gymnasium has."""
    import gymnasium

    from tests.gymnasium_versions import TAXI

    mode = "rgb_array" if draws else None
    name = f"{module}:{env_id}" if module else TAXI if env_id == "Taxi" else env_id
    return gymnasium.make(name, max_episode_steps=max_steps, render_mode=mode)


def nested_spaces() -> Any:
    """Return an env whose observations and actions are Dicts and Tuples of all spaces with a fixed shape."""
    import gymnasium
    from gymnasium import spaces

    class Nested(gymnasium.Env[Any, Any]):
        observation_space = spaces.Dict(
            {
                "place": spaces.Box(-1, 1, (2,), np.float64),
                "parts": spaces.Tuple(
                    (spaces.Discrete(3, start=1), spaces.MultiBinary(4))
                ),
                "word": spaces.Text(8),
            }
        )
        action_space = spaces.Tuple(
            (
                spaces.Discrete(4),
                spaces.Dict({"force": spaces.Box(-1, 1, (2,), np.float32)}),
            )
        )

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            super().reset(seed=seed)
            self.num_steps, self.place = 0, self.np_random.uniform(-1, 1, 2)
            return self._observe(), {}

        def step(self, action: Any) -> Any:
            index, forces = action
            self.num_steps += 1
            self.place = np.clip(self.place + forces["force"], -1, 1)
            return (
                self._observe(),
                float(index),
                self.num_steps == 4,
                bool(self.place[0] > 0.99),
                {},
            )

        def _observe(self) -> Any:
            flags = self.np_random.integers(0, 2, 4, dtype=np.int8)
            return {
                "place": self.place,
                "parts": (1 + self.num_steps % 3, flags),
                "word": f"w{self.num_steps}",
            }

    return Nested()


def dm_control_env(
    domain: str, task: str, seconds: float, seed: int | None = None
) -> Any:
    """Load a task of the suite; its time limit is its horizon."""
    from dm_control import suite

    return suite.load(domain, task, task_kwargs={"time_limit": seconds, "random": seed})


def dmlab2d_env(seed: int | None = None) -> Any:
    """Return a raw dmlab2d env, cut off by itself after 50 frames."""
    import dmlab2d
    from dmlab2d import runfiles_helper

    settings = {"levelName": "chase_eat", "episodeLengthFrames": "50"}
    return dmlab2d.Environment(
        dmlab2d.Lab2d(runfiles_helper.find(), settings), ["WORLD.RGB"], seed=seed
    )


def pettingzoo_spread(*, draws: bool = False) -> Any:
    """Return an env with three agents that stay to the end."""
    from mpe2 import simple_spread_v3

    return simple_spread_v3.parallel_env(
        max_cycles=7, render_mode="rgb_array" if draws else None
    )


def pettingzoo_village() -> Any:
    """Return an env whose agents leave and return, and have different spaces and action masks."""
    from tests.envs.pettingzoo_envs import Village

    return Village()


def torchrl_cartpole() -> Any:
    """Return TorchRL's own CartPole, cut off after 6 steps by a transform."""
    from torchrl.envs import GymEnv, StepCounter, TransformedEnv

    return TransformedEnv(GymEnv("CartPole-v1"), StepCounter(6))


def _of_gymnasium(
    title: str,
    *args: Any,
    extra: str = "gymnasium",
    num_steps: int = 110,
    **kwargs: Any,
) -> Family:
    draws, module = kwargs.pop("draws", True), kwargs.pop("module", "")
    make = functools.partial(gymnasium_env, *args, module=module)
    plain = functools.partial(plain_loops.PlainGymnasium, make)
    drawn = functools.partial(make, draws=IS_FULL and draws is True)
    return Family(title, drawn, plain, num_steps, extra, draws, **kwargs)


def _of_dm_env(title: str, make: Any, extra: str, **kwargs: Any) -> Family:
    plain = functools.partial(plain_loops.PlainDmEnv, lambda seed: make(seed=seed))
    return Family(title, make, plain, extra=extra, **kwargs)


_SUBSTRATE = "running_with_scissors_in_the_matrix__one_shot"
_SCISSORS = functools.partial(
    MeltingPotFactory, _SUBSTRATE, keys=("RGB", "INVENTORY"), deterministic=True
)

FAMILIES: dict[str, Family] = {
    "gymnasium_cartpole": _of_gymnasium(
        "Gymnasium: CartPole", "CartPole-v1", num_steps=60
    ),
    "gymnasium_pendulum": _of_gymnasium(
        "Gymnasium: Pendulum, 5 steps", "Pendulum-v1", 5, num_steps=30
    ),
    "gymnasium_taxi": _of_gymnasium(
        "Gymnasium: Taxi, 7 steps", "Taxi", 7, num_steps=30
    ),
    "gymnasium_nested": Family(
        "Gymnasium: nested spaces, text",
        nested_spaces,
        functools.partial(plain_loops.PlainGymnasium, nested_spaces),
        draws=False,
    ),
    "gymnasium_box2d": _of_gymnasium(
        "Gymnasium Box2D: LunarLander, 50 steps",
        "LunarLander-v3",
        50,
        extra="box2d",
        is_ordinary=False,
    ),
    "gymnasium_mujoco": _of_gymnasium(
        "Gymnasium MuJoCo: HalfCheetah, 50 steps",
        "HalfCheetah-v5",
        50,
        extra="mujoco",
        draws="OpenGL",
        is_ordinary=False,
    ),
    "ale": _of_gymnasium(
        "ALE: Pong, 50 steps",
        "ALE/Pong-v5",
        50,
        extra="atari",
        module="ale_py",
        is_ordinary=False,
        is_slow=True,
    ),
    "minigrid": _of_gymnasium(
        "MiniGrid: DoorKey, 50 steps",
        "MiniGrid-DoorKey-5x5-v0",
        50,
        extra="minigrid",
        module="minigrid",
        is_ordinary=False,
    ),
    "dm_control": _of_dm_env(
        "dm_control: cartpole swingup, 10 steps",
        functools.partial(dm_control_env, "cartpole", "swingup", 0.1),
        "dm-control",
        draws="OpenGL",
        is_slow=True,
    ),
    "dm_control_walker": _of_dm_env(
        "dm_control: walker walk, 50 steps",
        functools.partial(dm_control_env, "walker", "walk", 1.25),
        "dm-control",
        num_steps=110,
        draws="OpenGL",
        is_ordinary=False,
        is_slow=True,
    ),
    "dmlab2d": _of_dm_env(
        "dmlab2d, raw: chase_eat, 50 frames",
        dmlab2d_env,
        "meltingpot",
        num_steps=110,
        is_ordinary=False,
    ),
    "pettingzoo_spread": Family(
        "PettingZoo: MPE spread, 7 steps",
        functools.partial(pettingzoo_spread, draws=IS_FULL),
        functools.partial(plain_loops.PlainPettingZoo, pettingzoo_spread, "agent"),
        num_steps=20,
        extra="pettingzoo",
    ),
    "pettingzoo_village": Family(
        "PettingZoo: agents leave and return",
        pettingzoo_village,
        num_steps=30,
        extra="pettingzoo",
        draws=False,
    ),
    "torchrl": Family(
        "TorchRL: GymEnv, StepCounter, 6 steps",
        torchrl_cartpole,
        functools.partial(plain_loops.PlainTorchRL, torchrl_cartpole),
        extra="torchrl",
        draws=False,
    ),
    "meltingpot": Family(
        "Melting Pot: one shot of scissors, 50 steps",
        _SCISSORS(max_steps=50),
        functools.partial(plain_loops.PlainMeltingPot, _SCISSORS(), 50),
        num_steps=60,
        extra="meltingpot",
        is_slow=True,
    ),
    "own": Family(
        "Custom: a C library, `register`",
        own_family.make_own,
        own_family.PlainOwn,
        150,
        draws=False,
        is_ordinary=False,
    ),
    **OPTIONAL,
    **BATCHED,
}
