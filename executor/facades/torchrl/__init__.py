"""TorchRL's `ParallelEnv` on the executor; `SerialEnv` is TorchRL's own."""
