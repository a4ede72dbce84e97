"""Command words hold four numbers; phase words hold a worker's op and env."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envherd.workers.protocol import Flag, Op, describe_phase, pack, pack_phase, unpack


@given(
    st.sampled_from(Op), st.integers(0, 2**24 - 1), st.integers(0, 2**30), st.sampled_from([0, Flag.EACH])
)  # fmt: skip
def test_pack_and_unpack(op, target, column, flags):
    command = pack(op, target, column, flags)
    assert unpack(command) == (op, target, column, flags)
    assert 0 <= command < 2**63


@pytest.mark.parametrize(
    ("op", "phase_name"), [(Op.STEP, "step"), (Op.STEP_RESET, "step"), (Op.RESET, "reset")]
)  # fmt: skip
@pytest.mark.parametrize("env_id", [0, 1, 4711])
def test_phases_name_the_env(op, phase_name, env_id):
    assert describe_phase(pack_phase(op, env_id)) == (phase_name, env_id)


def test_zero_is_idle():
    assert describe_phase(0) == ("idle", None)
