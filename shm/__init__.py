"""Shared-memory mechanism: arithmetic (`layout`), bytes (`segment`), meaning (`slab`), wake-ups (`sync`)."""
