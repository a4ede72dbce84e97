"""Keep TorchRL from importing TensorFlow; imported in workers and their helper process.

TorchRL's Gym wrappers import Stable-Baselines3 where it is installed, which imports TensorBoard, which imports
TensorFlow (6 s and 400 MB in every process, 2-core x86, 2026-11) unless the module defined here reports that there is
none. TensorBoard's writers work without it. A process that has TensorFlow already keeps it.
"""

import sys
import types

if "tensorflow" not in sys.modules:
    sys.modules.setdefault(
        "tensorboard.compat.notf",
        types.ModuleType("tensorboard.compat.notf"),
    )
