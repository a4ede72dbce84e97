"""Errors before there is a cluster."""

import subprocess
import sys

import pytest

from envherd.executor import FactoryError
from envherd.executor.cluster import RayParallelEnv

SCRIPT = """
import sys
sys.modules["ray"] = None
from envherd.executor.cluster import ClusterError, RayParallelEnv
from envherd.workers.testing import CountingEnv
try:
    RayParallelEnv(2, CountingEnv)
except ClusterError as error:
    print(error)
"""


@pytest.mark.slow
def test_without_ray_it_says_what_to_install():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=120)
    assert "expected Ray, got ModuleNotFoundError" in done.stdout
    assert "pip install 'envherd[ray]'" in done.stdout


def test_a_factory_that_cannot_be_pickled_is_named_before_anything_starts():
    held = (number for number in range(3))
    with pytest.raises(FactoryError, match="captured the variable `held`"):
        RayParallelEnv(2, lambda: held)
