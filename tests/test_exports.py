"""Public names exist, and are documented, packaged and pinned."""

from __future__ import annotations

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
from envherd.workers import errors

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CONSTRAINTS = (ROOT / "constraints.txt").read_text().splitlines()
LAYERS = ("shm", "workers", "executor", "benchmarks")
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
    for layer in LAYERS:
        assert (ROOT / layer / "py.typed").is_file()


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
