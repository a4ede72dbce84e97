"""Families with packages that pin versions of other packages, each in a separate extra.

Their rows of `docs/reports/families.md` are written by `make matrix FAMILY=NAME` with the extra installed.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.contracts.family import Family
from tests.oracles import plain_loops
from tests.oracles.plain_batches import PlainSimulator

if TYPE_CHECKING:
    import torch  # workers that build one of the other envs do without it

_MAX_STEPS = 50
_NUM_CLICKS = 5


def highway_parking(*, draws: bool = False) -> Any:
    """Return highway-env's parking lot: observations of goals, continuous actions."""
    import gymnasium
    import highway_env

    gymnasium.register_envs(highway_env)
    return gymnasium.make(
        "parking-v0",
        max_episode_steps=_MAX_STEPS,
        render_mode="rgb_array" if draws else None,
    )


def robotics(name: str) -> Any:
    """Return an env of Gymnasium-Robotics: an arm that reaches for goals, a ball in a maze."""
    import gymnasium
    import gymnasium_robotics

    gymnasium.register_envs(gymnasium_robotics)
    return gymnasium.make(name, max_episode_steps=_MAX_STEPS)


def _seeded(env: Any, seed_env: Callable[[int], Any]) -> Any:
    """Wrap an env whose `reset(seed=...)` does not seed it: `seed_env` is called before."""
    import gymnasium

    class Seeded(gymnasium.Wrapper):
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            if seed is not None:
                seed_env(seed)
            return self.env.reset(options=options)

    return Seeded(env)


def nethack() -> Any:
    """Return NLE's score task."""
    import gymnasium
    import nle.env  # noqa: F401  # registers it

    env: Any = gymnasium.make("NetHackScore-v0", max_episode_steps=_MAX_STEPS)
    return _seeded(
        env, lambda seed: env.unwrapped.seed(core=seed, disp=seed, reseed=False)
    )


def metaworld_reach() -> Any:
    """Return Meta-World's arm that reaches for a goal."""
    import gymnasium
    import metaworld  # noqa: F401  # registers it

    env: Any = gymnasium.make(
        "Meta-World/MT1", env_name="reach-v3", seed=3, max_episode_steps=_MAX_STEPS
    )
    return _seeded(env, env.unwrapped.seed)


class _Material:
    """The material of a cube without a renderer."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Take colors."""


def maniskill_push() -> Any:
    """Return ManiSkill's arm that pushes a cube, on its physics for processors, with observations of the state.

    SAPIEN creates materials only with a Vulkan driver, although nothing is drawn here.
    """
    import gymnasium
    import mani_skill.envs  # noqa: F401  # registers it
    import sapien

    try:
        sapien.render.RenderMaterial()
    except RuntimeError:
        sapien.render.RenderMaterial = sapien.pysapien.render.RenderMaterial = _Material
    return gymnasium.make(
        "PushCube-v1", obs_mode="state", sim_backend="physx_cpu", render_backend="none"
    )


def browsergym_click() -> Any:
    """Return a MiniWoB page in BrowserGym: its picture and its goal are observed, actions are places to click.

    Each episode starts its own browser. A step waits half a second for the page. Pages with buttons cannot be compared
    bit for bit: their colors fade while the mouse points at them.
    """
    from pathlib import Path

    import browsergym.miniwob
    import gymnasium
    import miniwob
    from browsergym.core.action.highlevel import HighLevelActionSet

    class Clicks(gymnasium.Wrapper):
        def __init__(self, env: Any) -> None:
            super().__init__(env)
            picture = gymnasium.spaces.Box(0, 255, (320, 500, 3), np.uint8)
            self.observation_space = gymnasium.spaces.Dict(
                goal=gymnasium.spaces.Text(100), screenshot=picture
            )
            # Half of them next to the page.
            self.action_space = gymnasium.spaces.MultiDiscrete([10, 5])

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            observation, info = self.env.reset(seed=seed, options=options)
            return self._observed(observation), info

        def step(self, action: Any) -> Any:
            x, y = (28, 103) + 45 * action
            observation, *rest = self.env.step(f"mouse_click({x}, {y})")
            assert not observation["last_action_error"]
            return self._observed(observation), *rest

        def _observed(self, observation: Any) -> dict[str, Any]:
            return {name: observation[name] for name in ("goal", "screenshot")}

    pages = (Path(miniwob.__file__).parent / "html" / "miniwob").as_uri()
    env: Any = gymnasium.make(
        f"browsergym/{browsergym.miniwob.all.ClickShapeTask.get_task_id()}",
        max_episode_steps=_NUM_CLICKS,
        task_kwargs={"base_url": f"{pages}/"},
        action_mapping=HighLevelActionSet(["coord"]).to_python_code,
        disable_env_checker=True,  # it says of each side value that no space fits it
    )
    return Clicks(env)


class _PlainBrowser(plain_loops.PlainGymnasium):
    """BrowserGym by hand. Its driver process serves all envs of a process and is stopped with the last of them."""

    num_open = 0

    def __init__(self) -> None:
        super().__init__(browsergym_click)
        _PlainBrowser.num_open += 1

    def close(self) -> None:
        import browsergym.core

        super().close()
        _PlainBrowser.num_open -= 1
        if _PlainBrowser.num_open == 0:
            browsergym.core._get_global_playwright().stop()
            browsergym.core._set_global_playwright(None)


def _optional(title: str, make: Any, extra: str, **kwargs: Any) -> Family:
    plain = functools.partial(plain_loops.PlainGymnasium, make)
    settings: dict[str, Any] = {
        "plain": plain,
        "draws": False,
        "is_ordinary": False,
        "is_slow": True,
        **kwargs,
    }
    return Family(title, make, extra=extra, **{"num_steps": 110, **settings})


def reset_by_option(env: Any, ids: "torch.Tensor") -> Any:
    """Reset rows of a ManiSkill env."""
    return env.reset(options={"env_idx": ids})[0]


OPTIONAL: dict[str, Family] = {
    "highway_env": _optional(
        "highway-env: parking, 50 steps", highway_parking, "highway"
    ),
    "robotics_fetch": _optional(
        "Gymnasium-Robotics: FetchReach, 50 steps",
        functools.partial(robotics, "FetchReach-v4"),
        "robotics",
    ),
    "robotics_maze": _optional(
        "Gymnasium-Robotics: PointMaze, 50 steps",
        functools.partial(robotics, "PointMaze_UMaze-v3"),
        "robotics",
    ),
    "nle": _optional("NLE: NetHackScore, 50 steps", nethack, "nle"),
    "metaworld": _optional("Meta-World: reach, 50 steps", metaworld_reach, "metaworld"),
    "maniskill_push": _optional(
        "ManiSkill: PushCube, state, CPU, 50 steps",
        maniskill_push,
        "maniskill",
        plain=functools.partial(
            PlainSimulator, maniskill_push, reset_by_option, resets_itself=False
        ),
    ),
    "browsergym": _optional(
        "BrowserGym: MiniWoB, 5 clicks",
        browsergym_click,
        "browsergym",
        plain=_PlainBrowser,
        num_steps=15,
        needs_worker=True,
        shortening=20,
    ),
}
