"""Public names exist, and are documented, packaged and pinned."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import importlib.util
import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from setuptools import find_packages

import envherd
import envherd.executor
from envherd.executor.facades import needing
from envherd.workers import errors
from tests.extras import PACKAGES, needs

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CONSTRAINTS = (ROOT / "constraints.txt").read_text().splitlines()
LAYERS = ("shm", "workers", "executor")
PUBLIC = ("envherd", "envherd.executor", "envherd.workers.adapters", "envherd.workers.testing")


def normalized(requirement: str) -> str:
    """Return the name in a requirement, as indexes compare names."""
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", requirement)[0]).lower()  # type: ignore[index]  # always one


@pytest.mark.parametrize("package", PUBLIC)
def test_all_is_sorted_and_there(package):
    module = importlib.import_module(package)
    assert list(module.__all__) == sorted(module.__all__)
    for name in module.__all__:
        assert hasattr(module, name), name
        assert set(module.__all__) <= set(dir(module))


def test_users_see_at_most_twenty_names():
    assert len(envherd.executor.__all__) <= 20


def test_all_names_are_in_one_place():
    assert set(envherd.executor.__all__) <= set(envherd.__all__) == envherd._HOMES.keys()
    assert envherd.ParallelEnv is envherd.executor.ParallelEnv
    assert envherd.__version__ == importlib.metadata.version("envherd")
    with pytest.raises(AttributeError, match="has no attribute 'ParalelEnv'"):
        _ = envherd.ParalelEnv


def test_the_package_imports_nothing_until_it_is_asked():
    heavy = ("envherd.", "torch", "numpy")
    code = f"import sys, envherd; print([name for name in sys.modules if name.startswith({heavy})])"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("package", PUBLIC)
def test_public_classes_and_functions_have_a_docstring(package):
    module = importlib.import_module(package)
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.isclass(value) or inspect.isroutine(value):
            assert inspect.getdoc(value), name


#: Class -> the protocol that documents its methods, where it is not a base class.
PROTOCOL_OF = {"SlabPool": "RecyclablePool", "BlockBatch": "Batch"}


def _classes() -> dict[str, list[ast.ClassDef]]:
    found: dict[str, list[ast.ClassDef]] = {}
    for layer in (*LAYERS, "benchmarks", "examples"):
        for file in sorted((ROOT / layer).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.ClassDef):
                    found.setdefault(node.name, []).append(node)
    return found


def test_public_methods_have_a_docstring_or_inherit_one():
    classes = _classes()

    def bases(node: ast.ClassDef) -> list[str]:
        named = (base.value if isinstance(base, ast.Subscript) else base for base in node.bases)
        own = [ast.unparse(base).rpartition(".")[2] for base in named]
        return [*own, *([PROTOCOL_OF[node.name]] if node.name in PROTOCOL_OF else [])]

    def is_documented(name: str, method: str, seen: frozenset[str]) -> bool:
        return any(
            any(isinstance(m, ast.FunctionDef) and m.name == method and ast.get_docstring(m) for m in node.body)
            or any(is_documented(base, method, seen | {name}) for base in bases(node) if base not in seen)
            for node in classes.get(name, ())
        )

    lacking = {
        f"{name}.{method.name}"
        for name, nodes in classes.items()
        if not name.startswith("_")
        for node in nodes
        for method in node.body
        if isinstance(method, ast.FunctionDef) and not method.name.startswith("_")
        if not any(ast.unparse(one).endswith((".setter", "overload")) for one in method.decorator_list)
        if not ast.get_docstring(method)
        if not any(is_documented(base, method.name, frozenset({name})) for base in bases(node))
    }
    assert lacking == set()


def test_every_exception_is_exported():
    raised = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.EnvherdError)
    }
    assert raised <= set(envherd.executor.__all__)


def test_every_folder_of_code_is_packaged():
    folders = {file.parent.relative_to(ROOT) for layer in LAYERS for file in (ROOT / layer).rglob("*.py")}
    packages = {"envherd", *(".".join(("envherd", *folder.parts)) for folder in folders)}
    assert packages == set(find_packages(str(ROOT), include=["envherd*"]))
    for package in packages:
        spec = importlib.util.find_spec(package)  # not imported: a facade needs an extra
        assert getattr(spec, "origin", None), f"{package} has no __init__.py"


@pytest.mark.parametrize("layer", LAYERS)
def test_the_package_links_to_the_folders(layer):
    assert (ROOT / "envherd" / layer).is_symlink()
    assert (ROOT / "envherd" / layer).samefile(ROOT / layer)


def test_the_citation_has_the_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    for name in ("version", "license", "authors"):
        assert citation[name] == PYPROJECT["project"][name]


def test_types_are_shipped():
    for folder in ("envherd", *LAYERS):  # type checkers look in the first (PEP 561)
        assert (ROOT / folder / "py.typed").is_file()


HIDING = """
import importlib.machinery, sys

