"""A worker as a process: how it starts, and its loop."""
