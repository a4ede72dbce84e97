"""Leases: an env for each of many independent callers (`LeasePool`), a guest of the crew of worker processes."""
