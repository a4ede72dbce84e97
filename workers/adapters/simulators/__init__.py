"""Simulators that step a batch of envs on tensors."""
