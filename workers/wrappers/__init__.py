"""Adapters around adapters: further leaves."""
