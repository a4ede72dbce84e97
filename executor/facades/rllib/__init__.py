"""RLlib's env runners with envs in worker processes: `config.env_runners(env_runner_cls=SingleAgentEnvRunner)`."""
