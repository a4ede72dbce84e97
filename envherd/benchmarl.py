"""BenchMARL's experiments on the executor: `from envherd.benchmarl import installed`."""

from envherd.executor.facades.benchmarl import installed

__all__ = ["installed"]
