"""SB3's vectorised envs on the executor: `SubprocVecEnv`, `installed`."""
