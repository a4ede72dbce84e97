"""Run the tests with the oldest and newest versions of this package's dependencies; write docs/reports/versions.md.

    python -m tools.compat                       # every row: an hour or two; 6 GB of disk at a time
    python -m tools.compat --rows "3.12|0.13"    # rows whose name has one of these, added to the page
    python -m tools.compat --above               # the oldest libraries above this environment: a minute; no page
    python -m tools.compat --released            # the newest releases for this Python, beyond the bounds too; no page

*Oldest* is the lower bound of every requirement in `pyproject.toml`, exactly; *newest* is what pip chooses within the
bounds; *released* is what it chooses without them. Each is installed into a separate environment, which is deleted
afterwards (unless `--keep`). Rows with another name add a few versions to one of them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reports" / "versions.md"
PYTHONS = ("3.11", "3.12", "3.13")
THIS_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
#: Distribution -> its name in the table.
SHOWN = {
    "torch": "torch",
    "tensordict": "TensorDict",
    "torchrl": "TorchRL",
    "gymnasium": "Gymnasium",
    "stable-baselines3": "SB3",
    "ray": "Ray",
    "numpy": "NumPy",
    "mujoco": "MuJoCo",
    "pettingzoo": "PettingZoo",
    "envpool": "EnvPool",
}
FACADES = ("torchrl", "gymnasium", "sb3")
ENVS = ("mujoco", "pettingzoo", "envpool")
EXTRAS = (*FACADES, *ENVS)
#: Extras of RLlib's separate environment, because RLlib pins Gymnasium.
RLLIB = "RLlib"
RLLIB_EXTRAS = ("rllib", "pettingzoo", "meltingpot")
#: An environment without TorchRL, which may lag a minor version behind TensorDict.
ALONE = "without TorchRL"
#: An environment with dm_control, which needs an older MuJoCo.
WITH_DM_CONTROL = "dm_control"
#: Libraries whose oldest versions can be put above any environment: only they are compiled against themselves.
ABOVE = ("tensordict", "torchrl", "gymnasium", "stable-baselines3", "cloudpickle")
#: Packages of the extra `dev` that tests need; the others check sources.
TOOLS = ("pytest", "pytest-timeout", "pytest-xdist", "pytest-randomly", "hypothesis")
#: Heading -> tests, as patterns below `tests/`.
GROUPS = {
    "core": (
        "executor/protocol/test_fast_calls.py",
        "executor/protocol/test_losses.py",
        "executor/rollouts/test_rollout.py",
        "executor/protocol/test_stepping.py",
        "executor/batches/test_tensordict_access.py",
        "workers/test_loop.py",
    ),
    "Gymnasium": (
        "executor/facades/test_gymnasium_*.py",
        "workers/test_gymnasium_*.py",
    ),
    "SB3": (
        "executor/facades/test_sb3_equality.py",
        "executor/facades/test_sb3_vec_env.py",
    ),
    "TorchRL": ("executor/facades/test_torchrl_*.py", "workers/test_torchrl_*.py"),
    "envs": (
        "contracts/test_matrix.py",
        "executor/facades/test_pettingzoo_vector_env.py",
        "executor/protocol/test_branch_families.py",
        "executor/protocol/test_saving.py",
        "workers/test_dm_env_adapter.py",
        "workers/test_envpool.py",
        "workers/test_pettingzoo_*.py",
        "workers/test_snapshot.py",
    ),
    RLLIB: ("executor/facades/test_rllib.py", "executor/facades/test_faults.py"),
}

#: Tests of `--above`, below `tests/`: oldest and newest differ most in TorchRL and Gymnasium.
RUN_ABOVE = (
    "executor/facades/test_torchrl_parallel.py",
    "executor/facades/test_torchrl_private.py",
    "executor/facades/test_gymnasium_equality.py",
    "executor/facades/test_gymnasium_spaces.py",
    "executor/facades/test_sb3_equality.py",
)


#: What a row runs, unless it is for a few tests.
USUAL = tuple(group for group in GROUPS if group != RLLIB)


class Row(NamedTuple):
    """One row of the page.

    Attributes:
        python: its minor version, `3.11`.
        which: `oldest`, `newest`, `released`, or the difference.
        groups: the headings whose tests are run.
        end: the environment: a key of `ENDS`.
        on_top: packages installed over it only for this row, without dependencies.
    """

    python: str
    which: str
    groups: tuple[str, ...]
    end: str
    on_top: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name that `--rows` searches, and the key of its outcome."""
        return f"{self.python}, {self.which}"

    @property
    def environment(self) -> str:
        """The name of its environment's folder."""
        return f"{self.python}-{self.end.replace(' ', '-')}"


