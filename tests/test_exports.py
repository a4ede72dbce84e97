"""Public names exist, and are documented, packaged and pinned."""

import ast
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest
import yaml
from setuptools import find_packages

import envherd
import envherd.executor
from envherd.executor.facades import needing
from envherd.workers import errors
from tests import extras
from tests.extras import PACKAGES, needs

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CONSTRAINTS = (ROOT / "constraints.txt").read_text().splitlines()
LAYERS = ("shm", "workers", "executor")
PUBLIC = (
    "envherd",
    "envherd.executor",
    "envherd.executor.testing",
    "envherd.workers.adapters",
    "envherd.workers.testing",
)


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
    assert (
        set(envherd.executor.__all__)
        <= set(envherd.__all__)
        <= envherd._HOMES.keys()
        == set(dir(envherd)) - {"__version__", *envherd._FACADES}
    )
    assert envherd.ParallelEnv is envherd.executor.ParallelEnv
    assert envherd.__version__ == importlib.metadata.version("envherd")
    with pytest.raises(AttributeError, match="has no attribute 'ParalelEnv'"):
        _ = envherd.ParalelEnv


def test_the_package_imports_nothing_until_it_is_asked():
    heavy = ("envherd.", "torch", "numpy")
    code = f"import sys, envherd; print([name for name in sys.modules if name.startswith({heavy})])"
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == "['envherd.moved']"


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
        named = (
            base.value if isinstance(base, ast.Subscript) else base
            for base in node.bases
        )
        return [ast.unparse(base).rpartition(".")[2] for base in named]

    def is_documented(name: str, method: str, seen: frozenset[str]) -> bool:
        return any(
            any(
                isinstance(m, ast.FunctionDef)
                and m.name == method
                and ast.get_docstring(m)
                for m in node.body
            )
            or any(
                is_documented(base, method, seen | {name})
                for base in bases(node)
                if base not in seen
            )
            for node in classes.get(name, ())
        )

    lacking = {
        f"{name}.{method.name}"
        for name, nodes in classes.items()
        if not name.startswith("_")
        for node in nodes
        for method in node.body
        if isinstance(method, ast.FunctionDef) and not method.name.startswith("_")
        if not any(
            ast.unparse(one).endswith((".setter", "overload"))
            for one in method.decorator_list
        )
        if not ast.get_docstring(method)
        if not any(
            is_documented(base, method.name, frozenset({name})) for base in bases(node)
        )
    }
    assert lacking == set()


def test_the_extra_that_a_test_lacks_is_named(monkeypatch):
    monkeypatch.setitem(PACKAGES, "ray", ("no_such_package_x",))
    assert extras.needs("gymnasium", "ray").kwargs == {"reason": "needs envherd[ray]"}
    with pytest.raises(pytest.skip.Exception, match=r"needs envherd\[ray\]"):
        extras.skip_without("gymnasium", "ray")


def test_every_exception_is_exported():
    raised = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.EnvherdError)
    }
    assert raised <= set(envherd.executor.__all__)


def test_every_folder_of_code_is_packaged():
    folders = {
        file.parent.relative_to(ROOT)
        for layer in LAYERS
        for file in (ROOT / layer).rglob("*.py")
    }
    packages = {
        "envherd",
        *(".".join(("envherd", *folder.parts)) for folder in folders),
    }
    assert packages == set(find_packages(str(ROOT), include=["envherd*"]))
    for package in packages:
        # Not imported: a facade needs an extra.
        assert importlib.util.find_spec(package).origin, f"{package} has no __init__.py"


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


#: Facade, names, the package without which they cannot be imported, and the extra that brings it. RLlib's facade uses
#: PettingZoo's, and does not bring PettingZoo, so only PettingZoo's names for its own envs need it.
FACADES = [
    ("cleanrl", "*", "gymnasium", "gymnasium"),
    ("gymnasium", "*", "gymnasium", "gymnasium"),
    ("pettingzoo", "*", "gymnasium", "pettingzoo"),
    ("rllib", "*", "ray", "rllib"),
    ("sb3", "*", "stable_baselines3", "sb3"),
    ("torchrl", "*", "torchrl", "torchrl"),
    ("pettingzoo", "parallel_env", "pettingzoo", "pettingzoo"),
]
#: Imports all public names without any extra, then each facade without its package.
HIDING = """
import gc, importlib.machinery, inspect, json, sys

class Finder(importlib.machinery.PathFinder):
    hidden, facades = json.loads(sys.argv[1])

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name in cls.hidden else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = Finder
from envherd import *
import envherd
print(len(inspect.getmembers(envherd)))
for facade, names, package, _ in Finder.facades:
    Finder.hidden = [package]
    try:
        exec(f"from envherd.{facade} import {names}")
        print(facade, "was imported")
    except ImportError as error:
        print(facade, error.name, error)
gc.freeze()  # the end would take a second to collect what was imported
"""


@needs("gymnasium")
@needs("torchrl")
def test_star_import_hides_no_name_of_gymnasium_or_torchrl():
    import gymnasium
    import torchrl.data

    theirs = {*gymnasium.__all__, *gymnasium.spaces.__all__, *dir(torchrl.data)}
    assert (
        envherd._HOMES.keys() & theirs
        == envherd._HOMES.keys() - set(envherd.__all__)
        != set()
    )


