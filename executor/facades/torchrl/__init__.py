"""TorchRL's `ParallelEnv` on the executor; `SerialEnv` is TorchRL's own."""

from envherd.executor.facades import older_path

__getattr__ = older_path(__name__)