def rows() -> list[Row]:
    """Return all rows: the ends for every Python, and every minor version of TorchRL between them for the first."""
    found: list[Row] = []
    first = PYTHONS[0]
    for python in PYTHONS:
        # The oldest MuJoCo has no wheel for the last Python, so only the first has the oldest of envs.
        found.append(
            Row(
                python,
                "oldest",
                USUAL,
                "oldest" if python == first else "oldest facades",
            )
        )
        found.append(Row(python, "newest", USUAL, "newest"))
    found.append(Row(first, RLLIB, (RLLIB,), RLLIB))
    found.append(Row(first, ALONE, ("core", "Gymnasium", "SB3"), ALONE))
    found.append(Row(first, WITH_DM_CONTROL, ("envs",), WITH_DM_CONTROL))
    for version in torchrl_versions()[1:-1]:
        pins = (f"torchrl=={version}.*", f"tensordict=={version}.*")
        found.append(Row(first, f"TorchRL {version}", ("TorchRL",), "newest", pins))
    return sorted(
        found, key=lambda row: (PYTHONS.index(row.python), row.which != "oldest")
    )


def released_rows() -> list[Row]:
    """Return the rows of the newest releases for this Python: all, and TensorDict's without TorchRL."""
    found = (("released", USUAL), (f"released {ALONE}", ("core",)))
    return [Row(THIS_PYTHON, which, groups, which) for which, groups in found]


def torchrl_versions() -> list[str]:
    """Return the minor versions of TorchRL within the bounds, the oldest first."""
    bounds = {
        one.operator: Version(one.version) for one in _requirement("torchrl").specifier
    }
    return [f"0.{minor}" for minor in range(bounds[">="].minor, bounds["<"].minor)]


def requirements(extras: tuple[str, ...] = EXTRAS) -> list[Requirement]:
    """Return this package's requirements with some extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = [
        *project["dependencies"],
        *(one for extra in extras for one in project["optional-dependencies"][extra]),
    ]
    return [Requirement(text) for text in dict.fromkeys(texts)]


def oldest(requirement: Requirement) -> str:
    """Return a requirement of exactly the lower bound."""
    lower = [one.version for one in requirement.specifier if one.operator == ">="]
    marker = f"; {requirement.marker}" if requirement.marker else ""
    return f"{requirement.name}=={lower[0]}{marker}" if lower else str(requirement)


def unbounded(requirement: Requirement) -> str:
    """Return a requirement of any version; pip chooses the newest that the others allow."""
    marker = f"; {requirement.marker}" if requirement.marker else ""
    return f"{requirement.name}{marker}"


#: Environment -> its extras, and what makes a text for pip from a requirement.
ENDS: dict[str, tuple[tuple[str, ...], Callable[[Requirement], str]]] = {
    "oldest": (EXTRAS, oldest),
    "oldest facades": (FACADES, oldest),
    "newest": (EXTRAS, str),
    RLLIB: (RLLIB_EXTRAS, str),
    ALONE: (FACADES[1:], str),
    WITH_DM_CONTROL: ((*EXTRAS, "dm-control"), str),
    "released": (EXTRAS, unbounded),
    f"released {ALONE}": (FACADES[1:], unbounded),
}


def _requirement(name: str) -> Requirement:
    return next(one for one in requirements() if one.name == name)


# ---- running ---------------------------------------------------------------------------------


def find_python(version: str) -> str | None:
    """Return an interpreter of a minor version: from PATH, or from pyenv's folder."""
    if version == THIS_PYTHON:
        return sys.executable
    inside = sorted(
        (Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python")
    )
    for candidate in (shutil.which(f"python{version}"), *map(str, inside)):
        if (
            candidate
            and subprocess.run(
                [candidate, "--version"], capture_output=True, check=False
            ).returncode
            == 0
        ):
            return candidate
    return None


def make(folder: Path, interpreter: str, wanted: list[str]) -> Path:
    """Make an environment unless it is there; return its interpreter."""
    python = folder / "bin" / "python"
    if not (folder / ".complete").exists():
        subprocess.run([interpreter, "-m", "venv", "--clear", folder], check=True)
        if any(one.startswith("dm-meltingpot") for one in wanted):
            install: list[Any] = [
                python,
                ROOT / "envherd" / "install_meltingpot.py",
                "-c",
                ROOT / "constraints.txt",
            ]
            subprocess.run(install, check=True)
        subprocess.run([*_pip(python), *wanted, *TOOLS], check=True)
        (folder / ".complete").touch()
    return python


def run(row: Row, folder: Path, jobs: str) -> dict[str, Any]:
    """Install a row's packages, run its tests, and return its outcome."""
    interpreter = find_python(row.python)
    if interpreter is None:
        raise SystemExit(
            f"{row.name} failed: expected python{row.python} on PATH or in pyenv, got none."
        )
    extras, text_of = ENDS[row.end]
    python = make(
        folder / row.environment,
        interpreter,
        [text_of(one) for one in requirements(extras)],
    )
    path = [str(ROOT)]
    if row.on_top:
        path.insert(
            0, put_above(python, folder / row.name.replace(" ", "-"), row.on_top)
        )
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "ENVHERD_UNSAMPLED": "1",
    }
    report = folder / f"{row.name.replace(' ', '-')}.xml"
    files = [str(file) for group in row.groups for file in _files(group)]
    subprocess.run(
        [*_pytest(python, jobs), f"--junitxml={report}", *files],
        cwd=ROOT,
        env=env,
        check=False,
    )
    listing = subprocess.run(
        [python, "-c", _VERSIONS], env=env, capture_output=True, text=True, check=True
    )
    return {**json.loads(listing.stdout), "groups": _counted(report)}