class Finder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name in sys.argv[2:] else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = Finder
exec(sys.argv[1])
"""


def hiding(packages, code):
    """Run code in a new process that does not find some packages; return what it prints."""
    command = [sys.executable, "-c", HIDING, code, *packages]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_every_public_name_can_be_imported_without_any_extra():
    hidden = sorted({"yaml", *(package for packages in PACKAGES.values() for package in packages)})
    code = "from envherd import *; import envherd, inspect; print(len(inspect.getmembers(envherd)))"
    assert int(hiding(hidden, code)) > len(envherd.__all__)


FACADES = {
    "cleanrl": ("gymnasium", "gymnasium"),
    "gymnasium": ("gymnasium", "gymnasium"),
    "pettingzoo": ("gymnasium", "pettingzoo"),
    "rllib": ("ray", "rllib"),
    "sb3": ("stable_baselines3", "sb3"),
    "torchrl": ("torchrl", "torchrl"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FACADES)
def test_a_facade_without_its_library_names_the_extra(name):
    package, extra = FACADES[name]
    code = f"""
try:
    from envherd.executor.facades.{name} import *
except ImportError as error:
    print(error.name, error)
"""
    assert hiding([package], code) == (
        f"{package} importing a facade failed: expected the package {package}, which is not installed. Install it: pip "
        f'install "envherd[{extra}]".'
    )


def test_a_library_that_lacks_a_package_of_its_own_is_not_taken_for_missing():
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'no_such_package_x'$"), needing("it", "library"):
        importlib.import_module("no_such_package_x")


@needs("gymnasium")
@pytest.mark.slow
def test_pettingzoos_facade_imports_pettingzoo_for_its_own_envs_alone():
    """RLlib's facade uses it, and the extra `rllib` does not bring PettingZoo."""
    code = """
from envherd.executor.facades import pettingzoo
try:
    pettingzoo.parallel_env
except ImportError as error:
    print(error)
"""
    assert hiding(["pettingzoo"], code).endswith('Install it: pip install "envherd[pettingzoo]".')


def test_the_console_script_is_there():
    (script,) = (s for s in importlib.metadata.entry_points(group="console_scripts") if s.name == "envherd")
    assert callable(script.load())


#: Extras that pin versions of other packages which the rest does not take.
APART = {"browsergym", "highway", "robotics", "nle", "metaworld", "maniskill", "rllib"}


def test_the_extra_all_has_every_other_extra_but_those_of_developers():
    extras = PYPROJECT["project"]["optional-dependencies"]
    lines = [re.match(r"envherd\[(.*)\]", one) for one in extras["all"]]
    named = [name for line in lines if line is not None for name in line[1].split(",")]
    assert sorted(named) == sorted(set(extras) - {"all", "dev", "docs"} - APART)


def test_constraints_are_pins_and_nothing_else():
    for line in CONSTRAINTS:
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!_]+", line), line
    names = [normalized(line) for line in CONSTRAINTS]
    assert len(names) == len(set(names))


def test_every_dependency_is_pinned():
    extras = PYPROJECT["project"]["optional-dependencies"]
    wanted = [*PYPROJECT["project"]["dependencies"], *(r for name in set(extras) - APART for r in extras[name])]
    wanted = [requirement for requirement in wanted if not requirement.startswith("envherd[")]
    assert {normalized(requirement) for requirement in wanted} <= {normalized(line) for line in CONSTRAINTS}
