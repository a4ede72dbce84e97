"""An env over a C library, from scratch to parallel rollouts: 40 lines of code, and the contract to check them.

The env cannot be pickled, like most bindings to simulators. See docs/custom_envs.md for what each part does.

Run: python examples/ctypes_env.py
"""

import ctypes

from envherd import ParallelEnv
from envherd.executor.testing import check_env_contract
from envherd.shm.specs import Discrete, EnvSpec, LeafSpec
from envherd.workers.adapters import Adapter, register


class Drone:
    """Hovers between floor (-1) and ceiling (1) in gusts of wind.

    Holds pointers and a function of a loaded library, like a binding.
    """

    def __init__(self):
        self.state = ctypes.pointer((ctypes.c_double * 2)())  # height, speed
        self.gusts = ctypes.pointer((ctypes.c_ushort * 3)())  # a random generator
        self.draw = ctypes.CDLL(None).erand48
        self.draw.restype = ctypes.c_double

    def fly(self, thrust):
        """Fly for a moment; return whether the drone is still in the air."""
        state = self.state.contents
        state[1] += 0.02 * thrust + 0.04 * (self.draw(self.gusts) - 0.5)
        state[0] += state[1]
        return abs(state[0]) < 1


class DroneAdapter(Adapter):
    """Adapter for drones: the spec, starts of episodes, one step per call."""

    family = "drone"

    def __init__(self, env):
        self.env = env
        self.spec = EnvSpec(
            observation=(
                LeafSpec(("height",), (1,), "float64"),
                LeafSpec(("speed",), (1,), "float64"),
            ),
            action=(LeafSpec(("action",), (), "int64", Discrete(3)),),
            family=self.family,
        )

    def reset(self, seed, options=None, mask=None):
        """Start an episode, with this seed; None continues with the generator."""
        self.num_steps = 0
        self.env.state.contents[:] = [0.0, 0.0]
        if seed is not None:
            self.env.gusts.contents[:] = [0x330E, seed & 0xFFFF, seed >> 16]
        return list(self.env.state.contents)

    def step(self, action):
        """Return observation and reward in the spec's order, and the two flags."""
        self.num_steps += 1
        is_flying = self.env.fly(action[0] - 1)
        seen = list(self.env.state.contents)
        return seen, [float(is_flying)], not is_flying, self.num_steps == 50


def make_drone():
    """Build one env; called in a worker, where it also registers the adapter."""
    register(Drone, DroneAdapter)
    return Drone()


if __name__ == "__main__":
    report = check_env_contract(make_drone, num_steps=200)
    print(f"the contract holds: rules {report.rules}, {report.num_ends} episodes ended")
    with ParallelEnv(4, make_drone, num_workers=2, seed=0) as env:
        data = env.rollout(1000, break_when_any_done=False)
    crashes, cut = (
        data["next", "terminated"].sum().item(),
        data["next", "truncated"].sum().item(),
    )
    print(f"{data.numel()} steps: {crashes} crashes, {cut} flights of 50 steps")
