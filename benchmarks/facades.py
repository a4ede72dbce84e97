"""Compare the facades with the classes that they replace: `envherd bench --only cartpole`, with further options.

Run: python -m envherd.benchmarks.facades [--quick] [--rounds N] [--json PATH]
"""

from __future__ import annotations

import sys

from envherd.executor.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["bench", "--only", "cartpole"]
    main()
