"""Many rollouts in a text world at once, an env for each: `LeasePool` with asyncio and a scripted policy."""

from __future__ import annotations

import asyncio
import random
import re

from envherd import LeasePool

ROOMS = ("kitchen", "cellar", "garden", "attic")


class TextWorld:
    """A house with four rooms in a circle, and a key in one of them. Text in, text out; no spaces."""

    def reset(self, seed: int) -> str:
        """Begin an episode; return what the agent sees."""
        rng = random.Random(seed)
        self.place, self.key = rng.sample(range(len(ROOMS)), 2)
        self.score = 0.0
        return self._look()

    def step(self, command: str) -> tuple[str, bool]:
        """Carry out a command; return what the agent sees, and whether the episode has ended."""
        if command == "go on":
            self.place = (self.place + 1) % len(ROOMS)
        elif command == "take key" and self.place == self.key:
            self.score = 1.0
            return "You have the key.", True
        return self._look(), False

    def _look(self) -> str:
        thing = "a key" if self.place == self.key else "nothing"
        return f"You are in the {ROOMS[self.place]}. You see {thing}."


def policy(text: str) -> str:
    """Answer as a language model would."""
    return "take key" if re.search(r"see a key", text) else "go on"


async def rollout(pool: LeasePool, seed: int) -> tuple[int, float]:
    """Play one episode; return its steps and its score."""
    async with pool.lease(f"rollout {seed}") as env:
        text = await env.reset(seed)
        has_ended, count = False, 0
        while not has_ended:
            text, has_ended = await env.step(policy(text))
            count += 1
        return count, await env.call(lambda world: world.score)


async def main() -> None:
    """Play 32 episodes with at most 4 envs at once."""
    async with LeasePool(TextWorld, num_envs=4, timeout_s=30) as pool:
        results = await asyncio.gather(*(rollout(pool, seed) for seed in range(32)))
    steps = [count for count, _ in results]
    print(f"{len(results)} episodes, mean score {sum(score for _, score in results) / len(results):.2f}, "
          f"{min(steps)} to {max(steps)} steps")  # fmt: skip


if __name__ == "__main__":
    asyncio.run(main())
