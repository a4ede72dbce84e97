"""A random Melting Pot rollout in ten lines: a factory in, one batch of tensors out.

What it shows: the factory returns a raw Melting Pot substrate without any wrapper. It runs inside the workers, so this
process never builds an env. Keys are those of TorchRL's `MeltingpotEnv`. (The `if __name__ == "__main__"` guard is
optional: workers never run this file.)

Run: python examples/meltingpot_rollout.py
"""

from meltingpot import substrate

from envherd import ParallelEnv

NAME = "commons_harvest__open"


def make_env():
    """Build one env; called inside the workers."""
    return substrate.build(NAME, roles=substrate.get_config(NAME).default_player_roles)


if __name__ == "__main__":
    with ParallelEnv(4, make_env, seed=0) as env:
        data = env.rollout(200)  # random actions; rollout(200, policy) takes yours
    print("world view  ", tuple(data["RGB"].shape), data["RGB"].dtype)
    print(
        "observation ",
        tuple(data["agents", "observation", "RGB"].shape),
        data["agents", "observation", "RGB"].dtype,
    )
    print(
        "action      ",
        tuple(data["agents", "action"].shape),
        data["agents", "action"].dtype,
    )
    mean_returns = data["next", "agents", "reward"].sum(1).mean(0).flatten()
    print(
        "mean return per agent:",
        " ".join(f"{value:.2f}" for value in mean_returns.tolist()),
    )
