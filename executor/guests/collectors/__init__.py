"""Loops that collect data, and their policies."""
