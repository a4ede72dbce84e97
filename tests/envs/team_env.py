"""A team of players in one env, whose observations, rewards and pictures identify the player; imported by workers."""

import numpy as np

from envherd.shm.specs import Discrete, EnvSpec, LeafSpec
from envherd.workers.testing.envs import PlainEnv

ROLES = ("hunter", "gatherer", "gatherer")
NUM_ACTIONS = 4


class Team(PlainEnv):
    """Three players. Each observes `(step, player)`, float32, and gets its action as its reward, player 0 half of it.

    Args:
        length: steps of an episode; 0 draws 2 to 5 from the seed.
        size: of the pictures, world `[size, 2 * size, 3]` and each player's view `[size, size, 3]`; 0 for none.
    """

    def __init__(self, length=3, size=0):
        self.fixed, self.size, self.num_steps = length, size, 0
        views = (
            [LeafSpec(("agents", "observation", "RGB"), (3, size, size, 3), "uint8")]
            if size
            else []
        )
        worlds = [LeafSpec(("RGB",), (size, 2 * size, 3), "uint8")] if size else []
        self.spec = EnvSpec(
            observation=(
                *worlds,
                LeafSpec(("agents", "observation", "place"), (3, 2), "float32"),
                *views,
            ),
            action=(
                LeafSpec(("agents", "action"), (3,), "int64", Discrete(NUM_ACTIONS)),
            ),
            reward=(LeafSpec(("agents", "reward"), (3, 1), "float64"),),
            groups=((("agents",), (3,)),),
            family="plain",
            metadata={"agent_roles": list(ROLES), "frame_key": "RGB" if size else ""},
        )

    def reset(self, seed, options=None):
        self.num_steps = 0
        self.length = self.fixed or 2 + (seed or 0) % 4
        return self.see()

    def step(self, action):
        self.num_steps += 1
        reward = np.asarray(action[0], np.float64)[:, None] * [[0.5], [1.0], [1.0]]
        return self.see(), [reward], False, self.num_steps >= self.length

    def see(self):
        places = np.array([[self.num_steps, player] for player in range(3)], np.float32)
        if not self.size:
            return [places]
        world = np.full((self.size, 2 * self.size, 3), 40 * self.num_steps, np.uint8)
        views = np.zeros((3, self.size, self.size, 3), np.uint8)
        for player in range(3):
            views[player, :, :, player] = 60 + 30 * self.num_steps
        return [world, places, views]


def pictured():
    """Return a team whose world and views are pictures; episodes of four steps."""
    return Team(4, 8)


def film_into(films):
    """Return a class in place of `Video`: `films` gets, by file name, the value of each frame's first pixel."""

    class Film:
        def __init__(self, path, fps):
            self.path, self.frames = path, []

        def add(self, frame):
            self.frames.append(int(frame[0, 0, 0]))

        def close(self):
            assert films.setdefault(self.path.stem, self.frames) is self.frames

    return Film
