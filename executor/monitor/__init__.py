"""Monitor workers, from the executor's process and from other processes."""
