"""Every fault in every state of the protocol: the caller's error, the other envs, and no leftovers.

`make faults` (or ENVHERD_FULL=1) drives the whole table; an ordinary run a part of it.
"""

import pytest

from tests.envs.breaking_envs import BAD_OBSERVATIONS, EXCEPTIONS
from tests.faults.matrix import CELLS, FAULTS, QUICK, STATES, drive
from tests.scale import IS_FULL
from tools.faults_page import record, table

pytestmark = [pytest.mark.slow, pytest.mark.broken_pool, pytest.mark.timeout(120)]


@pytest.mark.parametrize(
    "cell",
    [cell for cell in CELLS if IS_FULL or cell in QUICK],
    ids=lambda cell: cell.name,
)
@pytest.mark.long
def test_cell(cell, tmp_path, caplog):
    found = drive(cell, tmp_path / "broken")
    assert found.left == "nothing"
    assert ("closing env 1 raised" in caplog.text) == (
        (cell.kind, cell.state) == ("raises", "close")
    )
    assert found.seconds < 20 or cell.state == "build" or cell.kind == "hangs"
    record(cell.name, seen=found.seen, seconds=found.seconds, others=found.others)


def test_fault_table_has_every_state_and_fault():
    assert set(CELLS) >= QUICK
    assert {cell.state for cell in QUICK} == set(STATES)
    # These: test_env_raises.
    assert {cell.fault for cell in QUICK} >= {*FAULTS} - {
        *EXCEPTIONS,
        *BAD_OBSERVATIONS,
    }
    lines = table({}, "raise")
    assert sum(line.count("not run") for line in lines) == len(
        [
            cell
            for cell in CELLS
            if (cell.policy, cell.start_method) == ("raise", "zygote")
        ]
    )
