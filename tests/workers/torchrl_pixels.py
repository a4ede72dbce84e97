"""Compare `DMControlEnv`s with pixels, direct and as TorchRL steps them: `python -m tests.workers.torchrl_pixels`."""

import functools
import warnings
from typing import Any
from unittest.mock import patch

warnings.simplefilter("ignore")

import torch
from dm_control import suite
from tensordict import TensorDictBase, assert_close
from torchrl.envs import DMControlEnv, EnvBase, SerialEnv

from envherd.torchrl import ParallelEnv
from tests.workers.test_torchrl_direct import compare

NUM_ENVS, NUM_STEPS = 2, 2


def make_env(*, pixels_only: bool) -> EnvBase:
    load = suite.load

    def without_shadows(*args: Any, **kwargs: Any) -> Any:
        env = load(*args, **kwargs)
        # They take most of the time where the processor draws.
        env.physics.model.vis.quality.shadowsize = 0
        return env

    with patch.object(suite, "load", without_shadows):
        return DMControlEnv(
            "cartpole",
            "swingup",
            time_limit=0.03,
            from_pixels=True,
            pixels_only=pixels_only,
        )


def rollout(env: EnvBase) -> TensorDictBase:
    """Return a rollout with resets, with the same actions for every env."""
    draws = torch.Generator().manual_seed(2)

    def act(td: TensorDictBase) -> TensorDictBase:
        spec = env.full_action_spec["action"]
        return td.set(
            "action", torch.rand(spec.shape, generator=draws, dtype=spec.dtype) * 2 - 1
        )

    env.set_seed(5)
    parts = [
        env.rollout(NUM_STEPS, act, break_when_any_done=False).clone() for _ in range(2)
    ]
    env.close()
    return torch.cat(parts, 1)


def main() -> None:
    """Compare, and print the names of what was observed."""
    try:
        suite.load("cartpole", "swingup").physics.render(camera_id=0)
    except Exception:  # each backend fails with a different exception
        print("no OpenGL")
        return
    for pixels_only in (True, False):
        make = functools.partial(make_env, pixels_only=pixels_only)
        compare(make, 7)
        env = ParallelEnv(NUM_ENVS, make, num_processes=1)
        env.reset()
        assert "steps=direct" in repr(env), repr(env)
        ours, theirs = rollout(env), rollout(SerialEnv(NUM_ENVS, make))
        assert_close(ours, theirs, rtol=0, atol=0)
        assert ours["pixels"].float().std() > 1
        names = sorted(
            set(ours.keys()) - {"action", "next", "done", "terminated", "truncated"}
        )
        print(",".join(names))


if __name__ == "__main__":
    main()
