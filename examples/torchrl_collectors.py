"""TorchRL's own collectors and replay buffer over our `ParallelEnv`: only one import changes.

Two collector processes run two envs each and write to a replay buffer.

Run: python examples/torchrl_collectors.py
"""

from __future__ import annotations

import warnings

import torch
from tensordict.nn import TensorDictModule
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.envs import EnvBase, GymEnv, StepCounter, TransformedEnv

from envherd.torchrl import ParallelEnv  # was: from torchrl.envs import ParallelEnv

with warnings.catch_warnings():
    # TorchRL deprecates parts of itself as they are imported.
    warnings.simplefilter("ignore")
    from torchrl.collectors import MultiSyncCollector


def make_env() -> EnvBase:
    """Return two CartPoles that count their steps."""
    return TransformedEnv(
        ParallelEnv(2, lambda: GymEnv("CartPole-v1"), num_processes=1), StepCounter()
    )


def choose(observation: torch.Tensor) -> torch.Tensor:
    """Return one-hot actions: push the cart to where the pole leans."""
    return torch.nn.functional.one_hot((observation[..., 2] > 0).long(), 2)


def main() -> None:
    """Collect 800 frames and draw from them."""
    torch.manual_seed(0)
    policy = TensorDictModule(choose, in_keys=["observation"], out_keys=["action"])
    buffer = ReplayBuffer(storage=LazyTensorStorage(10_000), batch_size=32)
    collector = MultiSyncCollector(
        [make_env, make_env],
        policy,
        frames_per_batch=400,
        total_frames=800,
        cat_results="stack",
    )
    try:
        for batch in collector:
            buffer.extend(batch.reshape(-1).to_tensordict())
            print(
                f"collected {batch.numel()} frames, {int(batch['next', 'done'].sum())} episodes ended"
            )
    finally:
        collector.shutdown()
    sample = buffer.sample()
    print(
        f"{len(buffer)} frames kept; a sample: observation {tuple(sample['observation'].shape)}"
    )


if __name__ == "__main__":
    main()
