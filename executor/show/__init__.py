"""What is shown of a run: evaluations, policies by player, pictures and videos, episodes and statistics for loggers."""
