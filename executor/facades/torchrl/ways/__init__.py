"""Direct ways: step TorchRL envs of known classes without TorchRL's code around each step. `direct` has the rules."""
