"""Benchmarks of the executor beside others, in one run: `envherd bench` (see README.md of this folder).

Imports point one way here too: these modules use `envherd.executor`, and only `executor/cli/bench.py` uses them.
"""
