"""Gymnasium's vector envs on the executor: `AsyncVectorEnv`, `SyncVectorEnv`, `make_vec`, `installed`."""
