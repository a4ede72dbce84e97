"""Curves of several seeds are compared at steps that all of them have reached."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.extras import skip_without

skip_without("media")

import numpy as np
import pytest

from benchmarks import curves


def test_curves_are_compared_at_steps_that_all_have_reached():
    one, other = np.array([[0.0, 0.0], [100.0, 10.0]]), np.array([[50.0, 7.0], [300.0, 7.0]])
    steps, returns = curves.on_common_steps([one, other])
    assert (steps[0], steps[-1]) == (50.0, 100.0)
    assert returns[0] == pytest.approx(steps / 10)
    assert returns[1] == pytest.approx(7.0)


def test_curves_that_do_not_overlap_are_refused():
    with pytest.raises(ValueError, match="expected curves that overlap, got steps 50 to 20"):
        curves.on_common_steps([np.array([[0.0, 0.0], [20.0, 1.0]]), np.array([[50.0, 0.0], [90.0, 1.0]])])


@pytest.mark.slow
def test_a_picture_is_drawn(tmp_path):
    for seed in (1, 2):
        (tmp_path / f"{seed}.json").write_text(json.dumps([(0, seed, 0.0), (10, 2 * seed, 1.0)]))
    command = [
        sys.executable,
        "-m",
        "benchmarks.curves",
        "a.png",
        "shared=1.json,2.json",
        "--line",
        "random=1.5",
    ]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=200)  # matplotlib keeps its fonts open
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
