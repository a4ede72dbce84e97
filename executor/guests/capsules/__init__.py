"""Crash capsules."""
