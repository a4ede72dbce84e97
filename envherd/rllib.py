"""RLlib's env runners with envs in worker processes: `from envherd.rllib import SingleAgentEnvRunner`."""

from envherd.executor.facades import needing

with needing(
    "envherd[rllib]",
    "ray",
    "gymnasium",
    "fsspec",
    "pandas",
    "pyarrow",
    "requests",
    "tensorboardX",
    "tree",
):
    from envherd.executor.facades.rllib.env_runners import (
        MultiAgentEnvRunner,
        MultiAgentVectorEnv,
        SingleAgentEnvRunner,
    )

__all__ = ["MultiAgentEnvRunner", "MultiAgentVectorEnv", "SingleAgentEnvRunner"]
