"""RLlib's env runners with envs in worker processes: `config.env_runners(env_runner_cls=SingleAgentEnvRunner)`."""

from envherd.executor.facades import older_path

__getattr__ = older_path(__name__)
