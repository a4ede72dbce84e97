"""Resets in sizing: how many there are, and whether they should be made ahead."""

from __future__ import annotations

from dataclasses import replace

from tests.extras import skip_without

skip_without("cli")

import numpy as np
import pytest

from envherd.executor.cli.sizing_report import yaml_text
from envherd.executor.sizing.measurement import share_of_ends
from envherd.executor.sizing.model import Model, Setting
from envherd.executor.sizing.recommending import Sizing
from envherd.executor.sizing.resets import resets_ahead
from tests.executor.test_sizing import MIB, OVERHEAD, SPEC, advice_of, machine_of, measured_of


def test_resets_ahead_are_advised_where_processors_are_idle_and_memory_suffices():
    slow = measured_of(reset_samples=np.full(5, 0.3), reset_cpu_s=0.3, end_share=0.002)

    def advised(measured, num_envs=8, **machine):
        advice = advice_of(measured, machine_of(16, **machine), num_envs=num_envs)
        assert ("reset_ahead=True" in " ".join(advice.why)) == (advice.ahead is not None)
        return advice

    advice = advised(slow)
    assert "uses it for the resets, with 16 workers of one env" in " ".join(advice.why)
    assert advice.ahead.memory_bytes > 1.5 * advice.prediction.memory_bytes
    # An episode of 500 steps lasts a second, in which a reset of 0.3 s is made: a batch waits for steps only.
    steps = advice_of(measured_of(end_share=0.0), machine_of(16), num_envs=8, num_workers=8).prediction
    assert advice.ahead.steps_per_s == pytest.approx(steps.steps_per_s, rel=0.05)
    assert advice.ahead.steps_per_s > 1.5 * advice.prediction.steps_per_s
    assert advice.to_plain()["reset_ahead"]["steps_per_s"] == advice.ahead.steps_per_s
    assert advised(slow, memory=300 * MIB).ahead is None
    assert advised(slow, num_envs=16).ahead is None  # all processors are busy
    assert advised(measured_of()).ahead is None
    assert advised(replace(slow, spec=replace(SPEC, batch_shape=(1,)))).ahead is None


def test_resets_ahead_are_pasted_as_they_are_accepted():
    slow, machine = measured_of(reset_samples=np.full(5, 0.3), reset_cpu_s=0.3, end_share=0.002), machine_of(16)
    advice = advice_of(slow, machine, num_envs=8, num_workers=4)
    sizing = Sizing(machine=machine, measured=slow, overhead=OVERHEAD, advice=advice)
    lines = [line for line in yaml_text("env", sizing).splitlines() if not line.startswith("#")]
    assert lines == ["num_envs: 8", "num_workers: 8", "stepping: sync", "options:", "  reset_ahead: true"]
    plain = replace(sizing, advice=replace(advice, ahead=None))
    assert "num_workers: 4" in yaml_text("env", plain)
    assert "reset_ahead" not in yaml_text("env", plain)


def test_short_resets_are_not_worth_handing_envs_over():
    short = measured_of(1e-5, reset_samples=np.full(5, 2e-4), reset_cpu_s=2e-4, end_share=0.05)
    model = Model(short, replace(OVERHEAD, fixed_s=2e-4), machine_of(16))
    setting = Setting(num_envs=2, num_workers=2)
    idle = replace(model.predict(setting), batch_s=1.0, steps_per_s=1.0, overhead_s=2e-4)
    assert resets_ahead(model, setting, idle) is None
    assert resets_ahead(model, setting, replace(idle, overhead_s=5e-5)) is not None


def test_resets_ahead_are_no_faster_than_resets_are():
    slow = measured_of(reset_samples=np.full(5, 0.3), reset_cpu_s=0.3, end_share=0.05)
    ahead = advice_of(slow, machine_of(16), num_envs=4, modes=("sync",)).ahead
    assert ahead.steps_per_s == pytest.approx(4 / (0.05 * 0.3), rel=0.2)


def seen(draw, steps):
    """Return the lengths of the episodes that end within so many steps, and how long the next one is by then."""
    ends = np.cumsum([draw() for _ in range(steps)])
    ends = ends[ends <= steps]
    return np.diff([0, *ends]), steps - (ends[-1] if len(ends) else 0)


@pytest.mark.parametrize("kind", ["even", "geometric", "one length"])
def test_an_episode_under_way_counts_for_what_it_is_worth(kind):
    rng = np.random.default_rng(0)
    draw = {
        "even": lambda: rng.integers(100, 201),
        "geometric": lambda: rng.geometric(1 / 150),
        "one length": lambda: 150,
    }[kind]
    shares = [share_of_ends(*seen(draw, int(rng.integers(450, 600)))) for _ in range(1000)]
    # Ends over steps are 10 % too few where episodes vary little.
    assert np.mean(shares) == pytest.approx(1 / 150, rel=0.07 if kind == "geometric" else 0.03)
    assert share_of_ends(np.array([], int), 90) == 0
    assert 1 / 190 < share_of_ends(np.array([100]), 90) < 1 / 100
