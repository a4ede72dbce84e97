"""RLlib's env runners with envs in worker processes: `config.env_runners(env_runner_cls=SingleAgentEnvRunner)`."""

from typing import TYPE_CHECKING

from envherd.executor.facades import lazy_names

if TYPE_CHECKING:
    from envherd.executor.facades.rllib.env_runners import (
        MultiAgentEnvRunner,
        SingleAgentEnvRunner,
    )
    from envherd.executor.facades.rllib.multi_agent import MultiAgentVectorEnv

__all__ = ["MultiAgentEnvRunner", "MultiAgentVectorEnv", "SingleAgentEnvRunner"]

_HOMES = {
    "MultiAgentEnvRunner": "env_runners",
    "SingleAgentEnvRunner": "env_runners",
    "MultiAgentVectorEnv": "multi_agent",
}
__getattr__ = lazy_names(
    __name__,
    _HOMES,
    "envherd[rllib]",
    "ray",
    "gymnasium",
    "fsspec",
    "pandas",
    "pyarrow",
    "requests",
    "tensorboardX",
    "tree",
)
