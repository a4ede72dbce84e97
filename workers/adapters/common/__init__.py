"""Code that several env families share."""
