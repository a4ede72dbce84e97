"""A batched simulator in torch without an adapter: VMAS behind the interface that envherd expects.

`num_envs`, `device`, `single_action_space`, `metadata["autoreset_mode"]`, `reset` and `step` are all that it needs. In
`SerialEnv(1, ...)` neither actions nor observations are copied, and both may be on a GPU. (TorchRL's `VmasEnv` runs as
it is.)

Needs: pip install "envherd[gymnasium,vmas]"
Run: python examples/vmas_simulator.py [--rows 64] [--device cuda]
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import gymnasium
import torch
import vmas

from envherd import SerialEnv


class VmasSimulator:
    """A scenario of VMAS: rows that end one by one, and never reset by themselves.

    Actions are float32 `[B, agents, size]`, observations `[B, agents, ...]`, rewards `[B]` the means over agents.

    Args:
        scenario: its name; all agents must have the same spaces.
        num_envs: B.
        device: where its tensors are.
        max_steps: steps until a row is truncated.
    """

    metadata = {"autoreset_mode": "DISABLED"}  # as Gymnasium has it

    def __init__(
        self,
        scenario: str,
        num_envs: int = 64,
        device: str = "cpu",
        max_steps: int = 100,
    ) -> None:
        self.num_envs, self.device = num_envs, torch.device(device)
        options = {"num_envs": num_envs, "device": device, "max_steps": max_steps}
        self.vmas = vmas.make_env(scenario, **options, terminated_truncated=True)
        self.random_state = list(self.vmas.vmas_random_state)
        sizes = [agent.action_size for agent in self.vmas.agents]
        self.single_action_space = gymnasium.spaces.Box(
            -1.0, 1.0, (len(sizes), sizes[0])
        )

    def reset(
        self, *, seed: int | None = None, options: dict[str, torch.Tensor] | None = None
    ) -> Any:
        """Reset all rows, or those of the mask; return the observations of all rows."""
        with self.own_random_state():
            if options is None:
                return of_agents(self.vmas.reset(seed=seed)), {}
            for row in options["reset_mask"].nonzero().view(-1).tolist():
                self.vmas.reset_at(row, return_observations=False)
            flags = {"get_rewards": False, "get_infos": False, "get_dones": False}
            (observations,) = self.vmas.get_from_scenario(
                get_observations=True, **flags
            )
            return of_agents(observations), {}

    def step(self, actions: torch.Tensor) -> Any:
        """Step all rows."""
        with self.own_random_state():
            observations, rewards, terminated, truncated, _ = self.vmas.step(
                list(actions.unbind(1))
            )
        return (
            of_agents(observations),
            of_agents(rewards).mean(1),
            terminated,
            truncated,
            {},
        )

    def close(self) -> None:
        """Release nothing: VMAS holds only tensors."""

    @contextlib.contextmanager
    def own_random_state(self) -> Iterator[None]:
        """Let VMAS draw from this env's state: it has one list for all envs of a process."""
        shared = self.vmas.vmas_random_state
        others, shared[:] = list(shared), self.random_state
        try:
            yield
        finally:
            self.random_state, shared[:] = list(shared), others


def of_agents(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stack what VMAS returned for each agent."""
    return torch.stack(list(values), 1)


def main() -> None:
    """Step with random actions, and print the speed and how many episodes have ended."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    with SerialEnv(
        1,
        lambda: VmasSimulator("balance", given.rows, given.device),
        seed=0,
        device=given.device,
    ) as env:
        began = time.monotonic()
        data = env.rollout(120, break_when_any_done=False)
        seconds = time.monotonic() - began
        print(
            f"{tuple(data.batch_size)} transitions, {data.numel() / seconds:,.0f} per second"
        )
        print(
            f"{int(data['next', 'truncated'].sum())} episodes were truncated, {data['observation'].device}"
        )


if __name__ == "__main__":
    main()
