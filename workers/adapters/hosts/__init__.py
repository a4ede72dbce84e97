"""What a facade of another library puts into the workers."""
