"""PettingZoo envs, parallel and in turn (AEC)."""
