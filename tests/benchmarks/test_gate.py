"""When a slot is valid: decisions on recorded numbers."""

import os
import time
from contextlib import closing

import pytest

from benchmarks.accounting import Usage, pressure_total_us
from benchmarks.gate import (
    Probe,
    Reading,
    delay_ratio,
    is_judged_by_wall,
    others_share,
    reasons_to_discard,
    tries_for,
)

#: Recorded on two cores. Run and delay nanoseconds of the two probes, and what another process used meanwhile.
QUIET = [Usage(10_412_000, 31_000), Usage(10_398_000, 12_000)]
ONE_BUSY_CORE = [Usage(10_502_000, 9_870_000), Usage(10_377_000, 24_000)]


def test_the_probe_sees_one_busy_core():
    assert delay_ratio(QUIET) < 0.01
    assert delay_ratio(ONE_BUSY_CORE) > 0.4
    assert delay_ratio([Usage(0, 0)]) == 0.0


@pytest.mark.parametrize(
    ("reading", "reasons"),
    [
        (Reading(0.0, 0.0), []),
        (Reading(0.1, 0.1), []),
        (Reading(0.11, 0.0), ["delay"]),
        (Reading(0.0, 0.11), ["others"]),
        (Reading(0.9, 0.5), ["delay", "others"]),
    ],
)
def test_a_slot_is_discarded_for_either_reason(reading, reasons):
    assert reasons_to_discard(reading) == reasons


def test_others_are_what_is_left_of_the_machine():
    # 250 ms on two cores; all was used, 300 ms of it by the pool.
    assert others_share(500e6, 300e6, 250e6, 2) == pytest.approx(0.4)
    assert others_share(290e6, 300e6, 250e6, 2) == 0.0, (
        "the account of the machine goes in steps of 10 ms"
    )


def test_tries_are_given_up_where_the_gate_never_opens():
    assert tries_for(4, []) == 4
    assert tries_for(4, [False] * 5) == 4
    assert tries_for(4, [False] * 6) == 1
    assert tries_for(4, [True] + [False] * 6) == 1
    assert tries_for(4, [False] * 5 + [True]) == 4, (
        "it opened, so it is worth trying again"
    )


@pytest.mark.parametrize(
    ("num_open", "pressure", "is_judged"),
    [
        (3, 0.0, True),
        (3, None, True),
        (2, 0.0, False),
        (12, 0.11, False),
        (12, 0.1, True),
    ],
)
def test_the_clock_counts_only_with_enough_open_rounds_and_no_pressure(
    num_open, pressure, is_judged
):
    assert is_judged_by_wall(num_open, pressure) is is_judged


def test_pressure_is_read_from_the_kernels_line():
    assert (
        pressure_total_us("some avg10=9.25 avg60=11.53 avg300=6.85 total=7643387625")
        == 7643387625
    )
    assert pressure_total_us("") is None


@pytest.mark.slow
def test_a_real_probe_answers_and_ends():
    with closing(Probe()) as probe:
        began = time.monotonic()
        assert probe.read() >= 0.0
        assert time.monotonic() - began < 30.0
    assert os.sched_getaffinity(0), "this process is not pinned"
