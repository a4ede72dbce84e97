"""Benchmarks that compare the executor with others: `python -m benchmarks` (see README.md of this folder).

Imports point one way here too: these modules use `envherd.executor`, and no other part uses them.
"""

from pathlib import Path

#: The checkout of the repository.
ROOT = Path(__file__).resolve().parents[1]
