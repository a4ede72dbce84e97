"""The TorchRL facade in real use: collectors, checkpoints, Melting Pot."""

import warnings
from contextlib import closing

from tests.extras import needs, skip_without

skip_without("torchrl")

import pytest
import torch
from tensordict.nn import TensorDictModule
from torchrl.envs import (
    EnvBase,
    MeltingpotEnv,
    StepCounter,
    TransformedEnv,
)

from envherd.torchrl import ParallelEnv
from tests.envs import torchrl_own as own

with warnings.catch_warnings():
    # TorchRL deprecates parts of itself as they are imported.
    warnings.simplefilter("ignore")
    import torchrl.collectors

    # Its name before TorchRL 0.11.
    Collector = (
        getattr(torchrl.collectors, "Collector", None)
        or torchrl.collectors.SyncDataCollector
    )

pytestmark = [
    pytest.mark.slow,
    pytest.mark.preloads(*own.PRELOADED),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]

SUBSTRATE = "prisoners_dilemma_in_the_matrix__repeated"


class Always(torch.nn.Module):
    """A policy without parameters."""

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(observation, dtype=torch.int8)


def policy() -> TensorDictModule:
    return TensorDictModule(Always(), in_keys=["observation"], out_keys=["action"])


def herd() -> EnvBase:
    return ParallelEnv(
        2,
        lambda: TransformedEnv(own.CountingEnv(max_steps=3), StepCounter()),
        num_processes=1,
    )


def test_collector_and_its_checkpoint() -> None:
    collector = Collector(herd(), policy(), frames_per_batch=10, total_frames=40)
    batches = iter(collector)
    first = next(batches)
    assert first.shape == (2, 5)
    assert first["next", "observation"][0].flatten().tolist() == [1, 2, 3, 4, 1]
    assert first["observation"][0].flatten().tolist() == [0, 1, 2, 3, 0]
    state = collector.state_dict()
    assert "env_state_dict" in state
    assert "worker1" in state["env_state_dict"]
    collector.load_state_dict(state)
    second = next(batches)
    # No row is a step behind.
    assert (second["next", "observation"] == second["observation"] + 1).all()
    collector.shutdown()


@needs("meltingpot")
def test_the_melting_pot_script() -> None:
    with closing(ParallelEnv(2, lambda: MeltingpotEnv(SUBSTRATE))) as env:
        rollout = env.rollout(3)
        assert rollout["agents", "observation", "RGB"].shape[:3] == (2, 3, 2)
        assert rollout["RGB"].dtype == torch.uint8
        td = env.reset(rollout[:, -1].select(*env.reset_keys, strict=False))
        assert td.shape == (2,)
