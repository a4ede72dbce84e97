"""What is shown of a run: evaluations, policies by agent, pictures and videos, episodes and statistics for loggers."""