def run_above(folder: Path, jobs: str) -> int:
    """Run quick tests of the facades with the oldest libraries above this environment; return pytest's exit code."""
    above = put_above(
        sys.executable,
        folder / "above",
        [oldest(one) for one in requirements() if one.name in ABOVE],
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((above, str(ROOT)))}
    files = [str(ROOT / "tests" / file) for file in RUN_ABOVE]
    command = [*_pytest(sys.executable, jobs), "-m", "not slow and not long", *files]
    return subprocess.run(command, cwd=ROOT, env=env, check=False).returncode


def put_above(python: Any, folder: Path, wanted: Sequence[str]) -> str:
    """Install packages without their dependencies into a folder for PYTHONPATH, and return it."""
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run(
        [*_pip(python), "--no-deps", "--target", folder, *wanted], check=True
    )
    return str(folder)


def _pytest(python: Any, jobs: str) -> list[Any]:
    return [python, "-m", "pytest", "-q", "-n", jobs, "-p", "no:cacheprovider"]


#: Prints the versions that tests import.
_VERSIONS = f"""
import importlib.metadata, json, platform
def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "-"
print(json.dumps({{"python": platform.python_version(), "versions": {{n: version(n) for n in {tuple(SHOWN)!r}}}}}))
"""


def _pip(python: Any) -> list[Any]:
    return [
        python,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "-qq",
        "--progress-bar",
        "off",
        "--no-compile",
    ]


def _files(group: str) -> Iterator[Path]:
    for pattern in GROUPS[group]:
        yield from sorted((ROOT / "tests").glob(pattern))


def _counted(report: Path) -> dict[str, dict[str, Any]]:
    """Return, for each heading, how many tests passed and were skipped, and which failed."""
    of_module = {
        ".".join(f.relative_to(ROOT).with_suffix("").parts): g
        for g in GROUPS
        for f in _files(g)
    }
    counts: dict[str, dict[str, Any]] = {}
    for case in ET.parse(report).getroot().iter("testcase"):
        module = next(
            (
                name
                for name in of_module
                if f"{case.get('classname')}.".startswith(f"{name}.")
            ),
            None,
        )
        # A file that is skipped, or fails, as it is collected has its module as the name of the case.
        group = of_module.get(module or str(case.get("name")), "core")
        count = counts.setdefault(group, {"passed": 0, "skipped": 0, "failed": []})
        if case.find("failure") is not None or case.find("error") is not None:
            count["failed"].append(f"{case.get('classname')}::{case.get('name')}")
        else:
            count["passed" if case.find("skipped") is None else "skipped"] += 1
    return counts


# ---- the page --------------------------------------------------------------------------------

