"""CleanRL's scripts on the executor and on Gymnasium 1: `from envherd.cleanrl import gym`."""

from envherd.executor.facades import older_path

__getattr__ = older_path(__name__)
