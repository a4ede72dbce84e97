"""Files for the host of the source: workflows call targets of the Makefile, forms ask for what helps."""

from __future__ import annotations

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
FORMS = sorted(path for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")
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
    return [line for step in steps if "run" in step for line in step["run"].splitlines()]


def goals_of(command: str) -> tuple[list[str], dict[str, str]]:
    """Return the targets and the variables of a call of make."""
    words = shlex.split(command.partition("#")[0])[1:]
    return [word for word in words if "=" not in word], dict(word.split("=", 1) for word in words if "=" in word)


@pytest.mark.parametrize("path", WORKFLOWS, ids=name_of)
def test_a_workflow_runs_targets_that_exist_with_variables_that_they_read(path):
    calls = [goals_of(command) for command in commands_of(path) if command.startswith("make ")]
    assert calls
    for goals, variables in calls:
        assert set(goals) <= TARGETS
        assert all(
            re.search(rf"^(\w+: )?{name} \??:?=|\$[({{]{name}[)}}]", MAKEFILE, re.MULTILINE) for name in variables
        )
    others = {command for command in commands_of(path) if not command.startswith("make ")}
    assert others <= {"git config --global core.symlinks true"}, "what a job does can be repeated by make"


@pytest.mark.parametrize("path", WORKFLOWS, ids=name_of)
def test_a_workflow_has_few_rights_and_pins_its_actions(path):
    workflow = loaded(path)
    assert True in workflow, "YAML reads the key `on` as true"
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        assert job.get("permissions") in (None, {"id-token": "write"} if name == "publish" else None)
        assert all(
            re.fullmatch(r"[\w./-]+@(v\d+|release/v\d+)", step["uses"]) for step in job["steps"] if "uses" in step
        )


def test_only_a_tag_publishes_and_after_all_that_was_built():
    jobs = loaded(GITHUB / "workflows" / "release.yml")["jobs"]
    assert set(jobs["publish"]["needs"]) == set(jobs) - {"publish"}
    assert (jobs["publish"]["if"], jobs["publish"]["environment"]) == ("github.event_name == 'push'", "release")


def test_targets_that_the_script_of_continuous_integration_runs_exist():
    calls = re.findall(r"^(?:exec )?(make .*)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert calls
    assert {goal for call in calls for goal in goals_of(call)[0]} <= TARGETS


def test_make_knows_its_targets_and_help_names_only_those():
    phony = set(re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)[1].split())
    assert phony <= TARGETS | {"help"}
    helped = {name for line in re.findall(r'@echo "make ([^"]*)', MAKEFILE) for name in line.split("  ")[0].split()}
    assert helped <= TARGETS
    done = subprocess.run(["make", "-n", *sorted(phony - {"docs-serve"})], cwd=ROOT, capture_output=True, text=True)  # noqa: PLW1510
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", FORMS, ids=name_of)
def test_a_form_has_what_the_host_wants_of_it(path):
    form = loaded(path)
    assert {"name", "description", "body"} <= form.keys()
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert len({field["id"] for field in fields}) == len(fields)
    assert all(field["attributes"]["label"] for field in fields)
    assert any("envherd doctor" in field["attributes"]["label"] for field in fields)


def test_the_form_for_custom_envs_asks_for_factory_doctor_and_check():
    body = loaded(GITHUB / "ISSUE_TEMPLATE" / "custom_env.yml")["body"]
    needed = {field["id"] for field in body if field.get("validations", {}).get("required")}
    assert {"factory", "doctor", "check"} <= needed


def test_updates_are_of_actions_and_packages():
    updates = loaded(GITHUB / "dependabot.yml")
    assert updates["version"] == 2
    assert {one["package-ecosystem"] for one in updates["updates"]} == {"github-actions", "pip"}


@pytest.mark.parametrize("name", ["SECURITY.md", "CODE_OF_CONDUCT.md"])
def test_pages_of_the_host_are_linked_and_their_links_have_targets(name):
    text = (ROOT / name).read_text()
    assert name in (ROOT / "CONTRIBUTING.md").read_text()
    for link in re.findall(r"\]\(([^)#]+)", text):
        assert link.startswith("https://") or (ROOT / link).is_file(), link
