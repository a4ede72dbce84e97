"""Every fault in every state of the protocol: the caller's error, the other envs, and no leftovers.

`make faults` (or ENVHERD_FULL=1) drives the whole table; an ordinary run a part of it.
"""

from __future__ import annotations

import pytest

from tests.faults.matrix import CELLS, QUICK, STATES, drive
from tests.faults.page import record, table
from tests.scale import IS_FULL

pytestmark = [pytest.mark.slow, pytest.mark.broken_pool, pytest.mark.timeout(120)]


@pytest.mark.parametrize("cell", [cell for cell in CELLS if IS_FULL or cell in QUICK], ids=lambda cell: cell.name)
def test_cell(cell, tmp_path):
    found = drive(cell, tmp_path / "broken")
    assert found.left == "nothing"
    record(cell.name, seen=found.seen, seconds=found.seconds, others=found.others)


def test_the_table_is_whole():
    assert set(CELLS) >= QUICK
    assert {cell.state for cell in QUICK} >= set(STATES) - {"build", "reset"}  # those have separate tests
    lines = table({}, "raise")
    assert sum(line.count("not run") for line in lines) == len(
        [cell for cell in CELLS if (cell.policy, cell.start_method) == ("raise", "zygote")]
    )
