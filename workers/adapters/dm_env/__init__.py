"""dm_env envs, dm_control among them."""
