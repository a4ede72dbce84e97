"""TorchRL envs."""
