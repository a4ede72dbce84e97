"""Features that the kernel does not know: it works without each of these modules."""
