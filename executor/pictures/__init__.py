"""Pictures of envs and videos of them, for the command line and for recorders in Python."""
