"""Measuring one env in a worker."""
