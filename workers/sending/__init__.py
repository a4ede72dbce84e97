"""What is sent to workers: objects by value or by name, registries, surroundings."""