@pytest.mark.slow
def test_facade_without_its_library_names_the_extra():
    hidden = sorted(
        {"yaml", *(package for packages in PACKAGES.values() for package in packages)}
    )
    command = [sys.executable, "-c", HIDING, json.dumps([hidden, FACADES])]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    num_names, *refusals = done.stdout.splitlines()
    assert int(num_names) > len(envherd.__all__)
    assert refusals == [
        f"{facade} {package} importing a facade failed: expected the package {package}, which is not installed. "
        f'Install it: pip install "envherd[{extra}]".'
        for facade, _, package, extra in FACADES
    ]


@pytest.mark.parametrize("facade", envherd._FACADES)
def test_a_facade_has_the_names_that_the_package_names_elsewhere(facade):
    assert (facade in dir(envherd)) is all(
        map(importlib.util.find_spec, envherd._FACADES[facade])
    )

    text = (ROOT / "envherd" / facade).with_suffix(".py").read_text()
    listed = re.search(r"^__all__ = \[(.*?)\]", text, re.MULTILINE | re.DOTALL)[1]
    assert set(re.findall(r'"(\w+)"', listed)).issuperset(
        there
        for where, _, there in (
            path.partition(".") for path in envherd._ELSEWHERE.values()
        )
        if where == facade
    )


@pytest.mark.parametrize(
    ("facade", "package", "extra"), [(facade, *more) for facade, _, *more in FACADES]
)
def test_the_host_is_a_direct_base_of_its_classes(facade, package, extra):
    """Some libraries look at the direct bases only, such as skrl's `wrap_env`."""
    extras.skip_without(extra)
    module = importlib.import_module(f"envherd.{facade}")
    public = {name: getattr(module, name) for name in module.__all__}

    def of_host(classes: Iterable[type]) -> bool:
        return any(cls.__module__.startswith(f"{package}.") for cls in classes)

    hosted = [
        one for one in public.values() if inspect.isclass(one) and of_host(one.__mro__)
    ]
    assert [cls.__name__ for cls in hosted if not of_host(cls.__bases__)] == []


@needs("gymnasium")
def test_a_facade_is_an_attribute_of_the_package_and_hides_no_library():
    assert envherd.gymnasium.AsyncVectorEnv.__module__.startswith("envherd.")
    assert importlib.import_module("gymnasium").__name__ == "gymnasium"
    with pytest.raises(
        AttributeError, match=r"no attribute 'gymnasum'\. Did you mean gymnasium\?"
    ):
        _ = envherd.gymnasum


def test_missing_dependency_of_a_library_does_not_make_the_library_missing():
    with (
        pytest.raises(
            ModuleNotFoundError, match=r"^No module named 'no_such_package_x'$"
        ),
        needing("it", "numpy"),
    ):
        importlib.import_module("no_such_package_x")


def test_the_console_script_is_there():
    (script,) = (
        s
        for s in importlib.metadata.entry_points(group="console_scripts")
        if s.name == "envherd"
    )
    assert callable(script.load())


#: Extras that pin versions of other packages which the rest does not take.
APART = {"browsergym", "highway", "robotics", "nle", "metaworld", "maniskill", "rllib"}


def test_the_extra_all_has_every_other_extra_but_those_of_developers():
    extras = PYPROJECT["project"]["optional-dependencies"]
    lines = [re.match(r"envherd\[(.*)\]", one) for one in extras["all"]]
    named = [name for line in lines if line is not None for name in line[1].split(",")]
    assert sorted(named) == sorted(set(extras) - {"all", "dev", "docs"} - APART)


def test_every_extra_that_a_test_may_need_can_be_installed():
    assert set(PACKAGES) <= set(PYPROJECT["project"]["optional-dependencies"])


def test_constraints_are_pins_and_nothing_else():
    for line in CONSTRAINTS:
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!_]+", line), line
    names = [normalized(line) for line in CONSTRAINTS]
    assert len(names) == len(set(names))


def test_every_dependency_is_pinned():
    extras = PYPROJECT["project"]["optional-dependencies"]
    wanted = [
        *PYPROJECT["project"]["dependencies"],
        *(r for name in set(extras) - APART for r in extras[name]),
    ]
    wanted = [
        requirement for requirement in wanted if not requirement.startswith("envherd[")
    ]
    assert {normalized(requirement) for requirement in wanted} <= {
        normalized(line) for line in CONSTRAINTS
    }


@pytest.mark.parametrize("name", envherd._GONE)
def test_names_that_are_gone_say_what_to_use(name):
    with pytest.raises(
        ImportError,
        match=rf"importing {name} failed: envherd has it no more. Instead: \w+",
    ):
        getattr(envherd, name)
    assert name not in (*envherd._HOMES, *envherd._FACADES, *envherd.__all__)


@needs("gymnasium", "sb3", "torchrl")
@pytest.mark.parametrize(
    ("module", "name"), [("sb3", "ExecutorVecEnv"), ("torchrl", "AsyncEnvPool")]
)
def test_names_of_facades_that_are_gone_say_what_to_use(module, name):
    module = getattr(envherd, module)
    with pytest.raises(ImportError, match="has it no more"):
        getattr(module, name)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = module.nothing
