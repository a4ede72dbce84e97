"""Melting Pot substrates and scenarios."""
