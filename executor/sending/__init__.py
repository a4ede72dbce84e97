"""What is sent to workers: factories, and variables of their environment."""
