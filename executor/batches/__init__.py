"""Convert rows of the slab to TensorDicts, and actions to rows."""
