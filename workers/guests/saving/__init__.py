"""The state of an env as plain data."""
