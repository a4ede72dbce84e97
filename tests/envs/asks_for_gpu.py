"""Asks at its import whether there is a GPU, as many libraries do."""

import torch

HAS_GPU = torch.cuda.is_available()
