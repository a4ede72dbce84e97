"""The sweep's verdict on a choice."""

from tests.extras import skip_without

skip_without("cli")

import numpy as np
import pytest

from benchmarks.sizing import shares_of_best


def test_choice_that_is_slower_in_every_round_is_reported() -> None:
    speed_of_round = [100.0, 60.0, 140.0, 90.0]  # a machine whose speed changes
    rates = {
        "chosen": [0.9 * speed for speed in speed_of_round],
        "best": speed_of_round,
    }
    assert np.median(shares_of_best(rates, "chosen")) == pytest.approx(0.9)
    assert shares_of_best(rates, "best") == [1, 1, 1, 1]
    assert shares_of_best(
        {"chosen": [80.0], "best": [100.0]}, "chosen"
    ) == pytest.approx([0.8])


def test_equal_settings_are_not_distinguished_by_chance() -> None:
    rng = np.random.default_rng(0)
    shares, largest = [], []
    for _ in range(200):
        rates = {setting: rng.normal(100, 6, 6).tolist() for setting in range(4)}
        shares.append(np.median(shares_of_best(rates, 0)))
        medians = {setting: np.median(own) for setting, own in rates.items()}
        largest.append(medians[0] / max(medians.values()))
    assert np.mean(shares) == pytest.approx(1, abs=0.01)
    assert np.mean(largest) < 0.98  # the result of comparing with the largest figure
