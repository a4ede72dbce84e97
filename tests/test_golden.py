"""The golden traces of envs whose data are the same on every machine; `make golden` compares all of them."""

import json

import pytest

from tests.extras import skip_without

skip_without("torchrl", "sb3")  # their versions are part of the name of the file

from tools import golden


@pytest.mark.skipif(
    not golden.golden_file().exists(), reason="no traces are kept for these versions"
)
@pytest.mark.parametrize(
    "pattern", ["^(counting|agents)/", "^cartpole/gymnasium SameStep"]
)
@pytest.mark.long
def test_data_are_those_of_the_golden_traces(pattern):
    """A difference is listed by `python -m tools.golden`; a wanted one is recorded with `--write`."""
    kept = json.loads(golden.golden_file().read_text())
    found = dict(golden.record(pattern))
    assert found == {name: kept[name] for name in found}
    assert found
