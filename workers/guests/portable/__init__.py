"""Workers of the portable pool."""
