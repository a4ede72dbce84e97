"""SB3's vectorised envs on the executor: `SubprocVecEnv`, `DummyVecEnv`, `installed`."""

from envherd.executor.facades import older_path

__getattr__ = older_path(__name__)
