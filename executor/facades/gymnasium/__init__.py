"""Gymnasium's vector envs on the executor: `AsyncVectorEnv`, `SyncVectorEnv`, `make_vec`, `installed`."""

from envherd.executor.facades import older_path

__getattr__ = older_path(__name__)
