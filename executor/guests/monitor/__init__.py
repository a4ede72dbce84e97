"""What other programs, and the user, see of an executor."""