_INTRODUCTION = """# Versions

Written by `make compat`, which makes an environment for each row, installs the versions in it and runs the tests of the
headings on the right there (`tools/compat.py` lists the files). *Oldest* has the lower bound of each requirement in
`pyproject.toml`, *newest* what pip chose within the bounds; the other rows change a few versions of one of the two.
Each minor version of TorchRL needs the TensorDict of the same number, which may not be the newest. RLlib has a separate
environment, because it pins Gymnasium, and so has dm_control, which needs MuJoCo 3. EnvPool 1.2.6 and later have no
wheel for Python 3.11. IsaacLab's own classes run over stubs (`make test-isaaclab`). Continuous integration runs the
versions of `constraints.txt` with `make test` and `make test-long`, quick tests of the oldest with `make test-oldest`,
and the newest releases, also beyond the bounds, with `make test-newest`. Cells are numbers of tests that passed; tests
of other extras, or of things that a version lacks, are skipped. Tests with deadlines may fail on a busy machine.

"""


#: Name of a row -> its line, and the names of the tests that failed.
Outcomes = dict[str, tuple[str, list[str]]]


def page(outcomes: Outcomes) -> str:
    """Return the text of docs/reports/versions.md."""
    heads = [
        "Python",
        "",
        *SHOWN.values(),
        *(f"tests: {group}" for group in GROUPS),
        "run on",
    ]
    lines = [_line(heads), _line(["---"] * len(heads))]
    names = [row.name for row in rows() if row.name in outcomes]
    failed = [f"- {name}: `{test}`" for name in names for test in outcomes[name][1]]
    tail = "\n".join(["", "## What fails", "", *failed, ""]) if failed else ""
    return (
        _INTRODUCTION
        + "\n".join([*lines, *(outcomes[name][0] for name in names)])
        + "\n"
        + tail
    )


def read_page() -> Outcomes:
    """Return the rows of docs/reports/versions.md."""
    found: Outcomes = {}
    for line in PAGE.read_text().splitlines():
        if match := re.match(r"\| (\d+\.\d+)\.\d+ \| ([^|]+) \|", line):
            found[f"{match[1]}, {match[2]}"] = (line, [])
        elif match := re.match(r"- ([^:]+): `(.+)`$", line):
            found[match[1]][1].append(match[2])
    return found


def outcome(row: Row, ran: dict[str, Any]) -> tuple[str, list[str]]:
    """Return a row's line of the page and its failed tests."""
    cells = [ran["python"], row.which, *(ran["versions"][name] for name in SHOWN)]
    line = _line(
        [
            *cells,
            *(_cell(ran["groups"].get(group)) for group in GROUPS),
            date.today().isoformat(),
        ]
    )
    return line, [test for group in ran["groups"].values() for test in group["failed"]]


def _cell(count: dict[str, Any] | None) -> str:
    if count is None or not count["passed"] + len(count["failed"]):
        return "-"
    return (
        f"{count['passed']}, {len(count['failed'])} fail"
        if count["failed"]
        else str(count["passed"])
    )


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> int:
    """Run rows and write the page; return 1 if a test failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--rows", default="", help="regular expression: rows whose names it finds"
    )
    parser.add_argument(
        "--above",
        action="store_true",
        help="the oldest libraries above this environment; no page",
    )
    parser.add_argument(
        "--released",
        action="store_true",
        help="the newest releases for this Python; no page",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=ROOT / "build" / "compat",
        help="where environments are made",
    )
    parser.add_argument(
        "--keep", action="store_true", help="leave the environments for the next run"
    )
    parser.add_argument(
        "--jobs", default="2", help="test files that run at the same time"
    )
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.above:
        return run_above(options.folder, options.jobs)
    known = released_rows() if options.released else rows()
    chosen = [row for row in known if re.search(options.rows, row.name)]
    has_failed = False
    for index, row in enumerate(chosen):
        print(f"== {row.name}", flush=True)
        ran = outcome(row, run(row, options.folder, options.jobs))
        if options.released:
            print(*ran, sep="\n")
        else:
            PAGE.write_text(page({**read_page(), row.name: ran}))
        has_failed |= bool(ran[1])
        if not options.keep and row.environment not in {
            one.environment for one in chosen[index + 1 :]
        }:
            shutil.rmtree(options.folder / row.environment)
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
