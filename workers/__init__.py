"""One worker process: its envs, its loop, its messages; no torch, no RL package until an env needs one."""
