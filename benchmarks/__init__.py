"""Benchmarks that compare the executor with others: `python -m envherd.benchmarks` (see README.md of this folder).

Imports point one way here too: these modules use `envherd.executor`, and no other part uses them.
"""

from pathlib import Path

#: The checkout of the repository, or the folder of an installed package, which has no `docs/`.
ROOT = Path(__file__).resolve().parents[1]  # of a checkout, `envherd/benchmarks` is a link
