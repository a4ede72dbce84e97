"""The engine of an executor for one torch simulator in the caller's process: its tensors are the batches."""
