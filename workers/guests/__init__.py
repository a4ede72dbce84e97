"""The workers' halves of features that the kernel does not know."""
