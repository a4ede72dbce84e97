"""CleanRL's scripts on the executor and on Gymnasium 1: `from envherd.cleanrl import gym`."""
