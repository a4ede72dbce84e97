"""Shared-memory mechanism: bytes (`segment`), their layout and meaning (`slab`), wake-ups (`sync`)."""
