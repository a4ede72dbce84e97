"""Statistics of measured numbers, on numbers with known results."""

import numpy as np
import pytest

from benchmarks.ratios import (
    LEVELS,
    levels_of,
    merged_levels,
    of_totals,
    per_round,
    quartiles,
)


def test_quartiles_of_known_numbers():
    assert quartiles([4, 1, 3, 2, 5]) == (2.0, 3.0, 4.0)


def test_a_ratio_is_taken_within_rounds():
    # A machine that is twice as fast in every other round: the ratio of medians would be 4, that of each round is 2.
    ours, theirs = [20.0, 40.0, 20.0, 40.0], [10.0, 20.0, 10.0, 20.0]
    assert per_round(ours, theirs) == (2.0, 2.0, 2.0)


def test_invalid_rounds_are_left_out():
    assert per_round(
        [2.0, 900.0, 4.0], [1.0, 1.0, 1.0], valid=[True, False, True]
    ) == pytest.approx((2.5, 3.0, 3.5))
    assert per_round([1.0], [1.0], valid=[False]) is None


def test_rounds_must_match():
    with pytest.raises(ValueError, match=r"longer|shorter"):
        per_round([1.0, 2.0], [1.0])


def test_lumps_count_in_totals_and_not_in_the_median_round():
    even = [(100.0, 1.0)] * 5
    # One round has the reset: half of all time.
    lumpy = [(100.0, 1.0)] * 4 + [(100.0, 6.0)]
    assert per_round([a / s for a, s in even], [a / s for a, s in lumpy]).mid == 1.0
    ratio = of_totals(even, lumpy)
    assert ratio.mid == pytest.approx(2.0)
    assert ratio.low <= ratio.mid <= ratio.high
    assert ratio.low < ratio.high


@pytest.mark.parametrize("empty", [[], [(0.0, 1.0)]])
def test_totals_of_nothing_are_none(empty):
    assert of_totals(empty, [(1.0, 1.0)]) is None
    assert of_totals([(1.0, 1.0)], empty) is None


def test_levels_keep_the_median_and_the_ends():
    values = np.arange(1000.0).tolist()
    levels = levels_of(values)
    assert len(levels) == len(LEVELS)
    assert (levels[0], levels[50], levels[-1]) == (0.0, 499.5, 999.0)


def test_distributions_merge_with_equal_weight():
    low, high = levels_of([1.0] * 5), levels_of([3.0] * 5000)
    merged = merged_levels([low, high])
    assert (merged[0], merged[25], merged[75], merged[100]) == (1.0, 1.0, 3.0, 3.0)
