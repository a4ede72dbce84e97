"""What may be asked of the envs now, and what became of it."""
