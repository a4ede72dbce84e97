"""Evaluation of policies in envs with players: whole episodes, what they come to, and a chart of it."""
