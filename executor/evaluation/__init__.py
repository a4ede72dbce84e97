"""Evaluation of policies in envs with players: plays whole episodes, computes measures, and draws a chart."""
