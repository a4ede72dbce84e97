"""The contract on real envs of every family, through the executors with all pools."""

import pytest

from envherd.executor.testing import Contract
from tests.contracts.executor_batch import BATCHES
from tests.contracts.families import FAMILIES
from tests.extras import skip_without
from tests.scale import scaled

#: In an ordinary run the matrix covers processes of other families; it also drives them through both executors.
IN_PROCESSES = scaled(("gymnasium_cartpole",), full=tuple(FAMILIES))
CASES = [
    (name, how)
    for name, family in FAMILIES.items()
    for how in BATCHES
    if family.is_ordinary
    or (how == "serial" and not family.is_slow and not family.is_only_in_full)
    if how == "serial" or name in IN_PROCESSES
]


@pytest.mark.sampled(3)
@pytest.mark.slow
# Warnings of the envs.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize(("name", "batch"), CASES)
def test_every_rule_holds(name: str, batch: str) -> None:
    family = FAMILIES[name]
    skip_without(family.extra)
    report = Contract(
        family.make_env, num_steps=family.num_steps, make_batch=BATCHES[batch]
    ).check_all()
    assert report.num_ends > 1
