"""RLlib's env runners with envs in worker processes: `from envherd.rllib import SingleAgentEnvRunner`."""

from envherd.executor.facades.rllib import (
    MultiAgentEnvRunner,
    MultiAgentVectorEnv,
    SingleAgentEnvRunner,
)

__all__ = ["MultiAgentEnvRunner", "MultiAgentVectorEnv", "SingleAgentEnvRunner"]
