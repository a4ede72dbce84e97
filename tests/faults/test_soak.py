"""A short soak: nothing grows, no row is wrong; leaks are detected."""

import pytest

from tests.scale import scaled
from tools.soak import Report, Sample, Soak

pytestmark = [pytest.mark.long, pytest.mark.broken_pool, pytest.mark.timeout(280)]

SECONDS = scaled(3.0, full=60.0)


def test_nothing_is_left_of_executors_that_come_break_and_go():
    report = Soak(seed=1).run(SECONDS)
    assert report.leaks() == []
    assert report.done["opened"] >= 2
    assert report.done["rows compared"] > 5


def test_a_leak_is_seen():
    report = Report(
        0, before=Sample(0, 100, 10, 1, 0, 0), after=Sample(9, 100, 11, 1, 2, 0)
    )
    report.samples = [
        Sample(second, 100 + 10 * second, 10, 1, 0, 0) for second in range(20)
    ]
    assert report.leaks() == ["descriptors", "children", "memory"]
