"""Melting Pot's substrates import neither TensorFlow nor JAX, and all else works. Each test has a fresh process."""

import dataclasses
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from typing import Any

from tests.extras import skip_without

skip_without("meltingpot")

import pytest
import tree

from envherd.workers.adapters.meltingpot.light_import import mapping_dataclass

_INSTALL = """
import sys
from envherd.workers.adapters.meltingpot.light_import import install_lazy_import
install_lazy_import()
"""
_HEAVY = """
heavy = {'tensorflow', 'jax', 'jaxlib', 'keras', 'torch', 'tensordict'} & sys.modules.keys()
assert not heavy, heavy
"""
_PLAY = """
import numpy
from envherd.workers.adapters import find_adapter
env = factory()
adapter = find_adapter(env)(env)
adapter.reset(1)
adapter.step([numpy.zeros(2, int)])
adapter.reset(None)
"""


def _run(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "module"),
    [
        ("from meltingpot import substrate", "substrate"),
        ("import meltingpot", "meltingpot.substrate"),
    ],
)
def test_a_substrate_runs_without_tensorflow_and_jax(how: str, module: str) -> None:
    """Also from our factory. Its builder uses the Lua code that resets faster, and the import is small."""
    _run(
        f"""{_INSTALL}
{how}
kilobytes = int(next(line for line in open('/proc/self/status') if line.startswith('VmRSS')).split()[1])
assert kilobytes < 100_000, kilobytes
name = 'prisoners_dilemma_in_the_matrix__repeated'
from envherd.workers.adapters.meltingpot.factory import MeltingPotFactory
from envherd.workers.adapters.meltingpot.lua_tree import lua_root
for factory in (lambda: {module}.build(name, roles=['default'] * 2), MeltingPotFactory(name)):
{textwrap.indent(_PLAY, "    ")}
from meltingpot.utils.substrates import builder
assert builder._MELTINGPOT_ROOT == lua_root(is_ordered=False) is not None
{_HEAVY}"""
    )


@pytest.mark.full
@pytest.mark.slow
def test_nothing_is_missing_from_the_package() -> None:
    _run(
        _INSTALL
        + """
import meltingpot
import meltingpot.python
assert meltingpot.python is meltingpot
assert 'Melting Pot' in meltingpot.__doc__ and meltingpot.__file__.endswith('__init__.py')
assert {'bot', 'scenario', 'substrate'} <= set(dir(meltingpot))
assert not hasattr(meltingpot, 'nonsense')
from meltingpot.python import substrate
assert substrate is meltingpot.substrate
assert 'tensorflow' not in sys.modules
assert meltingpot.bot.build('noop_bot').step is not None  # imports TensorFlow
assert len(meltingpot.scenario.SCENARIOS) > 100
assert 'tensorflow' in sys.modules
"""
    )


@pytest.mark.long
def test_a_real_chex_is_there_for_everyone_else() -> None:
    _run(
        _INSTALL
        + """
from meltingpot import substrate
import chex
assert 'jax' not in sys.modules and not hasattr(chex, 'nonsense') and 'jax' not in sys.modules

@chex.dataclass
class Point:
    x: int
    y: int

import jax
assert jax.tree.map(lambda leaf: leaf + 1, Point(x=1, y=2)) == Point(x=2, y=3)
chex.assert_shape(jax.numpy.zeros((2,)), (2,))
assert type(chex) is type(sys) and chex.__version__
from meltingpot.utils.scenarios import scenario  # decorated by the real one, upon a class that was not
assert scenario.ScenarioObservables(action=1, timestep=2, events=3, dmlab2d=4, background=5, substrate=6)['action'] == 1
"""
    )


@pytest.mark.slow
def test_modules_imported_before_stay_unchanged() -> None:
    _run(
        """
import sys
import chex, jax
real = chex.dataclass
from envherd.workers.adapters.meltingpot.light_import import install_lazy_import
install_lazy_import()
install_lazy_import()
assert sum('LazyFinder' in type(finder).__name__ for finder in sys.meta_path) == 1
from meltingpot import substrate
env = substrate.build('prisoners_dilemma_in_the_matrix__repeated', roles=['default'] * 2)
assert chex.dataclass is real and type(chex) is type(sys)
assert len(jax.tree.leaves(env.observables())) == 6  # a real chex dataclass is a pytree
"""
    )


@pytest.mark.slow
def test_importing_chex_first_by_hand_gets_the_real_one() -> None:
    _run(
        _INSTALL
        + "import chex\nassert 'jax' in sys.modules and type(chex) is type(sys)\n"
    )


@mapping_dataclass(frozen=True)
class _Base:
    one: int
    two: tuple[int, ...]


@mapping_dataclass(frozen=True)
class _Derived(_Base):
    three: int


def test_mapping_dataclass_is_what_melting_pot_needs_of_chex() -> None:
    make: Any = _Derived
    value: Any = make(one=1, two=(2, 3), three=4)
    assert issubclass(make, Mapping)
    assert dict(value) == {"one": 1, "two": (2, 3), "three": 4}
    assert tree.map_structure(lambda leaf: -leaf, value) == make(
        one=-1, two=(-2, -3), three=-4
    )
    assert make({"one": 0, "two": (2, 3), "three": 4}) == dataclasses.replace(
        value, one=0
    )
    assert make.from_tuple(value.to_tuple()) == value
    with pytest.raises(dataclasses.FrozenInstanceError):
        value.one = 5
    with pytest.raises(TypeError):
        make(one=1, two=(), four=3)
