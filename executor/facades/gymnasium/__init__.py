"""Gymnasium's vector envs on the executor: `AsyncVectorEnv`, `make_vec`, `installed`."""
