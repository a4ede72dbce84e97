"""Who runs the envs: worker processes, or the calling process."""
