"""Workflows call targets of the Makefile, have few rights, and publish only what was built."""

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([\w-]+)(?= *[\w-]* *:(?!=))", MAKEFILE, re.MULTILINE))


def name_of(path: Path) -> str:
    return path.name


def loaded(path: Path) -> dict[Any, Any]:
    found: dict[Any, Any] = yaml.safe_load(path.read_text())
    return found


def commands_of(path: Path) -> list[str]:
    """Return the lines that the jobs of a workflow run."""
    steps = [step for job in loaded(path)["jobs"].values() for step in job["steps"]]
    assert all(("run" in step) != ("uses" in step) for step in steps)
    return [
        line for step in steps if "run" in step for line in step["run"].splitlines()
    ]


def goals_of(command: str) -> tuple[list[str], dict[str, str]]:
    """Return the targets and the variables of a call of make."""
    words = shlex.split(command.partition("#")[0])[1:]
    return [word for word in words if "=" not in word], dict(
        word.split("=", 1) for word in words if "=" in word
    )


@pytest.mark.parametrize("path", WORKFLOWS, ids=name_of)
def test_a_workflow_runs_targets_that_exist_with_variables_that_they_read(path):
    calls = [
        goals_of(command)
        for command in commands_of(path)
        if command.startswith("make ")
    ]
    assert calls
    for goals, variables in calls:
        assert set(goals) <= TARGETS
        assert all(
            re.search(
                rf"^(\w+: )?{name} \??:?=|\$[({{]{name}[)}}]", MAKEFILE, re.MULTILINE
            )
            for name in variables
        )
    others = {
        command for command in commands_of(path) if not command.startswith("make ")
    }
    assert others <= {"git config --global core.symlinks true"}, (
        "what a job does can be repeated by make"
    )


@pytest.mark.parametrize("path", WORKFLOWS, ids=name_of)
def test_a_workflow_has_few_rights_and_pins_its_actions(path):
    workflow = loaded(path)
    assert True in workflow, "YAML reads the key `on` as true"
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        assert job.get("permissions") in (
            None,
            {"id-token": "write"} if name == "publish" else None,
        )
        assert all(
            re.fullmatch(r"[\w./-]+@(v\d+|release/v\d+)", step["uses"])
            for step in job["steps"]
            if "uses" in step
        )


def test_only_a_tag_publishes_and_after_all_that_was_built():
    jobs = loaded(GITHUB / "workflows" / "release.yml")["jobs"]
    assert set(jobs["publish"]["needs"]) == set(jobs) - {"publish"}
    assert (jobs["publish"]["if"], jobs["publish"]["environment"]) == (
        "github.event_name == 'push'",
        "release",
    )


def test_makefile_has_every_target_that_help_and_ci_name():
    phony = set(re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)[1].split())
    assert phony <= TARGETS | {"help"}
    helped = {
        name
        for line in re.findall(r'@echo "make ([^"]*)', MAKEFILE)
        for name in line.split("  ")[0].split()
    }
    called = re.findall(
        r"^(?:exec )?(make .*)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE
    )
    assert called
    assert helped.union(*(goals_of(call)[0] for call in called)) <= TARGETS
    done = subprocess.run(  # noqa: PLW1510
        ["make", "-n", *sorted(phony - {"docs-serve"})],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
