"""What workers are doing, seen from inside and from outside."""
