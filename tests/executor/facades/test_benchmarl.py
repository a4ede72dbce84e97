"""BenchMARL trains on the facade."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import warnings
from pathlib import Path

from tests.extras import needs, skip_without

skip_without("torchrl")

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("benchmarl", reason="needs BenchMARL 1.5 (pip install benchmarl), with TorchRL 0.10 or 0.11")
    import benchmarl.experiment.experiment

from envherd.executor.facades.benchmarl import installed


@pytest.mark.slow
@needs("meltingpot", "all")
@pytest.mark.parametrize(
    ("algorithm", "substrate"),
    [
        ("ippo", "commons_harvest__open"),
        ("mappo", "commons_harvest__open"),
        pytest.param("ippo", "prisoners_dilemma_in_the_matrix__repeated", marks=pytest.mark.full),
        pytest.param("mappo", "collaborative_cooking__cramped", marks=pytest.mark.full),
    ],
)
def test_trains_evaluates_and_films(tmp_path: Path, algorithm: str, substrate: str) -> None:
    pytest.importorskip(
        "tensorboard", reason="BenchMARL's videos are logged through tensorboard (pip install tensorboard)"
    )
    command = [sys.executable, "-m", "tests.executor.facades.benchmarl_training", str(tmp_path), algorithm, substrate]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_name_comes_back_after_an_error() -> None:
    usual = benchmarl.experiment.experiment.ParallelEnv
    with pytest.raises(KeyError), installed():
        raise KeyError
    assert benchmarl.experiment.experiment.ParallelEnv is usual


@pytest.mark.slow
@needs("meltingpot", "all")
def test_the_example_trains(tmp_path: Path) -> None:
    command = [sys.executable, str(Path(__file__).parents[3] / "examples" / "benchmarl_meltingpot.py")]
    short = ("--steps", "800", "--episode", "100", "--curve", "curve.json")
    done = subprocess.run([*command, *short], cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    steps = [int(number) for number in re.findall(r"steps +(\d+)  return per player", done.stdout)]
    assert steps == [400, 800]
    assert [point[0] for point in json.loads((tmp_path / "curve.json").read_text())] == steps
